"""Error messages in the house form: expected, got, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from sdcwatch.errors import ConfigurationError


def expect(condition: bool, expected: str, got: object, do: str) -> None:
    """Raise `ConfigurationError` in the house form unless `condition` holds."""
    if not condition:
        msg = f"Expected {expected}, but got {got!r}. {do}"
        raise ConfigurationError(msg)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known ones, or the first few."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Use one of {names[:8]!r}{' and others' if len(names) > 8 else ''}."
