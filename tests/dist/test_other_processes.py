"""Processes that differ in what only a process can: hash seed, flush-denormal, thread count."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("other_process.py")
WORLD, ODD = 3, 1
ALIKE = {"PYTHONHASHSEED": "1", "THREADS": "1", "FLUSH": "0", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"PYTHONHASHSEED": "2"}, "string_hash"),
        ({"FLUSH": "1"}, "flush_denormal"),
        ({"THREADS": "2"}, "threads"),
    ],
    ids=["hash seed", "flush-denormal", "thread count"],
)
def test_a_process_that_differs_is_left_out_with_the_fact_that_separates_it_and_not_named(
    tmp_path: Path, changed: dict[str, str], fact: str
) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            env={**os.environ, **ALIKE, **meet, "RANK": str(r), **(changed if r == ODD else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * WORLD, outputs
    for out, _ in outputs:
        told = json.loads(out.splitlines()[-1])
        assert told["named"] == []
        assert told["left_out"] == [[ODD]]
        outcome, cause, ranks, reason = told["said"][0]
        assert (outcome, cause, ranks) == ("differs", "software", [ODD])
        assert f"{fact} differs" in reason
