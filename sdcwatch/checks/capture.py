"""Remembers one forward and backward of this rank so that another rank can repeat them.

Between `Capture.begin` and `Pending.attach_loss` the training loop runs `loss_fn`; then its
backward runs; then `Pending.finish` gives the micro-batch, the digest of the loss and the digests
of the gradients. Several forwards may be open at once; those whose losses go into one backward
share its gradients (see `sdcwatch.checks.payload.join`).

**Cost.** Off audit steps: two RNG states, a copy of the batch's containers and one tensor hook,
some ten microseconds. On audit steps also a clone of the batch and of the buffers at every call,
and one digest per gradient.

**What it cannot see.** Generators of the user's own, state in closures, and tensors that are
neither parameters, nor buffers, nor in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from sdcwatch.checks.fingerprint import digest_tensor, to_pairs
from sdcwatch.checks.gradients import GradientHooks, GradientLog
from sdcwatch.checks.payload import (
    AutocastState,
    Buffers,
    MicroBatch,
    NotTransportable,
    RngState,
    clone_batch,
    faithful_clone,
    fingerprint_batch,
    shallow_copy,
)

_WATCHED_STEPS = 3


class Captured(NamedTuple):
    """What one finished forward and backward left.

    Attributes:
        micro_batch: What another rank needs to repeat it.
        loss: Digest of the loss; None off audit steps.
        gradients: int64 (n, 2), one digest per parameter; None off audit steps and without a
            backward.
    """

    micro_batch: MicroBatch
    loss: tuple[int, int] | None
    gradients: Tensor | None


class _Removable(Protocol):
    def remove(self) -> None: ...


def device_rng_state(device: torch.device) -> Tensor | None:
    """The state of the device's default generator; None on a CPU."""
    if device.type == "cpu":
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def autocast_state(device: torch.device) -> AutocastState:
    """Autocast of the CPU and of the device's type."""
    types = dict.fromkeys(("cpu", device.type))
    return AutocastState(
        tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
        torch.is_autocast_cache_enabled(),
    )


def graph_nodes(loss: Tensor) -> Iterator[Node]:
    """Every node of the graph behind `loss`, once."""
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether a checkpoint that runs a backward of its own is in the graph of `loss`.

    Such a checkpoint refuses `torch.autograd.grad`. It is a custom function, and every known one
    (torch, fairscale, Megatron) has "Checkpoint" in its name.
    """
    return any("Checkpoint" in node.name() for node in graph_nodes(loss))


class HostRngWatch:
    """Finds out whether `loss_fn` advances Python's or NumPy's generator.

    Reading both costs more than all the rest of a capture, so it is done in the first steps and
    after that only where one of them moved, or when asked.
    """

    def __init__(self, steps: int = _WATCHED_STEPS) -> None:
        self._left = steps
        self.python = False
        self.numpy = False

    def read(self, *, always: bool) -> tuple[Any, Any]:
        """States of Python's and NumPy's generators, None where they need not be known."""
        every = always or self._left > 0
        return (
            random.getstate() if every or self.python else None,
            np.random.get_state() if every or self.numpy else None,
        )

    def compare(self, python: Any, numpy: Any) -> tuple[Any, Any]:
        """Note which generator moved since `read`; return the states that a replay needs."""
        self._left = max(0, self._left - 1)
        if python is not None and not self.python:
            self.python = random.getstate() != python
        if numpy is not None and not self.numpy:
            now = np.random.get_state()
            self.numpy = not all(np.array_equal(a, b) for a, b in zip(now, numpy, strict=True))
        return python if self.python else None, numpy if self.numpy else None


class Capture:
    """Opens one `Pending` per forward of this rank.

    Args:
        module: The bare module, as the replaying rank will call it.
        parameters: Name and parameter, in the order of the digests.
        device: Device of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
    ) -> None:
        self.module = module
        self.device = device
        self._parameters = [parameter for _, parameter in parameters]
        self._host_rng = HostRngWatch()
        self._reentrant = False
        self._open: list[Pending] = []
        self._hooks: GradientHooks | None = None
        self._log: GradientLog | None = None

    def begin(self, batch: Any, *, audit: bool) -> Pending:
        """Remember the state before a forward. Call it right before `loss_fn`; never raises."""
        pending = Pending(self, batch, audit=audit)
        self._open.append(pending)
        if audit and self._hooks is None:
            self._hooks = GradientHooks(self._parameters, self._arrived)
        return pending

    def end_backward(self) -> None:
        """Say that a backward has ended: later gradients belong to another one."""
        self._log = None

    def abort(self) -> None:
        """Forget every open forward and take every hook off, in any state."""
        for pending in tuple(self._open):
            pending.abort()
        self.end_backward()

    def _arrived(self, index: int, gradient: Tensor) -> None:
        if self._log is not None:
            self._log.add(index, gradient)

    def _join_backward(self) -> GradientLog:
        if self._log is None:
            self._log = GradientLog(len(self._parameters))
        return self._log

    def _close(self, pending: Pending) -> None:
        if pending in self._open:
            self._open.remove(pending)
        if self._hooks is not None and not any(p.audit for p in self._open):
            self._hooks.remove()
            self._hooks = None


class Pending:
    """One forward that has begun, until `finish` or `abort`.

    Attributes:
        audit: Whether digests are taken.
        backwards: How often a gradient has arrived at the loss.
        changed_in_place: Whether `loss_fn` changed its batch in place; the micro-batch holds the
            copy taken before (audit steps).
        problem: Why the batch cannot travel, or "".
    """

    def __init__(self, capture: Capture, batch: Any, *, audit: bool) -> None:
        self.audit = audit
        self.backwards = 0
        self.changed_in_place = False
        self.problem = ""
        self._capture = capture
        self._handles: list[_Removable] = []
        self._buffers: list[Buffers] = []
        self._training: tuple[bool, ...] = ()
        self._before: tuple[bytes, Tensor] | None = None
        self._given = batch if audit else None
        self._loss_digest: Tensor | None = None
        self._loss_gradient: Tensor | None = None
        self._backward_autocast: AutocastState | None = None
        self._log: GradientLog | None = None
        self._on_gradient: Callable[[Pending], None] | None = None
        self._batch = self._copy(batch)
        if audit:
            self._watch_module(capture.module)
        self._autocast = autocast_state(capture.device)
        self._grad_mode = torch.is_grad_enabled()
        python, numpy = capture._host_rng.read(always=audit)
        self._rng = RngState(torch.get_rng_state(), device_rng_state(capture.device), python, numpy)

    @property
    def loss_gradient(self) -> Tensor | None:
        """The gradient that arrived at the loss last; None before the backward, and once closed."""
        return self._loss_gradient

    def attach_loss(
        self, loss: Tensor, on_gradient: Callable[[Pending], None] | None = None
    ) -> None:
        """Remember the loss. Call it right after `loss_fn`.

        Args:
            loss: What `loss_fn` returned.
            on_gradient: Called inside the backward, each time a gradient arrives at the loss.
        """
        self._unhook()
        rng = self._rng
        python, numpy = self._capture._host_rng.compare(rng.python, rng.numpy)
        self._rng = RngState(rng.torch_cpu, rng.device, python, numpy)
        if self.audit:
            self._loss_digest = digest_tensor(loss.detach())
            self._capture._reentrant = has_reentrant_checkpoint(loss)
            self._compare_batch()
        if loss.requires_grad:
            self._on_gradient = on_gradient
            handle = loss.register_hook(self._gradient_arrived)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def finish(self) -> Captured:
        """Close after the backward and return what was captured; waits for the device.

        Call it at the end of the backward, before another one begins.
        """
        gradients = None if self._log is None else self._log.table(self._capture.device)
        loss = None if self._loss_digest is None else to_pairs(self._loss_digest[None])[0]
        micro_batch = MicroBatch(
            batch=self._batch,
            rng=self._rng,
            autocast=self._autocast,
            grad_mode=self._grad_mode,
            training=self._training,
            buffers=tuple(self._buffers),
            loss_gradient=self._loss_gradient,
            backward_autocast=self._backward_autocast,
            calls=max(0, len(self._buffers) - 1),
            reentrant=self._capture._reentrant,
        )
        if self._log is not None and self._log is self._capture._log:
            self._capture.end_backward()
        self.abort()
        return Captured(micro_batch, loss, gradients)

    def abort(self) -> None:
        """Forget everything and take every hook off, in any state; may be called again."""
        self._unhook()
        self._capture._close(self)
        self._batch = self._given = self._before = self._on_gradient = None
        self._log = self._loss_gradient = None
        self._buffers = []

    def _copy(self, batch: Any) -> Any:
        if self.audit:
            try:
                self._before = fingerprint_batch(batch)
                return clone_batch(batch)
            except NotTransportable as error:
                self.problem = str(error)
            except Exception as error:  # a tensor kind that cannot be cloned or digested
                self.problem = f"{type(error).__name__}: {error}"
            self._before = None
        return shallow_copy(batch)

    def _compare_batch(self) -> None:
        if self._before is None:
            return
        try:
            structure, digests = fingerprint_batch(self._given)
        except Exception:  # what pickled before and does not now has changed
            self.changed_in_place = True
        else:
            same = structure == self._before[0] and torch.equal(digests, self._before[1])
            self.changed_in_place = not same
        self._given = None

    def _watch_module(self, module: nn.Module) -> None:
        self._training = tuple(m.training for m in module.modules())
        self._keep_buffers(module)
        self._handles.append(module.register_forward_pre_hook(self._keep_buffers))

    def _keep_buffers(self, module: nn.Module, *_: object) -> None:
        self._buffers.append({n: faithful_clone(b) for n, b in module.named_buffers()})

    def _gradient_arrived(self, gradient: Tensor) -> None:
        self.backwards += 1
        self._loss_gradient = gradient.detach().clone()
        self._backward_autocast = autocast_state(self._capture.device)
        if self.audit:
            self._log = self._capture._join_backward()
        if self._on_gradient is not None:
            self._on_gradient(self)

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()
