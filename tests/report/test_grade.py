from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sdcwatch.core.grade import Grade, Planted, grade
from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Outcome,
    Record,
    RunStarted,
    UpdateSkipped,
    Verdict,
)

Planting = tuple[Planted, ...]


def verdicts(records: list[Record]) -> list[Verdict]:
    return [r for r in records if isinstance(r, Verdict)]


def edited(records: list[Record], target: Record, **changes: Any) -> list[Record]:
    return [replace(r, **changes) if r is target else r for r in records]


def wrong(result: Grade) -> list[str]:
    return [f.planted.name for f in result.faults if f.ok is False]


def test_a_run_that_found_everything_and_nothing_else_passes(
    story: list[Record], planted: Planting
) -> None:
    result = grade(story, planted)

    assert (wrong(result), result.unexpected, result.breaches) == ([], (), ())
    assert result.passed
    assert result.exit_code == 0


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("field", ["check", "outcome", "step", "ranks"])
def test_editing_any_verdict_in_any_way_fails_the_run(
    story: list[Record], planted: Planting, number: int, field: str
) -> None:
    verdict = verdicts(story)[number]
    other_check = Check.REPLAY if verdict.check is not Check.REPLAY else Check.NONFINITE
    moved = tuple(replace(s, rank=0) for s in verdict.suspects)
    changes: dict[str, dict[str, Any]] = {
        "check": {"check": other_check},
        "outcome": {"outcome": Outcome.UNATTRIBUTED},
        "step": {"step": 99},
        "ranks": {"suspects": moved} if moved else {"ranks": (0,)},
    }

    result = grade(edited(story, verdict, **changes[field]), planted)

    assert wrong(result) == [planted[number].name]
    assert result.exit_code == 1


@pytest.mark.parametrize("number", range(4))
def test_a_missing_verdict_fails_the_run(
    story: list[Record], planted: Planting, number: int
) -> None:
    gone = verdicts(story)[number]

    result = grade([r for r in story if r is not gone], planted)

    assert wrong(result) == [planted[number].name]
    assert result.faults[number].remark == "no verdict came"


def test_an_alarm_that_nobody_planted_fails_the_run(story: list[Record], planted: Planting) -> None:
    extra = replace(verdicts(story)[0], step=33)

    result = grade([*story[:5], extra, *story[5:]], planted)

    assert result.unexpected == (extra,)
    assert result.exit_code == 1


def test_an_alarm_in_a_run_without_faults_fails_it(story: list[Record]) -> None:
    assert len(grade(story, ()).unexpected) == 4


def test_the_business_of_a_loss_scale_is_no_alarm(story: list[Record], planted: Planting) -> None:
    overflow = replace(
        verdicts(story)[0],
        step=33,
        outcome=Outcome.REPRODUCIBLE,
        cause=Cause.SCALING,
        suspects=(),
        action=verdicts(story)[2].action,
    )

    assert grade([*story[:5], overflow, *story[5:]], planted).passed


def test_a_one_off_fault_that_is_reported_twice_fails_the_run(
    story: list[Record], planted: Planting
) -> None:
    result = grade([*story[:4], verdicts(story)[0], *story[4:]], planted)

    assert wrong(result) == ["nan"]
    assert result.faults[0].remark == "reported 2 times"


def test_a_sticky_fault_may_be_reported_at_every_audit(
    story: list[Record], planted: Planting
) -> None:
    sticky = replace(planted[1], last_step=65, step=None)
    again = replace(verdicts(story)[1], step=62)
    skipped = next(r for r in story if isinstance(r, UpdateSkipped) and r.step == 60)

    result = grade(
        [*story[:9], again, replace(skipped, step=62), *story[9:]],
        (planted[0], sticky, *planted[2:]),
    )

    assert result.passed
    assert len(result.faults[1].verdicts) == 2


def test_a_fault_that_cannot_be_seen_and_was_seen_fails_the_run(
    story: list[Record], planted: Planting
) -> None:
    seen = replace(verdicts(story)[1], step=91)

    result = grade([*story[:9], seen, *story[9:]], planted)

    assert wrong(result) == ["between audits"]


def test_a_fault_without_an_expectation_is_not_graded(
    story: list[Record], planted: Planting
) -> None:
    open_ended = replace(planted[0], expected="nothing stated", check=None, outcome=None)

    result = grade(story, (open_ended, *planted[1:]))

    assert result.faults[0].ok is None
    assert result.passed


def test_a_fault_after_the_end_of_the_run_is_not_graded(
    story: list[Record], planted: Planting
) -> None:
    late = replace(planted[0], name="late", first_step=900, last_step=900)

    result = grade(story, (*planted, late))

    assert result.faults[-1].ok is None
    assert result.faults[-1].remark == "not reached"


def _without_skip(records: list[Record]) -> list[Record]:
    return [r for r in records if not (isinstance(r, UpdateSkipped) and r.step == 13)]


def _saved_when_tainted(records: list[Record]) -> list[Record]:
    return [
        replace(r, result=CheckpointResult.SAVED)
        if isinstance(r, CheckpointEvent) and r.result is CheckpointResult.WITHHELD
        else r
        for r in records
    ]


def _without_second_segment(records: list[Record]) -> list[Record]:
    return records[:-4]


def _second_segment_cut(records: list[Record]) -> list[Record]:
    at = max(i for i, r in enumerate(records) if isinstance(r, RunStarted))
    return records[: at + 1]


def _bad_end(records: list[Record]) -> list[Record]:
    return edited(records, records[-1], exit_code=83, reason="rank 2 is gone")


@pytest.mark.parametrize(
    ("edit", "breach"),
    [
        (_without_skip, "step 13: the update should have been skipped and was not"),
        (_saved_when_tainted, "step 120: a checkpoint was saved after a failed check"),
        (_second_segment_cut, "the run did not finish"),
        (_bad_end, "the run ended with exit code 83: rank 2 is gone"),
        (_without_second_segment, "the run ended with exit code 80: tainted"),
        (lambda records: records[1:15], "the run never started"),
    ],
)
def test_a_guard_that_did_not_act_on_what_it_found_fails_the_run(
    story: list[Record],
    planted: Planting,
    edit: Callable[[list[Record]], list[Record]],
    breach: str,
) -> None:
    result = grade(edit(story), planted)

    assert breach in result.breaches
    assert result.exit_code == 1
