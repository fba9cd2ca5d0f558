"""No device is named in a healthy loop, whatever it does; a broken one is where audits cover it.

Each loop of `outside` and `inside` runs three times on three ranks: without a guard, with one, and
with one while a module of rank 1 computes wrongly from step 12 on. `tools/gauntlet.py` runs the
same at 60 steps, with a fault in every loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Cause, Outcome, Verdict
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
import course
import inside
import outside
import setups
import trials
from course import BROKEN, FULL, LOOPS, Loop

pytestmark = pytest.mark.dist

STEPS, AUDIT_EVERY = 24, 3
BROKEN_IN_CI = (
    "cross entropy",
    "dropout",
    "BatchNorm",
    "accumulation under no_sync",
    "a GAN with two guards",
    "an L2 term on the parameters in the loss",
    "a token count over ranks in the forward",
    "a scale that depends on the rank",
    "a scale that one rank reads from its own configuration",
    "a momentum encoder that the forward moves",
)
"""One loop of each kind."""
NOT_LOST = ("scaler", "not_stepped")
"""Updates that plain DDP would not have made either."""


def go(rank: int, group: Any, *arguments: Any) -> dict[str, dict[str, Any]]:
    return course.arms(rank, group, *arguments)


def named(verdicts: list[Verdict]) -> set[int]:
    return {s.rank for v in verdicts for s in v.suspects}


def check_healthy(entry: Loop, rows: list[dict[str, dict[str, Any]]]) -> None:
    for rank, row in enumerate(rows):
        plain, guarded = row["plain"], row["guarded"]
        where = f"{entry.name}, rank {rank}: {guarded['reason']} {guarded['verdicts']}"
        assert guarded["stopped"] == "", where
        assert named(guarded["verdicts"]) == set(), where
        assert not any(v.outcome is Outcome.NOT_REPRODUCED for v in guarded["verdicts"]), where
        lost = [s for s in guarded["skips"] if s[1] not in NOT_LOST]
        assert lost == [], where
        assert guarded["weights"] == plain["weights"], f"other weights: {where}"
        assert guarded["seen"] == plain["seen"], f"other outputs: {where}"
        assert set(guarded["coverage"]) == {entry.coverage, entry.later or entry.coverage}, where
        assert entry.because in guarded["reason"][0], where
        differing = [v for v in guarded["verdicts"] if v.outcome is Outcome.DIFFERS]
        assert [v.ranks for v in differing] == ([entry.left_out] if entry.left_out else []), where
        assert all(v.cause is Cause.SOFTWARE and v.operator for v in differing), where
        software = [v for v in guarded["verdicts"] if v.outcome is Outcome.UNATTRIBUTED]
        assert bool(software) == bool(entry.software), where
        assert all(v.cause is Cause.SOFTWARE for v in software), where
        assert all(entry.software in v.operator for v in software), where


def check_broken(entry: Loop, rows: list[dict[str, dict[str, Any]]]) -> None:
    assert rows[BROKEN]["broken"]["planted"] > 0, f"{entry.name}: nothing was planted"
    for rank, row in enumerate(rows):
        broken = row["broken"]
        where = f"{entry.name}, rank {rank}: {broken['reason']} {broken['verdicts']}"
        # Two that are left to compare cannot tell which of them is wrong.
        whole = entry.coverage == FULL and not entry.left_out
        found = named(broken["verdicts"])
        assert found <= ({BROKEN} if whole else set()), where
        assert found or not whole or entry.software or entry.later, where


@pytest.mark.parametrize("name", sorted(n for n, entry in LOOPS.items() if not entry.trial))
def test_a_healthy_loop_trains_as_without_a_guard_and_nobody_is_named(
    pool: GlooPool, name: str
) -> None:
    kinds = ("plain", "guarded")
    check_healthy(LOOPS[name], pool.run(go, 3, name, kinds, STEPS, AUDIT_EVERY))


@pytest.mark.parametrize("name", BROKEN_IN_CI)
def test_a_broken_device_is_named_where_audits_cover_the_loop(pool: GlooPool, name: str) -> None:
    check_broken(LOOPS[name], pool.run(go, 3, name, ("broken",), STEPS, AUDIT_EVERY))


def test_the_gauntlet_has_sixty_loops() -> None:
    assert len(LOOPS) >= 60
    assert len({inside.__name__, outside.__name__, setups.__name__, trials.__name__}) == 4
