"""A file system that does not answer: a FIFO that nobody reads stands in for it."""

import os
import threading
import time

from sdcwatch.core.records import Closing
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import (
    CLOSED,
    EVENTS,
    SUMMARY,
    JsonlSink,
    RunSoFar,
    SummaryFile,
    append_closing,
    read_records,
)
from sdcwatch.sinks.patience import Errand


def opened(path):
    """Read whatever is written to a FIFO, so that it answers again."""

    def read():
        with path.open("rb") as file:
            file.read()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_an_event_log_that_does_not_answer_stops_nothing_and_is_counted(
    tmp_path, start, faulty_run, monkeypatch
):
    monkeypatch.setattr("sdcwatch.sinks.dispatch.PATIENCE_SECONDS", 0.1)
    log = JsonlSink(tmp_path / EVENTS)
    dispatcher = Dispatcher(direct=[log], close_seconds=0.1)
    dispatcher.emit(start)
    log.path.rename(tmp_path / "events.jsonl.1")
    os.mkfifo(log.path)
    began = time.monotonic()
    for record in faulty_run:
        dispatcher.emit(record)
    dispatcher.close()
    assert time.monotonic() - began < 10
    assert dispatcher.counts[0].dropped["timeout"] > 0
    reader = opened(log.path)
    dispatcher.direct[0]._thread.join(20)
    log.close(0.1)
    reader.join(20)


def test_a_summary_that_cannot_be_written_keeps_nobody_and_is_written_when_it_can(
    tmp_path, monkeypatch
):
    answers = threading.Event()
    written = []

    def write(run_dir, summary):
        answers.wait(30)
        written.append(summary)

    monkeypatch.setattr("sdcwatch.sinks.jsonl.write_summary", write)
    monkeypatch.setattr(Errand.run, "__defaults__", (0.05,))
    file = SummaryFile(tmp_path)
    began = time.monotonic()
    for summary in ("first", "second", "third"):
        file.write(summary)
        assert not file.complete
    assert time.monotonic() - began < 10
    answers.set()
    deadline = time.monotonic() + 20
    while not file.complete:
        file.write("last")
        assert time.monotonic() < deadline
    assert (written[0], written[-1]) == ("first", "last")  # never two at once


def test_a_summary_on_a_full_disk_says_so_once(tmp_path, monkeypatch):
    def write(run_dir, summary):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sdcwatch.sinks.jsonl.write_summary", write)
    file = SummaryFile(tmp_path)
    file.write("summary")
    assert (file.complete, file.problem) == (False, "No space left on device")
    assert not (tmp_path / SUMMARY).exists()


def test_what_persons_have_closed_is_looked_for_without_waiting(tmp_path, start, monkeypatch):
    monkeypatch.setattr(Errand.run, "__defaults__", (0.05,))
    monkeypatch.setattr("sdcwatch.sinks.jsonl.LOOK_SECONDS", 0.0)
    so_far = RunSoFar(tmp_path)
    os.mkfifo(tmp_path / CLOSED)
    so_far.add(start)
    began = time.monotonic()
    for _ in range(20):
        assert so_far.summary.segments == 1
    assert time.monotonic() - began < 10
    if (thread := so_far._looking._thread) is not None and thread.is_alive():
        with (tmp_path / CLOSED).open("wb"):
            pass
        thread.join(20)
    (tmp_path / CLOSED).unlink()
    append_closing(
        tmp_path, Closing(instance_id="i", gpu="g", reason="replaced", by="me", time=1.0)
    )
    deadline = time.monotonic() + 20
    while so_far._closings == 0:
        assert so_far.summary.segments == 1
        assert time.monotonic() < deadline


def test_earlier_segments_that_do_not_answer_are_left_out_and_said(tmp_path, start, monkeypatch):
    monkeypatch.setattr("sdcwatch.sinks.jsonl.READ_SECONDS", 0.1)
    os.mkfifo(tmp_path / EVENTS)
    so_far = RunSoFar(tmp_path)
    assert "the file system does not answer" in so_far.problem
    so_far.add(start)
    assert so_far.summary.segments == 1
    with (tmp_path / EVENTS).open("wb"):
        pass
    (tmp_path / EVENTS).unlink()
    assert not list(tmp_path.glob("events*"))


def test_a_log_that_answers_again_lacks_nothing(tmp_path, start, faulty_run, monkeypatch):
    monkeypatch.setattr("sdcwatch.sinks.dispatch.PATIENCE_SECONDS", 0.05)
    answers = threading.Event()

    class Slow(JsonlSink):
        def _write(self, record):
            answers.wait(30)
            super()._write(record)

    plain = JsonlSink(tmp_path / "plain" / EVENTS)
    dispatcher = Dispatcher(direct=[Slow(tmp_path / EVENTS)])
    for record in faulty_run:
        dispatcher.emit(record)
        plain.emit(record)
    answers.set()
    dispatcher.close()
    plain.close(1.0)
    assert read_records(tmp_path) == read_records(tmp_path / "plain")
