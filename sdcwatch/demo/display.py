"""What a person sees while the demo runs: a progress bar, and one line per event.

Words come first, a symbol and a colour beside them. The logs of the run are followed as they are
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

from sdcwatch.core.records import (
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    GuardState,
    Hang,
    Note,
    Outcome,
    PreflightDone,
    Record,
    RunFinished,
    RunStarted,
    StateChanged,
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


CHECK_NAMES = {"nonfinite": "check 1", "replay": "check 2", "fingerprint": "check 3"}

_OUTCOME_WORDS: dict[Outcome, tuple[str, str, str]] = {
    Outcome.PASS: ("✓", "pass", "green"),
    Outcome.SUSPECT: ("✗", "SUSPECT", "bold red"),
    Outcome.REPRODUCIBLE: ("○", "reproducible", "cyan"),
    Outcome.UNATTRIBUTED: ("?", "unattributed", "bold yellow"),
    Outcome.INCONCLUSIVE: ("?", "inconclusive", "bold yellow"),
    Outcome.NOT_REPRODUCED: ("△", "not reproduced", "yellow"),
    Outcome.NONDETERMINISTIC: ("≈", "nondeterministic", "yellow"),
    Outcome.WIDESPREAD: ("?", "widespread", "bold yellow"),
    Outcome.TRANSPORT: ("△", "transport", "yellow"),
    Outcome.NOT_REDUCED: ("✗", "not reduced", "bold yellow"),
    Outcome.DIFFERS: ("≠", "differs", "bold yellow"),
    Outcome.VOID: ("–", "void", "yellow"),
    Outcome.NOT_RUN: ("–", "not run", "yellow"),
}
_CHECKPOINT_STYLE = {
    CheckpointResult.SAVED: ("✓", "green"),
    CheckpointResult.PROVISIONAL: ("○", "cyan"),
    CheckpointResult.CONFIRMED: ("✓", "green"),
    CheckpointResult.WITHHELD: ("✗", "bold red"),
    CheckpointResult.FAILED: ("✗", "bold red"),
}
_ACTION_WORDS = {
    "skip": "update skipped on every rank",
    "stop": "all ranks stop",
    "observe": "observed only",
}


def outcome_words(outcome: Outcome) -> tuple[str, str, str]:
    """Symbol, word and rich style of an outcome."""
    return _OUTCOME_WORDS[outcome]


def line_of(record: Record) -> Text | None:
    """The line that tells of a record, or None for those that only move the progress bar."""
    match record:
        case Verdict():
            return _verdict(record)
        case CheckpointEvent():
            symbol, style = _CHECKPOINT_STYLE[record.result]
            reason = "" if record.reason is GateReason.OK else f" ({record.reason.value})"
            detail = f": {record.detail}" if record.detail else ""
            words = f"{symbol} checkpoint {record.result.value}{reason}"
            return _line(record.step, words, style, detail)
        case Hang():
            absent = ", ".join(map(str, record.absent)) or "nobody"
            words = f"✗ hang at {record.operation}"
            return _line(record.step, words, "bold red", f": rank {absent} did not answer")
        case Note():
            return _line(record.step, f"! {record.code}", "yellow", f": {record.message}")
        case _:
            return _run_line(record)


def _run_line(record: Record) -> Text | None:
    match record:
        case RunStarted():
            nodes = len({r.node for r in record.ranks})
            guarding = f"guarding {len(record.ranks)} ranks on {nodes} nodes"
            words = f"▶ {guarding}"
            if record.step:
                words = f"▶ restarted from the checkpoint of step {record.step}, {guarding}"
            detail = (
                f": audit every {record.audit_every}, "
                f"weights every {record.fingerprint_every}, {record.parameters:,} parameters"
            )
            return _line(record.step, words, "bold", detail)
        case PreflightDone():
            words = f"✓ preflight: coverage {record.coverage.value}"
            return _line(record.step, words, "green", f": {record.reason}")
        case StateChanged() if record.state is GuardState.TAINTED:
            return _line(record.step, "✗ run TAINTED", "bold red", f": {record.reason}")
        case RunFinished():
            clean = record.exit_code == 0
            words = f"■ ended: {record.state.value}"
            return _line(record.step, words, "bold" if clean else "bold red", f": {record.reason}")
        case _:
            return None


def _verdict(verdict: Verdict) -> Text | None:
    if verdict.outcome is Outcome.PASS:
        return None
    symbol, word, style = _OUTCOME_WORDS[verdict.outcome]
    who = "; ".join(f"rank {s.rank} on {s.node}" for s in verdict.suspects)
    words = f"{symbol} {CHECK_NAMES[verdict.check.value]} {verdict.check.value}: {word}"
    if who:
        words += f" {who}"
    action = _ACTION_WORDS.get(verdict.action.value, "")
    return _line(
        verdict.step, words, style, f": {verdict.reason}" + (f" [{action}]" if action else "")
    )


def _line(step: int, words: str, style: str, detail: str) -> Text:
    return Text.assemble((f"step {step:>4}  ", "dim"), (words, style), detail)


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
