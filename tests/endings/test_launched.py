"""Under torchrun, which ends every rank once one has failed, a run still says how it ended.

Five runs at once, each stopped in another way, before one Prometheus with the committed rules and
one Alertmanager: exit code, last line, event log, summary and W&B agree, and the right alert with
the right rank arrives at a webhook.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Hang, RunFinished
from sdcwatch.errors import EXIT_CORRUPTION, EXIT_RANK_GONE
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import load_file

from .conftest import WORLD, Nursery

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(300),
]
HERE = Path(__file__).parent
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Story:
    """What every place says.

    Attributes:
        first: Exit code of what the launcher saw fail first; None where it was ended itself.
        codes: With which rank 0 may end.
        state: Of the guard at the end.
        says: In the last record.
        alerts: That arrive: the rank that the labels name, if any, and what the text says.
    """

    first: int | None
    codes: tuple[int, ...]
    state: str
    says: str
    alerts: dict[str, tuple[str | None, str]]


SUSPECT = {"SdcwatchSuspectRank": ("1", "(rank 1), returned wrong numbers")}


def _failed(text: str) -> dict[str, tuple[str | None, str]]:
    return {"SdcwatchRunFailed": (None, text)}


STORIES = {
    "weight_changes": Story(
        EXIT_CORRUPTION,
        (EXIT_CORRUPTION,),
        "tainted",
        "the run was tainted at step",
        {**SUSPECT, "SdcwatchFingerprintDisagreement": (None, "replicas hold different bits")},
    ),
    "broken": Story(EXIT_CORRUPTION, (EXIT_CORRUPTION,), "failed", "CorruptionDetected", SUSPECT),
    "rank_killed": Story(
        -signal.SIGKILL,
        (EXIT_RANK_GONE,),
        "failed",
        "RankGone: rank 1 absent",
        _failed("RankGone: rank 1 absent"),
    ),
    "exception": Story(
        1,
        (EXIT_RANK_GONE,),
        "failed",
        "rank 1 left: the run ended with ValueError",
        _failed("rank 1 left: the run ended with ValueError"),
    ),
    "sigterm": Story(
        None,
        (TERMINATED, EXIT_RANK_GONE),  # the signal may reach another rank long before
        "failed",
        "ended with Terminated",
        _failed("ended with Terminated"),
    ),
}


servers = load_file(HERE.parent / "monitor" / "servers.py", "monitor_servers")
sinks = load_file(HERE.parent / "sinks" / "conftest.py", "sinks_conftest")


class Launched:
    """A run under torchrun."""

    def __init__(self, nursery: Nursery, name: str, run_dir: Path) -> None:
        self._nursery, self.name, self.run_dir = nursery, name, run_dir
        self.port = servers.free_port()
        run_dir.mkdir()
        self._job, self.pid = nursery.launch(name, run_dir, port=self.port)
        self._ended = False

    def end(self, seconds: float = 120.0) -> None:
        """Wait until all of it has ended."""
        self._ended = self._nursery.ended(self._job, seconds) is not None
        assert self._ended, self.said()

    def close(self) -> None:
        """However the test ended: torchrun ends its ranks when it is told to end."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._nursery.ended(self._job, 60.0)

    @property
    def launcher(self) -> str:
        """What torchrun wrote."""
        return (self.run_dir / "launcher").read_text()

    @property
    def first(self) -> int | None:
        """Exit code of what the launcher calls the root cause."""
        found = re.search(r"exitcode\s*: (-?\d+)", self.launcher.partition("Root Cause")[2])
        return int(found[1]) if found else None

    @property
    def codes(self) -> list[int | None]:
        """Of each rank; None where the launcher had to kill it."""
        paths = [self.run_dir / f"code-{rank}" for rank in range(WORLD)]
        return [int(path.read_text()) if path.exists() else None for path in paths]

    @property
    def seconds(self) -> float:
        """From when it happened until rank 0 was gone."""
        happened = (self.run_dir / "now").stat().st_mtime
        return (self.run_dir / "code-0").stat().st_mtime - happened

    def said(self) -> str:
        """The ends of what each process wrote."""
        names = ["launcher", *(f"stderr-{rank}" for rank in range(WORLD))]
        paths = [self.run_dir / name for name in names]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in paths if p.exists())

    def wandb(self) -> tuple[dict[str, Any], bool]:
        """The summary in its own file, and whether the run was finished."""
        (path,) = self.run_dir.glob("wandb/offline-run-*/*.wandb")
        summary: dict[str, Any] = {}
        kinds = []
        for record in sinks.read_wandb_file(path):
            kinds.append(record.WhichOneof("record_type"))
            if kinds[-1] == "summary":
                for item in record.summary.update:
                    key = item.key or "/".join(item.nested_key)
                    summary[key] = json.loads(item.value_json)
        return summary, "exit" in kinds


@dataclass(frozen=True)
class Told:
    """An alert that arrived."""

    run: str
    alert: str
    rank: str | None
    text: str


def _told(mails: list[Any]) -> set[Told]:
    return {
        Told(
            a["labels"].get("run", ""),
            a["labels"]["alertname"],
            a["labels"].get("suspect_rank"),
            a["annotations"]["description"],
        )
        for path, mail in mails
        for a in mail["alerts"]
        if path != "/watchdog"
    }


def _missing(mails: list[Any]) -> set[tuple[str, str]]:
    """Alerts that have not arrived yet."""
    came = {(told.run, told.alert) for told in _told(mails)}
    return {(run, alert) for run, story in STORIES.items() for alert in story.alerts} - came


def _wait_until_scraped(url: str, runs: Iterable[Launched], seconds: float = 150.0) -> None:
    """Until Prometheus has seen that every run is armed, and W&B has begun each."""
    query = urllib.parse.urlencode({"query": 'sdcwatch_guard_state{state="armed"} == 1'})
    end = time.monotonic() + seconds
    while True:
        found = servers.ask(f"{url}/api/v1/query?{query}")["data"]["result"]
        armed = {one["metric"]["run"] for one in found}
        begun = {r.name for r in runs if list(r.run_dir.glob("wandb/offline-run-*/*.wandb"))}
        late = [run for run in runs if run.name not in armed & begun]
        if not late:
            return
        assert time.monotonic() < end, "\n".join(run.said() for run in late)
        time.sleep(0.3)


@dataclass
class Ended:
    """All of them, and what arrived."""

    runs: dict[str, Launched]
    told: set[Told]


@pytest.fixture(scope="module")
def ended(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    root = tmp_path_factory.mktemp("launched")
    for name in ("alertmanager", "prometheus"):
        (root / name).mkdir()
    inbox = servers.Inbox()
    runs = {name: Launched(nursery, name, root / name) for name in STORIES}
    addresses = [f"127.0.0.1:{run.port}" for run in runs.values()]
    try:
        with (
            servers.quick_alertmanager(inbox.url, root / "alertmanager") as alertmanager,
            servers.quick_prometheus(
                addresses[0], alertmanager, root / "prometheus", *addresses[1:]
            ) as url,
        ):
            _wait_until_scraped(url, runs.values())
            for run in runs.values():
                (run.run_dir / "now").touch()
            os.kill(runs["sigterm"].pid, signal.SIGTERM)
            for run in runs.values():
                run.end()
            try:
                inbox.wait(lambda mails: not _missing(mails), 60)
            except AssertionError as error:
                late = {name for name, _ in _missing(inbox.mails)}
                raise AssertionError("\n".join(runs[name].said() for name in late)) from error
        yield Ended(runs, _told(inbox.mails))
    finally:
        for run in runs.values():
            run.close()
        inbox.close()


@pytest.mark.parametrize("name", STORIES)
def test_under_torchrun_every_place_says_the_same_and_the_right_alert_arrives(
    ended: Ended, name: str, record_property: Callable[[str, object], None]
) -> None:
    run, story = ended.runs[name], STORIES[name]
    said, code = run.said(), run.codes[0]
    assert None not in run.codes, f"killed by the launcher: {run.codes}\n{said}"
    record_property("seconds", round(run.seconds, 1))
    assert run.first == story.first, said
    assert code in story.codes, said
    (finish,) = [r for r in read_records(run.run_dir) if isinstance(r, RunFinished)]
    assert (finish.state.value, finish.exit_code) == (story.state, code), said
    assert story.says in finish.reason
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["state"], summary["exit_code"]) == (story.state, code)
    lines = (run.run_dir / "stderr-0").read_text().splitlines()
    last = [line for line in lines if line.startswith("sdcwatch: ")][-1]
    assert last.startswith(f"sdcwatch: {summary['verdict'].upper()}: "), said
    wandb, finished = run.wandb()
    assert finished, said
    assert (wandb["sdcwatch/state"], wandb["sdcwatch/verdict"]) == (
        story.state,
        summary["verdict"],
    )
    for alert, (rank, text) in story.alerts.items():
        came = [told for told in ended.told if (told.run, told.alert) == (name, alert)]
        assert {told.rank for told in came} == {rank}, came
        assert any(text in told.text for told in came), came


@pytest.mark.parametrize("name", ["rank_killed", "exception"])
def test_a_rank_that_is_gone_is_named_in_the_event_log(ended: Ended, name: str) -> None:
    hangs = [r for r in read_records(ended.runs[name].run_dir) if isinstance(r, Hang)]
    assert hangs
    assert {hang.absent for hang in hangs} == {(1,)}


def test_no_alert_names_another_rank_or_a_run_that_vanished(ended: Ended) -> None:
    assert "SdcwatchRunVanished" not in {told.alert for told in ended.told}
    assert {told.rank for told in ended.told} <= {"1", None}
