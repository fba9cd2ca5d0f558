"""Who is late, and what that means: judged by position, never by time alone.

A rank that waits in an operation of the guard asks where the others are. One that has gone past the
operation will never come: ranks have run apart. One that is behind and alive will: it is waited
for. One that has left, or gives no sign of life, is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, IntEnum

from sdcwatch.core.text import count, list_ranks, shortened
from sdcwatch.errors import Desync, RankGone

SHOWN_NOTES = 8
LEFT = "left: "
ENDED = "the run ended"
"""The reason of a run that came to its end; behind anything else there is more."""


class Stage(IntEnum):
    """Where in a step a rank is, in the order in which a step passes."""

    COMPUTING = 0
    STEP = 1
    WEIGHTS = 2
    SAVE = 3


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    Attributes:
        step: The step it is in.
        stage: How far in that step.
        count: Operations of the guard that it has begun since it met the others; every rank begins
            the same ones in the same order.
        doing: In words.
        operation: It is in an operation of the guard, the last one counted.
    """

    step: int = 0
    stage: int = Stage.COMPUTING
    count: int = 0
    doing: str = "in sdcwatch.init"
    operation: bool = False

    def encode(self) -> str:
        """As it travels."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Position:
        """Inverse of `encode`."""
        return cls(**json.loads(text))


class Relation(Enum):
    """Where a rank is, seen from one that waits."""

    HERE = "here"
    BEHIND = "behind"
    PAST = "past"


def relation(own: Position, asked: Position) -> Relation:
    """Where a rank at `own` is, seen from one that waits at `asked`.

    A rank that has begun the operation has done its part. Without that, one that is further on in
    the loop went past it, and will never come.
    """
    place, there = (own.step, own.stage), (asked.step, asked.stage)
    if asked.operation:
        if own.count >= asked.count:
            return Relation.HERE
        return Relation.PAST if place > there else Relation.BEHIND
    return Relation.BEHIND if place < there else Relation.HERE


def in_next_forward(own: Position) -> Position:
    """Where a rank is that has begun the forward of the next step, in which nothing moves it on."""
    doing = f"in the forward of step {own.step + 1}, waiting for the buffers of rank 0"
    return replace(own, step=own.step + 1, stage=Stage.COMPUTING, doing=doing, operation=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a liveness check found.

    Attributes:
        past: Ranks that went past the operation without it.
        behind: Ranks that are alive and have not reached it.
        left: Ranks that left a note.
        silent: Ranks that gave no sign of life.
        followed: Those of `left` that left because of others.
        unmet: Whom the first of those missed; it may be the rank that asks, where it came too late.
        notes: For up to eight of them, what it is doing, or the note it left.
        steps_behind: How many steps the last of those behind lags.
        operation: Where the rank waits that asked.
        store_error: Why nothing is known, if the store is gone or does not answer.
        elected: This rank put the question to the others; it reports.
    """

    past: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    followed: tuple[int, ...] = ()
    unmet: tuple[int, ...] = ()
    notes: Mapping[int, str] = field(default_factory=dict)
    steps_behind: int = 0
    operation: str = ""
    store_error: str = ""
    elected: bool = True

    @property
    def absent(self) -> tuple[int, ...]:
        """Every rank that is not where the one that asks waits."""
        return tuple(sorted({*self.past, *self.behind, *self.left, *self.silent}))

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks that will not come."""
        return tuple(sorted({*self.left, *self.silent}))

    @property
    def named(self) -> tuple[int, ...]:
        """Whom to look at first: nobody is called absent who is late, or left, because of another.

        Ranks that gave no sign of life; else those that left of their own accord; else those whom
        the ones that left had missed; else all.
        """
        first = tuple(r for r in self.left if r not in self.followed)
        return self.silent or first or self.unmet or self.absent

    def is_told_by(self, rank: int) -> bool:
        """Whether this rank reports it. Without the store nobody can be elected: each does."""
        return self.elected or rank == 0 or bool(self.store_error)

    def encode(self) -> str:
        """As it travels."""
        return json.dumps({**asdict(self), "notes": {str(r): t for r, t in self.notes.items()}})

    @classmethod
    def decode(cls, text: str | bytes, *, rank: int) -> Finding:
        """Inverse of `encode`, for a rank that did not ask itself: it knows that it is here."""
        row = json.loads(text)
        groups = {
            name: tuple(r for r in row[name] if r != rank)
            for name in ("past", "behind", "left", "silent", "followed")
        }
        groups["unmet"] = tuple(row["unmet"])  # this rank may be the one that was missed
        notes = {int(r): t for r, t in row["notes"].items() if int(r) != rank}
        return cls(**{**row, **groups, "notes": notes, "elected": False})


class Answer(Enum):
    """What a rank that waits does."""

    WAIT = "wait"
    GONE = "gone"
    DESYNC = "desync"


def judge_wait(
    finding: Finding, *, waited_seconds: float, late_seconds: float, broken: bool
) -> Answer:
    """Whether to wait on; pure.

    Args:
        finding: What the liveness check found.
        waited_seconds: Since the operation began.
        late_seconds: How long a rank that is alive is waited for.
        broken: The connection has ended: waiting on is of no use.
    """
    if finding.past:
        return Answer.DESYNC
    if finding.gone or finding.store_error or broken:
        return Answer.GONE
    return Answer.WAIT if waited_seconds < late_seconds else Answer.GONE


def describe(finding: Finding) -> str:
    """A finding in words."""
    said = [f"rank {rank} {text}" for rank, text in sorted(finding.notes.items())]
    unknown = [r for r in finding.silent if r not in finding.notes]
    said += [f"rank {r} gave no sign of life" for r in unknown[:SHOWN_NOTES]]
    if early := ended_early(finding):
        said.append(
            f"the loop of {list_ranks(early)} ended before the others': make as many steps, "
            "and the same calls of the guard, on every rank, or train under Join([model, guard])"
        )
    hidden = len(finding.absent) - len(finding.notes) - len(unknown[:SHOWN_NOTES])
    if hidden > 0:
        said.append(f"{hidden} more")
    if finding.behind and finding.steps_behind:
        said.append(
            f"{list_ranks(finding.behind)} alive, {count(finding.steps_behind, 'step')} behind"
        )
    if finding.store_error:
        problem = shortened(finding.store_error, 120)
        said.append(
            f"the store is gone too ({problem}): the rank that hosts it has ended or cannot "
            "be reached, which is global rank 0 unless the launcher hosts it"
        )
    elif not finding.absent:
        said.append("every rank answered the liveness check; one of them was slow")
    return "; ".join(said)


def ended_early(finding: Finding) -> list[int]:
    """Ranks that came to the end of their loop while others still train; pure."""
    beginning = f"{LEFT}{ENDED} after "
    return [
        r
        for r in finding.left
        if r not in finding.followed and finding.notes.get(r, "").startswith(beginning)
    ]


def ran_apart(finding: Finding) -> Desync:
    """The error of ranks that will never meet."""
    positions = {r: finding.notes.get(r, "is alive, past it") for r in finding.past[:SHOWN_NOTES]}
    return Desync(
        {rank: text.removeprefix("is alive, ") for rank, text in positions.items()},
        past=finding.operation,
        ranks=finding.past,
    )


def rank_gone(finding: Finding, operation: str, waited: float, problem: str) -> RankGone:
    """The error of an operation that will never end, because of a rank that is absent.

    Args:
        finding: What a liveness check found.
        operation: What was being done.
        waited: For so many seconds.
        problem: What broke, or "".
    """
    said = [describe(finding), f"waited {waited:.1f} s"]
    if problem:
        said[-1] += f": {shortened(problem, 200)}"
    # Who is alive and behind has broken nothing.
    named = finding.named if finding.gone or not problem else ()
    return RankGone(named, "; ".join(said), operation)
