"""docs/support.md: every row of its table has a test, and refusals are quoted as raised."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
TABLE = PAGE.split("| what | |")[1].split("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines()[2:]]


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def loops() -> set[str]:
    """Names of the gauntlet's loops: whatever it enters by a name or from a dictionary."""
    found: set[str] = set()
    for path in (ROOT / "tests" / "gauntlet").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "loop":
                found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
                found |= {k.value for k in node.value.keys if isinstance(k, ast.Constant)}
    return found


def texts() -> Iterator[str]:
    """Every string of the package; what an f-string fills in is left open."""
    for path in (ROOT / "sdcwatch").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_test(row: list[str]) -> None:
    what, state, how, tests = row
    assert what
    assert how
    assert state in ("supported", "refused", "not covered")
    for one in tests.split("; "):
        if one.startswith("gauntlet: "):
            assert one.removeprefix("gauntlet: ") in loops()
        else:
            path, _, name = one.strip("`").partition("::")
            assert name in functions_of(path)


def test_what_is_refused_is_quoted_as_it_is_raised() -> None:
    refused = [how for _, state, how, _ in ROWS if state == "refused"]
    raised = [re.sub(r"\s+", " ", text) for text in texts() if text.startswith("Expected ")]
    assert len(refused) >= 10
    for text in refused:
        assert any(one.startswith(text) for one in raised), text
