"""A guard that is closed in a `finally`, in a generator, twice, or while nobody reads stderr."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.util import _run_finalizers
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.config import TelemetryConfig
from sdcwatch.core.records import CheckpointEvent, RunFinished, RunStarted
from sdcwatch.errors import EXIT_HANG, CorruptionDetected, RankGone, SdcwatchError
from sdcwatch.guard import sigterm as sigterm_module
from sdcwatch.guard import step as step_module
from sdcwatch.guard.exits import FIRST, exit_code_of
from sdcwatch.guard.sigterm import Terminated, TerminationHandler
from sdcwatch.guard.waits import unfinished
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import MemorySink

pytestmark = pytest.mark.usefixtures("alone")


class Run:
    """A guarded model, and what was recorded."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        net = nn.Linear(4, 2)
        self.model, self.memory = DistributedDataParallel(net), MemorySink()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.guard = sdcwatch.init(
            self.model,
            self.optimizer,
            run_dir=run_dir,
            node="n",
            sinks=[self.memory],
            **{"telemetry": "off", "console": False, **options},
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.optimizer.step()

    def told(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.memory.records if isinstance(record, kind)]

    @property
    def ended(self) -> tuple[str, int, str]:
        (finished,) = self.told(RunFinished)
        return finished.state.value, finished.exit_code, finished.reason


def close_in_finally(run: Run, error: BaseException) -> None:
    try:
        raise error
    finally:
        run.guard.close()


def close_in_except(run: Run, error: BaseException) -> None:
    try:
        raise error
    except type(error):
        run.guard.close()
        raise


@pytest.mark.parametrize("close", [close_in_finally, close_in_except])
@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(ValueError("a label"), "failed", 1), (SystemExit(3), "failed", 3), (SystemExit(), "", 0)],
)
def test_a_guard_that_is_closed_while_an_exception_is_handled_ends_with_it(
    tmp_path: Path,
    close: Callable[[Run, BaseException], None],
    error: BaseException,
    state: str,
    code: int,
) -> None:
    run = Run(tmp_path)
    run.step()
    with pytest.raises(type(error)):
        close(run, error)
    assert run.ended[:2] == (state or "finished", code)
    assert code == 0 or type(error).__name__ in run.ended[2]


class Asked:
    """A watchdog that knows of a rank that has gone."""

    def __init__(self) -> None:
        self.explained: list[str] = []

    def explain(self, error: BaseException) -> RankGone | None:
        self.explained.append(str(error))
        return RankGone((1,), "left", "a step") if "gloo" in str(error) else None

    def close(self) -> None:
        pass


def test_an_error_that_the_program_makes_of_a_broken_connection_stays_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = Run(tmp_path), Asked()
    monkeypatch.setattr(run.guard, "_watchdog", asked)
    broken = RuntimeError("gloo: connection closed")
    with pytest.raises(ValueError, match="this step failed"), run.guard:
        raise ValueError("this step failed") from broken
    assert asked.explained == ["this step failed", "gloo: connection closed"]
    assert run.ended == ("failed", 1, "the run ended with ValueError")


def test_a_finding_that_the_loop_has_lived_with_does_not_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, on_failure="stop")
    run.step()
    with pytest.raises(CorruptionDetected):
        run.model(torch.full((3, 4), torch.nan)).sum().backward()
    run.step()
    run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")


def test_a_skip_too_many_is_remembered_where_the_next_backward_begins(tmp_path: Path) -> None:
    run = Run(tmp_path, max_consecutive_skips=1)

    def loop_that_gives_such_steps_up() -> None:
        for _ in range(4):
            run.optimizer.zero_grad()
            run.model(torch.full((3, 4), torch.nan)).sum().backward()

    with pytest.raises(CorruptionDetected):
        loop_that_gives_such_steps_up()
    run.guard.close()
    assert run.ended[:2] == ("failed", 80)
    assert "CorruptionDetected" in run.ended[2]


def test_an_end_that_was_interrupted_before_it_began_is_made_up_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    run.guard._claim.acquire()  # and Ctrl-C, before anything else was done
    run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")


def test_who_is_late_behind_a_thread_that_ends_the_process_leaves_the_code_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order = Run(tmp_path), []
    monkeypatch.setattr("sdcwatch.guard.api.PROCESS_SECONDS", 1.0)

    def leave_a_hang() -> None:
        run.guard._end_hang(RankGone((1,), "no sign of life", "the backward of step 3"))
        order.append("the process has ended")

    monkeypatch.setattr(run.guard, "_leave_in_order", lambda: time.sleep(0.2))
    thread = threading.Thread(target=leave_a_hang)
    thread.start()
    while not run.guard._ending:
        time.sleep(0.001)
    run.guard.close()
    order.append("the main thread goes on")
    thread.join()
    assert order == ["the process has ended", "the main thread goes on"]
    assert run.ended[1] == EXIT_HANG


def test_a_hang_that_the_training_thread_came_out_of_leaves_the_process_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order = Run(tmp_path), []
    monkeypatch.setattr("sdcwatch.guard.api.END_SECONDS", 0.2)
    monkeypatch.setattr("sdcwatch.guard.api.PROCESS_SECONDS", 0.0)

    def leave_a_hang() -> None:
        run.guard._end_hang(RankGone((1,), "no sign of life", "the backward of step 3"))
        order.append("the watchdog ends the process")

    thread = threading.Thread(target=leave_a_hang)

    def scraped() -> None:
        thread.start()
        time.sleep(0.1)
        order.append("the run has ended")

    monkeypatch.setattr(run.guard, "_leave_in_order", scraped)
    run.guard.close()
    thread.join()
    assert order == ["the run has ended", "the watchdog ends the process"]
    assert run.ended == ("finished", 0, "the run ended")


def test_a_guard_that_another_thread_has_closed_leaves_the_signal_to_the_next(
    tmp_path: Path,
) -> None:
    thread = threading.Thread(target=Run(tmp_path / "one").guard.close)
    thread.start()
    thread.join()
    run = Run(tmp_path / "two")
    # Also where the main thread is in a collective, in which no handler of Python runs.
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    assert run.guard._sigterm is not None
    assert run.guard._sigterm._pipe is not None
    assert run.guard._sigterm._pipe[1] == descriptor

    def is_told_to_end() -> None:
        with run.guard:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(20)

    with pytest.raises(Terminated):
        is_told_to_end()
    assert run.ended[:2] == ("failed", 143)


def test_a_signal_while_the_last_guard_gives_it_back_takes_nothing_from_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    handler = run.guard._sigterm
    assert handler is not None
    give_back = handler._give_back

    def late(*, failed: bool) -> None:
        handler._decided = True  # a first one came long ago, and the run has ended of other things
        signal.raise_signal(signal.SIGTERM)  # raised Terminated here, after the last record
        handler.received = False
        give_back(failed=failed)

    monkeypatch.setattr(handler, "_give_back", late)
    run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")


def test_a_signal_behind_the_last_record_leaves_the_exception_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    # Its grace is over while the guard waits for the thread that would have it raise.
    monkeypatch.setattr(sigterm_module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(run.guard, "_leave_in_order", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(ValueError, match="a label"), run.guard:
        raise ValueError("a label")
    assert run.ended[:2] == ("failed", 1)


def test_what_a_thread_still_sees_of_its_step_when_another_ends_the_run_is_not_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, look = Run(tmp_path), step_module.look
    run.step()

    def look_while_it_ends(*arguments: Any) -> Any:
        thread = threading.Thread(target=run.guard.close)
        thread.start()
        thread.join()
        return look(*arguments)

    monkeypatch.setattr(step_module, "look", look_while_it_ends)
    run.model(torch.ones(3, 4)).square().mean().backward()
    assert run.ended[0] == "finished"
    assert run.guard.last_verdict is None


@pytest.mark.parametrize("interrupted", ["_exchange.leave", "_exchange.close", "_reporter.close"])
def test_a_second_interrupt_while_a_run_ends_takes_no_record_and_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    run, done = Run(tmp_path), []
    run.step()

    part, method = interrupted.split(".")
    usual = getattr(getattr(run.guard, part), method)

    def interrupt(*given: object, **named: object) -> None:
        usual(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(getattr(run.guard, part), method, interrupt)
        patched.setattr(run.guard, "_leave_in_order", lambda: done.append("left"))
        with pytest.raises(KeyboardInterrupt):
            run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")
    assert done == ["left"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_init_that_fails_late_ends_the_run_that_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sdcwatch.guard.build.StepController", fails)
    with pytest.raises(MemoryError):
        Run(tmp_path)
    (finished,) = [r for r in read_records(tmp_path) if isinstance(r, RunFinished)]
    assert (finished.state.value, finished.exit_code) == ("failed", 1)
    assert finished.reason == "sdcwatch.init ended with MemoryError"


def test_the_end_of_the_data_is_no_failure(tmp_path: Path) -> None:
    run, batches = Run(tmp_path), iter(range(2))
    while True:
        try:
            next(batches)
        except StopIteration:
            run.guard.close()
            break
        run.step()
    assert run.ended == ("finished", 0, "the run ended")


def test_what_was_handled_before_the_run_began_does_not_end_it(tmp_path: Path) -> None:
    try:
        raise MemoryError  # a batch that was too large, say: once more with a smaller one
    except MemoryError:
        run = Run(tmp_path)
        run.step()
        run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")


def test_a_failure_with_the_id_of_one_that_was_handled_before_the_run_ends_it(
    tmp_path: Path,
) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        run, number = Run(tmp_path), id(error)
    kept: list[BaseException] = []
    while not kept or (id(kept[-1]) != number and len(kept) < 100_000):
        kept.append(MemoryError())
    assert id(kept[-1]) == number
    with pytest.raises(MemoryError):
        close_in_finally(run, kept[-1])
    assert run.ended[:2] == ("failed", 1)


def test_a_loop_in_a_generator_that_is_closed_early_has_ended_well(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def loop() -> Iterator[int]:
        with run.guard:
            for number in range(9):
                run.step()
                yield number

    steps = loop()
    assert next(steps) == 0
    steps.close()
    assert run.ended == ("finished", 0, "the run ended")


def test_a_task_that_an_event_loop_cancels_for_ctrl_c_was_interrupted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background

    async def main() -> None:
        with run.guard:
            run.step()
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(20)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.ended[:2] == ("failed", 130)


def test_of_two_with_blocks_the_outer_one_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.guard:
        with run.guard:
            run.step()
        assert run.guard.save_checkpoint(lambda: None)
        assert run.told(RunFinished) == []
    assert run.ended[0] == "finished"
    with pytest.raises(SdcwatchError, match="put the whole loop into one `with`"), run.guard:
        pass


def test_a_save_that_calls_save_checkpoint_is_told_what_to_write_instead(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    with pytest.raises(SdcwatchError, match=r"Write there with torch\.save"):
        run.guard.save_checkpoint(lambda: run.guard.save_checkpoint(lambda: None))
    assert [event.result.value for event in run.told(CheckpointEvent)] == ["failed"]
    assert run.guard.save_checkpoint(lambda: None)
    run.guard.close()


class Broken:
    """A stream whose reader has gone."""

    def write(self, text: str) -> None:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def closed_stream() -> Any:
    with Path("/dev/null").open("w") as stream:
        return stream


@pytest.mark.parametrize("stream", [Broken, closed_stream, lambda: None])
def test_a_stderr_that_takes_nothing_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Callable[[], Any]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    run = Run(tmp_path, console=True)
    run.step()
    run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")
    assert (tmp_path / "summary.json").is_file()


class OfSomebody(Exception):
    """As of a command that was called: not what this process ends with."""

    exit_code = 7


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(259), 3),
        (SystemExit(-1), 255),
        (SystemExit("no data"), 1),
        (SystemExit(None), 0),
        (KeyboardInterrupt(), 130),
        (click.exceptions.Exit(3), 3),
        (click.UsageError("no such option"), 2),
        (OfSomebody(), 1),
        (SdcwatchError(), 1),
    ],
)
def test_the_recorded_code_is_what_the_parent_of_the_process_sees(
    error: BaseException, code: int
) -> None:
    assert exit_code_of(error) == code


def leave_as_a_child() -> None:
    """As multiprocessing.process.BaseProcess does."""
    try:
        sys.exit(3)
    finally:
        _run_finalizers(FIRST)


def test_a_child_of_multiprocessing_that_leaves_without_atexit_has_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    run = Run(tmp_path)
    run.step()
    with pytest.raises(SystemExit):
        leave_as_a_child()
    assert run.ended[:2] == ("failed", 3)
    run.guard.close()


def test_sys_exit_is_given_back(tmp_path: Path) -> None:
    before = sys.exit
    run = Run(tmp_path)
    with pytest.raises(SystemExit, match="4"):
        sys.exit(4)
    run.step()
    run.guard.close()
    assert sys.exit is before
    assert run.ended == ("finished", 0, "the run ended")


def test_the_descriptor_of_an_event_loop_is_left_to_it() -> None:
    handler = TerminationHandler(lambda: False, lambda: 0)

    async def wait() -> None:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, came.set)
        handler.close(failed=False)
        signal.raise_signal(signal.SIGUSR2)
        await asyncio.wait_for(came.wait(), 20)

    asyncio.run(wait())


def test_the_last_of_several_guards_gives_the_signal_back() -> None:
    remembered: list[BaseException] = []
    before = signal.getsignal(signal.SIGTERM)
    first, second = (TerminationHandler(lambda: False, lambda: 0, remembered.append) for _ in "ab")
    try:
        first.close(failed=False)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated):  # a second later, and also out of a sleep
            time.sleep(20)
        assert [type(error) for error in remembered] == [Terminated]
        assert second.received
    finally:
        second.close(failed=False)  # who has caught it is not told again
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def test_what_a_signal_handler_raises_in_a_wait_is_no_broken_connection() -> None:
    class Preempted(RuntimeError):
        pass

    class Work:
        def wait(self, timeout: object) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def handle(number: int, frame: object) -> None:
        raise Preempted

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Preempted):
            unfinished(Work(), 1.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_stays_where_it_is_when_the_program_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run(Path("run"))
    monkeypatch.chdir(elsewhere)
    run.guard.close()
    assert list(elsewhere.iterdir()) == []
    assert any(isinstance(one, RunFinished) for one in read_records(tmp_path / "run"))


def test_a_run_that_ends_where_no_thread_can_be_started_has_its_last_record_and_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, telemetry=TelemetryConfig(prometheus_port=0))
    run.step()
    url = run.told(RunStarted)[0].links["metrics"]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert b"sdcwatch_" in answer.read()
    run.guard.close()
    assert run.ended == ("finished", 0, "the run ended")
    assert run.guard._exchange.liveness._marked("left") == {0}
