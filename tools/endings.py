"""Plays every ending of tests/endings again and again: ``python tools/endings.py [TIMES]``.

An ending that hangs or aborts once in ten times shows only so. Prints how many of each passed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "endings"


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    failed = 0
    for number in range(1, times + 1):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        failed += done.returncode != 0
        print(f"{number} of {times}: {lines[-1] if lines else done.stderr[-200:]}", flush=True)
        for line in lines:
            if line.startswith("FAILED"):
                print(f"  {line}", flush=True)
    print(f"{times - failed} of {times} passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
