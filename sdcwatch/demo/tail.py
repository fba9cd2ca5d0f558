"""Follows the logs of a run while it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdcwatch.core.records import Record, decode


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
