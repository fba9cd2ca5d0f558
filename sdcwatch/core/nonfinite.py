"""Check 1's judgement: where a non-finite value came from, and whether hardware explains it.

| what is non-finite | says |
|---|---|
| fewer buckets reduced than the model has | `NOT_REDUCED`: software, names nobody |
| weights, or buffers that a forward reads | `WIDESPREAD`, cause weights, nothing replayed |
| local gradient or loss, ranks of several domains | `WIDESPREAD`, nothing replayed |
| local gradient or loss, ranks of one domain | replayed on another domain, see below |
| reduced gradient on every rank, no local one, every loss scaled | `REPRODUCIBLE`, cause scaling |
| reduced gradient on every rank, no local one | `UNATTRIBUTED`, cause reduction: no device |
| reduced gradient on a minority in one domain | `SUSPECT`: the reduction on that rank |
| reduced gradient on other subsets | `UNATTRIBUTED`, cause reduction |

A replay that is non-finite too makes it `REPRODUCIBLE`: the data or the model, or the loss scale if
it is finite without. A finite replay makes the flagged rank `SUSPECT`, unless preflight found that
a replay does not give a step's gradients. A replay that failed, or no other domain to replay on,
leaves it `UNATTRIBUTED`.

An fp16 overflow usually strikes several domains in the same step. Where the flagged ranks say that
their loss is scaled, one of them is replayed all the same: finite without the scale on another
domain is the scaler's normal business and no alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdcwatch.core.records import Cause, Origin, Outcome
from sdcwatch.core.text import list_ranks
from sdcwatch.core.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinite:
    """What one rank saw in one step; True means that a non-finite value was seen.

    Attributes:
        rank: The rank.
        local: In its own gradient, before the reduction.
        reduced: In the reduced gradient.
        loss: In its loss.
        weights: In its weights, or in buffers that its forward reads.
        buckets_reduced: Gradient buckets that DDP reduced in this backward.
        buckets_expected: Gradient buckets of the model.
        reduced_nan: The reduced gradient holds a NaN: no overflow of a sum makes one.
        loss_scaled: A loss scale was in the gradient that arrived at its loss.
    """

    rank: int
    local: bool
    reduced: bool
    loss: bool
    weights: bool
    buckets_reduced: int
    buckets_expected: int
    loss_scaled: bool = False
    reduced_nan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFinite:
    """What a rank of another domain got from a flagged rank's micro-batch.

    Attributes:
        producer: The flagged rank.
        replayer: The rank that recomputed.
        nonfinite: Its loss or gradient is non-finite too.
        nonfinite_unscaled: It is so without the loss scale as well; None if not tried.
        error: What the replay ended with, if it failed.
    """

    producer: int
    replayer: int
    nonfinite: bool
    nonfinite_unscaled: bool | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class NonfiniteJudgement:
    """What check 1 came to.

    Attributes:
        outcome: `PASS`, `SUSPECT`, `REPRODUCIBLE`, `UNATTRIBUTED`, `WIDESPREAD` or `NOT_REDUCED`.
        origin: Where the value was seen.
        cause: Why it is there, as far as can be told.
        named: Suspect ranks.
        ranks: Ranks that saw it.
        reason: One sentence for a person.
    """

    outcome: Outcome
    origin: Origin
    cause: Cause
    named: tuple[int, ...]
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Sight:
    """The table of one step, read off the facts."""

    short: tuple[int, ...]
    weights: tuple[int, ...]
    local: tuple[int, ...]
    loss: tuple[int, ...]
    reduced: tuple[int, ...]
    scaled: frozenset[int]
    nan: bool
    world: int

    @property
    def flagged(self) -> tuple[int, ...]:
        """Ranks whose own computation gave the value."""
        return tuple(sorted({*self.local, *self.loss}))

    @property
    def origin(self) -> Origin:
        if self.local:
            return Origin.LOCAL
        if self.loss:
            return Origin.OUTPUT
        return Origin.REDUCED if self.reduced else Origin.NONE


def _sight(facts: Sequence[RankFinite]) -> _Sight:
    return _Sight(
        short=tuple(f.rank for f in facts if f.buckets_reduced < f.buckets_expected),
        weights=tuple(f.rank for f in facts if f.weights),
        local=tuple(f.rank for f in facts if f.local),
        loss=tuple(f.rank for f in facts if f.loss),
        reduced=tuple(f.rank for f in facts if f.reduced),
        scaled=frozenset(f.rank for f in facts if f.loss_scaled),
        nan=any(f.reduced_nan for f in facts),
        world=len(facts),
    )


def _domains_of(ranks: Sequence[int], topology: Topology) -> set[str]:
    domains = topology.domains
    return {domains[rank] for rank in ranks}


def plan_nonfinite_replays(facts: Sequence[RankFinite], topology: Topology) -> dict[int, int]:
    """Which rank of another domain replays each flagged rank's micro-batch; empty for none.

    Every rank computes the same plan from the same facts.
    """
    seen = _sight(facts)
    flagged = seen.flagged
    if seen.short or seen.weights or not flagged:
        return {}
    domains = topology.domains
    if len(_domains_of(flagged, topology)) > 1:
        if not seen.scaled.issuperset(flagged):
            return {}
        flagged = flagged[:1]
    elsewhere = [r for r, domain in enumerate(domains) if domain != domains[flagged[0]]]
    elsewhere.sort(key=lambda rank: rank in seen.flagged)
    if not elsewhere:
        return {}
    return {rank: elsewhere[i % len(elsewhere)] for i, rank in enumerate(flagged)}


def _where(seen: _Sight) -> str:
    what = "gradient" if seen.local else "loss"
    said = f"the {what} of {list_ranks(seen.flagged)} is not finite"
    if seen.local and len(seen.reduced) < seen.world:
        missing = set(range(seen.world)) - set(seen.reduced)
        said += f", and the reduced one on {list_ranks(missing)} lost it"
    return said


def _judge_replays(
    seen: _Sight, replays: Mapping[int, ReplayFinite], *, trusted: bool
) -> NonfiniteJudgement:
    """The flagged ranks are on one domain: what did others get from their micro-batches?"""
    flagged, where = seen.flagged, _where(seen)
    named = tuple(r for r in flagged if (p := replays.get(r)) and not p.error and not p.nonfinite)
    if named:
        others = list_ranks(replays[r].replayer for r in named)
        reason = f"{where}, but finite when {others} of another domain computes it"
        if not trusted:
            reason += (
                "; nobody is named, because a replay does not give a step's gradients here, as "
                "preflight found"
            )
            return NonfiniteJudgement(
                Outcome.UNATTRIBUTED, seen.origin, Cause.UNKNOWN, (), flagged, reason
            )
        return NonfiniteJudgement(
            Outcome.SUSPECT, seen.origin, Cause.DEVICE, named, flagged, reason
        )
    failed = [p for p in replays.values() if p.error]
    if failed or any(rank not in replays for rank in flagged):
        why = (
            f"the replay on rank {failed[0].replayer} ended with: {failed[0].error}"
            if failed
            else "no rank of another domain could replay it"
        )
        return NonfiniteJudgement(
            Outcome.UNATTRIBUTED, seen.origin, Cause.UNKNOWN, (), flagged, f"{where}; {why}"
        )
    again = list_ranks(replays[r].replayer for r in flagged)
    if all(replays[rank].nonfinite_unscaled is False for rank in flagged):
        reason = f"{where}, and on {again} too, but finite without the loss scale"
        return _reproducible(seen, Cause.SCALING, reason)
    reason = f"{where}, and on {again} of another domain too: the data or the model, not a device"
    return _reproducible(seen, Cause.DATA, reason)


def _reproducible(seen: _Sight, cause: Cause, reason: str) -> NonfiniteJudgement:
    return NonfiniteJudgement(Outcome.REPRODUCIBLE, seen.origin, cause, (), seen.flagged, reason)


def _judge_several(seen: _Sight, replays: Mapping[int, ReplayFinite]) -> NonfiniteJudgement:
    """The flagged ranks are on several domains."""
    where = _where(seen)
    replay = replays.get(seen.flagged[0])
    if replay is not None and not replay.error and replay.nonfinite_unscaled is False:
        reason = f"{where}, and finite without the loss scale on rank {replay.replayer}"
        return _reproducible(seen, Cause.SCALING, reason)
    reason = f"{where}: several fault domains at once, so no single device"
    return NonfiniteJudgement(
        Outcome.WIDESPREAD, seen.origin, Cause.UNKNOWN, (), seen.flagged, reason
    )


def _judge_reduction(seen: _Sight, topology: Topology) -> NonfiniteJudgement:
    """Every local gradient is finite, and some reduced one is not."""
    reduced = seen.reduced
    minority = 2 * len(reduced) < seen.world and len(_domains_of(reduced, topology)) == 1
    if minority:
        outcome, named = Outcome.SUSPECT, reduced
        reason = (
            f"reduction on {list_ranks(reduced)} is not finite, while it is finite on all others"
        )
    elif len(reduced) == seen.world == len(seen.scaled) and not seen.nan:
        reason = "the reduction overflows under the loss scale: every local gradient is finite"
        return NonfiniteJudgement(
            Outcome.REPRODUCIBLE, Origin.REDUCED, Cause.SCALING, (), reduced, reason
        )
    elif len(reduced) == seen.world:
        outcome, named = Outcome.UNATTRIBUTED, ()
        reason = "the reduced gradient is not finite on any rank, while every local one is finite"
    else:
        outcome, named = Outcome.UNATTRIBUTED, ()
        reason = (
            f"reduction on {list_ranks(reduced)} is not finite, and too many see it to name one"
        )
    return NonfiniteJudgement(outcome, Origin.REDUCED, Cause.REDUCTION, named, reduced, reason)


def judge_nonfinite(
    facts: Sequence[RankFinite],
    replays: Mapping[int, ReplayFinite],
    topology: Topology,
    *,
    trusted: bool = True,
) -> NonfiniteJudgement:
    """Judge one step from what every rank saw, and from the replays that were made.

    Args:
        facts: One per rank, in rank order.
        replays: By producer; those of `plan_nonfinite_replays` that took place.
        topology: Where the ranks are.
        trusted: A replay gives the same gradients as a step. False where preflight found that it
            does not: then a finite replay names nobody.
    """
    seen = _sight(facts)
    if seen.short:
        rank = seen.short[0]
        reason = (
            f"gradients not reduced: {facts[rank].buckets_reduced} of "
            f"{facts[rank].buckets_expected} buckets on {list_ranks(seen.short)}; "
            "software, no device"
        )
        return NonfiniteJudgement(
            Outcome.NOT_REDUCED, seen.origin, Cause.NONE, (), seen.short, reason
        )
    if seen.weights:
        reason = f"weights or buffers of {list_ranks(seen.weights)} are not finite"
        return NonfiniteJudgement(
            Outcome.WIDESPREAD, seen.origin, Cause.WEIGHTS, (), seen.weights, reason
        )
    if seen.flagged:
        if len(_domains_of(seen.flagged, topology)) > 1:
            return _judge_several(seen, replays)
        return _judge_replays(seen, replays, trusted=trusted)
    if seen.reduced:
        return _judge_reduction(seen, topology)
    return NonfiniteJudgement(
        Outcome.PASS, Origin.NONE, Cause.NONE, (), (), "loss and gradients are finite"
    )


def after_join() -> NonfiniteJudgement:
    """The judgement where a rank has run out of inputs: it cannot be asked, so nobody is named."""
    reason = (
        "a loss or gradient is not finite, and a rank that has run out of inputs cannot be asked"
    )
    return NonfiniteJudgement(Outcome.UNATTRIBUTED, Origin.NONE, Cause.UNKNOWN, (), (), reason)
