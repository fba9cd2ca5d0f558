#!/usr/bin/env python3
"""Runs every healthy loop of tests/gauntlet plain, guarded, and guarded on a broken device.

    python tools/gauntlet.py                 # 60 steps, audit_every=5
    python tools/gauntlet.py --write         # and puts the table into docs/support.md
    python tools/gauntlet.py --part 2/10     # the second tenth of the loops
    python tools/gauntlet.py --only BatchNorm

What a part finds replaces its own rows of the table, so that parts add up to the whole.

Ends with 1 if a device was named in a healthy loop, an update was lost, weights or outputs are not
those of the plain run, a broken device was not named where the coverage is full, or any was where
it is not.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sdcwatch.testing import GlooPool, RankFailed

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gauntlet"), str(ROOT)]

gauntlet = importlib.import_module("test_gauntlet")
course = importlib.import_module("course")

PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- gauntlet: tools/gauntlet.py --write -->", "<!-- end of gauntlet -->"


def judge(check: Any, *arguments: Any) -> str:
    """What a check of the test file says, "" if it holds."""
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


def cell(reason: str) -> str:
    """A reason as a cell of Markdown: no code read as a link, no line that the next edit moves."""
    reason = re.sub(r"(tests/gauntlet/\w+\.py):\d+", r"\1", reason.replace(f"{ROOT}/", ""))
    return reason.replace("|", r"\|").replace("](", "] (")


def page(rows: dict[str, str]) -> str:
    """The table as Markdown."""
    head = ["| healthy loop | coverage | reason |", "|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *(rows[name] for name in sorted(rows)), "", END])


def write(rows: dict[str, str]) -> None:
    """Put rows into the page; those of loops that did not run now stay, unless the loop is gone."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()[4:]}
    rows = {name: line for name, line in {**kept, **rows}.items() if name in course.LOOPS}
    PAGE.write_text(before + page(rows) + after, encoding="utf-8")


def chosen(only: str, part: str) -> list[str]:
    """Names of loops that hold `only`, and of these every tenth from the second, for "2/10"."""
    names = sorted(name for name in course.LOOPS if only in name)
    number, of = map(int, part.split("/"))
    return names[number - 1 :: of]


class Runs:
    """Runs loops on the pool of the size that each asks for."""

    def __init__(self, steps: int, audit_every: int) -> None:
        self._how = steps, audit_every
        self._pools: dict[int, GlooPool] = {}

    def __call__(self, ranks: int, name: str, *kinds: str) -> list[dict[str, Any]]:
        """What each rank says of each kind of run, as `course.arms` returns it."""
        if ranks not in self._pools:
            self._pools[ranks] = GlooPool(ranks, timeout_seconds=300.0)
        found: list[dict[str, Any]] = self._pools[ranks].run(
            gauntlet.go, ranks, name, kinds, *self._how
        )
        return found

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@click.command()
@click.option("--steps", default=60, help="Steps of each run.")
@click.option("--audit-every", default=5, help="Steps between two audits.")
@click.option("--only", default="", help="Loops whose name holds this.")
@click.option("--part", default="1/1", help="One of so many equal parts of the loops: 2/10.")
@click.option("--write", "keep", is_flag=True, help="Put the rows into docs/support.md.")
def main(steps: int, audit_every: int, only: str, part: str, keep: bool) -> None:
    """Run the gauntlet and print what each loop came to."""
    console = Console(width=140)
    table = Table("loop", "coverage", "healthy", "one rank broken", "seconds")
    problems = 0
    runs = Runs(steps, audit_every)
    for name in chosen(only, part):
        entry, began = course.LOOPS[name], time.monotonic()
        try:
            healthy = runs(course.WORLD, name, "plain", "guarded")
            broken = runs(entry.ranks, name, "broken")
        except RankFailed as error:  # the pool starts anew
            problems += 1
            row = (name, "", str(error).strip().splitlines()[-1], "", "")
        else:
            wrong = judge(gauntlet.check_healthy, entry, healthy)
            missed = judge(gauntlet.check_broken, entry, broken)
            problems += bool(wrong) + bool(missed)
            guarded = healthy[0]["guarded"]
            named = sorted(gauntlet.named(broken[0]["broken"]["verdicts"]))
            found = missed or (f"rank {named[0]} named" if named else "nobody named")
            coverage, reason = guarded["coverage"][0], guarded["reason"][0]
            why = "" if set(guarded["coverage"]) == {"full"} else cell(reason)
            if keep:  # at once, so that a run that is ended keeps what it has
                write({name: f"| {name} | {coverage} | {why} |"})
            seconds = f"{time.monotonic() - began:.0f}"
            row = (name, ", ".join(guarded["coverage"]), wrong or "as plain", found, seconds)
        table.add_row(*row)
        click.echo(" | ".join(row), err=True)
    runs.close()
    console.print(table)
    console.print(
        f"{len(table.rows)} loops, {steps} steps, audit_every={audit_every}: {problems} problems"
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
