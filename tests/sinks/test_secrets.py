"""No secret of the environment appears in anything that telemetry prints, stores or serves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # the real W&B client, and exporters that retry

CANARIES = {
    "WANDB_API_KEY": "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00",
    "OTEL_EXPORTER_OTLP_HEADERS": "HEADERCANARY",
    "user info of the OTLP endpoint": "USERCANARY",
    "its password": "PASSWORDCANARY",
    "user info of the dashboard": "DASHCANARY",
    "the W&B server": "BASECANARY",
}

SCRIPT = """
import logging, sys, time, urllib.request
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
from pathlib import Path
import wandb
from conftest import make_faulty_run
from sdcwatch.config import TelemetryConfig, launcher_environment
from sdcwatch.sinks.build import build_sinks

root = Path(sys.argv[1])
records = make_faulty_run()
dispatcher, lines = build_sinks(
    TelemetryConfig(
        prometheus_port=0, file_sd_dir=root / "sd",
        wandb_init={"mode": "offline", "dir": str(root)},
        dashboard_url="https://someone:DASHCANARY@grafana.example/d/run", close_seconds=3.0,
    ),
    records[0], rank=0, local_rank=0, environment=launcher_environment(), run_dir=root / "run",
)
print(*lines, sep="\\n")
for record in records:
    dispatcher.emit(record)
assert dispatcher.drain(50.0)
time.sleep(0.5)
with urllib.request.urlopen(dispatcher.links["metrics"]) as response:
    (root / "metrics.txt").write_bytes(response.read())
print(dispatcher.links, dispatcher.counts)
dispatcher.close()
print("closed")
"""


@pytest.fixture(scope="module")
def leftovers(tmp_path_factory):
    """All that a run with failing exporters and debug logging leaves: name to bytes."""
    pytest.importorskip("wandb", reason="pip install 'sdcwatch[wandb]'")
    root = tmp_path_factory.mktemp("secrets")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
        "PYTHONPATH": str(Path(__file__).parent),
        "WANDB_API_KEY": CANARIES["WANDB_API_KEY"],
        "WANDB_BASE_URL": "http://someone:BASECANARY@127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://USERCANARY:PASSWORDCANARY@127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer HEADERCANARY",
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)],
        env=environment, capture_output=True, timeout=150, cwd=root,
    )  # fmt: skip
    found = {"stdout": done.stdout, "stderr": done.stderr}
    for path in root.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


def test_the_run_with_canaries_did_what_it_had_to(leftovers):
    assert b"closed" in leftovers["stdout"], leftovers["stderr"].decode()
    assert b"exporting metrics batch" in leftovers["stdout"]  # the exporters failed and said so
    assert b"http://127.0.0.1:9/v1/metrics" in leftovers["stdout"]
    assert any(name.endswith(".wandb") for name in leftovers)
    assert b"https://grafana.example/d/run" in leftovers["metrics.txt"]
    assert b"sdcwatch_verdicts_total" in leftovers["metrics.txt"]
    assert leftovers["run/events.jsonl"].count(b"\n") == 25


@pytest.mark.parametrize("secret", CANARIES)
def test_no_canary_is_in_anything_that_is_left(leftovers, secret):
    canary = CANARIES[secret].encode()

    assert [name for name, content in leftovers.items() if canary in content] == []
