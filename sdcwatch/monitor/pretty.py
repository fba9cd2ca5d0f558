"""PromQL for people: a line per operand of a set operator, indented by depth."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    (?P<string>"(?:\\.|[^"\\])*")
  | (?P<open>\()
  | (?P<close>\))
  | (?P<set>\ (?:or|and|unless)\ )
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
SHORT = 100


def pretty(expression: str) -> str:
    """The same expression with line breaks; short ones stay on one line."""
    if len(expression) <= SHORT:
        return expression
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(expression):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth -= 1
        if token["set"]:
            parts.append(f"\n{'  ' * depth}{token['set'].lstrip()}")
        else:
            parts.append(token[0])
    return "".join(parts)
