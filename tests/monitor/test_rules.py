"""The alert rules: promtool runs every committed test, and the table of cases has no hole."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.core.records import Cause, Outcome
from sdcwatch.monitor.alerts import ALERT_OF_OUTCOME, SILENT_CAUSES, alerts
from sdcwatch.monitor.config import SEVERITIES, MonitorConfig

TESTS = Path(__file__).parents[2] / "alerts" / "tests"
FILES = sorted(TESTS.glob("*.test.yml"))
CASES = (
    "fires",
    "stays_quiet",
    "clears",
    "counter_reset",
    "event_before_first_scrape",
    "two_runs_at_once",
    "duplicate_exporter",
    "stale_series",
    "resumed_elsewhere",
    "suspect_of_an_earlier_segment",
    "killed_and_restarted",
    "killed_and_not_restarted",
    "closed",
)


def _alert(path: Path) -> str:
    """The alert a file is about: the part of its name before the first dot."""
    return path.name.split(".")[0]


@cache
def _groups(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]


def _table() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((TESTS / "table.yaml").read_text(encoding="utf-8"))


Promtool = Callable[[str, str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tested(promtool: str, rules: list[dict[str, Any]], tmp_path: Path) -> Promtool:
    """Lets promtool test one alert of the committed rules, without the others.

    A file of tests is about one alert; with all rules in the file promtool evaluates twenty others
    at every step and looks at none of them.
    """

    def run(alert: str, text: str) -> subprocess.CompletedProcess[str]:
        named = "- ../sdcwatch.rules.yml\n"
        assert text.count(named) == 1
        only = [rule for rule in rules if rule["alert"] == alert]
        groups = {"groups": [{"name": "sdcwatch", "rules": only}]}
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(groups), encoding="utf-8")
        (tmp_path / "tests.yml").write_text(text.replace(named, "- rules.yml\n"), encoding="utf-8")
        command = [promtool, "test", "rules", "tests.yml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.mark.promtool
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".test.yml"))
def test_promtool_finds_every_alert_as_expected(path: Path, tested: Promtool) -> None:
    done = tested(_alert(path), path.read_text(encoding="utf-8"))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promtool
def test_a_changed_expectation_fails_promtool(tested: Promtool) -> None:
    text = (TESTS / "SdcwatchSuspectRank.test.yml").read_text(encoding="utf-8")
    first, _, _ = text.partition("- name: SdcwatchSuspectRank stays quiet")
    changed = first.replace("wrong in 2 of 2", "wrong in 1 of 2")
    assert changed != first

    done = tested("SdcwatchSuspectRank", changed)

    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr


@pytest.mark.promtool
@pytest.mark.parametrize("name", ["sdcwatch.rules.yml"])
def test_promtool_accepts_the_rules(name: str, promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(TESTS.parent / name)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_has_every_alert_and_every_case(config: MonitorConfig) -> None:
    table = _table()

    assert [a.name for a in alerts(config)] == list(table)
    for alert, cells in table.items():
        assert tuple(cells) == CASES, alert


def test_no_cell_of_the_table_is_empty() -> None:
    for alert, cells in _table().items():
        for case, cell in cells.items():
            named = isinstance(cell, list) and len(cell) > 0 and all(cell)
            reasoned = isinstance(cell, str) and len(cell.removeprefix("reason: ")) > 10
            assert named or (reasoned and cell.startswith("reason: ")), f"{alert}, {case}"


def test_the_table_and_the_files_name_the_same_tests() -> None:
    listed = [
        (alert, name)
        for alert, cells in _table().items()
        for cell in cells.values()
        if isinstance(cell, list)
        for name in cell
    ]
    present = [(_alert(path), group["name"]) for path in FILES for group in _groups(path)]

    assert sorted(listed) == sorted(present)
    assert len(set(present)) == len(present)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".test.yml"))
def test_every_expected_alert_has_its_annotations_compared(path: Path) -> None:
    for group in _groups(path):
        for case in group["alert_rule_test"]:
            assert case["alertname"] == _alert(path)
            for expected in case["exp_alerts"]:
                annotations = expected["exp_annotations"]
                assert {"summary", "description", "runbook_url", "dashboard_url"} == set(
                    annotations
                )


def test_a_test_that_is_about_firing_expects_an_alert_and_one_about_quiet_none() -> None:
    by_name = {g["name"]: g for path in FILES for g in _groups(path)}
    for cells in _table().values():
        for name in cells["fires"]:
            assert any(c["exp_alerts"] for c in by_name[name]["alert_rule_test"]), name
        if isinstance(cells["stays_quiet"], list):
            for name in cells["stays_quiet"]:
                cases = by_name[name]["alert_rule_test"]
                assert not any(c["exp_alerts"] for c in cases), name
        if isinstance(cells["clears"], list):
            for name in cells["clears"]:
                cases = by_name[name]["alert_rule_test"]
                assert any(c["exp_alerts"] for c in cases), name
                assert cases[-1]["exp_alerts"] == [], name


def test_case_1_an_event_that_no_increase_sees_still_fires() -> None:
    """A series that is born at 1 has no increase: `_x5 1x20` must fire for each counter alert."""
    counters = 0
    for cells in _table().values():
        cell = cells["event_before_first_scrape"]
        if not isinstance(cell, list):
            continue
        groups = {g["name"]: g for path in FILES for g in _groups(path)}
        for name in cell:
            born = [
                s
                for s in groups[name]["input_series"]
                if s["values"].startswith("_x5 ") and "_total{" in s["series"]
            ]
            if born:
                counters += 1
                assert groups[name]["alert_rule_test"][-1]["exp_alerts"], name
    assert counters >= 9


def test_every_outcome_that_is_not_a_pass_has_an_alert(config: MonitorConfig) -> None:
    names = {a.name for a in alerts(config)}

    assert set(ALERT_OF_OUTCOME) == set(Outcome) - {Outcome.PASS}
    assert set(ALERT_OF_OUTCOME.values()) <= names


def test_scaling_is_never_an_alarm_and_data_only_a_warning(config: MonitorConfig) -> None:
    by_name = {a.name: a for a in alerts(config)}

    assert set(SILENT_CAUSES) == set(Cause) - {Cause.DATA, Cause.SOFTWARE}
    assert by_name["SdcwatchNonFiniteReproducible"].severity == "warning"
    for alert in by_name.values():
        assert not re.search(r'cause=~?"[^"]*scaling', alert.expr)
    assert 'reason=~"nonfinite|replay|not_stepped"' in by_name["SdcwatchUpdatesSkipped"].expr


def test_names_severities_and_summaries_follow_the_conventions(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert rule["alert"].startswith("Sdcwatch")
        assert rule["labels"]["severity"] in SEVERITIES
        assert "{{" not in rule["annotations"]["summary"]
        assert rule["annotations"]["summary"].endswith(".")
        assert "$value" not in str(rule["labels"])
    keys = [(r["alert"], tuple(sorted(r["labels"].items()))) for r in rules]
    assert len(set(keys)) == len(keys)


def test_case_25_no_label_value_of_a_rule_has_a_dollar_sign(
    rules: list[dict[str, Any]], root: Path
) -> None:
    grafana = yaml.safe_load((root / "alerts/grafana/sdcwatch.rules.yaml").read_text())
    every = [*rules, *grafana["groups"][0]["rules"]]

    assert len(every) == 2 * len(rules)
    for rule in every:
        for value in rule["labels"].values():
            assert "$" not in value
