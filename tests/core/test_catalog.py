import re

import pytest

from sdcwatch.core.catalog import BY_NAME, BY_PROMETHEUS, CATALOG, RESOURCE_LABELS
from sdcwatch.core.records import Cause, Check, Outcome

TEXT = ("step", "time", "operator", "path")
PROMETHEUS_NAME = re.compile(r"sdcwatch_[a-z]+(_[a-z]+)*")


def test_names_are_unique_over_both_conventions():
    assert len(BY_NAME) == len(BY_PROMETHEUS) == len(CATALOG)


@pytest.mark.parametrize("metric", CATALOG, ids=lambda m: m.name)
def test_a_metric_follows_the_conventions(metric):
    assert re.fullmatch(r"sdcwatch(\.[a-z_]+)+", metric.name)
    assert "total" not in metric.name
    assert metric.unit in ("", "s", "By") or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    assert metric.help.endswith(".")
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert PROMETHEUS_NAME.fullmatch(metric.prometheus)
    assert metric.prometheus.endswith("_total") == (metric.kind == "counter")
    assert ("_seconds" in metric.prometheus) == (metric.unit == "s")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", CATALOG, ids=lambda m: m.name)
def test_attributes_come_from_closed_sets_or_say_what_bounds_them(metric):
    assert len(set(metric.labels)) == len(metric.labels)
    assert not set(metric.labels) & set(RESOURCE_LABELS)
    # Only info metrics carry text: few series, replaced as a whole.
    assert not set(metric.labels) & {"le", "job", "tensor", "hash", *([] if metric.info else TEXT)}
    for attribute in metric.attributes:
        assert attribute.values or attribute.bound
        if attribute.values:
            assert len(set(attribute.values)) == len(attribute.values)


def test_verdicts_count_every_check_and_outcome():
    by_name = {a.name: a.values for a in BY_NAME["sdcwatch.verdicts"].attributes}
    assert by_name == {"check": tuple(Check), "outcome": tuple(Outcome), "cause": tuple(Cause)}


def test_prometheus_names_are_those_the_exporters_make():
    assert BY_NAME["sdcwatch.verdicts"].prometheus == "sdcwatch_verdicts_total"
    assert BY_NAME["sdcwatch.overhead.time"].prometheus == "sdcwatch_overhead_time_seconds_total"
    assert BY_NAME["sdcwatch.check.duration"].prometheus == "sdcwatch_check_duration_seconds"
    assert BY_NAME["sdcwatch.rank.state"].prometheus == "sdcwatch_rank_state"
