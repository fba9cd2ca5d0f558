"""A skipped step leaves weights, buffers and optimizer as they were, whichever optimizer steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Note, UpdateSkipped
from sdcwatch.testing import MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from two_calls import TWO_CALLS

BAD, STEPS = 4, 7
OPTIONS: dict[str, Any] = {"node": "n", "audit_every": 100, "telemetry": "off", "console": False}
Parameters = list[nn.Parameter]


class Lookahead(optim.Optimizer):
    """Slow weights in an attribute of its own, moved every second step, gradients or none."""

    def __init__(self, parameters: Parameters) -> None:
        self.inner, self.count = optim.SGD(parameters, lr=0.1, momentum=0.9), 0
        super().__init__(self.inner.param_groups, {})
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in self.slow.items():
                p.copy_(slow.lerp_(p, 0.5))


def muon_and_adamw(parameters: Parameters) -> list[optim.Optimizer]:
    return [
        optim.Muon([p for p in parameters if p.ndim == 2]),
        optim.AdamW([p for p in parameters if p.ndim != 2]),
    ]


# LBFGS is refused by name: tests/guard/test_api_errors.py.
OF_TORCH = {
    name: kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "Muon")
}
MADE: dict[str, Callable[[Parameters], list[optim.Optimizer]]] = {
    name: lambda parameters, kind=kind: [kind(parameters, lr=0.01)]
    for name, kind in OF_TORCH.items()
}
VARIANTS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "Adam amsgrad": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "NAdam with decay": lambda ps: optim.NAdam(ps, lr=0.01, momentum_decay=0.1),
    "Adagrad with decay": lambda ps: optim.Adagrad(ps, lr=0.01, lr_decay=0.1),
    "RMSprop centered": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "SGD with weight decay": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1),
}
MADE |= {name: lambda ps, make=make: [make(ps)] for name, make in VARIANTS.items()}
MADE["SGD with momentum"] = lambda ps: [optim.SGD(ps, lr=0.1, momentum=0.9)]
MADE["Lookahead"] = lambda ps: [Lookahead(ps)]
if hasattr(optim, "Muon"):  # since torch 2.9
    MADE["Muon and AdamW"] = muon_and_adamw
MADE["PowerSGD"] = MADE["SGD with momentum"]


def held(net: nn.Module, optimizers: list[optim.Optimizer]) -> list[Any]:
    found: list[Any] = [net.state_dict(), [o.state_dict() for o in optimizers]]
    for one in optimizers:
        if isinstance(one, Lookahead):
            found += [one.count, list(one.slow.values()), one.inner.state_dict()]
    return copy.deepcopy(found)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def train(name: str, run_dir: str, *, closure: bool = False) -> tuple[bool, list[Any]]:
    """With a guard and a NaN at step `BAD`; without `run_dir`, no guard and that step left out."""
    torch.manual_seed(0)
    dense = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2, bias=False)]
    sparse = name == "SparseAdam"
    net = nn.Sequential(*([nn.Embedding(9, 4, sparse=True)] if sparse else dense))
    model = DistributedDataParallel(net)
    optimizers = MADE[name](list(net.parameters()))
    options = {**OPTIONS, "sinks": []}
    if name == "PowerSGD":  # remembers in a state of its own what it has not sent yet
        state = power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        hook = (state, power.powerSGD_hook)
        options["comm_hook"] = hook
        if not run_dir:
            model.register_comm_hook(*hook)
    guard = sdcwatch.init(model, optimizers, run_dir=run_dir, **options) if run_dir else None
    kept = True
    for step in range(1, STEPS + 1):
        if step == BAD and guard is None:
            continue
        torch.manual_seed(step)
        x = torch.randint(0, 9, (5,)) if sparse else torch.randn(5, 4)
        poison = float("nan") if step == BAD else 1.0
        before = held(net, optimizers)
        for one in optimizers:
            one.zero_grad()

        def compute(x: torch.Tensor = x, poison: float = poison) -> torch.Tensor:
            loss = model(x if sparse else x * poison).square().mean() * poison
            loss.backward()
            return loss

        if closure:
            optimizers[0].step(compute)
        else:
            compute()
            for one in optimizers:
                one.step()
        kept = kept and same(before, held(net, optimizers)) == (step == BAD)
    if guard is not None:
        guard.close()
    return kept, held(net, optimizers)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", sorted(MADE))
def test_training_goes_on_as_if_the_skipped_update_had_been_left_out(
    tmp_path: Path, name: str
) -> None:
    kept, guarded = train(name, str(tmp_path))
    assert kept
    _, left_out = train(name, "")
    assert same(guarded, left_out)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", sorted({*OF_TORCH, "SGD with momentum"}))
def test_the_same_where_the_optimizer_calls_a_closure(tmp_path: Path, name: str) -> None:
    kept, guarded = train(name, str(tmp_path), closure=True)
    assert kept
    _, left_out = train(name, "", closure=True)
    assert same(guarded, left_out)


class Halves:
    """A loop whose updates take two backwards each; one of them, or both, hold a NaN once."""

    def __init__(self, name: str, run_dir: str, bad: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model = DistributedDataParallel(self.net)
        make, self.update = TWO_CALLS[name]
        self.one, self.bad, self.memory = make(list(self.net.parameters())), bad, MemorySink()
        self.guard = None
        if run_dir:
            options = {**OPTIONS, "run_dir": run_dir, "sinks": [self.memory]}
            self.guard = sdcwatch.init(self.model, self.one, **options)

    def step(self, step: int) -> None:
        half = 0

        def compute() -> torch.Tensor:
            nonlocal half
            half += 1
            torch.manual_seed(10 * step)
            poison = float("nan") if step == BAD and half in self.bad else 1.0
            loss = self.model(torch.randn(5, 4) * poison).square().mean()
            loss.backward()
            return loss

        self.update(self.one, compute)

    def state(self) -> list[Any]:
        held = [self.net.state_dict()]
        for name in ("base", "base_optimizer", "optimizer"):
            inner = vars(self.one).get(name)
            held += [] if inner is None else [inner.state_dict()]
        return copy.deepcopy(held)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bad", [(1,), (2,), (1, 2)], ids=["first", "second", "both"])
@pytest.mark.parametrize("name", sorted(TWO_CALLS))
def test_m12_an_update_of_two_backwards_is_skipped_as_one(
    tmp_path: Path, name: str, bad: tuple[int, ...]
) -> None:
    guarded, left_out = Halves(name, str(tmp_path), bad), Halves(name, "", ())
    for step in range(1, STEPS + 1):
        before = guarded.state()
        guarded.step(step)
        assert same(before, guarded.state()) == (step == BAD), step
        if step != BAD:
            left_out.step(step)
    assert guarded.guard is not None
    guarded.guard.close()
    assert same(guarded.state(), left_out.state())
    told = guarded.memory.records
    skips = [(r.step, r.reason.value) for r in told if isinstance(r, UpdateSkipped)]
    assert skips == [(2 * BAD, "nonfinite")]
    assert [r.code for r in told if isinstance(r, Note)] == []


class Momentum(nn.Module):
    """Trial `m07_forward_writes`: a key encoder follows the query encoder in forward."""

    def __init__(self, *, through_data: bool = True) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False)
        self.k.load_state_dict(self.q.state_dict())
        self.through_data = through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                moved = b.lerp(a, 0.1)
                if self.through_data:
                    b.data.copy_(moved)
                else:
                    b.copy_(moved)
        return self.q(x) @ self.k(x).T


class Renormed(nn.Module):
    """An embedding whose forward shortens rows that have grown too long."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows((x[:, 0].abs() * 2).nan_to_num().long() % 5) + x)


class Bank(nn.Module):
    """Trials `r_bank` and `r_aux`: what a forward keeps in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bank = nn.Linear(4, 4), torch.randn(6, 4)
        self.calls, self.seen, self.aux = 0, {"mean": 0.0}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.calls += 1
        self.seen["mean"] += float(y.detach().nan_to_num().mean())
        self.aux = y.detach().square().mean()
        self.bank = torch.cat([y.detach()[:1], self.bank[:-1]])
        return y @ self.bank.T


WRITES: dict[str, Callable[[], nn.Module]] = {
    "m07 momentum encoder through .data": Momentum,
    "m07 momentum encoder in place": lambda: Momentum(through_data=False),
    "m07 renormalised embedding": Renormed,
    "r_bank": Bank,
    "m04 BatchNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "m04 spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
}


def plainly(loop: Written, x: torch.Tensor, poison: float) -> None:
    (loop.model(x).square().mean() * poison).backward()
    loop.optimizer.step()


def in_a_closure(loop: Written, x: torch.Tensor, poison: float) -> None:
    """As `closure_trap`: the closure calls the DDP model that it closes over."""

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.model(x).square().mean() * poison
        loss.backward()
        return loss

    loop.optimizer.step(closure)


def penalised(loop: Written, x: torch.Tensor, poison: float) -> None:
    """As `r_penalty`: `autograd.grad` is not a backward of the step."""
    loss = loop.model(x).square().mean() * poison
    trained = [p for p in loop.net.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained, create_graph=True)
    (loss + 0.01 * sum(g.square().sum() for g in grads)).backward()
    loop.optimizer.step()


def after_autograd_grad(loop: Written, x: torch.Tensor, poison: float) -> None:
    loss = loop.model(x).square().mean() * poison
    trained = [p for p in loop.net.parameters() if p.requires_grad]
    norms = torch.autograd.grad(loss, trained, retain_graph=True)
    (loss * (1.0 + min(0.1, float(norms[0].norm().nan_to_num())))).backward()
    loop.optimizer.step()


class Written:
    def __init__(self, name: str, run_dir: str) -> None:
        torch.manual_seed(0)
        self.net = WRITES[name]()
        self.model = DistributedDataParallel(self.net)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer, self.memory = optim.AdamW(trained, lr=0.05), MemorySink()
        options = {**OPTIONS, "run_dir": run_dir, "sinks": [self.memory]}
        self.guard = sdcwatch.init(self.model, self.optimizer, **options) if run_dir else None

    def state(self) -> list[Any]:
        bank = self.net if isinstance(self.net, Bank) else None
        plain = [] if bank is None else [bank.bank, bank.calls, bank.seen, bank.aux]
        return copy.deepcopy([self.net.state_dict(), self.optimizer.state_dict(), plain])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "loop"),
    [
        *((name, plainly) for name in sorted(WRITES)),
        ("m04 BatchNorm", in_a_closure),
        ("r_bank", in_a_closure),
        ("m04 BatchNorm", penalised),
        ("r_bank", after_autograd_grad),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_a_forward_writes_is_as_if_the_skipped_step_had_been_left_out(
    tmp_path: Path, name: str, loop: Callable[[Written, torch.Tensor, float], None]
) -> None:
    guarded, left_out = Written(name, str(tmp_path)), Written(name, "")
    for step in range(1, STEPS + 1):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        before = guarded.state()
        guarded.optimizer.zero_grad()
        loop(guarded, x, float("nan") if step == BAD else 1.0)
        assert same(before, guarded.state()) == (step == BAD), step
        if step != BAD:
            left_out.optimizer.zero_grad()
            loop(left_out, x, 1.0)
    assert guarded.guard is not None
    guarded.guard.close()
    assert same(guarded.state(), left_out.state())
    told = guarded.memory.records
    assert [(r.step, r.reason.value) for r in told if isinstance(r, UpdateSkipped)] == [
        (BAD, "nonfinite")
    ]
    assert [r.code for r in told if isinstance(r, Note)] == []
