"""Who is where: the identity of each rank, and how ranks fall into fault domains.

A pairing, who recomputes whom in one audit, never gives a micro-batch to its own fault domain. It
exists if and only if no domain holds more than half of the ranks: a domain with more has too few
ranks elsewhere to serve it, and otherwise a cyclic shift of the ranks, sorted by domain, by the
size of the largest domain works. Every rank calls these with the same arguments and gets the same
answer; nothing is exchanged.

However many ranks there are, audits draw from `MOVES` pairings, so that each rank ever exchanges
micro-batches with a few dozen others and all of those connections can be made at the start.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sdcwatch.errors import ConfigurationError

FaultDomain = Literal["node", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The identity of one rank.

    Attributes:
        rank: Rank in the replica group.
        node: Name of the node: host name unless configured or `SDCWATCH_NODE`.
        host: Host name of the machine.
        local_rank: Rank within the machine, as the launcher gives it.
        pid: Process id.
        instance_id: What a replacement request names: cloud instance id or host name.
        gpu_index: Index of the GPU on its host, None on CPU.
        gpu_uuid: UUID of the GPU; simulated ranks carry ``cpu-sim-<node>-<i>``.
    """

    rank: int
    node: str
    host: str
    local_rank: int
    pid: int
    instance_id: str
    gpu_index: int | None = None
    gpu_uuid: str | None = None

    @property
    def gpu(self) -> str:
        """The label that names this rank's device: its UUID, or node and index."""
        return self.gpu_uuid or f"{self.node}/{self.local_rank}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a replica group, in rank order, and the fault domain of each.

    Attributes:
        ranks: Identity of each rank; ``ranks[r].rank == r``.
        fault_domain: What counts as independent hardware: a node, or each GPU for itself.
        domains: The fault domain of each rank, in rank order.
    """

    ranks: tuple[RankInfo, ...]
    fault_domain: FaultDomain = "node"
    domains: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gpu = self.fault_domain == "gpu"
        domains = tuple(f"{r.node}#{r.rank}" if gpu else r.node for r in self.ranks)
        object.__setattr__(self, "domains", domains)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def domain_sizes(self) -> dict[str, int]:
        """Ranks per fault domain, in order of first appearance."""
        return dict(Counter(self.domains))

    @property
    def domain_noun(self) -> str:
        """A fault domain in words."""
        return "node" if self.fault_domain == "node" else "GPU"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Distinct node names in order of first appearance."""
        return tuple(dict.fromkeys(r.node for r in self.ranks))


DOMAINS_TO_NAME = 3
"""Fault domains needed to name a rank: its own, its partner's, and one that settles it."""
MOVES = 16
"""Pairings that audits draw from at most."""
EVERYBODY = 2 * MOVES + 1
"""Ranks up to which each may exchange micro-batches with every other."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Who recomputes whose micro-batch in one audit.

    Attributes:
        replayer: ``replayer[p]`` recomputes the micro-batch of rank `p`.
        mutual: Ranks recompute each other in pairs, so that both comparisons of a rank have the
            same partner. Only drawn where nothing else exists.
    """

    replayer: tuple[int, ...]
    mutual: bool

    @property
    def producer(self) -> tuple[int, ...]:
        """``producer[r]`` is the rank whose micro-batch rank `r` recomputes."""
        inverse = [0] * len(self.replayer)
        for producer, replayer in enumerate(self.replayer):
            inverse[replayer] = producer
        return tuple(inverse)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Ranks grouped by fault domain, and the moves from one rank to another that are possible.

    Equal domains: (a, b) for domain + a, place + b. Unequal: (s, 0) for a shift by s.
    """

    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    """The ranks, one domain after the other; a position is an index into it."""
    equal: bool
    """All domains have as many ranks."""

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """Up to `MOVES` moves, spread over all; those that pair ranks mutually only if all do."""
        if self.equal:
            domains, places = len(self.groups), len(self.groups[0])
            every = [(a, b) for a in range(1, domains) for b in range(places)]
            fresh = [(a, b) for a, b in every if 2 * a % domains or 2 * b % places]
        else:
            world, largest = len(self.order), max(map(len, self.groups))
            every = [(s, 0) for s in range(largest, world - largest + 1)]
            fresh = [(s, b) for s, b in every if 2 * s != world]
        found = fresh or every
        if len(found) <= MOVES:
            return tuple(found)
        # Multiples of the golden ratio spread evenly and favor no place within a domain.
        picked = (k * 2654435769 % 2**32 * len(found) >> 32 for k in range(MOVES))
        return tuple(found[index] for index in dict.fromkeys(picked))

    def moved(self, position: int, move: tuple[int, int], *, back: bool = False) -> int:
        """The position that a move leads to, or from which it comes."""
        by, along = (-move[0], -move[1]) if back else move
        if not self.equal:
            return (position + by) % len(self.order)
        size = len(self.groups[0])
        domain, place = divmod(position, size)
        return (domain + by) % len(self.groups) * size + (place + along) % size

    def apply(self, move: tuple[int, int]) -> Pairing:
        replayer = [0] * len(self.order)
        for position, rank in enumerate(self.order):
            replayer[rank] = self.order[self.moved(position, move)]
        mutual = all(replayer[replayer[rank]] == rank for rank in self.order)
        return Pairing(tuple(replayer), mutual)


def _layout(topology: Topology) -> _Layout:
    groups: dict[str, list[int]] = {}
    for rank, domain in enumerate(topology.domains):
        groups.setdefault(domain, []).append(rank)
    ordered = tuple(map(tuple, groups.values()))
    order = tuple(rank for ranks in ordered for rank in ranks)
    return _Layout(ordered, order, len({len(ranks) for ranks in ordered}) == 1)


def partners(topology: Topology, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Ranks with which each of some ranks may ever exchange micro-batches, in rank order.

    Up to `EVERYBODY` ranks that is everybody else. Beyond, it is whoever a pairing can give, and
    where there are only a few domains also ranks of each of them, so that a dispute finds arbiters.
    If one rank is a partner of another, so is the other of it.
    """
    world = topology.world_size
    if world <= EVERYBODY:
        return {rank: tuple(r for r in range(world) if r != rank) for rank in ranks}
    layout = _layout(topology)
    positions = {rank: position for position, rank in enumerate(layout.order)}
    moves = layout.moves if pairing_problem(topology) is None else ()
    places = {rank: place for group in layout.groups for place, rank in enumerate(group)}
    few = len(layout.groups) <= DOMAINS_TO_NAME
    found = {}
    for rank in ranks:
        position = positions[rank]
        ends = (layout.moved(position, m, back=back) for m in moves for back in (False, True))
        there = {layout.order[end] for end in ends}
        if few:
            there |= _same_place(layout, places[rank])
        found[rank] = tuple(sorted(there - {rank}))
    return found


def _same_place(layout: _Layout, place: int) -> set[int]:
    """Up to four neighbors in each domain; more where a domain is larger than the smallest."""
    blocks = -(-min(map(len, layout.groups)) // 4)
    wanted = place // 4 % blocks
    return {r for ranks in layout.groups for i, r in enumerate(ranks) if i // 4 % blocks == wanted}


def pairing_problem(topology: Topology) -> str | None:
    """Why no pairing exists, as a clause for a sentence, or None if one does."""
    world = topology.world_size
    if world < 2:
        return f"an audit needs at least 2 ranks, and there is {world}"
    domain, size = max(topology.domain_sizes.items(), key=lambda item: item[1])
    if 2 * size <= world:
        return None
    return (
        f"no {topology.fault_domain} may hold more than half of the ranks, "
        f"and {domain} holds {size} of {world}"
    )


def candidate_pairings(topology: Topology) -> tuple[Pairing, ...]:
    """Every pairing that `draw_pairing` can give, in a fixed order; empty if none exists."""
    if pairing_problem(topology) is not None:
        return ()
    layout = _layout(topology)
    return tuple(layout.apply(move) for move in layout.moves)


def draw_pairing(topology: Topology, *, step: int, seed: int) -> Pairing:
    """The pairing of the audit at `step`: drawn anew each audit, the same on every rank.

    A hash of (seed, step) draws it, so it depends on no generator's state and on no Python version.

    Raises:
        ConfigurationError: No pairing exists.
    """
    problem = pairing_problem(topology)
    if problem is not None:
        msg = (
            f"Expected a topology in which ranks can audit each other, but got one where {problem}."
            ' Spread the ranks evenly, or pass fault_domain="gpu" or audit_every=None.'
        )
        raise ConfigurationError(msg)
    layout = _layout(topology)
    digest = hashlib.sha256(f"pairing {seed} {step}".encode()).digest()
    moves = layout.moves
    return layout.apply(moves[int.from_bytes(digest[:8], "big") % len(moves)])


def choose_fault_domain(
    ranks: Sequence[RankInfo], requested: Literal["auto", "node", "gpu"]
) -> tuple[FaultDomain, str]:
    """The fault domain to use and a warning to show once, or "".

    ``"auto"`` means nodes if there are three and they can be paired, else each GPU for itself.
    """
    by_node, by_gpu = Topology(tuple(ranks), "node"), Topology(tuple(ranks), "gpu")
    nodes = len(by_node.nodes)
    if requested == "node":
        if nodes >= DOMAINS_TO_NAME:
            return "node", ""
        return "node", (
            f"With {nodes} node{'s' * (nodes != 1)} a replay mismatch is detected but names no "
            f"rank: naming one takes {DOMAINS_TO_NAME} nodes."
        )
    few = (
        f" With {len(ranks)} rank{'s' * (len(ranks) != 1)} a replay mismatch names no rank: "
        f"naming one takes {DOMAINS_TO_NAME}."
        if len(ranks) < DOMAINS_TO_NAME
        else ""
    )
    if requested == "gpu":
        return "gpu", few.strip()
    problem = pairing_problem(by_node)
    if nodes >= DOMAINS_TO_NAME and problem is None:
        return "node", ""
    why = problem or f"{nodes} nodes cannot settle who is wrong"
    if nodes == 1:
        why = "all ranks are on one node"
    return by_gpu.fault_domain, (
        f"Each GPU counts as its own fault domain because {why}; "
        f"a fault that a whole node shares can go unseen.{few}"
    )
