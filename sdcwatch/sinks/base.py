"""What a sink is, and the counts kept of each.

A sink takes records and may lose them. Whatever it does about a dead disk, collector or server,
the loss becomes a number here: `SinkCounts` is written by the dispatcher and read by anybody, so
that the path which carries the alarms is itself watched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from sdcwatch.core.records import Record

DropReason = Literal["queue_full", "error", "timeout", "closed"]
DROP_REASONS: tuple[DropReason, ...] = ("queue_full", "error", "timeout", "closed")
KNOWN_SINKS = ("jsonl", "otel", "otel_logs", "wandb")


@runtime_checkable
class Sink(Protocol):
    """Takes records. Called from one thread at a time, never from two.

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


@dataclass(slots=True)
class SinkCounts:
    """Plain numbers about one sink; readers copy them without a lock.

    Attributes:
        sink: Its name in the metric catalogue.
        events: Records given to it.
        dropped: Records it lost, by why.
        waiting: Records that wait for it.
        last_error: Class name of the last exception it raised; never its text, which may quote a
            URL or a header.
    """

    sink: str
    events: int = 0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    waiting: int = 0
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
