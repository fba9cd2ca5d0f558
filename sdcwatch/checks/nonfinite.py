"""Check 1's two looks at a tensor: a cheap probe on the device, an exact answer on the host.

**What.** `probe` is one sum: a NaN or an infinity among the terms always makes it non-finite.
`confirm_nonfinite` looks at every element.

**False positives** of the probe: a sum of finite numbers may overflow. It is therefore a candidate
only, to be confirmed. **Misses** none. **Cost** one read of the tensor, at the speed of `sum()`;
`isfinite().all()` is some thirty times slower on a CPU and is left for candidates.
"""

from __future__ import annotations

import torch

_SUMMED_AS_THEY_ARE = frozenset((torch.float32, torch.float64, torch.bfloat16))
"""Types whose own sum overflows no earlier than float32; a cast first would copy the tensor."""


def _values(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor


def _can_be_nonfinite(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


@torch.no_grad()
def probe(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor so that any NaN or infinity in it shows.

    Returns:
        float32 of shape () on the tensor's device. Finite: every element is finite. Non-finite: a
        candidate for `confirm_nonfinite`. Integers and booleans give 0. The host does not wait.
    """
    if not _can_be_nonfinite(tensor):
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    values = _values(tensor)
    if values.dtype in _SUMMED_AS_THEY_ARE:
        return values.sum().to(torch.float32)
    if values.element_size() == 1:
        values = values.to(torch.float32)
    return values.sum(dtype=torch.float32)


def probe_plain(plain: torch.Tensor) -> torch.Tensor:
    """`probe` of a dense tensor that needs no gradient, without what most do not need."""
    return plain.sum() if plain.dtype is torch.float32 else probe(plain)


@torch.no_grad()
def confirm_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds a NaN or an infinity, exactly. Waits for the device."""
    if not _can_be_nonfinite(tensor):
        return False
    values = _values(tensor)
    if values.element_size() == 1:
        values = values.to(torch.float32)
    return not bool(torch.isfinite(values).all())


MINUS_INFINITY, PLUS_INFINITY, NOT_A_NUMBER = 1, 2, 3


@torch.no_grad()
def nonfinite_kinds(tensor: torch.Tensor) -> torch.Tensor:
    """Of each element 0 if it is finite, else which of the three it is; uint8."""
    values = _values(tensor)
    if values.element_size() == 1:
        values = values.to(torch.float32)
    kinds = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    kinds[values == -torch.inf] = MINUS_INFINITY
    kinds[values == torch.inf] = PLUS_INFINITY
    kinds[values.isnan()] = NOT_A_NUMBER
    return kinds
