"""One fault, one notification: routes, grouping and inhibition in the real Alertmanager."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sdcwatch.monitor.alerts import DRILL, alerts
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import (
    INHIBITED_BY_FINDING,
    INHIBITED_BY_VANISHED,
    alertmanager_settings,
)
from sdcwatch.stack.cli import monitor

EXAMPLE = "alerts/alertmanager.example.yml"


def _alert(name: str, severity: str, run: str, **labels: str) -> dict[str, Any]:
    ends = datetime.now(timezone.utc) + timedelta(minutes=5)
    return {
        "labels": {"alertname": name, "severity": severity, "run": run, **labels},
        "endsAt": ends.isoformat(),
    }


def _names(mail: dict[str, Any]) -> list[str]:
    return sorted(a["labels"]["alertname"] for a in mail["alerts"])


def test_amtool_accepts_the_example(root: Path, amtool: str) -> None:
    done = subprocess.run([amtool, "check-config", EXAMPLE], cwd=root, capture_output=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("alertname=SdcwatchSuspectRank", "severity=critical", "run=a"), "page"),
        ((f"alertname={DRILL}", "severity=critical", "run=drill"), "page"),
        (("alertname=SdcwatchCheckpointWithheld", "severity=warning", "run=a"), "notify"),
        (("alertname=SdcwatchWatchdog", "severity=info"), "watchdog"),
        (("alertname=SomebodyElses", "severity=critical"), "notify"),
    ],
)
def test_each_alert_takes_its_route(
    labels: tuple[str, ...], receiver: str, root: Path, amtool: str
) -> None:
    command = [amtool, "config", "routes", "test", f"--config.file={EXAMPLE}", *labels]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)

    assert done.stdout.strip() == receiver


def test_inhibition_names_alerts_that_exist_and_never_a_critical_one(
    config: MonitorConfig, root: Path
) -> None:
    severities = {a.name: a.severity for a in alerts(config)}
    silenced = {*INHIBITED_BY_FINDING, *INHIBITED_BY_VANISHED}
    settings = yaml.safe_load((root / EXAMPLE).read_text())

    assert {severities[name] for name in silenced} == {"warning"}
    assert {"SdcwatchUpdatesSkipped", "SdcwatchCheckpointWithheld"} <= set(INHIBITED_BY_FINDING)
    for rule in settings["inhibit_rules"]:
        assert 'severity!="critical"' in rule["target_matchers"]
        assert rule["source_matchers"] != ['alertname="SdcwatchSuspectRank"']


def test_scope_labels_take_part_in_grouping_and_inhibition() -> None:
    settings = alertmanager_settings(MonitorConfig(scope_labels=("cluster",)), "http://x")

    assert settings["route"]["group_by"] == ["cluster", "run"]
    assert all(rule["equal"] == ["cluster", "run"] for rule in settings["inhibit_rules"])


def _suspect(gpu: str) -> dict[str, Any]:
    device = {"suspect_rank": "3", "suspect_node": "n1", "suspect_gpu": gpu}
    return _alert("SdcwatchSuspectRank", "critical", "a", suspect_instance_id="i-1", **device)


def test_a_recent_finding_silences_its_consequences_in_its_own_run_only(
    alertmanager: str, inbox: Any, ask_json: Callable[..., Any]
) -> None:
    consequences = [_alert(name, "warning", "a") for name in INHIBITED_BY_FINDING]
    recent = _alert("SdcwatchRecentFinding", "info", "a")
    other = _alert("SdcwatchUpdatesSkipped", "warning", "b")

    ask_json(f"{alertmanager}/api/v2/alerts", [_suspect("GPU-3"), recent, *consequences, other])
    inbox.wait(lambda mails: len(mails) >= 2)

    sent = {(path, mail["groupLabels"]["run"]): _names(mail) for path, mail in inbox.mails}
    assert sent == {
        ("/page", "a"): ["SdcwatchSuspectRank"],
        ("/notify", "b"): ["SdcwatchUpdatesSkipped"],
    }


def test_an_old_open_suspect_silences_nothing_and_never_a_critical_alert(
    alertmanager: str, inbox: Any, ask_json: Callable[..., Any]
) -> None:
    unnamed = _alert("SdcwatchUnattributedMismatch", "critical", "a")
    skipped = _alert("SdcwatchUpdatesSkipped", "warning", "a")

    ask_json(f"{alertmanager}/api/v2/alerts", [_suspect("GPU-3"), unnamed, skipped])
    inbox.wait(lambda mails: len(mails) >= 3)

    sent = {name for _, mail in inbox.mails for name in _names(mail)}
    assert sent == {
        "SdcwatchSuspectRank",
        "SdcwatchUnattributedMismatch",
        "SdcwatchUpdatesSkipped",
    }


def test_a_second_bad_gpu_is_a_second_incident(
    alertmanager: str, inbox: Any, ask_json: Callable[..., Any]
) -> None:
    ask_json(f"{alertmanager}/api/v2/alerts", [_suspect("GPU-3"), _suspect("GPU-4")])
    inbox.wait(lambda mails: len(mails) >= 2)

    groups = [mail["groupLabels"]["suspect_gpu"] for _, mail in inbox.mails]
    assert sorted(groups) == ["GPU-3", "GPU-4"]


def test_title_and_text_of_the_example_say_who_and_what(root: Path) -> None:
    receivers = yaml.safe_load((root / EXAMPLE).read_text())["receivers"]
    page = next(r for r in receivers if r["name"] == "page")

    for kind, title, text in (
        ("slack_configs", "title", "text"),
        ("pagerduty_configs", "description", None),
        ("opsgenie_configs", "message", "description"),
    ):
        (config,) = page[kind]
        assert "suspect_gpu" in config[title], kind
        if text:
            assert ".Annotations.description" in config[text], kind
    assert ".Annotations.description" in page["pagerduty_configs"][0]["details"]["what"]


def test_a_drill_arrives_where_pages_arrive_and_says_that_it_is_one(
    alertmanager: str, inbox: Any
) -> None:
    done = CliRunner().invoke(monitor, ["test-alert", "--alertmanager", alertmanager])
    inbox.wait(lambda mails: len(mails) >= 1)

    assert done.exit_code == 0, done.output
    ((path, mail),) = inbox.mails
    (alert,) = mail["alerts"]
    assert path == "/page"
    assert alert["labels"]["alertname"] == DRILL
    assert alert["labels"]["drill"] == "true"
    assert alert["annotations"]["summary"].startswith("DRILL")
    assert alert["annotations"]["runbook_url"].endswith("#sdcwatchdrill")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:9093"])
def test_a_drill_that_cannot_be_sent_says_why(url: str) -> None:
    done = CliRunner().invoke(monitor, ["test-alert", "--alertmanager", url])

    assert done.exit_code == 1
    assert "Expected" in done.output
    assert "but got" in done.output


def test_case_26_grafana_rules_have_unique_titles_and_the_folder_of_the_dashboards(
    root: Path, config: MonitorConfig
) -> None:
    document = yaml.safe_load((root / "alerts/grafana/sdcwatch.rules.yaml").read_text())
    provider = yaml.safe_load(
        (root / "docker/grafana/provisioning/dashboards/sdcwatch.yaml").read_text()
    )["providers"][0]
    (group,) = document["groups"]
    titles = [rule["title"] for rule in group["rules"]]
    uids = [rule["uid"] for rule in group["rules"]]

    assert document["apiVersion"] == 1
    assert titles == [a.name for a in alerts(config)]
    assert len(set(uids)) == len(uids)
    assert all(len(uid) <= 40 for uid in uids)
    assert group["folder"] == provider["folder"]
    assert "folderUid" not in provider


def test_grafana_rules_state_what_they_do_without_data_and_ask_one_data_source(
    root: Path, config: MonitorConfig
) -> None:
    text = (root / "alerts/grafana/sdcwatch.rules.yaml").read_text()
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        assert (rule["noDataState"], rule["execErrState"]) == ("OK", "Error")
        refs = [d["refId"] for d in rule["data"]]
        assert refs[:2] == ["A", "B"]
        assert len(set(refs)) == len(refs)
        assert rule["condition"] == "B"
        assert {d["datasourceUid"] for d in rule["data"]} == {config.datasource, "__expr__"}
        assert "| query" not in str(rule["annotations"])
        assert "$value " not in str(rule["annotations"])
        asked = set(re.findall(r"\$values\.(\w)\b", str(rule["annotations"])))
        assert asked <= set(refs)


def test_no_template_of_a_grafana_rule_fails_without_data(root: Path) -> None:
    """A value that is not there is never handed to a function: each stands in a `with`."""
    text = (root / "alerts/grafana/sdcwatch.rules.yaml").read_text()
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        for template in rule["annotations"].values():
            assert not re.search(r"\$values\.[\w.]+ *\|", template)
            for name in re.findall(r"\{\{ ([^}]*\$values[^}]*) \}\}", template):
                assert name.startswith("with "), name


def test_grafana_rules_say_the_words_of_the_prometheus_rules(
    root: Path, rules: list[dict[str, Any]]
) -> None:
    def words(template: str) -> list[str]:
        return re.sub(r"\{\{.*?\}\}", " ", template).split()

    text = (root / "alerts/grafana/sdcwatch.rules.yaml").read_text()
    managed = {r["title"]: r for r in yaml.safe_load(text)["groups"][0]["rules"]}
    for rule in rules:
        theirs = managed[rule["alert"]]["annotations"]
        assert words(theirs["description"]) == words(rule["annotations"]["description"])


def test_grafana_rules_are_not_provisioned(root: Path) -> None:
    for path in (root / "docker").rglob("*.y*ml"):
        assert "alerts/grafana" not in path.read_text(encoding="utf-8"), path
    assert "alerts/grafana" not in (root / "docker-compose.yml").read_text(encoding="utf-8")
