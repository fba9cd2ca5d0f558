"""The watchdog speaks while the training thread hangs, whatever state the store is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sdcwatch.core.records import Hang
from sdcwatch.errors import EXIT_HANG
from sdcwatch.guard import watchdog as module
from sdcwatch.guard.watchdog import LivenessCheck, Watchdog


class Rolls(LivenessCheck):
    """A liveness check of three ranks, of which rank 2 is absent; its store can be made to fail."""

    def __init__(self) -> None:
        super().__init__(None, 0, 3, 0.0)
        self.answers = 0
        self.fails = False
        self.blocks = threading.Event()
        self.blocks.set()
        self.called: list[str] = []

    def answer(self) -> None:
        self.blocks.wait()
        self.answers += 1
        if self.fails:
            message = "Broken pipe"
            raise ConnectionError(message)

    def call(self, where: str) -> tuple[tuple[int, ...], dict[int, str], str]:
        self.called.append(where)
        self.blocks.wait()
        if self.fails:
            return (), {}, "ConnectionError: Broken pipe"
        return (2,), {}, ""


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Bench:
    """A watchdog that looks often, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.liveness = Rolls()
        self.hangs: list[Hang] = []
        self.exits: list[int] = []
        self.report: Callable[[Hang], None] = self.hangs.append
        self.dog: Watchdog | None = None
        monkeypatch.setattr(module.os, "_exit", self.exits.append)
        monkeypatch.setattr(module, "_STORE_SECONDS", 0.05)

    def start(self, *, leave: bool = False, hang_seconds: float = 0.02) -> Watchdog:
        self.dog = Watchdog(
            self.liveness,
            hang_seconds=hang_seconds,
            poll_seconds=0.005,
            report=lambda hang: self.report(hang),
            leave=leave,
        )
        return self.dog


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.liveness.blocks.set()
    if made.dog is not None:
        made.dog.close()


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


def test_a_store_that_never_answers_keeps_nobody_from_leaving(bench: Bench) -> None:
    bench.liveness.blocks.clear()
    bench.start(leave=True).enter(7)
    until(lambda: bench.exits)
    assert bench.exits[0] == EXIT_HANG
    assert bench.hangs[0].left == {"store": "did not answer"}


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
    bench.liveness.window_seconds = 60.0
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
    def running() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("sdcwatch-")}

    dog = bench.start()
    assert running() == {"sdcwatch-watchdog", "sdcwatch-liveness check"}
    dog.close()
    assert running() == set()
