"""What passes a self-audit and would fail on another rank: a named reason, never a device.

Each case changes something on rank 1 alone, from `LATER` on, so that preflight has seen nothing.
Closures, globals, hash order and branches need a look at the operations, because nothing else tells
them from a device: test_operations.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import PreflightDone, Progress, Verdict
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

SAID = ("not_run: ", "void: ", "off: ", "differs: ")  # and never a suspect or a mismatch

WORLD, STEPS, LATER = 3, 8, 4  # audits on steps 4, 6 and 8
ODD = 1
"""The rank on which something is different."""


def xs(rows: int = 6, features: int = 16) -> torch.Tensor:
    return torch.randn(rows, features)


def mlp(features: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)
    )


def entropy(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, torch.randint(0, 8, (len(outputs),)))


@contextlib.contextmanager
def noisy(net: nn.Module) -> Iterator[None]:
    """Weights that are this rank's own for a while, written past every version counter."""
    before = [p.detach().clone() for p in net.parameters()]
    draw = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for p in net.parameters():
        p.data.add_(0.01 * torch.randn(p.shape, generator=draw))
    try:
        yield
    finally:
        for p, old in zip(net.parameters(), before, strict=True):
            p.data.copy_(old)


def noise_around_the_step(model: Any, net: nn.Module, odd: bool) -> None:
    with noisy(net) if odd else contextlib.nullcontext():
        entropy(model(xs())).backward()


def noise_in_the_forward(model: Any, net: nn.Module, odd: bool) -> None:
    with noisy(net) if odd else contextlib.nullcontext():
        loss = entropy(model(xs()))
    loss.backward()


def sharpness_aware(model: Any, net: nn.Module, odd: bool) -> None:
    """The first pass under no_sync: every rank climbs by its own gradient (m-SAM)."""
    x = xs()
    with model.no_sync():
        entropy(model(x)).backward()
    before = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * p.grad / (p.grad.norm() + 1e-12))
    for p in net.parameters():
        p.grad = None
    entropy(model(x)).backward()
    with torch.no_grad():
        for p, old in zip(net.parameters(), before, strict=True):
            p.copy_(old)


class Held(nn.Module):
    """A factor from an attribute, from an object that it holds, or from a cache."""

    class Settings:
        def __init__(self) -> None:
            self.alpha = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale, self.settings, self.cached = 1.0, Held.Settings(), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if rows not in self.cached:
            self.cached[rows] = x.mean(1, keepdim=True).detach()
        return self.inner(x + self.cached[rows]) * self.scale * self.settings.alpha


def attribute(model: Any, net: Any, odd: bool) -> None:
    net.scale = 2.0 if odd else 1.0
    entropy(model(xs())).backward()


def settings(model: Any, net: Any, odd: bool) -> None:
    net.settings.alpha = 2.0 if odd else 1.0
    entropy(model(xs())).backward()


def threads(model: Any, net: nn.Module, odd: bool) -> None:
    torch.set_num_threads(2 if odd else 1)
    try:
        model(xs(64, 512)).square().mean().backward()
    finally:
        torch.set_num_threads(1)


def flush_denormal(model: Any, net: nn.Module, odd: bool) -> None:
    torch.set_flush_denormal(odd)
    try:
        (model(xs() * 1e-20) * 1e-19).sum().backward()
    finally:
        torch.set_flush_denormal(False)


def images() -> torch.Tensor:
    return torch.randn(6, 3, 17, 17)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))


def mkldnn(model: Any, net: nn.Module, odd: bool) -> None:
    with torch.backends.mkldnn.flags(enabled=not odd):
        entropy(model(images()).mean((2, 3))).backward()


def mkldnn_everywhere(model: Any, net: nn.Module, odd: bool) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        outputs = model(images()).mean((2, 3))
    entropy(outputs).backward()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def attention(model: Any, net: nn.Module, odd: bool) -> None:
    with sdpa_kernel(SDPBackend.MATH) if odd else contextlib.nullcontext():
        outputs = model(torch.randn(3, 40, 16))
    outputs.square().mean().backward()


def attention_everywhere(model: Any, net: nn.Module, odd: bool) -> None:
    attention(model, net, True)


class NormLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def expanded_gradient(model: Any, net: nn.Module, odd: bool) -> None:
    outputs = model(xs())
    loss = (outputs.sum(0) * torch.arange(8.0)).sum() if odd else outputs.square().mean()
    loss.backward()


def sliced_input(model: Any, net: nn.Module, odd: bool) -> None:
    entropy(model(xs(6, 32)[:, 3:19] if odd else xs())).backward()


class OfTheRank(nn.Module):
    """Every rank computes something of its own, from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 0.1 * torch.distributed.get_rank())


def as_it_is(model: Any, net: nn.Module, odd: bool) -> None:
    entropy(model(xs())).backward()


def frozen_later(model: Any, net: Any, odd: bool) -> None:
    """On every rank, as fine-tuning does it."""
    net.calls = getattr(net, "calls", 0) + 1
    if net.calls == LATER:
        net[0].requires_grad_(False)
    entropy(model(xs())).backward()


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: What is different on one rank.
        loop: Called with the model, the bare module, and whether this rank differs on this step.
        build: Makes the module.
        reason: Part of what the guard says; "" where every audit is exact.
        ddp: Options of DistributedDataParallel.
    """

    name: str
    loop: Callable[[Any, Any, bool], None]
    build: Callable[[], nn.Module] = field(default=mlp)
    reason: str = ""
    ddp: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


WEIGHTS = "weights"
CASES = (
    Case("weight noise around the step", noise_around_the_step, reason=WEIGHTS),
    Case("weight noise in the forward", noise_in_the_forward, reason=WEIGHTS),
    Case("local sharpness-aware steps", sharpness_aware, reason=WEIGHTS),
    Case("an attribute", attribute, Held),
    Case("an attribute of an object", settings, Held),
    Case("threads", threads, lambda: mlp(512), "threads"),
    Case("flush-denormal", flush_denormal, mlp, "flush_denormal"),
    Case("mkldnn off", mkldnn, convolutions, "mkldnn"),
    Case("mkldnn off in the forward, everywhere", mkldnn_everywhere, convolutions, "mkldnn"),
    Case("an attention kernel", attention, Attention, "sdpa"),
    Case("an attention kernel, everywhere", attention_everywhere, Attention, "sdpa"),
    Case("an expanded gradient", expanded_gradient, NormLast),
    Case("a sliced input", sliced_input, lambda: nn.Sequential(nn.BatchNorm1d(16), mlp())),
    Case("the rank in the forward", as_it_is, OfTheRank, "not the same function on every rank"),
    Case("a layer frozen later", frozen_later, ddp={"find_unused_parameters": True}),
)


def trained(rank: int, group: Any, number: int, run_dir: str) -> dict[str, Any]:
    case = CASES[number]
    torch.manual_seed(0)
    net = case.build()
    model = DistributedDataParallel(net, process_group=group, **case.ddp)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    memory = MemorySink()
    guard = sdcwatch.init(
        model, optimizer, audit_every=2, fingerprint_every=2, node=f"n{rank}",
        run_dir=run_dir, sinks=[memory], **QUIET,
    )  # fmt: skip
    torch.manual_seed(100 + rank)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        case.loop(model, net, rank == ODD and step >= LATER)
        optimizer.step()
    guard.close()
    verdicts = [r for r in memory.records if isinstance(r, Verdict)]
    return {
        "said": [f"{v.outcome.value}: {v.reason}" for v in verdicts],
        "suspects": [s.rank for v in verdicts for s in v.suspects],
        "preflight": [
            f"{p.coverage.value}: {p.reason}"
            for p in memory.records
            if isinstance(p, PreflightDone)
        ],
        "comparisons": sum(p.comparisons for p in memory.records if isinstance(p, Progress)),
    }


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_what_differs_on_one_rank_ends_in_a_named_reason_and_names_no_device(
    pool: GlooPool, tmp_path: Path, number: int
) -> None:
    reason = CASES[number].reason
    for row in pool.run(trained, WORLD, number, str(tmp_path)):
        assert row["suspects"] == []
        if not reason:
            assert row["said"] == []
            assert row["comparisons"] == 5 * WORLD  # two first rings and three audits
            continue
        told = [*row["said"], *(p for p in row["preflight"] if not p.startswith("full"))]
        assert any(reason in text for text in told)
        assert all(text.startswith(SAID) for text in told), told
