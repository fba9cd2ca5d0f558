"""No device is named in a healthy loop, whatever it does; a broken one is where audits cover it.

Each loop of `outside` and `inside` runs three times on three ranks: without a guard, with one, and
with one while a module of one rank computes wrongly from some step on. Where a rank is left out of
the audits, another one is broken, and a fourth takes part: two cannot tell which of them is wrong.
`tools/gauntlet.py` runs the same at 60 steps, with a fault in every loop.
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
from course import FULL, LOOPS, WORLD, Loop

pytestmark = pytest.mark.dist

STEPS, AUDIT_EVERY = 24, 3
BROKEN = (("broken",), 12, AUDIT_EVERY, 7)
"""Steps, and from when a device is broken: two audits find it."""
STOOD_FOR = {
    "CLIP: features gathered, own rows with gradient": "CLIP: features gathered with gradient",
    "a branch that depends on the rank": "a scale that one rank reads from its own configuration",
    "a codebook reduced over ranks in the forward": (
        "statistics over ranks in the forward (SyncBatchNorm)"
    ),
    "a collective that only some steps need": "a collective every fifth step in the forward",
    "a constant read from each rank's own file": "a scale that depends on the rank",
    "a gather in the forward (CLIP)": "contrast with the keys of all ranks, in the forward",
    "a log of losses in a list": "a counter and a schedule in attributes",
    "a memory bank in a list of tensors": "a memory bank that is used once it is full",
    "a number of micro-batches that changes from step to step": "accumulation under no_sync",
    "a parameter that the forward clamps": "a momentum encoder that the forward moves",
    "a schedule in the loss": "a counter and a schedule in attributes",
    "a sum whose order differs on one rank": (
        "a scale that one rank reads from its own configuration"
    ),
    "a teacher that only one rank has": "a weight of each rank's own on the loss",
    "a token count over ranks in the forward": (
        "statistics over ranks in the forward (SyncBatchNorm)"
    ),
    "accumulation without no_sync": "accumulation under no_sync",
    "adversarial inputs from a first backward on the bare model": (
        "a penalty by autograd.grad before the backward"
    ),
    "an LSTM": "a transformer layer with SDPA and dropout",
    "an input buffer that is refilled before the backward": (
        "one input buffer, filled anew in place"
    ),
    "batches that are skipped after the forward": (
        "epochs that end early, with a forward that is never gone through backward"
    ),
    "class weights from each rank's own data": "a weight of each rank's own on the loss",
    "many small buckets": "gradient_as_bucket_view",
    "mixup with NumPy": "noise from NumPy",
    "no broadcast of buffers": "BatchNorm",
    "noise from a NumPy generator in an attribute, seeded by rank": (
        "noise from a generator in an attribute, seeded by rank"
    ),
    "noise on the gradients before the step": "retain_grad and hooks on the outputs",
    "one more term on one rank": "a weight of each rank's own on the loss",
    "outputs in a dictionary": "outputs in a named tuple, one unused",
    "outputs kept in an attribute for metrics": "outputs kept in a dictionary of the module",
    "set_to_none=False": "accumulation in half precision",
}
"""Loops that run by command alone, each with one of its kind that runs here or in `test_trials`."""
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
WHAT_TO_WRITE = (
    "Return what it gathers from the module, and gather in the training loop",
    "keep it in a buffer or an attribute of the module",
    "keep a number in the module and compute the value from it",
    "change them after optimizer.step()",
    "let the module return what that term is computed from, or the term itself",
    "give the module what differs between ranks as an argument",
    "call what uses them outside of the module that DDP wraps",
)
"""One of these stands in the reason wherever coverage is not full."""
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
        for coverage, reason in zip(guarded["coverage"], guarded["reason"], strict=True):
            assert coverage == FULL or any(do in reason for do in WHAT_TO_WRITE), where
        differing = [v for v in guarded["verdicts"] if v.outcome is Outcome.DIFFERS]
        assert [v.ranks for v in differing] == ([entry.left_out] if entry.left_out else []), where
        assert all(v.cause is Cause.SOFTWARE and v.operator for v in differing), where
        software = [v for v in guarded["verdicts"] if v.outcome is Outcome.UNATTRIBUTED]
        assert bool(software) == bool(entry.software), where
        assert all(v.cause is Cause.SOFTWARE for v in software), where
        assert all(entry.software in v.operator for v in software), where


def check_broken(entry: Loop, rows: list[dict[str, dict[str, Any]]]) -> None:
    planted = rows[entry.broken]["broken"]["planted"]
    assert planted > 0, f"{entry.name}: nothing was planted"
    for rank, row in enumerate(rows):
        broken = row["broken"]
        where = f"{entry.name}, rank {rank}: {broken['reason']} {broken['verdicts']}"
        assert named(broken["verdicts"]) == ({entry.broken} if entry.covered else set()), where


@pytest.mark.parametrize(
    "name", sorted(n for n, entry in LOOPS.items() if not entry.trial and n not in STOOD_FOR)
)
def test_a_healthy_loop_trains_as_without_a_guard_and_nobody_is_named(
    pool: GlooPool, name: str
) -> None:
    kinds = ("plain", "guarded")
    check_healthy(LOOPS[name], pool.run(go, 3, name, kinds, STEPS, AUDIT_EVERY))


@pytest.mark.parametrize("name", BROKEN_IN_CI)
def test_a_broken_device_is_named_where_audits_cover_the_loop(
    pool: GlooPool, larger_pool: GlooPool, name: str
) -> None:
    ranks = LOOPS[name].ranks
    where = pool if ranks == WORLD else larger_pool
    check_broken(LOOPS[name], where.run(go, ranks, name, *BROKEN))


def test_sixty_loops_run_here_and_each_other_has_one_of_its_kind() -> None:
    here = {name for name, entry in LOOPS.items() if not entry.trial} - STOOD_FOR.keys()
    assert len(here) >= 60
    text = Path(__file__).with_name("test_trials.py").read_text(encoding="utf-8")
    for name, other in STOOD_FOR.items():
        assert name in LOOPS
        assert other in here or f'"{other}"' in text, other
    assert len({inside.__name__, outside.__name__, setups.__name__, trials.__name__}) == 4
