"""A day of ten steps a second, replayed fast: size of the event log, time and memory of a report.

    python benchmarks/day.py [--hours 24]

The records are those that a reporter gives out once a second in a healthy run (audit every 100
steps, weight check every 10, a checkpoint every 1,000), through the real event log.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Count,
    Durations,
    GateReason,
    Outcome,
    Phase,
    Progress,
    RunStarted,
)
from sdcwatch.core.topology import RankInfo
from sdcwatch.sinks.jsonl import EVENTS, JsonlSink

STEPS_A_SECOND = 10
RANKS = 16
BEGAN = 1.8e9


def _started(step: int, at: float) -> RunStarted:
    ranks = tuple(
        RankInfo(rank=r, node=f"node-{r // 8}", host=f"node-{r // 8}", local_rank=r % 8, pid=r,
                 instance_id=f"i-{r // 8}", gpu_uuid=f"GPU-{r}")
        for r in range(RANKS)
    )  # fmt: skip
    return RunStarted(
        step=step, time=at, run="day", version="0", ranks=ranks, fault_domain="node",
        mode="enforce", on_failure="skip", audit_every=100, fingerprint_every=10,
        checkpoint_every=1000, max_audit_age=100, quorum=2, parameters=1, parameter_bytes=4,
    )  # fmt: skip


def _second(number: int, draw: random.Random) -> Progress:
    """What a reporter says after one second."""
    step = STEPS_A_SECOND * number
    audits = step % 100 == 0

    def spent(check: Check, phase: Phase, times: int) -> Durations:
        return Durations.of(check, phase, [0.002 * draw.lognormvariate(0, 1) for _ in range(times)])

    phases = [spent(Check.NONFINITE, Phase.PROBE, 10), spent(Check.FINGERPRINT, Phase.DIGEST, 1)]
    if audits:
        phases += [spent(Check.REPLAY, p, 1) for p in (Phase.CAPTURE, Phase.EXCHANGE, Phase.REPLAY)]
    counts = [(Check.NONFINITE, 10), (Check.FINGERPRINT, 1), *[(Check.REPLAY, 1)] * audits]
    return Progress(
        step=step, time=BEGAN + number, first_step=step - STEPS_A_SECOND + 1,
        counts=tuple(Count(check=c, outcome=Outcome.PASS, count=n) for c, n in counts),
        comparisons=RANKS * audits, weight_checks=1, loss=draw.random(), durations=tuple(phases),
        plain_steps=10 - audits, plain_seconds=0.9, audit_steps=int(audits), audit_seconds=0.1,
        overhead_seconds={c.value: draw.random() for c, _ in counts},
        last_clean_audit_step=step // 100 * 100, last_clean_audit_time=BEGAN + number // 10 * 10,
        last_weight_check_step=step, last_weight_check_time=BEGAN + number,
        audited_ranks=RANKS, steps_at_risk=step % 100,
    )  # fmt: skip


def write(run_dir: Path, *, seconds: int, first: int = 1) -> tuple[int, int]:
    """Write the log of so many seconds, from the given one on; its bytes, and the steps in it."""
    draw, log = random.Random(0), JsonlSink(run_dir / EVENTS)
    log.emit(_started(0, BEGAN))
    for number in range(first, first + seconds):
        log.emit(_second(number, draw))
        step = STEPS_A_SECOND * number
        if step % 1000 == 0:
            log.emit(
                CheckpointEvent(
                    step=step, time=BEGAN + number, result=CheckpointResult.SAVED,
                    reason=GateReason.OK, audit_age=0,
                )
            )  # fmt: skip
    log.close(1.0)
    return (run_dir / EVENTS).stat().st_size, STEPS_A_SECOND * seconds


def main() -> None:
    """Write, report, and print what both took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=24.0)
    hours = parser.parse_args().hours
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        began = time.perf_counter()
        size, steps = write(run_dir, seconds=int(3600 * hours))
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "sdcwatch", "report", str(run_dir)], check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        took = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        page = (run_dir / "report.html").stat().st_size
    print(f"{hours:g} h at {STEPS_A_SECOND} steps/s: {steps} steps, written in {wrote:.1f} s")
    print(f"events.jsonl {size / 1e6:.2f} MB, {size / 1e6 * 24 / hours:.2f} MB a day")
    print(f"report {took:.1f} s, {peak:.0f} MB at most, page {page / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
