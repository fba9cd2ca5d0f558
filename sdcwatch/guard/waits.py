"""Operations of the backend that are under way, and how each is waited for.

A wait of gloo's that times out ends every connection of the group; here none does, until it is to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any


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
        return Broken(error)


def unfinished(work: Any, seconds: float) -> str | None:
    """None once an operation has ended well; "" if it is under way, or what broke it."""
    started = time.monotonic()
    try:
        work.wait(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        under_way = time.monotonic() - started >= seconds
        return "" if under_way else str(error).splitlines()[0]
    return None
