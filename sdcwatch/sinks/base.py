"""What a sink is, and the counts kept of each.

A sink takes records and may lose them. Whatever it does about a dead disk, collector or server,
the loss becomes a number here: `SinkCounts` is written by the dispatcher and read by anybody, so
that the path which carries the alarms is itself watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from sdcwatch.core.summary import SummaryBuilder

if TYPE_CHECKING:
    from sdcwatch.core.records import Record
    from sdcwatch.core.summary import RunSummary

DropReason = Literal["queue_full", "error", "timeout", "closed"]
DROP_REASONS: tuple[DropReason, ...] = ("queue_full", "error", "timeout", "closed")
SCRAPE_SECONDS = 60.0
"""The longest that the end of a run waits for a scrape, where there has been one before."""
KNOWN_SINKS = ("jsonl", "otel", "otel_logs", "wandb")


@runtime_checkable
class Sink(Protocol):
    """Takes records. Called from one thread at a time, never from two.

    This is all that a sink must have; `BaseSink` lists what it may have besides.

    Attributes:
        name: One of `KNOWN_SINKS`, or a name of your own, which is counted as ``other``.
    """

    name: str

    def emit(self, record: Record) -> None:
        """Take one record. An exception counts as one record lost and goes no further."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Send what is buffered and let go, within about `timeout_seconds`."""
        ...


class BaseSink:
    """The whole protocol: what a sink may have besides `emit` and `close`, with the defaults.

    Attributes:
        name: See `Sink`.
        lines: One sentence each about where records go, logged when the run starts.
        links: Places a person can open, for `RunStarted.links`.
        lingers: It may stay up for a while at the end, until somebody has fetched the last state.
    """

    name = "other"
    lines: tuple[str, ...] = ()
    links: Mapping[str, str] = {}
    lingers = False

    def emit(self, record: Record) -> None:
        """Take one record."""
        raise NotImplementedError

    def close(self, timeout_seconds: float) -> None:
        """Send what is buffered and let go, within about `timeout_seconds`."""

    def receive(self, record: Record, summary: RunSummary) -> None:
        """Take one record and the run so far, that record included.

        The stream is folded once, by the dispatcher: a sink that needs totals takes them here.
        """
        self.emit(record)

    def attach(self, counts: SinkCounts) -> None:
        """Where to count what is lost after `emit` has returned."""

    def hurry(self) -> None:
        """Somebody pressed Ctrl-C: linger no more."""

    def release_in_child(self) -> None:
        """In a forked child: let go of what the parent serves."""


class SummarySink(BaseSink):
    """A sink that needs the run so far. `emit` alone folds what it was given."""

    def __init__(self) -> None:
        self._alone: SummaryBuilder | None = None

    def emit(self, record: Record) -> None:
        """Take one record without a dispatcher."""
        self._alone = self._alone or SummaryBuilder()
        self._alone.add(record)
        self.receive(record, self._alone.summary())

    def receive(self, record: Record, summary: RunSummary) -> None:
        """Take one record and the run so far."""
        raise NotImplementedError


class _Adapter(BaseSink):
    """Somebody's object with `emit` and `close`, and perhaps some of the rest."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.name = sink.name
        for optional in ("lines", "links", "lingers", "attach", "hurry", "release_in_child"):
            if hasattr(sink, optional):
                setattr(self, optional, getattr(sink, optional))

    def emit(self, record: Record) -> None:
        self._sink.emit(record)

    def close(self, timeout_seconds: float) -> None:
        self._sink.close(timeout_seconds)


def completed(sink: Sink) -> BaseSink:
    """A sink with every member of the protocol."""
    return sink if isinstance(sink, BaseSink) else _Adapter(sink)


@dataclass(slots=True)
class SinkCounts:
    """Plain numbers about one sink; readers copy them without a lock.

    Attributes:
        sink: Its name in the metric catalogue.
        events: Records given to it.
        dropped: Records it lost, by why.
        waiting: Records that wait for it.
        stalled: It was waited for in vain, and has not caught up since.
        last_error: Class name of the last exception it raised; never its text, which may quote a
            URL or a header.
    """

    sink: str
    events: int = 0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    waiting: int = 0
    stalled: bool = False
    last_error: str = ""

    @property
    def lost(self) -> int:
        """Records lost for any reason."""
        return sum(self.dropped.values())


def catalogue_name(name: str) -> str:
    """The value of the ``sink`` attribute for a sink of that name."""
    return name if name in KNOWN_SINKS else "other"


def without_user_info(url: str) -> str:
    """A URL without a name and password in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def public_url(url: str) -> str:
    """A URL fit for a console: without user info, query and fragment."""
    parts = urlsplit(without_user_info(url))
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
