"""What is made of the collectives of an `Exchange`: values as JSON, a few ranks' words, a tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sdcwatch.guard.exchange import NEUTRAL, Exchange


def gather_json(
    exchange: Exchange, value: object, operation: str, *, extra_seconds: float = 0.0
) -> list[Any]:
    """Every rank's value, in rank order, after a way through JSON. Every rank calls it.

    See `Exchange.gather`.
    """
    rows = exchange.gather(json.dumps(value).encode(), operation, extra_seconds=extra_seconds)
    return [json.loads(row) for row in rows]


_WORD_BYTES = 7
"""Bytes in a shared word: it is never negative, so that it wins over a rank that has none."""


def share_bytes(
    exchange: Exchange,
    own: Mapping[int, bytes],
    slots: int,
    operation: str,
    *,
    extra_seconds: float = 0.0,
) -> list[bytes]:
    """What a few ranks have to say, on every rank. Every rank calls it.

    Two MAX all-reduces, of one word per slot and of the words of all slots: what crosses does not
    grow with the number of ranks.

    Args:
        exchange: Between the ranks.
        own: This rank's message by slot. No two ranks fill the same one.
        slots: How many there are.
        operation: What is being done, for errors.
        extra_seconds: Added to the first deadline.

    Returns:
        The message of every slot; no bytes where no rank filled it.
    """
    lengths = exchange.max_int64s(
        [len(own.get(slot, b"")) for slot in range(slots)], operation, extra_seconds=extra_seconds
    )
    words: list[int] = []
    for slot, length in enumerate(lengths):
        message = own.get(slot)
        for start in range(0, length, _WORD_BYTES):
            part = None if message is None else message[start : start + _WORD_BYTES]
            words.append(NEUTRAL if part is None else int.from_bytes(part, "little"))
    if not words:
        return [b""] * slots
    shared = iter(exchange.max_int64s(words, operation))
    messages = []
    for length in lengths:
        count = -(-length // _WORD_BYTES)
        data = b"".join(next(shared).to_bytes(8, "little")[:_WORD_BYTES] for _ in range(count))
        messages.append(data[:length])
    return messages


def spread(exchange: Exchange, message: torch.Tensor, operation: str) -> torch.Tensor:
    """The bytes of rank 0 on every rank, along a binomial tree. Every rank calls it.

    Each rank receives once and sends at most log2 of the world size times.

    Args:
        exchange: Moves them.
        message: uint8 (n,) on rank 0; of the others it is not looked at.
        operation: For errors.
    """
    me, world, reached = exchange.rank, exchange.world_size, 1
    while reached < world:
        sends = me < reached and me + reached < world
        receives = reached <= me < 2 * reached
        outgoing = {me + reached: message} if sends else {}
        incoming = [me - reached] if receives else []
        received = exchange.route(outgoing, incoming, operation)
        message = received[me - reached] if receives else message
        reached *= 2
    return message
