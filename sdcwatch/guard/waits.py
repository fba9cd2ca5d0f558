"""Operations of the backend that are under way, and how each is waited for.

A result on the device is waited for by the host through an event behind its copy, with a deadline.

A wait of gloo's that times out ends every connection of the group; here none does, until it is to.

The deadline is a soft one, which leaves the group usable. When it passes, a liveness check finds
out where the other ranks are, and `sdcwatch.core.waiting` says what that means.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from sdcwatch.checks.signals import let_through
from sdcwatch.core.waiting import (
    Answer,
    Finding,
    Position,
    describe,
    judge_wait,
    ran_apart,
    rank_gone,
)
from sdcwatch.guard.watchdog import LivenessCheck, bounded

RECHECK_SECONDS = 60.0
"""Time between two liveness checks while a rank is late."""
SLOW_SECONDS = 300.0
"""After that long a save is spoken of, though it may take an hour: it may be stuck."""
MOMENT_SECONDS = 0.5
"""What an operation may take to end once its last rank has come."""
POLL_SECONDS = 5e-5
"""Between two looks whether the device is done."""
_OF_THE_DEVICE = ("CUDA error", "HIP error")
"""How torch begins to say that the device of this rank has failed, at the next look at it."""
LOG = logging.getLogger("sdcwatch")
OnAbsent = Callable[[Finding, str, float], None]
"""Told what a liveness check found, the operation, and the seconds waited."""


class Messages:
    """Point-to-point messages under way.

    They are waited for in a thread: a wait that times out on gloo ends every connection of the
    group, so that nothing could be waited for after it.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._finish, name="sdcwatch-messages", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta) -> None:
        """Wait for all of them.

        Raises:
            RuntimeError: They are still under way, or a connection broke.
        """
        self._thread.join(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            msg = "messages are still under way"
            raise RuntimeError(msg)

    def give_up(self) -> None:
        """Wake the thread: one that came back while the interpreter ends would abort the process.

        A wait that times out ends every connection, which is what is wanted here.
        """
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait(timeout=timedelta(milliseconds=1))
        self._thread.join(1.0)


class HostBuffer:
    """Where the host reads what lies on the device; pinned and always the same, on CUDA.

    A copy into pinned memory runs in the order of the stream and does not keep the host waiting.

    Args:
        device: Where the values lie.

    Attributes:
        memory: int64 (n,) on the host; grows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self.memory = self._new(64)
        self._event: Any = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=self._pinned)

    def begin(self, values: torch.Tensor) -> torch.Tensor:
        """Copy int64 (n,) behind all that the current stream has to do; see `arrived`."""
        if values.numel() > self.memory.numel():
            self.memory = self._new(2 * values.numel())
        here = self.memory[: values.numel()]
        here.copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return here

    def arrived(self) -> bool:
        """Whether the latest copy is complete. Does not wait."""
        return self._event is None or bool(self._event.query())


class DeviceResult:
    """A collective on tensors of the device, and the copy of what it came to.

    Args:
        work: Under way.
        result: Called behind it for the int64 (n,) to be read.
        buffer: Where the host reads it.
        blocks: Waiting for `work` keeps the host waiting, as gloo's does. NCCL's only makes the
            stream wait, but ends the communicator when a wait with a timeout times out.
    """

    def __init__(
        self, work: Any, result: Callable[[], torch.Tensor], buffer: HostBuffer, *, blocks: bool
    ) -> None:
        self._work, self._result, self._buffer = work, result, buffer
        self._copied: torch.Tensor | None = None
        if not blocks:
            work.wait()
            self._copied = buffer.begin(result())

    def wait(self, timeout: timedelta) -> None:
        """Wait until the host can read the result.

        Raises:
            RuntimeError: It is still under way, or a connection broke.
        """
        end = time.monotonic() + timeout.total_seconds()
        if self._copied is None:
            self._work.wait(timeout=timeout)
            self._copied = self._buffer.begin(self._result())
        while not self._buffer.arrived():
            if time.monotonic() >= end:
                msg = "the device is still at work"
                raise RuntimeError(msg)
            time.sleep(POLL_SECONDS)

    def values(self) -> list[int]:
        """The result, once `wait` has returned."""
        assert self._copied is not None
        values: list[int] = self._copied.tolist()
        return values


class Broken:
    """An operation that could not even begin."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        """Say why.

        Raises:
            RuntimeError: Always.
        """
        raise self._error


def issued(issue: Callable[[], Any]) -> Any:
    """What is to be waited for; where connecting failed, a wait that says so."""
    try:
        return issue()
    except RuntimeError as error:
        _let_own_through(error)
        return Broken(error)


def unfinished(work: Any, seconds: float) -> str | None:
    """None once an operation has ended well; "" if it is under way, or what broke it."""
    started = time.monotonic()
    try:
        # Rounded up: gloo cuts off a part of a millisecond, and would be back too soon.
        work.wait(timeout=timedelta(milliseconds=math.ceil(1000 * seconds)))
    except RuntimeError as error:
        _let_own_through(error)
        under_way = time.monotonic() - started >= seconds
        return "" if under_way else str(error).splitlines()[0]
    return None


def _let_own_through(error: RuntimeError) -> None:
    """Raise what a signal handler raised, or this rank's own device: no peer has to do with it.

    An operation of the guard is often the first to look at a device on which a kernel of the
    program's has failed.
    """
    let_through(error)
    if str(error).startswith(_OF_THE_DEVICE):
        raise error


def keep_for_good(group: Any) -> None:
    """Give a group a reference that nobody lets go of.

    The destructor of a gloo group joins operations that are under way, until its hard timeout: two
    hours here, after a rank has gone. `abort` does not end them. A process that ends frees it all.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Waiting:
    """Waits for operations of all ranks, and asks where the others are when one takes long.

    Args:
        liveness: Of this rank.
        group: What the operations are issued on.
        deadline_seconds: After that long in an operation the others are asked where they are.
        late_seconds: How long a rank that is alive and behind is waited for.

    Attributes:
        on_absent: Told of ranks that are absent; None while `sdcwatch.init` is not through.
    """

    def __init__(
        self,
        liveness: LivenessCheck,
        group: Any,
        *,
        deadline_seconds: float,
        late_seconds: float,
    ) -> None:
        self._liveness, self._group = liveness, group
        self._deadline, self._late = deadline_seconds, late_seconds
        self.on_absent: OnAbsent | None = None

    def wait(self, issue: Callable[[], Any], operation: str, extra_seconds: float = 0.0) -> Any:
        """Issue an operation and wait for it.

        Args:
            issue: Begins it, and returns what can be waited for.
            operation: What is being done, for errors.
            extra_seconds: Added to the deadline, where one rank may be long.

        Returns:
            What `issue` returned.

        Raises:
            Desync: A rank has gone past the operation.
            RankGone: A rank is gone, or late for too long.
        """
        at = self._liveness.begin(operation)
        started = time.monotonic()
        patience = self._deadline
        work: Any = None
        try:
            work = issued(issue)
            while (broken := unfinished(work, patience)) is not None:
                waited = time.monotonic() - started
                if self._finished_meanwhile(work, at, operation, waited, broken, extra_seconds):
                    break
                patience = max(1.0, min(self._deadline, RECHECK_SECONDS))
        except BaseException:
            keep_for_good(self._group)  # what was begun is still under way
            if isinstance(work, Messages):
                work.give_up()
            raise
        finally:
            self._liveness.end(operation)
        return work

    def ask(self, question: Callable[[], Any], operation: str) -> Any:
        """Ask the store something, in this thread's name.

        Raises:
            RankGone: It did not answer within the deadline, as that of a host that was cut off.
        """
        began = time.monotonic()
        answer, problem = bounded(question, self._deadline)
        if problem:
            self._gone(Finding(store_error=problem), operation, time.monotonic() - began, "")
        return answer

    def _finished_meanwhile(
        self,
        work: Any,
        at: Position,
        operation: str,
        waited: float,
        broken: str,
        extra_seconds: float,
    ) -> bool:
        """The operation takes long, or broke: find out why; raises unless it is worth waiting.

        Returns:
            Whether the operation ended well while the others were asked.
        """
        # Also if it ends well: a group that an operation was late on may never be destroyed.
        keep_for_good(self._group)
        finding = self._liveness.call_of_broken(at) if broken else self._liveness.call(at)
        answer = judge_wait(
            finding,
            waited_seconds=waited - extra_seconds,
            late_seconds=self._late,
            broken=bool(broken),
        )
        # The last rank may have come while the others were asked.
        if not broken and unfinished(work, MOMENT_SECONDS) is None:
            return True
        if answer is Answer.DESYNC:
            error = ran_apart(finding)
            LOG.critical(error)  # uncaught it ends the process without a word, as SystemExit does
            raise error
        if answer is Answer.GONE:
            self._gone(finding, operation, waited, broken)
        if waited >= extra_seconds:
            self._is_late(finding, operation, waited)
        elif waited >= SLOW_SECONDS and finding.elected:  # nobody is late yet
            _say_it_takes_long(finding, operation, waited)
        return False

    def _is_late(self, finding: Finding, operation: str, waited: float) -> None:
        if not (finding.elected or self._liveness.rank == 0):
            return
        if self.on_absent is not None and finding.absent:
            self.on_absent(finding, operation, waited)
        else:
            _say_it_takes_long(finding, operation, waited)

    def _gone(self, finding: Finding, operation: str, waited: float, problem: str) -> None:
        if self.on_absent is not None and finding.is_told_by(self._liveness.rank):
            self.on_absent(finding, operation, waited)
        gone = rank_gone(finding, operation, waited, problem)
        if self.on_absent is None:  # nobody has said it yet
            LOG.critical(gone)
        raise gone


def _say_it_takes_long(finding: Finding, operation: str, waited: float) -> None:
    LOG.warning("%s takes long (%.0f s): %s", operation, waited, describe(finding))
