"""docs/protocol.md lists every collective of the guard; held against the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLLECTIVES = {
    "max_int64s",
    "max_and_read",
    "gather",
    "gather_json",
    "share_bytes",
    "route",
    "connect",
    "agree",
    "agree_on_device",
    "missing_ranks",
}


ANOTHER_FORM = {"sharing.gather_json"}
"""Of `gather`: whoever calls it is listed."""


def issued_in_the_code() -> set[str]:
    """``module.function`` for every function of the guard that issues a collective."""
    found = set()
    for path in sorted((ROOT / "sdcwatch" / "guard").glob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                if name in COLLECTIVES:
                    found.add(f"{path.stem}.{function.name}")
    return found - ANOTHER_FORM


def listed_in_the_docs() -> set[str]:
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = text.split("## Every collective")[1].split("\n\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    return {name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row.split("|")[-2])}


def test_every_function_that_issues_a_collective_is_in_the_table() -> None:
    assert issued_in_the_code() - listed_in_the_docs() == set()


def test_the_table_names_no_function_that_issues_none() -> None:
    assert listed_in_the_docs() - issued_in_the_code() == set()
