from dataclasses import replace

import pytest

from sdcwatch.core.arbitration import NOT_KEPT, OVERWRITTEN, REPEATS
from sdcwatch.core.history import History, device_of
from sdcwatch.core.nonfinite import (
    REPLAYED,
    RankFinite,
    Repeated,
    RepeatsFinite,
    ReplayFinite,
    asks_everybody,
    judge_nonfinite,
    plan_nonfinite_repeats,
    plan_nonfinite_replays,
    remember,
)
from sdcwatch.core.records import Cause, Check, Origin, Outcome


def seen(world=6, short=(), why=NOT_KEPT, **where):
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
            arrived=rank in where.get("arrived", ()),
            nan=rank in where.get("nan", ()),
            not_replayable=why if rank in where.get("gone", ()) else "",
        )
        for rank in range(world)
    ]


EVERY = tuple(range(6))


def replay(producer, replayer, nonfinite, **more):
    return {
        producer: ReplayFinite(producer=producer, replayer=replayer, nonfinite=nonfinite, **more)
    }


def repeats(plan, again=REPEATS, made=REPEATS, control=0):
    """Repeats of flagged ranks, `again` of `made` non-finite, and of those that replayed them."""
    found = []
    for producer, replayer in plan.items():
        found.append(RepeatsFinite(producer=producer, rank=producer, made=made, nonfinite=again))
        found.append(
            RepeatsFinite(producer=producer, rank=replayer, made=REPEATS, nonfinite=control)
        )
    return Repeated(tuple(found))


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
    judgement = judge_nonfinite(facts, replayed, where, repeated=repeats({1: 2}))
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
    judgement = judge_nonfinite(facts, both, where, repeated=repeats({1: 3}))
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


def test_two_flagged_domains_are_replayed_on_a_third_one(topology):
    where, facts = topology("3x2"), seen(local=(0, 2), reduced=EVERY)
    plan = plan_nonfinite_replays(facts, where)
    assert plan == {0: 4, 2: 5}
    both = replay(0, 4, False) | replay(2, 5, True)
    judgement = judge_nonfinite(facts, both, where, repeated=repeats({0: 4}))
    assert (judgement.outcome, judgement.named) == (Outcome.SUSPECT, (0,))
    same = replay(0, 4, True) | replay(2, 5, True)
    judgement = judge_nonfinite(facts, same, where)
    assert (judgement.outcome, judgement.cause) == (Outcome.REPRODUCIBLE, Cause.DATA)


def test_more_than_two_flagged_domains_are_widespread_and_not_replayed(topology):
    where, facts = topology("3x2"), seen(local=(0, 2, 4), reduced=EVERY)
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause, judgement.named, judgement.ranks) == (
        Outcome.WIDESPREAD,
        Cause.UNKNOWN,
        (),
        (0, 2, 4),
    )


@pytest.mark.parametrize("flagged", [(1,), (0, 2), EVERY])
def test_infinities_under_a_scaler_with_finite_outputs_are_its_normal_business(flagged, topology):
    where, facts = topology("3x2"), seen(local=flagged, reduced=EVERY, loss_scaled=EVERY)
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause) == (Outcome.REPRODUCIBLE, Cause.SCALING)
    assert judgement.strikes == judgement.named == ()


def test_infinities_under_a_scaler_are_its_own_business_whoever_made_them(topology):
    """The scaler leaves the update out by itself, and no device is asked."""
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY, loss_scaled=EVERY)
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.cause) == (Outcome.REPRODUCIBLE, Cause.SCALING)
    assert judgement.named == ()


def test_a_nan_on_many_domains_is_scaling_if_one_of_them_is_finite_unscaled(topology):
    where = topology("3x2")
    facts = seen(local=EVERY, reduced=EVERY, loss_scaled=EVERY, nan=EVERY)
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
    facts = seen(local=(0, 2, 4), reduced=EVERY, loss_scaled=(0,))
    assert plan_nonfinite_replays(facts, topology("3x2")) == {}
    assert judge_nonfinite(facts, {}, topology("3x2")).outcome is Outcome.WIDESPREAD


@pytest.mark.parametrize("loss_scaled", [(), EVERY])
@pytest.mark.parametrize("nan", [(), (1,)])
def test_a_gradient_that_arrives_non_finite_at_finite_outputs_was_made_outside(
    loss_scaled, nan, topology
):
    facts = seen(local=(1,), arrived=(1,), reduced=EVERY, loss_scaled=loss_scaled, nan=nan)
    where = topology("3x2")
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    scaling = bool(loss_scaled) and not nan
    expected = (
        (Outcome.REPRODUCIBLE, Cause.SCALING) if scaling else (Outcome.UNATTRIBUTED, Cause.OUTSIDE)
    )
    assert (judgement.outcome, judgement.cause) == expected
    assert judgement.named == judgement.strikes == ()
    assert judgement.ranks == (1,)
    assert "arrived at the outputs of rank 1" in judgement.reason


def test_a_gradient_from_outside_does_not_hide_a_rank_that_made_its_own(topology):
    facts = seen(local=(1, 3), arrived=(3,), reduced=EVERY)
    assert plan_nonfinite_replays(facts, topology("3x2")) == {1: 2}
    judgement = judge_nonfinite(
        facts, replay(1, 2, False), topology("3x2"), repeated=repeats({1: 2})
    )
    assert judgement.named == (1,)


@pytest.mark.parametrize("why", [NOT_KEPT, OVERWRITTEN])
def test_what_was_not_kept_or_is_overwritten_names_nobody(why, topology):
    facts, where = seen(local=(1,), reduced=EVERY, gone=(1,), why=why), topology("3x2")
    assert plan_nonfinite_replays(facts, where) == {}
    judgement = judge_nonfinite(facts, {}, where)
    assert (judgement.outcome, judgement.strikes) == (Outcome.UNATTRIBUTED, ())
    assert why in judgement.reason


@pytest.mark.parametrize("again", range(REPEATS + 1))
def test_only_what_is_non_finite_in_every_repeat_names_a_rank_and_less_is_a_strike(again, topology):
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY)
    judgement = judge_nonfinite(facts, replay(1, 2, False), where, repeated=repeats({1: 2}, again))
    if again == REPEATS:
        assert (judgement.outcome, judgement.named) == (Outcome.SUSPECT, (1,))
        assert judgement.reproduced(1) is True
    else:
        assert (judgement.outcome, judgement.strikes) == (Outcome.NOT_REPRODUCED, (1,))
        assert judgement.named == ()
    assert f"{again} of {REPEATS} repeats" in judgement.reason


@pytest.mark.parametrize(
    "repeated",
    [Repeated(), repeats({1: 2}, made=3, again=3), Repeated(repeats({1: 2}).replays[:1])],
)
def test_without_all_repeats_on_both_sides_nobody_is_named(repeated, topology):
    facts = seen(local=(1,), reduced=EVERY)
    judgement = judge_nonfinite(facts, replay(1, 2, False), topology("3x2"), repeated=repeated)
    assert (judgement.outcome, judgement.named) == (Outcome.UNATTRIBUTED, ())


def test_where_the_other_side_does_not_repeat_the_computation_is_nondeterministic(topology):
    facts = seen(local=(1,), reduced=EVERY)
    judgement = judge_nonfinite(
        facts, replay(1, 2, False), topology("3x2"), repeated=repeats({1: 2}, control=1)
    )
    assert (judgement.outcome, judgement.named) == (Outcome.NONDETERMINISTIC, ())


def test_repeats_are_asked_of_both_sides_where_it_was_finite_elsewhere():
    replays = replay(1, 2, False) | replay(0, 3, True) | replay(4, 5, False, error="OOM")
    assert plan_nonfinite_repeats(replays) == ((1, 1, REPEATS), (2, 1, REPEATS))


def test_two_strikes_of_one_device_name_it_whichever_check_saw_the_first(topology):
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY)
    once = repeats({1: 2}, again=0)
    history = History()
    first = judge_nonfinite(facts, replay(1, 2, False), where, repeated=once, history=history)
    assert (first.outcome, first.named) == (Outcome.NOT_REPRODUCED, ())
    assert asks_everybody(first, history)
    for check in Check:
        earlier = history.struck((device_of(where.ranks[1]),), check=check, step=7)
        second = judge_nonfinite(facts, replay(1, 2, False), where, repeated=once, history=earlier)
        assert (second.outcome, second.named) == (Outcome.SUSPECT, (1,))
        assert second.reproduced(1) is False
        assert f"at step 7 (check {check.value})" in second.reason
        assert not asks_everybody(second, earlier)
    history = remember(history, first, where, step=9)
    assert history.ledger.strikes[0].check is Check.NONFINITE
    others = history.struck((device_of(where.ranks[4]),), check=Check.REPLAY, step=8)
    third = judge_nonfinite(facts, replay(1, 2, False), where, repeated=once, history=others)
    assert third.outcome is Outcome.NOT_REPRODUCED


def test_a_rank_of_another_device_that_does_not_repeat_means_nondeterministic(topology):
    where, facts = topology("3x2"), seen(local=(1,), reduced=EVERY)
    once = repeats({1: 2}, again=0)
    for restless, outcome in (((1,), Outcome.NOT_REPRODUCED), ((4,), Outcome.NONDETERMINISTIC)):
        judgement = judge_nonfinite(
            facts,
            replay(1, 2, False),
            where,
            repeated=Repeated(once.replays, restless),
            history=History(),
        )
        assert judgement.outcome is outcome
    history = remember(History(), judgement, where, step=3)
    assert not history.ledger.repeats


@pytest.mark.parametrize("layout", ["2x1", "2x3"])
def test_two_domains_see_it_and_name_nobody(layout, topology):
    where = topology(layout)
    facts = seen(world=where.world_size, local=(0,), reduced=range(where.world_size))
    plan = plan_nonfinite_replays(facts, where)
    replays = {p: r for q in plan.items() for p, r in replay(*q, False).items()}
    judgement = judge_nonfinite(facts, replays, where, repeated=repeats(plan))
    assert (judgement.outcome, judgement.named) == (Outcome.UNATTRIBUTED, ())
    assert "takes 3 fault domains" in judgement.reason


def test_of_a_large_domain_only_a_few_are_replayed(topology):
    where = topology("3x40")
    facts = seen(world=120, local=range(40), reduced=range(120))
    plan = plan_nonfinite_replays(facts, where)
    assert len(plan) == REPLAYED
    assert len(set(plan.values())) == REPLAYED
    every = {p: r for q in plan.items() for p, r in replay(*q, False).items()}
    judgement = judge_nonfinite(facts, every, where, repeated=repeats(plan))
    assert judgement.named == tuple(plan)
    assert judgement.ranks == tuple(range(40))


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
    ("reduced", "layout", "strikes"),
    [
        ((3,), "3x2", (3,)),
        ((2, 3), "3x2", (2, 3)),
        ((1, 3), "3x2", ()),
        ((0, 1, 2), "2x3", ()),
        ((0,), "2x1", ()),
    ],
)
def test_reduced_on_some_ranks_only_is_a_strike_of_a_minority_of_one_domain(
    reduced, layout, strikes, topology
):
    where = topology(layout)
    judgement = judge_nonfinite(seen(world=where.world_size, reduced=reduced), {}, where)
    assert judgement.outcome is (Outcome.NOT_REPRODUCED if strikes else Outcome.UNATTRIBUTED)
    assert (judgement.named, judgement.strikes) == ((), strikes)
    assert (judgement.origin, judgement.cause) == (Origin.REDUCED, Cause.REDUCTION)
    assert judgement.ranks == reduced
    assert judgement.reason.startswith(f"reduction on rank{'s' * (len(reduced) > 1)} {reduced[0]}")


def test_a_second_strike_of_the_reduction_names_the_device(topology):
    where, facts = topology("3x2"), seen(reduced=(3,))
    first = judge_nonfinite(facts, {}, where, history=History())
    history = remember(History(), first, where, step=5)
    second = judge_nonfinite(facts, {}, where, history=history)
    assert (second.outcome, second.named, second.cause) == (
        Outcome.SUSPECT,
        (3,),
        Cause.REDUCTION,
    )
    assert second.reproduced(3) is None


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


def test_what_was_not_reduced_is_named_with_what_to_write_instead(topology):
    facts = seen(short=(2,))
    names = ("0.weight", "0.bias", "2.weight")
    facts[2] = replace(facts[2], not_reduced=names, not_reduced_total=7)
    assert judge_nonfinite(facts, {}, topology("3x2")).reason == (
        "gradients not reduced: 1 of 2 buckets on rank 2, without 0.weight, 0.bias, 2.weight and 4 "
        "more; software, no device: call the DDP model itself, as model(batch), and not "
        "model.module(batch), and leave no_sync for the last micro-batch"
    )


def test_a_replayer_that_is_not_flagged_itself_is_preferred(topology):
    facts = seen(local=(0,), loss=(2,), reduced=EVERY)
    assert plan_nonfinite_replays(facts, topology("3x2")) == {0: 4, 2: 5}
    facts = seen(local=(0, 2, 4), reduced=EVERY, loss_scaled=EVERY, nan=EVERY)
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
        again = judge_nonfinite(facts, replayed, where, repeated=repeats({1: 2}))
        assert again.named == (1,)


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
        ((3,), EVERY, Outcome.NOT_REPRODUCED),
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
