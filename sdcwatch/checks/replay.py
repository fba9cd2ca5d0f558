"""Repeats the forward and backward of another rank's micro-batch and leaves no trace.

**What it compares.** Nothing; it gives the digests of the loss and of every parameter's gradient,
for a comparison with the producer's own. With the same weights, kernels and machine type they are
equal bit for bit.

**Two ways to the gradients.** `torch.autograd.grad` on the parameters
themselves touches neither `.grad` nor DDP's reducer (both hang on the accumulation, which it skips)
and sees gradients however `loss_fn` reaches the parameters. A reentrant checkpoint refuses it; then
leaves that share the parameters' memory are swapped in for a plain backward, and the parameters
themselves need no gradient meanwhile, so that nothing can arrive in them by another way. On both
paths a gradient is digested and dropped as it arrives, and tensor hooks on the parameters run.

**Cost.** A forward and backward, one digest per gradient, a copy of the buffers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdcwatch.checks.capture import device_rng_state, graph_nodes, has_reentrant_checkpoint
from sdcwatch.checks.fingerprint import digest_tensor, to_pairs
from sdcwatch.checks.gradients import GradientHooks, GradientLog
from sdcwatch.checks.nonfinite import confirm_nonfinite, screen
from sdcwatch.checks.payload import (
    AutocastState,
    Buffers,
    MicroBatch,
    RngState,
    clone_batch,
    faithful_clone,
    join_losses,
)

LossFn = Callable[[nn.Module, Any], Tensor]
Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to.

    Attributes:
        loss: Digest of the loss, or of all losses of the backward; (0, 0) after an error.
        gradients: int64 (n, 2) on the module's device, one digest per parameter; None after an
            error and where the loss needs no gradient.
        loss_nonfinite: Whether a loss holds NaN or infinity.
        gradient_nonfinite: Whether a gradient does.
        error: Type and first line of the exception that ended the replay, or "".
    """

    loss: tuple[int, int] = (0, 0)
    gradients: Tensor | None = None
    loss_nonfinite: bool = False
    gradient_nonfinite: bool = False
    error: str = ""


class _Reentrant(Exception):
    """The graph turned out to hold a reentrant checkpoint."""


def replay(
    module: nn.Module,
    loss_fn: LossFn,
    micro_batch: MicroBatch,
    parameters: Named,
    *,
    scale_free: bool = False,
) -> ReplayResult:
    """Run `loss_fn(module, batch)` and its backward as the producer did.

    Random generators, buffers, training flags, hooks and `.grad` are left as they were. An
    exception of `loss_fn` or of the backward, running out of memory included, is a result.

    Args:
        module: The bare module.
        loss_fn: Returns a scalar tensor.
        micro_batch: Of any rank with the same weights; its tensors are not changed.
        parameters: Name and parameter, in the order of the digests.
        scale_free: Start the backward from one instead of from the producer's gradient of the loss.
    """
    run = _Run(module, loss_fn, micro_batch, [p for _, p in parameters], scale_free)
    try:
        try:
            return run.once(fresh=micro_batch.reentrant)
        except _Reentrant:
            return run.once(fresh=True)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return ReplayResult(error=f"{type(error).__name__}: {first_line}")


class _Run:
    """One call of `replay`."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        micro_batch: MicroBatch,
        parameters: list[nn.Parameter],
        scale_free: bool,
    ) -> None:
        self._module = module
        self._loss_fn = loss_fn
        self._micro_batch = micro_batch
        self._parameters = parameters
        self._scale_free = scale_free
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._log = GradientLog(len(parameters))
        self._nonfinite: list[Tensor] = []

    def once(self, *, fresh: bool) -> ReplayResult:
        with ExitStack() as stack:
            stack.enter_context(_generators_kept(self._device))
            stack.enter_context(_training_kept(self._module))
            buffers = stack.enter_context(_SwappedBuffers(self._module))
            leaves: list[Tensor] = list(self._parameters)
            if fresh:
                leaves = stack.enter_context(_fresh_leaves(self._module, self._parameters))
            stack.enter_context(torch.enable_grad())
            losses = [self._forward(part, buffers) for part in self._micro_batch.parts]
            if not fresh and any(map(has_reentrant_checkpoint, losses)):
                raise _Reentrant
            result = ReplayResult(
                loss=join_losses([to_pairs(digest_tensor(x.detach())[None])[0] for x in losses]),
                loss_nonfinite=any(confirm_nonfinite(loss) for loss in losses),
            )
            if not all(loss.requires_grad for loss in losses):
                return result
            self._backward(losses, leaves, fresh=fresh)
            nonfinite = any(bool(flag) for flag in self._nonfinite)
            table_N2 = self._log.table(self._device)
            return replace(result, gradients=table_N2, gradient_nonfinite=nonfinite)

    def _forward(self, part: MicroBatch, buffers: _SwappedBuffers) -> Tensor:
        if part.training:
            for owner, flag in zip(self._module.modules(), part.training, strict=True):
                owner.training = flag
        batch = clone_batch(part.batch)
        with buffers.loaded_at_each_call(part.buffers), _autocast(part.autocast):
            _set_generators(part.rng, self._device)
            with torch.set_grad_enabled(part.grad_mode):
                return self._loss_fn(self._module, batch)

    def _backward(self, losses: list[Tensor], leaves: list[Tensor], *, fresh: bool) -> None:
        seeds = [
            self._seed(part, loss)
            for part, loss in zip(self._micro_batch.parts, losses, strict=True)
        ]
        with ExitStack() as stack:
            stack.callback(GradientHooks(leaves, self._arrived).remove)
            if (autocast := self._micro_batch.backward_autocast) is not None:
                stack.enter_context(_autocast(autocast))
            if fresh:
                stack.enter_context(_foreign_gradients_kept(losses, leaves))
                torch.autograd.backward(losses, seeds)
            elif wanted := [leaf for leaf in leaves if leaf.requires_grad]:
                torch.autograd.grad(losses, wanted, seeds, allow_unused=True)

    def _seed(self, part: MicroBatch, loss: Tensor) -> Tensor:
        if self._scale_free:
            return torch.ones_like(loss)
        if part.loss_gradient is None:
            msg = "Expected the gradient of the loss in the micro-batch, but got None."
            raise ValueError(msg)
        return part.loss_gradient.to(loss)

    def _arrived(self, index: int, gradient: Tensor) -> Tensor | None:
        self._log.add(index, gradient)
        self._look(gradient)
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return None
        # One zero in the gradient's shape: what the engine collects takes no memory.
        return gradient.new_zeros(()).expand(gradient.shape)

    def _look(self, gradient: Tensor) -> None:
        if gradient.device.type == "cpu":
            suspicious = not math.isfinite(screen(gradient).item())
            if suspicious and confirm_nonfinite(gradient):
                self._nonfinite.append(torch.tensor(True))
            return
        # Exact at once, because a GPU is asked only at the end, when the gradient is gone.
        values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
        self._nonfinite.append(~torch.isfinite(values).all())


class _SwappedBuffers:
    """Stands copies in for the buffers of a module; the module's own are not even read again.

    Copies, because writing into a buffer that the graph has saved would break its backward, and
    through the backward, because a checkpoint recomputes with the buffers it finds then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = [(owner, dict(owner._buffers)) for owner in module.modules()]
        self._names = {id(buffer): name for name, buffer in module.named_buffers()}

    def __enter__(self) -> _SwappedBuffers:
        self._load({name: faithful_clone(b) for name, b in self._module.named_buffers()})
        return self

    def __exit__(self, *_: object) -> None:
        for owner, own in self._own:
            owner._buffers.clear()
            owner._buffers.update(own)

    @contextmanager
    def loaded_at_each_call(self, states: Sequence[Buffers]) -> Iterator[None]:
        """Load the first of `states` now and one more at each call of the module."""
        following = iter(states)

        def load_next(*_: object) -> None:
            if (state := next(following, None)) is not None:
                self._load({name: faithful_clone(buffer) for name, buffer in state.items()})

        load_next()
        handle = self._module.register_forward_pre_hook(load_next)
        try:
            yield
        finally:
            handle.remove()

    def _load(self, state: Buffers) -> None:
        for owner, own in self._own:
            for name, buffer in own.items():
                if buffer is not None:
                    owner._buffers[name] = state[self._names[id(buffer)]]


@contextmanager
def _fresh_leaves(module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Leaves that share the parameters' memory, in the module in their place."""
    trained = {id(p): p for p in (*module.parameters(), *parameters) if p.requires_grad}
    leaves = {key: _fresh_leaf(parameter) for key, parameter in trained.items()}
    owners = [(m, n, p) for m in module.modules() for n, p in m._parameters.items()]
    try:
        for owner, name, parameter in owners:
            if id(parameter) in leaves:
                owner._parameters[name] = leaves[id(parameter)]
        for parameter in trained.values():
            parameter.requires_grad_(False)
        yield [leaves.get(id(parameter), parameter) for parameter in parameters]
    finally:
        for parameter in trained.values():
            parameter.requires_grad_(True)
        for owner, name, swapped in owners:
            owner._parameters[name] = swapped


def _fresh_leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    for hook in tuple((parameter._backward_hooks or {}).values()):
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    leaf.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    return leaf


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


@contextmanager
def _foreign_gradients_kept(losses: list[Tensor], leaves: list[Tensor]) -> Iterator[None]:
    """Keep `.grad` of leaves in the graph that are not the module's, such as one in a closure."""
    ours = {id(leaf) for leaf in leaves}
    nodes = (node for loss in losses for node in graph_nodes(loss))
    reached = [node.variable for node in nodes if hasattr(node, "variable")]
    foreign = [(leaf, leaf.grad) for leaf in reached if id(leaf) not in ours]
    try:
        for leaf, _ in foreign:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in reversed(foreign):
            leaf.grad = gradient


@contextmanager
def _autocast(state: AutocastState) -> Iterator[None]:
    """Autocast as it was, with a cache of casts of its own."""
    with ExitStack() as stack:
        for kind, enabled, dtype in state.kinds:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=state.cache)
            )
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        yield


@contextmanager
def _training_kept(module: nn.Module) -> Iterator[None]:
    flags = [(owner, owner.training) for owner in module.modules()]
    try:
        yield
    finally:
        for owner, flag in flags:
            owner.training = flag


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    state = RngState(
        torch.get_rng_state(), device_rng_state(device), random.getstate(), np.random.get_state()
    )
    try:
        yield
    finally:
        _set_generators(state, device)


def _set_generators(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(state.torch_cpu)
    if state.device is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state.device, device)
    if state.python is not None:
        random.setstate(state.python)
    if state.numpy is not None:
        np.random.set_state(state.numpy)
