"""What is guarded: the model as the loop calls it, what DDP and torch.compile hide, its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayResult, replay

LossFn = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Guarded:
    """What is guarded, as `sdcwatch.init` was given it.

    Attributes:
        model: As the loop calls it.
        ddp: The DDP wrapper, or None.
        module: What DDP calls: the bare module, compiled or not.
        loss_fn: Computes the loss of a micro-batch.
        optimizer: The innermost optimizer.
        named: Name and parameter, frozen ones included.
        device: Device of the module.
    """

    model: torch.nn.Module
    ddp: DistributedDataParallel | None
    module: torch.nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    named: tuple[tuple[str, torch.nn.Parameter], ...]
    device: torch.device

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced; None for the default group."""
        return None if self.ddp is None else self.ddp.process_group

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is around the model, inside DDP, or on a part of it."""
        return is_compiled(self.model, self.module)

    @property
    def compiled_around(self) -> bool:
        """Whether torch.compile is around DDP: a replay of the bare module would run eagerly."""
        return self.ddp is not None and self.ddp is not self.model

    def replicated(self, *, buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        tensors: list[tuple[str, torch.Tensor]] = list(self.named)
        if buffers:
            tensors += [(n, b) for n, b in self.module.named_buffers() if b.dtype.is_floating_point]
        return tensors

    def replay(self, micro_batch: MicroBatch, scale_free: bool = False) -> ReplayResult:
        """Recompute a micro-batch on the bare module."""
        return replay(self.module, self.loss_fn, micro_batch, self.named, scale_free=scale_free)


def bare_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, torch.nn.Module):
            model = model._orig_mod
        else:
            return model


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, also around or inside torch.compile; None if there is none."""
    if isinstance(model, DistributedDataParallel):
        return model
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) else None


def is_compiled(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether torch.compile is around or inside either module, or `compile()` was called on one.

    Args:
        model: As the loop calls it.
        module: What DDP calls.
    """
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for whole in (model, module)
        for part in whole.modules()
    )
