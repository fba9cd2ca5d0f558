"""A replay shows what is wrong: other digests, non-finite values, or nothing to compare."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from sdcwatch.checks.capture import Capture, Captured
from sdcwatch.checks.gradients import digest_gradient
from sdcwatch.checks.payload import pack, unpack
from sdcwatch.checks.replay import ReplayResult, replay

CPU = torch.device("cpu")


class Mlp(nn.Module):
    """Tied and reused parameters, dropout and a norm."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.reused = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.reused(self.dropout(self.reused(self.embed(x))))
        return self.head(self.norm(h))


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"])


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
    """Replay what travelled."""
    micro_batch = unpack(pack(captured.micro_batch), CPU)
    torch.manual_seed(random.randrange(10**6))
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.add_(1)
    return replay(module, loss_fn, micro_batch, list(module.named_parameters()), **options)


def assert_same(captured: Captured, result: ReplayResult) -> None:
    assert (result.error, result.loss) == ("", captured.loss)
    assert torch.equal(result.gradients, captured.gradients)


def test_a_wrong_activation_in_the_replay_shows_in_loss_and_gradients():
    module = Mlp()
    captured = produce(module, cross_entropy, tokens())

    def flip(_module, _args, output):
        flat = output.detach().clone().view(-1)
        flat.view(torch.int32)[5] ^= 1 << 22
        return output + (flat.view_as(output) - output).detach()

    handle = module.reused.register_forward_hook(flip)
    result = elsewhere(module, cross_entropy, captured)
    handle.remove()
    assert result.error == ""
    assert result.loss != captured.loss
    assert not torch.equal(result.gradients, captured.gradients)
    assert_same(captured, elsewhere(module, cross_entropy, captured))


def test_a_wrong_gradient_in_the_replay_names_its_parameter_alone():
    module = Mlp()
    names = [name for name, _ in module.named_parameters()]
    captured = produce(module, cross_entropy, tokens())
    handle = module.reused.bias.register_hook(lambda gradient: gradient + 1e-3)
    result = elsewhere(module, cross_entropy, captured)
    handle.remove()
    assert result.loss == captured.loss
    different = (result.gradients != captured.gradients).any(1).nonzero().flatten().tolist()
    assert [names[i] for i in different] == ["reused.bias"]


def test_an_overflow_of_the_loss_scale_overflows_again_and_is_finite_without_it():
    module = nn.Linear(4, 4)

    def loss_fn(model, x):
        return model(x).square().sum()

    captured = produce(
        module, loss_fn, torch.randn(3, 4), backward=lambda loss: (loss * 3e38).backward()
    )
    scaled = elsewhere(module, loss_fn, captured)
    assert scaled.gradient_nonfinite
    assert not scaled.loss_nonfinite
    assert torch.equal(scaled.gradients, captured.gradients)
    assert not elsewhere(module, loss_fn, captured, scale_free=True).gradient_nonfinite


def test_a_nan_in_the_data_is_nonfinite_in_loss_and_gradient():
    module = nn.Linear(4, 4)

    def loss_fn(model, x):
        return model(x).square().sum()

    captured = produce(module, loss_fn, torch.full((2, 4), float("nan")))
    result = elsewhere(module, loss_fn, captured)
    assert result.loss_nonfinite
    assert result.gradient_nonfinite
    assert result.loss == captured.loss


def test_large_finite_gradients_whose_sum_overflows_are_finite():
    module = nn.Linear(4, 2, bias=False)

    def loss_fn(model, x):
        return model(x).sum() * 1e38

    result = elsewhere(module, loss_fn, produce(module, loss_fn, torch.full((1, 4), 3.0)))
    assert not result.gradient_nonfinite


def test_a_module_without_gradients_gives_a_outputs_only():
    module = nn.Linear(4, 4).requires_grad_(False)

    def loss_fn(model, x):
        return model(x).sum()

    capture = Capture(module, list(module.named_parameters()), CPU)
    batch = torch.randn(3, 4)
    pending = capture.begin(batch, audit=True)
    pending.attach_loss(loss_fn(module, batch))
    captured = pending.finish()
    result = elsewhere(module, loss_fn, captured)
    assert (result.error, result.loss, result.gradients) == ("", captured.loss, None)
    assert captured.gradients is None


def test_a_sparse_gradient_at_another_row_has_another_digest_and_order_does_not_matter():
    values = torch.tensor([[1.0], [2.0]])
    here, there, turned = (
        torch.sparse_coo_tensor(torch.tensor([rows]), rows_values, (6, 1), check_invariants=True)
        for rows, rows_values in (([1, 2], values), ([1, 3], values), ([2, 1], values.flip(0)))
    )
    assert not torch.equal(digest_gradient(here), digest_gradient(there))
    assert torch.equal(digest_gradient(here), digest_gradient(turned))
