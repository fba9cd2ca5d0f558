"""Check 2: who recomputes a micro-batch on which two ranks disagree, and which value is right.

**The unit that fails is the fault domain.** All mismatches of one broken device, or of one broken
node, have an end in one domain. Mismatches that one or two domains explain are arbitrated, a few
comparisons of each domain, each of its ranks once before any twice. What takes more than two is no
broken device.

**Which value is right.** For every comparison that is arbitrated two more ranks (four for a quorum
of 3) recompute the producer's micro-batch: ranks of neither's domain, first those in no mismatch,
on different domains if possible. Where only one other domain has any, a rank of each of the two
domains recomputes too. A value is right when at least `quorum` different ranks in at least two
domains hold it, and when no other value is held by as many ranks or by as many domains. Of producer
and replayer, each that differs from it is wrong. A domain has one voice, however many of its ranks
say the same, so a node whose ranks are all wrong outvotes nobody.

**Repeats.** Each wrong rank and two agreeing ranks recompute that micro-batch `REPEATS` times more.

Everything here is at most O(W log W): 16,384 ranks are planned for in well under a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sdcwatch.core.topology import DOMAINS_TO_NAME, Topology, partners

REPEATS = 8
"""How often a wrong rank, and each agreeing rank asked, recompute before anybody is named."""
AGREEING_ASKED = 2
"""Agreeing ranks that repeat too, for each micro-batch."""
ARBITRATED = 8
"""Comparisons of one fault domain that are arbitrated in one audit."""
DOMAINS_EXPLAINED = 2
"""Fault domains that may be at fault, and be named, in one audit."""
ERROR_PREFIX = "error:"
DISTURBED = "the replay drew other random numbers than the step: something else used its generator"
"""The error of a replay whose generators did not end where the producer's did."""
OVERWRITTEN = "its inputs were overwritten after the call"
"""Why a micro-batch is not replayed: the loop has refilled a buffer, for example."""
NOT_KEPT = "micro-batch not kept"
"""Why a micro-batch is not replayed: the step's micro-batches exceed `max_payload_mb`."""


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

    @property
    def ends(self) -> tuple[int, int]:
        """Its two ranks."""
        return self.producer, self.replayer


@dataclass(frozen=True, slots=True)
class Settlement:
    """What arbitration came to.

    Attributes:
        right: For each arbitrated mismatch, by producer, the value that a quorum holds, or None.
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


def compared_only(mismatches: Iterable[Mismatch]) -> list[Mismatch]:
    """The comparisons of two results; not those in which a computation raised."""
    return [b for b in mismatches if not (is_error(b.producer_value) or is_error(b.replayer_value))]


def involved_ranks(mismatches: Iterable[Mismatch]) -> tuple[int, ...]:
    """Producers and replayers of some comparisons, in order."""
    return tuple(sorted({rank for b in mismatches for rank in b.ends}))


def explain(mismatches: Iterable[Mismatch], topology: Topology) -> tuple[frozenset[str], ...]:
    """The smallest sets of at most two fault domains with an end in every mismatch.

    Empty if more than two are needed. Linear in the number of mismatches.
    """
    domains = topology.domains
    edges = list(dict.fromkeys((domains[b.producer], domains[b.replayer]) for b in mismatches))
    if not edges:
        return ()
    pairs: set[frozenset[str]] = set()
    single: list[frozenset[str]] = []
    for first in edges[0]:
        rest = [edge for edge in edges if first not in edge]
        if not rest:
            single.append(frozenset((first,)))
            continue
        for second in rest[0]:
            if all(second in edge for edge in rest):
                pairs.add(frozenset((first, second)))
    return tuple(single or sorted(pairs, key=sorted))


def is_widespread(
    mismatches: Sequence[Mismatch], topology: Topology, *, comparisons_total: int | None = None
) -> bool:
    """Whether so much differs that no broken device, and no broken domain, explains it.

    Only with three fault domains or more: then if no comparison matched, or if it takes more than
    two domains to explain the mismatches.

    Args:
        mismatches: Comparisons of two results that did not match.
        topology: Where the ranks are.
        comparisons_total: Comparisons made; one for each rank if not given.
    """
    total = topology.world_size if comparisons_total is None else comparisons_total
    if not mismatches or len(topology.domain_sizes) < DOMAINS_TO_NAME:
        return False
    return len(mismatches) >= total or not explain(mismatches, topology)


def _selected(mismatches: Sequence[Mismatch], topology: Topology) -> list[Mismatch]:
    """The comparisons to arbitrate: a few of each domain, each of its ranks once before twice."""
    domains = topology.domains
    at_fault = {domain for found in explain(mismatches, topology) for domain in found}
    chosen: dict[int, Mismatch] = {}
    asked, of_domain = Counter[int](), Counter[str]()
    for again in (False, True):
        for one in mismatches:
            ends = [rank for rank in one.ends if domains[rank] in at_fault]
            if one.producer not in chosen and any(
                of_domain[domains[rank]] < ARBITRATED and (again or not asked[rank])
                for rank in ends
            ):
                chosen[one.producer] = one
                asked.update(ends)
                of_domain.update({domains[rank] for rank in ends})
    return [one for one in mismatches if one.producer in chosen]


class _Bench:
    """Ranks that can arbitrate, and how much each has to do already."""

    def __init__(self, topology: Topology, mismatches: Sequence[Mismatch]) -> None:
        self._domains, self._world = topology.domains, topology.world_size
        self._busy = frozenset(involved_ranks(mismatches))
        self._load = Counter[int]()

    def choose(self, one: Mismatch, known: Sequence[int], number: int) -> tuple[int, ...]:
        """The arbiters of one comparison, of the ranks that its producer exchanges with."""
        domains, producer = self._domains, one.producer
        home = (domains[producer], domains[one.replayer])
        others = sorted(
            (rank for rank in known if rank != one.replayer),
            key=lambda rank: (rank - producer) % self._world,  # so that work spreads
        )
        away = [rank for rank in others if domains[rank] not in home]
        chosen: list[int] = []
        used = Counter[str]()
        while away and len(chosen) < number:
            best = min(away, key=lambda r: (r in self._busy, used[domains[r]], self._load[r]))
            away.remove(best)
            chosen.append(best)
            used[domains[best]] += 1
        if len(used) < 2:  # one other domain alone could not settle it
            for domain in dict.fromkeys(home):
                mates = [rank for rank in others if domains[rank] == domain]
                if mates:
                    chosen.append(min(mates, key=lambda r: (r in self._busy, self._load[r])))
        self._load.update(chosen)
        return tuple(chosen)


def plan_arbitration(
    mismatches: Sequence[Mismatch],
    topology: Topology,
    *,
    quorum: int = 2,
    comparisons_total: int | None = None,
    left_out: Collection[int] = (),
) -> dict[int, tuple[int, ...]]:
    """Which ranks recompute whose micro-batch, by producer; only for those to be arbitrated.

    Empty where arbitration can settle nothing: fewer than three fault domains, mismatches that no
    two domains explain, or computations that raised.

    Args:
        mismatches: Comparisons that did not match.
        topology: Where the ranks are.
        quorum: Different ranks that must hold a value for it to be right.
        comparisons_total: Comparisons made; one for each rank if not given.
        left_out: Ranks that cannot arbitrate: they are known to differ.
    """
    compared = compared_only(mismatches)
    if len(topology.domain_sizes) < DOMAINS_TO_NAME or is_widespread(
        compared, topology, comparisons_total=comparisons_total
    ):
        return {}
    selected = _selected(compared, topology)
    known = partners(topology, [one.producer for one in selected])
    bench = _Bench(topology, compared)
    number = 2 if quorum <= 2 else 4
    return {
        one.producer: bench.choose(
            one, [rank for rank in known[one.producer] if rank not in left_out], number
        )
        for one in selected
    }


def _right_value(
    votes: Mapping[int, str], quorum: int, domains: Sequence[str] | Mapping[int, str]
) -> str | None:
    """The value that enough ranks and domains hold, and more of both than hold any other."""
    ranks = Counter[str](votes.values())
    held: dict[str, set[str]] = {}
    for rank, value in votes.items():
        held.setdefault(value, set()).add(domains[rank])
    best = max(ranks, key=lambda value: (len(held[value]), ranks[value]))
    alone = all(
        ranks[value] < ranks[best] and len(held[value]) < len(held[best])
        for value in ranks
        if value != best
    )
    return best if alone and ranks[best] >= quorum and len(held[best]) >= 2 else None


def settle(
    mismatches: Sequence[Mismatch],
    arbitration: Mapping[int, Mapping[int, str]],
    *,
    quorum: int = 2,
    domains: Sequence[str] | None = None,
) -> Settlement:
    """Decide each arbitrated mismatch: which value is right, and who differs from it.

    Args:
        mismatches: Comparisons that did not match.
        arbitration: ``arbitration[producer][arbiter]`` is that arbiter's value. A mismatch that is
            not in it was not arbitrated and is not settled.
        quorum: Different ranks that must hold a value for it to be right.
        domains: Fault domain of each rank; each rank is one of its own if not given.
    """
    right: dict[int, str | None] = {}
    wrong: dict[int, tuple[int, ...]] = {}
    agreeing: dict[int, tuple[int, ...]] = {}
    for one in compared_only(mismatches):
        arbiters = arbitration.get(one.producer)
        if arbiters is None:
            continue
        votes = {rank: value for rank, value in arbiters.items() if not is_error(value)}
        votes[one.producer], votes[one.replayer] = one.producer_value, one.replayer_value
        homes = {rank: str(rank) for rank in votes} if domains is None else domains
        value = right[one.producer] = _right_value(votes, quorum, homes)
        if value is None:
            continue
        agreeing[one.producer] = tuple(rank for rank, held in votes.items() if held == value)
        for rank in one.ends:
            if votes[rank] != value:
                wrong[rank] = (*wrong.get(rank, ()), one.producer)
    inconclusive = tuple(producer for producer, value in right.items() if value is None)
    return Settlement(right, dict(sorted(wrong.items())), agreeing, inconclusive)


def plan_repeats(settlement: Settlement, *, left_out: Collection[int] = ()) -> tuple[Repeat, ...]:
    """Who recomputes what before anybody is named: wrong ranks, and agreeing ones as a control.

    Args:
        settlement: What arbitration came to.
        left_out: Ranks that cannot serve as a control.
    """
    orders = []
    for rank, producers in settlement.wrong.items():
        orders += [Repeat(rank, producer, suspect=True) for producer in producers]
    asked = dict.fromkeys(p for producers in settlement.wrong.values() for p in producers)
    for producer in asked:
        # One that is wrong elsewhere would only say that it is.
        fit = sorted(
            (rank for rank in settlement.agreeing[producer] if rank not in left_out),
            key=lambda rank: rank in settlement.wrong,
        )
        orders += [Repeat(rank, producer, suspect=False) for rank in fit[:AGREEING_ASKED]]
    return tuple(orders)
