"""A thread that speaks when the training thread cannot, because it hangs in a collective of DDP.

It answers roll-calls that other ranks start, and starts one itself when a step takes too long. It
logs what it finds; only with ``on_hang="exit"`` does it end the process. Where a collective of DDP
does not hang but breaks, it can say who has gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from sdcwatch.core.records import Hang
from sdcwatch.errors import EXIT_HANG, RankGone
from sdcwatch.guard.exchange import RollCall, what_is_known

_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
"""What backends say when a collective ends because its peer has."""


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
        self._found: tuple[Hang, str] | None = None
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
                self._rolls.answer()
                if since is not None and time.monotonic() - since > self._hang_seconds:
                    self._hang(step, since)
            except Exception:  # the store is gone: the rank that hosts it has ended
                if since is None:
                    return

    def explain(self, error: BaseException) -> RankGone | None:
        """Who is missing, if a collective of DDP broke; called from the training thread.

        DDP says which socket broke, and not which rank has gone. Takes the window of a roll-call.

        Args:
            error: What ended the step.

        Returns:
            None if `error` is something else, or if every rank is there.
        """
        if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _BROKEN):
            return None
        since, step = self._since or time.monotonic(), self._step
        if self._found is None or self._found[0].step != step:
            self._found = self._roll_call(step, since)
            if self._found[0].left or self._found[0].absent:
                self._report(self._found[0])
        hang, said = self._found
        if not hang.left and not hang.absent:
            return None
        return RankGone(hang.absent, said, hang.where)

    def _hang(self, step: int, since: float) -> None:
        if self._reported == step:
            return
        self._reported = step
        found = self._roll_call(step, since)
        if self._since != since:  # it went on meanwhile: slow, not hung
            return
        self._found = found
        self._report(found[0])
        if self._leave:
            os._exit(EXIT_HANG)

    def _roll_call(self, step: int, since: float) -> tuple[Hang, str]:
        where = f"the backward of step {step}"
        absent, known, problem = self._rolls.call(where)
        left = {str(rank): text for rank, text in known.items()}
        if problem:
            left["store"] = problem
        hang = Hang(
            step=step,
            time=time.time(),
            reporter=self._rolls.rank,
            where=where,
            absent=absent,
            left=left,
            waited_seconds=round(time.monotonic() - since, 1),
        )
        return hang, what_is_known(absent, known, problem)
