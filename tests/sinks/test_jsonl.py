import gzip
import json
import runpy
from pathlib import Path

import pytest

from sdcwatch.core.records import Note, Progress, SkipReason, UpdateSkipped, encode
from sdcwatch.sinks.jsonl import JsonlSink, read_records


def write(path, records, **options):
    sink = JsonlSink(path, **options)
    for record in records:
        sink.emit(record)
    sink.close(1.0)


def test_records_come_back_as_they_went_in(tmp_path, faulty_run):
    write(tmp_path / "events.jsonl", faulty_run)

    assert sorted(faulty_run, key=lambda r: r.time) == read_records(tmp_path)


def test_a_line_is_on_disk_when_emit_returns(tmp_path, start):
    sink = JsonlSink(tmp_path / "deep" / "events.jsonl")

    sink.emit(start)

    assert sink.path.read_text() == encode(start) + "\n"
    sink.close(1.0)


def test_a_restart_appends(tmp_path, faulty_run):
    write(tmp_path / "events.jsonl", faulty_run)
    write(tmp_path / "events.jsonl", faulty_run)

    assert len(read_records(tmp_path)) == 2 * len(faulty_run)


def test_a_torn_last_line_is_passed_over_and_the_next_segment_starts_on_a_fresh_one(
    tmp_path, faulty_run
):
    path = tmp_path / "events.jsonl"
    write(path, faulty_run[:3])
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)

    assert read_records(tmp_path) == faulty_run[:2]

    write(path, faulty_run[3:5])

    assert read_records(tmp_path) == [*faulty_run[:2], *faulty_run[3:5]]
    assert path.read_bytes().startswith(torn)


def test_logs_of_several_ranks_are_read_in_order_of_time(tmp_path, faulty_run):
    write(tmp_path / "events.jsonl", faulty_run[::2])
    write(tmp_path / "events-rank3.jsonl", faulty_run[1::2])

    assert sorted(faulty_run, key=lambda r: r.time) != []
    assert [r.time for r in read_records(tmp_path)] == sorted(r.time for r in faulty_run)


def test_only_the_wanted_kinds_are_written(tmp_path, faulty_run):
    write(tmp_path / "events.jsonl", faulty_run, kinds=("skip",))

    kinds = {
        json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()
    }
    assert kinds == {"skip"}


def test_a_log_that_wants_nothing_makes_no_file(tmp_path, faulty_run):
    write(tmp_path / "events.jsonl", faulty_run, kinds=("hang",))

    assert not (tmp_path / "events.jsonl").exists()


def test_a_line_of_a_newer_schema_is_named_and_not_passed_over(tmp_path, start):
    line = encode(start).replace('"schema":2', '"schema":99')
    (tmp_path / "events.jsonl").write_text(line + "\n")

    with pytest.raises(ValueError, match=r"events.jsonl, line 1: Expected schema <= 2"):
        read_records(tmp_path)


def test_a_directory_without_a_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected events\*.jsonl in"):
        read_records(tmp_path)


def _second(step: int) -> Progress:
    return Progress(step=step, time=float(step), first_step=step, plain_steps=1)


def test_an_hour_is_a_few_hundred_lines_and_no_step_of_it_is_lost(tmp_path):
    log = JsonlSink(tmp_path / "events.jsonl")
    for step in range(1, 3601):
        log.emit(_second(step))
    log.emit(Note(step=3600, time=3600.0, code="x", message="y"))

    *progress, note = read_records(tmp_path)

    assert note.kind == "note"  # and what was held has gone before it
    assert sum(r.plain_steps for r in progress) == progress[-1].step == 3600
    assert len(progress) < 400
    log.close(1.0)


def test_a_day_of_ten_steps_a_second_stays_under_ten_megabytes(tmp_path):
    day = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "day.py"))

    size, steps = day["write"](tmp_path, seconds=1200, first=1800)  # as all hours from then on

    assert steps == 12_000
    assert 72 * size < 9_000_000


def test_a_run_that_skips_every_step_writes_few_lines_of_progress(tmp_path):
    log = JsonlSink(tmp_path / "events.jsonl")
    for step in range(1, 3601):
        log.emit(_second(step))
        log.emit(
            UpdateSkipped(step=step, time=float(step), reason=SkipReason.SCALER, consecutive=step)
        )
    log.close(1.0)

    records = read_records(tmp_path)

    progress = [r for r in records if isinstance(r, Progress)]
    assert len(records) - len(progress) == 3600
    assert sum(r.plain_steps for r in progress) == 3600
    assert len(progress) < 3600 / 4


def test_what_is_held_is_written_at_the_end(tmp_path):
    log = JsonlSink(tmp_path / "events.jsonl")
    for step in range(1, 200):
        log.emit(_second(step))
    log.close(1.0)

    assert sum(r.plain_steps for r in read_records(tmp_path)) == 199


@pytest.mark.parametrize("compress", [False, True])
def test_a_rotated_log_loses_nothing(tmp_path, faulty_run, compress):
    path = tmp_path / "events.jsonl"
    log = JsonlSink(path)
    half = len(faulty_run) // 2
    for record in faulty_run[:half]:
        log.emit(record)
    moved = path.rename(tmp_path / "events.jsonl.1")
    for record in faulty_run[half:]:
        log.emit(record)
    log.close(1.0)
    if compress:
        (tmp_path / "events.jsonl.1.gz").write_bytes(gzip.compress(moved.read_bytes()))
        moved.unlink()

    assert path.is_file()
    assert read_records(tmp_path) == sorted(faulty_run, key=lambda r: r.time)


def test_a_log_truncated_after_a_copy_goes_on_at_its_start(tmp_path, faulty_run):
    path = tmp_path / "events.jsonl"
    log = JsonlSink(path)
    log.emit(faulty_run[0])
    (tmp_path / "events.jsonl.1").write_bytes(path.read_bytes())
    path.write_bytes(b"")
    log.emit(faulty_run[1])
    log.close(1.0)

    assert read_records(tmp_path) == faulty_run[:2]
