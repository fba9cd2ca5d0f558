import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings

import pytest

from sdcwatch.core.records import Note
from sdcwatch.sinks.otel import Identity

FAST = {"OTEL_METRIC_EXPORT_INTERVAL": 100}


def fork(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def wait_until(condition, timeout=20):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_push_has_the_names_labels_and_values_of_a_scrape(
    sinks, feed, scrape, collector, otlp_environment, faulty_run, series, faulty_totals
):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    dispatcher, lines = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)
    feed(dispatcher, [Note(step=60, time=0.0, code="last", message="counts up to here")])
    text = scrape(dispatcher.links["metrics"])
    dispatcher.close()

    pulled = {k: v for k, v in series(text, drop=()).items() if "_bucket" not in k[0]}
    pulled = {k: v for k, v in pulled.items() if k[0] != "target_info"}
    pushed = collector.last()

    assert set(pulled) == set(pushed)
    moving = "sdcwatch_telemetry_"
    assert {k: v for k, v in pushed.items() if not k[0].startswith(moving)} == pytest.approx(
        {k: v for k, v in pulled.items() if not k[0].startswith(moving)}
    )
    for (name, *labels), value in faulty_totals.items():
        key = (name, *sorted([*labels, "run=run-7", "exporter_rank=0"]))
        assert pushed[key] == pytest.approx(value)
    assert f"Metrics are pushed over OTLP/HTTP to {collector.url}/v1/metrics." in lines


def test_a_suspect_rank_is_named_in_the_push_and_the_exporter_apart(
    sinks, feed, collector, otlp_environment, faulty_run
):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    dispatcher, _ = sinks(faulty_run[0], otlp=True, prometheus=False)
    feed(dispatcher, faulty_run)
    dispatcher.close()

    (state,) = [key for key in collector.last() if key[0] == "sdcwatch_rank_state"]
    assert "suspect_rank=3" in state
    assert "exporter_rank=0" in state
    (resource,) = collector.resources()[-1:]
    assert resource["run"] == resource["sdcwatch.run.id"] == "run-7"
    assert resource["exporter_rank"] == "0"
    assert resource["service.instance.id"] == "run-7/0/0"


def test_the_standard_variables_win_over_our_defaults(
    sinks, feed, collector, otlp_environment, start
):
    otlp_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_EXPORTER_OTLP_HEADERS="x-tenant=blue",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_SERVICE_NAME="my-job",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment=lab,run=other,service.instance.id=seven",
    )
    dispatcher, _ = sinks(start, otlp=True)
    feed(dispatcher, [start])
    dispatcher.close()

    (resource,) = collector.resources()[-1:]
    assert resource["service.name"] == "my-job"
    assert resource["deployment.environment"] == "lab"
    assert resource["service.instance.id"] == "seven"
    assert resource["run"] == "run-7"  # the label must be the run's, on every path
    headers = {k.lower(): v for k, v in collector.headers[-1].items()}
    assert (headers["x-tenant"], headers["content-encoding"]) == ("blue", "gzip")


def test_case_29_timeouts_and_intervals_of_the_environment_are_honoured(
    sinks, otlp_environment, start, collector
):
    otlp_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_EXPORTER_OTLP_TIMEOUT="3",
        OTEL_METRIC_EXPORT_INTERVAL="77000",
        OTEL_METRIC_EXPORT_TIMEOUT="5000",
    )
    from sdcwatch.sinks.otlp import OtlpReader

    reader = OtlpReader()

    assert reader._exporter._client._timeout == 3
    assert reader._export_interval_millis == 77_000
    assert reader._export_timeout_millis == 5_000
    assert reader.where == f"{collector.url}/v1/metrics"
    reader.shutdown(timeout_millis=500)


def test_a_signal_of_its_own_endpoint_variable_is_used_as_it_is(otlp_environment):
    from sdcwatch.sinks.otlp import OtlpReader

    otlp_environment(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT="http://127.0.0.1:9/custom/path")
    reader = OtlpReader()

    assert reader.where == "http://127.0.0.1:9/custom/path"
    reader._shutdown_event.set()


def test_a_variable_that_nobody_can_read_is_a_warning(sinks, feed, otlp_environment, faulty_run):
    otlp_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://user:canary@127.0.0.1:9",
        OTEL_METRIC_EXPORT_INTERVAL="-5",
    )
    dispatcher, lines = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)

    assert any(line.startswith("Warning: no OTLP push") for line in lines)
    assert not any("canary" in line for line in lines)
    assert "metrics" in dispatcher.links


@pytest.mark.parametrize("dead", ["black hole", "refused"])
def test_case_7_close_keeps_its_budget_with_a_dead_collector(
    sinks, otlp_environment, black_hole, free_port, faulty_run, dead
):
    url = black_hole.url if dead == "black hole" else f"http://127.0.0.1:{free_port()}"
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=url, **FAST)
    dispatcher, _ = sinks(faulty_run[0], otlp=True, close_seconds=0.5)
    began = time.monotonic()
    for record in faulty_run:
        dispatcher.emit(record)
    emitted = time.monotonic() - began
    if dead == "black hole":
        wait_until(lambda: black_hole.connections)

    began = time.monotonic()
    dispatcher.close()

    assert time.monotonic() - began < 5 * 0.5
    assert emitted < 5 * 0.5
    log, metrics, logs = dispatcher.counts
    assert (log.events, log.lost) == (len(faulty_run), 0)
    assert metrics.dropped["error"] + metrics.dropped["timeout"] > 0
    assert logs.sink == "otel_logs"


def test_case_7_a_process_with_a_black_hole_collector_ends(black_hole, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from conftest import make_faulty_run
from pathlib import Path
from sdcwatch.config import TelemetryConfig, launcher_environment
from sdcwatch.sinks.build import build_sinks
records = make_faulty_run()
dispatcher, _ = build_sinks(
    TelemetryConfig(prometheus_port=0, wandb=False, close_seconds=0.5), records[0], rank=0,
    local_rank=0, environment=launcher_environment(), run_dir=Path({str(tmp_path)!r}),
)
for record in records:
    dispatcher.emit(record)
dispatcher.close()
print("closed", flush=True)
"""
    environment = {
        **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": black_hole.url,
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "closed\n"
    began = time.monotonic()
    process.wait(20)
    process.stdout.close()

    assert process.returncode == 0
    assert time.monotonic() - began < 5 * 0.5
    assert (tmp_path / "events.jsonl").read_text().count("\n") > 10


def test_four_forked_workers_count_one_event_once(
    sinks, feed, collector, otlp_environment, faulty_run
):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **FAST)
    dispatcher, _ = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)

    workers = [fork(lambda: time.sleep(1.0)) for _ in range(4)]
    for worker in workers:
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    wait_until(lambda: len(collector.metrics) > 3)
    dispatcher.close()

    assert {r["process.pid"] for r in collector.resources()} == {os.getpid()}
    assert len({r["service.instance.id"] for r in collector.resources()}) == 1
    key = (
        "sdcwatch_verdicts_total",
        "cause=none",
        "check=replay",
        "exporter_rank=0",
        "outcome=suspect",
    )
    assert collector.last()[(*key, "run=run-7")] == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker:UserWarning")
def test_a_data_loader_with_four_workers_counts_one_event_once(
    sinks, feed, collector, otlp_environment, faulty_run
):
    import torch

    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **FAST)
    dispatcher, _ = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)

    loader = torch.utils.data.DataLoader(
        torch.arange(64), batch_size=4, num_workers=4, multiprocessing_context="fork"
    )
    assert sum(int(batch.sum()) for batch in loader) == 63 * 32
    dispatcher.close()

    assert {r["process.pid"] for r in collector.resources()} == {os.getpid()}


def test_case_5_a_child_forked_during_an_export_exits(
    sinks, feed, black_hole, otlp_environment, faulty_run
):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=black_hole.url, **FAST)
    dispatcher, _ = sinks(faulty_run[0], otlp=True, close_seconds=0.2)
    feed(dispatcher, faulty_run)
    wait_until(lambda: black_hole.connections)  # an export holds its lock from here on

    def leave_like_a_script():
        dispatcher.emit(faulty_run[-1])
        dispatcher.close()
        import atexit

        atexit._run_exitfuncs()

    began = time.monotonic()
    child = fork(leave_like_a_script)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert code == 0
    assert time.monotonic() - began < 10, "it waited for a lock that nobody holds any more"


def test_a_resource_names_the_process_that_exports():
    identity = Identity(run="r", rank=12, attempt=2, node="n", version="1")

    resource = identity.resource().attributes

    assert resource["service.instance.id"] == "r/12/2"
    assert resource["sdcwatch.rank"] == 12
    assert resource["process.pid"] == os.getpid()
    assert resource["telemetry.sdk.name"] == "opentelemetry"
    assert identity.labels == {"run": "r", "exporter_rank": "12"}


def rotel_binary():
    try:
        import rotel
    except ImportError:
        return None
    binary = os.path.join(os.path.dirname(rotel.__file__), "rotel-agent")
    return binary if os.access(binary, os.X_OK) else None


@pytest.mark.skipif(
    rotel_binary() is None, reason="rotel is not installed: pip install rotel==0.0.1a15 (x86_64)"
)
def test_a_real_collector_passes_the_push_on_unchanged(
    sinks, feed, collector, otlp_environment, free_port, faulty_run, faulty_totals, tmp_path
):
    port = free_port()
    agent = subprocess.Popen(
        [
            rotel_binary(), "start",
            "--otlp-http-endpoint", f"127.0.0.1:{port}",
            "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}",
            "--pid-file", str(tmp_path / "rotel.pid"),
            "--log-file", str(tmp_path / "rotel.log"),
            "--exporter", "otlp",
            "--otlp-exporter-protocol", "http",
            "--otlp-exporter-endpoint", collector.url,
            "--batch-timeout", "100ms",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_until(lambda: answers(port))
        otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
        dispatcher, _ = sinks(faulty_run[0], otlp=True, prometheus=False)
        feed(dispatcher, faulty_run)
        dispatcher.close()
        wait_until(lambda: collector.metrics)
        pushed = collector.last()
    finally:
        agent.terminate()
        agent.communicate(timeout=20)

    for (name, *labels), value in faulty_totals.items():
        key = (name, *sorted([*labels, "run=run-7", "exporter_rank=0"]))
        assert pushed[key] == pytest.approx(value)


def answers(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/metrics", data=b"")
    try:
        with urllib.request.urlopen(request, timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def test_log_records_carry_what_metrics_must_not(
    sinks, feed, collector, otlp_environment, faulty_run, attribute_value
):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    dispatcher, lines = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)
    dispatcher.close()

    sent = [
        (log, {a.key: attribute_value(a.value) for a in log.attributes})
        for request in collector.logs
        for rl in request.resource_logs
        for sl in rl.scope_logs
        for log in sl.log_records
    ]
    verdicts = [r for r in faulty_run if r.kind == "verdict"]
    assert [facts["sdcwatch.step"] for _, facts in sent] == [v.step for v in verdicts]
    log, facts = sent[0]
    assert log.body.string_value == verdicts[0].reason
    assert log.event_name == "sdcwatch.verdict"
    assert facts["sdcwatch.tensors"] == ["layer1.weight"]
    assert facts["sdcwatch.suspect.ranks"] == [3]
    assert facts["exporter_rank"] == "0"
    assert json.loads(facts["sdcwatch.record"])["check"] == "replay"
    assert f"Verdicts are pushed as log records to {collector.url}/v1/logs." in lines


def test_log_records_go_through_the_provider_of_the_application(
    sinks, feed, faulty_run, monkeypatch
):
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

    from sdcwatch.sinks import otel_internals

    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    monkeypatch.setattr(otel_internals, "application_logger_provider", lambda: provider)
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert len(exporter.get_finished_logs()) == 5


@pytest.mark.parametrize(
    ("variables", "pushed"),
    [
        ({}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, (True, True)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h/m"}, (True, False)),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://h/l"}, (False, True)),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_METRICS_EXPORTER": "none"},
            (False, True),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_LOGS_EXPORTER": "none"},
            (True, False),
        ),
    ],
)
def test_what_is_pushed_is_what_the_standard_variables_say(otlp_environment, variables, pushed):
    from sdcwatch.config import launcher_environment

    otlp_environment(**variables)
    found = launcher_environment()

    assert (found.otlp_endpoint, found.otlp_logs_endpoint) == pushed


def test_a_collector_for_metrics_alone_gets_no_log_records(
    feed, collector, otlp_environment, faulty_run, tmp_path
):
    from sdcwatch.config import TelemetryConfig, launcher_environment
    from sdcwatch.sinks.build import build_sinks

    otlp_environment(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"{collector.url}/v1/metrics")
    dispatcher, _ = build_sinks(
        TelemetryConfig(prometheus=False, wandb=False), faulty_run[0], rank=0, local_rank=0,
        environment=launcher_environment(), run_dir=tmp_path,
    )  # fmt: skip
    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert collector.metrics
    assert [counts.sink for counts in dispatcher.counts] == ["jsonl", "otel"]


def test_no_logs_are_sent_when_they_are_off(sinks, feed, collector, otlp_environment, faulty_run):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    dispatcher, _ = sinks(faulty_run[0], otlp=True, logs=False)
    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert collector.logs == []
    assert collector.metrics


def test_only_one_module_imports_the_private_logs_api():
    from pathlib import Path

    import sdcwatch

    root = Path(sdcwatch.__file__).parent
    users = [p.name for p in root.rglob("*.py") if "opentelemetry._logs" in p.read_text()]

    assert users == ["otel_internals.py"]
