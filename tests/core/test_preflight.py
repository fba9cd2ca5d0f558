import itertools

import pytest

from sdcwatch.core.arbitration import error_value
from sdcwatch.core.preflight import (
    ATTEMPTS,
    FACTS_SHOWN,
    LONGEST_WAIT,
    RINGS_TO_ARM,
    Backoff,
    FirstRings,
    Owed,
    SelfAudit,
    audited_micro_batch,
    audited_share,
    environment_differences,
    judge_common,
    judge_preflight,
    separating_facts,
)
from sdcwatch.core.records import Coverage, Outcome


def rows(world=6, **changed):
    """Audits of `world` ranks; ``changed={"r3": {"error": "OOM"}}`` changes one."""
    return [SelfAudit(rank=rank, **changed.get(f"r{rank}", {})) for rank in range(world)]


def judged(audits, **options):
    return judge_preflight(audits, **{"deterministic": True, **options})


def test_where_everything_is_equal_coverage_is_full():
    assert (judged(rows()).coverage, judged(rows()).notes) == (Coverage.FULL, ())


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("collectives", ("all_gather in gather.py:12",), "gather in the training loop"),
        ("left_behind", ("parameter teacher.weight",), "change it after the call instead"),
        ("doors", ("parameter head.weight",), "let the module return"),
        ("disturbed", ("torch",), "a torch.Generator of its own"),
    ],
)
def test_a_clause_that_does_not_hold_on_any_rank_is_named_with_what_to_write(field, value, says):
    judgement = judged(rows(r3={field: value}))
    assert judgement.coverage is Coverage.OFF
    assert value[0] in judgement.reason
    assert "rank 3" in judgement.reason
    assert says in judgement.reason


def test_memory_that_runs_out_is_tried_again_a_few_times_and_then_given_up():
    audits = rows(r1={"error": "OutOfMemoryError: 2 GiB", "out_of_memory": True})
    for attempt in range(1, ATTEMPTS):
        judgement = judged(audits, attempt=attempt)
        assert (judgement.coverage, judgement.out_of_memory) == (None, True)
    assert judged(audits, attempt=ATTEMPTS).coverage is Coverage.OFF
    other = rows(r1={"error": "ValueError: no"})
    assert judged(other, attempt=1).coverage is Coverage.OFF


def test_what_cannot_be_replayed_turns_audits_off_with_its_reason():
    judgement = judged(rows(r2={"not_run": "the batch does not pickle"}))
    assert judgement.coverage is Coverage.OFF
    assert "rank 2 cannot be replayed: the batch does not pickle" in judgement.reason


@pytest.mark.parametrize("field", ["outputs_equal", "gradients_equal", "gradients_repeat"])
@pytest.mark.parametrize(
    ("layout", "ranks", "tolerated"),
    [
        ("3x2", (2, 3), True),
        ("3x2", (1, 2), False),
        ("3x4", (4, 5, 6, 7), True),
        ("2x2", (1,), False),
        ("3x1", (0,), True),
        ("3x1", (0, 1), False),
    ],
)
def test_one_domain_that_deviates_alone_is_left_to_the_audits(
    field, layout, ranks, tolerated, topology
):
    where = topology(layout)
    audits = [
        SelfAudit(rank=r, differing=("head",), **{field: r not in ranks})
        for r in range(where.world_size)
    ]
    judgement = judged(audits, topology=where)
    assert (judgement.coverage is Coverage.FULL) == tolerated
    assert bool(judgement.notes) == tolerated


def test_what_does_not_repeat_is_tried_with_deterministic_kernels_first():
    restless = {f"r{r}": {"gradients_repeat": False} for r in (0, 3)}
    assert judged(rows(**restless), deterministic=False).coverage is None
    assert judged(rows(**restless)).coverage is Coverage.OUTPUTS_ONLY
    worse = {name: {**change, "loss_repeats": False} for name, change in restless.items()}
    assert judged(rows(**worse)).coverage is Coverage.OFF


# --- one common micro-batch ---

HERE = {"torch": "2.13.0", "threads": "1", "hash_seed": "7"}


def test_equal_values_match_everybody(topology):
    judgement = judge_common(["x"] * 6, [HERE] * 6, topology("3x2"))
    assert (judgement.matched, judgement.differing) == (tuple(range(6)), ())
    assert judgement.coverage is None


@pytest.mark.parametrize("ranks", [(3,), (2, 3), (0, 5)])
def test_a_minority_differs_with_the_facts_that_separate_it(ranks, topology):
    values = ["y" if r in ranks else "x" for r in range(6)]
    facts = [{**HERE, "torch": "2.8.0"} if r in ranks else HERE for r in range(6)]
    judgement = judge_common(values, facts, topology("3x2"))
    assert judgement.differing == ranks
    assert set(judgement.matched) == set(range(6)) - set(ranks)
    assert judgement.coverage is None
    (separating,) = judgement.separating
    assert separating.startswith("torch differs: '2.13.0' on ranks")
    assert separating in judgement.reason


def test_a_device_that_matched_in_an_earlier_segment_stays_in_the_audits_unless_facts_differ(
    topology,
):
    values = ["y" if rank in (2, 3) else "x" for rank in range(6)]
    one = judge_common(values, [HERE] * 6, topology("3x2"), known={3})
    assert one.differing == (2,)
    assert "rank 2 is left out of the audits" in one.reason
    assert "the device of rank 3 matched in an earlier segment: audited" in one.reason
    both = judge_common(values, [HERE] * 6, topology("3x2"), known={2, 3, 5})
    assert (both.differing, both.coverage) == ((), None)
    assert "left out" not in both.reason
    facts = [{**HERE, "torch": "2.8.0"} if rank in (2, 3) else HERE for rank in range(6)]
    assert judge_common(values, facts, topology("3x2"), known={2, 3}).differing == (2, 3)


def test_facts_that_do_not_separate_the_sides_are_not_blamed(topology):
    values = ["x", "x", "x", "y", "x", "x"]
    facts = [{**HERE, "hash_seed": str(r % 2)} for r in range(6)]
    judgement = judge_common(values, facts, topology("3x2"))
    assert judgement.separating == ()
    assert "no fact about software or environment separates them" in judgement.reason


@pytest.mark.parametrize("values", ["xxxyyy", "xxyyzz", "xyzabc"])
def test_without_a_majority_nobody_differs_and_the_audits_are_off(values, topology):
    judgement = judge_common(list(values), [HERE] * 6, topology("3x2"))
    assert (judgement.coverage, judgement.differing) == (Coverage.OFF, ())
    assert "not the same function on every rank" in judgement.reason
    assert judgement.reason.endswith("give the module what differs between ranks as an argument")
    hashes = [{**HERE, "string_hash": str(r)} for r in range(6)]
    hashed = judge_common(list(values), hashes, topology("3x2"))
    assert "set PYTHONHASHSEED if it iterates over a set of strings" in hashed.reason


def test_a_rank_that_raises_where_the_others_do_not_is_left_out_with_its_words(topology):
    values = ["x"] * 5 + [error_value("RuntimeError: one output")]
    judgement = judge_common(values, [HERE] * 6, topology("3x2"))
    assert (judgement.matched, judgement.differing) == ((0, 1, 2, 3, 4), (5,))
    assert "the replay on rank 5 ended with RuntimeError: one output" in judgement.reason
    none = judge_common([error_value("OOM")] * 6, [HERE] * 6, topology("3x2"))
    assert (none.coverage, none.differing) == (Coverage.OFF, ())
    assert none.reason == "no rank could replay the common micro-batch: OOM"


def test_a_rank_that_could_not_be_asked_is_on_neither_side(topology):
    judgement = judge_common(["x"] * 5 + [None], [HERE] * 6, topology("3x2"))
    assert (judgement.matched, judgement.differing) == ((0, 1, 2, 3, 4), ())
    assert judgement.coverage is None


def test_a_rank_with_other_kernels_is_left_out_though_this_micro_batch_came_out_equal(topology):
    facts = [{**HERE, "threads": "2"} if r == 4 else HERE for r in range(6)]
    judgement = judge_common(["x"] * 6, facts, topology("3x2"), deciding=("threads", "torch"))
    assert (judgement.differing, judgement.coverage) == ((4,), None)
    assert judgement.reason.startswith("rank 4 runs in another environment than ranks 0, 1, 2, 3")
    assert "threads differs" in judgement.separating[0]
    told = judge_common(["x"] * 6, facts, topology("3x2"))
    assert told.differing == ()
    halves = [{**HERE, "threads": str(r % 2)} for r in range(6)]
    none = judge_common(["x"] * 6, halves, topology("3x2"), deciding=("threads",))
    assert (none.coverage, none.differing) == (Coverage.OFF, ())
    assert "run in other environments; threads differs" in none.reason
    assert none.reason.endswith("run every rank in the same environment")


def test_a_fact_in_which_everybody_differs_from_everybody_separates_nobody():
    each = [{"string_hash": str(r)} for r in range(6)]
    assert separating_facts(each, {3}) == ()
    one = [{"string_hash": "a" if r == 3 else "b"} for r in range(6)]
    assert separating_facts(one, {3}) != ()


def test_texts_about_environments_stay_short():
    many = [{f"fact{i}": "v" * 500 if r else "w" for i in range(40)} for r in range(1000)]
    said = environment_differences(many)
    assert len(said) == FACTS_SHOWN + 1
    assert said[-1] == "34 more facts differ"
    assert "and 991 more" in said[0]
    assert max(map(len, said)) < 300
    assert len(separating_facts(many, {0})) == FACTS_SHOWN
    each = environment_differences([{"pid": str(r)} for r in range(1000)])
    assert "996 more values" in each[0]


def test_equal_environments_say_nothing():
    assert environment_differences([HERE, dict(HERE)]) == []
    assert environment_differences([]) == []
    assert separating_facts([HERE, HERE], {0}) == ()


def test_a_fact_that_one_rank_lacks_is_a_difference():
    assert environment_differences([{"a": "1"}, {}]) == [
        "a differs: '1' on rank 0, 'not set' on rank 1"
    ]


# --- schedules ---


def test_coverage_is_full_after_several_first_rings_without_a_mismatch():
    rings = FirstRings()
    for number in range(1, RINGS_TO_ARM + 1):
        assert not rings.enough
        rings = rings.after(Outcome.PASS)
        assert rings.enough == (number == RINGS_TO_ARM)
    assert not rings.after(Outcome.NOT_REPRODUCED).enough
    assert rings.after(Outcome.NOT_RUN) == rings


def test_errors_back_off_from_the_next_due_step_by_doubling():
    backoff, tried = Backoff(), []
    for due in range(200):
        now, backoff = backoff.due()
        if now:
            tried.append(due)
            backoff = backoff.failed()
    waits = [b - a for a, b in itertools.pairwise(tried)]
    assert waits[:7] == [1, 2, 4, 8, 16, 32, LONGEST_WAIT]
    assert max(waits) == LONGEST_WAIT
    assert backoff.succeeded() == Backoff()


def test_an_audit_that_is_owed_is_tried_at_the_next_step_and_then_ever_more_rarely():
    owed, tried = Owed().missed(10, 20), []
    for step in range(11, 120):
        if owed.due(step):
            tried.append(step)
            owed = owed.missed(step, 20)
    assert tried == [11, 13, 17, 25, 41, 61, 81, 101]
    assert not Owed().due(11)


def test_only_the_first_error_in_a_row_is_an_alarm():
    first = Backoff().failed()
    assert first.alarms
    assert not first.failed().alarms
    assert first.succeeded().failed().alarms


def test_every_micro_batch_of_an_accumulated_step_is_audited_sooner_or_later():
    drawn = [audited_micro_batch(0, step, 4) for step in range(400)]
    assert {drawn.count(index) > 60 for index in range(4)} == {True}
    assert drawn == [audited_micro_batch(0, step, 4) for step in range(400)]
    assert drawn != [audited_micro_batch(1, step, 4) for step in range(400)]


def test_nothing_is_planned_for_a_step_that_follows_none_or_one_without_accumulation():
    assert {audited_micro_batch(0, step, last) for step in range(9) for last in (None, 1)} == {None}


def test_the_share_that_is_audited_is_said():
    assert audited_share(4) == "1 of 4 micro-batches of each audited step"
    assert audited_share(1) == ""
