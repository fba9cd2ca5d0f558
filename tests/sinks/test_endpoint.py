import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from sdcwatch.sinks.endpoint import MetricsEndpoint, Scrapes


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("answer", "An answer.", registry=registry).set(42)
    return registry


@pytest.fixture
def endpoint(registry):
    served = MetricsEndpoint(registry, "127.0.0.1", 0)
    yield served
    served.close()


def test_it_serves_the_registry(endpoint, scrape):
    assert "answer 42.0" in scrape(endpoint.url)


@pytest.mark.parametrize(
    ("came", "now", "patience"),
    [
        ([], 100.0, 0.0),
        ([15.0], 16.0, 30.0),  # no interval seen yet: when it came, and that no other has since
        ([15.0], 35.0, 40.0),
        ([15.0, 30.0], 31.0, 30.0),
        ([10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 60.0], 61.0, 20.0),  # two scrapers
        ([100.0, 200.0], 201.0, 60.0),
    ],
)
def test_a_scrape_is_waited_for_two_intervals_and_a_minute_at_most(
    monkeypatch, came, now, patience
):
    clock = [0.0]
    monkeypatch.setattr("sdcwatch.sinks.endpoint.time.monotonic", lambda: clock[0])
    scrapes = Scrapes()
    for clock[0] in came:
        scrapes.serve(lambda: None)
    clock[0] = now
    assert scrapes.patience() == patience


def test_a_scrape_that_began_before_the_last_record_does_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("sdcwatch.sinks.endpoint.time.monotonic", lambda: clock[0])
    scrapes = Scrapes()

    def slowly():
        clock[0] = 5.0

    scrapes.serve(slowly)
    assert not scrapes.since(1.0)
    scrapes.serve(lambda: None)
    assert scrapes.since(1.0)


@pytest.mark.parametrize(("limit", "counts"), [("10", True), ("0", False), ("soon", True)])
def test_an_answer_that_prometheus_waited_for_in_vain_is_no_scrape(endpoint, limit, counts):
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    header = {"X-Prometheus-Scrape-Timeout-Seconds": limit}
    before = time.monotonic()

    urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=10).read()

    end = time.monotonic() + 5  # the answer is here before the server has returned
    while endpoint.scrapes.patience() == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert endpoint.scrapes.since(before) is counts


def test_it_listens_on_loopback_and_nowhere_else(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port), 5):
        pass
    with pytest.raises(ConnectionRefusedError):  # whoever listens everywhere answers here too
        socket.create_connection(("127.0.0.2", endpoint.port), 5)


def test_after_close_nobody_answers_and_the_port_is_free(registry):
    endpoint = MetricsEndpoint(registry, "127.0.0.1", 0)
    endpoint.close()

    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url, timeout=2)
    MetricsEndpoint(registry, "127.0.0.1", endpoint.port).close()


def test_a_taken_port_moves_it_to_the_next(registry, free_port):
    wanted = free_port()
    first = MetricsEndpoint(registry, "127.0.0.1", wanted)
    second = MetricsEndpoint(registry, "127.0.0.1", wanted)

    assert first.port == wanted
    assert second.port != wanted
    first.close()
    second.close()


def test_an_address_that_is_not_here_raises(registry):
    with pytest.raises(OSError, match=r"."):
        MetricsEndpoint(registry, "192.0.2.1", 0)


def test_it_binds_ipv6_loopback_where_there_is_one(registry, scrape):
    try:
        endpoint = MetricsEndpoint(registry, "::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback on this machine: {error}")
    assert "answer 42.0" in scrape(endpoint.url)
    endpoint.close()


def test_the_file_sd_entry_appears_whole_and_goes_with_the_endpoint(registry, tmp_path):
    endpoint = MetricsEndpoint(registry, "127.0.0.1", 0)

    entry = endpoint.announce(tmp_path / "sd", "3f-0")

    assert entry.name == f"{socket.gethostname()}-3f-0.json"
    assert json.loads(entry.read_text()) == [
        {"targets": [f"127.0.0.1:{endpoint.port}"], "labels": {}}
    ]
    assert entry.stat().st_mode & 0o777 == 0o644
    assert list((tmp_path / "sd").iterdir()) == [entry]  # no temporary file left
    endpoint.close()
    assert list((tmp_path / "sd").iterdir()) == []


def test_a_forked_child_does_not_hold_the_port(registry):
    import warnings

    endpoint = MetricsEndpoint(registry, "127.0.0.1", 0)
    ready, go = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        endpoint.release_in_child()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    endpoint.close()

    again = MetricsEndpoint(registry, "127.0.0.1", endpoint.port)

    assert again.port == endpoint.port
    again.close()
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)


ONE_RANK = """
import sys, time
from pathlib import Path
from sdcwatch.config import LauncherEnvironment, TelemetryConfig
from sdcwatch.core.records import RunStarted
from sdcwatch.core.topology import RankInfo
from sdcwatch.sinks.build import build_sinks

rank, port, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
ranks = tuple(
    RankInfo(rank=r, node="n", host="h", local_rank=0, pid=1, instance_id="i") for r in range(8)
)
start = RunStarted(
    step=0, time=time.time(), run="r", version="0", ranks=ranks, fault_domain="node",
    mode="enforce", on_failure="skip", audit_every=1, fingerprint_every=1, checkpoint_every=None,
    max_audit_age=1, quorum=2, parameters=1, parameter_bytes=1,
)
environment = LauncherEnvironment(
    run=None, local_rank=0, restart_count=0, otlp_endpoint=False, otel_disabled=False,
    cublas_workspace=None,
)
dispatcher, lines = build_sinks(
    TelemetryConfig(prometheus_port=port, export="all", wandb=False, file_sd_dir=root / "sd"),
    start, rank=rank, local_rank=0, environment=environment, run_dir=root / "run",
)
dispatcher.emit(start)
print(dispatcher.links["metrics"], *(l for l in lines if "Warning" in l), sep="|", flush=True)
sys.stdin.readline()
for worker in dispatcher.workers:
    worker.sink.hurry()  # nobody comes for another scrape
dispatcher.close()
"""


@pytest.mark.timeout(180)  # eight processes start at once
def test_case_14_eight_processes_with_one_configured_port_have_eight_endpoints(
    tmp_path, free_port, scrape
):
    port = free_port()
    script = tmp_path / "one_rank.py"
    script.write_text(ONE_RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(rank), str(port), tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    said = [rank.stdout.readline().strip().split("|") for rank in ranks]
    urls = [words[0] for words in said]

    assert len(set(urls)) == 8
    for rank, url in enumerate(urls):
        assert f'exporter_rank="{rank}"' in scrape(url)
    # all but the one that came first say that the port was taken
    assert sum(f"Warning: port {port} is taken" in "".join(words[1:]) for words in said) == 7
    entries = [json.loads(p.read_text())[0]["targets"][0] for p in Path(tmp_path, "sd").iterdir()]
    assert sorted(entries) == sorted(url.split("/")[2] for url in urls)

    for rank in ranks:
        rank.communicate("\n", timeout=60)

    assert [rank.returncode for rank in ranks] == [0] * 8
    assert list(Path(tmp_path, "sd").iterdir()) == []
