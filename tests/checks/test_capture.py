"""What a capture remembers, what it costs off audit steps, and that it takes its hooks off."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from sdcwatch.checks.capture import Capture, HostRngWatch, has_reentrant_checkpoint
from sdcwatch.checks.fingerprint import digest_tensors

CPU = torch.device("cpu")


def loss_fn(module, batch):
    return module(batch["x"]).square().mean()


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.fixture
def capture(module):
    return Capture(module, list(module.named_parameters()), CPU)


def hooks_on(module):
    parameters = sum(len(p._backward_hooks or ()) for p in module.parameters())
    return parameters, len(module._forward_pre_hooks)


def test_off_audit_steps_neither_module_nor_parameters_get_a_hook(module, capture):
    batch = {"x": torch.randn(3, 4)}
    pending = capture.begin(batch, audit=False)
    assert hooks_on(module) == (0, 0)
    loss = loss_fn(module, batch)
    pending.attach_loss(loss)
    loss.backward()
    captured = pending.finish()
    assert captured.loss is None
    assert captured.gradients is None
    assert captured.micro_batch.buffers == ()
    assert captured.micro_batch.batch["x"] is batch["x"]
    assert torch.equal(captured.micro_batch.loss_gradient, torch.ones(()))


def test_the_gradients_are_those_of_this_backward_before_accumulation(module, capture):
    batch = {"x": torch.randn(3, 4)}
    loss_fn(module, {"x": torch.randn(3, 4)}).backward()
    pending = capture.begin(batch, audit=True)
    loss = loss_fn(module, batch)
    pending.attach_loss(loss)
    assert hooks_on(module) == (4, 0)
    loss.backward()
    gradients = pending.finish().gradients
    assert hooks_on(module) == (0, 0)
    accumulated = digest_tensors([p.grad for p in module.parameters()])
    assert not torch.equal(gradients, accumulated)
    module.zero_grad()
    loss_fn(module, batch).backward()
    alone = digest_tensors([p.grad for p in module.parameters()])
    assert torch.equal(gradients, alone)


@pytest.mark.parametrize("moment", ["begun", "attached", "in backward", "finished"])
@pytest.mark.parametrize("audit", [False, True])
def test_abort_takes_every_hook_off_at_any_moment_and_may_be_repeated(
    module, capture, moment, audit
):
    batch = {"x": torch.randn(3, 4)}
    pending = capture.begin(batch, audit=audit)
    if moment != "begun":
        loss = loss_fn(module, batch)
        pending.attach_loss(loss)
        if moment == "in backward":
            module[0].weight.register_hook(_broken)
            with pytest.raises(RuntimeError, match="broken"):
                loss.backward()
            module[0].weight._backward_hooks.popitem()
        if moment == "finished":
            loss.backward()
            pending.finish()
    capture.abort()
    pending.abort()
    capture.abort()
    assert hooks_on(module) == (0, 0)
    assert capture._open == []
    following = capture.begin(batch, audit=True)
    loss = loss_fn(module, batch)
    following.attach_loss(loss)
    loss.backward()
    assert following.finish().gradients is not None
    assert hooks_on(module) == (0, 0)


def _broken(gradient):
    msg = "broken"
    raise RuntimeError(msg)


def test_hooks_stay_until_the_last_open_forward_is_closed(module, capture):
    batch = {"x": torch.randn(3, 4)}
    first, second = (capture.begin(batch, audit=True) for _ in range(2))
    first.abort()
    assert hooks_on(module) == (4, 1)
    second.abort()
    assert hooks_on(module) == (0, 0)


def test_the_callback_comes_inside_the_backward_with_the_gradient_of_the_loss(module, capture):
    batch = {"x": torch.randn(3, 4)}
    pending = capture.begin(batch, audit=True)
    loss = loss_fn(module, batch)
    seen = []
    pending.attach_loss(loss, lambda arrived: seen.append((arrived, arrived.backwards)))
    (loss / 4).backward()
    assert seen == [(pending, 1)]
    assert pending.finish().micro_batch.loss_gradient.item() == 0.25


def test_a_loss_without_gradient_never_calls_back(module, capture):
    pending = capture.begin({}, audit=True)
    with torch.no_grad():
        pending.attach_loss(loss_fn(module, {"x": torch.randn(3, 4)}))
    captured = pending.finish()
    assert captured.loss is not None
    assert captured.gradients is None


def test_buffers_are_cloned_before_the_forward_and_at_each_call(module, capture):
    pending = capture.begin({"x": torch.randn(3, 4)}, audit=True)
    module[1].num_batches_tracked.fill_(40)  # what DDP's broadcast does, inside its forward
    module(torch.randn(3, 4))
    module(torch.randn(3, 4))
    pending.attach_loss(torch.zeros(()))
    module(torch.randn(3, 4))
    micro_batch = pending.finish().micro_batch
    counts = [state["1.num_batches_tracked"].item() for state in micro_batch.buffers]
    assert counts == [0, 40, 41]
    assert micro_batch.calls == 2


def test_a_batch_changed_in_place_is_noticed_and_kept_as_it_was(module, capture):
    batch = {"x": torch.ones(3, 4)}
    pending = capture.begin(batch, audit=True)
    batch["x"].mul_(2)
    pending.attach_loss(loss_fn(module, batch))
    assert pending.changed_in_place
    assert torch.equal(pending.finish().micro_batch.batch["x"], torch.ones(3, 4))


def test_a_batch_with_an_entry_taken_out_is_noticed(module, capture):
    batch = {"x": torch.ones(3, 4), "y": torch.ones(1)}
    pending = capture.begin(batch, audit=True)
    batch.pop("y")
    pending.attach_loss(loss_fn(module, batch))
    assert pending.changed_in_place


def test_an_untouched_batch_is_not_called_changed(module, capture):
    batch = {"x": torch.ones(3, 4), "more": [torch.zeros(2), "text", {3}]}
    pending = capture.begin(batch, audit=True)
    pending.attach_loss(loss_fn(module, batch))
    assert not pending.changed_in_place
    assert pending.problem == ""


def test_a_batch_that_cannot_be_pickled_is_a_problem_and_not_an_exception(module, capture):
    batch = {"x": torch.ones(3, 4), "function": lambda: None}
    pending = capture.begin(batch, audit=True)
    pending.attach_loss(loss_fn(module, batch))
    assert "Expected a batch that pickles" in pending.problem
    assert pending.finish().micro_batch.batch["x"] is batch["x"]


def test_host_generators_are_read_in_the_first_steps_only_unless_they_move():
    watch = HostRngWatch(steps=2)
    for _ in range(2):
        states = watch.read(always=False)
        assert None not in states
        assert watch.compare(*states) == (None, None)
    assert watch.read(always=False) == (None, None)
    states = watch.read(always=True)
    np.random.rand()
    python, numpy = watch.compare(*states)
    assert python is None
    assert numpy is states[1]
    assert watch.read(always=False)[0] is None
    assert watch.read(always=False)[1] is not None


def test_pythons_generator_is_kept_once_it_moved():
    watch = HostRngWatch(steps=1)
    states = watch.read(always=False)
    random.random()
    assert watch.compare(*states) == (states[0], None)
    assert watch.read(always=False)[0] is not None


def test_the_torch_generator_is_the_one_before_the_forward(module, capture):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pending = capture.begin({}, audit=False)
    torch.rand(3)
    pending.attach_loss(torch.zeros(()))
    assert torch.equal(pending.finish().micro_batch.rng.torch_cpu, before)


def test_autocast_is_remembered_around_forward_and_backward(module, capture):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        pending = capture.begin({}, audit=False)
        loss = loss_fn(module, {"x": torch.randn(3, 4)})
        pending.attach_loss(loss)
    loss.backward()
    micro_batch = pending.finish().micro_batch
    assert micro_batch.autocast.kinds == (("cpu", True, torch.bfloat16),)
    assert not micro_batch.autocast.cache
    assert not micro_batch.backward_autocast.kinds[0][1]


def test_only_a_reentrant_checkpoint_is_called_one(module):
    x = torch.randn(3, 4, requires_grad=True)
    run = torch.utils.checkpoint.checkpoint
    assert has_reentrant_checkpoint(run(module, x, use_reentrant=True).sum() / 2)
    assert not has_reentrant_checkpoint(run(module, x, use_reentrant=False).sum())
    assert not has_reentrant_checkpoint(torch.zeros(()))
