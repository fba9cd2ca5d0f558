"""A replay gives the producer's own digests bit for bit."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks.capture import Capture, Captured
from sdcwatch.checks.payload import join, join_losses, pack, unpack
from sdcwatch.checks.replay import ReplayResult, replay

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(UserDict):
    """Opaque to torch's pytree, as a tokenizer's BatchEncoding is."""


class Mlp(nn.Module):
    """Tied, reused, unused and frozen parameters in one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.reused = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.reused(self.dropout(self.reused(self.embed(x)))) + self.frozen(self.embed(x))
        return self.head(self.norm(h))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(40, 16)
        layer = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in "ab"]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)[:, None]
        for layer in (*self.layers, self.layers[0]):
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.head(h[:, 0])


class Codebook(nn.Module):
    """The forward uses a buffer that it moves itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        h = (self.linear(x) - self.mean) * self.mean.cos()
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h


class Hungry(nn.Module):
    """Writes into its buffer in place, which the graph of an earlier call must survive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(0.5, 2, 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x) * self.scale / self.count.float()


def cross_entropy(module, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, (dict, UserDict)) else (batch.x, batch.y)
    return F.cross_entropy(module(x), y)


def tokens():
    whole = torch.randint(0, 40, (12, 2))
    return {"x": whole[:, 0], "y": whole[:, 1]}


def produce(module, loss_fn, batch, *, backward=lambda loss: loss.backward()) -> Captured:
    capture = Capture(module, list(module.named_parameters()), CPU)
    pending = capture.begin(batch, audit=True)
    loss = loss_fn(module, batch)
    pending.attach_loss(loss)
    backward(loss)
    return pending.finish()


def elsewhere(module, loss_fn, captured: Captured, **options) -> ReplayResult:
    """Replay what travelled, with generators and buffers that are not the producer's."""
    micro_batch = unpack(pack(captured.micro_batch), CPU)
    torch.manual_seed(random.randrange(10**6))
    np.random.rand(3)
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.add_(1)
    return replay(module, loss_fn, micro_batch, list(module.named_parameters()), **options)


def assert_same(captured: Captured, result: ReplayResult) -> None:
    assert result.error == ""
    assert result.loss == captured.loss
    assert captured.gradients is not None
    assert torch.equal(result.gradients, captured.gradients)
    assert not result.loss_nonfinite
    assert not result.gradient_nonfinite


BACKWARDS = {
    "plain": lambda loss: loss.backward(),
    "divided by 3": lambda loss: (loss / 3).backward(),
    "scaled by 65536": lambda loss: (loss * 65536).backward(),
    "weighted with another term": lambda loss: (0.3 * loss + 0.7 * loss.square()).backward(),
}


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS.keys())
def test_tied_reused_unused_and_frozen_parameters_replay_bitwise_under_dropout(backward):
    torch.manual_seed(1)
    module = Mlp()
    captured = produce(module, cross_entropy, tokens(), backward=backward)
    assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_a_loss_divided_in_place_replays_with_the_value_loss_fn_returned():
    module = Mlp()

    def backward(loss):
        loss /= 4
        loss.backward()

    captured = produce(module, cross_entropy, tokens(), backward=backward)
    assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_gradients_already_accumulated_do_not_enter_the_digests():
    torch.manual_seed(2)
    module = Mlp()
    cross_entropy(module, tokens()).backward()
    captured = produce(module, cross_entropy, tokens())
    assert_same(captured, elsewhere(module, cross_entropy, captured))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_used_twice_replay_bitwise(reentrant):
    torch.manual_seed(3)
    module = Checkpointed(reentrant)
    captured = produce(module, cross_entropy, tokens(), backward=BACKWARDS["divided by 3"])
    assert captured.micro_batch.reentrant is reentrant
    assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_a_reentrant_checkpoint_that_no_audit_announced_is_found_by_the_replay():
    torch.manual_seed(3)
    module = Checkpointed(True)
    capture = Capture(module, list(module.named_parameters()), CPU)
    batch = tokens()
    audited = capture.begin(batch, audit=True)
    loss = cross_entropy(module, batch)
    audited.attach_loss(loss)
    capture._reentrant = False
    loss.backward()
    captured = audited.finish()
    assert not captured.micro_batch.reentrant
    assert_same(captured, elsewhere(module, cross_entropy, captured))


@pytest.mark.parametrize("module_type", [Codebook, Hungry])
@pytest.mark.parametrize("calls", [1, 2])
def test_buffers_that_the_forward_moves_are_the_producers_at_every_call(module_type, calls):
    torch.manual_seed(4)
    module = module_type()

    def loss_fn(model, x):
        first = model(x)
        return (first - model(x.flip(0)) if calls == 2 else first).square().mean()

    produce(module, loss_fn, torch.randn(8, 16))
    captured = produce(module, loss_fn, torch.randn(8, 16))
    assert captured.micro_batch.calls == calls
    assert_same(captured, elsewhere(module, loss_fn, captured))


class BroadcastsBuffers(nn.Module):
    """Writes its module's buffers inside its own forward, as DDP does with those of rank 0."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        self.module.mean = self.module.mean * 0.5 + 0.25
        return self.module(x)


def test_buffers_are_those_of_the_call_and_not_those_of_the_start():
    module = Codebook()

    def loss_fn(model, x):
        return (model(x) - model(x.flip(0))).square().mean()

    capture = Capture(module, list(module.named_parameters()), CPU)
    batch = torch.randn(8, 16)
    pending = capture.begin(batch, audit=True)
    loss = loss_fn(BroadcastsBuffers(module), batch)
    pending.attach_loss(loss)
    loss.backward()
    captured = pending.finish()
    assert_same(captured, elsewhere(module, loss_fn, captured))


def test_buffers_are_the_producers_when_a_part_of_the_module_is_called_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    module[1].running_mean.normal_()

    def loss_fn(model, x):
        return model[1](x).square().mean()

    captured = produce(module, loss_fn, torch.randn(5, 4))
    assert captured.micro_batch.calls == 0
    assert_same(captured, elsewhere(module, loss_fn, captured))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_replays_from_outside_and_from_inside_of_an_autocast_region(inside):
    torch.manual_seed(5)
    module = Mlp()
    batch = tokens()
    capture = Capture(module, list(module.named_parameters()), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cross_entropy(module, batch)  # leaves casts of the weights in the cache
        pending = capture.begin(batch, audit=True)
        loss = cross_entropy(module, batch)
        pending.attach_loss(loss)
    loss.backward()
    captured = pending.finish()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        with torch.no_grad():
            cross_entropy(module, batch)  # casts that no gradient passes
        assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_a_sparse_embedding_replays_bitwise():
    torch.manual_seed(6)
    module = nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Linear(8, 3))

    def loss_fn(model, batch):
        return model(batch).square().sum()

    captured = produce(module, loss_fn, torch.tensor([3, 3, 5, 29]))
    assert module[0].weight.grad.is_sparse
    assert_same(captured, elsewhere(module, loss_fn, captured))
    other = produce(module, loss_fn, torch.tensor([3, 3, 5, 28]))
    assert not torch.equal(other.gradients[0], captured.gradients[0])


def test_pythons_and_numpys_generators_are_replayed_when_loss_fn_uses_them():
    module = nn.Linear(4, 4)

    def loss_fn(model, x):
        return model(x * random.random() + np.random.rand()).square().sum()

    captured = produce(module, loss_fn, torch.randn(3, 4))
    assert_same(captured, elsewhere(module, loss_fn, captured))


def test_two_losses_of_one_backward_are_replayed_together():
    torch.manual_seed(7)
    module = Mlp()
    capture = Capture(module, list(module.named_parameters()), CPU)
    pendings, losses = [], []
    for _ in range(2):
        batch = tokens()
        pendings.append(capture.begin(batch, audit=True))
        losses.append(cross_entropy(module, batch))
        pendings[-1].attach_loss(losses[-1])
    (0.25 * losses[0] + 0.75 * losses[1]).backward()
    first, second = (pending.finish() for pending in pendings)
    assert torch.equal(first.gradients, second.gradients)
    whole = Captured(
        join([first.micro_batch, second.micro_batch]),
        join_losses([first.loss, second.loss]),
        second.gradients,
    )
    assert_same(whole, elsewhere(module, cross_entropy, whole))


def test_forwards_of_a_pipeline_are_told_apart_by_their_backwards():
    torch.manual_seed(8)
    module = Checkpointed(False)
    capture = Capture(module, list(module.named_parameters()), CPU)
    opened = []
    for _ in range(2):
        batch = tokens()
        pending = capture.begin(batch, audit=True)
        loss = cross_entropy(module, batch)
        pending.attach_loss(loss)
        opened.append((pending, loss))
    for pending, loss in opened:
        loss.backward()
        captured = pending.finish()
        assert_same(captured, elsewhere(module, cross_entropy, captured))


@pytest.mark.parametrize("wrap", [dict, Encoding, lambda d: Pair(**d), lambda d: Example(**d)])
def test_any_kind_of_batch_travels(wrap):
    module = Mlp()
    captured = produce(module, cross_entropy, wrap(tokens()))
    assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_a_batch_that_loss_fn_changes_is_replayed_as_it_was_before():
    module = nn.Linear(4, 4)

    def loss_fn(model, batch):
        batch["x"].mul_(2)
        return model(batch.pop("x")).square().sum()

    captured = produce(module, loss_fn, {"x": torch.randn(3, 4)})
    named = list(module.named_parameters())
    for _ in range(2):
        assert_same(captured, replay(module, loss_fn, captured.micro_batch, named))


def test_a_loss_fn_that_reaches_parameters_past_the_module_replays_bitwise():
    module = nn.Linear(4, 4)
    weight = module.weight

    def loss_fn(model, x):
        return model(x).square().sum() + 0.1 * weight.square().sum()

    captured = produce(module, loss_fn, torch.randn(3, 4))
    assert_same(captured, elsewhere(module, loss_fn, captured))


def test_training_flags_of_the_producer_are_used():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def loss_fn(model, x):
        return model(x).square().sum()

    captured = produce(module, loss_fn, torch.randn(3, 4))
    module.eval()
    assert_same(captured, elsewhere(module, loss_fn, captured))
    assert not module[1].training


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tensor_hook_on_a_parameter_acts_in_step_and_replay_alike(reentrant):
    torch.manual_seed(9)
    module = Checkpointed(reentrant)
    parameter = list(module.parameters())[2]
    clean = produce(module, cross_entropy, tokens())
    parameter.register_hook(lambda gradient: gradient * 1.5)
    captured = produce(module, cross_entropy, clean.micro_batch.batch)
    assert_same(captured, elsewhere(module, cross_entropy, captured))
