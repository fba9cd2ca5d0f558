"""What is said to be skipped is skipped, whoever steps: `m06_skip_not_carried_out`, `m12_sam`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Note, UpdateSkipped, Verdict
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

sys.path.insert(0, str(Path(__file__).parents[1] / "guard"))
from two_calls import TWO_CALLS

pytestmark = pytest.mark.dist

BAD, STEPS = 6, 8


class Lookahead(torch.optim.Optimizer):
    """Every second step the weights go half way back, with or without gradients: by inheritance."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = {p: p.detach().clone() for g in inner.param_groups for p in g["params"]}

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for p, slow in self.slow.items():
                    p.lerp_(slow, 0.5)


class Composed:
    """The same by composition, no optimizer itself: what moves is out of sight of every hook."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = inner, 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            weights = [p for g in self.optimizer.param_groups for p in g["params"]]
            for p, slow in zip(weights, self.slow, strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


class Several:
    """One object around two optimizers."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


class NeverInitialised(torch.optim.Optimizer):
    """By inheritance, without a call of `Optimizer.__init__`: torch runs no hooks for it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)


class Loop:
    def __init__(self, rank: int, group: Any, run_dir: str) -> None:
        torch.manual_seed(0)
        self.rank, self.memory = rank, MemorySink()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.run_dir = run_dir
        self.options = {"node": f"n{rank}", "audit_every": 4, "sinks": [self.memory], **QUIET}

    def guard(self, optimizer: Any) -> Any:
        return sdcwatch.init(self.model, optimizer, run_dir=self.run_dir, **self.options)

    def sgd(self, parameters: Any = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters or self.net.parameters(), lr=0.1, momentum=0.9)

    def backward(self, step: int) -> None:
        torch.manual_seed(100 * self.rank + step)
        x = torch.randn(3, 4) * (float("nan") if (self.rank, step) == (1, BAD) else 1.0)
        self.net.zero_grad()
        self.model(x).square().mean().backward()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if isinstance(r, kind)]


def made_anew(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step in (1, 4):
        held["one"] = loop.sgd()
        if step == 1:
            held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def on_the_rest(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"], held["two"] = (
            loop.sgd(loop.net[0].parameters()),
            loop.sgd(loop.net[2].parameters()),
        )
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()
    held["two"].step()


def asked_before_the_step(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = loop.sgd()
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["guard"].save_checkpoint(lambda: None)
    held["one"].step()


def looking_ahead(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = Lookahead(loop.sgd())
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def looking_ahead_by_composition(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = Composed(loop.sgd())
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def several_in_one(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        two = loop.sgd(loop.net[0].parameters()), loop.sgd(loop.net[2].parameters())
        held["one"] = Several(*two)
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def without_hooks(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = NeverInitialised(loop.sgd())
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def in_a_closure(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = torch.optim.AdamW(loop.net.parameters(), lr=0.01)
        held["guard"] = loop.guard(held["one"])
    held["one"].step(lambda: loop.backward(step))


def looking_ahead_in_a_closure(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = Lookahead(loop.sgd())
        held["guard"] = loop.guard(held["one"])
    held["one"].step(lambda: loop.backward(step))


LOOPS: dict[str, Callable[[Loop, int, dict[str, Any]], None]] = {
    f.__name__: f
    for f in (
        *(made_anew, on_the_rest, asked_before_the_step, several_in_one, without_hooks),
        *(looking_ahead, looking_ahead_by_composition, looking_ahead_in_a_closure, in_a_closure),
    )
}


def run(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    loop, held = Loop(rank, group, run_dir), {}
    for step in range(1, STEPS + 1):
        before = loop.weights()
        LOOPS[name](loop, step, held)
        same = all(map(torch.equal, before, loop.weights()))
        assert same == (step == BAD), (name, step)
    held["guard"].close()
    return {
        "skips": [s.step for s in loop.told(UpdateSkipped)],
        "notes": [n.code for n in loop.told(Note)],
        "finite": all(bool(p.isfinite().all()) for p in loop.net.parameters()),
    }


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_m06_a_skip_is_carried_out_whoever_steps(pool: GlooPool, tmp_path: Path, name: str) -> None:
    row = pool.run(run, 3, str(tmp_path), name)[0]
    assert row["finite"]
    assert row["skips"] == [BAD]
    found = "optimizer_found" in row["notes"]
    assert found == (name in ("made_anew", "on_the_rest"))
    assert "moved_unseen" not in row["notes"]


def at_fault(loop: Loop, hold: Any) -> list[tuple[str, str]]:
    for step in range(1, STEPS + 1):
        hold(step)
    return [(n.code, n.message) for n in loop.told(Note)]


def unseen(rank: int, group: Any, run_dir: str, how: str) -> list[tuple[str, str]]:
    loop = Loop(rank, group, run_dir)
    one = loop.sgd()
    guard = loop.guard(one)
    composed = Composed(one) if how == "a wrapper that init was not given" else None
    decayed = [p for p in loop.net.parameters() if p.ndim == 2]

    def step_(step: int) -> None:
        loop.backward(step)
        (composed or one).step()
        if how == "decayed by hand":
            with torch.no_grad():
                torch._foreach_mul_(decayed, 0.99)
        if how == "through .data":
            for p in decayed:
                p.data.mul_(0.99)
        if how == "loaded" and step == 3:
            loop.net.load_state_dict({k: v + 1.0 for k, v in loop.net.state_dict().items()})

    said = at_fault(loop, step_)
    guard.close()
    return said


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("decayed by hand", "0.weight and 2.weight moved between two steps"),
        ("loaded", "0.weight, 0.bias, 2.weight and 1 more moved between two steps"),
        ("through .data", "weights moved since an update was skipped"),
        ("a wrapper that init was not given", "Composed holds them. Pass it"),
    ],
)
def test_weights_that_moved_unseen_are_said_once_at_the_next_forward(
    pool: GlooPool, tmp_path: Path, how: str, what: str
) -> None:
    ((code, said),) = pool.run(unseen, 3, str(tmp_path), how)[0]
    assert code == "moved_unseen"
    assert what in said
    assert "sdcwatch.init(" in said


def m12(rank: int, group: Any, run_dir: str, name: str, given: bool) -> dict[str, Any]:
    loop = Loop(rank, group, run_dir)
    make, update = TWO_CALLS[name]
    one = make(list(loop.net.parameters()))
    guard = loop.guard(one if given else one.base)
    for step in range(1, STEPS + 1):
        before = loop.weights()
        update(one, lambda step=step: loop.backward(step))
        same = all(map(torch.equal, before, loop.weights()))
        assert same == (step == BAD), (name, step)
    saved = guard.save_checkpoint(lambda: None)
    guard.close()
    return {
        "skips": [(s.step, s.reason.value) for s in loop.told(UpdateSkipped)],
        "notes": [n.message for n in loop.told(Note)],
        "saved": saved,
    }


@pytest.mark.parametrize("name", ["SAM", "SAM with a closure"])
def test_m12_sam_is_skipped_on_every_rank(pool: GlooPool, tmp_path: Path, name: str) -> None:
    rows = pool.run(m12, 3, str(tmp_path), name, True)
    assert rows == [{"skips": [(2 * BAD, "nonfinite")], "notes": [], "saved": True}] * 3


def test_m12_sam_of_which_init_was_given_the_inner_one_is_skipped_too_and_named(
    pool: GlooPool, tmp_path: Path
) -> None:
    row = pool.run(m12, 3, str(tmp_path), "SAM", False)[0]
    assert row["skips"] == [(2 * BAD, "nonfinite")]
    (said,) = row["notes"]
    assert "Pass it, as sdcwatch.init(model, Sam(...))" in said


def r_muon(rank: int, group: Any, run_dir: str, given: str) -> dict[str, Any]:
    """A NaN in one matrix, once; Muon for matrices, AdamW for the rest."""
    loop, at = Loop(rank, group, run_dir), [0]
    matrices = [p for p in loop.net.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    adamw = torch.optim.AdamW([p for p in loop.net.parameters() if p.ndim != 2], lr=1e-2)
    if rank == 1:
        matrices[0].register_hook(lambda g: g * float("nan") if at[0] == BAD + 1 else None)
    guard = loop.guard({"both": [muon, adamw], "muon": muon, "adamw": adamw}[given])
    for at[0] in range(1, STEPS + 1):
        before = loop.weights()
        if at[0] != BAD:  # its batch is NaN
            loop.backward(at[0])
            muon.step()
            adamw.step()
            same = [torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True)]
            assert same == [at[0] == BAD + 1] * 4, (given, at)
    guard.close()
    return {
        "skips": [(s.step, s.reason.value) for s in loop.told(UpdateSkipped)],
        "found": [n.message for n in loop.told(Note) if n.code == "optimizer_found"],
    }


@pytest.mark.parametrize("given", ["both", "muon", "adamw"])
def test_r_muon_one_decision_is_for_all_optimizers(
    pool: GlooPool, tmp_path: Path, given: str
) -> None:
    row = pool.run(r_muon, 3, str(tmp_path), given)[0]
    assert row["skips"] == [(BAD, "nonfinite")]  # the sixth backward
    other = {"both": [], "muon": ["AdamW steps 0.bias"], "adamw": ["Muon steps 0.weight"]}[given]
    assert [text.split(" and ")[0] for text in row["found"]] == other


def r_sparse(rank: int, group: Any, run_dir: str, how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    at, memory = [0], MemorySink()
    rows = nn.Embedding(9, 4, sparse=True)
    dense = how == "beside a dense layer"
    net = nn.Sequential(rows, nn.Linear(4, 2)) if dense else rows
    model = DistributedDataParallel(net, process_group=group)
    one: Any = torch.optim.SparseAdam([rows.weight], lr=1e-2)
    if how == "SGD":
        one = torch.optim.SGD([rows.weight], lr=0.1)
    if dense:
        one = [one, torch.optim.AdamW(net[1].parameters(), lr=1e-2)]
    options = {"node": f"n{rank}", "audit_every": 4, "sinks": [memory], **QUIET}
    guard = sdcwatch.init(model, one, run_dir=run_dir, **options)
    if rank == 1:
        rows.weight.register_hook(lambda g: g * float("nan") if at[0] == BAD else None)
    draw = torch.Generator().manual_seed(rank)
    for at[0] in range(1, STEPS + 1):
        before = [p.detach().clone() for p in net.parameters()]
        net.zero_grad()
        model(torch.randint(9, (6,), generator=draw)).square().mean().backward()
        for each in one if dense else [one]:
            each.step()
        same = all(map(torch.equal, before, net.parameters()))
        assert same == (at[0] == BAD), (how, at)
    guard.close()
    return {
        "skips": [(s.step, s.reason.value) for s in memory.records if isinstance(s, UpdateSkipped)],
        "verdicts": [
            (v.step, v.check.value, v.outcome.value)
            for v in memory.records
            if isinstance(v, Verdict)
        ],
    }


@pytest.mark.parametrize("how", ["SparseAdam", "SGD", "beside a dense layer"])
def test_r_sparse_a_nan_in_a_sparse_gradient_is_a_verdict_and_a_skip(
    pool: GlooPool, tmp_path: Path, how: str
) -> None:
    row = pool.run(r_sparse, 3, str(tmp_path), how)[0]
    assert row["skips"] == [(BAD, "nonfinite")]
    assert [v[:2] for v in row["verdicts"]] == [(BAD, "nonfinite")]


def in_the_backward(rank: int, group: Any, run_dir: str) -> str:
    loop = Loop(rank, group, run_dir)
    last = loop.sgd([loop.net[2].bias])
    loop.net[2].bias.register_post_accumulate_grad_hook(lambda p: last.step())
    guard = loop.guard(loop.sgd())
    try:
        loop.backward(1)
    except sdcwatch.ConfigurationError as error:
        return str(error)
    finally:
        guard.close()
    return ""


def test_a_step_from_inside_the_backward_is_refused_by_name(pool: GlooPool, tmp_path: Path) -> None:
    said = pool.run(in_the_backward, 3, str(tmp_path))[0]
    assert said.startswith("Expected updates after the backward, but got a step of SGD")
    assert "2.bias" in said
