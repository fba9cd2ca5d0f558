"""What is guarded: the model as the loop calls it, what DDP and torch.compile hide, its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_WRAPPED_IN = ("_orig_mod", "_forward_module")
"""Where torch.compile and Fabric keep what they wrap."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What is guarded, as `sdcwatch.init` was given it.

    Attributes:
        model: As the loop calls it.
        given: The same without what frameworks put around it: DDP, or what torch.compile made.
        ddp: The DDP wrapper, or None.
        module: What DDP calls: the bare module, compiled or not.
        optimizers: The innermost optimizers.
        named: Name and parameter, frozen ones included.
        device: Device of the module.
        scaler: The GradScaler that `init` was given; None to look for one.
    """

    model: torch.nn.Module
    given: torch.nn.Module
    ddp: DistributedDataParallel | None
    module: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    named: tuple[tuple[str, torch.nn.Parameter], ...]
    device: torch.device
    scaler: Any = None

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced; None for the default group."""
        return None if self.ddp is None else self.ddp.process_group

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is around the model, inside DDP, or on a part of it."""
        return is_compiled(self.given, self.module)

    @property
    def synchronises(self) -> bool:
        """Whether DDP reduces gradients in the backward of the call that it makes now."""
        return self.ddp is None or bool(self.ddp.require_backward_grad_sync)

    def replicated(self, *, buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        tensors: list[tuple[str, torch.Tensor]] = list(self.named)
        if buffers:
            tensors += [(n, b) for n, b in self.module.named_buffers() if b.dtype.is_floating_point]
        return tensors


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what Fabric puts around it."""
    inner = model.__dict__.get("_modules", {}).get("_forward_module")
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def bare_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, torch.compile and Fabric."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := _inside(model)) is not None:
            model = inner
        else:
            return model


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, also inside Fabric's module, around or inside torch.compile; or None."""
    inner: torch.nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = _inside(inner)
    return inner


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    children = model.__dict__.get("_modules", {})
    found = (children.get(name) for name in _WRAPPED_IN)
    return next((child for child in found if isinstance(child, torch.nn.Module)), None)


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
