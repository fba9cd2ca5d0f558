import pytest

from sdcwatch.core.nonfinite import (
    RankFinite,
    ReplayFinite,
    judge_nonfinite,
    plan_nonfinite_replays,
)
from sdcwatch.core.records import Cause, Origin, Outcome


def seen(world=6, short=(), **where):
    """Facts of one step: which ranks saw something, by field."""
    return [
        RankFinite(
            rank=rank,
            buckets_reduced=1 if rank in short else 2,
            buckets_expected=2,
            **{
                name: rank in where.get(name, ())
                for name in ("local", "reduced", "reduced_nan", "loss", "weights", "loss_scaled")
            },
        )
        for rank in range(world)
    ]


EVERY = tuple(range(6))


def replay(producer, replayer, nonfinite, **more):
    return {
        producer: ReplayFinite(producer=producer, replayer=replayer, nonfinite=nonfinite, **more)
    }


def test_a_finite_step_passes(topology):
    where = topology("3x2")
    judgement = judge_nonfinite(seen(), {}, where)
    assert (judgement.outcome, judgement.origin, judgement.cause) == (
        Outcome.PASS,
        Origin.NONE,
        Cause.NONE,
    )
    assert plan_nonfinite_replays(seen(), where) == {}


@pytest.mark.parametrize(("field", "origin"), [("local", Origin.LOCAL), ("loss", Origin.OUTPUT)])
@pytest.mark.parametrize(
    ("replayed", "outcome", "cause", "named"),
    [
        (replay(1, 2, False), Outcome.SUSPECT, Cause.DEVICE, (1,)),
        (replay(1, 2, True), Outcome.REPRODUCIBLE, Cause.DATA, ()),
        (replay(1, 2, True, nonfinite_unscaled=True), Outcome.REPRODUCIBLE, Cause.DATA, ()),
        (replay(1, 2, True, nonfinite_unscaled=False), Outcome.REPRODUCIBLE, Cause.SCALING, ()),
        (replay(1, 2, False, error="OOM"), Outcome.UNATTRIBUTED, Cause.UNKNOWN, ()),
        ({}, Outcome.UNATTRIBUTED, Cause.UNKNOWN, ()),
    ],
)
def test_what_another_domain_computes_decides_about_one_flagged_rank(
    field, origin, replayed, outcome, cause, named, topology
):
    where, facts = topology("3x2"), seen(**{field: (1,), "reduced": EVERY})
    assert plan_nonfinite_replays(facts, where) == {1: 2}
    judgement = judge_nonfinite(facts, replayed, where)
    assert (judgement.outcome, judgement.cause, judgement.named) == (outcome, cause, named)
    assert judgement.origin is origin
    assert judgement.ranks == (1,)
    assert "rank 1" in judgement.reason
    if "OOM" in str(replayed):
        assert "the replay on rank 2 ended with: OOM" in judgement.reason


def test_two_flagged_ranks_of_one_domain_are_both_replayed_elsewhere(topology):
    where, facts = topology("3x2"), seen(local=(0, 1), reduced=EVERY)
    plan = plan_nonfinite_replays(facts, where)
    assert set(plan) == {0, 1}
    assert all(where.domains[p] != where.domains[r] for p, r in plan.items())
    both = replay(0, 2, True) | replay(1, 3, False)
    judgement = judge_nonfinite(facts, both, where)
    assert (judgement.outcome, judgement.named, judgement.ranks) == (
        Outcome.SUSPECT,
        (1,),
        (0, 1),
    )
    half = judge_nonfinite(facts, replay(0, 2, True), where)
    assert half.outcome is Outcome.UNATTRIBUTED


def test_with_one_domain_nothing_is_replayed_and_nobody_is_named(topology):
    for layout, world in (("1x1", 1), ("1x4", 4)):
        where, facts = topology(layout), seen(world=world, local=(0,), reduced=range(world))
        assert plan_nonfinite_replays(facts, where) == {}
        judgement = judge_nonfinite(facts, {}, where)
        assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.UNKNOWN)
        assert judgement.origin is Origin.LOCAL


def test_flagged_ranks_on_several_domains_are_widespread_and_not_replayed(topology):
    where, facts = topology("3x2"), seen(local=(0, 2), reduced=EVERY)
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause, judgement.named, judgement.ranks) == (
        Outcome.WIDESPREAD,
        Cause.UNKNOWN,
        (),
        (0, 2),
    )


def test_an_overflow_on_several_domains_is_the_scalers_business_if_finite_unscaled(topology):
    where = topology("3x2")
    facts = seen(local=EVERY, reduced=EVERY, loss_scaled=EVERY)
    plan = plan_nonfinite_replays(facts, where)
    assert plan == {0: 2}
    overflow = judge_nonfinite(facts, replay(0, 2, True, nonfinite_unscaled=False), where)
    assert (overflow.outcome, overflow.cause) == (Outcome.REPRODUCIBLE, Cause.SCALING)
    for explained_otherwise in (
        replay(0, 2, True, nonfinite_unscaled=True),
        replay(0, 2, False),
        replay(0, 2, True, nonfinite_unscaled=False, error="OOM"),
        {},
    ):
        judgement = judge_nonfinite(facts, explained_otherwise, where)
        assert (judgement.outcome, judgement.named) == (Outcome.WIDESPREAD, ())


def test_one_unscaled_rank_among_the_flagged_keeps_it_widespread(topology):
    facts = seen(local=(0, 2), reduced=EVERY, loss_scaled=(0,))
    assert plan_nonfinite_replays(facts, topology("3x2")) == {}


def test_non_finite_weights_are_widespread_and_not_replayed(topology):
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY, weights=(1,))
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause) == (Outcome.WIDESPREAD, Cause.WEIGHTS)
    assert judgement.named == ()


def test_reduced_everywhere_without_a_local_one_names_no_device(topology):
    where, facts = topology("3x2"), seen(reduced=EVERY)
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.origin, judgement.cause, judgement.named) == (
        Outcome.UNATTRIBUTED,
        Origin.REDUCED,
        Cause.REDUCTION,
        (),
    )


@pytest.mark.parametrize(
    ("reduced", "layout", "named"),
    [
        ((3,), "3x2", (3,)),
        ((2, 3), "3x2", (2, 3)),
        ((1, 3), "3x2", ()),
        ((0, 1, 2), "2x3", ()),
        ((0,), "2x1", ()),
    ],
)
def test_reduced_on_some_ranks_only_names_a_minority_of_one_domain(
    reduced, layout, named, topology
):
    where = topology(layout)
    judgement = judge_nonfinite(seen(world=where.world_size, reduced=reduced), {}, where)
    assert judgement.outcome is (Outcome.SUSPECT if named else Outcome.UNATTRIBUTED)
    assert judgement.named == named
    assert (judgement.origin, judgement.cause) == (Origin.REDUCED, Cause.REDUCTION)
    assert judgement.ranks == reduced
    assert judgement.reason.startswith(f"reduction on rank{'s' * (len(reduced) > 1)} {reduced[0]}")


def test_a_local_value_that_the_reduction_lost_is_said(topology):
    facts = seen(local=(1,), reduced=(0, 1, 2, 3, 4))
    judgement = judge_nonfinite(facts, replay(1, 2, True), topology("3x2"))
    assert "the reduced one on rank 5 lost it" in judgement.reason


def test_fewer_buckets_than_expected_are_software_and_win_over_everything(topology):
    where = topology("3x2")
    for facts in (seen(short=(2,)), seen(short=(2,), local=(1,), weights=(1,), reduced=EVERY)):
        assert plan_nonfinite_replays(facts, where) == {}
        judgement = judge_nonfinite(facts, {}, where)
        assert (judgement.outcome, judgement.named, judgement.ranks) == (
            Outcome.NOT_REDUCED,
            (),
            (2,),
        )
        assert "gradients not reduced: 1 of 2 buckets on rank 2" in judgement.reason


def test_a_replayer_that_is_not_flagged_itself_is_preferred(topology):
    # rank 2's loss is flagged too, on the same step but another domain: widespread unless scaled
    facts = seen(local=(0,), loss=(2,), reduced=EVERY, loss_scaled=(0, 2))
    assert plan_nonfinite_replays(facts, topology("3x2")) == {0: 3}


@pytest.mark.parametrize(
    ("replayed", "outcome", "cause"),
    [
        (replay(1, 2, False), Outcome.UNATTRIBUTED, Cause.UNKNOWN),
        (replay(1, 2, True), Outcome.REPRODUCIBLE, Cause.DATA),
        (replay(1, 2, True, nonfinite_unscaled=False), Outcome.REPRODUCIBLE, Cause.SCALING),
        (replay(1, 2, False, error="OOM"), Outcome.UNATTRIBUTED, Cause.UNKNOWN),
    ],
)
def test_a_replay_that_does_not_give_a_steps_gradients_names_nobody(
    replayed, outcome, cause, topology
):
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY)
    judgement = judge_nonfinite(facts, replayed, where, trusted=False)
    assert (judgement.outcome, judgement.cause, judgement.named) == (outcome, cause, ())
    assert judgement.ranks == (1,)
    if replayed == replay(1, 2, False):
        assert "as preflight found" in judgement.reason
        assert judge_nonfinite(facts, replayed, where).named == (1,)


def test_a_minority_of_the_reduction_needs_no_replay_and_is_named_all_the_same(topology):
    judgement = judge_nonfinite(seen(reduced=(3,)), {}, topology("3x2"), trusted=False)
    assert (judgement.outcome, judgement.named) == (Outcome.SUSPECT, (3,))


def test_a_sum_that_overflows_under_the_loss_scale_of_every_rank_is_the_scalers_business(topology):
    where, facts = topology("3x2"), seen(reduced=EVERY, loss_scaled=EVERY)
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause, judgement.origin, judgement.named) == (
        Outcome.REPRODUCIBLE,
        Cause.SCALING,
        Origin.REDUCED,
        (),
    )
    assert judgement.ranks == EVERY
    assert judgement.reason.startswith("the reduction overflows under the loss scale")


@pytest.mark.parametrize(
    ("reduced", "scaled", "outcome"),
    [
        (EVERY, EVERY[1:], Outcome.UNATTRIBUTED),
        (EVERY[1:], EVERY, Outcome.UNATTRIBUTED),
        ((3,), EVERY, Outcome.SUSPECT),
    ],
)
def test_the_loss_scale_explains_nothing_unless_every_rank_sees_the_value_and_scales(
    reduced, scaled, outcome, topology
):
    facts = seen(reduced=reduced, loss_scaled=scaled)
    judgement = judge_nonfinite(facts, {}, topology("3x2"))
    assert (judgement.outcome, judgement.cause) == (outcome, Cause.REDUCTION)


def test_a_nan_in_the_reduced_gradient_is_no_overflow_whatever_the_loss_scale(topology):
    facts = seen(reduced=EVERY, reduced_nan=(2,), loss_scaled=EVERY)
    judgement = judge_nonfinite(facts, {}, topology("3x2"))
    assert (judgement.outcome, judgement.cause) == (Outcome.UNATTRIBUTED, Cause.REDUCTION)
