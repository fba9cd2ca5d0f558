"""What a person sees while the demo runs: a progress bar, and one line per event."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from sdcwatch.core.records import Outcome, Record, RunStarted
from sdcwatch.core.records import Progress as ProgressRecord
from sdcwatch.demo.lines import line_of, outcome_words

_PLAIN_EVERY_SECONDS = 10.0


class Display:
    """A live progress bar on a terminal; a line every ten seconds elsewhere.

    Args:
        console: Where to print.
        steps: Steps of the run.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._counts: Counter[Outcome] = Counter()
        self._loss: float | None = None
        self._step_seconds = 0.0
        self._last_plain = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting ranks", total=steps)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        """Move the bar, and print a line if the record is worth one."""
        if isinstance(record, ProgressRecord):
            self._advance(record)
        elif isinstance(record, RunStarted):
            self._bar.update(self._task, completed=record.step, description="preflight")
        line = line_of(record)
        if line is not None:
            self.say(line)

    def show_unguarded(self, entry: dict[str, Any]) -> None:
        """Move the bar by a line of the unguarded log."""
        self._loss, self._step_seconds = float(entry["loss"]), float(entry["seconds"])
        self._moved(int(entry["step"]))

    def say(self, line: Text | str) -> None:
        """Print a line above the bar."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def _advance(self, record: ProgressRecord) -> None:
        for count in record.counts:
            self._counts[count.outcome] += count.count
        self._loss = record.loss
        steps = record.plain_steps + record.audit_steps
        if steps:
            self._step_seconds = (record.plain_seconds + record.audit_seconds) / steps
        self._moved(record.step)

    def _moved(self, step: int) -> None:
        text = self._state()
        self._bar.update(self._task, completed=step, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_plain >= _PLAIN_EVERY_SECONDS:
            self._last_plain = now
            self.say(Text.assemble((f"step {step:>4}  ", "dim"), Text.from_markup(text)))

    def _state(self) -> str:
        parts = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        parts.append(f"{self._step_seconds:.2f} s/step")
        for outcome in Outcome:
            if self._counts[outcome]:
                symbol, word, style = outcome_words(outcome)
                parts.append(f"[{style}]{symbol} {self._counts[outcome]} {word}[/]")
        return "  ".join(parts)
