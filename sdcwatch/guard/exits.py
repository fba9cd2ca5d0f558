"""What ends the program, for a guard that is closed in a `finally`, by atexit, or not at all.

`with` is told. Elsewhere the interpreter knows: the exception that is being handled where `close`
is called, and for atexit handlers the one that nobody caught. It keeps no `SystemExit` for them,
so what `sys.exit` was called with, and what the guard raised, is remembered here until the loop
goes on.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import NoReturn

from sdcwatch.errors import SdcwatchError

_ENDS_A_LOOP = (StopIteration, StopAsyncIteration, GeneratorExit)
"""How iterators say that they are at their end, which is no failure."""

_EARLIER = "_sdcwatch_earlier"
"""Attribute of exceptions that were there before a run began, with a mark for each such run."""

FIRST = 100
"""Before multiprocessing ends queues and pools."""


class Exits:
    """Knows of the main thread what it ends with.

    Args:
        place: Where the loop is; what was remembered counts only while it is there.
    """

    def __init__(self, place: Callable[[], object]) -> None:
        self._place = place
        # A mark on them: kept here they would keep every tensor of the frames that they left, and
        # what is raised later may have their id.
        self._mark = object()
        for earlier in filter(None, (sys.exc_info()[1], _uncaught())):
            earlier.__dict__.setdefault(_EARLIER, []).append(self._mark)
        self._asked: tuple[BaseException, object] | None = None
        self._exit = sys.exit
        sys.exit = self._leave  # as W&B does
        self._finalizer: Finalize | None = None

    def call_in_child(self, close: Callable[[], None]) -> None:
        """Have a guard closed also where multiprocessing leaves without atexit handlers."""
        if multiprocessing.parent_process() is not None:
            self._finalizer = Finalize(None, close, exitpriority=FIRST)

    def remember(self, error: BaseException) -> None:
        """The main thread ends with that, unless somebody catches it and the loop goes on."""
        self._asked = error, self._place()

    def error(self) -> BaseException | None:
        """What is being handled where this is called, else what is remembered.

        After the main thread has ended, `last`.
        """
        if not threading.main_thread().is_alive():  # atexit handlers run
            return self.last()
        error = sys.exc_info()[1]
        if error is None or self._is_earlier(error) or isinstance(error, _ENDS_A_LOOP):
            return self._remembered()
        return self.behind(error)

    def behind(self, error: BaseException | None) -> BaseException | None:
        """What ends the program, where `error` is only how a generator or a task learns of it."""
        if isinstance(error, GeneratorExit):
            return self._remembered()
        if type(error).__name__ == "CancelledError":  # as asyncio ends tasks in a signal
            return self._remembered() or _interrupt() or error
        return error

    def last(self) -> BaseException | None:
        """What the interpreter ends with."""
        uncaught = _uncaught()
        if uncaught is not None and not self._is_earlier(uncaught):
            return uncaught
        return self._remembered()

    def close(self) -> None:
        """Give `sys.exit` back, unless somebody else has taken it meanwhile."""
        if sys.exit == self._leave:
            sys.exit = self._exit
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._asked, self._place = None, object

    def _is_earlier(self, error: BaseException) -> bool:
        """Whether it was there before the run began."""
        return self._mark in getattr(error, _EARLIER, ())

    def _remembered(self) -> BaseException | None:
        """What was remembered, while the loop is where it was then."""
        if self._asked is not None and self._asked[1] == self._place():
            return self._asked[0]
        return None

    def _leave(self, status: object = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self.remember(SystemExit(status))
        self._exit(status)  # type: ignore[arg-type]


def _interrupt() -> KeyboardInterrupt | None:
    """What an event loop raises when the task has ended that it cancelled for SIGINT."""
    handler = signal.getsignal(signal.SIGINT)
    loop = getattr(getattr(handler, "func", None), "__self__", None)
    return KeyboardInterrupt() if getattr(loop, "_interrupt_count", 0) else None


def _uncaught() -> BaseException | None:
    """What nobody caught; at a prompt, that of an earlier line, which ended nothing."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def exit_code_of(error: BaseException | None) -> int:
    """The code that the interpreter ends with if nobody catches `error`."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        # As the parent sees it: eight bits.
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    # An attribute of that name means nothing to the interpreter; click ends the program with it.
    of_click = any(kind.__module__.partition(".")[0] == "click" for kind in type(error).__mro__)
    code = getattr(error, "exit_code", 1) if of_click or isinstance(error, SdcwatchError) else 1
    return code & 0xFF if isinstance(code, int) else 1
