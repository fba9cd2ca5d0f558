"""What a forward moves besides its outputs, kept from before a step and put back after a skip.

A skipped update leaves the weights; running statistics, codebooks, counters and banks have moved
all the same, and so has a momentum encoder that the forward writes; they hold what made the step
fail. In the first steps everything is kept and compared,
and from then on only what moved. Buffers are copied at once by ``_foreach_copy_``, and put back in
place, because DDP holds the same tensors. Random generators go on: the next step draws as if this
one had been left out.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdcwatch.checks.fingerprint import digest_tensors, to_pairs
from sdcwatch.checks.module_state import Name, StateWatch, spoken
from sdcwatch.checks.serialise import PLAIN

LEARNED_STEPS = 3
_NOTHING = object()
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class ForwardShadow:
    """Keeps what forwards move of one module.

    Args:
        watch: Reads the module's state.
        limit_bytes: Most that is kept of buffers and written parameters, in bytes.

    Attributes:
        left_behind: What the last skipped step has left as its forward made it, by name.
    """

    def __init__(self, watch: StateWatch, limit_bytes: int) -> None:
        self._watch, self._limit = watch, limit_bytes
        self._owners: dict[str, nn.Module] = {}
        self._learning = LEARNED_STEPS
        self._moving: set[Name] = set()
        self._attributes: set[Name] = set()
        self._copies: dict[Name, Tensor] = {}
        self._held: dict[Name, Tensor] = {}
        self._values: dict[Name, Kept] = {}
        self._seen: dict[Name, tuple[int, int]] = {}
        self._tokens: dict[Name, Any] = {}
        self._digests: dict[Name, Any] = {}
        self._written: set[Name] = set()  # parameters
        self._weights: dict[Name, Any] = {}
        self.left_behind: tuple[str, ...] = ()

    def begin(self) -> None:
        """Before the first call of a step. Waits for the device in the first steps only."""
        if self._learning:
            self._owners = self._watch.owners()  # a walk over all modules: not in every step
        buffers = dict(self._buffers())
        self._seen = {name: (id(b), b._version) for name, b in buffers.items()}
        wanted = buffers if self._learning else {n: buffers[n] for n in self._moving & {*buffers}}
        written = {name: p for name, p in self._parameters() if name in self._written}
        wanted = {**wanted, **written}
        if sum(b.numel() * b.element_size() for b in wanted.values()) > self._limit:
            wanted = {}  # what moves of them is left behind by a skip, and told
        self._held = dict(wanted)
        self._copy(wanted)
        if self._learning:
            self._tokens, self._digests = self._watch.tokens(), _digests(buffers)
            self._weights = _digests(dict(self._parameters()))
            self._values = {name: Kept(value) for name, value in self._watch.values()}
        else:
            held = ((n, self._owners[n[0]].__dict__.get(n[1], _NOTHING)) for n in self._attributes)
            self._values = {name: Kept(value) for name, value in held if value is not _NOTHING}

    def _buffers(self) -> Iterator[tuple[Name, Tensor]]:
        for owner, module in self._owners.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield (owner, key), buffer

    def _parameters(self) -> Iterator[tuple[Name, Tensor]]:
        for owner, module in self._owners.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield (owner, key), parameter

    def writes(self, names: Iterable[str]) -> None:
        """The forward has written these parameters of the module, by their names."""
        for name in names:
            owner, _, key = name.rpartition(".")
            self._written.add((owner, key))

    @torch.no_grad()
    def _copy(self, buffers: dict[Name, Tensor]) -> None:
        live, copies = [], []
        for name, buffer in buffers.items():
            copy = self._copies.get(name)
            if copy is None or not _alike(copy, buffer):
                self._copies[name] = buffer.detach().clone()
            else:
                live.append(buffer)
                copies.append(copy)
        if copies:
            torch._foreach_copy_(copies, live)

    def learn(self) -> None:
        """At the end of the backward: what has moved since `begin`."""
        if not self._seen and not self._tokens:
            return
        moved = {
            name
            for name, buffer in self._buffers()
            if self._seen.get(name) != (id(buffer), buffer._version)
        }
        if self._learning:
            self._learning -= 1
            live = dict(self._buffers())
            digests = _digests(live)
            moved |= {n for n in live if digests[n] != self._digests.get(n)}
            now = self._watch.tokens()
            names = {*now, *self._tokens}
            if self._weights:  # once for each `begin`: an optimizer may move them after it
                weights = _digests(dict(self._parameters()))
                self._written |= {n for n, d in weights.items() if self._weights.get(n) != d}
                self._weights = {}
            self._attributes |= {n for n in names if now.get(n) != self._tokens.get(n)}
        # BatchNorm's kernels write statistics past the version counter, but its count moves too.
        if owners := {owner for owner, _ in moved - self._moving}:
            self._moving |= moved | {n for n, _ in self._buffers() if n[0] in owners}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in place, and note what could not be."""
        self.learn()
        left = [spoken(n) for n in self._moving if n not in self._held and n in self._seen]
        left += [spoken(n) for n in self._written if n not in self._held]
        owners = self._owners
        for (owner, key), buffer in self._held.items():
            if (owner, key) not in self._written:
                owners[owner]._buffers[key] = buffer
        names = list(self._held)
        if names:
            live = [self._held[n].detach() for n in names]
            torch._foreach_copy_(live, [self._copies[n] for n in names])
        for owner_name, key in self._attributes:
            held = self._values.get((owner_name, key))
            if held is None:  # the forward has made it
                owners[owner_name].__dict__.pop(key, None)
            elif not held.put_back(owners[owner_name].__dict__, key):
                left.append(spoken((owner_name, key)))
        self.left_behind = tuple(sorted(left))
        self.release()

    def before(self, buffer: Tensor) -> Tensor:
        """A buffer as it was before the step, where that was kept; else as it is."""
        for name, held in self._held.items():
            if held is buffer:
                return self._copies[name]
        return buffer

    @property
    def active(self) -> bool:
        """Whether something is kept that a skip would put back."""
        return bool(self._seen or self._values)

    def take_left_behind(self) -> tuple[str, ...]:
        """What a skipped step has left, told once."""
        left, self.left_behind = self.left_behind, ()
        return left

    def release(self) -> None:
        """Let go of what is not to be put back."""
        self._values, self._tokens, self._held, self._seen = {}, {}, {}, {}
        self._digests, self._weights = {}, {}


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.layout) == (
        *(other.shape, other.dtype, other.device),
        other.layout,
    )


def _digests(buffers: dict[Name, Tensor]) -> dict[Name, Any]:
    pairs = to_pairs(digest_tensors([b.detach() for b in buffers.values()]))
    return dict(zip(buffers, pairs, strict=True))


class Kept:
    """A value of any kind: the object, and what was in it, one level deep."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._content: Any = _content(value)

    def put_back(self, attributes: dict[str, Any], key: str) -> bool:
        """Make it the attribute again, as it was; whether that could be done."""
        attributes[key] = self._value
        return self.refill()

    def refill(self) -> bool:
        """Put back into the object what was in it; whether that could be done."""
        value, content = self._value, self._content
        if isinstance(value, Tensor):
            if content is not None:
                value.detach().copy_(content)
        elif isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(content)
        elif isinstance(value, collections.deque):
            value.clear()
            value.extend(content)
        elif content is not None:
            value.__dict__.clear()
            value.__dict__.update(content)
        else:
            return isinstance(value, (*PLAIN, tuple, *_GENERATORS))
        return True


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.grad_fn is None else None
    for kind in (list, dict, set):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, collections.deque):
        return list(value)
    plain = isinstance(value, (*PLAIN, tuple, *_GENERATORS))
    return None if plain or not hasattr(value, "__dict__") else dict(value.__dict__)


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
        self._kept: dict[int, Kept] = {}
        self._keep(owner)
        for value in self._before.values():
            self._keep(value)

    def _attributes(self) -> dict[str, Any]:
        given = [kind.__dict__.get("__slots__", ()) for kind in type(self._owner).__mro__]
        slots = [s for names in given for s in ([names] if isinstance(names, str) else names)]
        there = {s: getattr(self._owner, s) for s in slots if hasattr(self._owner, s)}
        there |= getattr(self._owner, "__dict__", {})
        return {name: value for name, value in there.items() if not name.startswith(self._but)}

    def _keep(self, value: Any) -> None:
        if id(value) in self._kept or not isinstance(value, (Tensor, dict, list, tuple)):
            return
        self._kept[id(value)] = Kept(value)
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
