"""The checkpoint gate over a guarded run: what is saved, trusted how far, and what is withheld."""

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
from sdcwatch.checks import torch_internals as internals
from sdcwatch.core.records import CheckpointEvent, Progress
from sdcwatch.errors import CorruptionDetected, SdcwatchError
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

WORLD = 3


class Loop:
    """A guarded loop on one rank that asks for checkpoints. Preflight takes steps 1 and 2."""

    def __init__(self, rank: int, group: Any, run_dir: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.run_dir, self.step = rank, Path(run_dir), 0
        self.net, self.memory = nn.Linear(4, 2), MemorySink()
        self.nan_at: set[int] = set()
        self.wrong_at: set[int] = set()
        self.net.register_forward_hook(self._spoil)
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.guard = sdcwatch.init(
            self.model,
            self.optimizer,
            **{
                "audit_every": 4,
                "fingerprint_every": None,
                "node": f"n{rank}",
                "run_dir": run_dir,
                "sinks": [self.memory],
                **QUIET,
                **options,
            },
        )

    def _spoil(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """A device that computes wrongly, inside of the audited call."""
        if self.rank == 1 and self.step in self.nan_at and not sdcwatch.replaying():
            return output * float("nan")
        if self.rank == 1 and self.step in self.wrong_at:
            with internals.dispatch_modes_off():  # out of the script's sight, as in a device
                output.data.mul_(1.5)
        return output

    def advance(self, to: int) -> None:
        while self.step < to:
            self.step += 1
            self.optimizer.zero_grad()
            draw = torch.Generator().manual_seed(100 * self.rank + self.step)
            self.model(torch.randn(3, 4, generator=draw)).square().mean().backward()
            self.optimizer.step()

    def save(self, on: str = "rank0") -> bool:
        place = self.run_dir / f"step-{self.step}-rank-{self.rank}.pt"
        write: Callable[[], object] = lambda: torch.save(self.net.state_dict(), place)  # noqa: E731
        return self.guard.save_checkpoint(write, on=on)  # type: ignore[arg-type]

    def told(self) -> list[tuple[int, str, str, int | None]]:
        """Step, result, reason and age of the last clean audit, of every checkpoint."""
        return [
            (c.step, c.result.value, c.reason.value, c.audit_age)
            for c in self.memory.records
            if isinstance(c, CheckpointEvent)
        ]


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("*.pt"))


def trusted(rank: int, group: Any, run_dir: str, on: str) -> tuple[list[bool], list[Any]]:
    loop = Loop(rank, group, run_dir)
    saved = []
    for step in (1, 2, 3, 4, 6, 8):
        loop.advance(step)
        saved.append(loop.save(on))
    loop.guard.close()
    return saved, loop.told()


@pytest.mark.parametrize("on", ["rank0", "all"])
def test_a_checkpoint_is_saved_at_a_clean_audit_and_provisional_until_the_next(
    pool: GlooPool, tmp_path: Path, on: str
) -> None:
    rows = pool.run(trusted, WORLD, str(tmp_path), on)
    assert all(row == rows[0] for row in rows)
    saved, told = rows[0]
    assert saved == [False, True, True, True, True, True]
    assert told == [
        (1, "withheld", "not_preflighted", 0),
        (2, "saved", "ok", 0),
        (3, "provisional", "ok", 1),
        (3, "confirmed", "ok", 0),  # by the audit of step 4
        (4, "saved", "ok", 0),
        (6, "provisional", "ok", 2),
        (6, "confirmed", "ok", 0),
        (8, "saved", "ok", 0),
    ]
    ranks = range(WORLD) if on == "all" else [0]
    assert files(tmp_path) == sorted(
        f"step-{s}-rank-{r}.pt" for s in (2, 3, 4, 6, 8) for r in ranks
    )


def withheld(rank: int, group: Any, run_dir: str, why: str) -> tuple[bool, list[Any], str]:
    options: dict[str, Any] = {
        "too old": {"max_audit_age": 1},
        "not finite": {},
        "audit failed": {},
        "suspect": {},
        "tainted": {"mode": "observe", "fingerprint_every": 3},
        "weights": {"mode": "observe"},
    }[why]
    loop = Loop(rank, group, run_dir, **options)
    if why == "not finite":
        loop.nan_at = {6}
    if why in ("audit failed", "suspect"):
        loop.wrong_at = {8}
    loop.advance(5)
    if why in ("tainted", "weights") and rank == 1:
        loop.net.weight.data[0, 0] += 1.0
    loop.advance({"audit failed": 8, "suspect": 10, "tainted": 7}.get(why, 6))
    saved = loop.save()
    loop.guard.close()
    (event,) = [r for r in loop.memory.records if isinstance(r, CheckpointEvent)]
    return saved, loop.told(), event.detail


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("too old", (6, "withheld", "audit_too_old", 2)),
        ("not finite", (6, "withheld", "nonfinite", 2)),
        ("audit failed", (8, "withheld", "replay", None)),  # nothing before it counts any more
        ("suspect", (10, "withheld", "suspect", None)),  # two steps after it was named
        ("tainted", (7, "withheld", "tainted", 3)),
        ("weights", (6, "withheld", "tainted", 2)),
    ],
)
def test_a_checkpoint_that_a_check_does_not_stand_behind_is_withheld_with_the_reason(
    pool: GlooPool, tmp_path: Path, why: str, told: tuple[int, str, str, int]
) -> None:
    rows = pool.run(withheld, WORLD, str(tmp_path), why)
    assert [row[:2] for row in rows] == [(False, [told])] * WORLD
    if told[2] in ("suspect", "replay"):
        assert "rank 1 on n1 (" in rows[0][2], "who was named"
    assert files(tmp_path) == []


def corrupted(rank: int, group: Any, run_dir: str, when: int) -> tuple[int, list[Any]]:
    loop = Loop(rank, group, run_dir, checkpoint_every=6)
    loop.advance(when)
    if rank == 1:
        loop.net.weight.data[1, 2] += 1.0
    named = -1
    try:
        loop.advance(6)
        loop.save()
    except CorruptionDetected as error:
        named = error.verdict.suspects[0].rank
    loop.guard.close()
    return named, loop.told()


@pytest.mark.parametrize("when", [5, 6], ids=["after the update before", "after its own update"])
def test_replicas_that_differ_at_a_checkpoint_stop_the_run_and_leave_no_file(
    pool: GlooPool, tmp_path: Path, when: int
) -> None:
    rows = pool.run(corrupted, WORLD, str(tmp_path), when)
    assert rows == [(1, [(6, "withheld", "fingerprint", None)])] * WORLD
    assert files(tmp_path) == []


class DiskFull(OSError):
    """What `save` ends with."""


def failing(rank: int, group: Any, run_dir: str, on: str, bad: int) -> tuple[str, str, list[Any]]:
    loop = Loop(rank, group, run_dir)
    loop.advance(4)

    def save() -> None:
        if rank == bad:
            message = "no space left"
            raise DiskFull(message)

    try:
        loop.guard.save_checkpoint(save, on=on)  # type: ignore[arg-type]
    except (DiskFull, SdcwatchError) as error:
        said = (type(error).__name__, str(error))
    else:
        said = ("", "")
    loop.advance(5)  # the run can go on
    assert loop.save()
    loop.guard.close()
    return *said, loop.told()


@pytest.mark.parametrize(("on", "bad"), [("rank0", 0), ("all", 2)])
def test_a_save_that_raises_does_so_on_its_rank_and_is_known_on_all(
    pool: GlooPool, tmp_path: Path, on: str, bad: int
) -> None:
    rows = pool.run(failing, WORLD, str(tmp_path), on, bad)
    for rank, (kind, text, told) in enumerate(rows):
        assert told[0] == (4, "failed", "save_error", 0)
        assert told[1] == (5, "provisional", "ok", 1)
        if rank == bad:
            assert (kind, text) == ("DiskFull", "no space left")
        else:
            assert kind == "SdcwatchError"
            assert f"save raised on rank {bad}: DiskFull: no space left" in text


def scheduled(rank: int, group: Any, run_dir: str) -> tuple[list[Any], int, int]:
    loop = Loop(rank, group, run_dir, audit_every=100, checkpoint_every=3)
    for step in (3, 4, 6):
        loop.advance(step)
        loop.save()
    loop.guard.close()
    progress = [r for r in loop.memory.records if isinstance(r, Progress)]
    return (
        loop.told(),
        sum(p.audit_steps for p in progress),
        sum(p.weight_checks for p in progress),
    )


def test_steps_at_which_checkpoints_are_due_are_audited_ahead_of_time(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(scheduled, WORLD, str(tmp_path))
    assert all(row == rows[0] for row in rows)
    told, audited, weight_checks = rows[0]
    assert told == [
        (3, "saved", "ok", 0),
        (4, "provisional", "ok", 1),
        (4, "confirmed", "ok", 0),
        (6, "saved", "ok", 0),
    ]
    assert audited == 4  # two of preflight, and steps 3 and 6
    assert weight_checks == 6  # before the first step, after 3 and 6, and at each checkpoint


def without_audits(rank: int, group: Any, run_dir: str) -> list[Any]:
    loop = Loop(rank, group, run_dir, audit_every=None)
    loop.advance(2)
    assert loop.save()
    loop.guard.close()
    return loop.told()


def test_without_audits_a_checkpoint_stays_provisional(pool: GlooPool, tmp_path: Path) -> None:
    rows = pool.run(without_audits, WORLD, str(tmp_path))
    assert rows == [[(2, "provisional", "no_audit", None)]] * WORLD
