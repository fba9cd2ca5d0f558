"""The simulation of scale at a size that takes seconds: the same code says whether limits hold."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_limits_hold_in_every_situation_at_a_thousand_ranks() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/scale.py", "--worlds", "64", "1024", "--seconds", "30"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    *rows, last = (x for x in run.stdout.splitlines() if not x.startswith("[Gloo]"))  # torch 2.8's
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    assert last.startswith("The limits hold up to 1,024 ranks")
    assert sum(row.startswith("| 1,024 |") for row in rows) == 13
