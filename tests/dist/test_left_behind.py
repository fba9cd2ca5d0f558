"""A skipped step leaves no trace in the module, and no checkpoint holds what is not finite.

After the trials `m04_bn_nan_saved` and `m05_nan_weights_saved`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.checks import torch_internals as internals
from sdcwatch.core.records import CheckpointEvent, Note, UpdateSkipped, Verdict
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

AUDIT = 8


class Codes(nn.Module):
    """A codebook in a buffer, another that is replaced, a bank, a counter and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(8))
        self.bank: list[torch.Tensor] = []
        self.rows = {"sums": [torch.zeros(8)], "steps": []}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.calls += 1
        self.bank = [*self.bank, mean][-3:]
        self.rows["sums"][0].add_(mean)
        self.rows["steps"].append(self.calls)
        self.codes.lerp_(mean, 0.1)
        self.replaced = 0.9 * self.replaced + 0.1 * mean
        return x - self.codes - self.replaced + torch.stack(self.bank).mean(0)


class Observed(nn.Module):
    """Smallest and largest values, for a quantisation to come; one has a shape of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.each = MinMaxObserver(), PerChannelMinMaxObserver(ch_axis=1)
        self.mean = MovingAverageMinMaxObserver()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(self.each(self.one(x)))


class Run:
    def __init__(self, rank: int, group: Any, run_dir: str, **ddp: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            Observed(),
            Codes(),
            nn.BatchNorm1d(8),
            nn.InstanceNorm1d(8, track_running_stats=True),
            nn.ReLU(),
            nn.Linear(8, 2),
        )
        self.model = DistributedDataParallel(self.net, process_group=group, **ddp)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.memory = MemorySink()
        self.broken_at = 0
        self.net[0].register_forward_hook(self._spoil)
        self.guard = None if not run_dir else self._guarded(run_dir)

    def _guarded(self, run_dir: str) -> sdcwatch.Guard:
        return sdcwatch.init(
            self.model,
            self.optimizer,
            run_dir=run_dir,
            node=f"n{self.rank}",
            audit_every=4,
            sinks=[self.memory],
            **QUIET,
        )

    def _spoil(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        """A device that computes wrongly, inside of the audited call."""
        if self.broken_at:
            with internals.dispatch_modes_off():  # out of the script's sight
                output.data.mul_(1e15)

    def step(self, step: int, *, inputs: float = 1.0, loss: float = 1.0) -> None:
        torch.manual_seed(1_000 * self.rank + step)
        self.optimizer.zero_grad()
        (self.model(torch.randn(8, 4) * inputs).square().mean() * loss).backward()
        self.optimizer.step()

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if isinstance(r, kind)]

    def state(self) -> dict[str, Any]:
        codes = self.net[2]
        plain = {"bank": list(codes.bank), "calls": codes.calls, "rows": copy.deepcopy(codes.rows)}
        return {**{n: t.clone() for n, t in self.net.state_dict().items()}, **plain}


def spoilt(run: Run, how: str, step: int) -> None:
    """One step that goes wrong on one rank; statistics take finite garbage or a NaN."""
    nan, large = float("nan"), 1e15  # its square is finite too
    if how == "a NaN":
        run.step(step, inputs=nan if run.rank == 0 else 1.0)
    elif how == "finite garbage":
        first = run.rank == 0
        run.step(step, inputs=large if first else 1.0, loss=nan if first else 1.0)
    else:
        run.broken_at = step if run.rank == 2 else 0
        run.step(step)
        run.broken_at = 0


FAULTS = {2: "a NaN", 6: "finite garbage", AUDIT: "finite garbage of a device"}


def through_faults(rank: int, group: Any, run_dir: str, broadcast: bool) -> dict[str, Any]:
    run = Run(rank, group, run_dir, broadcast_buffers=broadcast)
    left_out = Run(rank, group, "", broadcast_buffers=broadcast)
    for step in range(1, 13):
        if step not in FAULTS:
            run.step(step)
            left_out.step(step)
            continue
        before = run.state()
        spoilt(run, FAULTS[step], step)
        if rank == 0 or not broadcast:  # else rank 0's have come
            torch.testing.assert_close(run.state(), before, rtol=0, atol=0)
    torch.testing.assert_close(run.state(), left_out.state(), rtol=0, atol=0)
    saved = run.guard.save_checkpoint(lambda: None)
    run.guard.close()
    told = [(v.step, v.check.value, v.outcome.value) for v in run.told(Verdict)]
    notes = [n.code for n in run.told(Note)]
    return {"saved": saved, "told": told, "notes": notes, "skips": len(run.told(UpdateSkipped))}


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "own buffers"])
def test_m04_a_skipped_step_leaves_buffers_and_attributes_on_every_rank(
    pool: GlooPool, tmp_path: Path, broadcast: bool
) -> None:
    for row in pool.run(through_faults, 3, str(tmp_path), broadcast):
        assert row["told"] == [
            (2, "nonfinite", "reproducible"),
            (6, "nonfinite", "unattributed"),
            (8, "replay", "suspect"),
        ]
        assert (row["skips"], row["notes"], row["saved"]) == (len(FAULTS), [], True)


PLACES: dict[str, tuple[int, Callable[[nn.Sequential], torch.Tensor], float]] = {
    "running variance": (2, lambda net: net[3].running_var, torch.inf),
    "running mean": (0, lambda net: net[4].running_mean, torch.nan),
    "codebook": (1, lambda net: net[2].codes, -torch.inf),
    "observer that began with infinities": (2, lambda net: net[1].one.min_val, torch.inf),
    "its other side": (1, lambda net: net[1].mean.max_val, torch.nan),
    "observer of channels": (1, lambda net: net[1].each.max_val, torch.nan),
}


def not_finite(rank: int, group: Any, run_dir: str) -> list[tuple[str, str]]:
    """Asks for a checkpoint at each step from 4 on; each place is not finite once, on one rank."""
    run, step = Run(rank, group, run_dir, broadcast_buffers=False), 1
    before = run.state()
    spoilt(run, "a NaN", 1)  # observers still hold the infinities that they begin with
    torch.testing.assert_close(run.state(), before, rtol=0, atol=0)
    for where in (None, None, None, *PLACES.values(), None, "weights"):
        step += 1
        if where == "weights":
            run.optimizer.param_groups[0]["lr"] = float("nan")
        run.step(step)
        kept = None
        if isinstance(where, tuple) and rank == where[0]:
            buffer = where[1](run.net).view(-1)
            kept = buffer[:1].clone()
            buffer[0] = where[2]
        if step > 3:
            run.guard.save_checkpoint(lambda: None)
        if kept is not None:
            buffer[:1] = kept
    run.guard.close()
    assert [v.outcome.value for v in run.told(Verdict)] == ["reproducible"]
    return [(c.result.value, c.reason.value) for c in run.told(CheckpointEvent)]


def test_m05_a_checkpoint_that_is_not_finite_on_any_rank_is_withheld(
    pool: GlooPool, tmp_path: Path
) -> None:
    for told in pool.run(not_finite, 3, str(tmp_path)):
        asked = [one for one in told if one[0] != "confirmed"]
        first, *each, after, weights = asked
        assert first == ("saved", "ok")
        assert each == [("withheld", "weights_nonfinite")] * len(PLACES)
        assert after[1] == "ok", "finite again"
        assert weights == ("withheld", "weights_nonfinite")


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
    return [
        (c.result.value, c.reason.value) for c in memory.records if isinstance(c, CheckpointEvent)
    ]


def test_a_mask_of_minus_infinities_is_no_reason_to_withhold(
    pool: GlooPool, tmp_path: Path
) -> None:
    assert pool.run(masked, 3, str(tmp_path))[0] == [("saved", "ok")]
