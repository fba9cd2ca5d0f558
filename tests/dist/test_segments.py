"""What a resumed run knows of its earlier segments: whose device has computed right before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Cause, Outcome, PreflightDone
from sdcwatch.faults import Fault, FaultPlan
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from training import Job, of, train, verdicts

pytestmark = pytest.mark.dist

BROKEN = FaultPlan(
    faults=(
        Fault(
            site="activation",
            target="3",
            kind="scale",
            factor=1.001,
            ranks=(1,),
            steps=(1, 99),
            persistence="sticky",
        ),
    )
)


def resumed(rank: int, group: Any, run_dir: str, before: bool) -> Any:
    """A segment in which rank 1 is broken from its first step, perhaps after a healthy one."""
    guard = {"audit_every": 2, "fingerprint_every": 4, "run_dir": run_dir, "node": f"n{rank}"}
    healthy = Job(guard=guard, steps=4)
    if before:
        assert verdicts(train(rank, group, healthy)) == []
    guard = {**guard, "start_step": 4 if before else 0}
    return train(rank, group, replace(healthy, guard=guard, plan=BROKEN, steps=8))


@pytest.mark.parametrize("before", [False, True], ids=["first segment", "after a healthy one"])
def test_a_device_that_is_bad_from_the_first_step_is_named_if_it_was_right_in_an_earlier_segment(
    pool: GlooPool, tmp_path: Path, before: bool
) -> None:
    results = pool.run(resumed, 4, str(tmp_path), before)
    for result in results:
        found = verdicts(result)
        named = {s.rank for v in found for s in v.suspects}
        assert named == ({1} if before else set())
        assert (Outcome.DIFFERS in {v.outcome for v in found}) is not before
        assert Cause.SOFTWARE not in {v.cause for v in found}
        preflights = of(result, PreflightDone)
        assert [p.left_out for p in preflights] == [() if before else (1,)]
        if before:
            assert "matched in an earlier segment" in " ".join(preflights[0].notes)
