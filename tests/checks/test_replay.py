"""A replay repeats, tells what stands in its way, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import queue
import random
import signal
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.calling import BareCall, CompiledAroundDdp, choose_caller
from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.fingerprint import digest_tensors
from sdcwatch.checks.module_state import read_generators
from sdcwatch.checks.payload import (
    NotTransportable,
    PayloadDamaged,
    pack,
    packed_size,
    payload_parts,
    unpack,
)
from sdcwatch.checks.replay import GradientSum, Replayer, ReplayOptions
from sdcwatch.checks.replaying import replaying
from sdcwatch.checks.signals import PassedOver

CPU = torch.device("cpu")


class Model(nn.Module):
    """Dropout, BatchNorm, a counter, and a switch for what may go wrong in a forward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 4)
        self.count, self.seen, self.also = 0, [], lambda: None

    def forward(self, x):
        self.count += 1
        self.seen.append(replaying())
        self.also()
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def captured(model=None, *, audit=True, backwards=1, **options):
    """A capture, and what it gave for each of some backwards."""
    torch.manual_seed(0)
    model = model or Model()
    found = []
    capture = CallCapture(
        model, list(model.named_parameters()), CPU, audit=lambda: audit, **options
    )
    capture.attach()
    for _ in range(backwards):
        x = torch.randn(6, 8)
        model(x).square().mean().backward()
        found.append((capture.end_backward(), x))
    return capture, found


def test_a_replay_from_the_bytes_gives_the_digests_of_the_step():
    capture, [(backward, _)] = captured()
    result = Replayer(capture).self_audit(backward.micro_batch)
    assert result.error == ""
    assert result.not_run == ""
    assert torch.equal(result.outputs, backward.outputs)
    assert torch.equal(result.gradients, backward.gradients)
    assert torch.equal(backward.weights[0], backward.weights[1])
    assert not result.outputs_nonfinite
    assert not result.gradients_nonfinite


def test_another_rank_with_the_same_weights_gives_the_same_digests():
    _, [(backward, _)] = captured()
    message = pack(backward.micro_batch)
    torch.manual_seed(0)
    other = CallCapture(model := Model(), list(model.named_parameters()), CPU)
    other.attach()
    torch.randn(77)
    result = Replayer(other).run_packed(message)
    assert torch.equal(result.gradients, backward.gradients)
    assert torch.equal(result.outputs, backward.outputs)


def test_a_replay_leaves_nothing_behind():
    capture, [(backward, _)] = captured()
    model = capture.module
    buffers = {n: (id(b), b._version, b.clone()) for n, b in model.named_buffers()}
    before = (
        [id(p.grad) for p in model.parameters()],
        [p.grad.clone() for p in model.parameters()],
        [p._version for p in model.parameters()],
        (model.count, list(model.seen), model.training),
        (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
    )
    model.eval()
    Replayer(capture).run(backward.micro_batch, ReplayOptions(watch=True))
    assert not model.training
    model.train()
    after = (
        [id(p.grad) for p in model.parameters()],
        [p.grad for p in model.parameters()],
        [p._version for p in model.parameters()],
        (model.count, model.seen, model.training),
        (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
    )
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert (before[0], *before[2:]) == (after[0], *after[2:])
    for name, buffer in model.named_buffers():
        same, version, value = buffers[name]
        assert (id(buffer), buffer._version) == (same, version)
        assert torch.equal(buffer, value)


def test_what_a_forward_moves_is_told_by_name():
    capture, [(backward, _)] = captured()
    trace = Replayer(capture).run(backward.micro_batch, ReplayOptions(watch=True)).trace
    assert set(trace) == {
        "attribute count",
        "attribute seen",
        "buffer norm.running_mean",
        "buffer norm.running_var",
        "buffer norm.num_batches_tracked",
        "generator torch",
    }


def test_code_of_the_users_can_ask_whether_it_is_replayed():
    capture, [(backward, _)] = captured()
    asked = queue.SimpleQueue()  # a list would be put back
    capture.module.also = lambda: asked.put(replaying())
    Replayer(capture).run(backward.micro_batch)
    assert asked.get_nowait()
    assert not replaying()


@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("odd\nsecond line")])
def test_an_exception_is_a_result(error):
    capture, [(backward, _)] = captured()

    def fail():
        raise error

    capture.module.also = fail
    result = Replayer(capture).run(backward.micro_batch)
    assert result.error == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert result.gradients is None
    assert not replaying()
    assert capture.module.count == 1


class Preempted(Exception):
    """What a handler of the program raises, so that it ends."""


class Handler:
    def __call__(self, number, frame):
        raise Preempted

    def method(self, number, frame):
        raise Preempted


def handle(number, frame):
    raise Preempted


@pytest.mark.parametrize("handler", [handle, Handler(), Handler().method, partial(handle)])
@pytest.mark.parametrize("in_replay", [True, False])
def test_what_a_signal_handler_of_the_program_raises_is_the_programs(handler, in_replay):
    capture, [(backward, _)] = captured()
    before = signal.signal(signal.SIGUSR1, handler)

    def interrupt():
        signal.raise_signal(signal.SIGUSR1)

    try:
        if in_replay:
            capture.module.also = interrupt
            with pytest.raises(Preempted):
                Replayer(capture).run(backward.micro_batch)
        else:
            with pytest.raises(Preempted):
                capture._failed(raised(interrupt))
            with pytest.raises(Preempted), PassedOver():
                interrupt()
            with PassedOver():
                raise ValueError("of an object of the program's")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not replaying()
    assert capture.module.count == 1
    assert capture.failure == ""


def raised(call):
    try:
        call()
    except Exception as error:
        unreadable = NotTransportable("it does not pickle")
        unreadable.__cause__ = error
        return unreadable


@pytest.mark.usefixtures("world_of_one")
def test_a_collective_in_a_call_is_counted_or_stopped():
    capture, [(backward, _)] = captured()
    capture.module.also = lambda: dist.all_reduce(torch.ones(1))
    replayer = Replayer(capture)
    assert replayer.run(backward.micro_batch).collectives
    stopped = replayer.run(backward.micro_batch, ReplayOptions(forbid_collectives=True))
    (said,) = stopped.collectives
    assert said.startswith("allreduce in `capture.module.also = lambda: dist.all_reduce(")
    assert "test_replay.py:" in said


@pytest.mark.usefixtures("world_of_one")
def test_a_collective_whose_error_is_caught_by_the_users_code_is_told_all_the_same():
    capture, [(backward, _)] = captured()

    def also():
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))

    capture.module.also = also
    counted = internals.collective_counts()
    stopped = Replayer(capture).run(backward.micro_batch, ReplayOptions(forbid_collectives=True))
    assert "dist.all_reduce" in stopped.collectives[0]
    assert internals.collective_counts() == counted


def test_a_generator_of_the_scripts_own_stands_where_it_stood_after_a_watched_replay():
    own = torch.Generator().manual_seed(1)
    capture, [(backward, _)] = captured()
    capture.module.also = lambda: torch.randn(3, generator=own)
    before = own.get_state()
    Replayer(capture).run(backward.micro_batch, ReplayOptions(watch=True))
    assert torch.equal(own.get_state(), before)


def test_a_replay_that_draws_other_numbers_was_disturbed():
    capture, [(backward, _)] = captured()
    capture.module.also = lambda: torch.rand(1)
    assert Replayer(capture).run(backward.micro_batch).disturbed == ("torch",)


def test_what_a_thread_draws_from_random_is_of_no_account_to_a_call_that_draws_nothing():
    capture, [(backward, _)] = captured()
    capture.module.also = random.random
    assert Replayer(capture).run(backward.micro_batch).disturbed == ()


def test_what_a_thread_drew_during_the_step_is_of_no_account_to_a_replay_that_draws_nothing():
    capture, [(backward, _)] = captured()
    call = backward.micro_batch.calls[0]
    random.getrandbits(1_000)
    moved = dataclasses.replace(call, generators_after=read_generators(CPU))
    micro_batch = dataclasses.replace(backward.micro_batch, calls=(moved,))
    assert Replayer(capture).run(micro_batch).disturbed == ()
    capture.module.also = random.random
    assert Replayer(capture).run(micro_batch).disturbed == ("random",)


def test_other_weights_are_named_and_nothing_runs():
    capture, [(backward, _)] = captured()
    with torch.no_grad():
        capture.module.last.weight.add_(1)
    result = Replayer(capture).run(backward.micro_batch)
    assert result.not_run == "the weights here are not those of the call"
    assert capture.module.count == 1


def test_damage_in_the_backward_shows_in_the_gradients():
    capture, [(backward, _)] = captured()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1e-3, lambda t: t):
        result = Replayer(capture).run(backward.micro_batch)
    assert torch.equal(result.outputs, backward.outputs)
    assert not torch.equal(result.gradients, backward.gradients)


def test_a_plain_step_can_be_asked_for_what_is_not_finite():
    model = Model()
    capture = CallCapture(model, list(model.named_parameters()), CPU)
    capture.attach()
    (model(torch.randn(6, 8)) * float("inf")).sum().backward()
    backward = capture.end_backward()
    assert not backward.audited
    assert torch.stack(list(backward.probes)).isfinite().all()
    assert not torch.stack(list(backward.arrived)).isfinite().all()
    result = Replayer(capture).run(backward.micro_batch)
    assert result.gradients_nonfinite
    assert not result.outputs_nonfinite
    free = Replayer(capture).run(backward.micro_batch, ReplayOptions(scale_free=True))
    assert not free.gradients_nonfinite


def test_a_sum_of_finite_gradients_may_overflow():
    total = GradientSum()
    for _ in range(2):
        total.add(0, torch.full((3,), 40_000.0), torch.float16)
    assert total.nonfinite()


def test_an_overwritten_input_of_a_plain_step_is_named():
    capture, [(backward, x)] = captured(audit=False)
    x.zero_()
    micro_batch = backward.micro_batch
    assert "overwritten" in micro_batch.problem
    assert Replayer(capture).run(micro_batch).not_run == micro_batch.problem


def test_earlier_backwards_are_kept_up_to_a_limit_and_the_earliest_go():
    capture, found = captured(audit=False, backwards=4, max_kept_bytes=700)
    for backward, _ in found:
        capture.keep(backward)
    kept = capture.take_kept()
    assert kept.dropped == 2
    assert kept.backwards == tuple(backward for backward, _ in found[2:])
    assert capture.take_kept().backwards == ()


def test_forwards_without_a_backward_and_autograd_grad_leave_nothing():
    model, fired = Model(), []
    capture = CallCapture(
        model, list(model.named_parameters()), CPU, on_gradient=lambda: fired.append(1)
    )
    capture.attach()
    with torch.no_grad():
        model(torch.randn(6, 8))
    model(torch.randn(6, 8))
    x = torch.randn(6, 8, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert fired == []
    assert capture.end_backward() is None


@pytest.mark.parametrize("audit", [False, True])
def test_capture_keeps_no_graph_and_no_input_alive(audit):
    model = Model()
    capture = CallCapture(model, list(model.named_parameters()), CPU, audit=lambda: audit)
    capture.attach()
    inner = nn.Linear(8, 8)
    watched = []
    inner.register_forward_hook(lambda m, a, out: watched.append(weakref.ref(out)))
    loss = model(inner(torch.randn(6, 8))).sum()
    loss.backward()
    capture.end_backward()
    del loss
    model(torch.randn(6, 8))  # forgets what is gone
    gc.collect()
    assert watched[0]() is None


def test_a_backward_that_raised_is_forgotten():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            raise ValueError

    model, fired = Model(), []
    capture = CallCapture(
        model, list(model.named_parameters()), CPU, on_gradient=lambda: fired.append(1)
    )
    capture.attach()
    out = model(Breaks.apply(torch.randn(6, 8, requires_grad=True)))
    with pytest.raises(ValueError):  # noqa: PT011 - ours, without a text
        out.sum().backward()
    model(torch.randn(6, 8)).sum().backward()
    assert fired == [1, 1]
    assert capture.end_backward().calls == 1


def test_a_reentrant_checkpoint_is_replayed_without_a_gradient_left():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    capture, [(backward, _)] = captured(Checkpointed())
    assert backward.micro_batch.reentrant
    for parameter in capture.module.parameters():
        parameter.grad = None
    result = Replayer(capture).run(backward.micro_batch)
    assert torch.equal(result.gradients, backward.gradients)
    assert all(p.grad is None and p.requires_grad for p in capture.module.parameters())


def test_the_size_is_known_before_anything_is_packed():
    _, [(backward, _)] = captured()
    micro_batch = backward.micro_batch
    assert packed_size(micro_batch) == pack(micro_batch).numel()
    parts = payload_parts(micro_batch)
    assert sum(parts.values()) == packed_size(micro_batch)
    assert parts["gradients"] >= 6 * 4 * 4
    with torch.device("meta"):  # a default of the user's is not that of a message
        assert pack(micro_batch).device.type == "cpu"


@pytest.mark.parametrize("place", [0, 20, 60, 700, -1])
def test_damage_on_the_way_is_told_from_a_wrong_computation(place):
    _, [(backward, _)] = captured()
    message = pack(backward.micro_batch)
    message[place] ^= 1
    with pytest.raises((PayloadDamaged, NotTransportable)) as caught:
        unpack(message, CPU)
    assert type(caught.value) is PayloadDamaged or place == 0


def test_a_redirected_forward_is_called_by_its_method():
    class Redirected(Model):
        def training_step(self, x):
            return self(x) * 2 if False else super().forward(x) * 2

    model = Redirected()
    method_name, original = "training_step", model.forward

    def redirect(*args):
        model.__dict__.pop("forward", None)
        return getattr(model, method_name)(*args)

    capture = CallCapture(model, list(model.named_parameters()), CPU, audit=lambda: True)
    capture.attach()
    model.forward = redirect
    model(torch.randn(6, 8)).sum().backward()
    backward = capture.end_backward()
    assert backward.micro_batch.calls[0].method == "training_step"
    result = Replayer(capture).self_audit(backward.micro_batch)
    assert torch.equal(result.gradients, backward.gradients)
    assert model.forward == original


def test_the_call_is_made_as_the_loop_makes_it():
    model = Model()
    assert isinstance(choose_caller(model, None, model), BareCall)
    ddp = nn.Sequential(model)
    assert isinstance(choose_caller(ddp, ddp, model), BareCall)
    compiled = torch.compile(ddp, backend="eager")
    assert isinstance(choose_caller(compiled, ddp, model), CompiledAroundDdp)
    model.compile(backend="eager")
    assert BareCall(model).covers == "the module as compiled by module.compile()"


@pytest.mark.parametrize("prepended", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_the_users_on_the_module_is_audited_whenever_it_was_registered(late, prepended):
    model = Model()

    def register():
        model.register_forward_pre_hook(lambda _, args: (args[0] * 2,), prepend=prepended)
        model.register_forward_hook(lambda _, args, out: out * 1.5)

    if not late:
        register()
    capture = CallCapture(model, list(model.named_parameters()), CPU, audit=lambda: True)
    capture.attach()
    if late:
        register()
    for call in range(2):
        out = model(torch.randn(6, 8))
        out.sum().backward()
        backward = capture.end_backward()
        assert torch.equal(backward.outputs[0], digest_tensors([out.detach()])[0])
        result = Replayer(capture).self_audit(backward.micro_batch)
        if late and prepended and call == 0:
            assert "in this call alone" in result.not_run
            continue
        assert torch.equal(result.outputs, backward.outputs)
        assert torch.equal(result.gradients, backward.gradients)
