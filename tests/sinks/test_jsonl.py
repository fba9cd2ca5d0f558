import json

import pytest

from sdcwatch.core.records import encode
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
