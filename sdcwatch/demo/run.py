"""The demo from start to end: launch, watch, grade, tell."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from sdcwatch.core.records import Record, RunFinished
from sdcwatch.demo.closing import close_guarded, close_unguarded
from sdcwatch.demo.display import Display, EntryTail, RecordTail
from sdcwatch.demo.processes import Launch, rank_errors
from sdcwatch.demo.settings import UNGUARDED_LOG, DemoSettings
from sdcwatch.faults.plan import FaultPlan

_LOOK_SECONDS = 0.1
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Interruption:
    """Remembers that a signal asked the demo to end.

    The handler raises nothing: an exception at a random place could lose a process that was just
    started.

    Attributes:
        exit_code: The exit code that says so; None if nothing came.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def _note(self, number: int, _: FrameType | None) -> None:
        self.exit_code = _EXIT_CODES[signal.Signals(number)]

    @contextmanager
    def awaited(self) -> Iterator[Interruption]:
        """Take the signals for the length of a ``with``."""
        before = {number: signal.signal(number, self._note) for number in _EXIT_CODES}
        try:
            yield self
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)


def announce(settings: DemoSettings, plan: FaultPlan, console: Console) -> None:
    """Say what is about to run, and where to look while it does."""
    planted = f"{len(plan.faults)} planted faults" if plan.faults else "no planted faults"
    if settings.unguarded:
        planted += ", without the guard"
    lines = [
        f"sdcwatch demo: {settings.nodes} simulated nodes × {settings.ranks_per_node} ranks "
        f"on this machine, {settings.steps} steps, {planted}",
        f"run directory  {settings.run_dir}",
    ]
    if not settings.unguarded:
        lines.append(f"metrics        {_endpoint(settings)}")
        if settings.wandb != "off":
            where = settings.run_dir / "wandb" if settings.wandb == "offline" else "online"
            lines.append(f"W&B run        {where}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _endpoint(settings: DemoSettings) -> str:
    return f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"


def run_demo(settings: DemoSettings, plan: FaultPlan, console: Console) -> int:
    """Run the demo and print everything about it.

    Returns:
        0 if every planted fault led to the verdict expected of it and nothing else was reported,
        1 if not or if a rank failed, 130 or 143 if it was interrupted before the end.
    """
    with Interruption().awaited() as interruption:
        launch = Launch(settings)
        try:
            _watch(launch, settings, console, interruption)
            stopped = interruption.exit_code
            if settings.serve and stopped is None and launch.exit_code is None:
                graded = _close(settings, plan, console, partial=False)
                _serve(launch, settings, console, interruption)
                return graded
        finally:
            launch.stop()
            _withdraw(settings)
        failed = stopped is None and launch.exit_code != 0
        graded = _close(settings, plan, console, partial=stopped is not None or failed)
    if stopped is not None:
        console.print("Interrupted; every rank has been stopped.", style="bold")
        return stopped
    if failed:
        _tell_failure(launch, settings, console)
        return 1
    return graded


def _withdraw(settings: DemoSettings) -> None:
    """Take back what a rank announced to Prometheus and, killed, could not take back itself."""
    for entry in settings.file_sd_dir.glob("*.json"):
        entry.unlink(missing_ok=True)


def _close(settings: DemoSettings, plan: FaultPlan, console: Console, *, partial: bool) -> int:
    close: Callable[..., int] = close_unguarded if settings.unguarded else close_guarded
    return close(settings, plan, console, partial=partial)


def _watch(
    launch: Launch, settings: DemoSettings, console: Console, interruption: Interruption
) -> None:
    """Show what happens until the launcher ends, a signal comes or --serve has its last step."""
    records = RecordTail(settings.run_dir / "events.jsonl")
    entries = EntryTail(settings.run_dir / UNGUARDED_LOG)
    with Display(console, settings.steps) as display:
        ended = False
        while not ended and interruption.exit_code is None:
            # Looked at first: what was written before the end is then read after it.
            ended = launch.exit_code is not None
            for record in records.records():
                display.show(record)
                ended = ended or (settings.serve and _is_last(record, settings))
            for entry in entries.entries():
                display.show_unguarded(entry)
            time.sleep(_LOOK_SECONDS)


def _is_last(record: Record, settings: DemoSettings) -> bool:
    return isinstance(record, RunFinished) and record.step >= settings.steps


def _serve(
    launch: Launch, settings: DemoSettings, console: Console, interruption: Interruption
) -> None:
    console.print(f"Serving {_endpoint(settings)} until Ctrl-C.", soft_wrap=True, highlight=False)
    while interruption.exit_code is None and launch.exit_code is None:
        time.sleep(_LOOK_SECONDS)


def _tell_failure(launch: Launch, settings: DemoSettings, console: Console) -> None:
    console.print(f"The ranks ended with exit code {launch.exit_code}.", style="bold red")
    console.print(launch.last_words(), highlight=False, markup=False)
    for path in rank_errors(settings.run_dir)[:1]:
        console.print(f"The stderr of a rank: {path}", markup=False, soft_wrap=True)
