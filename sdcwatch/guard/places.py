"""Which run directory a guard writes to, where a job has several guards.

Two guards of one script, or of two groups of ranks, would write one event log, and read it as one
run. The store knows who is where, and forgets it with the job.
"""

from __future__ import annotations

from typing import Any

from sdcwatch.guard.watchdog import STORE_SECONDS, bounded


class Place:
    """A directory with a number behind it, which one guard of the job has for itself.

    Args:
        store: A corner of the store that all guards of the job share.
        name: Of the directory, and of the host.

    Attributes:
        number: 1 for the first guard there, 2 for the next one.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self.number, self._released = 1, False
        while self._store.add(self._key, 1) > 1:
            self._store.add(self._key, -1)
            self.number += 1

    @property
    def _key(self) -> str:
        return f"{self._name}/{self.number}"

    def release(self) -> None:
        """Another guard may have it; a lost store is no error. Once is enough."""
        if not self._released:
            self._released = True
            bounded(lambda: self._store.add(self._key, -1), STORE_SECONDS)


def apart(first_rank: int, number: int) -> str:
    """What stands behind the name of a run that is not the job's only one, or "".

    Groups start at the same time, guards of one group one after the other: a number alone would
    name another group after a restart.

    Args:
        first_rank: The first global rank of its group.
        number: Which guard of the job it is, with this name.
    """
    group = f"-from-rank-{first_rank}" if first_rank else ""
    return group + (f"-{number}" if number > 1 else "")
