import json
from dataclasses import replace

import pytest

from sdcwatch.core.outcomes import MEANINGS, WORDS, gravest, is_alarm
from sdcwatch.core.records import (
    Action,
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Comparison,
    Count,
    Coverage,
    GateReason,
    GuardState,
    Hang,
    Note,
    Outcome,
    PreflightDone,
    Progress,
    RunFinished,
    RunStarted,
    RunWord,
    SkipReason,
    StateChanged,
    Suspect,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.summary import RunSummary, SummaryBuilder, fold


@pytest.fixture(scope="module")
def start(topology):
    ranks = tuple(
        replace(r, instance_id=f"i-{r.rank // 2}", gpu_uuid=f"GPU-{r.rank}")
        for r in topology("3x2").ranks
    )

    def at(step=0, time=100.0, **changes):
        facts = {"ranks": ranks, **changes}
        return RunStarted(
            step=step, time=time, run="run-1", version="0.1.0", **facts,
            fault_domain="node", mode="enforce", on_failure="skip", audit_every=10,
            fingerprint_every=5, checkpoint_every=None, max_audit_age=10, quorum=2, parameters=4,
            parameter_bytes=64,
        )  # fmt: skip

    return at


def preflight(coverage=Coverage.FULL):
    return PreflightDone(
        step=0, time=101.0, coverage=coverage, reason="", deterministic_kernels=False, repeats=24
    )


def passes(step, *, audits=1, weight_checks=2, **more):
    counts = [
        Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=10),
        Count(check=Check.REPLAY, outcome=Outcome.PASS, count=audits),
        Count(check=Check.FINGERPRINT, outcome=Outcome.PASS, count=weight_checks),
    ]
    return Progress(
        step=step, time=100.0 + step, first_step=step - 9, counts=tuple(counts),
        comparisons=6 * audits, weight_checks=weight_checks,
        last_clean_audit_step=step if audits else 0,
        last_clean_audit_time=100.0 + step if audits else 0.0,
        last_weight_check_step=step if weight_checks else 0, plain_steps=9, plain_seconds=9.0,
        audit_steps=1, audit_seconds=3.0, overhead_seconds={"replay": 1.0, "fingerprint": 0.2},
        **more,
    )  # fmt: skip


def suspect(rank=3, check=Check.REPLAY, mismatches=2, comparisons=2, **more):
    return Suspect(
        rank=rank, node="node-1", instance_id="i-1", gpu=f"GPU-{rank}", gpu_index=1, check=check,
        mismatches=mismatches, comparisons=comparisons, **more,
    )  # fmt: skip


def verdict(step, check, outcome, **more):
    return Verdict(step=step, time=100.0 + step, check=check, outcome=outcome, reason="r", **more)


def test_nothing_recorded_is_not_checked():
    assert fold([]) == RunSummary(reason="no audit has been clean; 0 weight checks")
    assert RunSummary().verdict == "not checked"


def test_a_run_whose_audits_were_clean_is_clean(start):
    summary = fold([start(), preflight(), passes(10), passes(20)])
    assert summary.verdict == "clean"
    assert summary.reason == "2 clean audits and 4 weight checks, no alarm"
    assert (summary.audits, summary.clean_audits, summary.comparisons) == (2, 2, 12)
    assert (summary.weight_checks, summary.steps, summary.last_step) == (4, 20, 20)
    assert summary.nodes == ("node-0", "node-1", "node-2")
    assert (summary.world_size, summary.mode, summary.run) == (6, "enforce", "run-1")
    assert summary.last_clean_audit_step == 20
    assert summary.overhead_seconds == {"replay": 2.0, "fingerprint": 0.4}
    assert summary.overhead_ratio == pytest.approx(2.4 / 24.0)
    assert (summary.alarms, summary.first_alarm_step) == (0, None)


def test_a_clean_run_that_compares_outputs_only_is_partly_checked(start):
    summary = fold([start(), preflight(Coverage.OUTPUTS_ONLY), passes(10)])
    assert summary.verdict == "partly checked"
    assert "of outputs only" in summary.reason


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], "nothing happened"),
        ([passes(10, audits=0, weight_checks=0)], "only check 1 ran"),
        ([passes(10, audits=0)], "weight checks alone do not audit a computation"),
        ([preflight(Coverage.OFF), passes(10)], "coverage is off"),
        ([verdict(10, Check.REPLAY, Outcome.VOID)], "a void audit is no audit"),
    ],
)
def test_never_green_while_blind(start, records, why):
    summary = fold([start(), preflight(), *records])
    assert summary.verdict == "not checked", why
    assert summary.reason


def test_a_segment_that_resumed_and_was_not_audited_yet_is_not_checked(start):
    records = [start(), preflight(), passes(10), start(step=10, time=200.0)]
    summary = fold(records)
    assert summary.verdict == "not checked"
    assert summary.reason == "no audit has been clean since step 10; 2 weight checks"
    assert summary.segments == 2
    assert summary.started_time == 100.0
    assert fold([*records, preflight(), passes(20)]).verdict == "clean"


def test_a_named_rank_makes_the_run_suspect_and_its_evidence_adds_up(start):
    first = suspect(partners=(1,), arbiters=(4,), reproduced=True, tensors=("a",))
    second = suspect(
        mismatches=1, partners=(5,), arbiters=(0,), reproduced=True, tensors=("b", "a")
    )
    summary = fold(
        [
            start(),
            preflight(),
            passes(10),
            verdict(20, Check.REPLAY, Outcome.SUSPECT, failed=True, suspects=(first,),
                    comparisons=(Comparison(producer=3, replayer=5), Comparison(producer=1,
                                                                                replayer=3))),
            verdict(30, Check.REPLAY, Outcome.SUSPECT, failed=True, suspects=(second,)),
            verdict(31, Check.NONFINITE, Outcome.SUSPECT, failed=True,
                    suspects=(suspect(check=Check.NONFINITE, mismatches=1, comparisons=1),)),
            passes(40),
        ]
    )  # fmt: skip
    assert summary.verdict == "suspect"
    assert summary.reason == "rank 3 named, first at step 20"
    by_check = {s.check: s for s in summary.suspects}
    assert len(summary.suspects) == 2
    merged = by_check[Check.REPLAY]
    assert (merged.mismatches, merged.comparisons, merged.first_step, merged.last_step) == (
        3,
        4,
        20,
        30,
    )
    assert (merged.partners, merged.arbiters, merged.tensors) == ((1, 5), (0, 4), ("a", "b"))
    assert (merged.gpu, merged.reproduced) == ("GPU-3", True)
    assert (summary.alarms, summary.first_alarm_step, summary.mismatches) == (3, 20, 2)


def test_a_failed_weight_check_taints_until_a_new_segment(start):
    mismatches = verdict(
        20, Check.FINGERPRINT, Outcome.SUSPECT, failed=True, action=Action.STOP,
        suspects=(suspect(check=Check.FINGERPRINT, mismatches=1, comparisons=4),),
    )  # fmt: skip
    records = [start(), preflight(), passes(10), mismatches]
    assert fold(records).verdict == "tainted"
    stopped = [
        *records,
        StateChanged(step=20, time=121.0, state=GuardState.TAINTED, reason="r"),
        RunFinished(step=20, time=122.0, state=GuardState.FAILED, reason="r", exit_code=80),
    ]
    summary = fold(stopped)
    assert (summary.verdict, summary.exit_code, summary.finished) == ("tainted", 80, True)
    resumed = fold([*stopped, start(step=10, time=200.0), preflight(), passes(20)])
    assert (resumed.verdict, resumed.finished, resumed.exit_code) == ("suspect", False, 0)
    assert [s.rank for s in resumed.suspects] == [3]


def test_the_tainted_state_alone_taints(start):
    tainted = StateChanged(step=5, time=105.0, state=GuardState.TAINTED, reason="r")
    assert fold([start(), preflight(), passes(10), tainted]).verdict == "tainted"


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome.UNATTRIBUTED, "unattributed"),
        (Outcome.INCONCLUSIVE, "unattributed"),
        (Outcome.WIDESPREAD, "unattributed"),
        (Outcome.NONDETERMINISTIC, "nondeterministic"),
        (Outcome.NOT_REPRODUCED, "warning"),
        (Outcome.TRANSPORT, "warning"),
        (Outcome.NOT_RUN, "warning"),
        (Outcome.NOT_REDUCED, "warning"),
        (Outcome.DIFFERS, "unattributed"),
        (Outcome.REPRODUCIBLE, "warning"),
        (Outcome.SUSPECT, "suspect"),
        (Outcome.VOID, "clean"),
        (Outcome.PASS, "clean"),
    ],
)
def test_the_word_of_a_checked_run_is_that_of_its_gravest_alarm(start, outcome, word):
    one = verdict(12, Check.REPLAY, outcome)
    assert fold([start(), preflight(), passes(10), one, passes(20)]).verdict == word
    with_strike = [one, verdict(13, Check.REPLAY, Outcome.NOT_REPRODUCED)]
    expected = "warning" if word == "clean" else word
    assert fold([start(), preflight(), passes(10), *with_strike]).verdict == expected
    assert is_alarm(one) == (word != "clean")


def test_findings_are_said_even_where_nothing_could_be_audited(start):
    found = verdict(12, Check.REPLAY, Outcome.UNATTRIBUTED)
    assert fold([start(), preflight(Coverage.OFF), found]).verdict == "unattributed"


def test_an_overflow_that_the_loss_scale_explains_is_no_alarm(start):
    scaling = verdict(12, Check.NONFINITE, Outcome.REPRODUCIBLE, cause=Cause.SCALING, failed=True)
    data = verdict(12, Check.NONFINITE, Outcome.REPRODUCIBLE, cause=Cause.DATA, failed=True)
    assert not is_alarm(scaling)
    assert is_alarm(data)
    assert fold([start(), preflight(), passes(10), scaling]).verdict == "clean"
    assert fold([start(), preflight(), passes(10), data]).verdict == "warning"


def test_every_outcome_is_an_alarm_or_deliberately_none():
    quiet = {o for o in Outcome if not is_alarm(verdict(1, Check.REPLAY, o))}
    assert quiet == {Outcome.PASS, Outcome.VOID}
    assert set(MEANINGS) == set(Outcome)
    assert set(WORDS) == set(RunWord)
    assert gravest({RunWord.WARNING, RunWord.SUSPECT, RunWord.UNATTRIBUTED}) is RunWord.SUSPECT
    assert gravest(set()) is None


def test_a_strike_is_counted_for_its_rank_and_makes_no_suspect(start):
    strike = verdict(10, Check.REPLAY, Outcome.NOT_REPRODUCED, ranks=(4,))
    summary = fold([start(), preflight(), passes(5), strike, strike])
    assert [(s.rank, s.count) for s in summary.strikes] == [(4, 2)]
    assert summary.suspects == ()


def test_skips_checkpoints_and_hangs_are_counted(start):
    def checkpoint(step, result, reason=GateReason.OK):
        return CheckpointEvent(step=step, time=100.0 + step, result=result, reason=reason)

    summary = fold(
        [
            start(),
            UpdateSkipped(step=3, time=103.0, reason=SkipReason.NONFINITE, consecutive=1),
            UpdateSkipped(step=4, time=104.0, reason=SkipReason.NONFINITE, consecutive=2),
            UpdateSkipped(step=9, time=109.0, reason=SkipReason.SCALER, consecutive=1),
            checkpoint(10, CheckpointResult.SAVED),
            checkpoint(15, CheckpointResult.PROVISIONAL),
            checkpoint(20, CheckpointResult.WITHHELD, GateReason.REPLAY),
            Hang(step=21, time=121.0, reporter=0, operation="backward", absent=(2,)),
            Note(step=21, time=121.0, code="x", message="m"),
        ]
    )
    assert summary.skipped == {"nonfinite": 2, "scaler": 1}
    assert summary.checkpoints == {"saved": 1, "provisional": 1, "withheld": 1}
    assert (summary.last_good_checkpoint_step, summary.last_good_checkpoint_time) == (10, 110.0)
    assert summary.hangs == 1


@pytest.mark.parametrize("confirmed_at", [15, 20])
def test_a_provisional_checkpoint_is_good_once_confirmed(start, confirmed_at):
    records = [
        CheckpointEvent(step=15, time=115.0, result=result, reason=GateReason.OK)
        for result in (CheckpointResult.PROVISIONAL,)
    ]
    assert fold([start(), *records]).last_good_checkpoint_step is None
    records.append(
        CheckpointEvent(
            step=confirmed_at, time=120.0, result=CheckpointResult.CONFIRMED, reason=GateReason.OK
        )
    )
    summary = fold([start(), *records])
    assert (summary.last_good_checkpoint_step, summary.last_good_checkpoint_time) == (15, 115.0)


def saved(step, result=CheckpointResult.PROVISIONAL, reason=GateReason.OK, path=""):
    return CheckpointEvent(step=step, time=100.0 + step, result=result, reason=reason, path=path)


@pytest.mark.parametrize(
    "outcome", [Outcome.SUSPECT, Outcome.NOT_REPRODUCED, Outcome.UNATTRIBUTED, Outcome.TRANSPORT]
)
def test_an_audit_that_is_not_clean_condemns_what_was_saved_since_the_last_clean_one(
    start, outcome
):
    good = saved(20, CheckpointResult.SAVED)
    before = [start(), preflight(), passes(20), good, saved(30), saved(40)]
    summary = fold(before)
    assert summary.provisional_checkpoint_steps == (30, 40)
    assert summary.condemned_checkpoint_steps == ()

    summary = fold([*before, verdict(50, Check.REPLAY, outcome), passes(60)])
    assert summary.condemned_checkpoint_steps == (30, 40)
    assert summary.provisional_checkpoint_steps == ()
    assert summary.last_good_checkpoint_step == 20


@pytest.mark.parametrize("outcome", [Outcome.NOT_RUN, Outcome.VOID, Outcome.DIFFERS])
def test_an_audit_that_compared_nothing_new_condemns_no_checkpoint(start, outcome):
    records = [start(), saved(30), verdict(50, Check.REPLAY, outcome)]
    assert fold(records).condemned_checkpoint_steps == ()
    records.append(verdict(51, Check.NONFINITE, Outcome.SUSPECT))
    assert fold(records).condemned_checkpoint_steps == ()


def test_weights_that_differ_condemn_provisional_checkpoints(start):
    differ = verdict(35, Check.FINGERPRINT, Outcome.SUSPECT, failed=True)
    assert fold([start(), saved(30), differ]).condemned_checkpoint_steps == (30,)


def test_a_checkpoint_saved_again_after_a_restart_is_judged_anew(start):
    records = [start(), saved(30), verdict(35, Check.REPLAY, Outcome.SUSPECT), start(step=20)]
    assert fold([*records, saved(30)]).condemned_checkpoint_steps == ()
    assert fold([*records, saved(30)]).provisional_checkpoint_steps == (30,)
    elsewhere = fold([*records, saved(30, path="b.pt")])
    assert elsewhere.condemned_checkpoint_steps == (30,)


def test_confirming_leaves_those_provisional_that_no_audit_can_confirm(start):
    records = [
        start(),
        saved(10, reason=GateReason.DIFFERS),
        saved(30),
        saved(30, CheckpointResult.CONFIRMED),
    ]
    summary = fold(records)
    assert summary.provisional_checkpoint_steps == (10,)
    assert summary.last_good_checkpoint_step == 30


def test_a_finding_says_whom_it_names_and_since_when(start):
    found = verdict(20, Check.REPLAY, Outcome.SUSPECT, ranks=(1, 5), suspects=(suspect(3),))
    again = verdict(30, Check.REPLAY, Outcome.SUSPECT, ranks=(1, 5), suspects=(suspect(3),))
    first, second = fold([start(), found, again]).findings
    assert (first.named_ranks, first.ranks) == ((3,), (1, 5))
    assert [s.first_time for s in (*first.suspects, *second.suspects)] == [120.0, 120.0]
    assert second.suspects[0].last_time == 130.0


def test_a_verdict_counts_once_from_its_record(start):
    mismatches = verdict(12, Check.REPLAY, Outcome.TRANSPORT)
    summary = fold([start(), preflight(), passes(10), mismatches])
    counts = {(c.check, c.outcome): c.count for c in summary.verdicts}
    assert counts[Check.REPLAY, Outcome.TRANSPORT] == 1
    assert summary.audits == 2


def test_adding_one_by_one_gives_the_same_as_folding_all(start):
    records = [start(), preflight(), passes(10), verdict(12, Check.REPLAY, Outcome.TRANSPORT)]
    running = SummaryBuilder()
    for upto, record in enumerate(records, start=1):
        running.add(record)
        assert running.summary() == fold(records[:upto])


def test_a_summary_is_plain_json(start):
    records = [
        start(),
        preflight(),
        passes(10, loss=float("nan"), steps_at_risk=3),
        verdict(12, Check.REPLAY, Outcome.SUSPECT, suspects=(suspect(),)),
        verdict(13, Check.REPLAY, Outcome.NOT_REPRODUCED, ranks=(4,)),
    ]
    data = fold(records).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["verdict"] == "suspect"
    assert data["coverage"] == "full"
    assert data["loss"] == "NaN"
    assert [(s["rank"], s["count"]) for s in data["strikes"]] == [(4, 1)]
    assert data["suspects"][0]["gpu"] == "GPU-3"
    assert data["steps_at_risk"] == 3
