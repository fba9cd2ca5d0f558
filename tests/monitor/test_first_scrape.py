"""An event before the first scrape, through the whole path with real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from sdcwatch.core.catalog import CHECKPOINTS, GUARD_STATE, START_TIME, VERDICTS
from sdcwatch.core.records import Check, CheckpointResult, GateReason, GuardState, Outcome

RUN = {"run": "short", "exporter_rank": "0"}


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


@pytest.fixture
def mails(servers: Any, tmp_path: Path) -> Iterator[list[Any]]:
    """What has arrived, after two groups have."""
    inbox, metrics = servers.Inbox(), servers.Metrics(_exposition())
    for name in ("alertmanager", "prometheus"):
        (tmp_path / name).mkdir()
    with (
        servers.quick_alertmanager(inbox.url, tmp_path / "alertmanager") as alertmanager,
        servers.quick_prometheus(metrics.address, alertmanager, tmp_path / "prometheus"),
    ):
        inbox.wait(lambda sent: {p for p, _ in sent} >= {"/page", "/notify", "/watchdog"})
        yield inbox.mails
    metrics.close()
    inbox.close()


@pytest.mark.promtool
def test_case_2_an_event_before_the_first_scrape_still_alerts(mails: list[Any]) -> None:
    """No increase ever shows it: the counters are 1 in every scrape."""
    names = {a["labels"]["alertname"] for _, mail in mails for a in mail["alerts"]}

    assert names == {
        "SdcwatchUnattributedMismatch",
        "SdcwatchCheckpointWithheld",
        "SdcwatchWatchdog",
    }
