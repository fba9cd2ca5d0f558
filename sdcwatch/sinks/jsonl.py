"""The files of a run directory: the event log, and what a person has closed.

The event log holds one JSON record per line, written and flushed before `emit` returns. It is the
durable truth of a run, so whoever reports waits for it, as long as the file system answers:
what the guard says before it waits for another rank is on disk while it waits. The file is only
ever appended to. A process that dies in mid-line leaves a torn line; the next segment starts on a
fresh one, and readers skip what is no record.

A long run stays readable: after its first minute neighbouring progress records are merged before
they are written (`sdcwatch.core.thinning`), and before any other record what is held goes first,
before verdicts and skips at most once in five seconds. A
log that somebody rotates is followed: a file that was moved away is opened anew, one that was
truncated is appended to, and readers take ``events.jsonl.1`` and ``events.jsonl.2.gz`` as well.

What a person decides with ``sdcwatch close`` goes into a file of its own, because appending to the
log of a run that lives, on another host, would race with it. The run looks into that file.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import json
import os
import time
import uuid
from typing import TYPE_CHECKING, BinaryIO

from sdcwatch.core.records import (
    Closing,
    PreflightDone,
    Progress,
    Record,
    RunStarted,
    UpdateSkipped,
    Verdict,
    build,
    decode,
    encode,
    plain,
)
from sdcwatch.core.summary import RunSummary, SummaryBuilder
from sdcwatch.core.thinning import AHEAD_SECONDS, interval_seconds, merged
from sdcwatch.sinks.base import BaseSink
from sdcwatch.sinks.patience import READ_SECONDS, Errand

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

EVENTS = "events.jsonl"
EVENTS_PATTERN = "events*.jsonl"
ROTATED_PATTERNS = ("events*.jsonl.[0-9]*", "events*.jsonl-[0-9]*", "events*.jsonl.gz")
"""What common tools make of a log that they rotate; compressed by gzip or not."""
CLOSED = "closed.jsonl"
SUMMARY = "summary.json"
LOOK_SECONDS = 2.0
"""Between two looks of a live run for what a person has closed."""


class JsonlSink(BaseSink):
    """Appends records to a file, which it opens at the first of them.

    Args:
        path: The file; its directory is made if needed.
        kinds: Kinds of record to write; None for all.

    Attributes:
        failures: Records that could not be written, on a full disk for instance.
    """

    name = "jsonl"

    def __init__(self, path: Path, kinds: Collection[str] | None = None) -> None:
        self.path = path
        self.failures = 0
        self._kinds = kinds
        self._file: BinaryIO | None = None
        self._torn = False
        self._held: Progress | None = None
        self._started: float | None = None
        self._written_at = 0.0

    def emit(self, record: Record) -> None:
        """Write and flush one line, or hold a progress record back to merge it with the next.

        Raises:
            OSError: A line did not reach the file; counted in `failures` too.
        """
        if self._kinds is not None and record.kind not in self._kinds:
            return
        if isinstance(record, Progress):
            held, self._held = self._held, None
            record = record if held is None else merged(held, record)
            if self._early(record.time):
                self._held = record
                return
            self._written_at = record.time
            self._write(record)
            return
        if isinstance(record, RunStarted):
            self._started = self._written_at = record.time
        try:
            waits = isinstance(record, (Verdict, UpdateSkipped))  # there may be one in every step
            if not (waits and 0 <= record.time - self._written_at < AHEAD_SECONDS):
                self._write_held()
        finally:
            self._write(record)

    def close(self, timeout_seconds: float) -> None:
        """Write what is held and close the file; a later `emit` opens it again."""
        try:
            self._write_held()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _early(self, now: float) -> bool:
        """Whether the latest written progress is so new that this one can wait."""
        if self._started is None or now < self._written_at:  # or a clock that was put back
            self._started = self._written_at = now
            return False
        return 0 <= now - self._written_at < interval_seconds(now - self._started)

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._written_at = held.time
            self._write(held)

    def _write(self, record: Record) -> None:
        line = encode(record).encode() + b"\n"
        try:
            if self._file is None or self._moved(self._file):
                self._file = self._open()
            # Unbuffered, so that a failed write leaves nothing behind to be flushed later.
            written = self._file.write(b"\n" + line if self._torn else line)
        except OSError:
            self.failures += 1
            raise
        whole = len(line) + self._torn
        self._torn = written != whole
        if self._torn:
            self.failures += 1
            msg = f"Expected to write {whole} bytes to the event log, but got {written} written."
            raise OSError(msg)

    def _moved(self, file: BinaryIO) -> bool:
        """Whether the path no longer leads to the open file: somebody rotated it."""
        try:
            there, here = self.path.stat(), os.fstat(file.fileno())
        except FileNotFoundError:
            there = None
        if there is not None and (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
            return False
        file.close()
        self._file = None
        return True

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_in_mid_line(self.path)
        return self.path.open("ab", buffering=0)


def _ends_in_mid_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def event_files(run_dir: Path) -> tuple[Path, ...]:
    """The event logs of a run: the leader's, and those of other ranks that had something to say.

    Those that were rotated come first.
    """
    rotated = {path for pattern in ROTATED_PATTERNS for path in run_dir.glob(pattern)}
    # Older ones first: where two records have one time, theirs came before.
    return (*sorted(rotated, reverse=True), *sorted(run_dir.glob(EVENTS_PATTERN)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, without holding the file in memory."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if line := raw.decode("utf-8", errors="replace").strip():
                yield number, line


def _records(path: Path) -> Iterator[Record]:
    found = (_decoded(path, number, line) for number, line in _lines(path))
    return (record for record in found if record is not None)


def _decoded(path: Path, number: int, line: str) -> Record | None:
    """The record in a line; None if it was torn by a crash or a full disk."""
    try:
        return decode(line)
    except json.JSONDecodeError:
        return None
    except ValueError as error:
        msg = f"{path.name}, line {number}: {error}"
        raise ValueError(msg) from error


def stream_records(run_dir: Path) -> Iterator[Record]:
    """Every whole record of a run's event logs by time, one at a time.

    Raises:
        ValueError: A line is JSON and no record of a schema this package knows.
    """
    logs = [_records(path) for path in event_files(run_dir)]
    return heapq.merge(*logs, key=lambda record: record.time)


def read_records(run_dir: Path) -> list[Record]:
    """Every whole record of a run's event logs, ordered by time.

    Raises:
        FileNotFoundError: There is no event log in `run_dir`.
        ValueError: A line is JSON and no record of a schema this package knows.
    """
    if not event_files(run_dir):
        msg = f"Expected {EVENTS_PATTERN} in {run_dir}, but got none. Pass the run's directory."
        raise FileNotFoundError(msg)
    return sorted(stream_records(run_dir), key=lambda record: record.time)


def write_summary(run_dir: Path, summary: RunSummary) -> None:
    """Write ``summary.json`` as a whole, so that nobody reads half of it.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(summary.to_dict(), indent=2, sort_keys=True)
    unfinished = run_dir / f".{SUMMARY}.{os.getpid()}"
    unfinished.write_text(text + "\n")
    unfinished.replace(run_dir / SUMMARY)


class SummaryFile:
    """``summary.json`` of a run that lives, written again and again without keeping it waiting.

    Args:
        run_dir: Where it goes.

    Attributes:
        complete: The latest summary is in the file.
        problem: Why nothing is written any more, or "".
    """

    def __init__(self, run_dir: Path) -> None:
        self.complete, self.problem = True, ""
        self._run_dir = run_dir
        self._errand = Errand()

    def write(self, summary: RunSummary) -> None:
        """Write it, unless an earlier one is still under way."""
        self.complete = False

        def do() -> None:
            try:
                write_summary(self._run_dir, summary)
            except OSError as error:
                self.problem = str(error.strerror)

        if not self.problem:
            self.complete = self._errand.run(do) and not self.problem


def append_closing(run_dir: Path, closing: Closing) -> None:
    """Write down what a person has decided; a run that lives sees it within seconds.

    Raises:
        OSError: It cannot be written.
    """
    line = json.dumps(plain(closing), allow_nan=False) + "\n"
    with (run_dir / CLOSED).open("ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_closings(run_dir: Path) -> list[Closing]:
    """What persons have closed in a run; lines that cannot be read are passed over."""
    path = run_dir / CLOSED
    lines = _lines(path) if path.is_file() else ()
    return [closing for _, line in lines if (closing := _closing(line)) is not None]


def _closing(line: str) -> Closing | None:
    try:
        closing: Closing = build(Closing, json.loads(line))
    except (TypeError, AttributeError, ValueError):
        return None
    return closing


def run_id_of(segments: Iterable[Record]) -> str:
    """The id of a run: that of its earlier segments, or a new one.

    Args:
        segments: See `segments_of`. An unreadable log is no reason to stop a run: its id is new.
    """
    known = [one.run_id for one in segments if isinstance(one, RunStarted) and one.run_id]
    return known[-1] if known else uuid.uuid4().hex


def segments_of(run_dir: Path) -> Iterator[RunStarted | PreflightDone]:
    """Starts and preflights of the earlier segments of the run, log by log, as far as readable."""
    marks = [f'"kind":"{kind.kind}"' for kind in (RunStarted, PreflightDone)]
    with contextlib.suppress(OSError, ValueError):
        for path in event_files(run_dir):
            for number, line in _lines(path):
                if any(mark in line for mark in marks):  # other lines need not be parsed
                    record = _decoded(path, number, line)
                    if isinstance(record, (RunStarted, PreflightDone)):
                        yield record


class RunSoFar:
    """The run up to now: earlier segments, records as they come, and what a person has closed.

    Args:
        run_dir: Where earlier segments are and closings will be; None for neither.

    Attributes:
        problem: Why earlier segments could not be read to their end; empty if they could.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self.problem = ""
        self._run_dir = run_dir
        self._builder = SummaryBuilder()
        self._closings = 0
        self._closed: list[Closing] = []
        self._looking = Errand()
        self._seen: tuple[int, int] | None = None
        self._look_at = 0.0
        self._summary: RunSummary | None = None
        if run_dir is not None:
            self._read_earlier(run_dir)

    def add(self, record: Record) -> None:
        """Take one record into account."""
        self._builder.add(record)
        self._summary = None

    @property
    def summary(self) -> RunSummary:
        """The run so far."""
        if self._run_dir is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._take_closings(self._run_dir)
        if self._summary is None:
            self._summary = self._builder.summary()
        return self._summary

    def _read_earlier(self, run_dir: Path) -> None:
        builder, problems = SummaryBuilder(), ["the file system does not answer"]

        def read() -> None:
            try:
                for record in stream_records(run_dir):
                    builder.add(record)
                problems.clear()
            except (OSError, ValueError) as error:
                problems[:] = [str(error)]

        if Errand().run(read, READ_SECONDS):
            self._builder = builder
        for problem in problems:
            self.problem = f"earlier segments in {run_dir} cannot be read: {problem}"

    def _take_closings(self, run_dir: Path) -> None:
        self._looking.run(lambda: self._look(run_dir))
        if len(closings := self._closed) > self._closings:
            for closing in closings[self._closings :]:
                self._builder.close(closing)
            self._closings = len(closings)
            self._summary = None

    def _look(self, run_dir: Path) -> None:
        with contextlib.suppress(OSError):  # none yet: look again later
            status = (run_dir / CLOSED).stat()
            if (seen := (status.st_mtime_ns, status.st_size)) != self._seen:
                self._closed, self._seen = read_closings(run_dir), seen
