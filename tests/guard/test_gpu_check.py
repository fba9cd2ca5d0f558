"""The script for the day a GPU is at hand: here it runs on the CPU, and says that it did."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_for_a_gpu_runs_on_a_cpu_and_does_not_take_it_for_one() -> None:
    run = subprocess.run(
        [sys.executable, "tools/gpu_check.py", "--device", "cpu"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    *rows, last = run.stdout.splitlines()
    assert run.returncode == 0, run.stdout + run.stderr
    assert [row[:4] for row in rows if row.startswith(("ok", "FAIL"))] == ["ok  "] * 4
    assert "no GPU: the CPU" in last
