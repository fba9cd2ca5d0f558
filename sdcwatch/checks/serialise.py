"""Values with tensors in them, frozen: exact to the bit, the stride and the alias.

`freeze` copies any value that pickles. Its tensors keep their strides (0 too), which of them share
memory, which are one object, where they lie to 64 bytes, `requires_grad`, and the lazy conjugation
and negation: kernels choose their path, and with it their rounding, by these. `Frozen.thaw` makes
fresh copies as often as wanted. What is no ordinary tensor (nested, a subclass) goes through
`torch.save`; a sparse one as its parts.

**What is not kept.** A tensor that spans much more memory than it has elements keeps its strides
but not what it shares. Parameters and modules of the model are not copied: they are named, and
stand for the same ones elsewhere. So does the device.

Unpickling runs code. All ranks of one job are one trust domain: they run the same program and
already hand each other gradients. Never thaw bytes from anywhere else.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from sdcwatch.errors import SdcwatchError

ALIGNMENT = 64
"""Bytes; what torch's CPU allocator gives, and the widest vector."""
_WIDEST = 4  # a span of more than this many times its elements is copied element by element
_SMALL = 1 << 16  # bytes that a span may always have
_SEARCHED = 100_000
PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
"""Types of values that hold no tensor and are never changed in place."""
_CLOSED = (
    *(nn.Module, type, types.ModuleType, types.BuiltinFunctionType, Node, np.ndarray),
    *(torch.Generator, torch.optim.Optimizer),
)
_LEFT_OUT = (*PLAIN, *_CLOSED)
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_PLAIN_TYPES = frozenset(PLAIN)


class NotTransportable(SdcwatchError):
    """A value cannot be copied to another rank; the message names the path to the object."""


# --- searching ---


def flat_tensors(values: Iterable[Any]) -> list[Tensor] | None:
    """Tensors among values, once each, in order; None where a value is neither tensor nor plain.

    The usual inputs and outputs of a call, at a tenth of the cost of `tensors_in`.
    """
    found: dict[int, Tensor] = {}
    for one in values:
        kind = type(one)
        if kind in _ORDINARY:
            found[id(one)] = one
        elif kind not in _PLAIN_TYPES:
            return None
    return list(found.values())


def tensors_in(value: Any, limit: int = _SEARCHED) -> list[Tensor]:
    """Every tensor in a value, once each, in a fixed order; reads only.

    Looks into mappings, lists, tuples, attributes, slots and closures, never into modules.

    Args:
        value: Anything.
        limit: Objects looked at; what lies behind is not found.
    """
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds the objects: an id may be used again otherwise
    waiting = [value]
    while waiting and len(seen) < limit:
        one = waiting.pop()
        if id(one) in seen:
            continue
        kind = type(one)  # the usual kinds first: this runs at every call
        if kind is tuple or kind is list:
            seen[id(one)] = one
            waiting += reversed(one)
            continue
        if kind is dict:
            seen[id(one)] = one
            waiting += reversed(one.values())
            continue
        if kind not in _ORDINARY and isinstance(one, _LEFT_OUT):
            continue
        seen[id(one)] = one
        if kind in _ORDINARY or isinstance(one, Tensor):
            found.append(one)
        else:
            waiting += reversed(list(_inside(one)))
    return found


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (content for cell in value.__closure__ or () for content in _content(cell))
    else:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from attributes.values()
        yield from _in_slots(value)


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that has no value yet
        return ()


def _in_slots(value: Any) -> Iterator[Any]:
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if (held := getattr(value, name, None)) is not None:
                yield held


# --- what is named, not copied ---


class Scope:
    """The parameters and submodules of a model by name, so that values may refer to them.

    Args:
        module: The model; None for values that refer to nothing.
        device: The device of this rank; the same word stands for another rank's own.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self.device = device
        self._objects: dict[str, Any] = {}
        if module is not None:
            self._objects |= {f"m:{n}": m for n, m in module.named_modules()}
            self._objects |= {
                f"p:{n}": p for n, p in module.named_parameters(remove_duplicate=False)
            }
        self._names = {id(o): name for name, o in reversed(self._objects.items())}

    def name(self, value: Any) -> str | None:
        """The name of a value that is not copied."""
        if isinstance(value, torch.device):
            return "device" if value == self.device and value.type != "cpu" else None
        return self._names.get(id(value)) if isinstance(value, (nn.Module, Tensor)) else None

    def find(self, name: str) -> Any:
        """The value of a name here.

        Raises:
            NotTransportable: The model here has nothing of that name.
        """
        if name == "device":
            return self.device
        if name not in self._objects:
            msg = (
                f"Expected the model to hold `{name[2:]}` as on the sending rank, but it does not."
            )
            raise NotTransportable(msg)
        return self._objects[name]


# --- one tensor ---


@dataclass(frozen=True, slots=True)
class _Leaf:
    """How one tensor is made from its base.

    Attributes:
        base: Which base.
        how: "view" into the base; "spread" into memory of its own; "saved" by torch.save; the
            parts of a sparse tensor: names of its layout.
        offset: Elements into the base.
        parts: Leaves of a sparse tensor's parts.
    """

    how: str
    dtype: torch.dtype
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    base: int = -1
    offset: int = 0
    requires_grad: bool = False
    conjugated: bool = False
    negated: bool = False
    coalesced: bool = False
    parts: tuple[_Leaf, ...] = ()


@dataclass(slots=True)
class _Span:
    """Bytes of one storage that tensors to be frozen lie in."""

    storage: torch.UntypedStorage
    low: int
    high: int
    used: int
    base: int = -1
    members: list[int] = field(default_factory=list)


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in _ORDINARY and tensor.layout is torch.strided and not tensor.is_nested


def _extent(tensor: Tensor) -> int:
    """Elements from the first to behind the last."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in pairs)


class _Copier:
    """Copies tensors, those that share memory together."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.bases: list[Tensor] = []
        self._spans: dict[int, _Span] = {}
        by_storage: dict[int, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(tensors):
            if _is_ordinary(tensor) and tensor.numel():
                size = tensor.element_size()
                low = int(tensor.storage_offset()) * size
                place = (low, low + int(_extent(tensor)) * size, number)
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
        for places in by_storage.values():
            self._join(sorted(places), tensors)

    def _join(self, places: list[tuple[int, int, int]], tensors: Sequence[Tensor]) -> None:
        span: _Span | None = None
        for low, high, number in places:
            tensor = tensors[number]
            used = tensor.numel() * tensor.element_size()
            if span is None or low >= span.high:
                span = _Span(tensor.untyped_storage(), low, high, 0)
            span.high = max(span.high, high)
            span.used += used
            self._spans[number] = span

    def leaf(self, number: int, tensor: Tensor) -> _Leaf:
        """Copy one of the tensors."""
        plain = tensor.detach()
        if not _is_ordinary(tensor):
            return replace(self._unusual(plain), requires_grad=tensor.requires_grad)
        leaf = _Leaf(
            "view",
            plain.dtype,
            tuple(plain.size()),
            tuple(plain.stride()),
            requires_grad=tensor.requires_grad,
            conjugated=plain.is_conj(),
            negated=plain.is_neg(),
        )
        if not plain.numel():
            return replace(leaf, base=self._add(plain.new_empty(0, dtype=torch.uint8)))
        span, size = self._spans[number], plain.element_size()
        misplaced = span.storage.data_ptr() % ALIGNMENT % size or (span.low % size)
        if misplaced or span.high - span.low > max(_WIDEST * span.used, _SMALL):
            values = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
            base = self._add(values.clone().view(torch.uint8))
            return replace(leaf, how="spread", base=base, conjugated=False, negated=False)
        lead = (span.storage.data_ptr() + span.low) % ALIGNMENT
        if span.base < 0:
            span.base = self._add(_copy_span(span, lead, plain.device))
        offset = (lead + plain.storage_offset() * size - span.low) // size
        return replace(leaf, base=span.base, offset=offset)

    def _unusual(self, plain: Tensor) -> _Leaf:
        if plain.layout is torch.sparse_coo:
            parts: tuple[Tensor, ...] = (plain._indices(), plain._values())
        elif plain.layout is torch.sparse_csr:
            parts = (plain.crow_indices(), plain.col_indices(), plain.values())
        else:
            file = io.BytesIO()
            torch.save(plain.clone(), file)
            data = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
            return _Leaf("saved", plain.dtype, base=self._add(data))
        copier = _Copier(parts)
        leaves = []
        for number, part in enumerate(parts):
            leaf = copier.leaf(number, part)
            leaves.append(replace(leaf, base=leaf.base + len(self.bases)))
        self.bases += copier.bases
        coalesced = plain.layout is torch.sparse_coo and plain.is_coalesced()
        kind = "coo" if plain.layout is torch.sparse_coo else "csr"
        size = tuple(plain.size())
        return _Leaf(kind, plain.dtype, size, coalesced=coalesced, parts=tuple(leaves))

    def _add(self, base: Tensor) -> int:
        self.bases.append(base)
        return len(self.bases) - 1


def _copy_span(span: _Span, lead: int, device: torch.device) -> Tensor:
    length = span.high - span.low
    source = torch.empty(0, dtype=torch.uint8, device=device)
    source.set_(span.storage, span.low, (length,), (1,))
    base = torch.empty(lead + length, dtype=torch.uint8, device=device)
    base[:lead].zero_()
    base[lead:].copy_(source)
    return base


def _make(leaf: _Leaf, bases: Sequence[Tensor], device: torch.device) -> Tensor:
    """The tensor of a leaf; bases are its own to keep."""
    if leaf.how == "saved":
        data = io.BytesIO(bases[leaf.base].cpu().numpy().tobytes())
        made: Tensor = torch.load(data, map_location=_relocate(device), weights_only=False)
    elif leaf.parts:
        made = _sparse(leaf, [_make(part, bases, device) for part in leaf.parts])
    elif leaf.how == "spread":
        values = bases[leaf.base].view(leaf.dtype).view(leaf.size)
        extent = 1 + sum((n - 1) * s for n, s in zip(leaf.size, leaf.stride, strict=True))
        made = values.new_empty(extent).as_strided(leaf.size, leaf.stride)
        made.copy_(values)
    else:
        base = bases[leaf.base]
        made = torch.empty(0, dtype=leaf.dtype, device=base.device)
        storage = base.untyped_storage()
        made.set_(storage, leaf.offset, leaf.size, leaf.stride)
    if leaf.conjugated:
        made = torch._conj(made)
    if leaf.negated:
        made = torch._neg_view(made)
    return made.requires_grad_(leaf.requires_grad)


def _sparse(leaf: _Leaf, parts: Sequence[Tensor]) -> Tensor:
    if leaf.how == "coo":
        made = torch.sparse_coo_tensor(parts[0], parts[1], leaf.size, check_invariants=False)
        return made._coalesced_(leaf.coalesced)
    rows, columns, values = parts
    return torch.sparse_csr_tensor(rows, columns, values, leaf.size, check_invariants=False)


def _relocate(device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        target = "cpu" if location == "cpu" else str(device)
        return torch.serialization.default_restore_location(storage, target)  # type: ignore[no-untyped-call]

    return place


# --- any value ---


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors and what the scope names.

    Tensors are set aside in the order in which they are met.
    """

    def __init__(self, file: Any, scope: Scope) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._scope = scope

    def persistent_id(self, obj: Any) -> int | str | None:
        if not isinstance(obj, (Tensor, nn.Module, torch.device)):
            return None
        if (name := self._scope.name(obj)) is not None:
            return name
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._seen[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: Sequence[Tensor], scope: Scope) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors, self._scope = tensors, scope

    def persistent_load(self, pid: Any) -> Any:
        return self._scope.find(pid) if isinstance(pid, str) else self._tensors[pid]


class _Limited(io.BytesIO):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._limit:
            msg = f"it takes more than {self._limit} bytes besides its tensors"
            raise NotTransportable(msg)
        return super().write(data)


@dataclass(frozen=True, slots=True)
class Frozen:
    """A copy of a value that nothing changes any more.

    Attributes:
        structure: Everything but the tensors, pickled.
        leaves: How each tensor is made.
        bases: The memory that tensors are made from, contiguous uint8, on their own devices.
    """

    structure: bytes
    leaves: tuple[_Leaf, ...] = ()
    bases: tuple[Tensor, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors and its structure."""
        return len(self.structure) + sum(base.numel() for base in self.bases)

    def thaw(self, scope: Scope) -> Any:
        """A copy of the value that shares nothing with it.

        Raises:
            NotTransportable: It does not unpickle here.
        """
        with torch.no_grad():
            bases = [base.clone() for base in self.bases]
            tensors = [_make(leaf, bases, scope.device) for leaf in self.leaves]
        try:
            return _Unpickler(self.structure, tensors, scope).load()
        except NotTransportable:
            raise
        except Exception as error:
            raise NotTransportable(_unreadable(error)) from error


def split(value: Any, scope: Scope, limit: int | None = None) -> tuple[bytes, list[Tensor]]:
    """The structure of a value, pickled, and the tensors in it, not copied.

    Raises:
        NotTransportable: It does not pickle, or its structure takes more than `limit` bytes.
    """
    file = io.BytesIO() if limit is None else _Limited(limit)
    pickler = _Pickler(file, scope)
    try:
        pickler.dump(value)
    except NotTransportable:
        raise
    except Exception as error:
        path = blocking_path(value, scope)
        msg = (
            f"Expected inputs that pickle, but got {type(error).__name__}: {error} at {path}. Hand "
            "the module tensors and plain containers."
        )
        raise NotTransportable(msg) from error
    return file.getvalue(), pickler.tensors


def freeze(value: Any, scope: Scope) -> Frozen:
    """Copy a value.

    Raises:
        NotTransportable: It does not pickle, or a tensor in it cannot be copied.
    """
    structure, tensors = split(value, scope)
    with torch.no_grad():
        try:
            copier = _Copier(tensors)
            leaves = tuple(copier.leaf(number, t) for number, t in enumerate(tensors))
        except Exception as error:
            msg = (
                f"Expected tensors that can be copied, but got {type(error).__name__}: {error}. "
                "Hand the module ordinary tensors."
            )
            raise NotTransportable(msg) from error
    return Frozen(structure, leaves, tuple(copier.bases))


class Structure:
    """What `write` gave: a value without its tensors, and how each of them looks.

    For values whose tensors are contiguous and ordinary, as those of a `Frozen` are.

    Args:
        data: The bytes.
        scope: Resolves names.

    Attributes:
        layout: Shape, dtype and type of device of each tensor, in order.
    """

    def __init__(self, data: bytes, scope: Scope) -> None:
        self._scope = scope
        try:
            layout, self._structure = pickle.loads(data)
        except Exception as error:
            raise NotTransportable(_unreadable(error)) from error
        self.layout: list[tuple[tuple[int, ...], torch.dtype, str]] = layout

    @staticmethod
    def write(value: Any) -> tuple[bytes, list[Tensor]]:
        """The bytes of a value without its tensors, and the tensors.

        Raises:
            NotTransportable: It does not pickle.
        """
        structure, tensors = split(value, Scope(None, torch.device("cpu")))
        layout = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
        return pickle.dumps((layout, structure), pickle.HIGHEST_PROTOCOL), tensors

    def read(self, tensors: Sequence[Tensor]) -> Any:
        """The value, with these tensors in it.

        Raises:
            NotTransportable: It does not unpickle here.
        """
        try:
            return _Unpickler(self._structure, tensors, self._scope).load()
        except Exception as error:
            raise NotTransportable(_unreadable(error)) from error


def _unreadable(error: Exception) -> str:
    return (
        f"Expected to unpickle what another rank has sent, but got {type(error).__name__}: {error}."
        " Run the same program and packages on every rank."
    )


def blocking_path(value: Any, scope: Scope, *, depth: int = 6) -> str:
    """The path to the innermost object that does not pickle, such as ``[0]['mask'].fn``."""
    for step, inner in _steps(value):
        if depth and not _pickles(inner, scope):
            return step + blocking_path(inner, scope, depth=depth - 1)
    return f" ({type(value).__module__}.{type(value).__qualname__})"


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", inner) for place, inner in enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", inner) for name, inner in attributes.items())


def _pickles(value: Any, scope: Scope) -> bool:
    try:
        _Pickler(io.BytesIO(), scope).dump(value)
    except Exception:
        return False
    return True
