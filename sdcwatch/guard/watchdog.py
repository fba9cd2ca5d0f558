"""The liveness check through the store, and the thread that speaks when the training thread cannot.

A rank that waits in vain asks all others, through the store, where they are; a thread on each
answers, whatever its training thread does. One rank of those that wait is elected to ask and to
read the answers; the others read what it found. Questions are waited for in the store, not polled
for, and answers are counters and bitmaps: what one rank sends does not depend on how many there
are.

Where the training thread hangs in a collective of DDP, the watchdog asks, and logs what it finds;
only with ``on_hang="exit"`` does it end the process. Where a collective of DDP does not hang but
breaks, it can say who has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

from sdcwatch.core.records import Hang
from sdcwatch.core.waiting import (
    LEFT,
    SHOWN_NOTES,
    Finding,
    Position,
    Relation,
    Stage,
    describe,
    in_next_forward,
    ran_apart,
    relation,
)
from sdcwatch.errors import EXIT_HANG, RankGone, SdcwatchError
from sdcwatch.guard.bitmap import mark, marked
from sdcwatch.sinks.patience import in_background

WINDOW_SECONDS = 6.0
"""How long a rank has to answer before it counts as silent."""
AGAIN_SECONDS = 1.0
"""The same, when a rank was already asked that has ended before it could read the answers."""
STORE_SECONDS = 1.0
"""What the store may take on top of that; a store out of reach never answers."""
STUCK_SECONDS = 3.0
"""After that long in one broadcast of buffers a rank waits for one that is elsewhere."""
END_SECONDS = 120.0
"""More than the end of a run may take that waits for a scrape, W&B and a push."""
_LOOK_SECONDS = 0.1
LONG = timedelta(days=20)
"""For ever, as far as a wait in the store can be told: milliseconds in 32 bits."""
_STATES = ("here", "behind", "past")
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
"""What backends say when a collective ends because its peer has."""
_TIMED_OUT = ("Timed out waiting", "collective operation timeout")
"""What they say when the timeout of the program's own group has passed: its peer is late."""
_BROADCAST = "_sync_buffers"
"""Of DistributedDataParallel, in its forward."""
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
"""Modules that are on the stack only while something compiles."""


def bounded(do: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """Call something that may never return, in a thread that is left behind if it does not.

    A store on a host that cannot be reached answers neither yes nor no.

    Returns:
        The result and "", or None and what went wrong.
    """
    result: list[Any] = []
    problem: list[str] = []

    def run() -> None:
        try:
            result.append(do())
        except Exception as error:  # every store raises its own type
            problem.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = in_background(run, "sdcwatch-store")
    if thread is not None:
        thread.join(seconds)
    if result:
        return result[0], ""
    return None, problem[0] if problem else "did not answer"


class LivenessCheck:
    """Finds absent ranks through the store, which works when collectives do not.

    Args:
        store: A corner of the store that all ranks of one exchange share and nobody else uses.
        rank: This rank.
        world_size: How many there are.
        window_seconds: How long the others have to answer.

    Attributes:
        where: The latest position of this rank.
        found: What the latest check found in which this rank was asked and was not there.
        asking: A check is under way on this rank.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, window_seconds: float = WINDOW_SECONDS
    ) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self.window_seconds = window_seconds
        self.where = Position()
        self.found: Finding | None = None
        self.asking = False
        self.busy: Callable[[], str] = str
        self.stuck_in_forward: Callable[[], bool] = bool
        self._next = 1
        self._asked, self._attempts = Position(), 0
        self._turn = threading.Lock()
        self._latest: tuple[Position, Finding, float] | None = None
        self._has_left = self._stopped = False
        self._unread: list[str] = []

    # --- where this rank is ---

    def move(self, step: int, stage: Stage, doing: str) -> None:
        """This rank goes on to another place in the loop."""
        self.where = Position(step, stage, self.where.count, doing)

    def begin(self, operation: str) -> Position:
        """This rank begins an operation of the guard; returns where that is."""
        here = self.where
        self.where = replace(here, count=here.count + 1, doing=f"at {operation}", operation=True)
        return self.where

    def end(self, operation: str) -> None:
        """The operation is over."""
        self.where = replace(self.where, doing=f"after its part in {operation}", operation=False)

    def leave(self, note: str, *, followed: bool = False, unmet: Sequence[int] = ()) -> None:
        """Leave a note under this rank's name; a lost store is no error, the rank is leaving.

        Args:
            note: Why it leaves.
            followed: It leaves because of other ranks.
            unmet: Those that it missed.
        """
        if not self._has_left:
            self._has_left = True
            bounded(lambda: self._leave(note or "left", followed, unmet), STORE_SECONDS)

    def _leave(self, note: str, followed: bool, unmet: Sequence[int]) -> None:
        self._store.set(f"note/{self.rank}", note)
        if unmet:  # the first to leave knows best: later ones may have missed those that left
            self._store.compare_set("unmet", "", json.dumps(list(unmet[:SHOWN_NOTES])))
        if followed:
            mark(self._store, "followed", self.rank)
        mark(self._store, "left", self.rank)
        self._store.add("leavers", 1)

    def _marked(self, bitmap: str) -> set[int]:
        return marked(self._store, bitmap, self.world_size)

    # --- answering ---

    def answer_next(self, store: Any) -> bool:
        """Wait for a question of another rank and answer it; called from a thread of its own.

        Args:
            store: A client of the store that nobody else waits in.

        Returns:
            False once `stop_answering` was called.

        Raises:
            Exception: The store is gone.
        """
        key, number = self._question(self.rank), self._next
        store.wait([key], LONG)
        text = store.get(key)
        if not text:
            return False
        asked, self._next = Position.decode(text), number + 1
        here = self.where
        if relation(here, asked) is Relation.BEHIND and self.stuck_in_forward():
            here = in_next_forward(here)
        state = relation(here, asked)
        base = f"ask/{number}"
        if state is not Relation.HERE:
            doing = f"{here.doing}{self.busy()}"
            store.set(f"{base}/at/{self.rank}", f"{here.step} is alive, {doing}")
        mark(store, f"{base}/{state.value}", self.rank)
        store.add(f"{base}/count", 1)
        # A run that saves for minutes, again and again, asks often; not every kind of store can.
        with contextlib.suppress(Exception):
            store.delete_key(key)
        if state is not Relation.HERE:
            self._unread.append(f"{base}/found")
        if self._unread:
            self._read_along(store)
        return True

    def _read_along(self, store: Any) -> None:
        """Remember what was found: once the connections break, it may be too late to ask.

        Not while another question waits: whoever does not answer in time is taken for dead.
        """
        end = time.monotonic() + 2 * self.window_seconds
        pause = _LOOK_SECONDS
        while time.monotonic() < end and not self._stopped:
            for key in [key for key in self._unread if store.check([key])]:
                self.found = Finding.decode(store.get(key), rank=-1)
                self._unread.remove(key)
            if not self._unread or store.check([self._question(self.rank)]):
                return
            time.sleep(pause)
            pause = min(0.5, 2 * pause)  # a few looks by each rank, however many there are
        self._unread.clear()

    def exported(self, number: int, gone: Iterable[int] = ()) -> None:
        """Say that this rank has reported the run.

        Args:
            number: How many ranks do.
            gone: Those of them that will not, as far as this one knows; another may know of more.
        """
        bounded(lambda: self._exported(number, gone), STORE_SECONDS)

    def _exported(self, number: int, gone: Iterable[int]) -> None:
        for rank in (*gone, self.rank):  # each is counted once, by itself or by another
            first = self._store.add(f"exports/{rank}", 1) == 1
            if first and self._store.add("exports", 1) == number:
                self._store.set("exported", "1")

    def await_exported(self, seconds: float) -> None:
        """Wait until all of them said so; a store that is gone says it too, for nobody else can."""
        bounded(lambda: self._store.wait(["exported"], _span(seconds)), seconds + STORE_SECONDS)

    def stop_answering(self) -> None:
        """Wake the thread that waits in `answer_next`, for the last time.

        A thread that comes back from the store while the interpreter ends would abort the process.
        """
        self._stopped = True
        bounded(lambda: self._store.set(self._question(self.rank), ""), STORE_SECONDS)

    def _question(self, rank: int) -> str:
        """A key of each rank's own, so that a rank can end its own wait."""
        return f"ask/{self._next}/to/{rank}"

    # --- asking ---

    def call_of_broken(self, asked: Position | None = None) -> Finding:
        """Ask why a connection broke: what was found before is no answer, nor that all are there.

        A rank that has died may have answered a question that was put a moment earlier.
        """
        finding = self.call(asked, afresh=True)
        if finding.past or finding.gone or finding.store_error:
            return finding
        return self.call(asked, afresh=True)

    def call(self, asked: Position | None = None, *, afresh: bool = False) -> Finding:
        """Ask every rank where it is. Takes at most the window and a little.

        Ranks that wait at the same place ask together: the first of them asks, the others read.
        So do two threads of one rank.

        Args:
            asked: Where this rank waits; by default where it is.
            afresh: What others have found at this place before is no answer.

        Returns:
            What was found; a store that is gone, or does not answer, tells nothing of anybody.
        """
        asked = asked or self.where
        came = time.monotonic()
        # A client of the store serves one thread at a time: behind another that waits in it, this
        # one would run out of time, and find nobody.
        with self._turn:
            if (known := self._learnt_since(came, asked)) is not None:
                return known
            finding = self._call_in_time(asked, afresh=afresh)
            self._latest = asked, finding, time.monotonic()
            return finding

    def _learnt_since(self, came: float, asked: Position) -> Finding | None:
        """What another thread of this rank found meanwhile, if that is the answer."""
        if self._latest is None:
            return None
        place, finding, ended = self._latest
        return finding if place == asked and ended >= came and finding.gone else None

    def _call_in_time(self, asked: Position, *, afresh: bool) -> Finding:
        self._attempts = self._attempts + 1 if asked == self._asked else 1
        self._asked = asked
        limit = self.window_seconds + 2 * AGAIN_SECONDS + STORE_SECONDS
        self.asking = True
        try:
            finding, problem = bounded(lambda: self._call(asked, afresh=afresh), limit)
        finally:
            self.asking = False
        return Finding(store_error=problem) if problem else finding

    def _call(self, asked: Position, *, afresh: bool) -> Finding:
        place = f"call/{asked.step}/{int(asked.stage)}/{asked.count}"
        while afresh and self._store.check([f"{place}/{self._attempts}/found"]):
            self._attempts += 1
        base = f"{place}/{self._attempts}"
        if self._store.add(f"{base}/first", 1) > 1:
            try:
                self._store.wait([f"{base}/found"], _span(self.window_seconds + AGAIN_SECONDS))
                return Finding.decode(self._store.get(f"{base}/found"), rank=self.rank)
            except RuntimeError:  # the one that asks has ended; the others answer at once by now
                return self._ask(asked, AGAIN_SECONDS)
        finding = self._ask(asked, self.window_seconds)
        self._store.set(f"{base}/found", finding.encode())
        return finding

    def _ask(self, asked: Position, seconds: float) -> Finding:
        number = self._store.add("asks", 1)
        key = f"ask/{number}"
        keys = [f"{key}/to/{rank}" for rank in range(self.world_size)]
        if self._store.has_extended_api():
            self._store.multi_set(keys, [asked.encode()] * len(keys))
        else:
            for one in keys:
                self._store.set(one, asked.encode())
        end = time.monotonic() + seconds
        while True:
            answered = self._store.add(f"{key}/count", 0) + self._store.add("leavers", 0)
            over = time.monotonic() > end
            if over or answered >= self.world_size:
                finding = self._read(key, asked)
                if over or not finding.silent:  # a rank that answered may have left since
                    break
            time.sleep(_LOOK_SECONDS)
        self._store.set(f"{key}/found", finding.encode())
        return finding

    def _read(self, key: str, asked: Position) -> Finding:
        left = self._marked("left") - {self.rank}
        here, behind, past = (self._marked(f"{key}/{state}") - left for state in _STATES)
        silent = set(range(self.world_size)) - here - behind - past - left - {self.rank}
        followed = self._marked("followed") & left if left else set()
        told = followed and self._store.check(["unmet"])
        unmet = set(json.loads(self._store.get("unmet")) if told else ())
        notes, lag = {}, 0
        for rank in sorted(past | behind - {self.rank})[:SHOWN_NOTES]:
            step, _, notes[rank] = self._store.get(f"{key}/at/{rank}").decode().partition(" ")
            lag = max(lag, asked.step - int(step))
        for rank in sorted(left, key=lambda r: (r in followed, r))[:SHOWN_NOTES]:
            notes[rank] = LEFT + self._store.get(f"note/{rank}").decode()
        return Finding(
            past=_ranks(past - {self.rank}),
            behind=_ranks(behind - {self.rank}),
            left=_ranks(left),
            silent=_ranks(silent),
            followed=_ranks(followed),
            unmet=_ranks(unmet),
            notes=notes,
            steps_behind=lag,
            operation=asked.doing.removeprefix("at "),
        )


def _ranks(some: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(some))


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class Answering:
    """The thread that answers questions of other ranks, whatever the training thread does.

    Args:
        liveness: The liveness check through the store.
        store: A client of that store of its own: it waits there for questions.
    """

    def __init__(self, liveness: LivenessCheck, store: Any) -> None:
        self._liveness, self._store = liveness, store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sdcwatch-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more. The thread is left behind if it does not come back from the store."""
        self._stop.set()
        self._liveness.stop_answering()
        self._thread.join(timeout=1.5)

    def _run(self) -> None:
        pause = _LOOK_SECONDS
        while not self._stop.is_set():
            answered = _answers(self._liveness, self._store)
            if answered is False:
                return
            # The store may be back later; each attempt without it writes to stderr.
            pause = _LOOK_SECONDS if answered else min(2 * pause, 60.0)
            if answered is None and self._stop.wait(pause):
                return


class Watchdog:
    """Watches one rank.

    Args:
        liveness: The liveness check through the store.
        hang_seconds: How long the training thread may stay where it may hang.
        report: Takes the record of a hang.
        leave: End the process after a hang was reported in which some rank is gone.

    Attributes:
        end: Ends the run before the process leaves a hang, on a thread that may be left behind.
        trains: Which thread trains; by default the one that made this.
    """

    def __init__(
        self,
        liveness: LivenessCheck,
        *,
        hang_seconds: float,
        report: Callable[[Hang], None],
        leave: bool,
    ) -> None:
        self._liveness, self._report, self._leave = liveness, report, leave
        self.end: Callable[[RankGone], None] = lambda gone: None
        self._hang_seconds = hang_seconds
        self._poll_seconds = min(1.0, hang_seconds / 5)
        here = threading.get_ident()
        self.trains: Callable[[], int] = lambda: here
        self._since: float | None = None
        self._place = liveness.where
        self._step = self._reported = 0
        self._stop = threading.Event()
        liveness.busy = lambda: " (it compiles)" if self.compiling() else ""
        liveness.stuck_in_forward = self.stuck_in_forward
        # Apart from `Answering`: a store that does not answer must not keep a hang from being seen.
        self._thread = threading.Thread(target=self._watch, name="sdcwatch-watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int) -> None:
        """The training thread goes where it may hang."""
        self._liveness.move(step, Stage.COMPUTING, f"in step {step}")
        self._place, self._step, self._since = self._liveness.where, step, time.monotonic()

    def leave_danger(self) -> None:
        """It came back."""
        self._since = None

    def close(self) -> None:
        """Stop watching. The thread is left behind if it does not come back from the store."""
        self._stop.set()
        self._thread.join(timeout=1.5)

    def compiling(self) -> bool:
        """Whether the training thread is in a compiler, which may take minutes."""
        frame: FrameType | None = sys._current_frames().get(self.trains())
        return any(module in _COMPILERS for module in _modules(frame))

    def stuck_in_forward(self) -> bool:
        """Whether the training thread waits in DDP's forward for the buffers of rank 0.

        That is no moment that a slow rank passes through: the same call, for a while.
        """
        first = self._broadcast()
        if first is None:
            return False
        time.sleep(STUCK_SECONDS)
        return self._broadcast() is first

    def _broadcast(self) -> FrameType | None:
        frame: FrameType | None = sys._current_frames().get(self.trains())
        while frame is not None and frame.f_code.co_name != _BROADCAST:
            frame = frame.f_back
        return frame

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            since, step = self._since, self._step
            if since is not None and time.monotonic() - since > self._hang_seconds:
                with contextlib.suppress(Exception):  # what it finds must not end the watch
                    self._hang(step, since)

    def explain(self, error: BaseException) -> SdcwatchError | None:
        """Who is missing, if a collective of DDP broke; called from the training thread.

        DDP says which socket broke, and not which rank has gone. Takes the window of a liveness
        check.

        Args:
            error: What ended the step.

        Returns:
            `Desync` if others found that this rank went past them, `RankGone` if a rank is gone;
            None if `error` is something else, or if every rank is there.
        """
        if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _BROKEN):
            return None
        since, step = self._since or time.monotonic(), self._step
        self._since = None  # what broke does not hang: nothing is to be said of it twice
        told = self._liveness.found
        if told is not None and told.past:
            return ran_apart(told)
        late = any(words in str(error) for words in _TIMED_OUT)
        gone = self.missing(since, step, broken=True, late=late)
        told = self._liveness.found
        return ran_apart(told) if told is not None and told.past else gone

    def missing(
        self,
        since: float | None = None,
        step: int | None = None,
        *,
        broken: bool = False,
        late: bool = False,
    ) -> RankGone | None:
        """Ask who is absent where the training thread is; reports it. None if everybody is there.

        Args:
            since: When it went there; by default as `enter` was told.
            step: The same for the step.
            broken: A connection has ended there.
            late: It did because the program's own timeout has passed.
        """
        since = since or self._since or time.monotonic()
        liveness = self._liveness
        finding = (liveness.call_of_broken if broken else liveness.call)(self._place)
        absent = finding.absent
        if broken and not (late or finding.past or finding.gone):
            absent = ()  # who is alive and behind has broken nothing
        if not absent and not finding.store_error:
            return None
        hang = self.record(finding, _backward(self._step if step is None else step), since)
        if finding.is_told_by(self._liveness.rank):
            self._report(hang)
        return RankGone(finding.named, describe(finding), hang.operation)

    def record(
        self, finding: Finding, operation: str, since: float, *, step: int | None = None
    ) -> Hang:
        """The record of what a liveness check found."""
        left = {str(rank): text for rank, text in finding.notes.items()}
        if finding.store_error:
            left["store"] = finding.store_error
        return Hang(
            step=self._step if step is None else step,
            time=time.time(),
            reporter=self._liveness.rank,
            operation=operation,
            absent=finding.named,
            left=left,
            waited_seconds=round(time.monotonic() - since, 1),
        )

    def _hang(self, step: int, since: float) -> None:
        if self._reported == step or self.compiling():
            return
        finding = self._liveness.call(self._place)
        if self._since != since:  # it went on meanwhile: slow, not hung
            return
        if finding.behind and not finding.gone and _all_compile(finding):
            return
        self._reported = step
        hang = self.record(finding, _backward(step), since)
        try:
            if finding.is_told_by(self._liveness.rank):
                self._report(hang)
        finally:
            if self._leave and (finding.gone or finding.store_error):
                gone = RankGone(finding.named, describe(finding), hang.operation)
                bounded(lambda: self.end(gone), END_SECONDS)
                os._exit(EXIT_HANG)


def _answers(liveness: LivenessCheck, store: Any) -> bool | None:
    """What `answer_next` says; None if the store failed."""
    try:
        return liveness.answer_next(store)
    except Exception:  # every store raises its own type
        return None


def _modules(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back


def _all_compile(finding: Finding) -> bool:
    return all("(it compiles)" in finding.notes.get(r, "(it compiles)") for r in finding.behind)


def _backward(step: int) -> str:
    return f"the backward of step {step}"
