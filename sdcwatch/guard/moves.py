"""Weights that moved between two steps by none of the optimizers that are guarded.

Seen without a word to the device: every write in place counts up a tensor's version, and new
storage has another address. Only writes through ``p.data`` leave both as they are; after a skipped
step the weights themselves are compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sdcwatch.core.text import list_names

_NOT_OURS = frozenset(
    (
        *("torch", "sdcwatch", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning"),
        *("transformers", "builtins", "types", "functools", "weakref"),
    )
)


Places = tuple[list[int], list[int]]
"""The version of each weight, and its address."""


class WeightWatch:
    """Notes where the trained weights are, and which of them have moved since.

    Args:
        trained: Name and parameter.
    """

    def __init__(self, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._names = [n for n, _ in trained]
        self.parameters = [p for _, p in trained]
        self._seen: Places | None = None
        self._called: Places | None = None

    def mark(self) -> None:
        """The weights are where they belong."""
        self._seen, self._called = self._read(), None

    def backward_ended(self) -> tuple[str, ...]:
        """The same, at the end of a backward.

        Returns:
            Names of those that moved since the module was called: its forward writes them.
        """
        called = self._called
        self.mark()
        return self._differing(called, self._seen)

    def forget(self) -> None:
        """They have moved, and rightly: there is no mark until the next."""
        self._seen = None

    def moved(self) -> tuple[str, ...]:
        """Names of those that have moved since the last mark."""
        return () if self._seen is None else self._differing(self._seen, self._read())

    def called(self) -> tuple[str, ...]:
        """The module is called: the same, and what its forward writes is no move."""
        now = self._read()
        moved = self._differing(self._seen, now)
        self._seen, self._called = None, self._called or now
        return moved

    def restart(self) -> None:
        """The weights were put back before the call that begins."""
        self._called = self._read()

    def _differing(self, before: Places | None, after: Places | None) -> tuple[str, ...]:
        if before is None or after is None or before == after:
            return ()
        places = zip(self._names, *before, *after, strict=True)
        return tuple(n for n, v, at, later, there in places if (v, at) != (later, there))

    def _read(self) -> Places:
        parameters = self.parameters
        return [p._version for p in parameters], [p.data_ptr() for p in parameters]


def movers(known: Sequence[Any], moved: Sequence[nn.Parameter]) -> list[str]:
    """Names of the types of living objects that step and hold `known` optimizers or `moved`.

    Looks at every object of the process, some 0.1 s: for once in a run.

    Args:
        known: Optimizers that are guarded; they are not named.
        moved: Weights that moved.
    """
    wanted = {id(one) for one in (*known, *moved)}
    own = {id(one) for one in known}
    kinds: dict[type, bool] = {}
    found = set()
    for one in gc.get_objects():
        kind = type(one)
        if kind not in kinds:
            kinds[kind] = _may_step(kind)
        if kinds[kind] and id(one) not in own and _holds(one, wanted):
            found.add(kind.__name__)
    return sorted(found)


def _may_step(kind: type) -> bool:
    if issubclass(kind, (nn.Module, type, torch.optim.lr_scheduler.LRScheduler)):
        return False
    optimizer = issubclass(kind, torch.optim.Optimizer)
    if not optimizer and kind.__module__.split(".")[0] in _NOT_OURS:
        return False
    return optimizer or any("step" in name and callable(getattr(kind, name)) for name in dir(kind))


def _holds(one: object, wanted: set[int]) -> bool:
    for value in getattr(one, "__dict__", {}).values():
        for part in _parts(value):
            if id(part) in wanted:
                return True
            # A group of parameters, or an optimizer that holds some.
            groups = [part] if isinstance(part, dict) else []
            held = [p for group in groups for p in _parts(group.get("params"))]
            if any(id(p) in wanted for p in held):
                return True
    return False


def _parts(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def told(
    moved: Sequence[str], held_in: Callable[[], Sequence[str]], *, after_skip: bool = False
) -> tuple[str, str]:
    """What is said of weights that moved unseen.

    Args:
        moved: Their names; empty where only the fingerprint of all told.
        held_in: Asked for the types that may have moved them.
        after_skip: The update of the step before was skipped.

    Returns:
        The text and its level.
    """
    when = "since an update was skipped" if after_skip else "between two steps"
    what = list_names(list(moved)) if moved else "weights"
    kinds = list(held_in())
    if kinds:
        names = list_names(kinds)
        return (
            f"{what} moved {when}, by none of the optimizers that sdcwatch.init was given: {names} "
            f"holds them. Pass it, as sdcwatch.init(model, {kinds[0]}(...)), so that its steps "
            "are skipped too",
            "warning",
        )
    return (
        f"{what} moved {when}, by none of the optimizers that sdcwatch.init was given. If an "
        "optimizer did it, pass it as well: sdcwatch.init(model, [one, other]). What is loaded, "
        "clipped or averaged by hand is left as it is, after a skipped update too",
        "warning" if after_skip else "info",
    )
