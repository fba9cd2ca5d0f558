import itertools
from dataclasses import replace

import pytest

from sdcwatch.core.checkpoint import GateFacts, is_confirmable, judge_checkpoint
from sdcwatch.core.records import CheckpointResult, GateReason

GOOD = GateFacts(
    step=100,
    tainted=False,
    nonfinite_passed=True,
    replay_failed=False,
    fingerprint_passed=True,
    last_clean_audit_step=100,
    audit_age_limit=100,
    preflighted=True,
    audits_on=True,
)


def test_a_step_audited_clean_is_saved():
    decision = judge_checkpoint(GOOD)
    assert (decision.save, decision.result, decision.reason, decision.audit_age) == (
        True,
        CheckpointResult.SAVED,
        GateReason.OK,
        0,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tainted": True}, GateReason.TAINTED),
        ({"fingerprint_passed": False}, GateReason.FINGERPRINT),
        ({"nonfinite_passed": False}, GateReason.NONFINITE),
        ({"replay_failed": True}, GateReason.REPLAY),
        ({"preflighted": False}, GateReason.NOT_PREFLIGHTED),
        ({"last_clean_audit_step": None}, GateReason.NO_AUDIT),
        ({"weights_finite": False}, GateReason.WEIGHTS_NONFINITE),
        ({"suspects": ("rank 3 (i-3, gpu-3)",)}, GateReason.SUSPECT),
        ({"widespread": True}, GateReason.WIDESPREAD),
        ({"suspects": ("rank 3",), "widespread": True}, GateReason.SUSPECT),
        ({"suspects": ("rank 3",), "replay_failed": True}, GateReason.REPLAY),
        ({"step": 201}, GateReason.AUDIT_TOO_OLD),
        ({"step": 101, "audit_age_limit": 0}, GateReason.AUDIT_TOO_OLD),
    ],
)
def test_one_thing_wrong_withholds_it_and_says_which(change, reason):
    decision = judge_checkpoint(replace(GOOD, **change))
    assert (decision.save, decision.result, decision.reason) == (
        False,
        CheckpointResult.WITHHELD,
        reason,
    )
    assert decision.detail


@pytest.mark.parametrize(("age", "limit"), [(1, 100), (100, 100), (5000, None)])
def test_an_audit_of_an_earlier_step_makes_it_provisional(age, limit):
    decision = judge_checkpoint(replace(GOOD, step=100 + age, audit_age_limit=limit))
    assert (decision.save, decision.result, decision.reason, decision.audit_age) == (
        True,
        CheckpointResult.PROVISIONAL,
        GateReason.OK,
        age,
    )


@pytest.mark.parametrize("age", [0, 1, 100])
def test_where_ranks_differ_a_checkpoint_is_provisional_and_nothing_confirms_it(age):
    decision = judge_checkpoint(replace(GOOD, step=100 + age, differing=(3, 4)))
    assert (decision.save, decision.result, decision.reason) == (
        True,
        CheckpointResult.PROVISIONAL,
        GateReason.DIFFERS,
    )
    assert "ranks 3 and 4" in decision.detail
    assert not is_confirmable(decision)


@pytest.mark.parametrize("age", [0, 7])
def test_where_a_framework_writes_the_reason_says_so_and_only_replaces_ok(age):
    plain = judge_checkpoint(replace(GOOD, step=100 + age))
    framework = judge_checkpoint(replace(GOOD, step=100 + age, framework=True))
    assert framework == replace(plain, reason=GateReason.FRAMEWORK)
    assert is_confirmable(framework) == is_confirmable(plain) == (age > 0)
    for change in ({"differing": (1,)}, {"audits_on": False}, {"tainted": True}):
        facts = replace(GOOD, **change)
        assert judge_checkpoint(replace(facts, framework=True)) == judge_checkpoint(facts)


def test_the_suspects_are_named_in_the_refusal_and_only_the_first_few():
    decision = judge_checkpoint(replace(GOOD, suspects=tuple(f"rank {r}" for r in range(20))))
    assert "since rank 0, rank 1, rank 2, rank 3 and 16 more was named" in decision.detail


def test_the_age_is_said_in_the_refusal():
    decision = judge_checkpoint(replace(GOOD, step=250))
    assert "150 steps old; at most 100" in decision.detail
    assert decision.audit_age == 150


def test_without_audits_a_checkpoint_is_never_more_than_provisional():
    blind = replace(GOOD, audits_on=False, last_clean_audit_step=None, preflighted=False)
    decision = judge_checkpoint(blind)
    assert (decision.save, decision.result, decision.reason) == (
        True,
        CheckpointResult.PROVISIONAL,
        GateReason.NO_AUDIT,
    )
    assert judge_checkpoint(replace(blind, tainted=True)).save is False
    assert judge_checkpoint(replace(GOOD, audits_on=False)).result is CheckpointResult.PROVISIONAL
    assert not is_confirmable(decision)


def test_over_all_combinations_saved_means_that_every_check_passed_at_this_very_step():
    choices = {
        "tainted": (False, True),
        "nonfinite_passed": (True, False),
        "replay_failed": (False, True),
        "fingerprint_passed": (True, False),
        "preflighted": (True, False),
        "audits_on": (True, False),
        "weights_finite": (True, False),
        "suspects": ((), ("rank 1",)),
        "widespread": (False, True),
        "differing": ((), (2,)),
        "last_clean_audit_step": (None, 0, 99, 100),
        "audit_age_limit": (None, 0, 1, 100),
    }
    results = set()
    for values in itertools.product(*choices.values()):
        facts = replace(GOOD, **dict(zip(choices, values, strict=True)))
        decision = judge_checkpoint(facts)
        results.add(decision.result)
        assert decision.save == (decision.result is not CheckpointResult.WITHHELD)
        if decision.result is CheckpointResult.SAVED:
            assert facts == replace(GOOD, audit_age_limit=facts.audit_age_limit)
        if decision.save:
            assert not facts.tainted
            assert not facts.replay_failed
            assert facts.nonfinite_passed
            assert facts.fingerprint_passed
            assert facts.weights_finite
            assert not facts.audits_on or not (facts.widespread or facts.suspects)
    assert len(results) == 3
