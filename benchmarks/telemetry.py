"""What telemetry costs a training step: on, and with everything behind it dead or hanging.

A step is a forward and a backward of a small model on one thread; after each one a `Progress`
record goes out, and a `Verdict` after every tenth: hundreds of times the guard's rate of one record
a second. Conditions are interleaved with telemetry off (A, off, A, off, ...) in blocks of steps;
the row "off" is off against off: differences below it mean nothing.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py [--pairs N] [--steps N]
"""

import argparse
import logging
import os
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from sdcwatch.config import LauncherEnvironment, TelemetryConfig
from sdcwatch.core.records import (
    Action,
    Check,
    Count,
    Durations,
    Outcome,
    Phase,
    Progress,
    RunStarted,
    Suspect,
    Verdict,
)
from sdcwatch.core.topology import RankInfo
from sdcwatch.sinks.build import build_sinks
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import JsonlSink

RANKS = tuple(
    RankInfo(rank=r, node=f"n{r // 2}", host="h", local_rank=r % 2, pid=1, instance_id=f"i{r}")
    for r in range(6)
)
START = RunStarted(
    step=0, time=0.0, run="bench", version="0", ranks=RANKS, fault_domain="node", mode="enforce",
    on_failure="skip", audit_every=100, fingerprint_every=10, checkpoint_every=None,
    max_audit_age=100, quorum=2, parameters=1, parameter_bytes=4,
)  # fmt: skip
SUSPECT = Suspect(
    rank=3, node="n1", instance_id="i3", gpu="n1/1", gpu_index=None, check=Check.REPLAY, bad=2,
    total=2,
)  # fmt: skip
ENVIRONMENT = LauncherEnvironment(
    run=None, local_rank=0, restart_count=0, otlp_endpoint=False, otel_disabled=False,
    cublas_workspace=None,
)  # fmt: skip

Condition = Callable[[Path], AbstractContextManager[Dispatcher]]


def progress(step: int) -> Progress:
    return Progress(
        step=step, time=time.time(), first_step=step, loss=1.0, plain_steps=1, plain_seconds=0.01,
        counts=(Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=1),),
        durations=(Durations.of(Check.NONFINITE, Phase.PROBE, (0.0001,)),),
        overhead_seconds={"nonfinite": 0.0001},
    )  # fmt: skip


def verdict(step: int) -> Verdict:
    return Verdict(
        step=step, time=time.time(), check=Check.REPLAY, outcome=Outcome.SUSPECT, failed=True,
        action=Action.SKIP, reason="rank 3 computed other gradients", suspects=(SUSPECT,),
    )  # fmt: skip


@contextmanager
def dispatching(dispatcher: Dispatcher) -> Iterator[Dispatcher]:
    try:
        yield dispatcher
    finally:
        dispatcher.close()


def off(root: Path) -> AbstractContextManager[Dispatcher]:
    return dispatching(Dispatcher(direct=[JsonlSink(root / "events.jsonl")]))


def serving(root: Path, *, otlp: bool = False) -> Dispatcher:
    config = TelemetryConfig(prometheus_port=0, wandb=False, otlp=otlp, close_seconds=0.5)
    dispatcher, _ = build_sinks(
        config, START, rank=0, local_rank=0, environment=ENVIRONMENT, run_dir=root
    )
    return dispatcher


@contextmanager
def scraped(root: Path) -> Iterator[Dispatcher]:
    """The endpoint, scraped five times a second."""
    stop = threading.Event()
    with dispatching(serving(root)) as dispatcher:

        def scrape() -> None:
            while not stop.wait(0.2):
                with urllib.request.urlopen(dispatcher.links["metrics"]) as response:
                    response.read()

        scraping = threading.Thread(target=scrape)
        scraping.start()
        yield dispatcher
        stop.set()
        scraping.join()


@contextmanager
def pushing(root: Path, url: str) -> Iterator[Dispatcher]:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
    os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = "200"
    with dispatching(serving(root, otlp=True)) as dispatcher:
        yield dispatcher


@contextmanager
def black_hole(root: Path) -> Iterator[Dispatcher]:
    """A collector that takes the connection and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pushing(root, f"http://127.0.0.1:{server.getsockname()[1]}") as dispatcher,
    ):
        yield dispatcher


def refused(root: Path) -> AbstractContextManager[Dispatcher]:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return pushing(root, f"http://127.0.0.1:{probe.getsockname()[1]}")


@contextmanager
def hanging_wandb(root: Path) -> Iterator[Dispatcher]:
    """A W&B run whose every call blocks for a minute."""
    from sdcwatch.sinks.wandb import WandbSink

    let_go = threading.Event()

    def block(*arguments: object, **options: object) -> None:
        let_go.wait(60.0)

    run = SimpleNamespace(
        log=block, define_metric=block, alert=block, summary=SimpleNamespace(update=block), tags=(),
        url=None, dir="",
    )  # fmt: skip
    log = JsonlSink(root / "events.jsonl")
    try:
        with dispatching(
            Dispatcher([WandbSink(run)], queue_size=64, close_seconds=0.2, direct=[log])
        ) as dispatcher:
            yield dispatcher
    finally:
        let_go.set()


def full_disk(root: Path) -> AbstractContextManager[Dispatcher]:
    return dispatching(Dispatcher(direct=[JsonlSink(Path("/dev/full"))]))


CONDITIONS: dict[str, Condition] = {
    "off": off,
    "/metrics, scraped five times a second": scraped,
    "OTLP push to a black hole": black_hole,
    "OTLP push to a refused port": refused,
    "W&B whose calls hang for a minute": hanging_wandb,
    "full disk under the event log": full_disk,
}


class Training:
    """A model small enough that telemetry would show."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
        )
        self.batch = torch.randn(128, 512)

    def step(self) -> None:
        self.model.zero_grad()
        self.model(self.batch).square().mean().backward()


@dataclass(frozen=True)
class Block:
    """Medians over the steps of one block, in seconds; records lost."""

    wall: float
    thread: float  # CPU time of the training thread: neighbours on a shared machine do not count
    emit: float
    worst_emit: float
    lost: int


def block(training: Training, condition: Condition, steps: int) -> Block:
    samples: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as root, condition(Path(root)) as dispatcher:
        dispatcher.emit(START)
        for step in range(1, steps + 1):
            began, thread = time.perf_counter(), time.thread_time()
            training.step()
            emitting = time.perf_counter()
            dispatcher.emit(progress(step))
            if step % 10 == 0:
                dispatcher.emit(verdict(step))
            done = time.perf_counter()
            samples.append((done - began, time.thread_time() - thread, done - emitting))
    wall, cpu, emit = zip(*samples, strict=True)
    lost = sum(counts.lost for counts in dispatcher.counts)
    return Block(
        statistics.median(wall), statistics.median(cpu), statistics.median(emit), max(emit), lost
    )


def row(name: str, pairs: list[tuple[Block, Block]]) -> str:
    wall = sorted(a.wall / b.wall for a, b in pairs)
    cpu = sorted(a.thread / b.thread for a, b in pairs)
    quarter = len(wall) // 4
    cells = (
        name,
        f"{statistics.median(b.wall for _, b in pairs) * 1e3:.1f}",
        f"{statistics.median(wall):.3f}",
        f"{wall[quarter]:.2f} to {wall[-1 - quarter]:.2f}",
        f"{statistics.median(cpu):.3f}",
        f"{cpu[quarter]:.2f} to {cpu[-1 - quarter]:.2f}",
        f"{statistics.median(a.emit for a, _ in pairs) * 1e6:.0f}",
        f"{max(a.worst_emit for a, _ in pairs) * 1e3:.0f}",
        str(sum(a.lost for a, _ in pairs)),
    )
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| telemetry | step off, ms | wall ratio | quartiles | CPU ratio | quartiles | emit µs | "
    "worst emit ms | lost |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # the exporters' complaints about dead collectors
    training = Training()
    for condition in CONDITIONS.values():
        block(training, condition, 5)
    pairs: dict[str, list[tuple[Block, Block]]] = {name: [] for name in CONDITIONS}
    for _ in range(options.pairs):
        for name, condition in CONDITIONS.items():
            on, base = (block(training, c, options.steps) for c in (condition, off))
            pairs[name].append((on, base))
    print(f"{HEADER}\n|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, sampled in pairs.items():
        print(row(name, sampled))


if __name__ == "__main__":
    main()
