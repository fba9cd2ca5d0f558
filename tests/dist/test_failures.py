"""A rank dies, leaves, stalls or does something else: each ends in a named result, in time."""

from __future__ import annotations

import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Hang, Record, Verdict
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import fork_server, free_port

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parent / "rank_script.py"
WORLD, VICTIM, OTHERS = 3, 1, (0, 2)
DEADLINE_SECONDS = HANG_SECONDS = 2.0
BUDGET_SECONDS = HANG_SECONDS + DEADLINE_SECONDS + 1.0
"""A wait, and the roll-call after it."""


@dataclass
class Ended:
    """How a scenario ended.

    Attributes:
        codes: Exit code of each rank; None for one that had to be ended.
        stderr: What each rank said.
        records: Those of all ranks.
        seconds: From when it happened until the last of the others was gone.
    """

    codes: list[int | None]
    stderr: list[str]
    records: list[Record]
    seconds: float

    def of(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.records if isinstance(r, kind)]

    @property
    def blamed(self) -> list[Verdict]:
        return [v for v in self.of(Verdict) if v.suspects]


def play(scenario: str, run_dir: Path, *, wait_for: tuple[int, ...] = (0, 1, 2)) -> Ended:
    """Run a scenario; ranks that are not waited for are ended when the others have gone."""
    context = fork_server()
    port = free_port()
    processes = []
    for rank in range(WORLD):
        given = {"SCENARIO": scenario, "RANK": rank, "WORLD": WORLD, "PORT": port}
        processes.append(
            context.Process(
                target=runpy.run_path,
                args=(str(SCRIPT),),
                kwargs={"init_globals": {**given, "RUN_DIR": str(run_dir)}, "run_name": "rank"},
            )
        )
        processes[-1].start()
    end = time.monotonic() + 100.0
    try:
        for rank in wait_for:
            processes[rank].join(max(0.1, end - time.monotonic()))
        gone = time.time()
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    happened = run_dir / "happened"
    return Ended(
        codes,
        [(run_dir / f"stderr-{rank}").read_text() for rank in range(WORLD)],
        read_records(run_dir) if list(run_dir.glob("events*.jsonl")) else [],
        gone - happened.stat().st_mtime if happened.exists() else 0.0,
    )


def absent_in(hang: Hang) -> tuple[tuple[int, ...], str]:
    return hang.absent, " ".join(hang.left.values())
