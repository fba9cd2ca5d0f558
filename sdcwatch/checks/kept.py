"""Values of any kind, kept as they are and put back later, in place."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdcwatch.checks.module_state import CODE
from sdcwatch.checks.serialise import PLAIN

LOOKED_INTO = 200
"""Objects inside of a value that are kept without being asked for."""
_NOTHING = object()
_WITHOUT_VALUE: tuple[Any, ...] = (None, object.__hash__)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_FIXED = (*PLAIN, *GENERATORS, *CODE, tuple, frozenset, torch.optim.Optimizer)
"""Never changed in place, or left to go on."""


class Part:
    """One object, and what was in it, one level deep.

    Args:
        value: Anything.
        copy: Copy a tensor; else its version tells whether it was written.
    """

    def __init__(self, value: Any, *, copy: bool = True) -> None:
        self._value = value
        self._copied = copy
        self._content: Any = (
            _content(value) if copy or not isinstance(value, Tensor) else value._version
        )

    def refill(self) -> bool:
        """Put back what was in it; whether that could be done."""
        value, content = self._value, self._content
        if isinstance(value, Tensor):
            if not self._copied:
                return bool(value._version == content)
            if content is not None:
                if not alike(value, content):
                    value.data = content.clone()
                value.detach().copy_(content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(content)
        elif isinstance(value, collections.deque):
            value.clear()
            value.extend(content)
        elif content is not None:
            _set_attributes(value, content)
        else:
            return _is_fixed(value)
        return True

    def moved(self) -> bool:
        """Whether something else is in it now; a NaN counts as moved."""
        value, content = self._value, self._content
        if isinstance(value, Tensor):
            if not self._copied:
                return bool(value._version != content)
            return content is not None and not (
                alike(value, content) and torch.equal(value.detach(), content)
            )
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, content)
        now = _content(value)
        if isinstance(now, dict):
            now, content = [*now, *now.values()], [*content, *content.values()]
        if now is None or content is None or isinstance(now, set):
            return bool(now != content)
        return len(now) != len(content) or any(map(_is_not, now, content))


class Kept:
    """A value: the object, and what was in it, in everything inside of it too.

    Args:
        value: Anything.
        limit: Copy tensors inside of it as long as they have no more bytes in all. None copies
            none: one that is written in place is told, as is what is in a large container.
    """

    def __init__(self, value: Any, limit: int | None) -> None:
        self._value = value
        inside = list(
            itertools.islice(_inside(value), None if limit is not None else LOOKED_INTO + 1)
        )
        if limit is None and len(inside) > LOOKED_INTO:
            inside = []
        size = sum(t.numel() * t.element_size() for t in inside if isinstance(t, Tensor))
        copy = limit is not None and size <= limit
        self._parts = [Part(value), *(Part(one, copy=copy) for one in inside)]

    def moved_inside(self) -> bool:
        """Whether an object inside of it was written, not only the value itself."""
        return any(part.moved() for part in self._parts[1:])

    def put_back(self, attributes: dict[str, Any], key: str) -> bool:
        """Make it the attribute again, as it was; whether that could be done."""
        attributes[key] = self._value
        done = [part.refill() for part in self._parts]
        return all(done)


class KeptAttributes:
    """All that an object of somebody else's holds, to be put back in place after a skipped step.

    An optimizer may move weights without a gradient, as Lookahead does every k steps, and a
    communication hook may remember what it has not sent yet, as PowerSGD does. Both keep it in
    attributes, or in tensors and containers in them.

    Args:
        owner: The object; its ``__slots__`` count too.
        but: Beginnings of names that are left alone.
    """

    def __init__(self, owner: Any, but: tuple[str, ...] = ()) -> None:
        self._owner, self._but = owner, but
        self._before = self._attributes()
        self._kept: dict[int, Part] = {}
        self._keep(owner)
        for value in self._before.values():
            self._keep(value)

    def _attributes(self) -> dict[str, Any]:
        there = _attributes(self._owner)
        return {name: value for name, value in there.items() if not name.startswith(self._but)}

    def _keep(self, value: Any) -> None:
        if id(value) in self._kept or not isinstance(value, (Tensor, dict, list, tuple)):
            return
        self._kept[id(value)] = Part(value)
        if not isinstance(value, Tensor):
            for one in value.values() if isinstance(value, dict) else value:
                self._keep(one)

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything back into the same objects."""
        now = self._attributes()
        for name in now.keys() - self._before.keys():
            delattr(self._owner, name)
        for name, value in self._before.items():
            if now.get(name, _NOTHING) is not value:
                setattr(self._owner, name, value)
        for kept in self._kept.values():
            kept.refill()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether values of one fit into the other."""
    return (one.shape, one.dtype, one.device, one.layout) == (
        *(other.shape, other.dtype, other.device),
        other.layout,
    )


def _is_not(one: Any, other: Any) -> bool:
    return one is not other


def _is_fixed(value: Any) -> bool:
    """Whether nothing can change in a value that has no attributes: one that compares by value."""
    kind = type(value)
    return isinstance(value, _FIXED) or kind is object or kind.__hash__ not in _WITHOUT_VALUE


def _slots(owner: Any) -> list[str]:
    given = [kind.__dict__.get("__slots__", ()) for kind in type(owner).__mro__]
    slots = [s for names in given for s in ([names] if isinstance(names, str) else names)]
    return [s for s in slots if s not in ("__dict__", "__weakref__") and hasattr(owner, s)]


def _attributes(owner: Any) -> dict[str, Any]:
    """What an object holds, in slots too."""
    return {s: getattr(owner, s) for s in _slots(owner)} | getattr(owner, "__dict__", {})


def _set_attributes(owner: Any, content: dict[str, Any]) -> None:
    """Past a `__setattr__` of its own."""
    own, now = getattr(owner, "__dict__", {}), _attributes(owner)
    for name in now.keys() - content.keys():
        if name in own:
            del own[name]
        else:
            object.__delattr__(owner, name)
    slots = set(_slots(owner))
    for name, value in content.items():
        if now.get(name, _NOTHING) is value:
            continue
        if name in own or not (name in slots or not hasattr(owner, "__dict__")):
            own[name] = value
        else:
            object.__setattr__(owner, name, value)


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.grad_fn is None else None
    if isinstance(value, np.ndarray):
        return value.copy()
    for kind in (list, dict, set):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, collections.deque):
        return list(value)
    if isinstance(value, _FIXED):
        return None
    there = _attributes(value)
    return there if there or hasattr(value, "__dict__") else None


def _inside(value: Any) -> Iterator[Any]:
    """Everything that can change inside of a value, once each, without the value."""
    seen, waiting = {id(value): value}, list(_held(value))
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, PLAIN):
            continue
        seen[id(one)] = one
        waiting += _held(one)
        if not isinstance(one, _FIXED):
            yield one


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from value
    elif not isinstance(value, (Tensor, np.ndarray, *_FIXED)):
        yield from _attributes(value).values()
