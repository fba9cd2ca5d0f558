"""State that a forward reaches besides its module: closures, globals, classes, objects of its own.

A replay runs the user's code once more, and what that counts, logs or moves outside of the module
would be moved twice. So everything that the code of the modules refers to is looked through before
a replay, and what has moved is put back after it, in place: other code holds the same objects.

Looked through are closures, default arguments, the globals that a function names, attributes of
classes, hooks, and objects in attributes that cannot be copied, as far as they are the user's own:
code of installed packages is left alone, and so is what it made, but for modules and tensors of
torch and arrays and generators of NumPy. A thread of the user's that changes such an object during
a replay would lose the change.

What cannot be put back is told by name: large tensors, and generators of Python (`advancing`).
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import random
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdcwatch.checks.kept import GENERATORS, Part
from sdcwatch.checks.signals import PassedOver
from sdcwatch.core.text import list_names

_LARGEST = 4 << 20  # bytes of a tensor that is copied
_TOTAL = 64 << 20
_SUMMED = 256 << 20  # bytes of an array, which has no version, that is read to see whether it moved
_THINGS = 5_000  # looked at before a replay
_ITEMS = 1_000  # of a container that are looked into
_INSTALLED = ("site-packages", "dist-packages", str(Path(__file__).parents[1]))
_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, range)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def _is_users(module_name: str) -> bool:
    """Whether a module of Python is the user's own, not the standard library's or installed."""
    if module_name.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy"):
        return module_name == "__main__"
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is None or not any(part in file for part in _INSTALLED)


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Every global name and attribute that a function uses, with those of functions inside."""
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Something that held a value, and can be made to hold it again."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class HiddenState:
    """Looks through what the code of a module reaches; as a context manager, puts back what moved.

    Args:
        module: The module; its parameters, buffers and submodules are left to others.
        unwatched: Attributes of it that nothing else puts back, by name.

    Attributes:
        moved: Names of what has moved and was put back.
        lost: Names of what has moved and could not be put back.
    """

    def __init__(self, module: nn.Module, unwatched: Iterable[tuple[str, Any]] = ()) -> None:
        self._module, self._unwatched = module, tuple(unwatched)
        self._own: set[int] = set()
        self._seen: dict[int, Any] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._places: list[tuple[_Place, Any]] = []
        self._undo: list[tuple[str, Callable[[], bool | None]]] = []
        self._advancing: list[tuple[str, Any]] = []
        self._bytes = 0
        self.moved: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()

    def __enter__(self) -> HiddenState:
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        moved: dict[str, None] = {}
        lost: dict[str, None] = {}
        for place, before in self._places:
            with PassedOver():
                if place.read() is not before:
                    place.write(before)
                    moved[place.name] = None
        for name, undo in self._undo:
            done: bool | None = False
            with PassedOver():
                done = undo()
            if done is not None:
                (moved if done else lost)[name] = None
        self.moved, self.lost = tuple(moved), tuple(lost)

    def advancing(self) -> dict[str, Any]:
        """How far the generators of Python are that the code reaches, by name."""
        self._look()
        return {name: _position(value) for name, value in self._advancing}

    # --- looking ---

    def _look(self) -> None:
        for module in self._module.modules():
            self._own.add(id(module))
            self._own.update(map(id, (*module._parameters.values(), *module._buffers.values())))
        for module in self._module.modules():
            self._look_at_class(type(module))
            for key, value in tuple(module.__dict__.items()):
                if isinstance(value, _FUNCTIONS):
                    self._reach(key, value)
            for key in _HOOKS:
                for hook in tuple((module.__dict__.get(key) or {}).values()):
                    self._reach("a hook", hook)
            for held in module._parameters.values():
                hooks = None if held is None else held._backward_hooks
                self._reach_all("a hook of a parameter", (hooks or {}).values())
        for name, value in self._unwatched:
            self._reach(name, value)
        while self._waiting and len(self._seen) < _THINGS:
            with PassedOver():  # objects of the user's may raise in anything
                self._look_at(*self._waiting.popleft())
        self._waiting.clear()

    def _reach(self, name: str, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._own or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # held, so that no other object gets its number
        self._waiting.append((name, value))

    def _look_at(self, name: str, value: Any) -> None:
        if _advances(value):
            self._advancing.append((name, value))
        elif isinstance(value, functools.partial):
            self._reach_all(name, (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            self._reach_all(name, (value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, types.ModuleType):
            pass  # its names are looked up by the functions that use them
        else:
            self._keep(name, value)

    def _reach_all(self, name: str, values: Iterable[Any]) -> None:
        for value in itertools.islice(values, _ITEMS):
            self._reach(name, value)

    def _look_at_function(self, function: types.FunctionType) -> None:
        if not _is_users(function.__module__ or ""):
            return
        code, called = function.__code__, function.__name__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._hold(_cell_place(f"`{key}` in the closure of `{called}`", cell))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._reach_all(f"a default of `{called}`", defaults)
        names, space = _names(code), function.__globals__
        for key in names:
            if key not in space:
                continue
            value = space[key]
            self._hold(_item_place(f"the global `{key}`", space, key))
            if isinstance(value, types.ModuleType) and _is_users(value.__name__):
                for inner in set(names) & vars(value).keys():
                    self._hold(_item_place(f"`{key}.{inner}`", vars(value), inner))

    def _look_at_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if not _is_users(one.__module__) or id(one) in self._own:
                continue
            self._own.add(id(one))
            for key, value in tuple(vars(one).items()):
                if key.startswith("__"):
                    continue
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(inner, _FUNCTIONS):
                    self._reach(key, inner)
                elif not callable(value) and not isinstance(value, types.MemberDescriptorType):
                    self._hold(_class_place(f"`{one.__name__}.{key}`", one, key))

    def _hold(self, place: _Place) -> None:
        try:
            value = place.read()
        except (ValueError, AttributeError, KeyError):  # a cell or a slot that holds nothing yet
            return
        self._places.append((place, value))
        self._reach(place.name, value)

    # --- keeping ---

    def _keep(self, name: str, value: Any) -> None:
        undo: Callable[[], bool | None] | None
        if isinstance(value, Tensor):
            undo = self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            undo = self._keep_array(value)
        elif isinstance(value, GENERATORS):
            undo = _undo_generator(value)
        elif isinstance(value, (list, collections.deque, dict, set)):
            undo = _undo_container(value)
            inside = value.values() if isinstance(value, dict) else value
            self._reach_all(name, list(itertools.islice(inside, _ITEMS)))
        elif isinstance(value, (tuple, frozenset)):
            self._reach_all(name, value)
            return
        else:
            self._keep_object(name, value)
            return
        if undo is not None:
            self._undo.append((name, undo))

    def _keep_object(self, name: str, value: Any) -> None:
        if not (isinstance(value, nn.Module) or _is_users(type(value).__module__)):
            return
        self._look_at_class(type(value))
        for one in type(value).__mro__:
            slots = vars(one).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if key not in ("__dict__", "__weakref__"):
                    self._hold(_attribute_place(name, value, key))
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self._undo.append((name, _undo_container(held)))
            self._reach_all(name, list(held.values()))

    def _keep_tensor(self, tensor: Tensor) -> Callable[[], bool | None] | None:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
            return None
        version = 0 if tensor.is_inference() else tensor._version
        self._bytes += tensor.nbytes
        if tensor.grad_fn is not None or tensor.nbytes > _LARGEST or self._bytes > _TOTAL:
            return lambda: None if tensor.is_inference() or tensor._version == version else False
        before = tensor.detach().clone()

        def undo() -> bool | None:
            if _same_bits(tensor.detach(), before):
                return None
            tensor.data.copy_(before)  # past the version counter: a graph may hold the tensor
            return True

        return undo

    def _keep_array(self, array: Any) -> Callable[[], bool | None] | None:
        if array.dtype.hasobject or not array.flags.writeable or array.nbytes > _SUMMED:
            return None
        self._bytes += array.nbytes
        if array.nbytes > _LARGEST or self._bytes > _TOTAL:
            checksum = _checksum(array)
            return lambda: None if _checksum(array) == checksum else False
        before = array.copy()

        def undo() -> bool | None:
            if array.tobytes() == before.tobytes():
                return None
            array[...] = before
            return True

        return undo


def _checksum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return (
        bool(one.isnan().any())
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _undo_generator(value: Any) -> Callable[[], bool | None]:
    if isinstance(value, torch.Generator):
        before = value.get_state()
        return lambda: (
            None if torch.equal(value.get_state(), before) else _did(value.set_state, before)
        )
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: None if value.getstate() == state else _did(value.setstate, state)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state(legacy=False)
        return lambda: (
            None
            if repr(value.get_state(legacy=False)) == repr(legacy)
            else _did(value.set_state, legacy)
        )
    bits = value.bit_generator
    held = bits.state
    return lambda: (
        None if repr(bits.state) == repr(held) else _did(lambda s: setattr(bits, "state", s), held)
    )


def _did(write: Callable[[Any], object], value: Any) -> bool:
    write(value)
    return True


def _undo_container(value: Any) -> Callable[[], bool | None]:
    if isinstance(value, dict):
        return _undo_dict(value)
    part = Part(value)
    return lambda: part.refill() if part.moved() else None


def _undo_dict(held: dict[Any, Any]) -> Callable[[], bool | None]:
    # Not emptied first, as `Part` does: it may be the globals of a program.
    before = dict(held)

    def undo() -> bool | None:
        gone = [key for key in held if key not in before]
        missing = object()
        other = {k: v for k, v in before.items() if held.get(k, missing) is not v}
        for key in gone:
            del held[key]
        held.update(other)
        return True if gone or other else None

    return undo


def _cell_place(name: str, cell: Any) -> _Place:
    return _Place(name, lambda: cell.cell_contents, lambda v: setattr(cell, "cell_contents", v))


def _item_place(name: str, held: dict[str, Any], key: str) -> _Place:
    return _Place(name, lambda: held[key], lambda v: held.__setitem__(key, v))


def _class_place(name: str, owner: type, key: str) -> _Place:
    # Not by getattr: what a descriptor returns is not what the class holds.
    return _Place(name, lambda: vars(owner)[key], lambda v: setattr(owner, key, v))


def _attribute_place(name: str, owner: Any, key: str) -> _Place:
    return _Place(name, lambda: getattr(owner, key), lambda v: setattr(owner, key, v))


def _advances(value: Any) -> bool:
    """Whether it is a generator, or an iterator that Python itself makes."""
    own = type(value).__module__ in ("builtins", "itertools")
    return own and isinstance(value, Iterator)


def _position(value: Any) -> Any:
    """Where an iterator stands, as something comparable."""
    if isinstance(value, itertools.count):
        return repr(value)
    if not isinstance(value, types.GeneratorType):
        return _left(value)
    frame = value.gi_frame
    if frame is None:
        return "ended"
    plain = {k: v for k, v in frame.f_locals.items() if isinstance(v, _ATOMS)}
    return (frame.f_lasti, plain)


def _left(iterator: Any) -> Any:
    """How much is left of an iterator, and of those inside of it; itself where it does not tell."""
    hint = operator.length_hint(iterator, -1)
    if hint >= 0:
        return hint
    with warnings.catch_warnings(), PassedOver():
        warnings.simplefilter("ignore")  # itertools will not tell it any more in Python 3.14
        parts: Any = iterator.__reduce__()
        inside = [item for part in parts[1:] if isinstance(part, tuple) for item in part]
        return tuple(
            _position(i) if _advances(i) else len(i) if isinstance(i, (list, tuple)) else i
            for i in inside
            if _advances(i) or isinstance(i, (list, tuple, int))
        )
    return object()


def advanced(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Why a call cannot be made again, by what `HiddenState.advancing` said around it; or ""."""
    moved = [name for name, where in after.items() if before.get(name, where) != where]
    if not moved:
        return ""
    return (
        f"the forward takes the next value of {list_names(moved)}, which no replay can put back: "
        "keep a number in the module and compute the value from it"
    )
