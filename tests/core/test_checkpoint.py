import itertools
from dataclasses import replace

import pytest

from sdcwatch.core.checkpoint import GateFacts, judge_checkpoint
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


def test_over_all_combinations_saved_means_that_every_check_passed_at_this_very_step():
    flags = ("tainted", "nonfinite_passed", "replay_failed", "fingerprint_passed")
    more = ("preflighted", "audits_on")
    results = set()
    for values in itertools.product((False, True), repeat=6):
        for last, limit in itertools.product((None, 0, 99, 100), (None, 0, 1, 100)):
            facts = replace(
                GOOD,
                last_clean_audit_step=last,
                audit_age_limit=limit,
                **dict(zip((*flags, *more), values, strict=True)),
            )
            decision = judge_checkpoint(facts)
            results.add(decision.result)
            assert decision.save == (decision.result is not CheckpointResult.WITHHELD)
            if decision.result is CheckpointResult.SAVED:
                assert facts == replace(GOOD, audit_age_limit=limit)
            if decision.save:
                assert not facts.tainted
                assert not facts.replay_failed
                assert facts.nonfinite_passed
                assert facts.fingerprint_passed
    assert len(results) == 3
