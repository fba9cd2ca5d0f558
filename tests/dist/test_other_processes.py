"""Processes that differ in what only a process can: hash seed, flush-denormal, thread count."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdcwatch.testing import fork_server, free_port

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]  # on a loaded machine a start takes long

SCRIPT = Path(__file__).with_name("other_process.py")
WORLD = 3
ODD = {"string_hash": 1, "flush_denormal": 2, "threads": 0}
"""The rank that differs in each fact."""
SECONDS = 120.0


def train(folder: Path) -> list[int | None]:
    """Exit codes of all ranks; None for one that had to be ended."""
    port = free_port()
    other = {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") != "2" else "1"}
    end = time.monotonic() + SECONDS
    with (folder / "stderr").open("wb") as errors:
        alone = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(ODD["string_hash"]), str(port), str(folder)],
            env={**os.environ, **other},
            stdout=errors,
            stderr=errors,
        )
    alike = [
        fork_server().Process(
            target=runpy.run_path,
            args=(str(SCRIPT),),
            kwargs={
                "init_globals": {"RANK": rank, "PORT": port, "RUN_DIR": str(folder)},
                "run_name": "rank",
            },
        )
        for rank in range(WORLD)
        if rank != ODD["string_hash"]
    ]
    try:
        for process in alike:
            process.start()
        for process in alike:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in alike]
        return [*codes, alone.wait(max(0.1, end - time.monotonic()))]
    finally:
        alone.kill()
        alone.wait()
        for process in alike:
            process.kill()
            process.join()
            process.close()


def test_a_process_that_differs_is_left_out_with_the_fact_that_separates_it_and_not_named(
    tmp_path: Path,
) -> None:
    assert train(tmp_path) == [0] * WORLD, (tmp_path / "stderr").read_text()
    for rank in range(WORLD):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text(encoding="utf-8"))
        assert told.keys() == ODD.keys()
        for fact, odd in ODD.items():
            case = told[fact]
            assert case["named"] == []
            assert case["left_out"] == [[odd]]
            outcome, cause, ranks, reason = case["said"][0]
            assert (outcome, cause, ranks) == ("differs", "software", [odd]), reason
            assert f"{fact} differs" in reason
            assert all(other == fact or f"{other} differs" not in reason for other in ODD), reason
