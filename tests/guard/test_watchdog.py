"""The watchdog speaks while the training thread hangs, whatever state the store is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sdcwatch.core.records import Hang
from sdcwatch.core.waiting import Finding, Position
from sdcwatch.errors import EXIT_HANG, Desync, RankGone
from sdcwatch.guard import watchdog as module
from sdcwatch.guard.watchdog import Answering, LivenessCheck, Watchdog


class Liveness(LivenessCheck):
    """A liveness check of three ranks, of which rank 2 is silent; its store can be made to fail."""

    def __init__(self) -> None:
        super().__init__(None, 0, 3, 0.0)
        self.answers = 0
        self.fails = False
        self.finding = Finding(silent=(2,))
        self.blocks = threading.Event()
        self.blocks.set()
        self.called: list[int] = []

    def answer_next(self, store: object) -> bool:
        time.sleep(0.002)
        self.answers += 1
        if self.fails:
            message = "Broken pipe"
            raise ConnectionError(message)
        return not self._stopped

    def stop_answering(self) -> None:
        self._stopped = True

    def call(self, asked: Position | None = None, *, afresh: bool = False) -> Finding:
        assert asked is not None
        self.called.append(asked.step)
        self.blocks.wait()
        if self.fails:
            return Finding(store_error="ConnectionError: Broken pipe")
        return self.finding


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Bench:
    """A watchdog that looks often, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.liveness = Liveness()
        self.hangs: list[Hang] = []
        self.exits: list[int] = []
        self.report: Callable[[Hang], None] = self.hangs.append
        self.dog: Watchdog | None = None
        self.answering: Answering | None = None
        monkeypatch.setattr(module.os, "_exit", self.exits.append)
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)

    def start(self, *, leave: bool = False, hang_seconds: float = 0.02) -> Watchdog:
        self.dog = Watchdog(
            self.liveness,
            hang_seconds=hang_seconds,
            report=lambda hang: self.report(hang),
            leave=leave,
        )
        self.answering = Answering(self.liveness, None)
        return self.dog

    def close(self) -> None:
        for thread in (self.dog, self.answering):
            if thread is not None:
                thread.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.liveness.blocks.set()
    made.close()


def test_a_hang_is_reported_once_with_who_is_absent(bench: Bench) -> None:
    bench.start().enter(7)
    until(lambda: bench.hangs)
    answered = bench.liveness.answers
    until(lambda: bench.liveness.answers > answered + 3)
    (hang,) = bench.hangs
    assert (hang.step, hang.reporter, hang.absent, hang.left) == (7, 0, (2,), {})
    assert bench.exits == []


def test_a_hang_is_seen_also_when_the_store_is_gone(bench: Bench) -> None:
    bench.liveness.fails = True
    bench.start().enter(7)
    until(lambda: bench.hangs)
    assert bench.hangs[0].left == {"store": "ConnectionError: Broken pipe"}


def test_one_error_of_the_store_ends_neither_answers_nor_the_watch(bench: Bench) -> None:
    bench.liveness.fails = True
    dog = bench.start()
    until(lambda: bench.liveness.answers > 3)  # between steps
    bench.liveness.fails = False
    answered = bench.liveness.answers
    until(lambda: bench.liveness.answers > answered)
    dog.enter(7)
    until(lambda: bench.hangs)
    assert bench.hangs[0].absent == (2,)


def test_who_is_to_leave_a_hang_leaves_it_after_telling_also_without_a_store(bench: Bench) -> None:
    bench.liveness.fails = True
    bench.start(leave=True).enter(7)
    until(lambda: bench.exits)
    assert bench.exits == [EXIT_HANG]
    assert len(bench.hangs) == 1


def test_nobody_leaves_while_every_rank_is_alive(bench: Bench) -> None:
    bench.liveness.finding = Finding(behind=(1,), notes={1: "is alive, in step 6"})
    bench.start(leave=True).enter(7)
    until(lambda: bench.hangs)
    assert bench.hangs[0].left == {"1": "is alive, in step 6"}
    assert bench.exits == []


def test_nothing_is_said_while_the_ranks_that_are_behind_compile(bench: Bench) -> None:
    notes = {1: "is alive, in step 7 (it compiles)"}
    bench.liveness.finding = Finding(behind=(1,), notes=notes)
    bench.start().enter(7)
    until(lambda: len(bench.liveness.called) > 1)
    assert bench.hangs == []
    bench.liveness.finding = Finding(behind=(1,), notes={1: "is alive, in step 7"})
    until(lambda: bench.hangs)


def test_a_rank_knows_that_it_compiles(bench: Bench) -> None:
    dog = bench.start()
    assert not dog.compiling()
    scope = {"__name__": "torch._dynamo.convert_frame", "dog": dog}
    exec("def compile_frame():\n    return dog.compiling()", scope)
    assert scope["compile_frame"]()  # type: ignore[operator]


def test_a_rank_that_trains_in_another_thread_knows_that_it_compiles_there(bench: Bench) -> None:
    dog, goes_on = bench.start(), threading.Event()
    scope = {"__name__": "torch._dynamo.convert_frame", "wait": goes_on.wait}
    exec("def compile_frame():\n    wait(20)", scope)
    training = threading.Thread(target=scope["compile_frame"])  # type: ignore[arg-type]
    training.start()
    dog.trains = lambda: training.ident or 0
    until(dog.compiling)
    goes_on.set()
    training.join()
    assert not dog.compiling()


def test_who_is_told_that_ranks_ran_apart_says_so_when_its_connection_breaks(
    bench: Bench,
) -> None:
    dog = bench.start(hang_seconds=60.0)
    dog.enter(7)
    bench.liveness.found = Finding(past=(0, 1), operation="save_checkpoint of step 6")
    error = dog.explain(RuntimeError("[gloo] Connection closed by peer"))
    assert isinstance(error, Desync)
    assert error.past == "save_checkpoint of step 6"
    assert "`if rank == 0`" in str(error)


def test_who_has_gone_is_named_when_a_connection_breaks(bench: Bench) -> None:
    dog = bench.start(hang_seconds=60.0)
    dog.enter(7)
    error = dog.explain(RuntimeError("[gloo] Connection closed by peer"))
    assert isinstance(error, RankGone)
    assert error.ranks == (2,)
    assert len(bench.hangs) == 1
    assert dog.explain(ValueError("something else")) is None


def test_a_local_error_is_not_blamed_on_a_rank_that_is_alive_and_behind(bench: Bench) -> None:
    dog = bench.start(hang_seconds=60.0)
    dog.enter(7)
    bench.liveness.finding = Finding(behind=(1,), notes={1: "is alive, after step 6"})
    assert dog.explain(RuntimeError("NCCL error: an illegal memory access")) is None
    assert bench.hangs == []


def test_where_the_timeout_of_the_program_has_passed_who_is_behind_is_why(bench: Bench) -> None:
    dog = bench.start(hang_seconds=60.0)
    dog.enter(7)
    bench.liveness.finding = Finding(behind=(1,), notes={1: "is alive, after step 6"})
    gone = dog.explain(RuntimeError("[gloo/…] Timed out waiting 3000ms for recv operation"))
    assert gone is not None
    assert gone.ranks == (1,)
    assert [hang.absent for hang in bench.hangs] == [(1,)]


def test_a_report_that_fails_keeps_nobody_from_leaving(bench: Bench) -> None:
    def full_disk(hang: Hang) -> None:
        raise OSError(28, "No space left on device")

    bench.report = full_disk
    bench.start(leave=True).enter(7)
    until(lambda: bench.exits)
    assert bench.exits == [EXIT_HANG]


def test_a_step_that_went_on_during_the_liveness_check_was_slow_and_is_not_left(
    bench: Bench,
) -> None:
    bench.liveness.blocks.clear()
    dog = bench.start(leave=True)
    dog.enter(7)
    until(lambda: bench.liveness.called)
    dog.leave_danger()
    bench.liveness.blocks.set()
    answered = bench.liveness.answers
    until(lambda: bench.liveness.answers > answered + 3)
    assert (bench.hangs, bench.exits) == ([], [])
    dog.enter(7)  # the next backward of the same step hangs
    until(lambda: bench.exits)
    assert (len(bench.hangs), bench.exits) == (1, [EXIT_HANG])


def test_nothing_runs_after_closing(bench: Bench) -> None:
    before = set(threading.enumerate())
    bench.start()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"sdcwatch-watchdog", "sdcwatch-liveness"}
    bench.close()
    assert not any(thread.is_alive() for thread in started)
