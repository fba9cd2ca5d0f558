"""Check 1's judgement: where a non-finite value came from, and whether hardware explains it.

| what is non-finite | says |
|---|---|
| fewer buckets reduced than the model has | `NOT_REDUCED`: software, names nobody |
| weights, or buffers that a forward reads | `WIDESPREAD`, cause weights, nothing replayed |
| the gradient that arrived at finite outputs, scaled, no NaN | `REPRODUCIBLE`, cause scaling |
| the gradient that arrived at finite outputs, otherwise | `UNATTRIBUTED`, cause outside |
| own gradient or outputs, in one or two fault domains | replayed on another domain, see below |
| own gradient or outputs, in more domains | `WIDESPREAD`, or scaling, see below |
| reduced gradient on every rank, no local one, every loss scaled | `REPRODUCIBLE`, cause scaling |
| reduced gradient on every rank, no local one | `UNATTRIBUTED`, cause reduction: no device |
| reduced gradient on a minority in one domain | a strike: it cannot be repeated |
| reduced gradient on other subsets | `UNATTRIBUTED`, cause reduction |

A replay that is non-finite too makes it `REPRODUCIBLE`: the data or the model, or the loss scale if
it is finite without. Where it is finite elsewhere, the flagged rank and the one that replayed
repeat their work `REPEATS` times, and the rule of naming of `sdcwatch.core.replay` holds: wrong in
every repeat is `SUSPECT`, right even once is a strike (`NOT_REPRODUCED`), and a second strike of
that device, over all checks, names it. Nobody is named where preflight found that a replay does not
give a step's gradients, or with fewer than three fault domains. What was not kept, was overwritten
or failed leaves it `UNATTRIBUTED`.

Infinities under a loss scale with finite outputs are the scaler's normal business, and no alarm: it
leaves the update out by itself. Where a NaN is among them in many domains at once, one of the
flagged ranks is replayed: finite without the scale says the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sdcwatch.core.arbitration import DOMAINS_EXPLAINED, REPEATS
from sdcwatch.core.history import Device, History, device_of
from sdcwatch.core.records import Cause, Check, Origin, Outcome
from sdcwatch.core.replay import LISTED, second_strike
from sdcwatch.core.text import count, list_names, list_ranks
from sdcwatch.core.topology import DOMAINS_TO_NAME, Topology, partners

REPLAYED = 8
"""Flagged ranks of one fault domain that are replayed in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinite:
    """What one rank saw in one step; True means that a non-finite value was seen.

    Attributes:
        rank: The rank.
        local: In its own gradient, before the reduction.
        reduced: In the reduced gradient.
        loss: In its loss, or in outputs of its module.
        weights: In its weights, or in buffers that its forward reads.
        buckets_reduced: Gradient buckets that DDP reduced in this backward.
        buckets_expected: Gradient buckets of the model; one more than those where nobody knows.
        not_reduced: Parameters that no bucket held, a few by name.
        not_reduced_total: How many those are.
        reduced_nan: The reduced gradient holds a NaN: no overflow of a sum makes one.
        loss_scaled: A loss scale was in the gradient that arrived at its loss.
        arrived: In the gradient that arrived at its outputs.
        nan: Its own gradient, or the one that arrived, holds a NaN rather than infinities alone.
        not_replayable: Why its micro-batches cannot be replayed, or "": not kept, overwritten.
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
    arrived: bool = False
    nan: bool = False
    not_replayable: str = ""
    not_reduced: tuple[str, ...] = ()
    not_reduced_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFinite:
    """What a rank of another domain got from a flagged rank's micro-batch.

    Attributes:
        producer: The flagged rank.
        replayer: The rank that recomputed.
        nonfinite: Its loss or gradient is non-finite too.
        nonfinite_unscaled: It is so without the loss scale as well; None if not tried.
        error: What the replay ended with, if it failed, or why it has no vote.
    """

    producer: int
    replayer: int
    nonfinite: bool
    nonfinite_unscaled: bool | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatsFinite:
    """What repeats of a flagged rank's micro-batch came to, on one rank.

    Attributes:
        producer: The flagged rank.
        rank: Who repeated: the flagged rank, or the one that replayed it.
        made: Repeats that ended without an error.
        nonfinite: Of these, those with a non-finite value.
    """

    producer: int
    rank: int
    made: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Repeated:
    """All that was repeated before anybody is named.

    Attributes:
        replays: What `plan_nonfinite_repeats` asked for. Without it nobody is named.
        restless: Ranks whose repeats of their own work differ; see `asks_everybody`.
    """

    replays: tuple[RepeatsFinite, ...] = ()
    restless: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NonfiniteJudgement:
    """What check 1 came to.

    Attributes:
        outcome: `PASS`, `SUSPECT`, `REPRODUCIBLE`, `NOT_REPRODUCED`, `NONDETERMINISTIC`,
            `UNATTRIBUTED`, `WIDESPREAD` or `NOT_REDUCED`.
        origin: Where the value was seen.
        cause: Why it is there, as far as can be told.
        named: Suspect ranks.
        ranks: Ranks that saw it, at most `LISTED`.
        reason: One sentence for a person.
        strikes: Ranks that have a strike for it.
        operators: Of named ranks, the operation in which the device computed wrongly, where a trace
            of operations tells (`core.disputes`).
        operator: The operation in which results began to differ; "" if unknown.
        apart: Weights or buffers are finite on some ranks: replicas may differ.
    """

    outcome: Outcome
    origin: Origin
    cause: Cause
    named: tuple[int, ...]
    ranks: tuple[int, ...]
    reason: str
    strikes: tuple[int, ...] = ()
    operators: Mapping[int, str] = field(default_factory=dict)
    operator: str = ""
    apart: bool = False

    def reproduced(self, rank: int) -> bool | None:
        """Whether a named rank was wrong in every repeat; None where nothing can be repeated."""
        return None if self.cause is Cause.REDUCTION else rank not in self.strikes


@dataclass(frozen=True, slots=True)
class _Sight:
    """The table of one step, read off the facts."""

    short: tuple[int, ...]
    weights: tuple[int, ...]
    local: tuple[int, ...]
    reduced: tuple[int, ...]
    scaled: frozenset[int]
    reduced_nan: bool
    world: int
    outside: tuple[int, ...]
    """Ranks with finite outputs at which a non-finite gradient arrived."""
    flagged: tuple[int, ...]
    """Ranks whose own computation gave the value."""
    overflow: bool
    """Every flagged rank scales its loss, its outputs are finite, and nobody has a NaN."""
    kept_out: Mapping[int, str]
    """Flagged ranks whose micro-batches cannot be replayed, and why."""

    @property
    def origin(self) -> Origin:
        if self.local:
            return Origin.LOCAL
        if self.flagged or self.outside:
            return Origin.OUTPUT
        return Origin.REDUCED if self.reduced else Origin.NONE


def _why_not_reduced(fact: RankFinite, ranks: Sequence[int]) -> str:
    named = list(fact.not_reduced[:NAMES_SHOWN])
    more = fact.not_reduced_total - len(named)
    listed = f"{', '.join(named)} and {more} more" if more > 0 else list_names(named or ("",))
    buckets = f"{fact.buckets_reduced} of {count(fact.buckets_expected, 'bucket')}"
    return (
        f"gradients not reduced: {buckets} on {list_ranks(ranks)}"
        f"{f', without {listed}' if named else ''}; software, no device: call the DDP model "
        "itself, as model(batch), and not model.module(batch), and leave no_sync for the last "
        "micro-batch"
    )


NAMES_SHOWN = 3
"""Parameters that a sentence about gradients that were not reduced lists."""


def _sight(facts: Sequence[RankFinite]) -> _Sight:
    outside = tuple(f.rank for f in facts if f.arrived and not f.loss)
    apart = frozenset(outside)
    inside = [f for f in facts if (f.local or f.loss) and f.rank not in apart]
    return _Sight(
        short=tuple(f.rank for f in facts if f.buckets_reduced < f.buckets_expected),
        weights=tuple(f.rank for f in facts if f.weights),
        local=tuple(f.rank for f in facts if f.local),
        reduced=tuple(f.rank for f in facts if f.reduced),
        scaled=frozenset(f.rank for f in facts if f.loss_scaled),
        reduced_nan=any(f.reduced_nan for f in facts),
        world=len(facts),
        outside=outside,
        flagged=tuple(f.rank for f in inside),
        overflow=all(f.loss_scaled and not (f.loss or f.nan) for f in inside),
        kept_out={f.rank: f.not_replayable for f in inside if f.not_replayable},
    )


def _domains_of(ranks: Iterable[int], topology: Topology) -> set[str]:
    domains = topology.domains
    return {domains[rank] for rank in ranks}


def plan_nonfinite_replays(facts: Sequence[RankFinite], topology: Topology) -> dict[int, int]:
    """Which rank of another domain replays each flagged rank's micro-batch; empty for none.

    Every rank computes the same plan from the same facts. Not for those that were not kept.
    """
    seen = _sight(facts)
    if seen.short or seen.weights or not seen.flagged or seen.overflow:
        return {}
    domains = topology.domains
    flagged_domains = _domains_of(seen.flagged, topology)
    wanted = [rank for rank in seen.flagged if rank not in seen.kept_out]
    if len(flagged_domains) > DOMAINS_EXPLAINED:
        if not seen.scaled.issuperset(seen.flagged):
            return {}
        wanted = wanted[:1]
    of_domain, chosen = Counter[str](), []
    for rank in wanted:
        of_domain[domains[rank]] += 1
        if of_domain[domains[rank]] <= REPLAYED:
            chosen.append(rank)
    known, flagged, load = partners(topology, chosen), frozenset(seen.flagged), Counter[int]()
    plan: dict[int, int] = {}
    for rank in chosen:
        elsewhere = [other for other in known[rank] if domains[other] != domains[rank]]
        if elsewhere:
            plan[rank] = min(
                elsewhere,
                key=lambda other: (
                    domains[other] in flagged_domains, other in flagged, load[other], other
                ),
            )  # fmt: skip
            load[plan[rank]] += 1
    return plan


def plan_own_replays(facts: Sequence[RankFinite]) -> tuple[int, ...]:
    """Which flagged ranks replay their own micro-batches, with and without the loss scale.

    Where no other domain can replay, and every flagged rank scales its loss: an overflow of the
    scale is normal then. One that shows in the facts already needs no replay.
    """
    seen = _sight(facts)
    if seen.short or seen.weights or seen.overflow or not seen.scaled.issuperset(seen.flagged):
        return ()
    return tuple(rank for rank in seen.flagged if rank not in seen.kept_out)[:REPLAYED]


def plan_nonfinite_repeats(
    replays: Mapping[int, ReplayFinite], *, times: int = REPEATS
) -> tuple[tuple[int, int, int], ...]:
    """(rank, producer, times): who repeats which micro-batch before anybody is named.

    Where the value was finite elsewhere, the flagged rank and the one that replayed it.
    """
    finite = [r for r in replays.values() if not r.error and not r.nonfinite]
    return tuple((rank, r.producer, times) for r in finite for rank in (r.producer, r.replayer))


def _where(seen: _Sight) -> str:
    what = "gradient" if seen.local else "loss"
    said = f"the {what} of {list_ranks(seen.flagged)} is not finite"
    if seen.local and len(seen.reduced) < seen.world:
        missing = set(range(seen.world)) - set(seen.reduced)
        said += f", and the reduced one on {list_ranks(missing)} lost it"
    return said


class _Case:
    """One step in which a rank's own computation gave a non-finite value."""

    def __init__(
        self,
        seen: _Sight,
        replays: Mapping[int, ReplayFinite],
        repeated: Repeated,
        topology: Topology,
        history: History | None,
    ) -> None:
        self.seen, self.replays, self.topology, self.history = seen, replays, topology, history
        self.where, self.restless = _where(seen), repeated.restless
        self.made = {(r.producer, r.rank): r for r in repeated.replays}
        self.finite = tuple(
            rank
            for rank in seen.flagged
            if (replay := replays.get(rank)) and not replay.error and not replay.nonfinite
        )

    def says(
        self,
        outcome: Outcome,
        cause: Cause,
        reason: str,
        named: tuple[int, ...] = (),
        strikes: tuple[int, ...] = (),
    ) -> NonfiniteJudgement:
        seen = self.seen
        return NonfiniteJudgement(
            outcome, seen.origin, cause, named, seen.flagged[:LISTED], reason, strikes
        )

    def judge(self, *, trusted: bool) -> NonfiniteJudgement:
        if self.seen.overflow:
            return self._overflow()
        if len(_domains_of(self.seen.flagged, self.topology)) > DOMAINS_EXPLAINED:
            return self._many_domains()
        if self.finite:
            return self._finite_elsewhere(trusted=trusted)
        return self._not_finite_elsewhere()

    def _overflow(self) -> NonfiniteJudgement:
        reason = f"{self.where}: infinities under the loss scale, while the outputs are finite"
        return self.says(Outcome.REPRODUCIBLE, Cause.SCALING, reason)

    def _many_domains(self) -> NonfiniteJudgement:
        replay = next(iter(self.replays.values()), None)
        if replay is not None and not replay.error and replay.nonfinite_unscaled is False:
            reason = f"{self.where}, and finite without the loss scale on rank {replay.replayer}"
            return self.says(Outcome.REPRODUCIBLE, Cause.SCALING, reason)
        reason = f"{self.where}: more than two fault domains at once, so no broken device"
        return self.says(Outcome.WIDESPREAD, Cause.UNKNOWN, reason)

    def _not_finite_elsewhere(self) -> NonfiniteJudgement:
        asked = [self.replays[rank] for rank in self.seen.flagged if rank in self.replays]
        failed = [replay for replay in asked if replay.error]
        if self.seen.kept_out:
            rank, why = next(iter(self.seen.kept_out.items()))
            reason = f"{self.where}; rank {rank} cannot be replayed: {why}"
            return self.says(Outcome.UNATTRIBUTED, Cause.UNKNOWN, reason)
        if failed or not asked or len(asked) < min(len(self.seen.flagged), REPLAYED):
            why = (
                f"the replay on rank {failed[0].replayer} ended with: {failed[0].error}"
                if failed
                else "no rank of another domain could replay it"
            )
            return self.says(Outcome.UNATTRIBUTED, Cause.UNKNOWN, f"{self.where}; {why}")
        again = list_ranks(replay.replayer for replay in asked)
        if all(replay.nonfinite_unscaled is False for replay in asked):
            reason = f"{self.where}, and on {again} too, but finite without the loss scale"
            return self.says(Outcome.REPRODUCIBLE, Cause.SCALING, reason)
        reason = f"{self.where}, and on {again} of another domain too: the data or the model, not"
        return self.says(Outcome.REPRODUCIBLE, Cause.DATA, f"{reason} a device")

    def _repeats_of(self, rank: int) -> tuple[int, int]:
        """Repeats of a flagged rank that were non-finite again, and all of them."""
        own = self.made.get((rank, rank))
        return (0, 0) if own is None else (own.nonfinite, own.made)

    def _controlled(self, rank: int) -> bool:
        """The rank that replayed it made every repeat."""
        control = self.made.get((rank, self.replays[rank].replayer))
        return control is not None and control.made >= REPEATS

    def _finite_elsewhere(self, *, trusted: bool) -> NonfiniteJudgement:
        others = list_ranks(self.replays[rank].replayer for rank in self.finite)
        reason = f"{self.where}, but finite when {others} of another domain computes it"
        domains = len(self.topology.domain_sizes)
        if not trusted or domains < DOMAINS_TO_NAME:
            why = f"that takes {DOMAINS_TO_NAME} fault domains, while there are {domains}"
            if not trusted:
                why = "a replay does not give a step's gradients here, as preflight found"
            return self.says(
                Outcome.UNATTRIBUTED, Cause.UNKNOWN, f"{reason}; nobody is named, because {why}"
            )
        unsteady = [
            self.replays[rank].replayer
            for rank in self.finite
            if (c := self.made.get((rank, self.replays[rank].replayer))) and c.nonfinite
        ]
        full = [
            rank
            for rank in self.finite
            if self._repeats_of(rank)[1] >= REPEATS and self._controlled(rank)
        ]
        counts = {rank: self._repeats_of(rank) for rank in full}
        named = tuple(rank for rank, (again, made) in counts.items() if again == made)
        strikes = tuple(rank for rank, (again, made) in counts.items() if again < made)
        again, made = (sum(c[i] for c in counts.values()) for i in (0, 1))
        reason += f"; not finite again in {again} of {made} repeats"
        if unsteady:
            said = f"{reason}, and {list_ranks(unsteady)} does not repeat either"
            return self.says(Outcome.NONDETERMINISTIC, Cause.UNKNOWN, said, strikes=strikes)
        if named:
            return self.says(Outcome.SUSPECT, Cause.DEVICE, reason, named, strikes)
        if strikes:
            return self.struck(strikes, Cause.UNKNOWN, reason)
        said = f"{reason}, and {REPEATS} on each side show whether this happens again"
        return self.says(Outcome.UNATTRIBUTED, Cause.UNKNOWN, said)

    def struck(
        self,
        strikes: tuple[int, ...],
        cause: Cause,
        reason: str,
    ) -> NonfiniteJudgement:
        """A strike each; a name for a device that has two."""
        infos = self.topology.ranks
        devices: list[Device] = [device_of(infos[rank]) for rank in strikes]
        elsewhere = [rank for rank in self.restless if device_of(infos[rank]) not in devices]
        if elsewhere:
            said = f"{reason}, and {list_ranks(elsewhere)} of another device does not repeat either"
            return self.says(Outcome.NONDETERMINISTIC, cause, said, strikes=strikes)
        enough = len(self.topology.domain_sizes) >= DOMAINS_TO_NAME
        if self.history is not None and len(set(devices)) == 1 and enough:
            earlier = self.history.ledger.names(devices[0], struck_now=devices)
            if earlier is not None:
                said = f"{reason}; {second_strike(earlier)}"
                return self.says(Outcome.SUSPECT, cause, said, strikes, strikes)
        return self.says(Outcome.NOT_REPRODUCED, cause, reason, strikes=strikes)


def _judge_outside(seen: _Sight, facts: Sequence[RankFinite]) -> NonfiniteJudgement:
    """A non-finite gradient arrived at finite outputs: nothing of it was computed inside."""
    who = list_ranks(seen.outside)
    said = f"the gradient that arrived at the outputs of {who} is not finite, the outputs are"
    if all(facts[rank].loss_scaled and not facts[rank].nan for rank in seen.outside):
        reason = f"{said}: infinities under the loss scale"
        return NonfiniteJudgement(
            Outcome.REPRODUCIBLE,
            seen.origin,
            Cause.SCALING,
            (),
            seen.outside[:LISTED],
            reason,
        )
    reason = f"{said}: it was made outside of the module, by the loss or what follows it"
    return NonfiniteJudgement(
        Outcome.UNATTRIBUTED, seen.origin, Cause.OUTSIDE, (), seen.outside[:LISTED], reason
    )


def _judge_reduction(case: _Case) -> NonfiniteJudgement:
    """Every local gradient is finite, and some reduced one is not."""
    seen = case.seen
    reduced, shown = seen.reduced, seen.reduced[:LISTED]
    minority = 2 * len(reduced) < seen.world
    if minority and len(_domains_of(reduced, case.topology)) == 1:
        reason = (
            f"reduction on {list_ranks(reduced)} is not finite, while it is finite on all others; "
            "it cannot be repeated"
        )
        struck = case.struck(reduced, Cause.REDUCTION, reason)
        return NonfiniteJudgement(
            struck.outcome,
            Origin.REDUCED,
            Cause.REDUCTION,
            struck.named,
            shown,
            struck.reason,
            struck.strikes,
        )
    outcome, cause = Outcome.UNATTRIBUTED, Cause.REDUCTION
    if len(reduced) == seen.world == len(seen.scaled) and not seen.reduced_nan:
        outcome, cause = Outcome.REPRODUCIBLE, Cause.SCALING
        reason = "the reduction overflows under the loss scale: every local gradient is finite"
    elif len(reduced) == seen.world:
        reason = "the reduced gradient is not finite on any rank, while every local one is finite"
    else:
        reason = (
            f"reduction on {list_ranks(reduced)} is not finite, and too many see it to name one"
        )
    return NonfiniteJudgement(outcome, Origin.REDUCED, cause, (), shown, reason)


def judge_nonfinite(
    facts: Sequence[RankFinite],
    replays: Mapping[int, ReplayFinite],
    topology: Topology,
    *,
    trusted: bool = True,
    repeated: Repeated | None = None,
    history: History | None = None,
) -> NonfiniteJudgement:
    """Judge one step from what every rank saw, and from the replays that were made.

    Args:
        facts: One per rank, in rank order.
        replays: By producer; those of `plan_nonfinite_replays` that took place.
        topology: Where the ranks are.
        trusted: A replay gives the same gradients as a step. False where preflight found that it
            does not: then a finite replay names nobody.
        repeated: What was repeated. Without it nobody is named.
        history: What the segment remembers; without it a strike never names anybody.
    """
    seen = _sight(facts)
    if seen.short:
        reason = _why_not_reduced(facts[seen.short[0]], seen.short)
        return NonfiniteJudgement(
            Outcome.NOT_REDUCED, seen.origin, Cause.NONE, (), seen.short[:LISTED], reason
        )
    if seen.weights:
        reason = f"weights or buffers of {list_ranks(seen.weights)} are not finite"
        return NonfiniteJudgement(
            Outcome.WIDESPREAD,
            seen.origin,
            Cause.WEIGHTS,
            (),
            seen.weights[:LISTED],
            reason,
            apart=len(seen.weights) < len(facts),
        )
    case = _Case(seen, replays, repeated or Repeated(), topology, history)
    if seen.flagged:
        return case.judge(trusted=trusted)
    if seen.outside:
        return _judge_outside(seen, facts)
    if seen.reduced:
        return _judge_reduction(case)
    return NonfiniteJudgement(
        Outcome.PASS, Origin.NONE, Cause.NONE, (), (), "loss and gradients are finite"
    )


def asks_everybody(judgement: NonfiniteJudgement, history: History) -> bool:
    """Whether every rank has to repeat its own work before the step is judged again.

    As in check 2, at the first strike of a segment.
    """
    return judgement.outcome is Outcome.NOT_REPRODUCED and history.ledger.blank


def remember(
    history: History, judgement: NonfiniteJudgement, topology: Topology, *, step: int
) -> History:
    """The history after check 1: its strikes count with those of the audits."""
    devices = [device_of(topology.ranks[rank]) for rank in judgement.strikes]
    after = history.struck(devices, check=Check.NONFINITE, step=step) if devices else history
    return after.doubted() if judgement.outcome is Outcome.NONDETERMINISTIC else after


def after_join() -> NonfiniteJudgement:
    """The judgement where a rank has run out of inputs: it cannot be asked, so nobody is named."""
    reason = (
        "a loss or gradient is not finite, and a rank that has run out of inputs cannot be asked"
    )
    return NonfiniteJudgement(Outcome.UNATTRIBUTED, Origin.NONE, Cause.UNKNOWN, (), (), reason)
