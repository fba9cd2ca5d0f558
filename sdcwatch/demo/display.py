"""What a person sees while the demo runs: a progress bar, and one line per event.

Words come first, a symbol and a color beside them. The logs of the run are followed as they are
written.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from sdcwatch.core import text
from sdcwatch.core.outcomes import COLORS, MEANINGS, Role
from sdcwatch.core.records import (
    GuardState,
    Outcome,
    Record,
    RunStarted,
    StateChanged,
    UpdateSkipped,
    Verdict,
    decode,
)
from sdcwatch.core.records import Progress as ProgressRecord

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
        elif isinstance(record, Verdict):
            self._counts[record.outcome] += 1
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
        for entry in record.counts:
            self._counts[entry.outcome] += entry.count
        self._loss = record.loss
        steps = record.plain_steps + record.audit_steps
        if steps:
            self._step_seconds = (record.plain_seconds + record.audit_seconds) / steps
        self._moved(record.step)

    def _moved(self, step: int) -> None:
        state = self._state()
        self._bar.update(self._task, completed=step, description=state)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_plain >= _PLAIN_EVERY_SECONDS:
            self._last_plain = now
            self.say(Text.assemble((f"step {step:>4}  ", "dim"), Text.from_markup(state)))

    def _state(self) -> str:
        parts = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if self._step_seconds:  # not before a step has ended
            parts.append(f"{self._step_seconds:.2f} s/step")
        for outcome in Outcome:
            if self._counts[outcome]:
                symbol, word, style = outcome_words(outcome)
                parts.append(f"[{style}]{symbol} {self._counts[outcome]} {word}[/]")
        return "  ".join(parts)


def outcome_words(outcome: Outcome) -> tuple[str, str, str]:
    """Symbol, word and rich style of an outcome."""
    meaning = MEANINGS[outcome]
    return meaning.symbol, meaning.label, style_of(meaning.role)


def style_of(role: Role) -> str:
    """The rich style of a color role."""
    return "bold" if role is Role.MUTED else f"bold {COLORS[role]}"


def line_of(record: Record) -> Text | None:
    """The line of a record with symbol and color, or None for those that only move the bar.

    A skipped update stands in the line of its verdict, and the guard's states in what led to them.
    """
    quiet = isinstance(record, StateChanged) and record.state is not GuardState.TAINTED
    line = None if quiet or isinstance(record, UpdateSkipped) else text.line_of(record)
    if line is None:
        return None
    detail = f": {line.detail}" if line.detail else ""
    words = (f"{line.symbol} {line.words}", style_of(line.role))
    return Text.assemble((f"step {line.step:>4}  ", "dim"), words, detail)


class LineTail:
    """The complete lines that were appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._torn = b""

    def lines(self) -> Iterator[str]:
        """New complete lines; one that is still being written waits for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *complete, self._torn = (self._torn + data).split(b"\n")
        for line in complete:
            if line.strip():
                yield line.decode("utf-8", errors="replace")


class RecordTail:
    """The records that were appended to an event log since the last look."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def records(self) -> Iterator[Record]:
        """New records; a line that is none, torn by a crash, is passed over."""
        for line in self._lines.lines():
            with suppress(ValueError):
                yield decode(line)


class EntryTail:
    """The JSON objects that were appended to the log of an unguarded run since the last look."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def entries(self) -> Iterator[dict[str, Any]]:
        """New entries; a torn line is passed over."""
        for line in self._lines.lines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
