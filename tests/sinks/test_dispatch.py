import os
import subprocess
import sys
import threading
import time

import pytest

from sdcwatch.sinks.base import SinkCounts
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import JsonlSink, read_records


def test_every_sink_gets_every_record_in_order(doubles, feed, faulty_run):
    one, two = doubles.recording(), doubles.recording()
    dispatcher = Dispatcher([one, two])

    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert one.records == two.records == faulty_run
    assert [counts.events for counts in dispatcher.counts] == [len(faulty_run)] * 2


def test_a_sink_is_called_by_one_thread_that_is_not_the_caller(doubles, feed, faulty_run):
    sink = doubles.recording()
    dispatcher = Dispatcher([sink])

    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert sink.threads == {"sdcwatch-recording": len(faulty_run)}


def test_a_blocked_sink_delays_neither_the_caller_nor_the_other_sinks(doubles, faulty_run):
    blocked, other = doubles.blocking(), doubles.recording()
    dispatcher = Dispatcher([blocked, other], close_seconds=0.2)

    for record in faulty_run:
        dispatcher.emit(record)
    deadline = time.monotonic() + 5
    while other.records != faulty_run:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    assert blocked.records == []
    dispatcher.close()
    blocked.release.set()


def test_records_that_find_the_queue_full_are_dropped_and_counted(doubles, start):
    sink = doubles.blocking()
    dispatcher = Dispatcher([sink], queue_size=3, close_seconds=0.1)
    dispatcher.emit(start)
    assert sink.entered.wait(5)  # it holds one record; three more fit into the queue

    for _ in range(10):
        dispatcher.emit(start)

    (counts,) = dispatcher.counts
    assert (counts.events, counts.dropped["queue_full"], counts.waiting) == (11, 7, 3)
    dispatcher.close()
    assert counts.dropped["timeout"] == 4  # the one it was stuck in, and three that waited
    assert counts.lost == counts.events
    sink.release.set()


def test_drain_says_whether_everything_was_served(doubles, start):
    sink = doubles.blocking()
    dispatcher = Dispatcher([sink], close_seconds=0.1)
    dispatcher.emit(start)

    assert not dispatcher.drain(0.05)
    sink.release.set()
    assert dispatcher.drain(20.0)
    assert sink.records == [start]
    dispatcher.close()


def test_close_keeps_its_budget_for_several_blocked_sinks_together(doubles, start):
    sinks = [doubles.blocking() for _ in range(4)]
    dispatcher = Dispatcher(sinks, close_seconds=0.3)
    dispatcher.emit(start)

    began = time.monotonic()
    dispatcher.close()

    assert time.monotonic() - began < 5 * 0.3
    for sink in sinks:
        sink.release.set()


def test_close_drains_what_waits_and_closes_each_sink_once(doubles, faulty_run):
    sink = doubles.recording()
    dispatcher = Dispatcher([sink])
    for record in faulty_run:
        dispatcher.emit(record)

    dispatcher.close()
    dispatcher.close()

    assert sink.records == faulty_run
    assert sink.closed == 1
    assert dispatcher.counts[0].lost == 0


def test_a_raising_sink_changes_nothing_but_a_counter(doubles, feed, faulty_run):
    raising, other = doubles.raising(), doubles.recording()
    dispatcher = Dispatcher([raising, other])

    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert other.records == faulty_run
    counts = dispatcher.counts[0]
    assert counts.dropped["error"] == len(faulty_run) + 1  # and its close
    assert counts.last_error == "RuntimeError"
    assert "canary" not in repr(counts)


def test_a_record_after_close_is_counted_as_lost(doubles, start):
    sink = doubles.recording()
    dispatcher = Dispatcher([sink])
    dispatcher.close()

    dispatcher.emit(start)

    assert sink.records == []
    assert dispatcher.counts[0].dropped["closed"] == 1


def test_direct_sinks_have_written_when_emit_returns(tmp_path, start):
    log = JsonlSink(tmp_path / "events.jsonl")
    dispatcher = Dispatcher(direct=[log])

    dispatcher.emit(start)

    assert log.path.read_text().count("\n") == 1
    dispatcher.close()


def test_a_direct_sink_that_stalls_keeps_nobody_waiting_and_catches_up(doubles, start, monkeypatch):
    monkeypatch.setattr("sdcwatch.sinks.dispatch.PATIENCE_SECONDS", 0.1)
    stalled, other = doubles.blocking(), doubles.recording()
    dispatcher = Dispatcher([other], direct=[stalled], queue_size=3, close_seconds=0.1)
    began = time.monotonic()
    for _ in range(6):
        dispatcher.emit(start)
    assert time.monotonic() - began < 5  # and not for ever
    assert dispatcher.drain(0.0) is False
    log, _ = dispatcher.counts
    assert (log.stalled, log.events, log.dropped["queue_full"]) == (True, 6, 2)
    assert dispatcher.workers[0].counts.lost == 0

    stalled.release.set()
    assert dispatcher.drain(20.0)
    dispatcher.emit(start)
    assert not log.stalled
    dispatcher.close()
    assert len(stalled.records) == 5


def test_a_direct_sink_that_never_comes_back_ends_with_what_it_lost_counted(
    doubles, start, monkeypatch
):
    monkeypatch.setattr("sdcwatch.sinks.dispatch.PATIENCE_SECONDS", 0.1)
    stalled = doubles.blocking()
    dispatcher = Dispatcher(direct=[stalled], close_seconds=0.1)
    for _ in range(3):
        dispatcher.emit(start)
    began = time.monotonic()
    dispatcher.close()
    assert time.monotonic() - began < 5
    assert dispatcher.counts[0].dropped["timeout"] == 3
    stalled.release.set()


def test_a_direct_sink_is_never_called_by_two_threads_at_once(doubles, start):
    class Watched(doubles.recording):
        inside = 0
        most = 0

        def emit(self, record):
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.001)
            self.inside -= 1
            super().emit(record)

    sink = Watched()
    dispatcher = Dispatcher(direct=[sink])
    threads = [
        threading.Thread(target=lambda: [dispatcher.emit(start) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dispatcher.close()

    assert (len(sink.records), sink.most) == (80, 1)


def test_a_full_disk_under_the_event_log_is_counted_and_stops_nothing(doubles, feed, faulty_run):
    from pathlib import Path

    log, other = JsonlSink(Path("/dev/full")), doubles.recording()
    dispatcher = Dispatcher([other], direct=[log])

    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert other.records == faulty_run
    assert log.failures == len(faulty_run)
    assert dispatcher.counts[0].dropped["error"] == len(faulty_run)
    assert dispatcher.counts[0].last_error == "OSError"


def test_a_lingering_sink_gets_more_time_and_the_others_do_not(doubles, start):
    class Lingering(doubles.recording):
        lingers = True

        def close(self, timeout_seconds):
            self.given = timeout_seconds

    class Plain(doubles.recording):
        def close(self, timeout_seconds):
            self.given = timeout_seconds

    lingering, plain = Lingering(), Plain()
    Dispatcher([lingering, plain], close_seconds=1.0, linger_seconds=30.0).close()

    assert 30.0 < lingering.given <= 31.0
    assert plain.given <= 1.0


def test_ctrl_c_during_close_cuts_lingering_short_and_is_passed_on(doubles, monkeypatch):
    hurried = threading.Event()

    class Lingering(doubles.recording):
        lingers = True

        def close(self, timeout_seconds):
            hurried.wait(30)

        def hurry(self):
            hurried.set()

    dispatcher = Dispatcher([Lingering()], linger_seconds=30)

    def interrupted(lane):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(dispatcher.workers[0]), "finish_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.close()

    assert hurried.is_set()


def test_a_forked_child_reports_nothing(tmp_path, doubles, start, faulty_run):
    sink, log = doubles.recording(), JsonlSink(tmp_path / "events.jsonl")
    dispatcher = Dispatcher([sink], direct=[log])
    dispatcher.emit(start)

    child = fork(lambda: [dispatcher.emit(record) for record in faulty_run] + [dispatcher.close()])

    assert child == 0
    assert log.path.read_text().count("\n") == 1
    dispatcher.close()
    assert sink.records == [start]


def fork(work):
    """Run `work` in a forked child; its exit code, 1 after an exception."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_names_of_sinks_outside_the_catalogue_are_counted_as_other(doubles):
    dispatcher = Dispatcher([doubles.recording()])

    assert [counts.sink for counts in dispatcher.counts] == ["other"]
    assert isinstance(dispatcher.counts[0], SinkCounts)
    dispatcher.close()


SIGNALLED = """
import os, pathlib, signal, sys
from sdcwatch.core.records import Note
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import JsonlSink

def note(code):
    return Note(step=1, time=1.0, code=code, message="")

class Interrupted:
    name = "interrupted"
    def emit(self, record):
        if record.code == "first":
            os.kill(os.getpid(), signal.SIGTERM)
    def close(self, timeout_seconds):
        os.write(1, b"closed\\n")

class Silent:
    name = "silent"
    def emit(self, record):
        os.write(1, f"served {{record.code}}\\n".encode())
    def close(self, timeout_seconds):
        os.write(1, b"closed\\n")

def stop(number, frame):
    dispatcher.emit(note("last"))
    dispatcher.close()
    dispatcher.close()
    if {exits!r}:
        sys.exit(7)

dispatcher = Dispatcher([Silent()], direct=[Interrupted(), JsonlSink(pathlib.Path({log!r}))])
signal.signal(signal.SIGTERM, stop)
dispatcher.emit(note("first"))
dispatcher.emit(note("late"))
"""


@pytest.mark.parametrize(("exits", "code"), [(False, 0), (True, 7)])
def test_a_signal_that_closes_while_a_record_is_written_loses_no_later_one_and_blocks_nothing(
    tmp_path, exits, code
):
    log = tmp_path / "events.jsonl"
    script = SIGNALLED.format(log=str(log), exits=exits)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == code, done.stderr
    assert [record.code for record in read_records(tmp_path)] == ["first", "last"]
    assert done.stdout.splitlines().count("closed") == 2
    assert "served last" in done.stdout
    assert "late" not in done.stdout


def test_a_thread_that_emits_does_not_put_off_the_close_of_another(doubles, start):
    slow, other = doubles.blocking(), doubles.recording()
    dispatcher = Dispatcher([other], direct=[slow])
    thread = threading.Thread(target=dispatcher.emit, args=(start,))
    thread.start()
    assert slow.entered.wait(5)
    dispatcher.close()
    assert other.closed == 1
    slow.release.set()
    thread.join()
