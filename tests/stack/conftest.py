"""A stack started for real, in a process of its own, and something for it to scrape."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

SERVERS = ("prometheus", "promtool", "amtool")

RULES = """\
groups:
  - name: test
    rules:
      - alert: SuspectSeen
        expr: >-
          max by (run, suspect_rank, suspect_node, suspect_gpu)
          (sdcwatch_rank_state{state="suspect"}) == 1
        labels: {severity: critical}
        annotations:
          summary: A rank is suspect.
          description: "rank {{ $labels.suspect_rank }} on {{ $labels.suspect_node }}"
      - alert: Swallowed
        expr: vector(1)
"""
ALERTMANAGER = """\
global: {smtp_smarthost: "mail.invalid:25", smtp_from: "nobody@mail.invalid"}
templates: ["/nowhere/*.tmpl"]
route:
  receiver: team
  group_by: [run]
  group_wait: 0s
  group_interval: 1s
  routes:
    - matchers: ['alertname="Swallowed"']
      receiver: nobody
inhibit_rules:
  - source_matchers: ['alertname="A"']
    target_matchers: ['alertname="B"']
    equal: [run]
receivers:
  - name: nobody
  - name: team
    email_configs: [{to: "team@mail.invalid"}]
"""
SUSPECT = (
    "# TYPE sdcwatch_rank_state gauge\n"
    'sdcwatch_rank_state{run="r7",suspect_rank="3",suspect_node="n1",suspect_gpu="GPU-3",'
    'suspect_instance_id="i-3",exporter_rank="0",state="suspect"} 1\n'
)


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of `condition`, asked ten times a second."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return value


def get_json(url: str) -> Any:
    with urlopen(url, timeout=5) as answer:
        return json.load(answer)


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that waits to be reaped does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@dataclass
class Metrics:
    """A /metrics endpoint whose text a test may change."""

    text: str = ""
    address: str = ""

    def show_suspect(self) -> None:
        """Rank 3 is suspect from the next scrape on."""
        self.text = SUSPECT


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    page = Metrics()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    page.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    yield page
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Running:
    """``sdcwatch stack up`` in a process of its own."""

    process: subprocess.Popen[str]
    data_dir: Path
    reader: threading.Thread
    output: list[str]

    wait_until = staticmethod(wait_until)
    get_json = staticmethod(get_json)
    is_gone = staticmethod(is_gone)

    def state(self) -> dict[str, Any]:
        """What it wrote once everything was healthy."""
        path = self.data_dir / "stack.json"

        def ready() -> bool:
            assert self.process.poll() is None, self.text()
            return path.exists()

        wait_until(ready)
        return dict(json.loads(path.read_text()))

    def text(self) -> str:
        """What it has printed so far."""
        return "".join(self.output)

    def failure(self) -> str:
        """What it printed, on one line, once it has ended with exit code 1."""
        assert self.process.wait(30) == 1, self.text()
        self.reader.join()
        return " ".join(self.text().split())

    def pids(self) -> list[int]:
        return [server["pid"] for server in self.state()["servers"].values()]


def own_files(directory: Path) -> list[str]:
    """Options with small files of our own, so that an alert arrives within seconds."""
    (directory / "rules.yml").write_text(RULES)
    (directory / "alertmanager.yml").write_text(ALERTMANAGER)
    (directory / "dashboards").mkdir(exist_ok=True)
    return [
        f"--rules={directory / 'rules.yml'}",
        f"--alertmanager-config={directory / 'alertmanager.yml'}",
        f"--dashboards={directory / 'dashboards'}",
    ]


@pytest.fixture
def start_stack(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts the command; what a failing test left is stopped afterwards."""
    started: list[Running] = []

    def start(*more: str, path: str | None = None, shipped: bool = False) -> Running:
        ports = (f"--{name}-port=0" for name in ("prometheus", "alertmanager", "receiver"))
        options = [f"--data-dir={tmp_path / 'data'}", "--interval=1", "--grafana-port=0", *ports]
        options += [] if shipped else own_files(tmp_path)
        process = subprocess.Popen(
            [sys.executable, "-m", "sdcwatch", "stack", "up", "--local", *options, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path or os.environ["PATH"]},
        )
        stream, output = process.stdout, list[str]()
        assert stream is not None
        reader = threading.Thread(target=lambda: output.extend(stream))
        reader.start()
        started.append(Running(process, tmp_path / "data", reader, output))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
        running.process.wait(30)
        running.reader.join()
        assert running.process.stdout is not None
        running.process.stdout.close()


@pytest.fixture(autouse=True, scope="session")
def _servers_are_installed() -> None:
    missing = [name for name in SERVERS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Debian's prometheus and prometheus-alertmanager: no {missing}")
