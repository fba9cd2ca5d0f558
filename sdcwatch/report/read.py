"""Reads the records of a run for people: every way in which there are none has a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdcwatch.core.records import Record, RunStarted
from sdcwatch.core.thinning import thin
from sdcwatch.errors import ConfigurationError
from sdcwatch.sinks.jsonl import event_files, stream_records


def require_run(run_dir: Path) -> tuple[Path, ...]:
    """The event logs of a run.

    Raises:
        ConfigurationError: The directory does not exist or holds none.
    """
    if not run_dir.is_dir():
        msg = f"Expected the directory of a run, but got {run_dir}, which is none. Check the path."
        raise ConfigurationError(msg)
    files = event_files(run_dir)
    if not files:
        near = sorted(p.parent for p in run_dir.glob("*/events.jsonl"))
        do = f"Did you mean {near[-1]}?" if near else "Pass the run_dir of a guarded run."
        msg = f"Expected events.jsonl in {run_dir}, but it holds none. {do}"
        raise ConfigurationError(msg)
    return files


def read_run(run_dir: Path) -> list[Record]:
    """The records of a run, ordered by time; of a long run neighbouring progress is merged.

    Raises:
        ConfigurationError: The directory does not exist, holds no event log, or its log holds no
            record of this package.
    """
    files = require_run(run_dir)
    try:
        records = thin(stream_records(run_dir))
    except (OSError, ValueError) as error:
        msg = f"Expected records of sdcwatch in {run_dir}, but got: {error}"
        raise ConfigurationError(msg) from error
    if not any(isinstance(r, RunStarted) for r in records):
        size = sum(p.stat().st_size for p in files)
        msg = (
            f"Expected a start record in {files[0]}, but got {len(records)} records in "
            f"{size} bytes. The run was stopped before the guard was ready, or the log that began "
            "with it was rotated away; look at its log."
        )
        raise ConfigurationError(msg)
    return records


def world_size_of(records: Sequence[Record]) -> int:
    """Number of ranks, as the start records say."""
    return max(len(r.ranks) for r in records if isinstance(r, RunStarted))
