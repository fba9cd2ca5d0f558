"""One run of the demo as it comes, watched by everything, for all the tests that only look at it.

It is the longest thing that the tests do: five planted faults, six ranks, two segments. Prometheus
scrapes it, an OTLP receiver takes its push, W&B writes its file, and a test reads what it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.core.records import Record
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import free_port, load_file

LINGER_SECONDS = 5.0
RUN_SECONDS = 1100.0


class Prometheus:
    """A Prometheus that scrapes one target twice a second."""

    def __init__(self, root: Path, target: str) -> None:
        self.port = free_port()
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [{"job_name": "sdcwatch", "static_configs": [{"targets": [target]}]}],
        }
        (root / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={root / 'prometheus.yml'}",
                f"--storage.tsdb.path={root / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def at(self, moment: float) -> Any:
        """Every series of sdcwatch at a moment, as labels to value."""
        query = urllib.parse.urlencode({"query": '{job="sdcwatch"}', "time": moment})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]["result"]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@dataclass
class WatchedRun:
    """The run, and what everybody who watched it has.

    Attributes:
        run_dir: Its folder.
        code: Exit code of ``sdcwatch demo``.
        output: What it printed.
        url: Of /metrics.
        texts: What a scrape every second got while somebody listened.
        collector: The OTLP receiver.
        prometheus: None where it is not installed.
        segments: The records of each launch.
    """

    run_dir: Path
    code: int
    output: str
    url: str
    texts: list[str]
    collector: Any
    prometheus: Any
    segments: list[list[Record]]

    def end_of(self, segment: list[Record]) -> float:
        """A moment shortly before /metrics of a segment went away."""
        return segment[-1].time + LINGER_SECONDS - 1.5


def watch_endpoint(url: str, texts: list[str], stop: threading.Event) -> None:
    """Scrape once a second; between the segments nobody listens."""
    while not stop.wait(1.0):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            texts.append(response.read().decode())


def in_segments(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each launch of the run."""
    found: list[list[Record]] = []
    for record in records:
        if record.kind == "start":
            found.append([])
        found[-1].append(record)
    return found


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    """``sdcwatch demo`` without options that change what happens, scraped and pushed."""
    root = tmp_path_factory.mktemp("default")
    port = free_port()
    collector = load_file(
        Path(__file__).parents[1] / "sinks" / "conftest.py", "conftest_of_sinks"
    ).Collector()
    prometheus = None
    if shutil.which("prometheus") is not None:
        prometheus = Prometheus(root, f"127.0.0.1:{port}")
    texts: list[str] = []
    stop = threading.Event()
    url = f"http://127.0.0.1:{port}/metrics"
    watching = threading.Thread(target=watch_endpoint, args=(url, texts, stop))
    watching.start()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_METRIC_EXPORT_INTERVAL": "2000",
    }
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sdcwatch", "demo", "--run-dir", str(root / "run")),
                *("--metrics-port", str(port), "--linger", str(LINGER_SECONDS)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
        )
        stop.set()
        watching.join()
        segments = in_segments(read_records(root / "run"))
        yield WatchedRun(
            root / "run", done.returncode, done.stdout, url, texts, collector, prometheus, segments
        )
    finally:
        stop.set()
        if prometheus is not None:
            prometheus.stop()
        collector.close()
