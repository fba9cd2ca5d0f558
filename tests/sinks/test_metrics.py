import json
import math
from dataclasses import replace

import pytest

from sdcwatch.core.catalog import BY_NAME, CATALOG, LOSS
from sdcwatch.core.records import (
    Cause,
    Check,
    Count,
    Outcome,
    Progress,
    Verdict,
    decode,
    to_dict,
)
from sdcwatch.core.summary import SummaryBuilder
from sdcwatch.sinks.metrics import VERDICT_SETS, RecordMetrics

SELF_METRICS = {m.name for m in CATALOG if m.name.startswith("sdcwatch.telemetry.")}


def measured(records, metrics=None):
    """Every measurement of some records, the info metrics as they stand after each."""
    metrics, builder, found = metrics or RecordMetrics(), SummaryBuilder(), []
    for record in records:
        builder.add(record)
        summary = builder.summary()
        found.append(metrics.measure(record, summary))
        found.append([m for infos in metrics.infos(summary).values() for m in infos])
    return [m for some in found for m in some]


def totals(records):
    """Counters summed and gauges as last set, by metric and attribute values."""
    found = {}
    for m in measured(records):
        key = (m.metric.name, *m.attributes.values())
        found[key] = found.get(key, 0) + m.value if m.metric.kind == "counter" else m.value
    return found


def test_every_measurement_is_in_the_catalogue_with_its_attributes_and_values(faulty_run):
    for m in measured(faulty_run):
        assert m.metric in CATALOG
        assert set(m.metric.labels) == set(m.attributes)
        for attribute in m.metric.attributes:
            allowed = attribute.values
            assert allowed is None or m.attributes[attribute.name] in allowed


def test_a_faulty_run_measures_every_metric_of_the_catalogue(faulty_run):
    assert {m.name for m in CATALOG} - SELF_METRICS == {m.metric.name for m in measured(faulty_run)}


def test_the_start_seeds_every_counter_with_zero(start):
    seeded = totals([start])

    counters = {m.name for m in CATALOG if m.kind == "counter"} - SELF_METRICS
    assert counters == {key[0] for key in seeded} & {m.name for m in CATALOG if m.kind == "counter"}
    assert all(seeded[key] == 0 for key in seeded if BY_NAME[key[0]].kind == "counter")
    assert sum(key[0] == "sdcwatch.verdicts" for key in seeded) == len(set(VERDICT_SETS))
    passes = {(check, Outcome.PASS, Cause.NONE) for check in Check}
    assert passes <= set(VERDICT_SETS)


def test_no_rank_has_a_state_before_it_is_named(start):
    assert not [key for key in totals([start]) if key[0].startswith("sdcwatch.rank.")]


def test_evidence_of_a_rank_adds_up_over_verdicts(faulty_run):
    twice = [*faulty_run, next(r for r in faulty_run if isinstance(r, Verdict))]
    who = ("3", "node-1", "cpu-sim-node-1-1", "i-0001")

    assert totals(faulty_run)[("sdcwatch.rank.evidence", *who, "replay", "mismatches")] == 2
    assert totals(twice)[("sdcwatch.rank.evidence", *who, "replay", "mismatches")] == 4


def test_a_verdict_counts_once_from_its_record(start):
    verdict = Verdict(step=9, time=1.0, check=Check.REPLAY, outcome=Outcome.WIDESPREAD, reason="x")

    assert totals([start, verdict])[("sdcwatch.verdicts", "replay", "widespread", "none")] == 1


def test_a_log_of_schema_1_in_which_progress_counted_it_too_counts_it_once(start):
    window = Progress(
        step=9,
        time=1.0,
        first_step=1,
        counts=(
            Count(check=Check.REPLAY, outcome=Outcome.PASS, count=2),
            Count(check=Check.REPLAY, outcome=Outcome.WIDESPREAD, count=1),
        ),
    )
    verdict = Verdict(step=9, time=1.0, check=Check.REPLAY, outcome=Outcome.WIDESPREAD, reason="x")
    old = [decode(json.dumps({**to_dict(r), "schema": 1})) for r in (window, verdict)]

    found = totals([start, *old])
    assert found[("sdcwatch.verdicts", "replay", "widespread", "none")] == 1
    assert found[("sdcwatch.verdicts", "replay", "pass", "none")] == 2


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

    assert not [m for m in measured([window]) if m.metric is LOSS]


def test_a_nan_loss_is_counted_whether_or_not_anybody_logs_it(faulty_run):
    found = totals(faulty_run)

    assert found[("sdcwatch.nonfinite", "output", "data")] == 1
    assert found[("sdcwatch.nonfinite", "local", "device")] == 1
