"""What torchrun starts for `test_launched`: a run that is scraped, has a W&B run, and ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable

from scenarios import STEPS, VICTIM, Rank

from sdcwatch import TelemetryConfig
from sdcwatch.faults import Fault, FaultPlan, Injector

BROKEN = Fault(
    site="activation", target="0", kind="nan", persistence="sticky", ranks=(VICTIM,), steps=(2, 2)
)
"""A broken unit, from the moment on that the loop is told so."""


def weight_changes(me: Rank) -> None:
    """Check 3 stops the run."""
    me.model.module[0].weight.data[0, 0] += 1.0


def broken(me: Rank) -> None:
    """Check 1 stops the run: the injector plants it."""


def rank_killed(me: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exception(me: Rank) -> None:
    msg = "a label is out of range"
    raise ValueError(msg)


def sigterm(me: Rank) -> None:
    """The launcher is told to end."""


def main(happens: Callable[[Rank], None]) -> None:
    me = Rank()
    injector = Injector(FaultPlan(faults=(BROKEN,) if happens is broken else ()), rank=me.rank)
    injector.attach(me.model, me.optimizer)
    telemetry = TelemetryConfig(
        prometheus_port=int(os.environ["PORT"]),
        otlp=False,
        close_seconds=20.0,  # W&B has a process of its own; here five of them share two cores
        wandb_init={"mode": "offline", "dir": str(me.run_dir)},
    )
    now, happened = me.run_dir / "now", False
    with me.guard(
        telemetry=telemetry,
        run=happens.__name__,
        on_failure="stop",
        gpu_uuid=f"GPU-{me.rank}",
    ) as guard:
        while True:
            told = now.exists() and not happened
            injector.begin_step(2 if told or happened else 1)
            if told and me.is_victim:
                happened = True
                happens(me)
            me.step(guard)
            time.sleep(0.1 if guard.step > STEPS else 0.0)  # armed by then: it waits to be told


def play(name: str) -> None:
    faulthandler.dump_traceback_later(float(os.environ["DUMP_AFTER"]))
    main(globals()[name])
