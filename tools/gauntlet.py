#!/usr/bin/env python3
"""Runs every healthy loop of tests/gauntlet plain, guarded, and guarded on a broken device.

    python tools/gauntlet.py                 # 60 steps, audit_every=5
    python tools/gauntlet.py --write         # and puts the table into docs/support.md
    python tools/gauntlet.py --only BatchNorm

Ends with 1 if a device was named in a healthy loop, an update was lost, weights or outputs are not
those of the plain run, or a broken device was not named where the coverage is full.
"""

from __future__ import annotations

import importlib
import sys
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
    """A reason as a cell of Markdown, with paths as from the root and no code read as a link."""
    return reason.replace(f"{ROOT}/", "").replace("|", r"\|").replace("](", "] (")


def page(rows: list[tuple[str, str, str]]) -> str:
    """The table as Markdown."""
    head = ["| healthy loop | coverage | reason |", "|---|---|---|"]
    lines = [f"| {name} | {coverage} | {cell(reason)} |" for name, coverage, reason in rows]
    return "\n".join([BEGIN, "", *head, *lines, "", END])


@click.command()
@click.option("--steps", default=60, help="Steps of each run.")
@click.option("--audit-every", default=5, help="Steps between two audits.")
@click.option("--only", default="", help="Loops whose name holds this.")
@click.option("--write", is_flag=True, help="Put the table into docs/support.md.")
def main(steps: int, audit_every: int, only: str, write: bool) -> None:
    """Run the gauntlet and print what each loop came to."""
    console = Console(width=140)
    table = Table("loop", "coverage", "healthy", f"rank {course.BROKEN} broken")
    rows: list[tuple[str, str, str]] = []
    problems = 0
    pool = GlooPool(course.WORLD, timeout_seconds=300.0)
    for name in sorted(course.LOOPS):
        if only not in name:
            continue
        entry = course.LOOPS[name]
        kinds = ("plain", "guarded", "broken")
        try:
            results = pool.run(gauntlet.go, course.WORLD, name, kinds, steps, audit_every)
        except RankFailed as error:  # the pool starts anew
            problems += 1
            table.add_row(name, "", str(error).splitlines()[-1], "")
            continue
        healthy = judge(gauntlet.check_healthy, entry, results)
        broken = judge(gauntlet.check_broken, entry, results)
        problems += bool(healthy) + bool(broken)
        guarded = results[0]["guarded"]
        named = sorted(gauntlet.named(results[0]["broken"]["verdicts"]))
        found = broken or (f"rank {named[0]} named" if named else "nobody named")
        row = (name, ", ".join(guarded["coverage"]), healthy or "as plain", found)
        table.add_row(*row)
        click.echo(" | ".join(row), err=True)
        whole = set(guarded["coverage"]) == {"full"}
        rows.append((name, guarded["coverage"][0], "" if whole else guarded["reason"][0]))
    pool.close()
    console.print(table)
    console.print(
        f"{len(rows)} loops, {steps} steps, audit_every={audit_every}: {problems} problems"
    )
    if write:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + page(rows) + rest.split(END)[1], encoding="utf-8")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
