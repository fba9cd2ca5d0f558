"""The two-word header: every operation of the guard begins with one MAX of (word, ~word).

A word is (operation, step, code). MAX of a word and of its complement gives the largest and the
smallest word of all ranks in one call; if they differ in operation or step, ranks are not at the
same place, and everybody learns it together.
"""

from __future__ import annotations

import json
from enum import IntEnum

from sdcwatch.errors import Desync
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.reporter import say

_CODE_BITS = 8
_STEP_BITS = 48


class Operation(IntEnum):
    """What a rank is about to do."""

    STEP = 1
    WEIGHTS = 2
    SAVE = 3

    @property
    def words(self) -> str:
        """As it reads in an error."""
        return {1: "the end of the backward", 2: "the weight check", 3: "save_checkpoint"}[self]


class Code(IntEnum):
    """What a rank has to say at the end of its backward; the largest of all ranks counts."""

    CLEAN = 0
    NO_RECORD = 1
    """The loop did not call guard.forward."""
    SEEN = 2
    """A non-finite value, or gradients that were not reduced."""


def agree(exchange: Exchange, operation: Operation, step: int, code: int = 0) -> int:
    """Meet all ranks at an operation of a step. Every rank calls it.

    Returns:
        The largest code of all ranks.

    Raises:
        Desync: Ranks are at different operations or steps; names who is where.
        RankGone: A rank did not answer within the deadline.
    """
    where = f"{operation.words} of step {step}"
    exchange.position(where)
    word = (((operation << _STEP_BITS) | step) << _CODE_BITS) | code
    on_device = operation is Operation.STEP
    top, complement = exchange.max_words((word, ~word), where, on_device=on_device)
    bottom = ~complement
    if top >> _CODE_BITS != bottom >> _CODE_BITS:
        rows = exchange.gather(json.dumps(where).encode(), where)
        error = Desync({rank: json.loads(row) for rank, row in enumerate(rows)})
        say(f"sdcwatch: {error}")  # uncaught it ends the process without a word, as SystemExit does
        raise error
    exchange.position(f"in the training loop after {where}")
    return top & ((1 << _CODE_BITS) - 1)


def missing_ranks(exchange: Exchange, where: str, *, here: bool) -> tuple[int, ...]:
    """The ranks that are not `here`. Every rank calls it."""
    rows = exchange.gather(b"1" if here else b"", where)
    return tuple(rank for rank, row in enumerate(rows) if not row)
