"""Capture and replay leave nothing behind: after success, after an exception, beside DDP."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks.capture import Capture
from sdcwatch.checks.payload import AutocastState
from sdcwatch.checks.replay import replay

CPU = torch.device("cpu")


class BackwardFails(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if BackwardFails.armed:
            msg = "the backward broke\nsecond line"
            raise RuntimeError(msg)
        return gradient


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner[0].weight
        self.register_buffer("nothing", None)

    def forward(self, x):
        if self.reentrant is None:
            h = self.inner(x)
        else:
            h = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return BackwardFails.apply(self.tied(h))


def loss_fn(module, batch):
    random.random()
    np.random.rand()
    module.eval()
    module.train()
    return module(batch["x"]).square().mean()


def failing(module, batch):
    loss_fn(module, batch)
    module.inner[1].eval()
    msg = "loss_fn broke\nsecond line"
    raise ArithmeticError(msg)


def interrupted(module, batch):
    loss_fn(module, batch)
    raise KeyboardInterrupt


def state_of(module):
    """All that a replay could disturb."""
    modules = list(module.modules())
    numpy = np.random.get_state()
    return {
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "numpy rng": (numpy[0], numpy[1].tolist(), *numpy[2:]),
        "training": [m.training for m in modules],
        "hooks": [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks))
            for m in modules
        ],
        "parameters": [[(n, id(p)) for n, p in m._parameters.items()] for m in modules],
        "buffer objects": [[(n, id(b)) for n, b in m._buffers.items()] for m in modules],
        "buffer bytes": [b.detach().numpy().tobytes() for b in module.buffers()],
        "buffer versions": [b._version for b in module.buffers()],
        "weights": [p.detach().numpy().tobytes() for p in module.parameters()],
        "weight versions": [p._version for p in module.parameters()],
        "grad objects": [id(p.grad) for p in module.parameters()],
        "grads": [p.grad.numpy().tobytes() for p in module.parameters()],
        "tensor hooks": [len(p._backward_hooks or ()) for p in module.parameters()],
        "needs grad": [p.requires_grad for p in module.parameters()],
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture(params=[None, False, True], ids=["plain", "checkpoint", "reentrant"])
def ready(request):
    """A module with gradients, and a captured micro-batch of it."""
    torch.manual_seed(0)
    module = Net(request.param)
    named = list(module.named_parameters())
    capture = Capture(module, named, CPU)
    batch = {"x": torch.randn(5, 6, requires_grad=True)}
    pending = capture.begin(batch, audit=True)
    loss = loss_fn(module, batch)
    pending.attach_loss(loss)
    loss.backward()
    torch.manual_seed(1)
    module.inner[2].eval()
    return module, named, pending.finish().micro_batch


def test_a_replay_leaves_nothing_behind(ready):
    module, named, micro_batch = ready
    before = state_of(module)
    assert replay(module, loss_fn, micro_batch, named).error == ""
    assert state_of(module) == before
    assert micro_batch.batch["x"].grad is None


def test_gradients_are_dropped_as_they_arrive(ready, monkeypatch):
    module, named, micro_batch = ready
    collected = []
    grad = torch.autograd.grad

    def spy(*args, **kwargs):
        collected.extend(grad(*args, **kwargs))
        return collected

    monkeypatch.setattr(torch.autograd, "grad", spy)
    before = state_of(module)
    assert replay(module, loss_fn, micro_batch, named).error == ""
    assert len(collected) == (0 if micro_batch.reentrant else len(named))
    assert all(g.untyped_storage().nbytes() == g.element_size() for g in collected)
    assert state_of(module) == before


def test_an_exception_in_loss_fn_is_a_result_and_leaves_nothing_behind(ready):
    module, named, micro_batch = ready
    before = state_of(module)
    result = replay(module, failing, micro_batch, named)
    assert result.error == "ArithmeticError: loss_fn broke"
    assert result.gradients is None
    assert state_of(module) == before


def test_an_exception_in_the_backward_is_a_result_and_leaves_nothing_behind(ready, monkeypatch):
    module, named, micro_batch = ready
    before = state_of(module)
    monkeypatch.setattr(BackwardFails, "armed", True)
    assert replay(module, loss_fn, micro_batch, named).error == "RuntimeError: the backward broke"
    assert state_of(module) == before
    monkeypatch.undo()
    assert replay(module, loss_fn, micro_batch, named).error == ""


def test_running_out_of_memory_is_a_result(ready):
    module, named, micro_batch = ready

    def hungry(_module, _batch):
        msg = "CUDA out of memory. Tried to allocate 20 GiB"
        raise torch.OutOfMemoryError(msg)

    result = replay(module, hungry, micro_batch, named)
    assert result.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"


def test_an_interrupt_is_not_swallowed_and_leaves_nothing_behind(ready):
    module, named, micro_batch = ready
    before = state_of(module)
    with pytest.raises(KeyboardInterrupt):
        replay(module, interrupted, micro_batch, named)
    assert state_of(module) == before


def test_a_batch_of_another_model_is_a_result(ready):
    module, named, micro_batch = ready
    other = nn.Linear(6, 6)
    result = replay(other, loss_fn, micro_batch, list(other.named_parameters()))
    assert result.error.startswith("ValueError: ")
    assert other.training
    assert replay(module, loss_fn, micro_batch, named).error == ""


def test_a_micro_batch_without_a_backward_is_a_result_unless_the_scale_is_free():
    module = nn.Linear(3, 3)
    named = list(module.named_parameters())
    pending = Capture(module, named, CPU).begin(torch.randn(2, 3), audit=False)
    micro_batch = pending.finish().micro_batch

    def plain(model, x):
        return model(x).sum()

    assert "gradient of the loss" in replay(module, plain, micro_batch, named).error
    assert replay(module, plain, micro_batch, named, scale_free=True).error == ""


@pytest.mark.parametrize("reentrant", [None, True])
def test_a_learnable_tensor_outside_the_module_keeps_its_gradient(reentrant):
    module = Net(reentrant)
    named = list(module.named_parameters())
    temperature = torch.ones((), requires_grad=True)
    temperature.grad = torch.tensor(7.0)

    def tempered(model, batch):
        return (model(batch) * temperature).square().mean()

    batch = torch.randn(5, 6, requires_grad=True)
    pending = Capture(module, named, CPU).begin(batch, audit=True)
    loss = tempered(module, batch)
    pending.attach_loss(loss)
    loss.backward()
    kept = temperature.grad
    value = kept.clone()
    assert replay(module, tempered, pending.finish().micro_batch, named).error == ""
    assert temperature.grad is kept
    assert torch.equal(kept, value)


class Closure(nn.Module):
    """Reaches its weight past the module, inside a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight
        self.hidden = lambda h: h @ weight

    def forward(self, x):
        return checkpoint(lambda h: self.hidden(self.linear(h)), x, use_reentrant=True)


def test_a_reference_past_the_module_in_a_reentrant_checkpoint_disturbs_no_gradient():
    module = Closure()
    named = list(module.named_parameters())
    batch = torch.randn(3, 4, requires_grad=True)

    def plain(model, x):
        return model(x).square().sum()

    pending = Capture(module, named, CPU).begin(batch, audit=True)
    loss = plain(module, batch)
    pending.attach_loss(loss)
    loss.backward()
    before = state_of(module)
    assert replay(module, plain, pending.finish().micro_batch, named).error == ""
    assert state_of(module)["grads"] == before["grads"]


def test_a_replay_inside_an_autocast_region_leaves_it_no_casts_without_gradient(ready):
    module, named, micro_batch = ready
    enabled = AutocastState((("cpu", True, torch.bfloat16),), True)
    without = replace(micro_batch, grad_mode=False, autocast=enabled, reentrant=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert replay(module, loss_fn, without, named).error == ""
        module.zero_grad()
        loss_fn(module, micro_batch.batch).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_ddps_own_step_equals_the_replay_and_its_reducer_is_undisturbed(
    one_rank, reentrant, options
):
    if reentrant and not options.get("static_graph"):
        options = {**options, "static_graph": True}  # a tied reentrant parameter is ready twice

    def run(*, audited):
        torch.manual_seed(0)
        module = Net(reentrant)
        ddp = DistributedDataParallel(module, **options)
        named = list(module.named_parameters())
        capture = Capture(module, named, CPU)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            batch = {"x": torch.randn(5, 6, requires_grad=True)}
            optimizer.zero_grad()
            if not audited:
                loss_fn(ddp, batch).backward()
                optimizer.step()
                continue
            pending = capture.begin(batch, audit=True)
            loss = loss_fn(ddp, batch)
            results = []

            def audit(pending, results=results):
                captured = pending.finish()
                results.append((captured, replay(module, loss_fn, captured.micro_batch, named)))

            def at_the_end(pending, audit=audit):
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: engine.queue_callback(lambda: audit(pending)))

            pending.attach_loss(loss, at_the_end)
            loss.backward()
            ((captured, result),) = results
            assert (result.error, result.loss) == ("", captured.loss)
            assert torch.equal(result.gradients, captured.gradients)
            optimizer.step()
        assert not any(p._backward_hooks for p in module.parameters())
        return [t.clone() for t in module.state_dict().values()]

    for guarded, plain in zip(run(audited=True), run(audited=False), strict=True):
        assert torch.equal(guarded, plain)
