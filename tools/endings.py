"""Plays endings of runs again and again: ``python tools/endings.py [OPTION] [TIMES]``.

An ending that hangs or aborts once in ten times shows only so. Without an option, every ending of
tests/endings, and how many times all were right; with ``--launched``, those under torchrun alone,
before a real Prometheus, Alertmanager, webhook and W&B, and a table: of each ending, how many times
it was right, and the seconds from what happened until rank 0 was gone. ``--moments`` plays so many
runs in which a rank is busy and another is killed at moments drawn from a seed, and ``--ranks`` the
test of 256 ranks with 20 audits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import median

TESTS = Path(__file__).parents[1] / "tests" / "endings"
LAUNCHED = TESTS / "test_launched.py"
MOMENTS = TESTS / "test_moments.py"
RANKS = TESTS.parent / "guard" / "test_many_ranks.py"


def play(tests: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run tests once, with more in the environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tests)]
    environment = {**os.environ, **more}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What pytest came to."""
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else done.stderr[-200:]


def all_endings(times: int) -> int:
    """Play every ending; returns how often not all were right."""
    failed = 0
    for number in range(1, times + 1):
        done = play(TESTS)
        failed += done.returncode != 0
        print(f"{number} of {times}: {last_line(done)}", flush=True)
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED", "ERROR")):
                print(f"  {line}", flush=True)
    print(f"{times - failed} of {times} passed")
    return failed


def launched(times: int) -> int:
    """Play the endings under torchrun and print the table; returns how many were not right."""
    right: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    failed = 0
    for number in range(1, times + 1):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            # The other family takes no properties, and says so with a warning: an error here.
            done = play(LAUNCHED, f"--junitxml={report}", "-o", "junit_family=xunit1")
            cases = ET.parse(report).iter("testcase")
        print(f"{number} of {times}: {last_line(done)}", flush=True)
        for case in cases:
            passed = not any(case.find(kind) is not None for kind in ("failure", "error"))
            name = _row(case.get("name", ""))
            right[name] = right.get(name, 0) + passed
            failed += not passed
            for one in case.iter("property"):
                seconds.setdefault(name, []).append(float(one.get("value", "nan")))
            if not passed:
                print(f"  {case.get('name')}: {_why(case)}", flush=True)
    print(f"\n{'ending':50} {'right':>9} {'seconds: median':>16} {'longest':>8}")
    for name, count in right.items():
        took = seconds.get(name)
        times_of = f"{median(took):16.1f} {max(took):8.1f}" if took else ""
        print(f"{name:50} {f'{count} of {times}':>9} {times_of}".rstrip())
    return failed + any(count != times for count in right.values()) + (not right)


def larger(tests: Path, **more: str) -> int:
    """Play a test at a size that would take too long each time; returns whether it failed."""
    done = play(tests, **more)
    print(done.stdout if done.returncode else last_line(done), flush=True)
    return done.returncode


def _why(case: ET.Element) -> str:
    """The end of what went wrong."""
    found = (case.find(kind) for kind in ("failure", "error"))
    return next((one.get("message", "")[-1500:] for one in found if one is not None), "")


def _row(test: str) -> str:
    """The ending alone, where the test is about one in every respect."""
    name, _, ending = test.removesuffix("]").partition("[")
    if name.startswith("test_under_torchrun"):
        return ending
    return name.removeprefix("test_").replace("_", " ")[:38] + (f" [{ending}]" if ending else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("times", type=int, nargs="?", default=10)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--launched", action="store_true", help="those under torchrun alone")
    which.add_argument("--moments", action="store_true", help="a busy and a killed rank")
    which.add_argument("--ranks", action="store_true", help="256 ranks and 20 audits, once")
    options = parser.parse_args()
    if options.moments:
        return larger(MOMENTS, SDCWATCH_MOMENTS=str(options.times))
    if options.ranks:
        return larger(RANKS, SDCWATCH_AUDITS="20")
    return int((launched if options.launched else all_endings)(options.times) > 0)


if __name__ == "__main__":
    sys.exit(main())
