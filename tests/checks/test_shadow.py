"""What a forward moves is put back after a skip, in place, whatever it is."""

from __future__ import annotations

import collections
import copy

import numpy as np
import pytest
import torch
from torch import nn

from sdcwatch.checks.module_state import StateWatch
from sdcwatch.checks.serialise import Scope
from sdcwatch.checks.shadow import LEARNED_STEPS, ForwardShadow


class Metric:
    def __init__(self):
        self.total, self.sums, self.history = 0.0, torch.zeros(4), []


class Slots:
    __slots__ = ("last", "total")

    def __init__(self):
        self.total = 0.0


class Model(nn.Module):
    """Moves one of everything, from the step on that it is told."""

    def __init__(self, begins: int = 0):
        super().__init__()
        self.norm, self.begins, self.seen = nn.BatchNorm1d(4), begins, 0
        self.register_buffer("codes", torch.zeros(4))
        self.side = nn.Module()
        self.side.register_buffer("late", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("fixed", torch.ones(4))
        self.items, self.named, self.recent = [], {}, collections.deque(maxlen=2)
        self.scale, self.metric, self.bank = 1.0, Metric(), torch.zeros(4)
        self.rows = {"old": [torch.zeros(4)], "new": []}
        self.array, self.slots = np.zeros(4), Slots()
        self.register_buffer("least", torch.empty(0))
        self.register_buffer("made", None)

    def forward(self, x):
        self.seen += 1
        self.codes.data.add_(x.mean(0))  # no version counter sees it
        self.replaced = self.replaced + 1
        if self.seen > self.begins:
            self.side.late += 1
        self.items.append(self.seen)
        self.named[self.seen] = self.seen
        self.recent.append(self.seen)
        self.scale *= 0.5
        self.metric.total += 1
        self.metric.sums += x.detach().mean(0)
        self.metric.history.append(self.seen)
        self.bank += 1
        self.rows["old"][0].add_(x.detach().mean(0))
        self.rows["new"].append(x.detach().mean(0))
        self.array += x.detach().mean(0).numpy()
        self.slots.total += 1
        self.slots.last = self.seen
        if not self.least.numel():  # as observers of torch.ao, which take a shape from the data
            self.least.resize_(4)
            self.least.fill_(torch.inf)
        self.least.copy_(torch.minimum(self.least, x.detach().amin(0)))
        self.made = x.detach().mean(0) if self.made is None else self.made + 1
        return self.norm(x)


def state(model):
    return (
        {n: b.clone() for n, b in model.named_buffers()},
        (list(model.items), dict(model.named), list(model.recent), model.scale, model.seen),
        (model.metric.total, model.metric.sums.clone(), list(model.metric.history)),
        (model.bank.clone(), copy.deepcopy(model.rows), model.array.copy()),
        (model.slots.total, getattr(model.slots, "last", None)),
    )


def shadow_of(model, limit=1 << 20):
    scope = Scope(model, torch.device("cpu"))
    return ForwardShadow(StateWatch(model, scope), limit)


def steps(model, shadow, number):
    for _ in range(number):
        shadow.begin()
        model(torch.randn(3, 4))
        shadow.learn()
        shadow.release()


@pytest.mark.parametrize("wrong", [float("nan"), 1e30], ids=["nan", "finite"])
@pytest.mark.parametrize("before", [0, 1, LEARNED_STEPS, LEARNED_STEPS + 2])
def test_everything_that_moved_is_put_back_in_place(before, wrong):
    model = Model()
    shadow = shadow_of(model)
    steps(model, shadow, before)
    buffers = dict(model.named_buffers())
    objects = (model.metric, model.metric.sums, model.rows["old"], model.rows["old"][0])
    want = state(model)
    shadow.begin()
    model(torch.full((3, 4), wrong))
    shadow.restore()
    torch.testing.assert_close(state(model), want, rtol=0, atol=0)
    now = (model.metric, model.metric.sums, model.rows["old"], model.rows["old"][0])
    assert all(a is b for a, b in zip(objects, now, strict=True))
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert shadow.left_behind == ()


def test_what_moves_for_the_first_time_in_a_skipped_step_is_named_once():
    model = Model(begins=LEARNED_STEPS)
    shadow = shadow_of(model)
    steps(model, shadow, LEARNED_STEPS)
    shadow.begin()
    model(torch.randn(3, 4))
    shadow.restore()
    left = shadow.take_left_behind()
    assert left == ("side.late",)
    assert shadow.take_left_behind() == ()
    shadow.begin()
    model(torch.randn(3, 4))
    shadow.restore()
    assert shadow.left_behind == ()  # learned


def test_what_is_too_large_to_keep_is_named():
    model = Model()
    shadow = shadow_of(model, limit=8)
    steps(model, shadow, 1)
    shadow.begin()
    model(torch.randn(3, 4))
    shadow.restore()
    assert {"codes", "norm.running_mean"} <= set(shadow.left_behind)


def test_later_steps_copy_only_what_moves():
    model = Model()
    shadow = shadow_of(model)
    steps(model, shadow, LEARNED_STEPS)
    shadow.begin()
    assert {key for _, key in shadow._held} == {
        *("codes", "late", "replaced", "running_mean", "running_var", "num_batches_tracked"),
        *("fixed", "least", "made"),  # the first beside others that move
    }


def test_statistics_that_begin_to_move_late_are_found_by_their_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    shadow = shadow_of(model)
    steps(model, shadow, LEARNED_STEPS + 1)
    assert shadow._moving == set()
    model.train()
    steps(model, shadow, 1)
    before = model[1].running_mean.clone()
    shadow.begin()
    model(torch.full((3, 4), torch.nan))
    shadow.restore()
    assert torch.equal(model[1].running_mean, before)
    assert shadow.left_behind == ()


def test_random_generators_go_on():
    model = Model()
    model.drawn = torch.Generator().manual_seed(1)
    shadow = shadow_of(model)
    steps(model, shadow, 1)
    shadow.begin()
    torch.randn(2, generator=model.drawn)
    state = model.drawn.get_state()
    shadow.restore()
    assert torch.equal(model.drawn.get_state(), state)
    assert shadow.left_behind == ()


class Seldom(nn.Module):
    """Writes into what an attribute holds every fifth time only."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 4), 0
        self.codes, self.loss = {"a": torch.zeros(4)}, []

    def forward(self, x):
        self.seen += 1
        if self.seen > LEARNED_STEPS and self.seen % 5 == 0:
            self.codes["a"].add_(x.detach().mean(0))
            self.loss.append(self.seen)
        return self.inner(x)


def test_what_an_audit_has_seen_move_is_kept_from_then_on():
    model = Seldom()
    shadow = shadow_of(model)
    steps(model, shadow, 6)
    shadow._watch.read()
    steps(model, shadow, 3)
    assert model.loss == [5]
    shadow.begin()
    model(torch.randn(3, 4))
    shadow.restore()
    assert model.loss == [5]
    assert shadow.take_left_behind() == ("codes",), "a tensor that was written in place is told"
    steps(model, shadow, 4)
    codes = model.codes["a"].clone()
    shadow.begin()
    model(torch.full((3, 4), 1e30))
    shadow.restore()
    assert torch.equal(model.codes["a"], codes)
    assert shadow.left_behind == (), "and kept from then on"
