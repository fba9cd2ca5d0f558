"""``sdcwatch monitor build``: what is committed is what is generated, and options arrive."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sdcwatch.core import catalog
from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.build import differences, generated_files, write
from sdcwatch.monitor.cli import monitor
from sdcwatch.monitor.config import MonitorConfig, Thresholds, duration_seconds, load_config
from sdcwatch.monitor.promql import pretty
from sdcwatch.monitor.rulefiles import prometheus_rules


def _build(*arguments: str) -> Any:
    return CliRunner().invoke(monitor, ["build", *arguments])


def test_what_is_committed_is_what_is_generated(root: Path, config: MonitorConfig) -> None:
    assert differences(generated_files(config), root) == ()


def test_a_metric_renamed_without_a_rebuild_is_noticed(root: Path) -> None:
    """In a process of its own: every module holds the catalogue it was imported with."""
    code = """
import dataclasses, sys
from pathlib import Path
from sdcwatch.core import catalog
catalog.VERDICTS = dataclasses.replace(catalog.VERDICTS, name="sdcwatch.judgements")
from sdcwatch.monitor.build import differences, generated_files
from sdcwatch.monitor.config import MonitorConfig
print(*differences(generated_files(MonitorConfig()), Path(sys.argv[1])), sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(root)], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert "alerts/sdcwatch.rules.yml differs" in done.stdout
    assert "dashboards/sdcwatch-run.json differs" in done.stdout


def test_check_names_what_is_missing_differs_or_is_left_over(tmp_path: Path) -> None:
    assert _build("--out", str(tmp_path)).exit_code == 0
    assert _build("--out", str(tmp_path), "--check").exit_code == 0
    (tmp_path / "dashboards" / "sdcwatch-run.json").unlink()
    (tmp_path / "dashboards" / "old.json").write_text("{}", encoding="utf-8")
    (tmp_path / "alerts" / "sdcwatch.rules.yml").write_text("groups: []\n", encoding="utf-8")

    done = _build("--out", str(tmp_path), "--check")

    assert done.exit_code == 1
    assert "dashboards/sdcwatch-run.json is missing" in done.output
    assert "dashboards/old.json is not generated any more" in done.output
    assert "alerts/sdcwatch.rules.yml differs" in done.output


def test_a_second_build_writes_nothing(tmp_path: Path, config: MonitorConfig) -> None:
    files = generated_files(config)

    assert len(write(files, tmp_path)) == len(files)
    assert write(files, tmp_path) == ()


def test_dashboards_are_sorted_json_with_a_newline_at_the_end(config: MonitorConfig) -> None:
    for name, text in generated_files(config).items():
        if name.endswith(".json"):
            again = json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False)
            assert text == again + "\n"


def test_both_rule_files_hold_the_same_groups(config: MonitorConfig) -> None:
    files = generated_files(config)
    plain = yaml.safe_load(files["alerts/sdcwatch.rules.yml"])
    resource = yaml.safe_load(files["alerts/sdcwatch.prometheusrule.yaml"])

    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"]["groups"] == plain["groups"]


def test_flags_win_over_the_file_and_reach_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "monitor.yaml"
    path.write_text(
        "scope_labels: [cluster]\n"
        "runbook_url: https://wiki.example/runbook\n"
        "grafana_url: https://wrong.example\n"
        "severities: {SdcwatchBlind: info}\n"
        "thresholds: {skipped_updates: 7, hold: 48h}\n",
        encoding="utf-8",
    )
    done = _build(
        "--config", str(path), "--out", str(tmp_path), "--grafana-url", "https://g.example",
        "--rule-matcher", "cluster=prod", "--datasource", "thanos",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    text = (tmp_path / "alerts" / "sdcwatch.rules.yml").read_text(encoding="utf-8")
    rules = {r["alert"]: r for r in yaml.safe_load(text)["groups"][0]["rules"]}
    suspect = rules["SdcwatchSuspectRank"]

    assert "max by (cluster, run, suspect_rank, suspect_node, suspect_gpu," in suspect["expr"]
    assert 'sdcwatch_rank_state{cluster="prod",state="suspect"}[48h]' in suspect["expr"]
    assert "(cluster {{ $labels.cluster }})" in suspect["annotations"]["description"]
    assert suspect["annotations"]["runbook_url"].startswith("https://wiki.example/runbook#")
    assert suspect["annotations"]["dashboard_url"].startswith(
        "https://g.example/d/sdcwatch-suspect?var-cluster={{ $labels.cluster | urlquery }}&var-run="
    )
    assert rules["SdcwatchBlind"]["labels"]["severity"] == "info"
    assert rules["SdcwatchUpdatesSkipped"]["expr"].endswith(">= 7")
    grafana = (tmp_path / "alerts" / "grafana" / "sdcwatch.rules.yaml").read_text(encoding="utf-8")
    assert "datasourceUid: thanos" in grafana


@pytest.mark.promtool
def test_promtool_accepts_rules_with_every_option(tmp_path: Path, promtool: str) -> None:
    config = MonitorConfig(
        scope_labels=("cluster", "namespace"),
        rule_matchers={"cluster": 'a"b\\c'},
        thresholds=Thresholds(event_window="1h30m"),
    )
    path = tmp_path / "rules.yml"
    path.write_text(prometheus_rules(config), encoding="utf-8")

    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_without_base_urls_the_links_are_left_out() -> None:
    rules = yaml.safe_load(prometheus_rules(MonitorConfig(grafana_url="", runbook_url="")))
    for rule in rules["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("colour: red", "fields among"),
        ("thresholds: {speed: 3}", "thresholds among"),
        ("thresholds: {hold: 2x}", "a duration such as 15m"),
        ("thresholds: {hold: ''}", "a duration such as 15m"),
        ("thresholds: {skipped_updates: 0}", "`skipped_updates` > 0"),
        ("scope_labels: cluster", "`scope_labels` to be a list"),
        ("scope_labels: [run]", "label name other than `run`"),
        ("scope_labels: [job]", "label name other than `run`"),
        ("scope_labels: [5]", "`scope_labels` to hold text"),
        ("rule_matchers: {cluster: [a, b]}", "`rule_matchers` to hold text"),
        ("rule_matchers: {cluster: 5}", "`rule_matchers` to hold text"),
        ("severities: {SdcwatchBlind: 1}", "`severities` to hold text"),
        ("datasource: 5", "`datasource` to be text"),
        ("thresholds: {offender_runs: 1.5}", "`offender_runs` to be a whole number"),
        ("scope_labels: ['a b']", "label name other than `run`"),
        ("grafana_url: grafana", "to start with http"),
        ("uid_prefix: 'with space'", "`uid_prefix`"),
        ("severities: {SdcwatchBlind: loud}", "the severity of SdcwatchBlind"),
        ("severities: {Nothing: info}", "to name alerts among"),
        ("scope_labels: [suspect_rank]", "label name other than `run`"),
        ("scope_labels: [check]", "label name other than `run`"),
        ("scope_labels: [alertname]", "label name other than `run`"),
        ("scope_labels: [__name__]", "label name other than `run`"),
        ("rule_matchers: {le: '1'}", "label name other than `run`"),
        ("scope_labels: [cluster, cluster]", "`scope_labels` to name each label once"),
        ("thresholds: {overhead_ratio: .inf}", "`overhead_ratio` > 0"),
        ("thresholds: {hold: 99999999999d}", "a duration such as 15m"),
        ("grafana_url: http://a b", "to start with http"),
        ("datasource: ' '", "`datasource` to be a UID"),
        ("1: 2\ncolour: red", "fields among"),
        ("thresholds: {5: 3, speed: 2}", "thresholds among"),
        ("- a list", "to hold a mapping"),
        ("[]", "to hold a mapping"),
        ("false", "to hold a mapping"),
        ("\udcff", "readable YAML"),
        ("{" * 3000, "readable YAML"),
        ("a: [", "readable YAML"),
    ],
)
def test_a_config_that_cannot_work_says_what_was_expected(
    text: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "monitor.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")

    done = _build("--config", str(path), "--out", str(tmp_path / "out"))

    assert done.exit_code != 0
    assert "Expected" in done.output
    assert expected in " ".join(done.output.split()), done.output


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("text", "seconds"), [("15m", 900), ("1h30m", 5400), ("14d", 1209600)])
def test_durations_are_those_of_prometheus(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


def test_a_long_expression_breaks_at_set_operators_and_says_the_same() -> None:
    long = 'max by (a) (x{b=" or "} > 0 or y) unless on (a) (z and on (a) w)' + " + 0" * 20
    shown = pretty(long)

    assert shown.count("\n") == 3
    assert " ".join(shown.split()) == long
    assert pretty("vector(1)") == "vector(1)"


def test_the_catalogue_has_no_two_metrics_that_prometheus_cannot_tell_apart() -> None:
    assert len(catalog.BY_PROMETHEUS) == len(catalog.CATALOG)
    assert all(dataclasses.is_dataclass(m) for m in catalog.CATALOG)
