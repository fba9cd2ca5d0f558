"""What a call depends on besides its inputs and the weights: state of the module, and of torch.

A module's state is its buffers, the `training` flag of every module in it, and plain attributes:
numbers, containers, tensors, small objects. **Attributes travel as the difference from what they
were when the guard began**: what never changed is the same everywhere, or is meant to differ, such
as a rank or a device. What cannot be pickled, or takes more than a megabyte besides its tensors, is
not watched.

State is *rebound* for a replay and put back: other objects stand in its place for a while. Writing
into a buffer that the graph of the training loop has saved would break a second backward of its.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sdcwatch.checks.fingerprint import digest_tensors, to_pairs
from sdcwatch.checks.serialise import (
    PLAIN,
    Frozen,
    NotTransportable,
    Scope,
    freeze,
    split,
    tensors_in,
)
from sdcwatch.checks.torch_internals import saved_tensor_hooks_active

Name = tuple[str, str]
"""Name of a module and of one of its attributes or buffers."""
_LIMIT = 1 << 20  # bytes of an attribute besides its tensors; and of a first value that is kept
_OWN = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "forward"))
_WATCHED_STEPS = 3
CODE = (
    *(nn.Module, nn.Parameter, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, functools.partial),
)
"""Kinds of values that are pieces of a model or of a program, and no state of a call."""


# --- generators ---

HOST_GENERATORS = ("random", "numpy.random")
"""Of the process, shared by every library in it."""


@dataclass(frozen=True, slots=True)
class Generators:
    """States of the random generators at one moment.

    Attributes:
        torch_cpu: torch's CPU generator, uint8.
        device: The generator of the device, uint8 on the CPU; None on a CPU.
        python: `random.getstate()`; None where it was not read.
        numpy: `numpy.random.get_state()`; None where it was not read.
    """

    torch_cpu: Tensor
    device: Tensor | None = None
    python: Any = None
    numpy: Any = None

    def differing(self, other: Generators) -> tuple[str, ...]:
        """Which generators stand elsewhere in `other`; one that was not read counts as equal."""
        pairs = (
            ("torch", not torch.equal(self.torch_cpu, other.torch_cpu)),
            ("torch's device", not _same(self.device, other.device, torch.equal)),
            (HOST_GENERATORS[0], not _same(self.python, other.python, lambda a, b: bool(a == b))),
            (HOST_GENERATORS[1], not _same(self.numpy, other.numpy, _equal_numpy)),
        )
        return tuple(name for name, differs in pairs if differs)

    def restore(self, device: torch.device) -> None:
        """Put the generators where they were."""
        # A copy: the generator reads from the start of the storage, also of a view into a message.
        torch.set_rng_state(self.torch_cpu.clone())
        if self.device is not None and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(self.device.clone(), device)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


def _same(one: Any, other: Any, equal: Any) -> bool:
    return one is None or other is None or bool(equal(one, other))


def _equal_numpy(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def read_generators(device: torch.device, *, python: bool = True, numpy: bool = True) -> Generators:
    """The states now. Python's and NumPy's take some 60 µs, torch's one."""
    state = None
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device)
    return Generators(
        torch.get_rng_state(),
        state,
        random.getstate() if python else None,
        np.random.get_state() if numpy else None,
    )


class HostGenerators:
    """Finds out whether a call advances Python's or NumPy's generator.

    Reading both costs more than all the rest of a plain call, so it is done in the first calls and
    after that only where one of them moved, or when asked.
    """

    def __init__(self, calls: int = _WATCHED_STEPS) -> None:
        self._left = calls
        self._python = self._numpy = False

    @property
    def learning(self) -> bool:
        """Whether `learn` still wants to be told."""
        return self._left > 0

    def read(self, device: torch.device, *, always: bool) -> Generators:
        """The states before a call."""
        every = always or self._left > 0
        return read_generators(device, python=every or self._python, numpy=every or self._numpy)

    def learn(self, before: Generators) -> None:
        """Note after a call which of them moved."""
        if self._left > 0:
            self._left -= 1
            self._python = self._python or before.python != random.getstate()
            self._numpy = self._numpy or not _equal_numpy(before.numpy, np.random.get_state())


# --- autocast and the rest of torch ---


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast at one moment.

    Attributes:
        kinds: Device type, enabled, dtype; one entry per device type.
        cache: Whether casts of weights are cached.
    """

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @property
    def casts(self) -> bool:
        """Whether it is on for any type of device."""
        return any(enabled for _, enabled, _ in self.kinds)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same autocast once more. Its casts go with it, unless an outer region keeps them."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.kinds:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache)
                )
            yield


def read_autocast(device: torch.device) -> Autocast:
    """Autocast of the CPU and of the device's type now; equal ones are one object."""
    cache, own = torch.is_autocast_cache_enabled(), device.type
    here = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    if own == "cpu":
        return _autocast(cache, here)
    there = (own, torch.is_autocast_enabled(own), torch.get_autocast_dtype(own))
    return _autocast(cache, here, there)


@functools.lru_cache(maxsize=64)
def _autocast(
    cache: bool, cpu: tuple[bool, torch.dtype], *others: tuple[str, bool, torch.dtype]
) -> Autocast:
    return Autocast((("cpu", *cpu), *others), cache)


_ATTENTION: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("flash", torch.backends.cuda.flash_sdp_enabled),
    ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled),
    ("math", torch.backends.cuda.math_sdp_enabled),
    ("cudnn", torch.backends.cuda.cudnn_sdp_enabled),
)


def numeric_environment() -> dict[str, str]:
    """Switches that decide bits and may be different at every call, as text.

    What holds for the whole process is in `sdcwatch.checks.determinism.environment_facts`.
    """
    cudnn = torch.backends.cudnn
    return {
        "threads": str(torch.get_num_threads()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_mode": str(torch.get_deterministic_debug_mode()),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "sdpa": " ".join(name for name, enabled in _ATTENTION if enabled()),
        "cudnn": f"{cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic} {cudnn.allow_tf32}",
        # Each thread has the flag and nothing reads it back: half of a denormal tells.
        "flush_denormal": str(float(torch.tensor(1e-39, device="cpu") * 0.5) == 0.0),
        "saved_tensor_hooks": str(saved_tensor_hooks_active()),
    }


# --- the module ---


@dataclass(frozen=True, slots=True)
class ModuleState:
    """State of a module at a call, as values that may be copied.

    Attributes:
        buffers: By name of module and buffer.
        attributes: Those that are not what they were when the guard began.
        gone: Attributes that the module had when the guard began.
        training: The flag of every module, in the order of `named_modules`.
    """

    buffers: Mapping[Name, Tensor]
    attributes: Mapping[Name, Any]
    gone: tuple[Name, ...]
    training: tuple[bool, ...]


class StateWatch:
    """Reads, compares and rebinds the state of one module.

    Args:
        module: The bare module.
        scope: Names its parameters and modules.

    Attributes:
        moved: Attributes that `read` has found changed since the guard began.
    """

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        self._module, self.scope = module, scope
        self._unwatched: set[Name] = set()
        self.moved: set[Name] = set()
        self._first: dict[Name, Any] = {}
        self._kept: dict[Name, Frozen] = {}
        self._first = self.tokens()
        for name, value in self._values():
            if name in self._first and not isinstance(value, PLAIN):
                self._keep(name, value)

    def read(self) -> ModuleState:
        """The state now; nothing is copied."""
        values = dict(self._values())
        tokens = self.tokens()
        moved = {n: values[n] for n, token in tokens.items() if self._first.get(n) != token}
        self.moved |= moved.keys()
        return ModuleState(
            buffers=dict(self.buffers()),
            attributes=moved,
            gone=tuple(n for n in self._first if n not in tokens and n not in values),
            training=tuple(m.training for m in self._module.modules()),
        )

    def buffers(self) -> Iterator[tuple[Name, Tensor]]:
        """Every buffer by name of its module and its own."""
        for owner_name, owner in self._module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield (owner_name, name), buffer

    def tokens(self) -> dict[Name, Any]:
        """Something comparable for each watched attribute; waits for the device."""
        tokens: dict[Name, Any] = {}
        tensors: list[Tensor] = []
        waiting: list[tuple[Name, bytes, int, int]] = []
        shared: dict[int, tuple[bytes, int, int]] = {}  # a config is held by many modules
        for name, value in self._values():
            if isinstance(value, PLAIN):
                tokens[name] = (type(value), value if value == value else repr(value))
                continue
            if id(value) not in shared:
                parts = self._split(name, value)
                if parts is None:
                    continue
                shared[id(value)] = (parts[0], len(tensors), len(tensors) + len(parts[1]))
                tensors += parts[1]
            waiting.append((name, *shared[id(value)]))
        pairs = _digests(tensors)
        for name, structure, begin, end in waiting:
            tokens[name] = (structure, tuple(pairs[begin:end]))
        return tokens

    def unwatched(self) -> list[tuple[str, Any]]:
        """Attributes that cannot be copied, by name: what moves in them is put back in place."""
        owners = self.owners()
        held = ((n, owners[n[0]].__dict__.get(n[1])) for n in self._unwatched if n[0] in owners)
        return [(spoken(name), value) for name, value in held if value is not None]

    def rebound(self) -> ReboundState:
        """Stand-ins for the module's state, for a replay."""
        return ReboundState(self._module, self)

    def copies(self) -> tuple[dict[Name, Any], tuple[str, ...]]:
        """Copies of every watched attribute that can be changed in place, as they began.

        Returns:
            The copies, and the names of those that have moved and whose first value was not kept.
        """
        tokens, lost = self.tokens(), []
        copies: dict[Name, Any] = {}
        made: dict[int, Any] = {}
        for name, value in self._values():
            if name not in tokens:
                continue
            if self._first.get(name) == tokens[name]:
                if isinstance(value, PLAIN):
                    continue
                if id(value) not in made:
                    made[id(value)] = freeze(value, self.scope).thaw(self.scope)
                copies[name] = made[id(value)]
            elif name in self._kept:
                copies[name] = self._kept[name].thaw(self.scope)
            elif (first := self._first.get(name)) is not None:
                if isinstance(first[0], type) and isinstance(first[1], first[0]):
                    copies[name] = first[1]
                else:
                    lost.append(spoken(name))
        return copies, tuple(lost)

    def values(self) -> Iterator[tuple[Name, Any]]:
        """Every watched attribute, as it is."""
        return self._values()

    def owners(self) -> dict[str, nn.Module]:
        """Every module by name."""
        return dict(self._module.named_modules())

    def added(self) -> set[Name]:
        """Attributes that the module did not have when the guard began."""
        return {name for name, _ in self._values() if name not in self._first}

    def _values(self) -> Iterator[tuple[Name, Any]]:
        for owner_name, owner in self._module.named_modules():
            for name, value in owner.__dict__.items():
                if name not in _OWN and "hook" not in name and "compile" not in name:
                    full = (owner_name, name)
                    if full not in self._unwatched and not _is_part(value):
                        yield full, value

    def _split(self, name: Name, value: Any) -> tuple[bytes, list[Tensor]] | None:
        try:
            return split(value, self.scope, _LIMIT)
        except NotTransportable:
            self._unwatched.add(name)
        return None

    def _keep(self, name: Name, value: Any) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors_in(value))
        if size <= _LIMIT:
            try:
                self._kept[name] = freeze(value, self.scope)
            except NotTransportable:
                self._unwatched.add(name)


def spoken(name: Name) -> str:
    """A name as a person writes it."""
    return ".".join(part for part in name if part)


def _is_part(value: Any) -> bool:
    """Whether a value is a piece of the model or code, which a replay shares with training."""
    if isinstance(value, CODE):
        return True
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, (nn.Module, nn.Parameter)) for item in value)
    return isinstance(value, dict) and any(
        isinstance(item, (nn.Module, nn.Parameter)) for pair in value.items() for item in pair
    )


def _digests(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """Shape, dtype and fingerprint of each tensor."""
    found: list[tuple[Any, ...]] = []
    for tensor in tensors:
        plain = tensor.detach()
        if plain.is_nested or plain.layout not in (torch.strided, torch.sparse_coo):
            plain = plain.values()
        pair = to_pairs(digest_tensors([plain]))[0]
        found.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad, pair))
    return found


class ReboundState:
    """Copies stand in for buffers and attributes of a module; the originals are put back after.

    As a context manager. `load` may be called many times inside.
    """

    def __init__(self, module: nn.Module, watch: StateWatch) -> None:
        self._watch = watch
        self._owners = dict(module.named_modules())
        self._before = {
            name: (dict(m._buffers), dict(m.__dict__), m.training)
            for name, m in self._owners.items()
        }
        self.lost: tuple[str, ...] = ()

    def __enter__(self) -> ReboundState:
        copies, self.lost = self._watch.copies()
        for (owner, key), value in copies.items():
            self._owners[owner].__dict__[key] = value
        for (owner, key), buffer in tuple(self._watch.buffers()):
            self._owners[owner]._buffers[key] = _clone(buffer)
        return self

    def __exit__(self, *_: object) -> None:
        for name, (buffers, attributes, training) in self._before.items():
            owner = self._owners[name]
            owner._buffers.clear()
            owner._buffers.update(buffers)
            for key in [k for k in owner.__dict__ if k not in attributes]:
                del owner.__dict__[key]
            owner.__dict__.update(attributes)
            owner.training = training

    def load(self, state: ModuleState) -> None:
        """Stand `state`, which is the replay's own to change, in for the module's."""
        for (owner, name), value in state.attributes.items():
            if owner in self._owners:
                self._owners[owner].__dict__[name] = value
        for owner, name in state.gone:
            self._owners[owner].__dict__.pop(name, None)
        for full in self._watch.added() - set(state.attributes):
            self._owners[full[0]].__dict__.pop(full[1], None)
        for (owner, name), buffer in state.buffers.items():
            if owner in self._owners and name in self._owners[owner]._buffers:
                self._owners[owner]._buffers[name] = buffer
        for module, flag in zip(self._owners.values(), state.training, strict=True):
            module.training = flag


def _clone(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)
