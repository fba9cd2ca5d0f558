"""Check 3 asks for software before it names a device: what one rank's script did is told as that.

Each script does on rank 1 what the others do not, at a step before the weights are compared.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Cause, Outcome, Verdict
from sdcwatch.errors import CorruptionDetected
from sdcwatch.testing import GlooPool

pytestmark = pytest.mark.dist

ODD, AT = 1, 3


class Script:
    """A plain loop; a case replaces a part of it on rank `ODD`."""

    spoilt: tuple[int, int] | None = None
    """A rank and a step with bad data."""

    def __init__(self, rank: int, group: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler: Any = None

    @property
    def odd(self) -> bool:
        return self.rank == ODD

    def before(self) -> None:
        """Before the guard is made."""

    def armed(self) -> None:
        """After it was made."""

    def update(self, step: int) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def now(self, step: int) -> bool:
        return self.odd and step == AT


class SkipsAnUpdate(Script):
    def update(self, step: int) -> None:
        if not self.now(step):
            super().update(step)


class SkipsAfterTheGuard(SkipsAnUpdate):
    """The guard has skipped one for all, because of bad data of another rank."""

    spoilt = (2, 2)


class StepsTwice(Script):
    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            super().update(step)


class Rate(Script):
    def update(self, step: int) -> None:
        if self.now(step):
            self.optimizer.param_groups[0]["lr"] /= 10
        super().update(step)


class RateOfOneStep(Script):
    def update(self, step: int) -> None:
        if self.now(step):
            self.optimizer.param_groups[0]["lr"] = 0.001
        super().update(step)
        self.optimizer.param_groups[0]["lr"] = 0.01


class Betas(Script):
    def before(self) -> None:
        if self.odd:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, betas=(0.9, 0.95))


class WeightDecay(Script):
    def armed(self) -> None:
        if self.odd:
            self.optimizer.param_groups[0]["weight_decay"] = 0.1


class SchedulerStepsTwice(Script):
    def before(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            self.scheduler.step()


class AnotherOptimizer(Script):
    def before(self) -> None:
        if self.odd:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)


class OtherGroups(Script):
    """Weight decay spares the biases, on one rank only."""

    def before(self) -> None:
        if self.odd:
            parts = [
                {"params": [p for p in self.net.parameters() if p.ndim > 1]},
                {"params": [p for p in self.net.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(parts, lr=0.01)


class RateInATensor(Script):
    def before(self) -> None:
        rate = torch.tensor(0.02 if self.odd else 0.01)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate, foreach=False)


class LoadedOnOneRank(Script):
    """The checkpoint of the model."""

    def before(self) -> None:
        if self.rank == 0:
            nn.init.ones_(self.net[0].weight)


class LoadedOnOneRankLater(Script):
    def armed(self) -> None:
        if self.rank == 0:
            state = copy.deepcopy(self.net.state_dict())
            state["0.weight"] += 1
            self.net.load_state_dict(state)


class LoadedPastTorch(Script):
    """Through `.data`, which torch does not count, between the guard and the first step."""

    def armed(self) -> None:
        if self.rank == 0:
            self.net[0].weight.data += 1


def state_of(script: Script, **kind: Any) -> Any:
    """A state that an optimizer might have saved elsewhere."""
    net = copy.deepcopy(script.net)
    other = type(script.optimizer)(net.parameters(), **kind)
    for _ in range(2):
        net(torch.ones(3, 4)).square().mean().backward()
        other.step()
    return other.state_dict()


class OptimizerLoaded(Script):
    def before(self) -> None:
        if self.odd:
            self.optimizer.load_state_dict(state_of(self, lr=0.01))


class OptimizerLoadedLater(Script):
    def armed(self) -> None:
        if self.odd:
            self.optimizer.load_state_dict(state_of(self, lr=0.01))


class MomentumLoaded(Script):
    """Nothing counts steps here: only what was loaded tells."""

    def before(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def armed(self) -> None:
        if self.odd:
            self.optimizer.load_state_dict(state_of(self, lr=0.01, momentum=0.9))


class Edited(Script):
    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            with torch.no_grad():
                self.net[2].bias.add_(0.5)


class EditedTied(Script):
    def __init__(self, rank: int, group: Any) -> None:
        super().__init__(rank, group)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            with torch.no_grad():
                self.net[2].weight[0].add_(0.5)


class Clamped(Script):
    def update(self, step: int) -> None:
        super().update(step)
        if self.odd:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.1, 0.1)


class GradientOfOneLayer(Script):
    def update(self, step: int) -> None:
        if self.now(step):
            self.net[2].weight.grad.mul_(2)
        super().update(step)


class GradientNotFinite(Script):
    """Every step after it is skipped: no check would be due after an update."""

    def update(self, step: int) -> None:
        if self.now(step):
            self.net[2].weight.grad[0, 0] = torch.nan
        super().update(step)


CASES: dict[str, tuple[type[Script], str]] = {
    "skips an update": (SkipsAnUpdate, "updates made: 4 on ranks 0 and 2, 3 on rank 1"),
    "skips an update, after one that the guard skipped": (
        SkipsAfterTheGuard,
        "updates made: 3 on ranks 0 and 2, 2 on rank 1",
    ),
    "steps twice": (StepsTwice, "updates made: 4 on ranks 0 and 2, 5 on rank 1"),
    "another learning rate": (
        Rate,
        "lr of group 0: 0.01 on ranks 0 and 2, 0.001 on rank 1",
    ),
    "another learning rate in one step": (RateOfOneStep, "learning rates of the updates, added up"),
    "other betas": (Betas, "betas of group 0: (0.9, 0.999) on ranks 0 and 2, (0.9, 0.95)"),
    "another weight decay": (WeightDecay, "weight_decay of group 0"),
    "a scheduler that steps twice": (SchedulerStepsTwice, "lr of group 0"),
    "another optimizer": (
        AnotherOptimizer,
        "the optimizer: AdamW on ranks 0 and 2, Adam on rank 1",
    ),
    "other groups": (OtherGroups, "4 parameters (0.weight, 0.bias, 2.weight and 1 more"),
    "another rate in a tensor": (RateInATensor, "lr of group 0"),
    "weights loaded on one rank": (LoadedOnOneRank, "before any device has computed"),
    "weights loaded on one rank, after init": (LoadedOnOneRankLater, "before any device"),
    "weights written past torch, after init": (LoadedPastTorch, "before any device"),
    "optimizer loaded on one rank": (OptimizerLoaded, "optimizer state as it was loaded"),
    "optimizer loaded on one rank, after init": (OptimizerLoadedLater, "as it was loaded"),
    "momentum loaded on one rank": (MomentumLoaded, "as it was loaded: ranks 0 and 2 against"),
    "weights edited": (Edited, "in-place writes into these weights"),
    "a tied weight edited": (EditedTied, "(0.weight (also 2.weight))"),
    "weights clamped": (Clamped, "in-place writes into these weights"),
    "the gradient of one layer": (GradientOfOneLayer, "in-place writes into their gradients"),
    "a gradient made NaN": (GradientNotFinite, "in-place writes into their gradients"),
}


def go(rank: int, group: Any, run_dir: str, name: str) -> Any:
    script = CASES[name][0](rank, group)
    script.before()
    verdict: Verdict | None = None
    guard = None
    try:
        guard = sdcwatch.init(
            script.model,
            script.optimizer,
            run_dir=f"{run_dir}/{name}",
            node=f"n{rank}",
            audit_every=20,
            fingerprint_every=4,
            telemetry="off",
            console=False,
        )
        script.armed()
        for step in range(1, 9):
            script.optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, 4, generator=draw)
            x = x * torch.nan if (rank, step) == script.spoilt else x
            script.model(x).square().mean().backward()
            script.update(step)
    except CorruptionDetected as error:
        verdict = error.verdict
        code = error.exit_code
    finally:
        if guard is not None:
            guard.close()
    if verdict is None:
        return None
    return verdict.outcome, verdict.cause, verdict.suspects, code, verdict.reason


@pytest.mark.parametrize("name", CASES)
def test_m08_software_divergence_is_told_with_the_evidence_and_is_nobodys_device(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    rows = pool.run(go, 3, str(tmp_path), name)
    assert rows[0] is not None, "replicas that differ were not found"
    assert all(row == rows[0] for row in rows)
    outcome, cause, suspects, code, reason = rows[0]
    assert (outcome, cause, suspects, code) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE, (), 85)
    assert CASES[name][1] in reason, reason


class BrokenCell(Script):
    """Bits that change without any code of the script's: `.data` is not counted."""

    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            self.net[0].weight.data[1, 2] += 0.5


class BrokenCellAfterASkip(BrokenCell):
    """The script leaves out by itself what the guard skips: the rank sees that its loss is NaN."""

    spoilt = (ODD, 2)

    def update(self, step: int) -> None:
        if (self.rank, step) != self.spoilt:
            super().update(step)


class CellNotFinite(BrokenCell):
    """The next step is not finite on that rank alone."""

    def update(self, step: int) -> None:
        super().update(step)
        if self.now(step):
            self.net[0].weight.data[1, 2] = torch.inf


def broken_cell(rank: int, group: Any, run_dir: str, kind: str) -> Any:
    CASES[kind] = (globals()[kind], "")
    return go(rank, group, run_dir, kind)


@pytest.mark.parametrize("kind", ["BrokenCell", "BrokenCellAfterASkip", "CellNotFinite"])
def test_a_broken_memory_cell_with_equal_software_is_still_a_device(
    pool: GlooPool, tmp_path: Path, kind: str
) -> None:
    outcome, cause, suspects, code, reason = pool.run(broken_cell, 3, str(tmp_path), kind)[2]
    assert (outcome, [s.rank for s in suspects], code) == (Outcome.SUSPECT, [ODD], 80)
    assert cause is Cause.NONE
    assert "0.weight" in reason
