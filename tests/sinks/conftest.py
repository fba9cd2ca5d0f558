"""A faulty run as records, and the servers that telemetry is held against."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
import urllib.request
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sdcwatch import testing
from sdcwatch.config import LauncherEnvironment, TelemetryConfig
from sdcwatch.core.records import (
    Action,
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Comparison,
    Count,
    Coverage,
    Disagreement,
    Durations,
    GateReason,
    GuardState,
    Origin,
    Outcome,
    Phase,
    PreflightDone,
    Progress,
    RunFinished,
    RunStarted,
    SkipReason,
    StateChanged,
    Suspect,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.topology import RankInfo
from sdcwatch.sinks.build import build_sinks

T0 = 1_800_000_000.0


def make_ranks(world_size):
    return tuple(
        RankInfo(
            rank=r,
            node=f"node-{r // 2}",
            host="here",
            local_rank=r % 2,
            pid=1000 + r,
            instance_id=f"i-{r // 2:04x}",
            gpu_index=r % 2,
            gpu_uuid=f"cpu-sim-node-{r // 2}-{r % 2}",
        )
        for r in range(world_size)
    )


def make_start(world_size=6, **changes):
    facts = {
        "step": 0,
        "time": T0,
        "run": "run-7",
        "version": "0.1.0",
        "ranks": make_ranks(world_size),
        "fault_domain": "node",
        "mode": "enforce",
        "on_failure": "skip",
        "audit_every": 10,
        "fingerprint_every": 5,
        "checkpoint_every": None,
        "max_audit_age": 10,
        "quorum": 2,
        "parameters": 4,
        "parameter_bytes": 4096,
    }
    return RunStarted(**{**facts, **changes})


def make_suspect(rank, check, step, ranks, mismatches=2, comparisons=2, **changes):
    info = ranks[rank]
    return Suspect(
        rank=rank,
        node=info.node,
        instance_id=info.instance_id,
        gpu=info.gpu,
        gpu_index=info.gpu_index,
        check=check,
        mismatches=mismatches,
        comparisons=comparisons,
        first_step=step,
        last_step=step,
        **changes,
    )


def make_faulty_run(world_size=6):
    """Sixty steps: rank 3 is bad in every check, rank 1 was wrong once, the data once."""
    start = make_start(world_size)
    ranks = start.ranks

    def progress(step, **changes):
        totals = {
            "first_step": step - 9,
            "plain_steps": 9,
            "plain_seconds": 0.9,
            "audit_steps": 1,
            "audit_seconds": 0.2,
            "comparisons": world_size,
            "weight_checks": 2,
            "loss": 1.0 / step,
            "overhead_seconds": {"nonfinite": 0.01, "replay": 0.1, "fingerprint": 0.02},
            "durations": (
                Durations.of(Check.NONFINITE, Phase.PROBE, (0.0001,) * 10),
                Durations.of(Check.REPLAY, Phase.REPLAY, (0.1,)),
                Durations.of(Check.FINGERPRINT, Phase.DIGEST, (0.01, 0.01)),
            ),
            "audited_ranks": world_size,
            "last_clean_audit_step": 10,
            "last_clean_audit_time": T0 + 10,
            "last_weight_check_step": step,
            "last_weight_check_time": T0 + step,
            "steps_at_risk": step - 10,
        }
        passes = (
            Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=9),
            Count(check=Check.FINGERPRINT, outcome=Outcome.PASS, count=1),
        )
        return Progress(step=step, time=T0 + step, counts=passes, **{**totals, **changes})

    def verdict(step, check, outcome, reason, **facts):
        return Verdict(
            step=step, time=T0 + step, check=check, outcome=outcome, reason=reason, **facts
        )

    def skip(step, reason):
        return UpdateSkipped(step=step, time=T0 + step, reason=reason, consecutive=1)

    def state(step, new):
        return StateChanged(step=step, time=T0 + step, state=new, reason="as it happened")

    def checkpoint(step, result, reason):
        return CheckpointEvent(step=step, time=T0 + step, result=result, reason=reason)

    return [
        start,
        state(0, GuardState.PREFLIGHT),
        PreflightDone(
            step=1, time=T0 + 1, coverage=Coverage.FULL, reason="bits repeat",
            deterministic_kernels=False, repeats=24,
        ),
        state(1, GuardState.ARMED),
        progress(10),
        checkpoint(10, CheckpointResult.SAVED, GateReason.OK),
        progress(
            20, output_mismatches=1, gradient_mismatches=2
        ),
        verdict(
            20, Check.REPLAY, Outcome.SUSPECT, "rank 3 computed other gradients than two others",
            failed=True, action=Action.SKIP, comparisons_total=world_size,
            suspects=(make_suspect(3, Check.REPLAY, 20, ranks, tensors=("layer1.weight",)),),
            comparisons=(
                Comparison(producer=3, replayer=5, tensors=("layer1.weight",), tensors_differing=1),
                Comparison(producer=1, replayer=3, outputs_equal=False),
            ),
        ),
        skip(20, SkipReason.REPLAY),
        checkpoint(20, CheckpointResult.WITHHELD, GateReason.REPLAY),
        progress(30),
        verdict(
            30, Check.NONFINITE, Outcome.SUSPECT, "rank 3 alone computes a NaN", failed=True,
            action=Action.SKIP, origin=Origin.LOCAL, cause=Cause.DEVICE,
            suspects=(make_suspect(3, Check.NONFINITE, 30, ranks, mismatches=1, comparisons=1),),
        ),
        skip(30, SkipReason.NONFINITE),
        progress(40, gradient_mismatches=1),
        verdict(
            38, Check.NONFINITE, Outcome.REPRODUCIBLE, "the batch overflows everywhere",
            failed=True, action=Action.SKIP, origin=Origin.OUTPUT, cause=Cause.DATA, ranks=(2,),
        ),
        skip(38, SkipReason.NONFINITE),
        verdict(
            40, Check.REPLAY, Outcome.NOT_REPRODUCED, "rank 1 was wrong once", failed=True,
            action=Action.SKIP, ranks=(1,),
            suspects=(make_suspect(1, Check.REPLAY, 40, ranks, mismatches=1, reproduced=False),),
        ),
        skip(40, SkipReason.REPLAY),
        checkpoint(40, CheckpointResult.PROVISIONAL, GateReason.OK),
        progress(50, disagreements=1),
        verdict(
            50, Check.FINGERPRINT, Outcome.SUSPECT, "rank 3 dissents from the majority of 6",
            failed=True, action=Action.STOP, tensors_total=4,
            suspects=(
                make_suspect(3, Check.FINGERPRINT, 50, ranks, mismatches=1, comparisons=4,
                             tensors=("layer2.bias",)),
            ),
            disagreements=(
                Disagreement(tensor="layer2.bias", dissenters=(3,), groups=((0, 1, 2, 4, 5), (3,))),
            ),
        ),
        state(50, GuardState.TAINTED),
        checkpoint(50, CheckpointResult.WITHHELD, GateReason.TAINTED),
        progress(60),
        RunFinished(step=60, time=T0 + 60, state=GuardState.FINISHED, reason="done"),
    ]  # fmt: skip


FAULTY_TOTALS = {
    ("sdcwatch_verdicts_total", "cause=none", "check=replay", "outcome=suspect"): 1,
    ("sdcwatch_verdicts_total", "cause=none", "check=replay", "outcome=not_reproduced"): 1,
    ("sdcwatch_verdicts_total", "cause=device", "check=nonfinite", "outcome=suspect"): 1,
    ("sdcwatch_verdicts_total", "cause=data", "check=nonfinite", "outcome=reproducible"): 1,
    ("sdcwatch_verdicts_total", "cause=none", "check=nonfinite", "outcome=pass"): 54,
    ("sdcwatch_verdicts_total", "cause=none", "check=fingerprint", "outcome=suspect"): 1,
    ("sdcwatch_verdicts_total", "cause=none", "check=replay", "outcome=widespread"): 0,
    ("sdcwatch_audit_comparisons_total",): 36,
    ("sdcwatch_audit_mismatches_total", "kind=output"): 1,
    ("sdcwatch_audit_mismatches_total", "kind=gradient"): 3,
    ("sdcwatch_fingerprint_checks_total",): 12,
    ("sdcwatch_fingerprint_disagreements_total",): 1,
    ("sdcwatch_nonfinite_total", "cause=device", "origin=local"): 1,
    ("sdcwatch_nonfinite_total", "cause=data", "origin=output"): 1,
    ("sdcwatch_updates_skipped_total", "reason=replay"): 2,
    ("sdcwatch_updates_skipped_total", "reason=nonfinite"): 2,
    ("sdcwatch_updates_skipped_total", "reason=scaler"): 0,
    ("sdcwatch_checkpoints_total", "reason=ok", "result=saved"): 1,
    ("sdcwatch_checkpoints_total", "reason=ok", "result=provisional"): 1,
    ("sdcwatch_checkpoints_total", "reason=replay", "result=withheld"): 1,
    ("sdcwatch_checkpoints_total", "reason=tainted", "result=withheld"): 1,
    ("sdcwatch_steps_total", "kind=plain"): 54,
    ("sdcwatch_steps_total", "kind=audit"): 6,
    ("sdcwatch_step_time_seconds_total", "kind=plain"): 5.4,
    ("sdcwatch_step_time_seconds_total", "kind=audit"): 1.2,
    ("sdcwatch_overhead_time_seconds_total", "check=replay"): 0.6,
    ("sdcwatch_check_duration_seconds_count", "check=nonfinite", "phase=probe"): 60,
    ("sdcwatch_check_duration_seconds_sum", "check=replay", "phase=replay"): 0.6,
    (
        "sdcwatch_rank_state", "state=suspect", "suspect_gpu=cpu-sim-node-1-1",
        "suspect_instance_id=i-0001", "suspect_node=node-1", "suspect_rank=3",
    ): 1,
    (
        "sdcwatch_rank_evidence", "check=replay", "result=mismatches",
        "suspect_gpu=cpu-sim-node-1-1", "suspect_instance_id=i-0001", "suspect_node=node-1",
        "suspect_rank=3",
    ): 2,
    (
        "sdcwatch_rank_evidence", "check=fingerprint", "result=comparisons",
        "suspect_gpu=cpu-sim-node-1-1", "suspect_instance_id=i-0001", "suspect_node=node-1",
        "suspect_rank=3",
    ): 4,
    (
        "sdcwatch_rank_strikes", "suspect_gpu=cpu-sim-node-0-1", "suspect_instance_id=i-0000",
        "suspect_node=node-0", "suspect_rank=1",
    ): 1,
    (
        "sdcwatch_rank_last_finding_step", "suspect_gpu=cpu-sim-node-1-1",
        "suspect_instance_id=i-0001", "suspect_node=node-1", "suspect_rank=3",
    ): 50,
    ("sdcwatch_run_verdict", "verdict=tainted"): 1,
    ("sdcwatch_run_verdict", "verdict=suspect"): 0,
    ("sdcwatch_run_verdict", "verdict=clean"): 0,
    ("sdcwatch_absent_ranks",): 0,
    (
        "sdcwatch_checkpoint_info", "path=", "step=10", "time=2027-01-15 08:00:10 UTC",
    ): 1,
    ("sdcwatch_guard_state", "state=finished"): 1,
    ("sdcwatch_guard_state", "state=tainted"): 0,
    ("sdcwatch_coverage", "coverage=full"): 1,
    ("sdcwatch_coverage", "coverage=off"): 0,
    ("sdcwatch_audited_ranks",): 6,
    ("sdcwatch_world_size",): 6,
    ("sdcwatch_step",): 60,
    ("sdcwatch_loss",): 1 / 60,
    ("sdcwatch_steps_at_risk",): 50,
    ("sdcwatch_start_time_seconds",): T0,
    ("sdcwatch_last_progress_time_seconds",): T0 + 60,
    ("sdcwatch_last_clean_audit_time_seconds",): T0 + 10,
    ("sdcwatch_last_clean_audit_step",): 10,
    ("sdcwatch_last_weight_check_time_seconds",): T0 + 60,
    ("sdcwatch_last_weight_check_step",): 60,
    ("sdcwatch_last_good_checkpoint_time_seconds",): T0 + 10,
    ("sdcwatch_last_good_checkpoint_step",): 10,
    ("sdcwatch_last_event_time_seconds", "check=replay"): T0 + 40,
    ("sdcwatch_last_event_step", "check=fingerprint"): 50,
    ("sdcwatch_telemetry_dropped_total", "reason=error", "sink=otel"): 0,
}  # fmt: skip
"""What a scrape at the end of the faulty run must show: series, without run and exporter_rank."""


@pytest.fixture
def start():
    return make_start()


@pytest.fixture
def faulty_run():
    return make_faulty_run()


@pytest.fixture
def faulty_totals():
    return dict(FAULTY_TOTALS)


@pytest.fixture
def make():
    """Constructors of records for tests that need their own."""
    return SimpleNamespace(
        ranks=make_ranks, start=make_start, suspect=make_suspect, faulty_run=make_faulty_run
    )


@pytest.fixture
def environment():
    def build(**changes):
        facts = {
            "run": None,
            "local_rank": 0,
            "restart_count": 0,
            "otlp_endpoint": False,
            "otel_disabled": False,
            "cublas_workspace": None,
            "otlp_logs_endpoint": False,
        }
        return LauncherEnvironment(**{**facts, **changes})

    return build


@pytest.fixture
def sinks(tmp_path, environment):
    """Builds the sinks of a rank, by default with an endpoint on any port; closes them."""
    built = []

    def build(start, *, rank=0, local_rank=0, otlp=None, disabled=False, extra=(), **telemetry):
        config = TelemetryConfig(**{"prometheus_port": 0, "wandb": False, **telemetry})
        dispatcher, lines = build_sinks(
            config,
            start,
            rank=rank,
            local_rank=local_rank,
            environment=environment(
                otlp_endpoint=bool(otlp), otlp_logs_endpoint=bool(otlp), otel_disabled=disabled
            ),
            run_dir=tmp_path / "run",
            extra=extra,
        )
        built.append(dispatcher)
        return dispatcher, lines

    yield build
    for dispatcher in built:
        dispatcher.close()


@pytest.fixture
def feed():
    """Give records to a dispatcher and wait until they have been served."""

    def give(dispatcher, records):
        for record in records:
            dispatcher.emit(record)
        assert dispatcher.drain(20.0)

    return give


def parse_series(text, drop=("run", "exporter_rank")):
    """Prometheus text as {(sample name, "label=value", ...): value}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in drop]
            found[(sample.name, *labels)] = sample.value
    return found


@pytest.fixture
def scrape():
    """Fetch a metrics URL as text."""

    def get(url, timeout=10):
        with urllib.request.urlopen(url, timeout=timeout) as response:
            assert response.status == 200
            return response.read().decode()

    return get


@pytest.fixture
def series():
    return parse_series


@pytest.fixture
def free_port():
    return testing.free_port


class Collector:
    """An OTLP/HTTP receiver: keeps what it gets, decoded, and the headers it came with."""

    def __init__(self):
        self.metrics, self.logs, self.headers = [], [], []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body, dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path, body, headers):
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
            ExportLogsServiceRequest,
        )
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )

        self.headers.append(headers)
        if path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        elif path == "/v1/logs":
            self.logs.append(ExportLogsServiceRequest.FromString(body))

    def resources(self):
        return [
            {a.key: _any(a.value) for a in rm.resource.attributes}
            for request in self.metrics
            for rm in request.resource_metrics
        ]

    def last(self):
        """The last push as Prometheus would name it: {(name, "label=value", ...): value}."""
        from sdcwatch.core.catalog import BY_NAME

        found = {}
        for rm in self.metrics[-1].resource_metrics:
            for metric in (m for sm in rm.scope_metrics for m in sm.metrics):
                name = BY_NAME[metric.name].prometheus
                points = getattr(metric, metric.WhichOneof("data")).data_points
                for point in points:
                    labels = tuple(
                        f"{a.key}={_any(a.value)}" for a in sorted(point.attributes, key=_key)
                    )
                    if metric.HasField("histogram"):
                        found[(f"{name}_count", *labels)] = point.count
                        found[(f"{name}_sum", *labels)] = point.sum
                    else:
                        found[(name, *labels)] = getattr(point, point.WhichOneof("value"))
        return found

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def _key(attribute):
    return attribute.key


def _any(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_any(v) for v in value.array_value.values]
    return getattr(value, kind) if kind else None


@pytest.fixture
def collector():
    server = Collector()
    yield server
    server.close()


@pytest.fixture
def attribute_value():
    return _any


@pytest.fixture
def otlp_environment(monkeypatch):
    """Sets OTEL_* variables after removing all others."""
    import os

    for name in [n for n in os.environ if n.startswith("OTEL_")]:
        monkeypatch.delenv(name)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def black_hole():
    """A server that accepts connections, reads, and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    stop, held = threading.Event(), []

    def accept():
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            held.append(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.getsockname()[1]}", connections=held)
    stop.set()
    thread.join()
    for connection in held:
        connection.close()
    server.close()


def read_wandb_file(path):
    """The records of a ``.wandb`` file, which is a LevelDB log of protobuf messages.

    Raises:
        ValueError: The header is not the one this reader knows.
    """
    from wandb.proto import wandb_internal_pb2

    raw = path.read_bytes()
    header = struct.unpack("<4sHB", raw[:7])
    if header != (b":W&B", 0xBEE1, 0):
        msg = f"Expected a .wandb file of version 0, but got header {header}."
        raise ValueError(msg)
    position, parts, records = 7, b"", []
    while position + 7 <= len(raw):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + 7])
        if kind not in (1, 2, 3, 4):
            msg = f"Expected a record type of 1 to 4 at byte {position}, but got {kind}."
            raise ValueError(msg)
        parts += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


@pytest.fixture
def wandb_file():
    return read_wandb_file


class RecordingSink:
    """Keeps what it gets."""

    name = "recording"

    def __init__(self):
        self.records, self.closed = [], 0
        self.threads = defaultdict(int)

    def emit(self, record):
        self.records.append(record)
        self.threads[threading.current_thread().name] += 1

    def close(self, timeout_seconds):
        self.closed += 1


class BlockingSink(RecordingSink):
    """Blocks in every emit until it is let go."""

    name = "blocking"

    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def emit(self, record):
        self.entered.set()
        self.release.wait(60)
        super().emit(record)


class RaisingSink(RecordingSink):
    """Fails at every call."""

    name = "raising"

    def emit(self, record):
        message = "token=canary"
        raise RuntimeError(message)

    def close(self, timeout_seconds):
        message = "token=canary"
        raise RuntimeError(message)


@pytest.fixture
def doubles():
    return SimpleNamespace(recording=RecordingSink, blocking=BlockingSink, raising=RaisingSink)
