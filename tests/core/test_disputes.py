"""Traces decide before anybody is named: device with its operation, software, or no repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdcwatch.core.arbitration import REPEATS
from sdcwatch.core.disputes import (
    RIGHT_TRACED,
    TRACED,
    Dispute,
    conclude_audit,
    conclude_nonfinite,
    plan_audit_traces,
    plan_nonfinite_traces,
)
from sdcwatch.core.history import History
from sdcwatch.core.nonfinite import NonfiniteJudgement, ReplayFinite
from sdcwatch.core.records import Cause, Origin, Outcome
from sdcwatch.core.replay import AuditFacts, Mismatch, Named, judge_audit, remember
from sdcwatch.core.topology import Pairing
from sdcwatch.core.trace_values import TraceFinding, TraceOutcome

RING = Pairing((2, 3, 4, 5, 0, 1), mutual=False)
FACTS = AuditFacts(
    comparisons_total=6,
    mismatches=(Mismatch(0, 2, "x", "ok"),),
    arbitration={0: {4: "ok", 5: "ok"}},
    repeats={(0, 0): ("x",) * REPEATS, (4, 0): ("ok",) * REPEATS, (5, 0): ("ok",) * REPEATS},
    pairing=RING,
)


def found(outcome, rank=None, **more):
    values = {"operator": "aten::addmm", "module": "blocks.3", "detail": "other bits", **more}
    return TraceFinding(outcome=outcome, rank=rank, **values)


DEVICE = found(TraceOutcome.DEVICE, 0)
SOFTWARE = found(TraceOutcome.SOFTWARE, detail="`other` is 2.0, and 1.0 on rank 4")
UNREPEATED = found(TraceOutcome.NONDETERMINISTIC, advice="Set this.")
BLIND = TraceFinding(outcome=TraceOutcome.BLIND, detail="compiled code runs")


@pytest.fixture
def suspect(topology):
    return judge_audit(FACTS, topology("3x2"))


def test_the_wrong_rank_and_two_that_agree_trace_the_micro_batch_that_they_hold(suspect):
    (dispute,) = plan_audit_traces(suspect, FACTS)
    assert (dispute.rank, dispute.producer) == (0, 0)
    assert dispute.right == suspect.settlement.agreeing[0][:RIGHT_TRACED]
    assert dispute.sides == (0, *dispute.right)


def test_nobody_traces_where_nobody_is_about_to_be_named(topology):
    clean = judge_audit(AuditFacts(comparisons_total=6), topology("3x2"))
    assert plan_audit_traces(clean, FACTS) == ()
    assert conclude_audit(clean, {}) == clean


def test_a_device_is_named_with_its_operation(suspect):
    after = conclude_audit(suspect, {0: DEVICE})
    assert (after.outcome, after.cause) == (Outcome.SUSPECT, Cause.DEVICE)
    assert after.operator == after.named[0].operator == "aten::addmm in blocks.3"
    assert after.reason.startswith(suspect.reason)


def test_software_names_nobody_and_leaves_no_trace_on_a_device(suspect, topology):
    after = conclude_audit(suspect, {0: SOFTWARE})
    assert (after.outcome, after.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)
    assert (after.named, after.strikes) == ((), ())
    assert after.operator == "aten::addmm in blocks.3"
    assert 0 in after.ranks
    assert "`other` is 2.0, and 1.0 on rank 4" in after.reason
    kept = remember(History(), FACTS, after, topology("3x2"), step=3)
    assert (kept.ledger.struck, kept.confirmed) == ((), ())


def test_an_operation_that_does_not_repeat_names_nobody_and_says_what_to_set(suspect):
    after = conclude_audit(suspect, {0: UNREPEATED})
    assert (after.outcome, after.named) == (Outcome.NONDETERMINISTIC, ())
    assert "Set this" in after.reason


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (BLIND, "compiled code runs"),
        (TraceFinding(outcome=TraceOutcome.EQUAL, detail="every operation is the same"), "is the"),
        (found(TraceOutcome.DAMAGED, 4), "a value was damaged on rank 4 instead"),
    ],
)
def test_a_trace_that_tells_nothing_leaves_the_rule_and_says_so(suspect, finding, said):
    after = conclude_audit(suspect, {0: finding})
    assert (after.outcome, after.operator) == (Outcome.SUSPECT, "")
    assert [n.rank for n in after.named] == [0]
    assert "in which operation rank 0 is wrong is not known" in after.reason
    assert said in after.reason


def named(rank):
    return Named(rank, 2, 2, (), (), True, (rank,))


def test_where_one_rank_is_software_only_ranks_with_a_trace_of_their_own_are_named(suspect):
    several = replace(suspect, named=tuple(map(named, (0, 1, 2))), domains=("n0",))
    after = conclude_audit(several, {0: SOFTWARE, 1: replace(DEVICE, rank=1)})
    assert [n.rank for n in after.named] == [1]
    assert (after.outcome, after.domains) == (Outcome.SUSPECT, ())
    assert "the software of rank 0 computes something else" in after.reason


def test_at_most_a_few_ranks_are_traced(suspect):
    ranks = range(TRACED + 3)
    settled = replace(
        suspect.settlement, wrong=dict.fromkeys(ranks, (0,)), agreeing={0: (8, 9, 10)}
    )
    several = replace(suspect, named=tuple(map(named, ranks)), settlement=settled)
    assert len(plan_audit_traces(several, FACTS)) == TRACED


@pytest.mark.parametrize(
    ("finding", "cause", "operator"),
    [
        (SOFTWARE, Cause.SOFTWARE, "aten::addmm in blocks.3"),
        (DEVICE, Cause.DEVICE, "aten::addmm in blocks.3"),
        (BLIND, Cause.NONE, ""),
    ],
)
def test_sides_that_differ_say_what_separates_them(topology, finding, cause, operator):
    both = replace(
        FACTS,
        mismatches=(*FACTS.mismatches, Mismatch(4, 0, "ok 4", "y")),
        arbitration={**FACTS.arbitration, 4: {2: "ok 4", 3: "ok 4"}},
    )
    differs = judge_audit(both, topology("3x2"), history=History())
    assert differs.outcome is Outcome.DIFFERS
    (dispute,) = plan_audit_traces(differs, both)
    assert dispute.rank == 0
    after = conclude_audit(differs, {0: finding})
    assert (after.outcome, after.cause, after.operator) == (Outcome.DIFFERS, cause, operator)


def test_an_agreeing_rank_that_differs_from_itself_says_in_which_operation(topology):
    unsteady = replace(FACTS, repeats={**FACTS.repeats, (4, 0): ("ok", "y") * (REPEATS // 2)})
    judgement = judge_audit(unsteady, topology("3x2"))
    assert judgement.outcome is Outcome.NONDETERMINISTIC
    assert plan_audit_traces(judgement, unsteady) == (Dispute(4, 0),)
    after = conclude_audit(judgement, {4: UNREPEATED})
    assert after.operator == "aten::addmm in blocks.3"
    assert after.reason.endswith("Set this")


# --- check 1 ---

NAN = NonfiniteJudgement(
    Outcome.SUSPECT, Origin.LOCAL, Cause.DEVICE, (3,), (3,), "rank 3 is not finite", (1,)
)
REPLAYS = {3: ReplayFinite(producer=3, replayer=5, nonfinite=False)}


def test_check_1_traces_the_flagged_rank_against_the_one_that_replayed_it():
    assert plan_nonfinite_traces(NAN, REPLAYS) == (Dispute(3, 3, (5,)),)
    assert plan_nonfinite_traces(replace(NAN, named=()), REPLAYS) == ()


def test_check_1_says_the_operation_of_the_device():
    after = conclude_nonfinite(NAN, {3: replace(DEVICE, rank=3)})
    assert (after.outcome, after.named) == (Outcome.SUSPECT, (3,))
    assert after.operators == {3: "aten::addmm in blocks.3"}
    assert after.operator == "aten::addmm in blocks.3"


@pytest.mark.parametrize(
    ("finding", "outcome", "cause"),
    [
        (SOFTWARE, Outcome.UNATTRIBUTED, Cause.SOFTWARE),
        (UNREPEATED, Outcome.NONDETERMINISTIC, Cause.UNKNOWN),
    ],
)
def test_check_1_names_nobody_for_software(finding, outcome, cause):
    after = conclude_nonfinite(NAN, {3: finding})
    assert (after.outcome, after.cause, after.named) == (outcome, cause, ())
    assert after.operator == "aten::addmm in blocks.3"
    blind = conclude_nonfinite(NAN, {3: BLIND})
    assert (blind.outcome, blind.named, blind.operator) == (Outcome.SUSPECT, (3,), "")
