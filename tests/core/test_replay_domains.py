"""Whole nodes that fail, strikes across checks, what is bad from the start, and many ranks.

Whatever happens, a healthy device is never named: the sets of faults are enumerated where that is
short, and drawn from a seed where it is not.
"""

import itertools
import random
from dataclasses import replace

import pytest

from sdcwatch.core.arbitration import ARBITRATED, REPEATS, explain
from sdcwatch.core.history import History, device_of
from sdcwatch.core.records import Check, Outcome
from sdcwatch.core.replay import (
    LISTED,
    AuditFacts,
    Mismatch,
    asks_everybody,
    is_widespread,
    judge_audit,
    plan_arbitration,
    plan_repeats,
    remember,
    settle,
    usable_facts,
)
from sdcwatch.core.topology import candidate_pairings, draw_pairing

ROLES = tuple(
    frozenset(roles) for size in (1, 2, 3) for roles in itertools.combinations("PRA", size)
)
ALWAYS = frozenset("PRA")
"""P its own training pass, R its replay of a partner's micro-batch, A arbitrations and repeats."""


class Cluster:
    """Ranks of which some are wrong in some of their roles.

    Wrong values are each rank's own, or equal to every other wrong value of that micro-batch.
    """

    def __init__(self, topology, faults, *, equal=False):
        self.topology, self.faults, self.equal = topology, faults, equal

    def value(self, rank, role, producer):
        if role not in self.faults.get(rank, ()):
            return "right"
        return f"wrong on {producer}" if self.equal else f"wrong {rank} {role} on {producer}"

    def audit(self, pairing, history=None):
        """One audit as the guard makes it: its facts, and its judgement."""
        where, value = self.topology, self.value
        mismatches = [
            Mismatch(p, r, value(p, "P", p), value(r, "R", p))
            for p, r in enumerate(pairing.replayer)
            if value(p, "P", p) != value(r, "R", p)
        ]
        facts = AuditFacts(
            comparisons_total=where.world_size, mismatches=tuple(mismatches), pairing=pairing
        )
        usable = usable_facts(facts, history)
        plan = plan_arbitration(
            usable.mismatches,
            where,
            comparisons_total=usable.comparisons_total,
            left_out=() if history is None else history.differing,
        )
        arbitration = {p: {a: value(a, "A", p) for a in ranks} for p, ranks in plan.items()}
        settled = settle(usable.mismatches, arbitration, domains=where.domains)
        repeats = {
            (o.rank, o.producer): (value(o.rank, "A", o.producer),) * o.times
            for o in plan_repeats(settled)
        }
        facts = replace(facts, arbitration=arbitration, repeats=repeats)
        judgement = judge_audit(facts, where, history=history)
        if history is not None and asks_everybody(judgement, history):
            restless = [r for r in range(where.world_size) if value(r, "A", r) != value(r, "P", r)]
            facts = replace(facts, restless=tuple(restless))
            judgement = judge_audit(facts, where, history=history)
        return facts, judgement


def everybody(topology):
    return History(matched=frozenset(range(topology.world_size)))


def nodes_of(topology):
    domains = topology.domains
    return [tuple(r for r, d in enumerate(domains) if d == node) for node in dict.fromkeys(domains)]


def accused(judgement):
    return {n.rank for n in (*judgement.named, *judgement.strikes)} | set(judgement.differing)


NODE_LAYOUTS = ["3x2", "3x4", "4x2", "4x3", "3+2+2"]


@pytest.mark.parametrize("equal", [False, True], ids=["distinct", "equal"])
@pytest.mark.parametrize("layout", NODE_LAYOUTS)
def test_a_whole_node_that_fails_is_named_as_such_and_nobody_else_is(layout, equal, topology):
    where = topology(layout)
    for pairing, node, roles in itertools.product(
        candidate_pairings(where)[:3], nodes_of(where), ROLES
    ):
        cluster = Cluster(where, dict.fromkeys(node, roles), equal=equal)
        facts, judgement = cluster.audit(pairing, everybody(where))
        assert accused(judgement) <= set(node), (pairing, node, roles)
        if roles == ALWAYS and not equal:
            assert judgement.outcome is Outcome.SUSPECT
            assert judgement.domains == (where.domains[node[0]],)
            assert tuple(n.rank for n in judgement.named) == node
            assert f"all {len(node)} ranks of" in judgement.reason
        elif "A" not in roles:
            assert judgement.outcome is Outcome.NOT_REPRODUCED
        if facts.mismatches:
            assert frozenset({where.domains[node[0]]}) in explain(facts.mismatches, where)


@pytest.mark.parametrize(
    ("layout", "equal"), [("3x4", False), ("4x2", False), ("4x2", True), ("4x3", True)]
)
def test_a_node_and_a_rank_of_another_one_name_no_healthy_device(layout, equal, topology):
    where, draw = topology(layout), random.Random(5)
    cases = list(
        itertools.product(
            candidate_pairings(where), nodes_of(where), range(where.world_size), ROLES, ROLES
        )
    )
    for pairing, node, other, of_node, of_other in draw.sample(cases, 120):
        faults = {other: of_other, **dict.fromkeys(node, of_node)}
        _, judgement = Cluster(where, faults, equal=equal).audit(pairing, everybody(where))
        assert accused(judgement) <= set(faults), (pairing, faults)


@pytest.mark.parametrize("layout", ["2x1", "2x4", "1x4"])
def test_one_or_two_domains_are_never_named_and_never_widespread(layout, topology):
    where = topology(layout)
    for pairing, node in itertools.product(candidate_pairings(where), nodes_of(where)):
        cluster = Cluster(where, dict.fromkeys(node, ALWAYS))
        facts, judgement = cluster.audit(pairing, everybody(where))
        assert not is_widespread(facts.mismatches, where)
        assert judgement.outcome is Outcome.UNATTRIBUTED
        assert accused(judgement) == set()


@pytest.mark.parametrize("layout", ["4x1", "4x2", "8x2"])
def test_three_domains_at_once_are_widespread(layout, topology):
    where = topology(layout)
    for pairing in candidate_pairings(where):
        for nodes in itertools.combinations(nodes_of(where), 3):
            faults = {rank: ALWAYS for node in nodes for rank in node}
            facts, judgement = Cluster(where, faults).audit(pairing, everybody(where))
            explained = explain(facts.mismatches, where)
            everything = len(facts.mismatches) == where.world_size
            assert accused(judgement) <= set(faults)
            if everything or not explained:
                assert judgement.outcome is Outcome.WIDESPREAD
                assert plan_arbitration(facts.mismatches, where) == {}


def test_where_no_comparison_matched_it_is_widespread(topology):
    where = topology("4x1")
    (pairing, *_) = candidate_pairings(where)
    facts, judgement = Cluster(where, {0: ALWAYS, 2: ALWAYS}).audit(pairing)
    assert len(facts.mismatches) == 4
    assert judgement.outcome is Outcome.WIDESPREAD
    assert judgement.named == ()


def test_a_domain_so_large_that_only_a_few_of_it_are_arbitrated_is_named_as_a_whole(topology):
    where = topology("4x30")
    node = nodes_of(where)[1]
    for pairing in candidate_pairings(where)[:4]:
        facts, judgement = Cluster(where, dict.fromkeys(node, ALWAYS)).audit(
            pairing, everybody(where)
        )
        assert len(facts.arbitration) <= 2 * ARBITRATED
        assert accused(judgement) <= set(node)
        assert judgement.outcome is Outcome.SUSPECT
        arbitrated = [n for n in judgement.named if n.producers]
        assert 4 <= len(arbitrated) <= 2 * ARBITRATED
        assert len(judgement.reason) < 600


@pytest.mark.parametrize("layout", ["8x8", "32x8", "1024x1"])
def test_of_up_to_a_thousand_ranks_only_faulty_ones_are_accused(layout, topology):
    where, draw = topology(layout), random.Random(11)
    nodes, history = nodes_of(where), everybody(where)
    for step in range(6):
        pairing = draw_pairing(where, step=step, seed=2)
        equal = step % 2 == 1
        if step % 3 == 0:
            faulty = draw.choice(nodes)
        else:
            faulty = draw.sample(range(where.world_size), 1 + step % 2)
        roles = ALWAYS if step < 4 else draw.choice(ROLES)
        cluster = Cluster(where, dict.fromkeys(faulty, roles), equal=equal)
        facts, judgement = cluster.audit(pairing, history)
        assert accused(judgement) <= set(faulty)
        if roles == ALWAYS:
            assert {n.rank for n in judgement.named} == set(faulty)
        assert len(facts.arbitration) <= 4 * ARBITRATED
        assert len(judgement.reason) < 900
        assert len(judgement.ranks) <= LISTED


# --- over many audits ---


def run(topology, faults_at, *, audits, history=None, seed=0):
    """History, outcomes, and who was named or struck, with the faults of each step."""
    history, outcomes, named, struck = history or History(), [], set(), set()
    for step in range(1, audits + 1):
        pairing = draw_pairing(topology, step=step, seed=seed)
        cluster = Cluster(topology, faults_at(step))
        facts, judgement = cluster.audit(pairing, history)
        history = remember(history, facts, judgement, topology, step=step)
        outcomes.append(judgement.outcome)
        named |= {n.rank for n in judgement.named}
        struck |= {n.rank for n in judgement.strikes}
    return history, outcomes, named, struck


@pytest.mark.parametrize("layout", ["3x1", "3x2", "4x2", "3+2+2", "8x8"])
def test_a_node_bad_from_the_start_differs_in_every_audit_and_is_never_named(layout, topology):
    where = topology(layout)
    for node in nodes_of(where):
        history, outcomes, named, struck = run(
            where, lambda _, node=node: dict.fromkeys(node, ALWAYS), audits=5
        )
        assert set(outcomes) == {Outcome.DIFFERS}
        assert named == struck == set()
        assert history.differing == set(node)
        assert history.matched == set(range(where.world_size)) - set(node)
        assert not history.must_stop


@pytest.mark.parametrize("layout", ["4x2", "3+2+2", "8x8"])
def test_beside_a_node_that_differs_a_device_that_breaks_later_is_named(layout, topology):
    where = topology(layout)
    node, other = nodes_of(where)[0], nodes_of(where)[2][0]

    def faults(step):
        bad = dict.fromkeys(node, ALWAYS)
        return {**bad, other: ALWAYS} if step > 3 else bad

    history, outcomes, named, _ = run(where, faults, audits=8)
    assert outcomes[:3] == [Outcome.DIFFERS] * 3
    assert named <= {other}
    assert named == {other} or layout == "3+2+2"  # two domains left cannot settle it
    assert history.differing == set(node)


def test_a_rank_that_differed_and_matches_later_is_a_rank_like_any_other(topology):
    where = topology("3x2")
    history, outcomes, named, _ = run(
        where, lambda step: {1: ALWAYS} if step in (1, 2, 6) else {}, audits=6
    )
    assert outcomes[:2] == [Outcome.DIFFERS] * 2
    assert outcomes[2:5] == [Outcome.PASS] * 3
    assert (outcomes[5], named) == (Outcome.SUSPECT, {1})
    assert history.differing == frozenset()


@pytest.mark.parametrize(
    ("separating", "outcome"),
    [((), Outcome.SUSPECT), (("torch differs: '2.8' on rank 1",), Outcome.DIFFERS)],
)
def test_a_device_that_matched_in_an_earlier_segment_is_suspect_unless_facts_separate_it(
    separating, outcome, topology
):
    where = topology("3x2")
    known = History(matched_earlier=frozenset({device_of(where.ranks[1])}))
    facts, _ = Cluster(where, {1: ALWAYS}).audit(candidate_pairings(where)[0], known)
    judgement = judge_audit(replace(facts, separating=separating), where, history=known)
    assert judgement.outcome is outcome
    if separating:
        assert separating[0] in judgement.reason
    assert judge_audit(facts, where, history=History()).outcome is Outcome.DIFFERS


@pytest.mark.parametrize("layout", ["3x1", "3x2", "8x8"])
@pytest.mark.parametrize("gap", [1, 5, 25])
def test_a_device_wrong_once_twice_is_named_within_the_window_if_no_other_ever_was(
    layout, gap, topology
):
    where = topology(layout)
    once = {2: frozenset("R")}
    history, outcomes, named, struck = run(
        where,
        lambda step: once if step in (3, 3 + gap) else {},
        audits=3 + gap,
        history=everybody(where),
    )
    assert struck == {2}
    assert outcomes[2] is Outcome.NOT_REPRODUCED
    assert named == ({2} if gap < 20 else set())
    assert len({s.device for s in history.ledger.strikes}) == 1


def test_one_off_faults_of_several_devices_name_nobody_however_often_they_come(topology):
    where, draw = topology("4x2"), random.Random(3)
    faults = {s: {draw.randrange(8): frozenset(draw.choice("PR"))} for s in range(1, 60, 2)}
    first, second = faults[1], faults[3]
    assert set(first) != set(second), "the second strike must be another device's"
    _, outcomes, named, struck = run(
        where, lambda step: faults.get(step, {}), audits=59, history=everybody(where)
    )
    assert named == set()
    assert len(struck) > 4
    assert outcomes.count(Outcome.NOT_REPRODUCED) > 15


def test_a_strike_of_check_1_and_one_of_check_2_name_a_device(topology):
    where = topology("3x2")
    history = everybody(where).struck((device_of(where.ranks[2]),), check=Check.NONFINITE, step=1)
    facts, judgement = Cluster(where, {2: frozenset("P")}).audit(
        candidate_pairings(where)[0], history
    )
    assert (judgement.outcome, [n.rank for n in judgement.named]) == (Outcome.SUSPECT, [2])
    assert judgement.named[0].reproduced is False
    assert "at step 1 (check nonfinite)" in judgement.reason
    other = everybody(where).struck((device_of(where.ranks[3]),), check=Check.NONFINITE, step=1)
    assert judge_audit(facts, where, history=other).outcome is Outcome.NOT_REPRODUCED


def test_a_rank_of_another_device_that_does_not_repeat_its_own_work_ends_naming_by_strikes(
    topology,
):
    where, history = topology("3x2"), everybody(topology("3x2"))
    facts, judgement = Cluster(where, {2: frozenset("R")}).audit(
        candidate_pairings(where)[0], history
    )
    assert asks_everybody(judgement, history)
    own = judge_audit(replace(facts, restless=(2,)), where, history=history)
    assert own.outcome is Outcome.NOT_REPRODUCED
    elsewhere = judge_audit(replace(facts, restless=(5,)), where, history=history)
    assert elsewhere.outcome is Outcome.NONDETERMINISTIC
    assert elsewhere.named == ()
    after = remember(history, facts, elsewhere, where, step=3)
    assert not after.ledger.repeats
    again = judge_audit(facts, where, history=after)
    assert again.outcome is Outcome.NOT_REPRODUCED


def test_what_is_wrong_in_every_repeat_is_named_whatever_strikes_there_are(topology):
    where = topology("3x2")
    history = everybody(where)
    for rank in (0, 2, 4):
        history = history.struck((device_of(where.ranks[rank]),), check=Check.REPLAY, step=1)
    history = history.doubted()
    for pairing in candidate_pairings(where):
        _, judgement = Cluster(where, {3: ALWAYS}).audit(pairing, history)
        assert [n.rank for n in judgement.named] == [3]
        assert f"{2 * REPEATS} of {2 * REPEATS} repeats" in judgement.reason
