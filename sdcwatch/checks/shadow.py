"""What a forward moves besides its outputs, kept from before a step and put back after a skip.

A skipped update leaves the weights; running statistics, codebooks, counters and banks have moved
all the same, and so has a momentum encoder that the forward writes; they hold what made the step
fail. In the first steps everything is kept and compared,
and from then on only what moved. Buffers are copied at once by ``_foreach_copy_``, and put back in
place, because DDP holds the same tensors. Random generators go on: the next step draws as if this
one had been left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sdcwatch.checks.fingerprint import digest_tensors, to_pairs
from sdcwatch.checks.kept import Kept, alike
from sdcwatch.checks.module_state import Name, StateWatch, spoken

LEARNED_STEPS = 3
_NOTHING = object()


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
        self._inside: set[Name] = set()  # attributes that hold something written in place
        self._empty: set[Name] = set()  # buffers that are None
        self._everything = True  # is kept of this step, not only what moves
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
        self._everything = self._learning > 0
        if self._learning:
            self._owners = self._watch.owners()  # a walk over all modules: not in every step
        buffers = dict(self._buffers())
        self._seen = {name: (id(b), b._version) for name, b in buffers.items()}
        self._empty = {
            (owner, key)
            for owner, module in self._owners.items()
            for key, buffer in module._buffers.items()
            if buffer is None
        }
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
        self._values = {
            name: Kept(value, self._limit if self._learning or name in self._inside else None)
            for name, value in self._attributes_now()
        }

    def _attributes_now(self) -> Iterator[tuple[Name, Any]]:
        if self._learning:
            yield from self._watch.values()
            return
        self._attributes |= {n for n in self._watch.moved if n[0] in self._owners}
        for owner, key in self._attributes:
            value = self._owners[owner].__dict__.get(key, _NOTHING)
            if value is not _NOTHING:
                yield (owner, key), value

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
            if copy is None or not alike(copy, buffer):
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
            changed = {n for n in names if now.get(n) != self._tokens.get(n)}
            self._attributes |= changed
            self._inside |= {n for n in changed & {*self._values} if self._values[n].moved_inside()}
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
        left += self._undo_new_buffers()
        for name, buffer in self._held.items():
            if not alike(buffer, self._copies[name]):  # in another shape, as of an observer
                buffer.data = self._copies[name].clone()
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
                self._inside.add((owner_name, key))
        self.left_behind = tuple(sorted(left))
        self.release()

    def _undo_new_buffers(self) -> list[str]:
        """Take away the buffers that the forward has made; the names of those that stay."""
        new = [n for n, _ in self._buffers() if n not in self._seen]
        if not self._everything:  # an attribute that tells of it may not have been kept
            return list(map(spoken, new))
        for owner, key in new:
            if (owner, key) in self._empty:
                self._owners[owner]._buffers[key] = None
            else:
                delattr(self._owners[owner], key)
        return []

    def before(self, name: str, buffer: Tensor) -> Tensor:
        """A buffer as it was before the step, where that was kept; else as it is."""
        owner, _, key = name.rpartition(".")
        full = (owner, key)
        return self._copies[full] if full in self._held else buffer

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


def _digests(buffers: dict[Name, Tensor]) -> dict[Name, Any]:
    pairs = to_pairs(digest_tensors([b.detach() for b in buffers.values()]))
    return dict(zip(buffers, pairs, strict=True))
