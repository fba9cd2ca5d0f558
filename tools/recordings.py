"""Record what a Prometheus would have scraped from real guarded runs, for the tests of the promql.

    python tools/recordings.py [NAME ...]

Each recording is one run of the demo on this machine, scraped every two seconds, as OpenMetrics
text with timestamps: ``tests/monitor/recordings/<name>.om.gz``. A test loads them into a real
Prometheus. Rerun a recording when a metric changes its name; the demo takes a few minutes each.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "tests" / "monitor" / "recordings"
INTERVAL_SECONDS = 2.0
JOB = "sdcwatch"
KILLED_RANK = 2
SAMPLE = re.compile(r"^(?P<name>sdcwatch_\w+)\{(?P<labels>.*)\} (?P<value>\S+)$")

NONDETERMINISTIC = """\
seed: 1
faults:
  - name: an operation that does not repeat
    site: activation
    target: blocks.0.mlp
    kind: scale
    factor: 1.0001
    element: 3
    ranks: [0, 1, 2]
    probability: 0.4
    persistence: sticky
    role: both
    steps: [15, 80]
    expect: {check: replay, outcome: nondeterministic}
"""
TWO_NODES = """\
seed: 1
faults:
  - name: a broken multiplier
    site: activation
    target: blocks.0.mlp
    kind: scale
    factor: 1.01
    element: 3
    rank: 1
    persistence: sticky
    role: own
    steps: [30, 50]
    expect: {check: replay, outcome: unattributed}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One recorded run.

    Attributes:
        arguments: Of ``sdcwatch demo``.
        plan: A fault plan, or empty.
        environment: Variables set for it.
        kill_after_step: Kill the process of `KILLED_RANK` once this step was scraped.
    """

    arguments: tuple[str, ...] = ()
    plan: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    kill_after_step: int | None = None


SMALL = ("--nodes", "3", "--ranks-per-node", "1")
SCENARIOS = {
    "default_faults": Scenario(),
    "nondeterministic": Scenario(arguments=(*SMALL, "--steps", "90"), plan=NONDETERMINISTIC),
    "two_nodes": Scenario(
        arguments=("--nodes", "2", "--ranks-per-node", "1", "--steps", "60"), plan=TWO_NODES
    ),
    "rank_killed": Scenario(
        arguments=(*SMALL, "--steps", "120", "--faults", "none"), kill_after_step=12
    ),
    "sinks_dead": Scenario(
        arguments=(*SMALL, "--steps", "60", "--faults", "none"),
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ),
}


def scrape(url: str) -> str | None:
    """The text of one scrape, or None if nothing run_queries."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def samples(text: str, instance: str, now: float) -> Iterator[tuple[str, str]]:
    """Name and line of every sample of ours, with the labels a scrape adds."""
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            target = f'job="{JOB}",instance="{instance}"'
            series = f"{found['name']}{{{found['labels']},{target}}}"
            yield series, f"{series} {found['value']} {now:.3f}"


def record(
    url: str, process: subprocess.Popen[bytes], scenario: Scenario, run_dir: Path
) -> list[str]:
    """Scrape until the process has ended; lines in the order of time."""
    lines: list[str] = []
    instance = url.split("/")[2]
    killed = False
    while True:
        ended = process.poll() is not None
        now = time.time()
        text = scrape(url)
        seen = dict(samples(text, instance, now)) if text else {}
        lines += seen.values()
        if scenario.kill_after_step is not None and text and not killed:
            step = re.search(r"^sdcwatch_step\{.*\} (\S+)$", text, re.MULTILINE)
            if step and float(step[1]) >= scenario.kill_after_step:
                killed = kill_rank(run_dir, KILLED_RANK)
        if ended:
            return lines
        time.sleep(INTERVAL_SECONDS)


def kill_rank(run_dir: Path, rank: int) -> bool:
    """Kill the process of a rank, which the start record of the run names."""
    for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "start":
            os.kill(record["ranks"][rank]["pid"], signal.SIGKILL)
            return True
    return False


def run(name: str, scenario: Scenario, port: int) -> Path:
    """Run the demo as the scenario says, and write its recording."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sdcwatch", "demo", *scenario.arguments]
        command += ["--run-dir", f"{folder}/{name}", "--metrics-port", str(port)]
        command += ["--linger", str(2 * INTERVAL_SECONDS), "--wandb", "off"]
        if scenario.plan:
            plan = Path(folder, "plan.yaml")
            plan.write_text(scenario.plan, encoding="utf-8")
            command += ["--faults", str(plan)]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **scenario.environment, "OMP_NUM_THREADS": "1"},
            )
            url = f"http://127.0.0.1:{port}/metrics"
            lines = record(url, process, scenario, Path(folder, name))
        sys.stderr.write(Path(folder, "log").read_text(encoding="utf-8", errors="replace")[-1500:])
    return save(name, lines)


def save(name: str, lines: list[str]) -> Path:
    """Write a recording; the same lines give the same bytes."""
    RECORDINGS.mkdir(exist_ok=True)
    path = RECORDINGS / f"{name}.om.gz"
    text = "\n".join([*lines, "# EOF", ""])
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


def main() -> None:
    """Record the scenarios named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"among {', '.join(SCENARIOS)}; default all")
    parser.add_argument("--port", type=int, default=19464)
    options = parser.parse_args()
    for name in options.names or SCENARIOS:
        path = run(name, SCENARIOS[name], options.port)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
