"""Real servers for tests: started on free ports, stopped for sure; and a webhook that listens."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import alertmanager_settings, example_receivers
from sdcwatch.testing import free_port

RULES = Path(__file__).parents[2] / "alerts" / "sdcwatch.rules.yml"


def binary(*names: str) -> str:
    """The first of these programs on the PATH; without one the test is skipped and says so."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"none of {names} on the PATH: apt-get install prometheus prometheus-alertmanager")


def ask(url: str, body: object = None) -> Any:
    """GET, or POST of JSON; the JSON of the answer, or None if it is empty."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@contextlib.contextmanager
def server(command: list[str], ready: str, folder: Path) -> Iterator[None]:
    """A real server in a process of its own, until the block ends."""
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + 40
        while True:
            with contextlib.suppress(OSError, ValueError):
                ask(ready)
                break
            text = log.read_text(errors="replace")
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


class Inbox:
    """A webhook receiver: what Alertmanager sent, in order, with the path it was sent to."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, dict[str, Any]]] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                mail = {**json.loads(body), "receivedAt": time.time()}
                inbox.mails.append((self.path, mail))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(
        self, wanted: Callable[[list[tuple[str, dict[str, Any]]]], bool], seconds: float = 40
    ) -> None:
        """Until what has arrived is as wanted."""
        deadline = time.monotonic() + seconds
        while not wanted(self.mails):
            summary = [(p, [a["labels"] for a in m.get("alerts", ())]) for p, m in self.mails]
            assert time.monotonic() < deadline, summary
            time.sleep(0.1)


@contextlib.contextmanager
def quick_alertmanager(notify: str, folder: Path, *, pages: bool = False) -> Iterator[str]:
    """A real Alertmanager with our routes, quick, that notifies one URL; its own URL.

    Args:
        notify: Where notifications go.
        folder: For its data.
        pages: Pages go through the integrations of the example too, with their titles and texts.
    """
    program = binary("prometheus-alertmanager", "alertmanager")
    settings = alertmanager_settings(MonitorConfig(), notify)
    if pages:
        page = next(r for r in settings["receivers"] if r["name"] == "page")
        page |= _integrations(notify, folder)
    for route in (settings["route"], *settings["route"]["routes"]):
        route |= {"group_wait": "1s", "group_interval": "1s"}
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program,
        "--config.file=alertmanager.yml",
        "--storage.path=data",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with server(command, f"{url}/api/v2/status", folder):
        yield url


def _integrations(notify: str, folder: Path) -> dict[str, Any]:
    """Slack, PagerDuty and Opsgenie as in the example, but for where they are and the keys."""
    (example,) = (r for r in example_receivers() if r["name"] == "page")
    key = folder / "key"
    key.write_text("k", encoding="utf-8")
    (slack,) = example["slack_configs"]
    (pager,) = example["pagerduty_configs"]
    (opsgenie,) = example["opsgenie_configs"]
    slack = {k: v for k, v in slack.items() if k != "api_url_file"}
    return {
        "slack_configs": [{**slack, "api_url": f"{notify}/slack"}],
        "pagerduty_configs": [
            {**pager, "routing_key_file": str(key), "url": f"{notify}/pagerduty"}
        ],
        "opsgenie_configs": [{**opsgenie, "api_key_file": str(key), "api_url": f"{notify}/"}],
    }


@contextlib.contextmanager
def quick_prometheus(
    target: str, alertmanager: str, folder: Path, *more_targets: str
) -> Iterator[str]:
    """A real Prometheus that scrapes its targets each second under the committed rules; its URL."""
    address = f"127.0.0.1:{free_port()}"
    managers = [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]
    targets = [target, *more_targets]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "alerting": {"alertmanagers": managers},
        "scrape_configs": [{"job_name": "sdcwatch", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        # What fires before the notifier has found Alertmanager is sent again soon.
        "--rules.alert.resend-delay=3s",
    ]
    with server(command, f"http://{address}/api/v1/status/buildinfo", folder):
        yield f"http://{address}"


class Metrics:
    """A /metrics endpoint that serves a text."""

    def __init__(self, text: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
