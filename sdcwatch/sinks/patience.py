"""How long a run waits for a file system: a disk or a server that stalls stops no training."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_SECONDS = 2.0
"""How long the training thread waits for a file, before it goes on without it."""

READ_SECONDS = 60.0
"""How long a start waits for what it reads: the log of a run of months takes a while."""


def in_background(do: Callable[[], None], name: str) -> threading.Thread | None:
    """Call something on a thread of its own; here, where no thread can be started any more.

    From Python 3.12 on none can in an atexit handler, where a run ends that nobody has closed.

    Args:
        do: Must not raise.
        name: Of the thread.

    Returns:
        The thread; None where it has been called here.
    """
    thread = threading.Thread(target=do, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        do()
        return None
    return thread


class Errand:
    """Runs one call at a time on a thread of its own, which is left behind while it takes long.

    A write to a file system that has stalled never returns, and cannot be called off.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, do: Callable[[], None], seconds: float = PATIENCE_SECONDS) -> bool:
        """Call it and wait, but not for longer; it must not raise.

        Returns:
            Whether it has ended. An earlier call that is still under way keeps this one from being
            made.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = in_background(do, "sdcwatch-file")
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()
