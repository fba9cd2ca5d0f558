"""A thread that speaks when the training thread cannot, because it hangs in a collective of DDP.

It answers roll-calls that other ranks start, and starts one itself when a step takes too long. It
logs what it finds; only with ``on_hang="exit"`` does it end the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from sdcwatch.core.records import Hang
from sdcwatch.errors import EXIT_HANG
from sdcwatch.guard.exchange import RollCall


class Watchdog:
    """Watches one rank.

    Args:
        rolls: The roll-call through the store.
        hang_seconds: How long a backward may take.
        poll_seconds: Time between two looks.
        report: Takes the record of a hang.
        leave: End the process after a hang was reported.
    """

    def __init__(
        self,
        rolls: RollCall,
        *,
        hang_seconds: float,
        poll_seconds: float,
        report: Callable[[Hang], None],
        leave: bool,
    ) -> None:
        self._rolls, self._report, self._leave = rolls, report, leave
        self._hang_seconds, self._poll_seconds = hang_seconds, poll_seconds
        self._since: float | None = None
        self._step = 0
        self._reported = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sdcwatch-watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int) -> None:
        """The training thread goes where it may hang."""
        self._step, self._since = step, time.monotonic()

    def leave_danger(self) -> None:
        """It came back."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            since, step = self._since, self._step
            try:
                if since is not None and time.monotonic() - since > self._hang_seconds:
                    self._hang(step, since)
                else:
                    self._rolls.answer()
            except Exception:  # the store is gone: the rank that hosts it has ended
                if since is None:
                    return

    def _hang(self, step: int, since: float) -> None:
        if self._reported == step:
            return
        self._reported = step
        where = f"the backward of step {step}"
        absent, known, problem = self._rolls.call(where)
        left = {str(rank): text for rank, text in known.items()}
        if problem:
            left["store"] = problem
        if self._since != since:  # it went on meanwhile: slow, not hung
            return
        self._report(
            Hang(
                step=step,
                time=time.time(),
                reporter=self._rolls.rank,
                where=where,
                absent=absent,
                left=left,
                waited_seconds=round(time.monotonic() - since, 1),
            )
        )
        if self._leave:
            os._exit(EXIT_HANG)
