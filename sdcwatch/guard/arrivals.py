"""How ranks meet: counted in the store, so that who does not come is named within the deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sdcwatch.core.waiting import SHOWN_NOTES, Finding
from sdcwatch.guard.bitmap import mark, marked
from sdcwatch.guard.watchdog import STORE_SECONDS, bounded

ARRIVED = "arrived"
_NOT_HERE = "has not come to sdcwatch.init, which every rank must call, or was refused there"


class Arrivals:
    """How all ranks of one exchange meet; a rank makes a few requests, however many there are.

    Args:
        store: A corner of the store that all ranks of one exchange share and nobody else uses.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def meet(self, deadline_seconds: float) -> tuple[Finding | None, str]:
        """Arrive, and wait for the others. Every rank calls it.

        Returns:
            None once all have come; else who has not, and what went wrong.
        """

        def arrive() -> None:
            mark(self._store, ARRIVED, self._rank)
            if self._store.add("started", 1) == self._world_size:
                self._store.set("everyone", "1")
            self._store.wait(["everyone"], timedelta(seconds=deadline_seconds))

        _, problem = bounded(arrive, deadline_seconds + STORE_SECONDS)
        if not problem:
            return None, ""
        missing, unknown = bounded(self._who_is_missing, 2 * STORE_SECONDS)
        bounded(lambda: self._let_others_read(missing or ()), STORE_SECONDS)
        missing = missing or ()
        notes = dict.fromkeys(missing[:SHOWN_NOTES], _NOT_HERE)
        return Finding(silent=missing, notes=notes, store_error=unknown), problem

    def _who_is_missing(self) -> tuple[int, ...]:
        """The first that asks reads the bitmap, the others read what it found."""
        if self._store.add("looks", 1) > 1:
            self._store.wait(["missing"], timedelta(seconds=STORE_SECONDS))
            return tuple(r for r in json.loads(self._store.get("missing")) if r != self._rank)
        missing = self._not_arrived()
        self._store.set("missing", json.dumps(missing))
        return missing

    def _not_arrived(self) -> tuple[int, ...]:
        here = marked(self._store, ARRIVED, self._world_size)
        return tuple(rank for rank in range(self._world_size) if rank not in here)

    def _let_others_read(self, missing: Sequence[int]) -> None:
        """Leave last if this rank may host the store, so that all others learn who is missing."""
        self._store.add("read", 1)
        end = time.monotonic() + STORE_SECONDS
        while self._rank == 0 and time.monotonic() < end:
            if self._store.add("read", 0) >= self._world_size - len(missing):
                return
            time.sleep(0.05)
