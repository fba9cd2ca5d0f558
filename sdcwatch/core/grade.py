"""Grade a run against what was planted, from its records alone.

A run passes if every planted fault led to the verdict that was expected of it (check, outcome,
ranks, step), if nothing else was reported, if what cannot be seen by design was not seen, and if
the guard acted on what it found: a failed step was not applied, and its checkpoint was not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sdcwatch.core.outcomes import is_alarm
from sdcwatch.core.records import (
    Action,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Outcome,
    Record,
    RunFinished,
    RunStarted,
    UpdateSkipped,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One planted fault and what is expected of the guard.

    Attributes:
        name: What a table calls it.
        where: What was damaged, in a few words.
        ranks: The ranks it was planted on.
        first_step: First step at which it acts.
        last_step: Last one.
        expected: "verdict", "miss" if it cannot be seen by design, or "nothing stated".
        check: Check of the expected verdict.
        outcome: Its outcome.
        named: The ranks it should name.
        step: The step it should carry; None for any step while the fault acts.
    """

    name: str
    where: str
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    expected: Literal["verdict", "miss", "nothing stated"]
    check: Check | None = None
    outcome: Outcome | None = None
    named: tuple[int, ...] = ()
    step: int | None = None

    def acts_at(self, step: int) -> bool:
        """Whether a verdict at this step may belong to it."""
        return self.first_step <= step <= self.last_step

    def explains(self, verdict: Verdict) -> bool:
        """Whether the verdict is the one that was expected."""
        return (
            self.expected == "verdict"
            and verdict.check is self.check
            and verdict.outcome is self.outcome
            and named_ranks(verdict) == tuple(sorted(self.named))
            and (self.acts_at(verdict.step) if self.step is None else verdict.step == self.step)
        )

    @property
    def expectation(self) -> str:
        """The expectation in words."""
        if self.expected != "verdict" or self.check is None or self.outcome is None:
            return "not seen, by design" if self.expected == "miss" else self.expected
        who = "nobody named" if not self.named else f"rank {', '.join(map(str, self.named))}"
        when = f" at step {self.step}" if self.step is not None else ""
        return f"{self.check.value}: {self.outcome.value.replace('_', ' ')}, {who}{when}"


@dataclass(frozen=True, slots=True)
class GradedFault:
    """A planted fault, the verdicts that belong to it, and whether that is right.

    Attributes:
        planted: The fault.
        verdicts: The verdicts found for it.
        ok: Right, wrong, or None if nothing was stated or the run ended before the fault.
        remark: Why not, or "".
    """

    planted: Planted
    verdicts: tuple[Verdict, ...]
    ok: bool | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a run.

    Attributes:
        faults: One entry per planted fault, in the order of the plan.
        unexpected: Verdicts that no planted fault explains.
        breaches: Sentences about what the guard did not do after a verdict, or about the run.
    """

    faults: tuple[GradedFault, ...]
    unexpected: tuple[Verdict, ...]
    breaches: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return (
            not self.unexpected
            and not self.breaches
            and all(f.ok is not False for f in self.faults)
        )

    @property
    def exit_code(self) -> int:
        """0 if the run passed, else 1."""
        return 0 if self.passed else 1


def named_ranks(verdict: Verdict) -> tuple[int, ...]:
    """The ranks a verdict holds wrong: its suspects or, for a one-off, those it gives a strike."""
    if verdict.outcome is Outcome.NOT_REPRODUCED and not verdict.suspects:
        return tuple(sorted(verdict.ranks))
    return tuple(sorted({s.rank for s in verdict.suspects}))


def grade(records: Iterable[Record], planted: Sequence[Planted]) -> Grade:
    """Hold the records of a run against what was planted."""
    records = list(records)
    verdicts = [r for r in records if isinstance(r, Verdict) and r.outcome is not Outcome.PASS]
    reached = max((r.step for r in records), default=0)
    explained = {id(v) for p in planted for v in verdicts if p.explains(v)}
    left = [v for v in verdicts if id(v) not in explained]
    faults = tuple(_graded(p, verdicts, left, reached) for p in planted)
    unexpected = tuple(v for v in left if is_alarm(v) and not _excused(v, planted))
    return Grade(faults, unexpected, tuple(_breaches(records, verdicts)))


def _graded(
    planted: Planted, verdicts: Sequence[Verdict], left: Sequence[Verdict], reached: int
) -> GradedFault:
    if planted.first_step > reached:
        return GradedFault(planted, (), None, "not reached")
    if planted.expected == "verdict":
        found = tuple(v for v in verdicts if planted.explains(v))
        near = tuple(v for v in left if planted.acts_at(v.step) or v.step == planted.step)
        once = planted.first_step == planted.last_step
        if found:
            repeated = once and len(found) > 1
            remark = f"reported {len(found)} times" if repeated else ""
            return GradedFault(planted, found, not repeated, remark)
        return GradedFault(
            planted, near, False, "another verdict came" if near else "no verdict came"
        )
    near = tuple(v for v in left if planted.acts_at(v.step))
    if planted.expected == "miss":
        return GradedFault(planted, near, not near, "it was seen all the same" if near else "")
    return GradedFault(planted, near, None)


def _excused(verdict: Verdict, planted: Sequence[Planted]) -> bool:
    """A verdict while a fault acts about whose outcome the plan states nothing."""
    return any(p.expected == "nothing stated" and p.acts_at(verdict.step) for p in planted)


def _breaches(records: Sequence[Record], verdicts: Sequence[Verdict]) -> Iterable[str]:
    yield from _run_breaches(records)
    skipped = {r.step for r in records if isinstance(r, UpdateSkipped)}
    for verdict in verdicts:
        if verdict.action is Action.SKIP and verdict.step not in skipped:
            yield f"step {verdict.step}: the update should have been skipped and was not"
    yield from _checkpoint_breaches(records)


def _run_breaches(records: Sequence[Record]) -> Iterable[str]:
    if not any(isinstance(r, RunStarted) for r in records):
        yield "the run never started"
        return
    ends = [r for r in records if isinstance(r, RunFinished)]
    if not ends or isinstance(records[-1], RunStarted):
        yield "the run did not finish"
    elif ends[-1].exit_code != 0:
        yield f"the run ended with exit code {ends[-1].exit_code}: {ends[-1].reason}"


def _checkpoint_breaches(records: Sequence[Record]) -> Iterable[str]:
    """A checkpoint that was saved on a failed step, or after the run was tainted."""
    saved = (CheckpointResult.SAVED, CheckpointResult.PROVISIONAL)
    tainted, failed_step = False, -1
    for record in records:
        if isinstance(record, RunStarted):
            tainted, failed_step = False, -1
        elif isinstance(record, Verdict) and record.failed:
            tainted = tainted or record.check is Check.FINGERPRINT
            failed_step = record.step
        elif isinstance(record, CheckpointEvent) and record.result in saved:
            if not (tainted or record.step == failed_step):
                continue
            yield f"step {record.step}: a checkpoint was saved after a failed check"
