"""A rank dies, leaves, stalls or does something else: each ends in a named result, in time."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Hang, Record, RunFinished, Verdict
from sdcwatch.errors import (
    EXIT_CODES,
    EXIT_CORRUPTION,
    EXIT_DESYNC,
    EXIT_HANG,
    EXIT_RANK_GONE,
    EXIT_SCHEMA,
)
from sdcwatch.guard.watchdog import WINDOW_SECONDS
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import fork_server, free_port

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]  # on a loaded machine a start takes long

SCRIPT = Path(__file__).parent / "rank_script.py"
WORLD, VICTIM, OTHERS = 3, 1, (0, 2)
DEADLINE_SECONDS = HANG_SECONDS = 2.0
BUDGET_SECONDS = HANG_SECONDS + WINDOW_SECONDS + 1.0
"""A wait, and the liveness check after it."""


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


def hangs(ended: Ended) -> list[tuple[int, tuple[int, ...]]]:
    """Who reported, and who was absent."""
    return [(hang.reporter, hang.absent) for hang in ended.of(Hang)]


@pytest.mark.parametrize(
    ("scenario", "code", "says"),
    [
        ("killed", -9, ""),
        ("left_the_process", 0, "left: the run ended after step 2"),
        ("raised", 1, "left: the run ended with ValueError after step 2"),
    ],
)
def test_a_rank_that_is_gone_is_named_by_those_whose_collective_broke(
    tmp_path: Path, scenario: str, code: int, says: str
) -> None:
    ended = play(scenario, tmp_path)
    assert ended.codes == [EXIT_RANK_GONE, code, EXIT_RANK_GONE]
    assert (0, (VICTIM,)) in hangs(ended)
    assert {absent for _, absent in hangs(ended)} <= {(VICTIM,), ()}  # () once the store has gone
    assert says in ended.of(Hang)[0].left.get(str(VICTIM), "")
    assert "rank 1 absent at the backward of step 3" in ended.stderr[0]
    assert ended.blamed == []
    assert ended.seconds < 5 * BUDGET_SECONDS


def test_the_death_of_the_rank_that_hosts_the_store_is_told_as_such(tmp_path: Path) -> None:
    ended = play("host_killed", tmp_path)
    assert ended.codes == [-9, EXIT_RANK_GONE, EXIT_RANK_GONE]
    assert {absent for _, absent in hangs(ended)} <= {(), (0,)}
    assert all("0" in hang.left or "store" in hang.left for hang in ended.of(Hang))
    assert ended.seconds < 5 * BUDGET_SECONDS


def test_a_rank_that_stalls_is_named_and_the_run_goes_on_when_it_does(tmp_path: Path) -> None:
    ended = play("stalled", tmp_path)
    assert ended.codes == [0, 0, 0]
    assert hangs(ended)
    assert {absent for _, absent in hangs(ended)} == {(VICTIM,)}
    assert "is alive, after its part in the" in ended.of(Hang)[0].left[str(VICTIM)]
    assert ended.of(Verdict) == []
    assert [f.step for f in ended.of(RunFinished)] == [5]


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("stopped_and_others_leave", ""),
        ("left_the_loop", "left: the run ended after step 2"),
    ],
)
def test_ranks_that_hang_in_a_collective_of_ddp_leave_with_a_code_if_told_to(
    tmp_path: Path, scenario: str, says: str
) -> None:
    ended = play(scenario, tmp_path, wait_for=OTHERS)
    assert ended.codes == [EXIT_HANG, None, EXIT_HANG]
    # The first look may come while the last sign of life is young: then nobody is absent yet.
    named = [h for h in ended.of(Hang) if h.absent]
    assert {tuple(h.absent) for h in named} == {(VICTIM,)}
    assert says in named[0].left.get(str(VICTIM), "")
    assert ended.seconds < 5 * BUDGET_SECONDS


def test_a_rank_that_never_calls_init_is_named(tmp_path: Path) -> None:
    ended = play("never_started", tmp_path, wait_for=OTHERS)
    assert ended.codes == [EXIT_RANK_GONE, None, EXIT_RANK_GONE]
    for rank in OTHERS:
        assert (
            "rank at sdcwatch.init, but rank 1 did not answer: rank 1 has not come to sdcwatch.init"
            in (ended.stderr[rank])
        )
    assert ended.seconds < 5 * BUDGET_SECONDS


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (
            "resumed_elsewhere",
            "rank 0: the end of the backward of step 1, rank 1: the end of the backward of step 8",
        ),
        (
            "saved_instead_of_updated",
            "rank 0: the weight check of step 2, rank 1: save_checkpoint of step 2",
        ),
    ],
)
def test_ranks_at_different_places_all_end_knowing_who_is_where(
    tmp_path: Path, scenario: str, says: str
) -> None:
    ended = play(scenario, tmp_path)
    assert ended.codes == [EXIT_DESYNC] * WORLD
    assert all(says in text for text in ended.stderr)
    assert ended.of(Verdict) == []


def test_ranks_with_different_models_all_end_with_the_name_of_the_difference(
    tmp_path: Path,
) -> None:
    ended = play("other_buffers", tmp_path)
    assert ended.codes == [EXIT_SCHEMA] * WORLD
    difference = "extra: missing on ranks 0 and 2, (2,) torch.float32 on rank 1"
    assert all(difference in text for text in ended.stderr)
    assert ended.records == []


def test_ranks_whose_weights_differ_all_end_with_the_code_of_a_finding(tmp_path: Path) -> None:
    ended = play("corrupted", tmp_path)
    assert ended.codes == [EXIT_CORRUPTION] * WORLD
    assert [[s.rank for s in verdict.suspects] for verdict in ended.blamed] == [[VICTIM]]
    assert [f.exit_code for f in ended.of(RunFinished)] == [EXIT_CORRUPTION]


RAISE = """
from sdcwatch.core.records import Check, Outcome, Verdict
from sdcwatch.errors import (CorruptionDetected, Desync, RankGone, SchemaMismatch,
                             SoftwareDivergence)
verdict = Verdict(step=1, time=0, check=Check.REPLAY, outcome=Outcome.SUSPECT, reason="")
raise {80: CorruptionDetected(verdict), 81: SchemaMismatch([]), 82: Desync({}),
       83: RankGone((1,), "", ""), 85: SoftwareDivergence(verdict)}[%d]
"""


@pytest.mark.parametrize("code", sorted(set(EXIT_CODES) - {EXIT_HANG}))
def test_an_uncaught_error_ends_the_interpreter_with_its_documented_code(code: int) -> None:
    assert subprocess.run([sys.executable, "-c", RAISE % code], timeout=50).returncode == code
