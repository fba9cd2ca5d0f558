"""The rules of dashboard-linter and pint that apply here.

Left out, with the reason: dashboard-linter's `instance` variable and matcher (a run is asked about
as a whole; its processes come and go), its `$__rate_interval` for increases over `$__range` in
stats (a total of the range is meant), pint's rules about a live server's labels and its cost
estimates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sdcwatch.core.catalog import BY_PROMETHEUS
from sdcwatch.monitor.config import duration_seconds

Dashboards = dict[str, dict[str, Any]]
SCRAPE_SECONDS = 15


def _targets(dashboards: Dashboards) -> Iterator[tuple[str, dict[str, Any]]]:
    for slug, dashboard in dashboards.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{slug}: {panel['title']}", target


def _functions(expression: str, name: str) -> list[tuple[str, str]]:
    """Metric and window of each call of a function over a range."""
    return re.findall(
        rf"\b{name}\((\w+?)(?:_bucket)?(?:\{{(?:[^{{}}`]|`[^`]*`)*\}})?\[([^\]]+)\]", expression
    )


def test_rates_of_dashboards_are_over_the_rate_interval(dashboards: Dashboards) -> None:
    seen = 0
    for name, target in _targets(dashboards):
        for _, window in _functions(target["expr"], "rate"):
            seen += 1
            assert window == "$__rate_interval", name
        for _, window in _functions(target["expr"], "increase"):
            assert window in ("$__rate_interval", "$__range"), name
    assert seen > 5


def test_only_counters_and_buckets_have_a_rate_and_no_gauge_does(
    dashboards: Dashboards, rules: list[dict[str, Any]]
) -> None:
    expressions = [t["expr"] for _, t in _targets(dashboards)] + [r["expr"] for r in rules]
    for expression in expressions:
        for function in ("rate", "increase"):
            for metric, _ in _functions(expression, function):
                if metric.startswith("sdcwatch_"):
                    assert BY_PROMETHEUS[metric].kind in ("counter", "histogram"), metric


def test_a_counter_is_never_read_at_an_instant(
    dashboards: Dashboards, rules: list[dict[str, Any]]
) -> None:
    expressions = [t["expr"] for _, t in _targets(dashboards)] + [r["expr"] for r in rules]
    for expression in expressions:
        for name, _, rest in re.findall(
            r"\b(sdcwatch_\w+_total)(\{(?:[^{}`]|`[^`]*`)*\})?(.)", expression + " "
        ):
            assert rest == "[", f"{name} in {expression[:80]}"


def test_windows_of_rules_hold_at_least_four_scrapes(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        for window in re.findall(r"\[(\w+)\]", rule["expr"]):
            assert duration_seconds(window) >= 4 * SCRAPE_SECONDS, rule["alert"]


def test_every_rule_compares_and_only_the_watchdog_always_fires(
    rules: list[dict[str, Any]],
) -> None:
    always = [r["alert"] for r in rules if not re.search(r"==|>=|<=|[^=!]>|<", r["expr"])]

    assert always == ["SdcwatchWatchdog"]


def test_levels_that_may_flap_wait_for_two_scrapes(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "time() -" in rule["expr"] and "increase(" not in rule["expr"]:
            assert duration_seconds(rule["for"]) >= 2 * SCRAPE_SECONDS, rule["alert"]


def test_a_regular_expression_is_used_only_where_several_values_match(
    rules: list[dict[str, Any]],
) -> None:
    for rule in rules:
        for value in re.findall(r'=~"([^"]*)"', rule["expr"]):
            assert "|" in value, rule["alert"]


def test_templates_ask_only_for_labels_that_the_rule_keeps(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        kept = set()
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            kept |= set(re.split(r",\s*", labels))
        kept |= set(re.findall(r', "(\w+)", "\w+", "", ""\)', rule["expr"]))
        for text in rule["annotations"].values():
            asked = set(re.findall(r"\$labels\.(\w+)", text))
            assert asked <= kept, rule["alert"]


def test_every_rule_has_summary_description_and_links(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert set(rule["annotations"]) == {
            "summary",
            "description",
            "runbook_url",
            "dashboard_url",
        }
        assert rule["labels"].keys() == {"severity"}
