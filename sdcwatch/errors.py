"""Every error of sdcwatch, in one tree.

::

    SdcwatchError                    misuse of the library, or an environment that cannot serve it
    ├── ConfigurationError           an argument that cannot work (also a ValueError)
    ├── SchemaMismatch       exit 81 ranks hold different models
    ├── Desync               exit 82 ranks are at different steps or operations
    └── RankGone             exit 83 one or more ranks did not answer within the deadline
    CorruptionDetected       exit 80 a finding: carries the verdict that was reached
    └── SoftwareDivergence   exit 85 a finding about software or data, and about no device

``on_hang="exit"`` ends a process that hangs inside a collective of DDP with exit code 84.

Those that stop a run derive from `SystemExit` as well as from `Exception`: left uncaught they
end the process with a code of their own, so that a launcher can tell a finding from a crash, and
``except Exception`` still catches them. The guard prints the finding before it raises, whatever
`console` says.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sdcwatch.core.records import Verdict

EXIT_CORRUPTION = 80
EXIT_SCHEMA = 81
EXIT_DESYNC = 82
EXIT_RANK_GONE = 83
EXIT_HANG = 84
EXIT_SOFTWARE = 85

EXIT_CODES: Mapping[int, str] = {
    EXIT_CORRUPTION: "corruption was detected and the policy says stop",
    EXIT_SCHEMA: "ranks hold different models",
    EXIT_DESYNC: "ranks are at different steps or operations",
    EXIT_RANK_GONE: "a rank did not answer within the deadline",
    EXIT_HANG: 'a collective of DDP hung and on_hang is "exit"',
    EXIT_SOFTWARE: "software or data is at fault, and no device",
}


class SdcwatchError(Exception):
    """Misuse of sdcwatch, or an environment that cannot serve it."""

    exit_code = 1


class ConfigurationError(SdcwatchError, ValueError):
    """An argument cannot work; the message says what was expected, what came, and what to do."""


class SchemaMismatch(SdcwatchError, SystemExit):
    """Ranks hold different models: parameter names, shapes or dtypes differ.

    Attributes:
        differences: One sentence per difference, naming the ranks.
    """

    exit_code = EXIT_SCHEMA

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            "Expected the same parameters on every rank, but got: "
            + "; ".join(self.differences)
            + ". Build the same model on every rank before sdcwatch.init()."
        )
        self.code = self.exit_code


_SHOWN_RANKS = 8


def _named(ranks: Sequence[int]) -> str:
    """Ranks in an error: the first eight, and how many more."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) or "unknown"
    more = len(ranks) - _SHOWN_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


class Desync(SdcwatchError, SystemExit):
    """Ranks called the guard at different steps or for different operations, or not at all.

    Attributes:
        positions: For each rank, the operation and the step it was at; at most eight ranks of those
            that went past an operation.
        past: The operation of the guard that some ranks went past, or "".
        ranks: Those that went past it.
    """

    exit_code = EXIT_DESYNC

    def __init__(
        self, positions: Mapping[int, str], *, past: str = "", ranks: Sequence[int] = ()
    ) -> None:
        self.positions, self.past, self.ranks = dict(positions), past, tuple(ranks)
        places = ", ".join(f"rank {rank}: {at}" for rank, at in sorted(self.positions.items()))
        if past:
            super().__init__(
                f"Expected every rank at {past}, but {_named(ranks)} went past it ({places}). Was "
                "it, or may_save, called on some ranks only, as under `if rank == 0`, or had some "
                "ranks fewer batches? Call it on every rank, after the same number of steps (for "
                "uneven inputs there is Join): the guard decides together, and save_checkpoint "
                "saves on rank 0 by itself."
            )
        else:
            super().__init__(
                f"Expected every rank at the same operation of the guard, but got {places}. "
                "Make the same calls on every rank, in the same order: save_checkpoint and "
                "may_save too, never inside `if rank == 0`."
            )
        self.code = self.exit_code


class RankGone(SdcwatchError, SystemExit):
    """One or more ranks did not answer within the deadline.

    Attributes:
        ranks: The absent ranks.
        reason: What is known of why, including the note each leaver left.
        operation: The operation of the guard that waited.
    """

    exit_code = EXIT_RANK_GONE

    def __init__(self, ranks: Sequence[int], reason: str, operation: str) -> None:
        self.ranks = tuple(ranks)
        self.reason = reason
        self.operation = operation
        super().__init__(
            f"Expected every rank at {operation}, but {_named(ranks)} did not answer: {reason}. "
            "Look at the log of that rank; the others have stopped."
        )
        self.code = self.exit_code


class CorruptionDetected(Exception, SystemExit):
    """A check failed and the run stops.

    Attributes:
        verdict: The verdict that stopped the run.
    """

    exit_code = EXIT_CORRUPTION

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.reason)
        self.code = self.exit_code


class SoftwareDivergence(CorruptionDetected):
    """A finding that points to the training program, its settings or its data, not to a device.

    Attributes:
        verdict: The verdict that stopped the run.
    """

    exit_code = EXIT_SOFTWARE


def expect(condition: bool, expected: str, got: object, do: str) -> None:
    """Raise `ConfigurationError` in the house form unless `condition` holds."""
    if not condition:
        msg = f"Expected {expected}, but got {got!r}. {do}"
        raise ConfigurationError(msg)


def slip_of(name: str, known: Iterable[str]) -> str:
    """The name that an unknown one is a slip of, or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.9)), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the one it is a slip of, the nearest, or the first few."""
    names = list(known)
    slip = slip_of(name, names)
    close = [slip] if slip else difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Use one of {names[:8]!r}{' and others' if len(names) > 8 else ''}."
