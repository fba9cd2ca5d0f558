"""What a signal handler of the program raises, it raises wherever the main thread is.

That may be in a replay, or in another place where an error is only a note: this one is the
program's, which may want to end.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from types import CodeType, TracebackType


def let_through(error: BaseException) -> None:
    """Raise `error`, or what caused it, if a signal handler did.

    Raises:
        BaseException: What the handler raised.
    """
    cause: BaseException | None = error
    while cause is not None:
        codes = {frame.f_code for frame, _ in traceback.walk_tb(cause.__traceback__)}
        if codes & set(_handlers()):
            raise cause
        cause = cause.__cause__


class PassedOver:
    """``with PassedOver():`` suppresses what the program's objects raise, as they may anywhere."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        let_through(error)
        return True


def _handlers() -> Iterator[CodeType]:
    """The code of every signal handler of the program: of functions, methods and objects."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        function = getattr(handler, "func", handler)  # of a partial
        for one in (function, vars(type(function)).get("__call__")):
            code = getattr(getattr(one, "__func__", one), "__code__", None)
            if isinstance(code, CodeType):
                yield code
