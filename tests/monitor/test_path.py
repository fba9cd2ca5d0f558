"""Records through the whole path, with real servers: metrics, rules, routes, texts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from sdcwatch.core.catalog import CHECKPOINTS, GUARD_STATE, START_TIME, VERDICTS
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    GuardState,
    Outcome,
)

RUN = {"run": "short", "exporter_rank": "0"}
PAGERS = ("/slack", "/pagerduty", "/v2/alerts")


def _exposition() -> str:
    """What a young process serves that has already seen a one-off and withheld a checkpoint."""
    registry = CollectorRegistry()
    for metric, labels in (
        (
            VERDICTS,
            {"check": Check.REPLAY.value, "outcome": Outcome.INCONCLUSIVE.value, "cause": "none"},
        ),
        (
            CHECKPOINTS,
            {"result": CheckpointResult.WITHHELD.value, "reason": GateReason.REPLAY.value},
        ),
    ):
        counter = Counter(metric.prometheus, metric.help, [*RUN, *labels], registry=registry)
        counter.labels(*RUN.values(), *labels.values()).inc()
    state = Gauge(GUARD_STATE.prometheus, "state", [*RUN, "state"], registry=registry)
    state.labels(*RUN.values(), GuardState.ARMED.value).set(1)
    start = Gauge(START_TIME.prometheus, "start", [*RUN], registry=registry)
    start.labels(*RUN.values()).set(time.time() - 5)
    return generate_latest(registry).decode()


def _night(synthetic: Any) -> str:
    """What a run serves in which a device was named, after a good checkpoint."""
    now = time.time()
    process = synthetic.Process("night-1")
    finding = synthetic.verdict(now - 10, Outcome.SUSPECT, step=100, rank=3)
    (found,) = finding.suspects
    found = replace(
        found, node="n1", instance_id="i-0abc", gpu="GPU-3f2a", partners=(5,), arbiters=(0, 4),
        reproduced=True, operator="aten::mm of blocks.0.mlp",
    )  # fmt: skip
    for record in (
        synthetic.started("night-1", now - 60),
        synthetic.preflight(now - 50),
        synthetic.clean_audit(now - 30, step=80),
        CheckpointEvent(
            step=80, time=now - 20, result=CheckpointResult.SAVED, reason=GateReason.OK,
            path="/ckpt/80",
        ),
        replace(finding, suspects=(found,)),
    ):  # fmt: skip
        process.take(record)
    return "".join(
        re.sub(r",job=\"train\",instance=\"[^\"]*\"", "", line.rpartition(" ")[0]) + "\n"
        for line in process.scrape(now)
    )


@pytest.fixture(scope="module")
def mails(servers: Any, synthetic: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What has arrived, after every group has."""
    folder = tmp_path_factory.mktemp("path")
    inbox = servers.Inbox()
    metrics = servers.Metrics(_exposition() + _night(synthetic))
    for name in ("alertmanager", "prometheus"):
        (folder / name).mkdir()
    with (
        servers.quick_alertmanager(inbox.url, folder / "alertmanager", pages=True) as alertmanager,
        servers.quick_prometheus(metrics.address, alertmanager, folder / "prometheus"),
    ):
        inbox.wait(
            lambda sent: (
                {p for p, _ in sent} >= {"/page", "/notify", "/watchdog"}
                and all([p for p, _ in sent].count(x) >= 2 for x in PAGERS)
            )
        )
        yield inbox.mails
    metrics.close()
    inbox.close()


@pytest.mark.promtool
def test_case_2_an_event_before_the_first_scrape_still_alerts(mails: list[Any]) -> None:
    """No increase ever shows it: the counters are 1 in every scrape."""
    labels = [a["labels"] for _, mail in mails for a in mail.get("alerts", ())]
    names = {x["alertname"] for x in labels if x.get("run", "short") == "short"}

    assert names == {
        "SdcwatchUnattributedMismatch",
        "SdcwatchCheckpointWithheld",
        "SdcwatchWatchdog",
    }


def _words(text: str) -> list[str]:
    return text.split()


@pytest.mark.promtool
def test_the_slack_text_alone_says_which_machine_how_sure_and_where_to_resume(
    mails: list[Any], root: Path
) -> None:
    """As the docs have it: from the records of a run to what Slack is sent."""
    page = (root / "docs" / "dashboards.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(FIRING.*?)```", page, re.DOTALL)
    posts = [post for path, mail in mails if path == "/slack" for post in mail["attachments"]]
    (post,) = (p for p in posts if "SdcwatchSuspectRank" in p["title"])

    assert _words(post["title"] + " " + post["text"]) == _words(shown)
    for fact in (
        "Run night-1:", "node n1", "instance i-0abc", "GPU-3f2a",  # the machine to drain
        "wrong in 2 of 2 comparisons", "wrong when asked again", "aten::mm",  # how sure
        "Last good checkpoint: step 80, /ckpt/80", "The run goes on", "last at step 100",
        "first: sdcwatch suspects /runs/night-1", "sdcwatch close",  # what to type
    ):  # fmt: skip
        assert fact in post["text"], fact


@pytest.mark.promtool
def test_pagerduty_and_opsgenie_are_sent_who_and_what(mails: list[Any]) -> None:
    sent = {path: mail for path, mail in mails if "GPU-3f2a" in str(mail)}

    event = sent["/pagerduty"]["payload"]
    assert event["summary"].endswith("in run night-1: GPU GPU-3f2a on node n1")
    assert event["severity"] == "critical"
    assert "Last good checkpoint: step 80, /ckpt/80" in event["custom_details"]["what"]
    opsgenie = sent["/v2/alerts"]
    assert opsgenie["message"].endswith("in run night-1: GPU GPU-3f2a on node n1")
    assert "wrong in 2 of 2 comparisons" in opsgenie["description"]
