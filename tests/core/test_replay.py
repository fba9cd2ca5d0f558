import pytest

from sdcwatch.core.arbitration import REPEATS, Settlement
from sdcwatch.core.records import Outcome
from sdcwatch.core.replay import (
    AuditFacts,
    Mismatch,
    error_value,
    judge_audit,
    plan_arbitration,
    plan_repeats,
    settle,
)
from sdcwatch.core.topology import Pairing

ONE = Mismatch(0, 2, "x", "ok")
RING = Pairing((2, 3, 4, 5, 0, 1), mutual=False)
ARBITRATION = {0: {4: "ok", 5: "ok"}}
WRONG_AGAIN = {(0, 0): ("x",) * REPEATS, (4, 0): ("ok",) * REPEATS, (5, 0): ("ok",) * REPEATS}
RIGHT_AGAIN = {**WRONG_AGAIN, (0, 0): ("ok",) * REPEATS}


def facts(**changes):
    values = {
        "comparisons_total": 6,
        "mismatches": (ONE,),
        "arbitration": ARBITRATION,
        "pairing": RING,
    }
    return AuditFacts(**{**values, **changes})


def test_a_clean_audit_passes(topology):
    judgement = judge_audit(AuditFacts(comparisons_total=6), topology("3x2"))
    assert judgement.outcome is Outcome.PASS
    assert judgement.reason == "all 6 comparisons matched bit for bit"
    assert judgement.ranks == ()


def test_a_rank_that_is_wrong_again_is_named_with_its_evidence(topology):
    judgement = judge_audit(facts(repeats=WRONG_AGAIN), topology("3x2"))
    (named,) = judgement.named
    assert judgement.outcome is Outcome.SUSPECT
    assert (named.rank, named.mismatches, named.comparisons, named.reproduced) == (0, 1, 2, True)
    assert named.partners == (2, 4)
    assert named.arbiters == (4, 5)
    assert named.producers == (0,)
    assert judgement.ranks == (2,)
    assert judgement.reason == (
        "rank 0 is wrong on its own micro-batch, settled by ranks 2, 4 and 5, "
        "and wrong again in 8 of 8 repeats"
    )


def test_bad_in_both_comparisons_is_said(topology):
    mismatches = (Mismatch(0, 2, "x", "ok"), Mismatch(4, 0, "ok 4", "y"))
    arbitration = {0: {4: "ok", 5: "ok"}, 4: {2: "ok 4", 3: "ok 4"}}
    repeats = {
        **WRONG_AGAIN,
        (0, 4): ("y",) * REPEATS,
        (2, 4): ("ok 4",) * REPEATS,
        (3, 4): ("ok 4",) * REPEATS,
    }
    judgement = judge_audit(
        facts(mismatches=mismatches, arbitration=arbitration, repeats=repeats), topology("3x2")
    )
    assert [(n.rank, n.mismatches) for n in judgement.named] == [(0, 2)]
    assert "rank 0 is wrong in both of its comparisons" in judgement.reason
    assert "16 of 16 repeats" in judgement.reason


def test_a_one_off_fault_in_a_replay_is_a_strike_of_the_replayer_alone(topology):
    mismatches = (Mismatch(0, 2, "ok", "x"),)
    repeats = {(2, 0): ("ok",) * REPEATS, (4, 0): ("ok",) * REPEATS, (5, 0): ("ok",) * REPEATS}
    judgement = judge_audit(facts(mismatches=mismatches, repeats=repeats), topology("3x2"))
    assert judgement.outcome is Outcome.NOT_REPRODUCED
    assert judgement.named == ()
    assert [(n.rank, n.reproduced) for n in judgement.strikes] == [(2, False)]
    assert judgement.ranks == (2,)
    assert "rank 2 is wrong in its replay of rank 0" in judgement.reason
    assert "wrong again in 0 of 8 repeats" in judgement.reason


@pytest.mark.parametrize("wrong", range(1, REPEATS))
def test_a_rank_that_is_right_again_even_once_is_not_named(wrong, topology):
    mixed = {**WRONG_AGAIN, (0, 0): ("x",) * wrong + ("ok",) * (REPEATS - wrong)}
    judgement = judge_audit(facts(repeats=mixed), topology("3x2"))
    assert judgement.outcome is Outcome.NOT_REPRODUCED
    assert f"wrong again in {wrong} of {REPEATS} repeats" in judgement.reason


def test_different_wrong_values_in_the_repeats_count_as_wrong(topology):
    different = {**WRONG_AGAIN, (0, 0): tuple(f"x{i}" for i in range(REPEATS))}
    assert judge_audit(facts(repeats=different), topology("3x2")).named


@pytest.mark.parametrize("at", [0, REPEATS - 1])
def test_an_agreeing_rank_that_differs_from_itself_means_nondeterministic(at, topology):
    answers = ["ok"] * REPEATS
    answers[at] = "other"
    judgement = judge_audit(facts(repeats={**WRONG_AGAIN, (5, 0): tuple(answers)}), topology("3x2"))
    assert judgement.outcome is Outcome.NONDETERMINISTIC
    assert judgement.named == ()
    assert "rank 5" in judgement.reason
    assert "nobody is blamed until the next preflight" in judgement.reason


@pytest.mark.parametrize(
    ("repeats", "why"),
    [
        ({}, "nobody answered"),
        ({k: v for k, v in WRONG_AGAIN.items() if k == (0, 0)}, "no agreeing rank answered"),
        ({**WRONG_AGAIN, (0, 0): ("x", "x")}, "two repeats are too few"),
        ({**WRONG_AGAIN, (0, 0): (error_value("CUDA out of memory"),) * REPEATS}, "it raised"),
    ],
)
def test_nobody_is_named_without_all_repeats(repeats, why, topology):
    judgement = judge_audit(facts(repeats=repeats), topology("3x2"))
    assert judgement.outcome is Outcome.UNATTRIBUTED, why
    assert judgement.named == judgement.strikes == ()
    assert judgement.ranks == (0, 2)
    assert "were not all made" in judgement.reason


def test_one_agreeing_rank_that_answers_is_enough(topology):
    repeats = {k: v for k, v in WRONG_AGAIN.items() if k != (5, 0)}
    assert judge_audit(facts(repeats=repeats), topology("3x2")).outcome is Outcome.SUSPECT


def test_a_damaged_payload_names_no_device(topology):
    judgement = judge_audit(facts(mismatches=(), transport=(3,)), topology("3x2"))
    assert judgement.outcome is Outcome.TRANSPORT
    assert judgement.ranks == (3, 5)
    assert judge_audit(facts(transport=(0,)), topology("3x2")).outcome is Outcome.TRANSPORT


def test_a_damaged_payload_is_told_with_both_ends_and_where_to_look(topology):
    judgement = judge_audit(facts(mismatches=(), transport=(3,), pairing=RING), topology("3x2"))
    assert judgement.ranks == (3, 5)
    assert judgement.reason == (
        "the payload of rank 3 to rank 5 arrived damaged; no device is named: look at the network "
        "between the two, and at the host memory of both"
    )
    many = facts(mismatches=(), transport=tuple(range(6)), pairing=RING)
    assert (
        "rank 3 to rank 5 and 2 more arrived damaged" in judge_audit(many, topology("3x2")).reason
    )


def test_a_damaged_payload_beside_a_mismatch_is_said_and_does_not_hide_it(topology):
    judgement = judge_audit(facts(transport=(1,), repeats=WRONG_AGAIN), topology("3x2"))
    assert judgement.outcome is Outcome.SUSPECT
    assert [n.rank for n in judgement.named] == [0]
    assert judgement.reason.endswith("; the payload of rank 1 to rank 3 arrived damaged")


def test_a_replay_that_raised_blames_nobody(topology):
    mismatches = (Mismatch(0, 2, "ok", error_value("OutOfMemoryError: CUDA out of memory")),)
    where = topology("3x2")
    assert plan_arbitration(mismatches, where) == {}
    assert settle(mismatches, {0: {4: "ok", 5: "ok"}}) == Settlement()
    judgement = judge_audit(facts(mismatches=mismatches, arbitration={}), where)
    assert judgement.outcome is Outcome.NOT_RUN
    assert judgement.reason == (
        "the replay of rank 0 on rank 2 ended with: OutOfMemoryError: CUDA out of memory"
    )
    assert judgement.ranks == (0, 2)


def test_an_arbiter_that_raised_has_no_vote():
    settled = settle((ONE,), {0: {4: error_value("boom"), 5: error_value("boom")}})
    assert settled.inconclusive == (0,)
    assert settle((ONE,), {0: {4: error_value("boom"), 5: "ok"}}).wrong == {0: (0,)}


def test_no_two_ranks_that_agree_is_inconclusive(topology):
    judgement = judge_audit(facts(arbitration={0: {4: "y", 5: "z"}}), topology("3x2"))
    assert judgement.outcome is Outcome.INCONCLUSIVE
    assert judgement.ranks == (0, 2)
    assert "rank 0" in judgement.reason


def test_two_against_two_is_inconclusive():
    assert settle((ONE,), {0: {4: "ok", 5: "x"}}).inconclusive == (0,)


def test_a_quorum_of_three_takes_three_equal_values():
    assert settle((ONE,), {0: {4: "ok"}}, quorum=3).inconclusive == (0,)
    assert settle((ONE,), {0: {4: "ok", 5: "ok"}}, quorum=3).wrong == {0: (0,)}


def test_both_producer_and_replayer_can_be_wrong():
    settled = settle((Mismatch(0, 2, "x", "y"),), {0: {4: "ok", 5: "ok"}})
    assert settled.wrong == {0: (0,), 2: (0,)}
    assert settled.agreeing == {0: (4, 5)}
    assert settled.right == {0: "ok"}


def test_arbiters_are_on_other_domains_and_in_no_mismatch_first(topology):
    where = topology("4x2")
    # ranks 0|1 on node 0, 2|3 on 1, 4|5 on 2, 6|7 on 3
    plan = plan_arbitration((Mismatch(0, 2, "x", "y"), Mismatch(4, 1, "x", "y")), where)
    assert plan == {0: (5, 6), 4: (7, 3)}


def test_four_arbiters_for_a_quorum_of_three(topology):
    plan = plan_arbitration((ONE,), topology("4x2"), quorum=3)
    assert sorted(plan[0]) == [4, 5, 6, 7]


def test_where_too_few_ranks_are_elsewhere_a_fourth_vote_comes_from_the_two_domains(topology):
    plan = plan_arbitration((Mismatch(0, 2, "x", "y"),), topology("2+2+1"))
    assert plan == {0: (4, 1, 3)}


def test_three_ranks_have_one_arbiter(topology):
    assert plan_arbitration((Mismatch(0, 1, "x", "y"),), topology("3x1")) == {0: (2,)}


def test_two_domains_ask_no_arbiters(topology):
    assert plan_arbitration((ONE,), topology("2x2")) == {}


def test_single_gpus_count_as_domains_when_told(topology):
    plan = plan_arbitration((ONE,), topology("2x2", "gpu"))
    assert sorted(plan[0]) == [1, 3]


def test_repeats_are_asked_of_the_wrong_rank_and_two_that_agree():
    orders = plan_repeats(settle((ONE,), ARBITRATION))
    assert [(o.rank, o.producer, o.suspect, o.times) for o in orders] == [
        (0, 0, True, REPEATS),
        (4, 0, False, REPEATS),
        (5, 0, False, REPEATS),
    ]


def test_a_rank_that_is_wrong_elsewhere_is_the_last_to_serve_as_control():
    mismatches = (Mismatch(0, 2, "x", "ok"), Mismatch(4, 1, "y", "ok 4"))
    settled = settle(mismatches, {0: {4: "ok", 5: "ok"}, 4: {3: "ok 4", 5: "ok 4"}})
    controls = [(o.rank, o.producer) for o in plan_repeats(settled) if not o.suspect]
    assert controls == [(5, 0), (2, 0), (3, 4), (5, 4)]


def test_nothing_wrong_asks_for_no_repeats():
    assert plan_repeats(Settlement()) == ()


def test_a_repeatable_rank_is_named_beside_one_that_is_only_struck(topology):
    mismatches = (Mismatch(0, 2, "x", "ok"), Mismatch(1, 3, "ok 1", "z"))
    arbitration = {0: {4: "ok", 5: "ok"}, 1: {4: "ok 1", 5: "ok 1"}}
    repeats = {**WRONG_AGAIN, **{(r, 1): ("ok 1",) * REPEATS for r in (3, 4, 5)}}
    judgement = judge_audit(
        facts(mismatches=mismatches, arbitration=arbitration, repeats=repeats), topology("3x2")
    )
    assert judgement.outcome is Outcome.SUSPECT
    assert [n.rank for n in judgement.named] == [0]
    assert [n.rank for n in judgement.strikes] == [3]
