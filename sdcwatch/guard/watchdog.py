"""The liveness check through the store, and the thread that speaks when the training thread cannot.

Where the training thread hangs in a collective of DDP, the watchdog answers the liveness checks
that other ranks start, and starts one itself when a step takes too long. It logs what it finds;
only with ``on_hang="exit"`` does it end the process. Where a collective of DDP does not hang but
breaks, it can say who has gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdcwatch.core.records import Hang
from sdcwatch.errors import EXIT_HANG, RankGone

_LEFT = "left: "
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 0.5
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
"""What backends say when a collective ends because its peer has."""
_STORE_SECONDS = 10.0
"""What a liveness check may take beyond its window: a store out of reach may never answer."""


class LivenessCheck:
    """Finds absent ranks through the store, which works when collectives do not.

    Every rank that waits in vain posts ``here``; a watchdog thread on the others answers with what
    its rank is doing. Who has posted nothing when the window closes is gone. Calls are numbered, so
    that two of them at a time, for different operations, both get their answers.
    """

    def __init__(self, store: Any, rank: int, world_size: int, window_seconds: float) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self.window_seconds = window_seconds
        self._position = "starting"
        self._answered = 0

    def position(self, text: str) -> None:
        """Remember what this rank is doing."""
        self._position = text

    def leave(self, note: str) -> None:
        """Leave a note under this rank's name; a lost store is no error, the rank is leaving."""
        try:
            self._store.set(f"left/{self.rank}", note or "left")
        except Exception:  # the store dies with the rank that hosts it
            return

    def answer(self) -> None:
        """Answer liveness checks of other ranks; called from the watchdog thread."""
        number = self._store.add("calls", 0)
        if number > self._answered:
            self._store.set(f"alive/{self.rank}", f"{number} {self._position}")
            self._answered = number

    def call(self, operation: str) -> tuple[tuple[int, ...], dict[int, str], str]:
        """Post ``here`` and wait for the others.

        Returns:
            Absent ranks, what is known of each (a leaver's note or what it is doing), and what
            went wrong with the store, if anything did; a store that is gone from the start tells
            nothing of anybody.
        """
        missing: set[int] = set()
        known: dict[int, str] = {}
        try:
            self._store.set(f"here/{operation}/{self.rank}", "1")
            number = self._store.add("calls", 1)
            end = time.monotonic() + self.window_seconds
            others = set(range(self.world_size)) - {self.rank}
            while True:
                missing = {r for r in others if not self._store.check([f"here/{operation}/{r}"])}
                known = self._known(missing, number)
                gone = all(known.get(r, "").startswith(_LEFT) for r in missing)
                if gone or time.monotonic() > end:
                    break
                self.answer()
                time.sleep(_POLL_SECONDS)
            time.sleep(_GRACE_SECONDS)  # the others read too, and this rank may host the store
            return tuple(sorted(missing)), known, ""
        except Exception as error:  # every store raises its own type
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return tuple(sorted(missing)), known, problem

    def _known(self, missing: set[int], call: int) -> dict[int, str]:
        known = {}
        for rank in sorted(missing):
            if self._store.check([f"left/{rank}"]):
                known[rank] = _LEFT + self._store.get(f"left/{rank}").decode()
            elif self._store.check([f"alive/{rank}"]):
                number, _, text = self._store.get(f"alive/{rank}").decode().partition(" ")
                if int(number) >= call:  # an older answer may be that of a rank which died since
                    known[rank] = f"is alive, {text}"
        return known


def what_is_known(absent: Sequence[int], known: Mapping[int, str], store_error: str) -> str:
    """The result of a liveness check in words."""
    said = [f"rank {r} {text}" for r, text in known.items()]
    said += [f"rank {r} gave no sign of life" for r in absent if r not in known]
    if store_error:
        said.append(
            f"the store is gone too ({store_error[:80]}): the rank that hosts it has ended, which "
            "is global rank 0 unless the launcher hosts it"
        )
    elif not absent:
        said.append("every rank answered the liveness check late; one of them was slow")
    return "; ".join(said)


class Watchdog:
    """Watches one rank.

    Args:
        rolls: The liveness check through the store.
        hang_seconds: How long the training thread may stay where it may hang.
        poll_seconds: Time between two looks.
        report: Takes the record of a hang.
        leave: End the process after a hang was reported.
    """

    def __init__(
        self,
        liveness: LivenessCheck,
        *,
        hang_seconds: float,
        poll_seconds: float,
        report: Callable[[Hang], None],
        leave: bool,
    ) -> None:
        self._rolls, self._report, self._leave = liveness, report, leave
        self._hang_seconds, self._poll_seconds = hang_seconds, poll_seconds
        self._since: float | None = None
        self._step = 0
        self._reported = 0
        self._found: tuple[Hang, str] | None = None
        self._stop = threading.Event()
        # Apart, because a store that does not answer must not keep a hang from being seen.
        self._threads = [
            threading.Thread(target=self._watch, name="sdcwatch-watchdog", daemon=True),
            threading.Thread(target=self._answer, name="sdcwatch-liveness check", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, step: int) -> None:
        """The training thread goes where it may hang."""
        self._step, self._since = step, time.monotonic()

    def leave_danger(self) -> None:
        """It came back."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _answer(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            with contextlib.suppress(Exception):  # the store may be back at the next look
                self._rolls.answer()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            since, step = self._since, self._step
            if since is not None and time.monotonic() - since > self._hang_seconds:
                with contextlib.suppress(Exception):  # what it tells must not end the watch
                    self._hang(step, since)

    def explain(self, error: BaseException) -> RankGone | None:
        """Who is missing, if a collective of DDP broke; called from the training thread.

        DDP says which socket broke, and not which rank has gone. Takes the window of a liveness
        check.

        Args:
            error: What ended the step.

        Returns:
            None if `error` is something else, or if every rank is there.
        """
        if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _BROKEN):
            return None
        since, step = self._since or time.monotonic(), self._step
        if self._found is None or self._found[0].step != step:
            self._found = self._check_liveness(step, since)
            if self._found[0].left or self._found[0].absent:
                self._report(self._found[0])
        hang, said = self._found
        if not hang.left and not hang.absent:
            return None
        return RankGone(hang.absent, said, hang.operation)

    def _hang(self, step: int, since: float) -> None:
        if self._reported == step:
            return
        patience = threading.Timer(
            self._rolls.window_seconds + _STORE_SECONDS, self._leave_unanswered, (step, since)
        )
        patience.daemon = True
        if self._leave:
            patience.start()
        found = self._check_liveness(step, since)
        patience.cancel()
        if self._since != since:  # it went on meanwhile: slow, not hung
            return
        self._reported, self._found = step, found
        self._tell(found[0])

    def _leave_unanswered(self, step: int, since: float) -> None:
        if self._since == since:
            self._tell(self._record(step, since, (), {"store": "did not answer"}))

    def _tell(self, hang: Hang) -> None:
        try:
            self._report(hang)
        finally:
            if self._leave:
                os._exit(EXIT_HANG)

    def _check_liveness(self, step: int, since: float) -> tuple[Hang, str]:
        absent, known, problem = self._rolls.call(_where(step))
        left = {str(rank): text for rank, text in known.items()}
        if problem:
            left["store"] = problem
        hang = self._record(step, since, absent, left)
        return hang, what_is_known(absent, known, problem)

    def _record(
        self, step: int, since: float, absent: tuple[int, ...], left: dict[str, str]
    ) -> Hang:
        return Hang(
            step=step,
            time=time.time(),
            reporter=self._rolls.rank,
            operation=_where(step),
            absent=absent,
            left=left,
            waited_seconds=round(time.monotonic() - since, 1),
        )


def _where(step: int) -> str:
    return f"the backward of step {step}"
