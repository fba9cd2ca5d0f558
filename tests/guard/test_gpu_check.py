"""The script for the day a GPU is at hand: here it runs on the CPU, and says that it did."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _own_lines(text: str) -> list[str]:
    """Without what torch's profiler, and the gloo of torch 2.8, write there."""
    return [line for line in text.splitlines() if not line.startswith(("USDT", "[Gloo]"))]


@pytest.mark.timeout(240)
def test_the_script_for_a_gpu_runs_on_a_cpu_and_does_not_take_it_for_one() -> None:
    run = subprocess.run(
        [sys.executable, "tools/gpu_check.py", "--device", "cpu"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    head, _, *rows, _, last = _own_lines(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert head == "| what | seen | |"
    marks = [row.split(" | ")[-1] for row in rows]
    # Figures and what only a GPU has are not wanted to be anything.
    assert marks == ["ok |"] * 3 + [" |"] * 2 + ["ok |"] * 3 + [" |"] * 5, run.stdout
    assert "no GPU: the CPU" in last
