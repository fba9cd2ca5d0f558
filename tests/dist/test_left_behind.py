"""A skipped step leaves no trace in the module, and no checkpoint holds what is not finite.

After the trials `m04_bn_nan_saved` and `m05_nan_weights_saved`.
"""

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
from sdcwatch.core.records import CheckpointEvent, UpdateSkipped
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET
pytestmark = pytest.mark.dist

BAD_STEP = 6


class Codes(nn.Module):
    """A codebook in a buffer, a bank in a list and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(8))
        self.bank: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.bank = [*self.bank, x.detach().mean(0)][-3:]
        self.codes.lerp_(x.detach().mean(0), 0.1)
        return x - self.codes + torch.stack(self.bank).mean(0)


INNER: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(8),
    "codebook": Codes,
}


class Run:
    def __init__(self, rank: int, group: Any, run_dir: str, inner: str, **ddp: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(nn.Linear(4, 8), INNER[inner](), nn.ReLU(), nn.Linear(8, 2))
        self.model = DistributedDataParallel(self.net, process_group=group, **ddp)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.memory = MemorySink()
        self.guard = sdcwatch.init(
            self.model,
            self.optimizer,
            run_dir=run_dir,
            node=f"n{rank}",
            audit_every=4,
            sinks=[self.memory],
            **QUIET,
        )

    def step(self, step: int, wrong: float = 1.0) -> None:
        torch.manual_seed(1_000 * self.rank + step)
        x = torch.randn(8, 4) * (wrong if self.rank == 0 else 1.0)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if isinstance(r, kind)]

    def state(self) -> dict[str, Any]:
        state = {n: t.clone() for n, t in self.net.state_dict().items()}
        inner = self.net[1]
        extra = {"bank": list(inner.bank), "calls": inner.calls} if isinstance(inner, Codes) else {}
        return {**state, **extra}


def through_a_nan(
    rank: int, group: Any, run_dir: str, inner: str, broadcast: bool
) -> dict[str, Any]:
    run = Run(rank, group, run_dir, inner, broadcast_buffers=broadcast)
    left_out = Run(rank, group, f"{run_dir}/other", inner, broadcast_buffers=broadcast)
    for step in range(1, 11):
        before = run.state()
        run.step(step, float("nan") if step == BAD_STEP else 1.0)
        if step == BAD_STEP and (rank == 0 or not broadcast):  # else rank 0's have come
            torch.testing.assert_close(run.state(), before, rtol=0, atol=0)
        if step != BAD_STEP:
            left_out.step(step)
    torch.testing.assert_close(run.state(), left_out.state(), rtol=0, atol=0)
    saved = run.guard.save_checkpoint(lambda: None)
    run.guard.close()
    left_out.guard.close()
    return {"saved": saved, "skips": [s.step for s in run.told(UpdateSkipped)]}


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "own buffers"])
@pytest.mark.parametrize("inner", sorted(INNER))
def test_m04_a_skipped_step_leaves_buffers_and_attributes_on_every_rank(
    pool: GlooPool, tmp_path: Path, inner: str, broadcast: bool
) -> None:
    rows = pool.run(through_a_nan, 3, str(tmp_path), inner, broadcast)
    assert rows[0] == {"saved": True, "skips": [BAD_STEP]}


def not_finite(rank: int, group: Any, run_dir: str, where: str) -> list[tuple[str, str]]:
    run = Run(rank, group, run_dir, "BatchNorm", broadcast_buffers=False)
    for step in range(1, 9):
        if step == 8 and where == "weights":
            run.optimizer.param_groups[0]["lr"] = float("nan")
        run.step(step)
        if step == 8 and where == "a buffer of one rank" and rank == 2:
            run.net[1].running_var[0] = torch.inf
    run.guard.save_checkpoint(lambda: None)
    run.guard.close()
    return [(c.result.value, c.reason.value) for c in run.told(CheckpointEvent)]


@pytest.mark.parametrize("where", ["weights", "a buffer of one rank"])
def test_m05_a_checkpoint_that_is_not_finite_is_withheld(
    pool: GlooPool, tmp_path: Path, where: str
) -> None:
    rows = pool.run(not_finite, 3, str(tmp_path), where)
    assert rows[0] == [("withheld", "weights_nonfinite")]


def masked(rank: int, group: Any, run_dir: str) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    net.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    model = DistributedDataParallel(net, process_group=group)
    optimizer, memory = torch.optim.SGD(net.parameters(), lr=0.1), MemorySink()
    guard = sdcwatch.init(
        model,
        optimizer,
        **{"run_dir": run_dir, "node": f"n{rank}", "audit_every": 4, "sinks": [memory], **QUIET},
    )
    for _ in range(4):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    guard.save_checkpoint(lambda: None)
    guard.close()
    return [(c.result.value, c.reason.value) for c in memory.records if isinstance(c, CheckpointEvent)]


def test_a_mask_of_minus_infinities_is_no_reason_to_withhold(
    pool: GlooPool, tmp_path: Path
) -> None:
    assert pool.run(masked, 3, str(tmp_path))[0] == [("saved", "ok")]
