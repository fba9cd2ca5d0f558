"""What a fault does to the bits of a tensor, as functions of the tensor, the fault and a draw.

Elements are counted in logical order, so strides never change what is hit. A random element is
drawn until the kind changes it (scaling a zero does nothing), up to a limit. Each call reads values
on the host: this is a rig for planting faults, not a hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import Fault

_TRIES = 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged tensor and what became of it.

    Attributes:
        tensor: A new tensor with the shape, dtype and strides of the original.
        element: Flat index of the example.
        before: Its value before; an integer for integer dtypes.
        after: Its value after.
        changed: Elements whose bits differ; 0 if the damage left everything as it was.
    """

    tensor: Tensor
    element: int
    before: float
    after: float
    changed: int


def check_dtype(fault: Fault, dtype: torch.dtype, what: str) -> None:
    """Check that a fault can happen to a tensor of this dtype.

    Raises:
        ConfigurationError: The bit is beyond the width, or the dtype has no such value.
    """
    width = _real(dtype).itemsize * 8
    if fault.bit is not None and fault.bit >= width:
        msg = (
            f"Expected `bit` below {width} for {what} of {dtype}, but got {fault.bit}. "
            "Pass a bit that the dtype has."
        )
        raise ConfigurationError(msg)
    if fault.kind in ("nan", "inf") and not _real(dtype).is_floating_point:
        msg = (
            f"Expected a floating-point tensor for kind {fault.kind!r}, but got {what} of {dtype}. "
            "Use bit_flip or set, or name another target."
        )
        raise ConfigurationError(msg)


def damaged(tensor: Tensor, fault: Fault, draw: Random, what: str = "a tensor") -> Damage | None:
    """A damaged copy of a tensor; None if it has no elements.

    Args:
        tensor: Any dense tensor, or a sparse COO one, whose values are damaged.
        fault: What to do; its site is of no interest here.
        draw: Source of the random element.
        what: What an error calls the tensor.

    Raises:
        ConfigurationError: The fault cannot happen to this dtype.
    """
    if tensor.layout is torch.sparse_coo:
        return _damaged_sparse(tensor, fault, draw, what)
    check_dtype(fault, tensor.dtype, what)
    source = tensor.detach()
    flat = torch.view_as_real(source.resolve_conj()) if source.is_complex() else source
    flat = flat.contiguous().view(-1)
    if flat.numel() == 0:
        return None
    lanes, values = _hit(flat, fault, draw)
    result = flat.clone()
    result[lanes] = values
    different = (_bits(result) != _bits(flat)).nonzero()
    example = int(different[0]) if len(different) else lanes.start
    shaped = result.view(*source.shape, 2) if source.is_complex() else result.view(source.shape)
    shaped = torch.view_as_complex(shaped) if source.is_complex() else shaped
    return Damage(
        tensor=torch.empty_like(source).copy_(shaped),
        element=example,
        before=flat[example].item(),
        after=result[example].item(),
        changed=len(different),
    )


def _damaged_sparse(tensor: Tensor, fault: Fault, draw: Random, what: str) -> Damage | None:
    source = tensor.detach().coalesce()
    damage = damaged(source.values(), fault, draw, what)
    if damage is None:
        return None
    rebuilt = torch.sparse_coo_tensor(
        source.indices(), damage.tensor, source.shape, is_coalesced=True, check_invariants=False
    )
    return Damage(rebuilt, damage.element, damage.before, damage.after, damage.changed)


def _hit(flat: Tensor, fault: Fault, draw: Random) -> tuple[slice, Tensor]:
    """Which elements are hit, and what they become."""
    size = flat.numel()
    if fault.kind == "stuck_lane":
        assert isinstance(fault.element, int)
        lanes = slice(fault.element % size, size, fault.every)
        return lanes, _changed(flat[lanes], fault)
    if fault.element == "all":
        return slice(0, size), _changed(flat, fault)
    if isinstance(fault.element, int):
        at = fault.element % size
        lanes = slice(at, at + 1)
        return lanes, _changed(flat[lanes], fault)
    for _ in range(_TRIES):
        at = draw.randrange(size)
        lanes = slice(at, at + 1)
        values = _changed(flat[lanes], fault)
        if not torch.equal(_bits(values), _bits(flat[lanes])):
            break
    return lanes, values


def _changed(values: Tensor, fault: Fault) -> Tensor:
    if fault.kind in ("bit_flip", "stuck_lane"):
        return _bit(values, fault)
    if fault.kind == "scale":
        assert fault.factor is not None
        return (values.to(torch.float64) * fault.factor).to(values.dtype)
    if fault.kind == "zero":
        return torch.zeros_like(values)
    fill = {"nan": float("nan"), "inf": float("inf")}.get(fault.kind, fault.value)
    assert fill is not None
    if values.dtype.is_floating_point:
        return torch.full_like(values, fill, dtype=torch.float64).to(values.dtype)
    return torch.full_like(values, int(fill), dtype=torch.int64).to(values.dtype)


def _bit(values: Tensor, fault: Fault) -> Tensor:
    words = _bits(values)
    width = words.dtype.itemsize * 8
    assert fault.bit is not None
    # the highest bit is the sign of the integer type the words are read as
    mask = -(1 << fault.bit) if fault.bit == width - 1 else 1 << fault.bit
    if fault.kind == "bit_flip":
        words = words ^ mask
    elif fault.stuck:
        words = words | mask
    else:
        words = words & ~mask
    return words.view(values.dtype)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(_WORDS[values.dtype.itemsize])


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


class _StandsIn(torch.autograd.Function):
    """A tensor with other bits in the forward, through which the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: object, original: Tensor, replacement: Tensor) -> Tensor:
        """A copy, so that later code may work in place; nothing is saved for the backward."""
        return replacement.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came: hardware that errs once does not change the derivative."""
        return gradient, None


def stand_in(original: Tensor, replacement: Tensor) -> Tensor:
    """`replacement` in place of `original`, with the gradient of `original`."""
    result: Tensor = _StandsIn.apply(original, replacement)  # type: ignore[no-untyped-call]
    return result
