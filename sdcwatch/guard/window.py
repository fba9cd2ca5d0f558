"""One optimizer step of the guard: the micro-batches in it and what became of it."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcwatch.checks.capture import Capture, Pending
from sdcwatch.checks.determinism import DeterministicSwitches, EagerStance
from sdcwatch.core.records import Cause, Verdict
from sdcwatch.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks agreed on at the end of the synchronising backward.

    Attributes:
        skip: No update on any rank.
        verdict: The verdict behind it, if a check failed.
        audited: An audit or a preflight step was made.
    """

    skip: bool = False
    verdict: Verdict | None = None
    audited: bool = False

    @property
    def scaling(self) -> bool:
        """The loss scale overflowed: the scaler skips the step by itself, and rightly."""
        return self.verdict is not None and self.verdict.cause is Cause.SCALING


@dataclass(frozen=True, slots=True)
class Recorder:
    """What keeps a micro-batch for a replay, and what is switched so that the replay can repeat it.

    Attributes:
        capture: Keeps what a call of the module is made of.
        switches: Deterministic kernels, for steps that are audited.
        stance: No compiled graphs, where they would be around DDP.
    """

    capture: Capture
    switches: DeterministicSwitches
    stance: EagerStance


@dataclass(slots=True)
class Forward:
    """One forward of this rank.

    Attributes:
        pending: What was captured of it.
        graph: Dead once neither its loss nor anything computed from it can run a backward.
        value: Its loss's value, detached, on its device.
        synchronises: DDP will reduce gradients in its backward.
    """

    pending: Pending
    graph: weakref.ref[Any]
    value: torch.Tensor
    synchronises: bool

    @property
    def abandoned(self) -> bool:
        """Its backward never ran and never will."""
        return self.pending.backwards == 0 and self.graph() is None


class _Alive:
    """Lives as long as a node of the autograd graph."""


def graph_of(loss: torch.Tensor) -> weakref.ref[Any]:
    """A reference that dies with the graph of `loss`, not with the tensor itself.

    ``0.5 * guard.forward(a) + 0.5 * guard.forward(b)`` lets go of the tensors and keeps the graphs.
    """
    if loss.grad_fn is None:
        return weakref.ref(loss)
    alive = _Alive()
    metadata: Any = loss.grad_fn.metadata
    metadata["sdcwatch"] = alive
    return weakref.ref(alive)


@dataclass(slots=True)
class StepWindow:
    """Everything between one update and the next.

    Attributes:
        step: Its number.
        forwards: Its micro-batches in order.
        decision: None until the synchronising backward has ended.
        updated: The optimizer has stepped, or was made to skip.
        started: When it began, in seconds of `time.perf_counter`.
    """

    step: int
    forwards: list[Forward] = field(default_factory=list)
    decision: Decision | None = None
    updated: bool = False
    started: float = field(default_factory=time.perf_counter)

    def drop_abandoned(self) -> None:
        """Forget forwards without a backward: an evaluation, or a step that was given up."""
        for forward in [f for f in self.forwards if f.abandoned]:
            forward.pending.abort()
            self.forwards.remove(forward)

    @property
    def finished_forwards(self) -> list[Forward]:
        """Forwards whose backward has run."""
        return [f for f in self.forwards if f.pending.backwards > 0]

    def recorded(self, *, audit: bool) -> bool:
        """Whether the synchronising backward came from guard.forward; captured, if `audit`."""
        return any(
            f.synchronises and (f.pending.audit or not audit) for f in self.finished_forwards
        )

    @property
    def loss_gradient(self) -> torch.Tensor | None:
        """The gradient that arrived at the last loss; None once a check has used it up."""
        forwards = self.finished_forwards
        return forwards[-1].pending.loss_gradient if forwards else None


def require_scalar(loss: object) -> None:
    """Check what `loss_fn` returned.

    Raises:
        ConfigurationError: It is no scalar tensor.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else str(type(loss))
    msg = (
        f"Expected `loss_fn` to return a scalar tensor, but got {got}. Reduce the loss to one "
        "number, for instance with .mean()."
    )
    raise ConfigurationError(msg)
