from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdcwatch.core.records import Record
from sdcwatch.errors import ConfigurationError
from sdcwatch.report.read import read_run, world_size_of

WriteRun = Callable[[list[Record]], Path]


def test_a_run_is_read_back_as_it_was_written(write_run: WriteRun, story: list[Record]) -> None:
    records = read_run(write_run(story))

    assert records == story
    assert world_size_of(records) == 6


def test_a_torn_line_costs_that_line_only(write_run: WriteRun, story: list[Record]) -> None:
    run_dir = write_run(story)
    log = run_dir / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-40])

    assert read_run(run_dir) == story[:-1]


def _missing(run_dir: Path) -> Path:
    return run_dir / "nowhere"


def _a_file(run_dir: Path) -> Path:
    return run_dir / "events.jsonl"


def _no_log(run_dir: Path) -> Path:
    (run_dir / "events.jsonl").unlink()
    return run_dir


def _empty(run_dir: Path) -> Path:
    (run_dir / "events.jsonl").write_bytes(b"")
    return run_dir


def _garbage(run_dir: Path) -> Path:
    (run_dir / "events.jsonl").write_bytes(b"\x00\xffnot json\n")
    return run_dir


def _foreign(run_dir: Path) -> Path:
    (run_dir / "events.jsonl").write_text('{"hello": 1}\n', encoding="utf-8")
    return run_dir


def _parent(run_dir: Path) -> Path:
    return run_dir.parent


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "Expected the directory of a run, but got .*nowhere"),
        (_a_file, "Expected the directory of a run, but got .*events.jsonl"),
        (_no_log, "but it holds none. Pass the run_dir of a guarded run"),
        (_empty, "but got 0 records in 0 bytes. The run was stopped before"),
        (_garbage, "but got 0 records in 11 bytes"),
        (_foreign, "line 1: Expected a record with a `kind`"),
        (_parent, "Did you mean .*run"),
    ],
)
def test_a_directory_without_a_run_gives_a_sentence(
    write_run: WriteRun,
    story: list[Record],
    spoil: Callable[[Path], Path],
    message: str,
) -> None:
    run_dir = write_run(story)

    with pytest.raises(ConfigurationError, match=message):
        read_run(spoil(run_dir))
