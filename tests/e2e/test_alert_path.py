"""A planted fault to a webhook: guarded demo, real Prometheus, the committed rules, Alertmanager.

The received alert equals a committed expectation. Planting the fault on another rank changes the
fields that name the rank and nothing else; a clean run sends nothing but the Watchdog.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.testing import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("expected_alert.json")
RUN = "alert-path"


servers = load_file(ROOT / "tests" / "monitor" / "servers.py", "servers_of_monitor")


def _plan(rank: int) -> str:
    """A sticky finite error in the own pass of one rank, over exactly one audit; and one unseen."""
    fault = {
        "name": "a broken multiplier",
        "site": "activation",
        "target": "blocks.0.mlp",
        "kind": "scale",
        "factor": 1.01,
        "element": 3,
        "rank": rank,
        "persistence": "sticky",
        "steps": [18, 22],
        "expect": {"check": "replay", "outcome": "suspect", "ranks": [rank]},
    }
    between_audits = {
        "name": "between audits",
        "site": "gradient",
        "target": "blocks.1.mlp.0.weight",
        "kind": "bit_flip",
        "bit": 20,
        "rank": 0,
        "step": 9,
        "expect": "miss",
    }
    return yaml.safe_dump({"seed": 1, "faults": [fault, between_audits]})


@pytest.fixture
def watch_demo(tmp_path: Path) -> Iterator[Callable[[str], tuple[list[Any], Path]]]:
    """Runs the demo with a plan beside the whole path; what arrived, with the time it did."""
    inbox = servers.Inbox()

    def watch(plan: str) -> tuple[list[Any], Path]:
        for name in ("alertmanager", "prometheus"):
            (tmp_path / name).mkdir()
        port = servers.free_port()
        arguments = ["--nodes", "3", "--ranks-per-node", "1", "--steps", "40", "--wandb", "off"]
        arguments += ["--metrics-port", str(port), "--linger", "0"]
        arguments += ["--run-dir", str(tmp_path / RUN), "--faults", plan]
        with (
            servers.quick_alertmanager(inbox.url, tmp_path / "alertmanager") as alertmanager,
            servers.quick_prometheus(f"127.0.0.1:{port}", alertmanager, tmp_path / "prometheus"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "sdcwatch", "demo", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=380,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            time.sleep(4)  # what the end of the run would set off arrives within an evaluation
        return list(inbox.mails), tmp_path / RUN

    yield watch
    inbox.close()


def _alerts(mails: list[Any]) -> list[dict[str, Any]]:
    """Every notification that is not the Watchdog's."""
    return [mail for path, mail in mails if path != "/watchdog"]


def _told(alert: dict[str, Any]) -> dict[str, Any]:
    """Who is named; evidence, checkpoint and run directory follow in the text."""
    texts = dict(alert["annotations"])
    who, numbers, _ = texts["description"].partition("returned wrong numbers")
    return {"labels": alert["labels"], "annotations": {**texts, "description": who + numbers}}


def _expected(rank: int) -> dict[str, Any]:
    """The committed expectation, for this rank."""
    text = EXPECTED.read_text(encoding="utf-8")
    for name, value in (("RANK", rank), ("NODE", f"sim-node-{rank}")):
        text = text.replace(f"<{name}>", str(value))
    return json.loads(text)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_fault_that_is_seen_is_one_notification_that_names_its_rank(
    rank: int,
    watch_demo: Callable[[str], tuple[list[Any], Path]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(_plan(rank), encoding="utf-8")

    mails, run_dir = watch_demo(str(plan))

    (mail,) = _alerts(mails)
    (alert,) = mail["alerts"]
    assert _told(alert) == _expected(rank)
    verdicts = [
        json.loads(line)
        for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        if '"outcome":"suspect"' in line and '"kind":"verdict"' in line
    ]
    arrived = mails[[m for _, m in mails].index(mail)][1]["receivedAt"]
    seconds = arrived - verdicts[0]["time"]
    record_property("seconds_from_verdict_to_webhook", round(seconds, 1))
    print(f"verdict to webhook: {seconds:.1f} s")


def test_a_clean_run_sends_nothing_but_the_watchdog(
    watch_demo: Callable[[str], tuple[list[Any], Path]],
) -> None:
    mails, _ = watch_demo("none")

    assert _alerts(mails) == []
    assert {a["labels"]["alertname"] for _, m in mails for a in m["alerts"]} == {"SdcwatchWatchdog"}


def test_the_expectation_differs_between_ranks_in_the_fields_that_name_the_rank() -> None:
    one, two = _expected(1), _expected(2)
    differ = {(part, key) for part in one for key in one[part] if one[part][key] != two[part][key]}

    assert differ == {
        ("labels", "suspect_rank"),
        ("labels", "suspect_node"),
        ("labels", "suspect_gpu"),
        ("labels", "suspect_instance_id"),
        ("annotations", "description"),
        ("annotations", "dashboard_url"),
    }
