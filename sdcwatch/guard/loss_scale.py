"""The loss scale in the gradients of the guarded model: which GradScaler, and where it stands.

Infinities under a loss scale are the scaler's normal business. Under a scaler of some other model
they are not, and would be a device's fault overlooked. Nothing in a gradient says by what its loss
was multiplied; but a scaler steps the optimizers whose gradients it scales, and that can be seen.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from sdcwatch.checks.torch_internals import (
    grad_scaler_has_unscaled,
    live_grad_scalers,
    stepping_grad_scaler,
)


class LossScale:
    """Finds the scaler of a training loop.

    In this order: the one that `init` was given; the one that steps the optimizers, or unscaled
    their gradients before the loop's own `step()`; until one of them has stepped, any that lives.

    Args:
        scaler: What `init` was given; None to look for one.
    """

    def __init__(self, scaler: Any = None) -> None:
        self._given = scaler
        self._known: dict[int, weakref.ref[Any] | None] = {}
        self._by_hand: set[int] = set()

    def stepping(self, optimizer: Any) -> None:
        """An optimizer begins its step: remember who called it. Costs a microsecond or two.

        The first step of each that no scaler calls asks the garbage collector, some milliseconds.
        """
        if self._given is not None or id(optimizer) in self._by_hand:
            return
        scaler = stepping_grad_scaler()
        if scaler is None and id(optimizer) not in self._known:
            live = live_grad_scalers()
            scaler = next((s for s in live if grad_scaler_has_unscaled(s, optimizer)), None)
            if scaler is not None:
                self._by_hand.add(id(optimizer))
        self._known[id(optimizer)] = None if scaler is None else weakref.ref(scaler)

    def value(self) -> float | None:
        """The scale now; None without a scaler."""
        return next((float(s.get_scale()) for s in self._scalers() if s.is_enabled()), None)

    def _scalers(self) -> list[Any]:
        if self._given is not None:
            return [self._given]
        if self._known:
            found = (None if ref is None else ref() for ref in self._known.values())
            return [scaler for scaler in found if scaler is not None]
        gc.collect()  # a scaler of a loop that is over explains nothing
        return live_grad_scalers()
