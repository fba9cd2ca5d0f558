import statistics
from dataclasses import replace

import pytest

from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Count,
    Durations,
    GateReason,
    Outcome,
    Phase,
    Progress,
)
from sdcwatch.core.summary import fold
from sdcwatch.core.thinning import interval_seconds, merged, thin


def progress(step: int, **more: object) -> Progress:
    values: dict[str, object] = {
        "counts": (Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=10),),
        "durations": (Durations.of(Check.NONFINITE, Phase.REPLAY, [0.001 * (step % 7 + 1)] * 10),),
        "plain_steps": 10,
        "plain_seconds": 1.0,
        "overhead_seconds": {"nonfinite": 0.25},
        "loss": 1.0 / step,
        "steps_at_risk": step,
        **more,
    }
    return Progress(step=step, time=float(step), first_step=step - 9, **values)  # type: ignore[arg-type]


def saved(step: int) -> CheckpointEvent:
    return CheckpointEvent(
        step=step, time=float(step), result=CheckpointResult.SAVED, reason=GateReason.OK
    )


def test_two_windows_add_up_and_the_later_one_has_the_last_word() -> None:
    both = merged(progress(10, comparisons=3), progress(20, comparisons=4, loss=None))

    assert (both.first_step, both.step, both.time) == (1, 20, 20.0)
    assert (both.counts[0].count, both.comparisons, both.plain_steps) == (20, 7, 20)
    assert both.overhead_seconds == {"nonfinite": 0.5}
    assert (both.loss, both.steps_at_risk) == (0.1, 20)
    assert sum(both.durations[0].counts) == 20


def test_counts_of_other_causes_stay_apart() -> None:
    def counted(cause: Cause, number: int) -> tuple[Count, ...]:
        return (
            Count(check=Check.NONFINITE, outcome=Outcome.REPRODUCIBLE, count=number, cause=cause),
        )

    both = merged(
        progress(10, counts=counted(Cause.SCALING, 3) + counted(Cause.DATA, 1)),
        progress(20, counts=counted(Cause.SCALING, 4)),
    )

    assert {c.cause: c.count for c in both.counts} == {Cause.SCALING: 7, Cause.DATA: 1}


def test_a_run_folded_from_thinned_records_is_the_run_folded_from_all() -> None:
    records = [progress(10 * n) if n % 50 else saved(10 * n) for n in range(1, 1000)]

    few = thin(records, kept=100)

    assert fold(few) == fold(records)
    assert len(few) < 450


def test_what_lies_between_two_events_stays_between_them() -> None:
    few = thin([progress(10), saved(10), progress(20), progress(30), saved(30)] * 40, kept=2)

    assert [r.step for r in few if isinstance(r, CheckpointEvent)] == [10, 30] * 40
    assert len(few) < 180  # of 200, where at most 160 can be left


def test_a_short_run_is_kept_as_it_is() -> None:
    records = [progress(10 * n) for n in range(1, 50)]

    assert thin(records) == records


@pytest.mark.parametrize(
    ("running", "interval"), [(0, 0.0), (59, 0.0), (60, 1.0), (600, 10.0), (86_400, 30.0)]
)
def test_the_interval_of_a_log_grows_to_half_a_minute(running: float, interval: float) -> None:
    assert interval_seconds(running) == interval


@pytest.mark.parametrize("counted", [1, 2, 3, 4, 9, 10])
def test_the_median_of_a_histogram_is_that_of_its_samples(counted: int) -> None:
    entry = Durations.of(Check.REPLAY, Phase.REPLAY, [0.0003 * 3**n for n in range(counted)])

    assert entry.median == pytest.approx(statistics.median(entry.samples()))
    assert replace(entry, counts=(0,) * len(entry.counts), sum=0.0).median == 0.0
