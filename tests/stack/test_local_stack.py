"""``sdcwatch stack up --local``, started for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from sdcwatch.monitor.alerts import WATCHDOG

Start = Callable[..., Any]


def test_a_fault_in_the_metrics_reaches_the_receiver_as_one_notification(
    metrics: Any, start_stack: Start
) -> None:
    running = start_stack(f"--target={metrics.address}")
    places = running.state()["places"]
    metrics.show_suspect()
    got = running.wait_until(lambda: running.get_json(places["Receiver"] + "/notifications"))

    (alert,) = got[0]["alerts"]
    assert alert["labels"] == {
        "alertname": "SuspectSeen",
        "severity": "critical",
        "run": "r7",
        "suspect_rank": "3",
        "suspect_node": "n1",
        "suspect_gpu": "GPU-3",
    }
    assert alert["annotations"]["description"] == "rank 3 on n1"
    assert got[0]["receiver"] == "team"
    assert "FIRING critical SuspectSeen run=r7 rank=3 node=n1 gpu=GPU-3" in running.wait_until(
        running.text
    )
    (line,) = Path(places["Receiver log"]).read_text().splitlines()
    assert json.loads(line) == got[0]


def test_the_scrape_changes_no_label_that_names_the_suspect(
    metrics: Any, start_stack: Start
) -> None:
    metrics.show_suspect()
    running = start_stack(f"--target={metrics.address}")
    query = running.state()["places"]["Prometheus"] + "/api/v1/query?query=sdcwatch_rank_state"
    (series,) = running.wait_until(lambda: running.get_json(query)["data"]["result"])

    assert series["metric"]["suspect_rank"] == "3"
    assert series["metric"]["suspect_instance_id"] == "i-3"
    assert series["metric"]["instance"] == metrics.address
    assert series["metric"]["job"] == "sdcwatch"


def test_with_the_shipped_rules_the_watchdog_arrives_and_its_link_leads_to_the_runbook(
    start_stack: Start, tmp_path: Path
) -> None:
    (tmp_path / "book.md").write_text(f"# Runbook\n\n## {WATCHDOG}\n\nAlways on.\n")
    running = start_stack(f"--runbook={tmp_path / 'book.md'}", shipped=True)
    places = running.state()["places"]
    got = running.wait_until(lambda: running.get_json(places["Receiver"] + "/notifications"))

    (alert,) = got[0]["alerts"]
    assert alert["labels"]["alertname"] == WATCHDOG
    route = yaml.safe_load((running.data_dir / "alertmanager" / "alertmanager.yml").read_text())
    assert route["route"]["group_wait"] == "5s"
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page == places["Runbook"].replace("127.0.0.1", "localhost")
    with urlopen(places["Runbook"], timeout=5) as answer:
        assert f'<h2 id="{anchor}">' in answer.read().decode()


def test_a_target_is_found_through_file_sd(
    metrics: Any, start_stack: Start, tmp_path: Path
) -> None:
    running = start_stack(f"--file-sd={tmp_path / 'targets'}")
    url = running.state()["places"]["Prometheus"] + "/api/v1/targets?state=active"
    assert running.get_json(url)["data"]["activeTargets"] == []
    (tmp_path / "targets" / "host-0.json").write_text(json.dumps([{"targets": [metrics.address]}]))

    def healthy() -> list[str]:
        active = running.get_json(url)["data"]["activeTargets"]
        return [t["labels"]["instance"] for t in active if t["health"] == "up"]

    assert running.wait_until(healthy) == [metrics.address]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_process_and_frees_every_port(
    number: signal.Signals, start_stack: Start
) -> None:
    running = start_stack()
    pids, state = running.pids(), running.state()
    assert len(pids) == 2
    running.process.send_signal(number)

    assert running.process.wait(30) == 0
    assert [pid for pid in pids if not running.is_gone(pid)] == []
    for server in state["servers"].values():
        port = int(server["url"].rsplit(":", 1)[1])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (running.data_dir / "stack.json").exists()
    running.wait_until(lambda: "Everything is stopped." in running.text())


def test_it_says_where_everything_is(start_stack: Start) -> None:
    running = start_stack()
    places = running.state()["places"]
    running.wait_until(lambda: "Ctrl-C stops everything" in running.text())

    lines = [line.split() for line in running.text().splitlines()]
    for where in places.values():
        assert [line for line in lines if line[-1:] == [where]], where
    assert "Grafana: no `grafana` or `grafana-server` on the PATH; not started." in running.text()
    for what in ("Prometheus", "Alertmanager", "Receiver"):
        assert places[what].startswith("http://127.0.0.1:")


def test_nothing_listens_beyond_loopback(start_stack: Start) -> None:
    running = start_stack()
    inodes = {
        os.readlink(link)[8:-1]
        for pid in (*running.pids(), running.process.pid)
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(link).startswith("socket:[")
    }
    listening = [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{running.process.pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in inodes
    ]

    assert len(listening) == 3
    assert set(listening) == {"0100007F"}


def test_a_port_in_use_is_named_before_anything_starts(start_stack: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = start_stack(f"--prometheus-port={port}")
        text = running.failure()

    assert f"Expected port {port} of 127.0.0.1 to be free for Prometheus" in text
    assert "pass --prometheus-port 0 for any free port" in text
    assert not (running.data_dir / "alertmanager.log").exists()


def test_a_missing_binary_names_what_to_install(start_stack: Start, tmp_path: Path) -> None:
    only = tmp_path / "bin"
    only.mkdir()
    found = shutil.which("prometheus")
    assert found is not None
    (only / "prometheus").symlink_to(found)
    running = start_stack(path=str(only))

    text = running.failure()
    assert (
        "Expected Alertmanager on the PATH as `alertmanager` or `prometheus-alertmanager`" in text
    )
    assert "apt-get install prometheus-alertmanager" in text


def test_a_rule_file_that_prometheus_rejects_shows_its_reason(
    start_stack: Start, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text("groups: [{name: g, rules: [{alert: A, expr: 'sum('}]}]")
    running = start_stack(f"--rules={bad}")

    text = running.failure()
    assert "Expected Prometheus to keep running" in text
    assert "parse error" in text
    # Alertmanager, which was up by then, was stopped in order.
    assert "Received SIGTERM" in (running.data_dir / "alertmanager.log").read_text()


def test_a_second_stack_on_the_same_data_is_refused(start_stack: Start) -> None:
    first = start_stack()
    first.state()
    second = start_stack()

    assert "to be used by no other stack" in second.failure()
    first.process.terminate()
    assert first.process.wait(30) == 0


def test_a_server_that_dies_ends_the_stack_and_the_others(start_stack: Start) -> None:
    running = start_stack()
    pids = running.pids()
    os.kill(running.state()["servers"]["Alertmanager"]["pid"], signal.SIGKILL)

    assert "Expected Alertmanager to keep running, but got exit code -9" in running.failure()
    assert [pid for pid in pids if not running.is_gone(pid)] == []


def test_an_interrupt_while_a_server_is_still_starting_stops_what_was_started(
    start_stack: Start, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    never_ready = programs / "prometheus"
    never_ready.write_text('#!/bin/sh\necho $$ >"$0.pid"\nexec sleep 120\n')
    never_ready.chmod(0o755)
    running = start_stack(path=f"{programs}:{os.environ['PATH']}")
    pid_file = programs / "prometheus.pid"
    running.wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
    running.process.send_signal(signal.SIGINT)

    assert running.process.wait(30) == 0
    running.wait_until(lambda: "Interrupted before the stack was up" in running.text())
    assert running.is_gone(int(pid_file.read_text()))
    assert not (running.data_dir / "stack.json").exists()


FAKE_GRAFANA = """\
#!{python}
import configparser, http.server, sys
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
assert sys.argv[1] == "server" and set(options) == {{"homepath", "config"}}, sys.argv
ini = configparser.RawConfigParser()
ini.read(options["config"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
at = (ini["server"]["http_addr"], int(ini["server"]["http_port"]))
http.server.HTTPServer(at, Handler).serve_forever()
"""


def test_a_grafana_on_the_path_is_started_with_data_source_and_dashboards(
    start_stack: Start, tmp_path: Path
) -> None:
    home = tmp_path / "grafana-home"
    (home / "bin").mkdir(parents=True)
    (home / "conf").mkdir()
    (home / "conf" / "defaults.ini").touch()
    binary = home / "bin" / "grafana"
    binary.write_text(FAKE_GRAFANA.format(python=sys.executable))
    binary.chmod(0o755)
    running = start_stack(path=f"{home / 'bin'}:{os.environ['PATH']}")
    state = running.state()

    assert set(state["servers"]) == {"Alertmanager", "Prometheus", "Grafana"}
    provisioning = running.data_dir / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "sdcwatch.yaml").read_text())
    assert source["datasources"][0]["url"] == state["servers"]["Prometheus"]["url"]
    boards = yaml.safe_load((provisioning / "dashboards" / "sdcwatch.yaml").read_text())
    assert boards["providers"][0]["options"]["path"] == str(tmp_path / "dashboards")
    password = Path(state["places"]["Grafana password"])
    assert password.stat().st_mode & 0o777 == 0o600
    assert (running.data_dir / "grafana" / "grafana.ini").stat().st_mode & 0o777 == 0o600
    pid = state["servers"]["Grafana"]["pid"]
    running.process.terminate()
    assert running.process.wait(30) == 0
    assert running.is_gone(pid)
