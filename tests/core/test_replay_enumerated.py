"""Every single and double fault, over every pairing that can be drawn.

A faulty rank is wrong in some of its roles: P its own training pass, R its replay of a partner's
micro-batch, A an arbitration and the repeats that follow. Its wrong values are its own (distinct),
or equal to every other wrong value of that micro-batch.
"""

import itertools
from collections import Counter
from functools import cache

import pytest

from sdcwatch.core.records import Outcome
from sdcwatch.core.replay import (
    AuditFacts,
    Mismatch,
    judge_audit,
    plan_arbitration,
    plan_repeats,
    settle,
)
from sdcwatch.core.topology import candidate_pairings

LAYOUTS = ("3x1", "4x1", "3x2", "4x2", "3+2+2", "2+2+1")
ROLES = tuple(
    frozenset(roles) for size in (1, 2, 3) for roles in itertools.combinations("PRA", size)
)
RIGHT = "right"


def value(rank, role, producer, faults, equal):
    if role not in faults.get(rank, ()):
        return RIGHT
    return f"wrong on {producer}" if equal else f"wrong {rank} {role} on {producer}"


@cache
def planned(topology, pairing, own_and_replays, quorum):
    """Comparisons and arbiters: they do not depend on what is wrong in arbitrations."""
    equal, faults = own_and_replays[0], dict(own_and_replays[1:])
    pairs = (
        (p, r, value(p, "P", p, faults, equal), value(r, "R", p, faults, equal))
        for p, r in enumerate(pairing.replayer)
    )
    mismatches = [Mismatch(p, r, own, replayed) for p, r, own, replayed in pairs if own != replayed]
    return mismatches, plan_arbitration(mismatches, topology, quorum=quorum)


def audit(topology, pairing, faults, *, equal, quorum=2):
    """The facts of one audit with these faults, and its judgement."""
    passes = tuple((rank, roles - {"A"}) for rank, roles in faults.items())
    mismatches, plan = planned(topology, pairing, (equal, *passes), quorum)
    arbitration = {
        p: {a: value(a, "A", p, faults, equal) for a in ranks} for p, ranks in plan.items()
    }
    settled = settle(mismatches, arbitration, quorum=quorum, domains=topology.domains)
    orders = plan_repeats(settled)
    facts = AuditFacts(
        comparisons_total=topology.world_size,
        mismatches=mismatches,
        arbitration=arbitration,
        repeats={
            (o.rank, o.producer): (value(o.rank, "A", o.producer, faults, equal),) * o.times
            for o in orders
        },
        pairing=pairing,
    )
    return facts, judge_audit(facts, topology, quorum=quorum)


def accused(judgement):
    return {n.rank for n in (*judgement.named, *judgement.strikes)}


@pytest.mark.parametrize("equal", [False, True], ids=["distinct", "equal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_visible_single_fault_is_named_if_it_repeats_and_a_strike_if_not(
    layout, equal, topology
):
    where = topology(layout)
    for pairing in candidate_pairings(where):
        for rank, roles in itertools.product(range(where.world_size), ROLES):
            _, judgement = audit(where, pairing, {rank: roles}, equal=equal)
            if roles == {"A"}:  # nothing was wrong that arbitration could be asked about
                assert judgement.outcome is Outcome.PASS
                continue
            assert accused(judgement) == {rank}
            assert set(judgement.settlement.wrong) == {rank}
            assert not judgement.settlement.inconclusive
            if "A" in roles:
                assert judgement.outcome is Outcome.SUSPECT
                assert judgement.named[0].mismatches == len(roles - {"A"})
            else:
                assert judgement.outcome is Outcome.NOT_REPRODUCED
                assert judgement.ranks == (rank,)


def signature(facts):
    """All that a judgement can depend on: who holds a value equal to whose."""
    found = []
    for one in facts.mismatches:
        votes = {
            (one.producer, "P"): one.producer_value,
            (one.replayer, "R"): one.replayer_value,
        }
        votes |= {(a, "A"): v for a, v in facts.arbitration[one.producer].items()}
        votes |= {(r, i): v for (r, p), vs in facts.repeats.items() if p == one.producer
                  for i, v in enumerate(vs)}  # fmt: skip
        same = {v: frozenset(k for k, held in votes.items() if held == v) for v in votes.values()}
        found.append((one.producer, frozenset(same.values())))
    return frozenset(found)


# Two equal wrong votes of three outvote the third rank: see the test of three ranks.
DOUBLES = [(layout, equal, 2) for layout in LAYOUTS for equal in (False, True)]
DOUBLES.remove(("3x1", True, 2))
DOUBLES += [(layout, True, 3) for layout in ("3x1", "4x1", "2+2+1")]


@pytest.mark.parametrize(("layout", "equal", "quorum"), DOUBLES)
def test_no_double_fault_gets_a_healthy_rank_accused(layout, equal, quorum, topology):
    where = topology(layout)
    tally = Counter()
    for pairing in candidate_pairings(where):
        for ranks in itertools.combinations(range(where.world_size), 2):
            for roles in itertools.product(ROLES, repeat=2):
                faults = dict(zip(ranks, roles, strict=True))
                facts, judgement = audit(where, pairing, faults, equal=equal, quorum=quorum)
                assert accused(judgement) <= set(ranks), (pairing, faults)
                assert set(judgement.settlement.wrong) <= set(ranks), (pairing, faults)
                visible = {r for b in facts.mismatches for r in (b.producer, b.replayer)} & set(
                    ranks
                )
                got = accused(judgement) & visible
                tally[_share(judgement, got, visible)] += 1
    total = sum(tally.values())
    print(
        f"\n{layout}, {'equal' if equal else 'distinct'} wrong values, quorum {quorum}: "
        + ", ".join(f"{kind} {n / total:.1%}" for kind, n in sorted(tally.items()))
    )
    decided = {"invisible", "all accused", "some accused", "inconclusive", "nondeterministic"}
    assert set(tally) <= decided
    if where.world_size > 3 and not equal:
        assert tally["inconclusive"] == 0


def _share(judgement, got, visible):
    if judgement.outcome is Outcome.PASS:
        return "invisible"
    if judgement.outcome in (Outcome.INCONCLUSIVE, Outcome.NONDETERMINISTIC):
        return judgement.outcome.value
    return "all accused" if got == visible else "some accused"


def test_with_three_ranks_only_facts_equal_to_those_of_one_bad_rank_name_a_healthy_one(topology):
    # Two of three ranks with equal wrong values hold two of three votes. Any rule that names every
    # single fault must then name the third: the facts are the same. quorum=3 names nobody.
    where = topology("3x1")
    looked_alike = 0
    for pairing in candidate_pairings(where):
        singles = {
            (rank, signature(audit(where, pairing, {rank: roles}, equal=True)[0]))
            for rank, roles in itertools.product(range(3), ROLES)
        }
        for ranks in itertools.combinations(range(3), 2):
            for roles in itertools.product(ROLES, repeat=2):
                faults = dict(zip(ranks, roles, strict=True))
                facts, judgement = audit(where, pairing, faults, equal=True)
                _, careful = audit(where, pairing, faults, equal=True, quorum=3)
                assert not accused(careful)
                for rank in accused(judgement) - set(ranks):
                    looked_alike += 1
                    assert (rank, signature(facts)) in singles, faults
    assert looked_alike > 0


@pytest.mark.parametrize("layout", ["2x1", "2x2", "2x4"])
def test_two_domains_detect_every_single_fault_and_name_nobody(layout, topology):
    where = topology(layout)
    for pairing in candidate_pairings(where):
        for rank, roles in itertools.product(range(where.world_size), ROLES):
            _, judgement = audit(where, pairing, {rank: roles}, equal=False)
            if roles == {"A"}:
                assert judgement.outcome is Outcome.PASS
            else:
                assert judgement.outcome is Outcome.UNATTRIBUTED
                assert rank in judgement.ranks
                assert "naming one takes 3 nodes, while there are 2" in judgement.reason
            assert not accused(judgement)
