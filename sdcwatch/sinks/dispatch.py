"""Hands records to sinks without ever making the training thread wait long for one.

Each sink has a bounded queue and one worker thread of its own: with one thread for all, a W&B call
that blocks for a minute would freeze /metrics for that minute. A full queue loses the new record
and counts it. Sinks that must be durable (`direct`: the event log) are waited for, until one
stalls: from then on nobody waits for it until it has caught up. The stream is folded here, once:
summary.json, gauges and W&B all take the run so far from it. A forked child (a DataLoader worker)
has none of the threads and must not report the parent's run a second time: in it every method does
nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from sdcwatch.core.summary import RunSummary
from sdcwatch.sinks.base import BaseSink, Sink, SinkCounts, catalogue_name, completed
from sdcwatch.sinks.jsonl import RunSoFar
from sdcwatch.sinks.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from sdcwatch.core.records import Record

    _Given: TypeAlias = "tuple[Record, RunSummary]"
    _Queue: TypeAlias = "queue.Queue[_Given | None]"

_POLL_SECONDS = 0.005
_MOMENT_SECONDS = 0.01
_MARGIN_SECONDS = 0.25  # what a sink may be late by before its thread is left behind


class SinkWorker:
    """One sink, its queue and its thread."""

    def __init__(self, sink: BaseSink, counts: SinkCounts, queue_size: int) -> None:
        self.sink = sink
        self.counts = counts
        self._queue: _Queue = queue.Queue(queue_size)
        self._deadline: float | None = None
        self._abandoned = False
        self._busy = False
        sink.attach(counts)
        self._thread = threading.Thread(
            target=self._work, name=f"sdcwatch-{sink.name}", daemon=True
        )
        self._thread.start()

    @property
    def pending(self) -> int:
        """Records that wait, and the one being served."""
        return self._queue.unfinished_tasks

    def put(self, given: _Given) -> None:
        """Queue one record, or count it as lost."""
        try:
            self._queue.put_nowait(given)
        except queue.Full:
            self.counts.dropped["queue_full"] += 1
        self.counts.waiting = self._queue.qsize()

    def wait(self) -> None:
        """Wait until all has been served; only a moment for a sink that has stalled."""
        served = self._queue.all_tasks_done
        seconds = _MOMENT_SECONDS if self.counts.stalled else PATIENCE_SECONDS
        with served:
            self.counts.stalled = not served.wait_for(lambda: not self.pending, seconds)

    def begin_close(self, seconds: float) -> None:
        """Let the thread drain the queue and close the sink, without waiting for it."""
        self._deadline = time.monotonic() + seconds
        # A full queue needs no sentinel: the thread sees the deadline after each record.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def finish_close(self) -> None:
        """Wait for the thread until its deadline; what is left then is counted as lost."""
        assert self._deadline is not None
        wait = max(0.0, self._deadline - time.monotonic()) + _MARGIN_SECONDS
        self._thread.join(min(wait, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            self._abandoned = True
            self.counts.dropped["timeout"] += self._unfinished()
        self.counts.waiting = 0

    def hurry(self) -> None:
        """Cut a lingering sink short and give it a moment to clean up."""
        self.sink.hurry()
        if self.sink.lingers:
            self._thread.join(_MARGIN_SECONDS)

    def _unfinished(self) -> int:
        left = int(self._busy)  # the record the sink is stuck in
        with contextlib.suppress(queue.Empty):
            while True:
                left += self._queue.get_nowait() is not None
        return left

    def _work(self) -> None:
        while not self._abandoned:
            if self._deadline is not None and self._queue.empty():
                break
            given = self._queue.get()
            self.counts.waiting = self._queue.qsize()
            if given is not None:
                self._busy = True
                try:
                    self.sink.receive(*given)
                except Exception as error:  # a sink may fail in any way; the run goes on
                    _count_error(self.counts, error)
                self._busy = False
            self._queue.task_done()
        if self._abandoned:
            return
        _close(self.sink, self.counts, max(0.0, (self._deadline or 0.0) - time.monotonic()))


def _close(sink: BaseSink, counts: SinkCounts, seconds: float) -> None:
    try:
        sink.close(seconds)
    except Exception as error:
        _count_error(counts, error)


def _count_error(counts: SinkCounts, error: Exception) -> None:
    counts.dropped["error"] += 1
    counts.last_error = type(error).__name__


class Dispatcher:
    """Gives each record to every sink. `emit` never raises, and waits for `direct` sinks only.

    Args:
        sinks: Nobody waits for them.
        queue_size: Records that may wait for one sink.
        close_seconds: Budget of `close` for all of `sinks` together; they close side by side.
        direct: Waited for, as long as they do not stall.
        linger_seconds: Added to the budget of sinks with a true attribute ``lingers``: an endpoint
            that stays up until it has been scraped once more.
        run: The run before the first record: earlier segments of a resumed one.

    Attributes:
        workers: One for each of `sinks`.
        direct: One for each sink that is waited for.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        queue_size: int = 4096,
        close_seconds: float = 2.0,
        direct: Sequence[Sink] = (),
        linger_seconds: float = 0.0,
        run: RunSoFar | None = None,
    ) -> None:
        self.close_seconds = close_seconds
        self.linger_seconds = linger_seconds
        self._pid = os.getpid()
        self._closed = False
        # Re-entrant: a signal handler that closes the guard runs inside what it interrupted.
        self._one_at_a_time = threading.RLock()
        self._waiting: deque[Record] = deque()
        self._emitting: int | None = None  # the thread that does
        self._close_after: float | None = None
        self._run = run or RunSoFar()
        self.direct, self.workers = (
            [SinkWorker(completed(s), SinkCounts(catalogue_name(s.name)), queue_size) for s in some]
            for some in (direct, sinks)
        )
        _release_in_children(self)

    @property
    def counts(self) -> tuple[SinkCounts, ...]:
        """The counts of each sink, live."""
        return tuple(worker.counts for worker in self._all)

    @property
    def links(self) -> dict[str, str]:
        """Places a person can open, as the sinks know them; for `RunStarted.links`."""
        found: dict[str, str] = {}
        for worker in self._all:
            found.update(worker.sink.links)
        return found

    @property
    def _all(self) -> tuple[SinkWorker, ...]:
        return (*self.direct, *self.workers)

    @property
    def summary(self) -> RunSummary:
        """The run so far, earlier segments included."""
        with self._one_at_a_time:
            return self._run.summary

    def emit(self, record: Record) -> None:
        """Give one record to every sink; returns at once, whatever the sinks do."""
        if os.getpid() != self._pid:
            return
        with self._one_at_a_time:  # the watchdog reports from a thread of its own
            self._waiting.append(record)
            if self._emitting is None:  # else in a signal handler: whom it interrupted goes on
                self._emit_waiting()

    def _emit_waiting(self) -> None:
        try:
            self._emitting = threading.get_ident()
            while self._waiting:
                self._give(self._waiting.popleft())
        finally:  # also if a signal handler raised
            while self._waiting:
                self._give(self._waiting.popleft())
            self._emitting = None
            if self._close_after is not None:
                self.close(self._close_after)

    def _give(self, record: Record) -> None:
        self._run.add(record)
        given = record, self._run.summary
        for worker in self._all:
            if self._closed:
                worker.counts.dropped["closed"] += 1
                continue
            worker.counts.events += 1
            worker.put(given)
        for worker in () if self._closed else self.direct:
            worker.wait()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until every record given so far has been served; never call it in a training loop.

        Returns:
            Whether that was so within the time.
        """
        deadline = time.monotonic() + timeout_seconds
        while any(worker.pending for worker in self._all):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def close(self, timeout_seconds: float | None = None) -> None:
        """Drain and close every sink within the budget; the second call does nothing.

        In a signal handler that interrupted `emit`, it takes place when that is done.

        Args:
            timeout_seconds: Budget instead of `close_seconds`.

        Raises:
            KeyboardInterrupt: The wait was interrupted; every sink has been told to close.
        """
        if self._closed or os.getpid() != self._pid:
            return
        budget = self.close_seconds if timeout_seconds is None else timeout_seconds
        if self._emitting == threading.get_ident():
            self._close_after = budget
            return
        self._closed = True
        for worker in self.direct:
            worker.begin_close(max(budget, PATIENCE_SECONDS))
        for worker in self.workers:
            worker.begin_close(budget + (self.linger_seconds if worker.sink.lingers else 0.0))
        try:
            for worker in self._all:
                worker.finish_close()
        except KeyboardInterrupt:
            for worker in self._all:
                worker.hurry()
            raise

    def _release(self) -> None:
        """In a forked child: let go of sockets that the parent serves."""
        for worker in self._all:
            with contextlib.suppress(Exception):
                worker.sink.release_in_child()


def _release_in_children(dispatcher: Dispatcher) -> None:
    # Handlers cannot be unregistered: a weak reference lets a closed dispatcher go.
    weak = weakref.ref(dispatcher)

    def after_fork() -> None:
        if (alive := weak()) is not None:
            alive._release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_fork)
