"""The event log: one JSON record per line, written and flushed before `emit` returns.

It is the durable truth of a run, so it is written on the thread that reports and not by a worker:
what the guard says before it waits for another rank is on disk while it waits. The file is only
ever appended to. A process that dies in mid-line leaves a torn line; the next segment starts on a
fresh one, and readers skip what is no record.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, BinaryIO

from sdcwatch.core.records import Record, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

EVENTS_PATTERN = "events*.jsonl"


class JsonlSink:
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

    def emit(self, record: Record) -> None:
        """Write and flush one line.

        Raises:
            OSError: The line did not reach the file; counted in `failures` too.
        """
        if self._kinds is not None and record.kind not in self._kinds:
            return
        line = encode(record).encode() + b"\n"
        try:
            if self._file is None:
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

    def close(self, timeout_seconds: float) -> None:
        """Close the file; a later `emit` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

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
    """The event logs of a run: the leader's, and those of other ranks that had something to say."""
    return tuple(sorted(run_dir.glob(EVENTS_PATTERN)))


def _records(path: Path) -> Iterator[Record]:
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        line = raw.decode("utf-8", errors="replace").strip()
        if not line:
            continue
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue  # a line torn by a crash or a full disk
        try:
            yield decode(line)
        except ValueError as error:
            msg = f"{path.name}, line {number}: {error}"
            raise ValueError(msg) from error


def read_records(run_dir: Path) -> list[Record]:
    """Every whole record of a run's event logs, ordered by time.

    Raises:
        FileNotFoundError: There is no event log in `run_dir`.
        ValueError: A line is JSON and no record of a schema this package knows.
    """
    files = event_files(run_dir)
    if not files:
        msg = f"Expected {EVENTS_PATTERN} in {run_dir}, but got none. Pass the run's directory."
        raise FileNotFoundError(msg)
    found = [record for path in files for record in _records(path)]
    return sorted(found, key=lambda record: record.time)
