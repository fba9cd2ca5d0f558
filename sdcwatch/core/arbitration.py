"""Arbitration of check 2: who recomputes what did not match, and which value is right.

For every bad comparison two more ranks (four for a quorum of 3) recompute the producer's
micro-batch: ranks of neither's fault domain, first those in no bad comparison, on different domains
if possible; only where too few exist elsewhere, ranks of the two domains. A value is right when at
least `quorum` different ranks hold it and no other value is held by as many. Of producer and
replayer, each that differs from it is wrong.

With four voters this blames no healthy rank for up to two faulty ranks, whatever wrong values they
give: the right value keeps two of four votes, and two equal wrong ones only tie. Faults whose wrong
values differ never outvote anybody, at any number. A world of three ranks has three votes: there
two ranks with *equal* wrong values look exactly like one bad rank, and only ``quorum=3``, which
names nobody there, is safe against them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sdcwatch.core.pairing import DOMAINS_TO_NAME
from sdcwatch.core.topology import Topology

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
class Bad:
    """A comparison that did not match. Values are compared for equality only."""

    producer: int
    replayer: int
    producer_value: str
    replayer_value: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What arbitration came to.

    Attributes:
        right: For each bad comparison, by producer, the value that a quorum holds, or None.
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
    """The most bad comparisons that can still be one device's doing; more are `WIDESPREAD`."""
    return max(4, world_size // 8)


def compared_only(bad: Iterable[Bad]) -> list[Bad]:
    """The comparisons of two results; not those in which a computation raised."""
    return [b for b in bad if not (is_error(b.producer_value) or is_error(b.replayer_value))]


def involved_ranks(bad: Iterable[Bad]) -> tuple[int, ...]:
    """Producers and replayers of some comparisons, in order."""
    return tuple(sorted({rank for b in bad for rank in (b.producer, b.replayer)}))


def _arbiters(
    one: Bad, busy: frozenset[int], domains: Sequence[str], number: int
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
    bad: Sequence[Bad], topology: Topology, *, quorum: int = 2
) -> dict[int, tuple[int, ...]]:
    """Which ranks recompute the micro-batch of each producer in a bad comparison.

    No ranks where arbitration can settle nothing: fewer than three fault domains, more bad
    comparisons than one device explains, or a computation that raised.
    """
    plan: dict[int, tuple[int, ...]] = {b.producer: () for b in bad}
    compared = compared_only(bad)
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
    bad: Sequence[Bad], arbitration: Mapping[int, Mapping[int, str]], *, quorum: int = 2
) -> Settlement:
    """Decide each bad comparison by quorum: which value is right, and who differs from it.

    Args:
        bad: Comparisons that did not match.
        arbitration: ``arbitration[producer][arbiter]`` is that arbiter's value.
        quorum: Different ranks that must hold a value for it to be right.
    """
    right: dict[int, str | None] = {}
    wrong: dict[int, tuple[int, ...]] = {}
    agreeing: dict[int, tuple[int, ...]] = {}
    for one in compared_only(bad):
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
