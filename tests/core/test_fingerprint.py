import itertools
from dataclasses import replace

import pytest

from sdcwatch.core.fingerprint import (
    NUMBERS_ASKED,
    RANKS_SHOWN,
    TENSORS_GATHERED,
    OptimizerFacts,
    SoftwareFacts,
    asked_numbers,
    differing_facts,
    differing_numbers,
    judge_fingerprints,
    split_local,
    written_by_forwards,
)
from sdcwatch.core.records import Cause, Outcome

NAMES = ("wte.weight", "head.weight")
GOOD = ((1, 2), (3, 4))


def replicas(world, **bad):
    """Tables of `world` ranks; ``bad={"r3": ((9, 9), (3, 4))}`` replaces one."""
    return [bad.get(f"r{rank}", GOOD) for rank in range(world)]


def test_equal_replicas_pass_even_if_their_optimizers_differ():
    assert judge_fingerprints(NAMES, replicas(6)).outcome is Outcome.PASS
    other = SoftwareFacts(optimizers=(OptimizerFacts(), OptimizerFacts(updates=1)), first=True)
    assert judge_fingerprints(NAMES, replicas(2), software=other).outcome is Outcome.PASS
    assert judge_fingerprints(NAMES, replicas(1)).outcome is Outcome.PASS
    assert judge_fingerprints((), [(), ()]).outcome is Outcome.PASS


def test_a_rank_that_dissents_from_the_majority_is_named_with_its_tensor():
    judgement = judge_fingerprints(NAMES, replicas(6, r3=((1, 2), (3, 2**64 - 1))))
    assert judgement.outcome is Outcome.SUSPECT
    assert judgement.named == {3: ("head.weight",)}
    assert judgement.reason == (
        "rank 3 dissents from the majority of 6 on 1 of 2 tensors (head.weight)"
    )
    (disagreement,) = judgement.disagreements
    assert disagreement.tensor == "head.weight"
    assert disagreement.dissenters == (3,)
    assert disagreement.groups == ((0, 1, 2, 4, 5), (3,))
    assert disagreement.fingerprints == (
        "0000000000000003:0000000000000004",
        "0000000000000003:ffffffffffffffff",
    )


def test_either_checksum_alone_makes_a_difference():
    for other in ((0, 2), (1, 0)):
        judgement = judge_fingerprints(("w",), [((1, 2),), ((1, 2),), (other,)])
        assert judgement.named == {2: ("w",)}


@pytest.mark.parametrize("world", range(2, 8))
def test_exactly_the_minority_of_a_strict_majority_is_named(world):
    for sides in itertools.product((0, 1), repeat=world):
        tables = [((side, 0),) for side in sides]
        judgement = judge_fingerprints(("w",), tables)
        ones = [rank for rank, side in enumerate(sides) if side]
        zeros = [rank for rank, side in enumerate(sides) if not side]
        if not ones or not zeros:
            assert judgement.outcome is Outcome.PASS
        elif len(ones) == len(zeros):
            assert judgement.outcome is Outcome.UNATTRIBUTED
            assert judgement.named == {}
            assert judgement.ranks == tuple(range(world))
        else:
            assert list(judgement.named) == min(ones, zeros, key=len)


def test_half_is_no_majority_and_every_side_is_said():
    judgement = judge_fingerprints(NAMES, replicas(4, r2=((9, 9), (3, 4)), r3=((9, 9), (3, 4))))
    assert judgement.outcome is Outcome.UNATTRIBUTED
    assert judgement.disagreements[0].dissenters == ()
    assert judgement.disagreements[0].groups == ((0, 1), (2, 3))
    assert "ranks 0 and 1 against ranks 2 and 3" in judgement.reason
    assert judgement.ranks == (0, 1, 2, 3)


def test_a_plurality_is_no_majority():
    tables = [((v, 0),) for v in (1, 1, 2, 3)]
    judgement = judge_fingerprints(("w",), tables)
    assert judgement.outcome is Outcome.UNATTRIBUTED
    assert judgement.disagreements[0].groups == ((0, 1), (2,), (3,))


def test_each_tensor_has_a_majority_of_its_own():
    tables = replicas(5, r1=((9, 9), (3, 4)), r4=((1, 2), (8, 8)))
    judgement = judge_fingerprints(NAMES, tables)
    assert judgement.named == {1: ("wte.weight",), 4: ("head.weight",)}
    assert [d.tensor for d in judgement.disagreements] == list(NAMES)


def test_tensors_without_a_majority_are_said_beside_a_named_rank():
    tables = [((1, 0), (1, 0)), ((1, 0), (1, 0)), ((1, 0), (2, 0)), ((9, 0), (3, 0))]
    judgement = judge_fingerprints(NAMES, tables)
    assert judgement.named == {3: ("wte.weight",)}
    assert judgement.reason.endswith("no strict majority on 1 more tensor")


def test_where_forwards_write_weights_nobodys_device_is_named():
    judged = judge_fingerprints(NAMES, replicas(6, r3=((9, 9), (3, 4))))
    assert list(judged.named) == [3]
    found = written_by_forwards(judged)
    assert (found.outcome, found.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)
    assert (found.named, found.ranks) == ({}, (3,))
    assert found.reason.startswith(judged.reason)
    assert "write it after optimizer.step()" in found.reason
    assert found.disagreements == judged.disagreements


def test_many_tensors_and_ranks_make_a_short_sentence():
    names = [f"layer.{i}.weight" for i in range(500)]
    good = [(1, 1)] * 500
    tables = [good] * 20 + [[(rank, 0)] * 500 for rank in range(2, 11)]
    judgement = judge_fingerprints(names, tables)
    assert len(judgement.named) == 9
    assert len(judgement.disagreements) == TENSORS_GATHERED
    assert len(judgement.reason) < 600
    assert "so do 5 more ranks" in judgement.reason


TRAINED = (frozenset(NAMES),)
EQUAL = OptimizerFacts(updates=42, skips=1, scale=256.0, groups="a1", steps="b2")


def numbers(world, **other):
    """Facts of `world` ranks; ``other={"r3": EQUAL}`` replaces one."""
    return tuple(other.get(f"r{rank}", EQUAL) for rank in range(world))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("updates", 41, "updates made: 42 on ranks 0, 1, 2, 4 and 5, 41 on rank 3"),
        ("scale", 128.0, "GradScalers: 256.0 on ranks 0, 1, 2, 4 and 5, 128.0 on rank 3"),
        ("rates", 0.5, "added up: None on ranks 0, 1, 2, 4 and 5, 0.5 on rank 3"),
        ("loaded", "ff", "as it was loaded: ranks 0, 1, 2, 4 and 5 against rank 3"),
        ("groups", "ff", "weight decay): ranks 0, 1, 2, 4 and 5 against rank 3"),
        ("steps", "ff", "steps counted by the optimizers: ranks 0, 1, 2, 4 and 5 against rank 3"),
    ],
)
def test_other_numbers_of_the_optimizer_are_software_and_nobodys_device(field, value, says):
    other = replace(EQUAL, **{field: value})
    tables = replicas(6, r3=((9, 9), (3, 4)))
    software = SoftwareFacts(optimizers=numbers(6, r3=other), trained=TRAINED)
    judgement = judge_fingerprints(NAMES, tables, software=software)
    assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)
    assert judgement.named == {}
    assert says in judgement.reason
    equal = SoftwareFacts(optimizers=numbers(6), trained=TRAINED)
    assert list(judge_fingerprints(NAMES, tables, software=equal).named) == [3]


def test_skips_are_told_where_updates_differ_too():
    said = differing_facts(numbers(6, r3=replace(EQUAL, updates=43, skips=0)))
    assert said[1] == "updates skipped: 1 on ranks 0, 1, 2, 4 and 5, 0 on rank 3"


def test_a_script_that_leaves_out_what_the_guard_skips_explains_nothing():
    facts = numbers(6, r3=replace(EQUAL, skips=0))
    tables = replicas(6, r3=((9, 9), (3, 4)))
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts))
    assert list(judgement.named) == [3]


def test_a_scaler_that_lives_on_some_ranks_only_explains_nothing():
    facts = numbers(6, r3=replace(EQUAL, scale=None))
    tables = replicas(6, r3=((9, 9), (3, 4)))
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts))
    assert list(judgement.named) == [3]


def test_the_numbers_that_differ_are_told_with_the_ranks_that_hold_them():
    facts = numbers(6, r3=replace(EQUAL, groups="ff"), r5=replace(EQUAL, groups="ee"))
    assert asked_numbers(facts) == (0, 3, 5)
    rows = {
        0: {"parameters": "4", "lr of group 0": "0.1", "betas": "(0.9, 0.95)"},
        3: {"parameters": "4", "lr of group 0": "0.2", "betas": "(0.9, 0.95)"},
        5: {"parameters": "4", "lr of group 0": "0.1"},
    }
    said = differing_numbers(rows, facts)
    assert said == (
        "lr of group 0: 0.1 on ranks 0, 1, 2, 4 and 5, 0.2 on rank 3",
        "betas: (0.9, 0.95) on ranks 0, 1, 2, 3 and 4, missing on rank 5",
    )
    software = SoftwareFacts(optimizers=facts, numbers=said, since=40)
    reason = judge_fingerprints(NAMES, replicas(6, r3=((9, 9), (8, 8))), software=software).reason
    assert "since step 40, when they were equal" in reason
    assert said[0] in reason
    assert asked_numbers(numbers(6)) == ()
    many = [replace(EQUAL, groups=f"{rank:02x}") for rank in range(100)]
    assert len(asked_numbers(many)) == NUMBERS_ASKED


@pytest.mark.parametrize("name", ["writes", "gradient_writes"])
def test_code_that_wrote_into_the_tensors_of_one_rank_is_software(name):
    tables = replicas(6, r3=((9, 9), (3, 4)))
    facts = numbers(6, r3=replace(EQUAL, **{name: 7}))
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts))
    assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)
    assert judgement.named == {}
    assert "0 on ranks 0, 1, 2, 4 and 5, 7 on rank 3" in judgement.reason
    assert "wte.weight" in judgement.reason
    two = judge_fingerprints(
        NAMES, replicas(2, r1=((9, 9), (3, 4))), software=SoftwareFacts(optimizers=facts[2:4])
    )
    assert (two.outcome, two.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)


def test_writes_of_a_rank_that_is_right_do_not_clear_the_one_that_dissents():
    tables = replicas(6, r3=((9, 9), (3, 4)))
    facts = numbers(6, r1=replace(EQUAL, writes=7))
    assert judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts)).named == {
        3: ("wte.weight",)
    }


def test_a_rank_whose_code_wrote_is_not_named_beside_one_whose_device_is():
    tables = replicas(7, r3=((9, 9), (3, 4)), r5=((7, 7), (3, 4)))
    facts = numbers(7, r5=replace(EQUAL, writes=7))
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts))
    assert judgement.named == {3: ("wte.weight",)}
    assert "the code of rank 5 wrote there" in judgement.reason


def test_ranks_that_wrote_as_often_and_hold_other_bits_are_software_and_not_named():
    tables = replicas(7, r3=((9, 9), (3, 4)), r5=((7, 7), (3, 4)))
    wrote = replace(EQUAL, writes=7)
    facts = numbers(7, r3=wrote, r5=wrote)
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(optimizers=facts))
    assert (judgement.named, judgement.cause) == ({}, Cause.SOFTWARE)
    assert judgement.ranks == (3, 5)


def test_replicas_that_differ_before_the_first_update_are_software():
    tables = replicas(6, r3=((1, 2), (9, 9)))
    judgement = judge_fingerprints(NAMES, tables, software=SoftwareFacts(first=True))
    assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE)
    assert "before any device has computed" in judgement.reason


def test_a_rank_that_differs_everywhere_with_equal_numbers_has_two_readings_and_no_name():
    tables = replicas(6, r3=((9, 9), (8, 8)))
    software = SoftwareFacts(optimizers=numbers(6), trained=TRAINED)
    judgement = judge_fingerprints(NAMES, tables, software=software)
    assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.UNKNOWN)
    assert (judgement.named, judgement.ranks) == ({}, (3,))
    assert "missed or scaled an update" in judgement.reason
    assert "norm or a scale wrongly" in judgement.reason


def test_an_optimizer_of_its_own_that_was_not_stepped_is_no_device_either():
    names = ("wte", "head", "bias")
    tables = [((1, 1), (2, 2), (3, 3))] * 5 + [((9, 9), (2, 2), (3, 3))]
    one = SoftwareFacts(optimizers=numbers(6), trained=(("wte",), ("head", "bias")))
    assert judge_fingerprints(names, tables, software=one).outcome is Outcome.UNATTRIBUTED
    both = SoftwareFacts(optimizers=numbers(6), trained=(("wte", "head", "bias"),))
    assert judge_fingerprints(names, tables, software=both).named == {5: ("wte",)}


def test_a_frozen_tensor_does_not_make_a_missed_update_look_like_a_device():
    names = ("frozen", "adapter")
    tables = [((1, 1), (2, 2))] * 5 + [((1, 1), (9, 9))]
    software = SoftwareFacts(optimizers=numbers(6), trained=(("adapter",),))
    assert judge_fingerprints(names, tables, software=software).named == {}


def test_a_rank_that_differs_in_one_tensor_is_named_beside_one_that_missed_an_update():
    tables = replicas(7, r3=((9, 9), (8, 8)), r5=((1, 2), (7, 7)))
    software = SoftwareFacts(optimizers=numbers(7), trained=TRAINED)
    judgement = judge_fingerprints(NAMES, tables, software=software)
    assert judgement.named == {5: ("head.weight",)}
    assert "rank 3 dissents on every tensor" in judgement.reason


def test_only_those_gathered_can_show_that_an_update_was_missed():
    names = [f"layer.{i}" for i in range(TENSORS_GATHERED)]
    tables = [[(1, 1)] * len(names)] * 5 + [[(9, 9)] * len(names)]
    trained = ([f"layer.{i}" for i in range(500)],)
    for differing, named in ((500, []), (TENSORS_GATHERED, [5])):
        software = SoftwareFacts(
            optimizers=numbers(6),
            trained=trained,
            tensors_total=500,
            differing_total=differing,
        )
        judgement = judge_fingerprints(names, tables, software=software)
        assert list(judgement.named) == named
        assert f"{differing} of 500 tensors" in judgement.reason or named


def test_facts_that_differ_on_many_ranks_make_a_short_sentence():
    facts = [replace(EQUAL, updates=rank) for rank in range(500)]
    (said,) = differing_facts(facts)
    assert len(said) < 400
    many = [replace(EQUAL, groups=str(rank % 2)) for rank in range(500)]
    assert "and 242 more" in differing_facts(many)[0]


def test_a_disagreement_of_many_ranks_makes_a_short_record():
    tables = [((rank % 20, 0),) for rank in range(1000)]
    (disagreement,) = judge_fingerprints(("w",), tables).disagreements
    assert len(disagreement.groups) < 20
    assert max(map(len, disagreement.groups)) <= RANKS_SHOWN
    assert judge_fingerprints(("w",), tables).ranks == tuple(range(RANKS_SHOWN))


def test_local_tensors_are_left_out_by_pattern_and_by_ddps_ignore_list():
    names = ("wte", "experts.0.w", "experts.1.w", "table")
    kept, left_out, unused = split_local(
        names, local=("experts.*", "expert.*"), ignored=("table", "other")
    )
    assert kept == ("wte",)
    assert left_out == ("experts.0.w", "experts.1.w", "table")
    assert unused == ("expert.*",)
    assert split_local(names) == (names, (), ())
