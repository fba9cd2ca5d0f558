"""What a checkpoint would hold besides equal weights: is it finite, is it of this step?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

from sdcwatch.checks.nonfinite import (
    MINUS_INFINITY,
    NOT_A_NUMBER,
    PLUS_INFINITY,
    confirm_nonfinite,
    nonfinite_kinds,
    probe,
)
from sdcwatch.guard.observing import as_floats


class SavedState:
    """Looks at weights and buffers before they are saved.

    Masks are made of infinities, and observers and banks begin with them. So an element of a buffer
    that was not finite when the guard began may stay as it was until it has once been finite, and
    minus infinity may stand in a buffer that began with some, or that is new. Statistics of a
    normalisation are finite by design, also in a run that begins with a bad checkpoint.

    Args:
        named: Parameters.
        module: Its buffers are saved with it.
        left_behind: What a skipped step has left on this rank, told once.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        module: torch.nn.Module,
        left_behind: Callable[[], tuple[str, ...]],
    ) -> None:
        self._named, self._module, self._left_behind = named, module, left_behind
        self._finite: set[str] = set()
        self._began: dict[str, torch.Tensor] = {}  # kinds of the elements
        self._masks: set[str] = set()
        for name, owner, buffer in self._buffers():
            if isinstance(owner, _NormBase) or not confirm_nonfinite(buffer):
                self._finite.add(name)
            else:
                self._begin(name, nonfinite_kinds(buffer))

    def _begin(self, name: str, kinds: torch.Tensor) -> None:
        self._began[name] = kinds
        if bool((kinds == MINUS_INFINITY).any()):
            self._masks.add(name)

    def _buffers(self) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
        for prefix, owner in self._module.named_modules():
            for name, buffer in owner.named_buffers(prefix, recurse=False):
                yield name, owner, buffer.detach()

    def poisoned_before(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer would make outputs non-finite: by a NaN, or an infinity that has come.

        Masks are made of minus infinities, and observers begin with infinities on both sides.
        """
        if not confirm_nonfinite(buffer):
            return False
        kinds, began = nonfinite_kinds(buffer), self._began.get(name)
        infinite = kinds == PLUS_INFINITY
        if began is not None and began.shape == kinds.shape:
            infinite &= began != PLUS_INFINITY
        return bool((infinite | (kinds == NOT_A_NUMBER)).any())

    def flags(self) -> tuple[bool, bool]:
        """Something is not finite; something was left by a skipped step. Waits for the device."""
        buffers = list(self._buffers())
        tensors = [p.detach() for _, p in self._named]
        device = tensors[0].device
        tensors += [b for name, _, b in buffers if name in self._finite]
        seen = as_floats(device, [probe(t) for t in tensors]).tolist()
        suspicious = [t for t, s in zip(tensors, seen, strict=True) if not math.isfinite(s)]
        others = [(name, b) for name, _, b in buffers if name not in self._finite]
        poisoned = [self._poisoned(name, b) for name, b in others]  # each is looked at, and learned
        bad = any(poisoned) or any(map(confirm_nonfinite, suspicious))
        return bad, bool(self._left_behind())

    def _poisoned(self, name: str, buffer: torch.Tensor) -> bool:
        kinds, began = nonfinite_kinds(buffer), self._began.get(name)
        if began is None or kinds.shape != began.shape:  # a mask for longer sequences
            self._begin(name, kinds)
            return bool((kinds > MINUS_INFINITY).any())
        new = (kinds != 0) & (kinds != began)
        if name in self._masks:
            new &= kinds != MINUS_INFINITY
        self._began[name] = torch.where(kinds == began, kinds, 0)
        return bool(new.any())
