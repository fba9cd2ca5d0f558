"""Loops as people write them: sums of losses, accumulation without no_sync, Join, broken steps."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import (
    CheckpointEvent,
    Note,
    PreflightDone,
    Progress,
    RunFinished,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

WORLD = 3


def weights(net: nn.Module) -> str:
    data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(data).hexdigest()[:12]


class Loop:
    """A model whose loss can be made wrong on rank 1 from outside."""

    def __init__(self, rank: int, group: Any, run_dir: str | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.memory = rank, MemorySink()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.model = DistributedDataParallel(self.net, process_group=group)
        # Without state: Join syncs the weights at its end and no momentum, which would drive the
        # replicas apart in the next epoch; check 3 rightly says so.
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.poison = 1.0
        self.drawn = torch.Generator().manual_seed(100 + rank)
        self.guard: Any = None
        if run_dir is not None:
            defaults = {"audit_every": 4, "fingerprint_every": 4, "node": f"n{rank}"}
            defaults |= {"run_dir": run_dir, "sinks": [self.memory], **QUIET}
            self.guard = sdcwatch.init(self.model, self.optimizer, **{**defaults, **options})

    def batch(self) -> torch.Tensor:
        return torch.randn(3, 4, generator=self.drawn)

    def forward(self) -> torch.Tensor:
        loss = self.model(self.batch()).square().mean()
        return loss * (self.poison if self.rank == 1 else 1.0)

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if isinstance(r, kind)]

    def verdicts(self) -> list[tuple[int, str, str, tuple[int, ...]]]:
        return [
            (v.step, v.check.value, v.outcome.value, tuple(s.rank for s in v.suspects))
            for v in self.told(Verdict)
        ]


def accumulating(rank: int, group: Any, run_dir: str | None, poisoned: bool) -> dict[str, Any]:
    """Two synchronising backwards for each update, as a loop without no_sync makes them."""
    loop = Loop(rank, group, run_dir)
    before = {}
    for update in range(1, 7):
        loop.optimizer.zero_grad()
        for micro in (1, 2):
            if poisoned and update == 4 and micro == 1:
                loop.poison = float("nan")
            loop.forward().backward()
            loop.poison = 1.0
        before[update] = weights(loop.net)
        loop.optimizer.step()
        if weights(loop.net) == before[update]:
            before["kept"] = update
    if loop.guard is not None:
        loop.guard.close()
    return {
        "weights": weights(loop.net),
        "kept": before.get("kept"),
        "verdicts": loop.verdicts(),
        "skips": [(s.step, s.reason.value) for s in loop.told(UpdateSkipped)],
    }


def test_accumulation_without_no_sync_is_left_alone_and_not_called_skipped(
    pool: GlooPool, tmp_path: Path
) -> None:
    plain = pool.run(accumulating, WORLD, None, False)
    guarded = pool.run(accumulating, WORLD, str(tmp_path), False)
    assert [row["weights"] for row in guarded] == [row["weights"] for row in plain]
    assert guarded[0]["verdicts"] == guarded[0]["skips"] == []


def test_a_nan_in_an_earlier_backward_of_an_update_spoils_the_update(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(accumulating, WORLD, str(tmp_path), True)
    assert {row["weights"] for row in rows} == {rows[0]["weights"]}
    assert [row["kept"] for row in rows] == [4] * WORLD
    assert [v[:2] for v in rows[0]["verdicts"]] == [(7, "nonfinite")]
    assert [reason for _, reason in rows[0]["skips"]] == ["nonfinite"]


def summed(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    loop = Loop(rank, group, run_dir)
    for _ in range(9):
        loop.optimizer.zero_grad()
        (0.5 * loop.forward() + 0.5 * loop.forward()).backward()
        loop.optimizer.step()
    loop.guard.close()
    return {
        "verdicts": loop.verdicts(),
        "coverage": [p.coverage.value for p in loop.told(PreflightDone)],
        "comparisons": sum(p.comparisons for p in loop.told(Progress)),
    }


def test_a_weighted_sum_of_two_losses_is_audited_as_one_backward(
    pool: GlooPool, tmp_path: Path
) -> None:
    row = pool.run(summed, WORLD, str(tmp_path))[0]
    assert (row["verdicts"], row["coverage"]) == ([], ["full"])
    assert row["comparisons"] == 4 * WORLD  # both preflight steps, then steps 4 and 8


class OutOfLuck(RuntimeError):
    """Stands for an out-of-memory error in a closure."""


def broken_step(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    loop = Loop(rank, group, run_dir, audit_every=None)

    def closure(fails: bool) -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.forward()
        loss.backward()
        if fails:
            raise OutOfLuck
        return loss

    for step in range(1, 7):
        loop.poison = float("nan") if step == 5 else 1.0
        before = weights(loop.net)
        with contextlib.suppress(OutOfLuck):
            loop.optimizer.step(lambda step=step: closure(step == 3))
        if step == 5:
            kept = weights(loop.net) == before
    loop.guard.close()
    return {"kept": kept, "skips": [s.reason.value for s in loop.told(UpdateSkipped)]}


def test_an_exception_inside_a_step_does_not_switch_the_skips_off(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(broken_step, WORLD, str(tmp_path))
    assert [row["kept"] for row in rows] == [True] * WORLD
    assert rows[0]["skips"][-1] == "nonfinite"


def audited_twice(rank: int, group: Any, run_dir: str) -> list[tuple[int, str, str]]:
    loop = Loop(rank, group, run_dir)
    wrong = {8}

    def spoil(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 1.001 if loop.guard.step in wrong and rank == 1 else output

    loop.net[2].register_forward_hook(spoil)
    for step in range(1, 14):
        loop.optimizer.zero_grad()
        loop.forward().backward()
        loop.optimizer.step()
        if step in (6, 9, 12):
            loop.guard.save_checkpoint(lambda: None)
    loop.guard.close()
    return [(c.step, c.result.value, c.reason.value) for c in loop.told(CheckpointEvent)]


def test_a_failed_audit_leaves_nothing_to_be_confirmed_by_the_next_clean_one(
    pool: GlooPool, tmp_path: Path
) -> None:
    assert pool.run(audited_twice, WORLD, str(tmp_path))[0] == [
        (6, "provisional", "ok"),
        (9, "withheld", "no_audit"),  # a hook on one rank is software: the audit names nobody
        (12, "saved", "ok"),
    ]


def two_epochs(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    loop = Loop(rank, group, run_dir, deadline_seconds=10.0)
    withheld = []
    for epoch in (1, 2):
        with Join([loop.model, loop.guard]):
            for step in range(3 if rank == epoch else 7):
                loop.optimizer.zero_grad()
                loop.forward().backward()
                loop.optimizer.step()
                if step == 5:
                    withheld.append(loop.guard.save_checkpoint(lambda: None))
        loop.guard.save_checkpoint(lambda: None)
    loop.guard.close()
    return {
        "step": loop.guard.step,
        "weights": weights(loop.net),
        "verdicts": loop.verdicts(),
        "withheld": withheld,
        "notes": [n.code for n in loop.told(Note)],
    }


def test_join_counts_the_steps_of_the_others_over_several_epochs(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(two_epochs, WORLD, str(tmp_path))
    assert [row["step"] for row in rows] == [14] * WORLD
    assert len({row["weights"] for row in rows}) == 1
    assert [row["verdicts"] for row in rows] == [[]] * WORLD
    assert rows[0]["withheld"] == [False, False]
    assert rows[0]["notes"] == ["joined"]


def different_options(rank: int, group: Any, run_dir: str) -> str:
    try:
        Loop(rank, group, run_dir, audit_every=4 if rank else 5, deadline_seconds=10.0)
    except sdcwatch.ConfigurationError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_options_all_learn_which(pool: GlooPool, tmp_path: Path) -> None:
    said = pool.run(different_options, WORLD, str(tmp_path))
    assert len(set(said)) == 1
    assert "`audit_every` 5 on rank 0, 4 on ranks 1 and 2" in said[0]


def stopped(rank: int, group: Any, run_dir: str) -> tuple[str, int]:
    loop = Loop(rank, group, run_dir, on_failure="stop")
    loop.poison = float("nan")
    with contextlib.suppress(sdcwatch.CorruptionDetected):
        loop.forward().backward()
    loop.guard.close()
    (finished,) = loop.told(RunFinished)
    return finished.state.value, finished.exit_code


def test_a_stop_that_the_loop_swallows_is_recorded_as_one(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(stopped, WORLD, str(tmp_path)) == [("failed", 80)] * WORLD
