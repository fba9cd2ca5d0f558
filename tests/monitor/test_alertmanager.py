"""One fault, one notification: routes, grouping and inhibition in the real Alertmanager."""

from __future__ import annotations

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
    INHIBITED_BY_SUSPECT,
    INHIBITED_BY_TAINT,
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


def test_inhibition_names_alerts_that_exist_and_what_a_suspect_must_silence(
    config: MonitorConfig,
) -> None:
    names = {a.name for a in alerts(config)}

    assert {*INHIBITED_BY_SUSPECT, *INHIBITED_BY_TAINT, *INHIBITED_BY_VANISHED} <= names
    assert set(INHIBITED_BY_SUSPECT) >= {
        "SdcwatchUnattributedMismatch",
        "SdcwatchUpdatesSkipped",
        "SdcwatchCheckpointWithheld",
        "SdcwatchNoCleanAudit",
        "SdcwatchNonFiniteReproducible",
    }


def test_scope_labels_take_part_in_grouping_and_inhibition() -> None:
    settings = alertmanager_settings(MonitorConfig(scope_labels=("cluster",)), "http://x")

    assert settings["route"]["group_by"] == ["cluster", "run"]
    assert all(rule["equal"] == ["cluster", "run"] for rule in settings["inhibit_rules"])


def test_a_suspect_silences_its_consequences_in_its_own_run_only(
    alertmanager: str, inbox: Any, ask_json: Callable[..., Any]
) -> None:
    consequences = [_alert(name, "warning", "a") for name in INHIBITED_BY_SUSPECT]
    suspect = _alert(
        "SdcwatchSuspectRank",
        "critical",
        "a",
        suspect_rank="3",
        suspect_node="n1",
        suspect_gpu="GPU-3",
    )
    other = _alert("SdcwatchUpdatesSkipped", "warning", "b")

    ask_json(f"{alertmanager}/api/v2/alerts", [suspect, *consequences, other])
    inbox.wait(lambda mails: len(mails) >= 2)

    sent = {(path, mail["groupLabels"]["run"]): _names(mail) for path, mail in inbox.mails}
    assert sent == {
        ("/page", "a"): ["SdcwatchSuspectRank"],
        ("/notify", "b"): ["SdcwatchUpdatesSkipped"],
    }


def test_alerts_of_one_run_arrive_in_one_notification(
    alertmanager: str, inbox: Any, ask_json: Callable[..., Any]
) -> None:
    two = [
        _alert(
            "SdcwatchSuspectRank",
            "critical",
            "a",
            suspect_rank="3",
            suspect_node="n1",
            suspect_gpu="GPU-3",
        ),
        _alert("SdcwatchFingerprintDisagreement", "critical", "a"),
    ]
    ask_json(f"{alertmanager}/api/v2/alerts", two)
    inbox.wait(lambda mails: len(mails) >= 1)

    assert [(p, _names(m)) for p, m in inbox.mails] == [
        ("/page", ["SdcwatchFingerprintDisagreement", "SdcwatchSuspectRank"])
    ]


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
        assert [d["refId"] for d in rule["data"]] == ["A", "B"]
        assert rule["condition"] == "B"
        assert rule["data"][0]["datasourceUid"] == config.datasource
        assert "| query" not in str(rule["annotations"])
        assert "$value " not in str(rule["annotations"])


def test_grafana_rules_are_not_provisioned(root: Path) -> None:
    for path in (root / "docker").rglob("*.y*ml"):
        assert "alerts/grafana" not in path.read_text(encoding="utf-8"), path
    assert "alerts/grafana" not in (root / "docker-compose.yml").read_text(encoding="utf-8")
