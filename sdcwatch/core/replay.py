"""Check 2's judgement: from comparisons that do not match to a named rank, or to none.

**Arbitration: which value is right.** For every mismatch two more ranks (four for a quorum of 3)
recompute the producer's micro-batch: ranks of neither's fault domain, first those in no mismatch,
on different domains if possible; only where too few exist elsewhere, ranks of the two domains. A
value is right when at least `quorum` different ranks hold it and no other value is held by as many.
Of producer and replayer, each that differs from it is wrong. With four voters this blames no
healthy rank for up to two faulty ranks, whatever wrong values they give: the right value keeps two
of four votes, and two equal wrong ones only tie. Faults whose wrong values differ never outvote
anybody, at any number. A world of three ranks has three votes: there two ranks with *equal* wrong
values look exactly like one bad rank, and only ``quorum=3``, which names nobody there, is safe.

**Naming: not reproducible is not broken.** Each wrong rank and two agreeing ranks recompute that
micro-batch `REPEATS` times more. A rank is named only if every one of its repeats is wrong and
every one of theirs is right. If each computation deviated with any probability e, both together
would have probability e^8 (1-e)^16 < 3e-7 for each suspicion; with two repeats each, a 20 % noisy
operation gets a healthy rank named within a hundred audits. A rank that is right again even once
has a strike. An agreeing rank that differs from itself, or `STRIKES_TO_DOUBT` different ranks with
strikes in `STRIKE_WINDOW` audits, means that the computation does not repeat: nobody is named.

A fault in a rank's own training pass alone, or one that comes and goes, therefore ends as a strike
of the right rank, which is counted and warned of; a person sees strikes pile up on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdcwatch.core.records import Outcome
from sdcwatch.core.text import count, list_ranks
from sdcwatch.core.topology import DOMAINS_TO_NAME, Pairing, Topology

REPEATS = 8
"""How often a wrong rank, and each agreeing rank asked, recompute before anybody is named."""
AGREEING_ASKED = 2
"""Agreeing ranks that repeat too, for each micro-batch."""
ERROR_PREFIX = "error:"


def error_value(text: str) -> str:
    """The value of a computation that raised: it never votes, and nobody is named for it."""
    return ERROR_PREFIX + text


def is_error(value: str) -> bool:
    """Whether `value` stands for a computation that raised."""
    return value.startswith(ERROR_PREFIX)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A comparison that did not match. Values are compared for equality only."""

    producer: int
    replayer: int
    producer_value: str
    replayer_value: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What arbitration came to.

    Attributes:
        right: For each mismatch, by producer, the value that a quorum holds, or None.
        wrong: For each wrong rank, the producers on whose micro-batch it differs from the quorum.
        agreeing: For each producer with a right value, the ranks that hold it, arbiters first.
        inconclusive: Producers without a right value.
    """

    right: dict[int, str | None] = field(default_factory=dict)
    wrong: dict[int, tuple[int, ...]] = field(default_factory=dict)
    agreeing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inconclusive: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """An order to recompute.

    Attributes:
        rank: Who recomputes.
        producer: Whose micro-batch.
        suspect: It was wrong; otherwise it agreed, and shows whether the computation repeats.
        times: How often.
    """

    rank: int
    producer: int
    suspect: bool
    times: int = REPEATS


def widespread_limit(world_size: int) -> int:
    """The most mismatches that can still be one device's doing; more are `WIDESPREAD`."""
    return max(4, world_size // 8)


def compared_only(mismatches: Iterable[Mismatch]) -> list[Mismatch]:
    """The comparisons of two results; not those in which a computation raised."""
    return [b for b in mismatches if not (is_error(b.producer_value) or is_error(b.replayer_value))]


def involved_ranks(mismatches: Iterable[Mismatch]) -> tuple[int, ...]:
    """Producers and replayers of some comparisons, in order."""
    return tuple(sorted({rank for b in mismatches for rank in (b.producer, b.replayer)}))


def _arbiters(
    one: Mismatch, busy: frozenset[int], domains: Sequence[str], number: int
) -> tuple[int, ...]:
    """Up to `number` ranks to recompute one micro-batch, best first."""
    world, home = len(domains), {domains[one.producer], domains[one.replayer]}
    pool = [
        rank
        for offset in range(1, world)  # from the producer on, so that work spreads over ranks
        if (rank := (one.producer + offset) % world) != one.replayer
    ]
    chosen: list[int] = []
    while pool and len(chosen) < number:
        used = Counter(domains[rank] for rank in chosen)
        best = min(
            pool,
            key=lambda rank: (domains[rank] in home, rank in busy, used[domains[rank]]),
        )
        pool.remove(best)
        chosen.append(best)
    return tuple(chosen)


def plan_arbitration(
    mismatches: Sequence[Mismatch], topology: Topology, *, quorum: int = 2
) -> dict[int, tuple[int, ...]]:
    """Which ranks recompute the micro-batch of each producer in a mismatch.

    No ranks where arbitration can settle nothing: fewer than three fault domains, more bad
    comparisons than one device explains, or a computation that raised.
    """
    plan: dict[int, tuple[int, ...]] = {b.producer: () for b in mismatches}
    compared = compared_only(mismatches)
    domains = topology.domains
    if len(set(domains)) < DOMAINS_TO_NAME or len(compared) > widespread_limit(len(domains)):
        return plan
    busy = frozenset(involved_ranks(compared))
    number = 2 if quorum <= 2 else 4
    for one in compared:
        plan[one.producer] = _arbiters(one, busy, domains, number)
    return plan


def _right_value(votes: Mapping[int, str], quorum: int) -> str | None:
    """The value that enough ranks hold, and more ranks than hold any other."""
    held: dict[str, int] = {}
    for value in votes.values():
        held[value] = held.get(value, 0) + 1
    most = max(held.values())
    leaders = [value for value, number in held.items() if number == most]
    return leaders[0] if most >= quorum and len(leaders) == 1 else None


def settle(
    mismatches: Sequence[Mismatch], arbitration: Mapping[int, Mapping[int, str]], *, quorum: int = 2
) -> Settlement:
    """Decide each mismatch by quorum: which value is right, and who differs from it.

    Args:
        mismatches: Comparisons that did not match.
        arbitration: ``arbitration[producer][arbiter]`` is that arbiter's value.
        quorum: Different ranks that must hold a value for it to be right.
    """
    right: dict[int, str | None] = {}
    wrong: dict[int, tuple[int, ...]] = {}
    agreeing: dict[int, tuple[int, ...]] = {}
    for one in compared_only(mismatches):
        arbiters = arbitration.get(one.producer, {})
        votes = {rank: value for rank, value in arbiters.items() if not is_error(value)}
        votes[one.producer], votes[one.replayer] = one.producer_value, one.replayer_value
        value = right[one.producer] = _right_value(votes, quorum)
        if value is None:
            continue
        agreeing[one.producer] = tuple(rank for rank, held in votes.items() if held == value)
        for rank in (one.producer, one.replayer):
            if votes[rank] != value:
                wrong[rank] = (*wrong.get(rank, ()), one.producer)
    inconclusive = tuple(producer for producer, value in right.items() if value is None)
    return Settlement(right, dict(sorted(wrong.items())), agreeing, inconclusive)


def plan_repeats(settlement: Settlement) -> tuple[Repeat, ...]:
    """Who recomputes what before anybody is named: wrong ranks, and agreeing ones as a control."""
    orders = []
    for rank, producers in settlement.wrong.items():
        orders += [Repeat(rank, producer, suspect=True) for producer in producers]
    asked = dict.fromkeys(p for producers in settlement.wrong.values() for p in producers)
    for producer in asked:
        # One that is wrong elsewhere would only say that it is.
        fit = sorted(settlement.agreeing[producer], key=lambda rank: rank in settlement.wrong)
        orders += [Repeat(rank, producer, suspect=False) for rank in fit[:AGREEING_ASKED]]
    return tuple(orders)


STRIKES_TO_DOUBT = 3
"""Different ranks with a one-off mismatch within the window: the computation does not repeat."""
STRIKE_WINDOW = 20
"""Length of that window in audits."""


@dataclass(frozen=True, slots=True)
class Named:
    """A rank that was wrong, and the counts that say so.

    Attributes:
        rank: The rank.
        mismatches: Comparisons in which it was wrong.
        comparisons: Comparisons it took part in.
        partners: Ranks it was compared with.
        arbiters: Ranks that recomputed and settled it.
        reproduced: It was wrong in every repeat; None if it could not be asked.
        producers: Whose micro-batches it got wrong.
    """

    rank: int
    mismatches: int
    comparisons: int
    partners: tuple[int, ...]
    arbiters: tuple[int, ...]
    reproduced: bool | None
    producers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """What is known of one audit.

    Attributes:
        comparisons_total: Comparisons over all ranks.
        mismatches: Those that did not match.
        arbitration: ``arbitration[producer][arbiter]`` is that arbiter's value.
        repeats: By (rank, producer), the values of the repeats in order.
        weights_equal: All replicas held the same weights before the audit.
        transport: Producers whose payload arrived damaged.
        pairing: Who recomputed whom, for the names of partners.
    """

    comparisons_total: int
    mismatches: Sequence[Mismatch] = ()
    arbitration: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    repeats: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    weights_equal: bool = True
    transport: tuple[int, ...] = ()
    pairing: Pairing | None = None


@dataclass(frozen=True, slots=True)
class AuditJudgement:
    """What one audit came to.

    Attributes:
        outcome: The outcome; only `SUSPECT` names ranks.
        reason: One sentence for a person.
        named: Ranks that are wrong and were wrong again.
        strikes: Ranks that were wrong once and right when asked again.
        ranks: Ranks it concerns without blaming them: those with a strike, or both sides of every
            comparison that did not match.
        settlement: What arbitration came to.
    """

    outcome: Outcome
    reason: str
    named: tuple[Named, ...] = ()
    strikes: tuple[Named, ...] = ()
    ranks: tuple[int, ...] = ()
    settlement: Settlement = field(default_factory=Settlement)


def struck_lately(
    history: Iterable[tuple[int, int]], *, audit: int, excluding: Collection[int] = ()
) -> int:
    """Different ranks with a strike in the window before an audit: `judge_audit`'s recent_strikes.

    Args:
        history: (number of the audit, rank) of every strike of this run since preflight.
        audit: Number of the audit to be judged; audits are counted, not steps.
        excluding: Ranks that are wrong in that audit: ``settlement.wrong``.
    """
    since = audit - STRIKE_WINDOW
    return len({rank for at, rank in history if since <= at < audit} - set(excluding))


class _Answers:
    """What the repeats say: how many a rank made of a micro-batch, and how many were wrong."""

    def __init__(
        self, settlement: Settlement, repeats: Mapping[tuple[int, int], tuple[str, ...]]
    ) -> None:
        self.settlement = settlement
        self._wrong: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], int] = {}
        for key, values in repeats.items():
            failed = sum(values.count(value) for value in set(values) if is_error(value))
            right = settlement.right.get(key[1])
            self._made[key] = len(values) - failed
            self._wrong[key] = len(values) - failed - (values.count(right) if right else 0)

    def unsteady(self) -> tuple[int, ...]:
        """Agreeing ranks that differ from themselves."""
        found = {
            rank
            for producer, ranks in self.settlement.agreeing.items()
            for rank in ranks
            if self._wrong.get((rank, producer))
        }
        return tuple(sorted(found))

    def wrong_again(self, rank: int) -> tuple[int, int]:
        """Repeats of a wrong rank that were wrong, and all of them."""
        keys = [(rank, producer) for producer in self.settlement.wrong[rank]]
        return sum(self._wrong.get(k, 0) for k in keys), sum(self._made.get(k, 0) for k in keys)

    def _complete(self, rank: int, producer: int) -> bool:
        """The rank and at least one that agrees made every repeat of a micro-batch."""
        controls = self.settlement.agreeing[producer]
        return self._made.get((rank, producer), 0) >= REPEATS and any(
            self._made.get((other, producer), 0) >= REPEATS for other in controls
        )

    def reproduced(self, rank: int) -> bool | None:
        """Whether a wrong rank was wrong in every repeat of a micro-batch; None if not known."""
        keys = [(rank, p) for p in self.settlement.wrong[rank] if self._complete(rank, p)]
        if not keys:
            return None
        return any(self._wrong[key] == self._made[key] for key in keys)


def _evidence(rank: int, facts: AuditFacts, answers: _Answers) -> Named:
    producers = answers.settlement.wrong[rank]
    partners = {
        b.replayer if b.producer == rank else b.producer
        for b in facts.mismatches
        if b.producer in producers and rank in (b.producer, b.replayer)
    }
    if facts.pairing is not None:
        partners |= {facts.pairing.replayer[rank], facts.pairing.producer[rank]}
    arbiters = {a for producer in producers for a in facts.arbitration.get(producer, {})}
    return Named(
        rank=rank,
        mismatches=len(producers),
        comparisons=2,  # as producer and as replayer
        partners=tuple(sorted(partners)),
        arbiters=tuple(sorted(arbiters)),
        reproduced=answers.reproduced(rank),
        producers=producers,
    )


def _described(named: Named, answers: _Answers) -> str:
    """One wrong rank in words."""
    if named.mismatches == named.comparisons:
        where = "in both of its comparisons"
    elif named.producers == (named.rank,):
        where = "on its own micro-batch"
    else:
        where = f"in its replay of rank {named.producers[0]}"
    agreeing = {r for p in named.producers for r in answers.settlement.agreeing[p]}
    again, asked = answers.wrong_again(named.rank)
    said = f"rank {named.rank} is wrong {where}, settled by {list_ranks(agreeing)}"
    return f"{said}, and wrong again in {again} of {asked} repeats"


def _judge_settled(
    facts: AuditFacts, settlement: Settlement, quorum: int, recent_strikes: int
) -> AuditJudgement:
    """Arbitration has taken place: say what it and the repeats came to."""
    answers = _Answers(settlement, facts.repeats)
    found = [_evidence(rank, facts, answers) for rank in settlement.wrong]
    named = tuple(n for n in found if n.reproduced)
    strikes = tuple(n for n in found if n.reproduced is False)
    ranks = involved_ranks(facts.mismatches)
    unsteady, struck = answers.unsteady(), recent_strikes + len(strikes)

    if unsteady:
        outcome, said = (
            Outcome.NONDETERMINISTIC,
            f"repeats of {list_ranks(unsteady)} differ among themselves",
        )
    elif struck >= STRIKES_TO_DOUBT:
        outcome = Outcome.NONDETERMINISTIC
        said = f"{struck} ranks were wrong once lately and right when asked again"
    elif named:
        outcome, said = Outcome.SUSPECT, "; ".join(_described(n, answers) for n in named)
    elif strikes:
        outcome, said = Outcome.NOT_REPRODUCED, "; ".join(_described(n, answers) for n in strikes)
    elif found:
        outcome = Outcome.UNATTRIBUTED
        said = (
            f"a quorum contradicts {list_ranks(settlement.wrong)}, and the {REPEATS} repeats "
            "that show whether this happens again were not all made"
        )
    else:
        outcome = Outcome.INCONCLUSIVE
        said = (
            f"no value of the micro-batch of {list_ranks(settlement.inconclusive)} is held by "
            f"{quorum} ranks and by more than any other"
        )
    if outcome is Outcome.NONDETERMINISTIC:
        said += ": the computation does not repeat, and nobody is blamed until the next preflight"
        named = ()
    if outcome is Outcome.NOT_REPRODUCED:
        ranks = tuple(n.rank for n in strikes)  # a strike is not shared with the partner
    named_ranks = {n.rank for n in named}
    ranks = tuple(rank for rank in ranks if rank not in named_ranks)
    return AuditJudgement(outcome, said, named, strikes, ranks, settlement)


def _judge_without_blame(
    facts: AuditFacts, compared: Sequence[Mismatch], topology: Topology
) -> AuditJudgement | None:
    """The judgements that need no arbitration, or None if it has to decide."""
    failed = [b for b in facts.mismatches if b not in compared]
    ranks = involved_ranks(facts.mismatches)
    limit = widespread_limit(topology.world_size)
    domains = len(set(topology.domains))
    mismatches = f"{len(compared)} of {count(facts.comparisons_total, 'comparison')} did not match"
    if not facts.weights_equal:
        said = "the replicas already differed before the audit; the weight check has the verdict"
        return AuditJudgement(Outcome.VOID, said)
    if len(compared) > limit:
        said = f"{mismatches}: too many for one device (at most {limit}), so nobody is named"
        return AuditJudgement(Outcome.WIDESPREAD, said, ranks=ranks)
    if compared and domains < DOMAINS_TO_NAME:
        noun = "node" if topology.fault_domain == "node" else "GPU"
        said = (
            f"{mismatches} ({list_ranks(ranks)}), and naming one takes {DOMAINS_TO_NAME} {noun}s, "
            f"while there {'is' if domains == 1 else 'are'} {domains}"
        )
        return AuditJudgement(Outcome.UNATTRIBUTED, said, ranks=ranks)
    if compared:
        return None
    if facts.transport:
        said = f"the payload of {list_ranks(facts.transport)} arrived damaged; no device is named"
        return AuditJudgement(Outcome.TRANSPORT, said, ranks=facts.transport)
    if failed:
        one = failed[0]
        error = one.replayer_value if is_error(one.replayer_value) else one.producer_value
        said = (
            f"the replay of rank {one.producer} on rank {one.replayer} ended with: "
            f"{error.removeprefix(ERROR_PREFIX).strip()}"
        )
        return AuditJudgement(Outcome.NOT_RUN, said, ranks=ranks)
    return AuditJudgement(
        Outcome.PASS, f"all {count(facts.comparisons_total, 'comparison')} matched bit for bit"
    )


def judge_audit(
    facts: AuditFacts, topology: Topology, *, quorum: int = 2, recent_strikes: int = 0
) -> AuditJudgement:
    """Judge one audit from its facts; pure, the same on every rank.

    Args:
        facts: What was compared, arbitrated and repeated. A comparison whose payload arrived
            damaged is judged as transport, not as a mismatch.
        topology: Where the ranks are.
        quorum: Different ranks that must hold a value for it to be right.
        recent_strikes: Other ranks with a strike lately; see `struck_lately`.
    """
    usable = tuple(b for b in facts.mismatches if b.producer not in facts.transport)
    compared = compared_only(usable)
    early = _judge_without_blame(facts, compared, topology)
    if early is not None:
        return early
    settlement = settle(compared, facts.arbitration, quorum=quorum)
    judgement = _judge_settled(
        replace(facts, mismatches=compared), settlement, quorum, recent_strikes
    )
    if not facts.transport:
        return judgement
    also = f"; the payload of {list_ranks(facts.transport)} arrived damaged"
    return replace(judgement, reason=judgement.reason + also)
