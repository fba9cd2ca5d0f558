"""How reasons put ranks, names and counts into words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 8


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1 and 2", the first eight and how many more."""
    ordered = [str(rank) for rank in sorted(set(ranks))]
    if not ordered:
        return "no rank"
    if len(ordered) > _SHOWN:
        return f"ranks {', '.join(ordered[:_SHOWN])} and {len(ordered) - _SHOWN} more"
    return ("rank " if len(ordered) == 1 else "ranks ") + _joined(ordered)


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = 3
    if len(names) > shown:
        return f"{', '.join(names[:shown])} and {len(names) - shown} more"
    return _joined(names)


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 comparison", "2 comparisons"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
