"""Sets of ranks in the store: each adds its bit to a counter once, however many ranks there are."""

from __future__ import annotations

from typing import Any

RANKS_PER_WORD = 62
"""Ranks per counter of a bitmap: the store counts in signed 64-bit integers."""


def mark(store: Any, bitmap: str, rank: int) -> None:
    """Put a rank into a set; once only, for its bit is added."""
    word, bit = divmod(rank, RANKS_PER_WORD)
    store.add(f"{bitmap}/{word}", 1 << bit)


def marked(store: Any, bitmap: str, world_size: int) -> set[int]:
    """The ranks that are in a set: a request for every `RANKS_PER_WORD` ranks."""
    found = set()
    for word in range(-(-world_size // RANKS_PER_WORD)):
        bits = store.add(f"{bitmap}/{word}", 0)
        found |= {word * RANKS_PER_WORD + bit for bit in range(RANKS_PER_WORD) if bits >> bit & 1}
    return found
