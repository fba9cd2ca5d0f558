import math
from dataclasses import replace

import pytest

from sdcwatch.core.catalog import BY_NAME, CATALOG
from sdcwatch.core.records import Check, Count, Outcome, Progress, Verdict
from sdcwatch.sinks.metrics import RecordMetrics

SELF_METRICS = {m.name for m in CATALOG if m.name.startswith("sdcwatch.telemetry.")}


def totals(records):
    """Counters summed and gauges as last set, by metric and attribute values."""
    measurer, found = RecordMetrics(), {}
    for record in records:
        for m in measurer.measure(record):
            key = (m.metric, *m.attributes.values())
            add = BY_NAME[m.metric].kind == "counter"
            found[key] = found.get(key, 0) + m.value if add else m.value
    return found


def test_every_measurement_is_in_the_catalogue_with_its_attributes_and_values(faulty_run):
    measurer = RecordMetrics()
    for record in faulty_run:
        for m in measurer.measure(record):
            metric = BY_NAME[m.metric]
            assert set(metric.labels) == set(m.attributes)
            for attribute in metric.attributes:
                allowed = attribute.values
                assert allowed is None or m.attributes[attribute.name] in allowed


def test_a_faulty_run_measures_every_metric_of_the_catalogue(faulty_run):
    measurer = RecordMetrics()
    measured = {m.metric for record in faulty_run for m in measurer.measure(record)}

    assert {m.name for m in CATALOG} - SELF_METRICS == measured


def test_the_start_seeds_every_counter_with_zero(start):
    seeded = totals([start])

    counters = {m.name for m in CATALOG if m.kind == "counter"} - SELF_METRICS
    assert counters == {key[0] for key in seeded} & {m.name for m in CATALOG if m.kind == "counter"}
    assert all(seeded[key] == 0 for key in seeded if BY_NAME[key[0]].kind == "counter")
    assert sum(key[0] == "sdcwatch.verdicts" for key in seeded) == len(Check) * len(Outcome)


def test_no_rank_has_a_state_before_it_is_named(start):
    assert not [key for key in totals([start]) if key[0].startswith("sdcwatch.rank.")]


def test_evidence_of_a_rank_adds_up_over_verdicts(faulty_run):
    twice = [*faulty_run, next(r for r in faulty_run if isinstance(r, Verdict))]
    who = ("3", "node-1", "cpu-sim-node-1-1", "i-0001")

    assert totals(faulty_run)[("sdcwatch.rank.evidence", *who, "replay", "mismatches")] == 2
    assert totals(twice)[("sdcwatch.rank.evidence", *who, "replay", "mismatches")] == 4


@pytest.mark.parametrize("verdict_first", [False, True])
def test_a_verdict_counts_once_whether_its_window_comes_before_or_after(start, verdict_first):
    window = Progress(
        step=9,
        time=1.0,
        first_step=1,
        counts=(Count(check=Check.REPLAY, outcome=Outcome.WIDESPREAD, count=1),),
    )
    verdict = Verdict(
        step=9, time=1.0, check=Check.REPLAY, outcome=Outcome.WIDESPREAD, reason="many"
    )
    records = [verdict, window] if verdict_first else [window, verdict]

    assert totals([start, *records])[("sdcwatch.verdicts", "replay", "widespread")] == 1


def test_a_verdict_counts_although_its_window_never_came(start):
    verdict = Verdict(step=9, time=1.0, check=Check.REPLAY, outcome=Outcome.WIDESPREAD, reason="x")

    assert totals([start, verdict])[("sdcwatch.verdicts", "replay", "widespread")] == 1


def test_a_confirmed_checkpoint_is_good_from_the_step_at_which_it_was_saved(faulty_run, start):
    from sdcwatch.core.records import CheckpointEvent, CheckpointResult, GateReason

    def event(step, result):
        return CheckpointEvent(step=step, time=float(step), result=result, reason=GateReason.OK)

    provisional = event(40, CheckpointResult.PROVISIONAL)
    confirmed = event(50, CheckpointResult.CONFIRMED)

    assert totals([start, provisional])[("sdcwatch.last_good_checkpoint.step",)] == 0
    assert totals([start, provisional, confirmed])[("sdcwatch.last_good_checkpoint.step",)] == 40


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_no_number_leaves_the_last_one_standing(faulty_run, loss):
    window = replace(next(r for r in faulty_run if isinstance(r, Progress)), loss=loss)

    assert not [m for m in RecordMetrics().measure(window) if m.metric == "sdcwatch.loss"]


def test_a_nan_loss_is_counted_whether_or_not_anybody_logs_it(faulty_run):
    found = totals(faulty_run)

    assert found[("sdcwatch.nonfinite", "output", "data")] == 1
    assert found[("sdcwatch.nonfinite", "local", "device")] == 1
