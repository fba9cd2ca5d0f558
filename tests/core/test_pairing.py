from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcwatch.core.topology import (
    EVERYBODY,
    MOVES,
    Pairing,
    Topology,
    candidate_pairings,
    choose_fault_domain,
    draw_pairing,
    pairing_problem,
    partners,
)
from sdcwatch.errors import ConfigurationError

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def layout_of(sizes):
    return "+".join(map(str, sizes))


@given(sizes=SIZES, step=st.integers(0, 10**6), seed=st.integers(0, 2**32), mix=st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_pairing_exists_iff_no_domain_holds_more_than_half(topology, sizes, step, seed, mix):
    where = topology(layout_of(sizes))
    nodes = [info.node for info in where.ranks]
    mix.shuffle(nodes)  # ranks of a node need not be neighbours
    where = Topology(
        tuple(replace(info, node=node) for info, node in zip(where.ranks, nodes, strict=True))
    )
    world = sum(sizes)
    possible = 2 * max(sizes) <= world
    assert (pairing_problem(where) is None) == possible
    if not possible:
        assert candidate_pairings(where) == ()
        with pytest.raises(ConfigurationError, match=r"Expected .*, but got .*\. "):
            draw_pairing(where, step=step, seed=seed)
        return
    pairing = draw_pairing(where, step=step, seed=seed)
    assert sorted(pairing.replayer) == list(range(world))
    domains = where.domains
    assert all(domains[p] != domains[r] for p, r in enumerate(pairing.replayer))
    assert all(pairing.producer[r] == p for p, r in enumerate(pairing.replayer))
    assert draw_pairing(where, step=step, seed=seed) == pairing
    candidates = candidate_pairings(where)
    assert pairing in candidates
    assert len({c.mutual for c in candidates}) == 1


@pytest.mark.parametrize(
    ("layout", "count", "mutual"),
    [
        ("2x1", 1, True),
        ("3x1", 2, False),
        ("4x1", 2, False),
        ("2x2", 2, True),
        ("2x3", 2, False),
        ("3x2", 4, False),
        ("4x2", 4, False),
        ("3+2+2", 2, False),
        ("2+2+1", 2, False),
        ("2+1+1", 1, True),
        ("3+2+2+1", 2, False),
    ],
)
def test_pairs_of_ranks_only_where_nothing_else_exists(layout, count, mutual, topology):
    candidates = candidate_pairings(topology(layout))
    assert len(set(candidates)) == count
    assert {c.mutual for c in candidates} == {mutual}


def test_every_candidate_is_drawn_sooner_or_later(topology):
    where = topology("4x2")
    drawn = {draw_pairing(where, step=step, seed=1) for step in range(100)}
    assert drawn == set(candidate_pairings(where))


def test_the_draw_is_pinned_so_that_mixed_versions_agree(topology):
    assert draw_pairing(topology("3x2"), step=100, seed=0) == Pairing(
        (4, 5, 0, 1, 2, 3), mutual=False
    )


def test_the_seed_changes_the_sequence(topology):
    where = topology("4x2")
    sequences = {
        tuple(draw_pairing(where, step=s, seed=seed).replayer for s in range(20))
        for seed in range(4)
    }
    assert len(sequences) == 4


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("1x1", "at least 2 ranks, and there is 1"),
        ("1x4", "node-0 holds 4 of 4"),
        ("3+1+1", "node-0 holds 3 of 5"),
    ],
)
def test_the_error_says_why_no_pairing_exists_and_what_to_do(layout, says, topology):
    with pytest.raises(ConfigurationError) as raised:
        draw_pairing(topology(layout), step=1, seed=0)
    assert says in str(raised.value)
    assert 'fault_domain="gpu"' in str(raised.value)


@pytest.mark.parametrize("layout", ["512x8", "12x2", "3x40", "40+30+30", "5x5", "200x1"])
def test_audits_of_many_ranks_draw_from_a_few_pairings_that_spread(layout, topology):
    where = topology(layout)
    candidates = candidate_pairings(where)
    assert MOVES // 2 < len(set(candidates)) == len(candidates) <= MOVES
    assert not any(c.mutual for c in candidates)
    drawn = [draw_pairing(where, step=step, seed=0) for step in range(8)]
    assert set(drawn) <= set(candidates)
    assert len(set(drawn)) > 1
    for pairing in drawn:
        assert sorted(pairing.replayer) == list(range(where.world_size))


@pytest.mark.parametrize("layout", ["512x8", "3x40", "50+25+25", "4x1", "2+2+1", "20x2"])
def test_whoever_may_exchange_a_micro_batch_is_a_partner_of_the_other_too(layout, topology):
    where = topology(layout)
    world = where.world_size
    few = world <= EVERYBODY
    all_of_them = partners(where, range(world))
    for pairing in candidate_pairings(where):
        assert all(r in all_of_them[p] for p, r in enumerate(pairing.replayer))
    for rank, others in all_of_them.items():
        assert rank not in others
        assert all(rank in all_of_them[other] for other in others)
        assert len(others) == world - 1 if few else len(others) <= 2 * MOVES + 40
    if not few:
        domains = where.domains
        for rank, others in all_of_them.items():
            assert len({domains[other] for other in others} - {domains[rank]}) >= 2
    assert partners(where, (1,)) == {1: all_of_them[1]}


@pytest.mark.parametrize(
    ("layout", "requested", "domain", "note"),
    [
        ("3x2", "auto", "node", ""),
        ("3x2", "node", "node", ""),
        ("3x2", "gpu", "gpu", ""),
        ("2x2", "node", "node", "With 2 nodes a replay mismatch is detected but names no rank"),
        ("1x4", "node", "node", "With 1 node a replay mismatch"),
        ("2x2", "auto", "gpu", "2 nodes cannot settle who is wrong"),
        ("1x8", "auto", "gpu", "all ranks are on one node"),
        ("4+1+1", "auto", "gpu", "node-0 holds 4 of 6"),
        ("2x1", "auto", "gpu", "With 2 ranks a replay mismatch names no rank"),
        ("2x1", "gpu", "gpu", "With 2 ranks a replay mismatch names no rank"),
        ("1x1", "auto", "gpu", "With 1 rank a replay mismatch names no rank"),
    ],
)
def test_the_fault_domain_and_its_warning(layout, requested, domain, note, topology):
    chosen, said = choose_fault_domain(topology(layout).ranks, requested)
    assert chosen == domain
    assert note in said
    assert bool(said) == bool(note)
