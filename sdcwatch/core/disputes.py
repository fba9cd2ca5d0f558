"""What traces of operations change about a judgement, before any device is named.

A check that is about to name a rank, or to say that ranks differ, has each such rank and ranks
that are right trace the micro-batch on which they disagree (`sdcwatch.core.trace`). What they tell:

| the traces say | then |
|---|---|
| the device, with the operation | named as before, with the operation |
| software, with the operation | nobody is named: cause `software`, a warning |
| the rank's own operation does not repeat | nobody is named: `NONDETERMINISTIC`, what to set |
| nothing: equal, or code that it cannot see | the check's own rule stands, which the text says |

Preflight asks the same of ranks that make something else of one common micro-batch.

At most `TRACED` ranks are traced. Where one of them turns out to be software, no rank is named that
was not traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sdcwatch.core.arbitration import Settlement, is_error
from sdcwatch.core.enums import Cause, Outcome
from sdcwatch.core.nonfinite import NonfiniteJudgement, ReplayFinite
from sdcwatch.core.preflight import OR_BROKEN, CommonJudgement
from sdcwatch.core.replay import AuditFacts, AuditJudgement, Named
from sdcwatch.core.text import list_ranks
from sdcwatch.core.trace_values import TraceFinding, TraceOutcome

TRACED = 4
"""Ranks in dispute that are traced in one check."""
RIGHT_TRACED = 2
"""Ranks that are right, and trace the same: an operation in which they differ names nobody."""


@dataclass(frozen=True, slots=True)
class Dispute:
    """A micro-batch on which one rank stands against others.

    Attributes:
        rank: The rank in dispute.
        producer: Whose micro-batch it is.
        right: Ranks whose results are right; empty where it is only asked whether `rank` repeats.
    """

    rank: int
    producer: int
    right: tuple[int, ...] = ()

    @property
    def sides(self) -> tuple[int, ...]:
        """All that trace, the rank in dispute first."""
        return (self.rank, *self.right)


def plan_audit_traces(judgement: AuditJudgement, facts: AuditFacts) -> tuple[Dispute, ...]:
    """Who traces what before the judgement of an audit stands; empty where nobody has to.

    Pure, the same on every rank. All sides of a dispute hold the micro-batch: one made it, the
    others have recomputed it.
    """
    settled = judgement.settlement
    if judgement.outcome is Outcome.NONDETERMINISTIC:
        return _restless_ones(settled, facts)
    wrong = [n.rank for n in judgement.named if n.producers]
    if judgement.outcome is Outcome.DIFFERS:
        wrong = list(judgement.differing)
    disputes = []
    for rank in wrong[:TRACED]:
        producers = [p for p in settled.wrong.get(rank, ()) if settled.agreeing.get(p)]
        if producers:
            right = settled.agreeing[producers[0]][:RIGHT_TRACED]
            disputes.append(Dispute(rank, producers[0], right))
    return tuple(disputes)


def _restless_ones(settled: Settlement, facts: AuditFacts) -> tuple[Dispute, ...]:
    """Ranks that do not repeat themselves, each with a micro-batch that shows it."""
    found = {rank: rank for rank in facts.restless or ()}
    for (rank, producer), values in facts.repeats.items():
        right, agrees = settled.right.get(producer), rank in settled.agreeing.get(producer, ())
        if agrees and any(value != right and not is_error(value) for value in values):
            found.setdefault(rank, producer)
    return tuple(Dispute(rank, producer) for rank, producer in sorted(found.items())[:TRACED])


def plan_nonfinite_traces(
    judgement: NonfiniteJudgement, replays: Mapping[int, ReplayFinite]
) -> tuple[Dispute, ...]:
    """Who traces what before check 1 names anybody."""
    asked = [rank for rank in judgement.named if rank in replays]
    return tuple(Dispute(r, r, (replays[r].replayer,)) for r in asked[:TRACED])


@dataclass(frozen=True, slots=True)
class _Told:
    """What the traces of several ranks come to together.

    Attributes:
        operators: Of each rank whose device computed wrongly, the operation.
        software: Ranks that differ by software.
        unrepeated: Ranks that do not repeat themselves.
        said: A clause about each rank of which there is something to say.
    """

    operators: Mapping[int, str]
    software: tuple[int, ...]
    unrepeated: tuple[int, ...]
    said: tuple[str, ...]
    first: str

    @property
    def cleared(self) -> frozenset[int]:
        """Ranks that must not be named."""
        return frozenset((*self.software, *self.unrepeated))


def _told(findings: Mapping[int, TraceFinding]) -> _Told:
    operators: dict[int, str] = {}
    groups: dict[TraceOutcome, list[int]] = {o: [] for o in TraceOutcome}
    said = []
    for rank, found in findings.items():
        if found.names_device and found.rank == rank:
            operators[rank] = found.where
        if found.names_device and found.rank != rank:
            said.append(
                f"{_operation_unknown(rank)}: a value was damaged on {_rank(found)} instead"
            )
            continue
        groups[found.outcome].append(rank)
        said.append(_clause(rank, found))
    software = tuple(groups[TraceOutcome.SOFTWARE])
    unrepeated = tuple(groups[TraceOutcome.NONDETERMINISTIC])
    shown = [*operators, *software, *unrepeated]
    first = findings[shown[0]].where if shown else ""
    return _Told(operators, software, unrepeated, tuple(s for s in said if s), first)


def _rank(found: TraceFinding) -> str:
    return "a rank that is right" if found.rank is None else f"rank {found.rank}"


def _operation_unknown(rank: int) -> str:
    return f"in which operation rank {rank} is wrong is not known"


def _clause(rank: int, found: TraceFinding) -> str:
    """What one finding adds to a reason; the operation of a device stands beside it."""
    if found.outcome in (TraceOutcome.SOFTWARE, TraceOutcome.NONDETERMINISTIC):
        return found.said
    if found.names_device:
        return f"rank {rank} went wrong in {found.said}"
    return f"{_operation_unknown(rank)}: {found.detail}"


def conclude_audit(
    judgement: AuditJudgement, findings: Mapping[int, TraceFinding]
) -> AuditJudgement:
    """The judgement of an audit after the traces.

    Args:
        judgement: What the comparisons and repeats came to.
        findings: By the rank in dispute, of `plan_audit_traces`.
    """
    if not findings:
        return judgement
    told = _told(findings)
    also = "; ".join(told.said)
    reason = f"{judgement.reason}; {also}" if also else judgement.reason
    if judgement.outcome is Outcome.NONDETERMINISTIC:
        return replace(judgement, reason=reason, operator=told.first)
    if judgement.outcome is Outcome.DIFFERS:
        software = set(judgement.differing) <= set(told.software)
        device = set(judgement.differing) <= set(told.operators)
        cause = Cause.SOFTWARE if software else Cause.DEVICE if device else Cause.NONE
        return replace(judgement, reason=reason, operator=told.first, cause=cause)
    named = tuple(replace(n, operator=told.operators.get(n.rank, "")) for n in judgement.named)
    if not told.cleared:
        cause = Cause.DEVICE if told.operators else Cause.NONE
        return replace(judgement, reason=reason, named=named, operator=told.first, cause=cause)
    kept = tuple(n for n in named if n.rank in findings and n.rank not in told.cleared)
    return _without(judgement, kept, told)


def _without(judgement: AuditJudgement, kept: tuple[Named, ...], told: _Told) -> AuditJudgement:
    """The judgement without ranks that are no broken devices."""
    cleared = [n.rank for n in judgement.named if n not in kept and n.rank in told.cleared]
    reason = f"{_no_device(cleared, told)}: {'; '.join(told.said)}"
    strikes = tuple(n for n in judgement.strikes if n.rank not in told.cleared)
    after = replace(judgement, reason=reason, strikes=strikes, domains=(), operator=told.first)
    if kept:
        return replace(
            after, reason=f"{judgement.reason}; {reason}", named=kept, cause=Cause.DEVICE
        )
    ranks = tuple(sorted({*judgement.ranks, *(n.rank for n in judgement.named)}))
    if told.software:
        outcome, cause = Outcome.UNATTRIBUTED, Cause.SOFTWARE
    else:
        outcome, cause = Outcome.NONDETERMINISTIC, Cause.NONE
    return replace(after, outcome=outcome, cause=cause, named=(), ranks=ranks)


def _no_device(ranks: Sequence[int], told: _Told) -> str:
    if told.software:
        return (
            f"the software of {list_ranks(ranks)} computes something else, and no device is named"
        )
    return f"the computation does not repeat on {list_ranks(ranks)}, and no device is named"


def plan_common_traces(common: CommonJudgement) -> tuple[Dispute, ...]:
    """Who traces the common micro-batch of preflight, of which every rank has the bytes."""
    reference = common.matched[:RIGHT_TRACED] or common.sides[:1]
    asked = common.differing or common.sides[1:]
    return tuple(Dispute(rank, 0, reference) for rank in asked[:TRACED] if reference)


def conclude_common(
    common: CommonJudgement, findings: Mapping[int, TraceFinding]
) -> CommonJudgement:
    """What preflight says of ranks that differ, after the traces; see `plan_common_traces`."""
    if not findings:
        return common
    told = _told(findings)
    reason, cause = common.reason, common.cause
    if set(findings) <= set(told.software):
        reason, cause = reason.replace(OR_BROKEN, ""), Cause.SOFTWARE
    elif common.differing and set(findings) <= set(told.operators):
        cause = Cause.DEVICE
    said = "; ".join((reason, *told.said))
    return replace(common, reason=said, cause=cause, operator=told.first)


def conclude_nonfinite(
    judgement: NonfiniteJudgement, findings: Mapping[int, TraceFinding]
) -> NonfiniteJudgement:
    """The judgement of check 1 after the traces; see `conclude_audit`."""
    if not findings:
        return judgement
    told = _told(findings)
    also = "; ".join(told.said)
    reason = f"{judgement.reason}; {also}" if also else judgement.reason
    if not told.cleared:
        return replace(
            judgement, reason=reason, operators=dict(told.operators), operator=told.first
        )
    named = tuple(r for r in judgement.named if r in findings and r not in told.cleared)
    strikes = tuple(r for r in judgement.strikes if r not in told.cleared)
    cleared = [r for r in judgement.named if r in told.cleared]
    reason = f"{judgement.reason}; {_no_device(cleared, told)}: {also}"
    after = replace(
        judgement,
        reason=reason,
        named=named,
        strikes=strikes,
        operators={r: o for r, o in told.operators.items() if r in named},
        operator=told.first,
    )
    if named:
        return after
    if told.software:
        return replace(after, outcome=Outcome.UNATTRIBUTED, cause=Cause.SOFTWARE)
    return replace(after, outcome=Outcome.NONDETERMINISTIC, cause=Cause.UNKNOWN)
