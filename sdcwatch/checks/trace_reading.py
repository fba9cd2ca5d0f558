"""What a trace reads while a replay runs: bits of tensors, who wrote memory, which module runs.

Nothing here waits for an accelerator before `Fingerprints.resolve`. Nothing keeps memory of the
user's alive: storages are followed by weak references.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.fingerprint import digest_tensor
from sdcwatch.checks.serialise import tensors_in
from sdcwatch.core.trace_values import Born

_HASHED_BYTES = 1 << 20
"""On the CPU up to this size a hash of the bytes is cheaper than a fingerprint."""
_FOLDED = 1024
_UNSIGNED = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class Fingerprints:
    """Fingerprints of memory, asked for by ticket once all are there.

    On the CPU they are taken at once; on an accelerator they stay there until `resolve`.
    """

    def __init__(self) -> None:
        self._bits: list[str] = []
        self._waiting: list[tuple[int, Tensor]] = []
        self._folded: list[tuple[list[int], Tensor]] = []

    def of_tensor(self, plain: Tensor) -> int:
        """A ticket for the values of a strided tensor, in logical order."""
        if plain.device.type == "meta" or plain.numel() == 0:
            return self._add("0")
        plain = plain.detach()
        for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
            if stride == 0 and size > 1:  # an expanded tensor holds each value once
                plain = plain.narrow(dim, 0, 1)
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        plain = plain.contiguous()
        size_bytes = plain.numel() * plain.element_size()
        if plain.device.type == "cpu" and size_bytes <= _HASHED_BYTES:
            return self._hash(plain.data_ptr(), size_bytes)
        return self._defer(plain)

    def of_storage(self, storage: torch.UntypedStorage) -> int:
        """A ticket for all bytes of a storage."""
        size_bytes = storage.nbytes()
        if storage.device.type == "meta" or size_bytes == 0:
            return self._add("0")
        if storage.device.type == "cpu" and size_bytes <= _HASHED_BYTES:
            return self._hash(storage.data_ptr(), size_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return self._defer(whole.set_(storage, 0, (size_bytes,), (1,)))

    def of_bytes(self, data: bytes) -> int:
        """A ticket for bytes of the host."""
        return self._add(hashlib.blake2b(data, digest_size=8).hexdigest())

    def resolve(self) -> list[str]:
        """The fingerprints by ticket, as 16 hex digits. Waits for the device."""
        self._fold()
        for tickets, table_N2 in self._folded:
            for ticket, (plain, mixed) in zip(tickets, table_N2.tolist(), strict=True):
                self._bits[ticket] = f"{(plain * _MULTIPLIER + mixed) & _UNSIGNED:016x}"
        self._folded.clear()
        return self._bits

    def _hash(self, address: int, size_bytes: int) -> int:
        return self.of_bytes(ctypes.string_at(address, size_bytes))

    def _add(self, bits: str) -> int:
        self._bits.append(bits)
        return len(self._bits) - 1

    def _defer(self, plain: Tensor) -> int:
        ticket = self._add("")
        if self._waiting and self._waiting[0][1].device != plain.device:
            self._fold()
        self._waiting.append((ticket, digest_tensor(plain)))
        if len(self._waiting) >= _FOLDED:
            self._fold()
        return ticket

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            table_N2 = torch.stack([digest for _, digest in waiting])
            self._folded.append(([ticket for ticket, _ in waiting], table_N2))


def strided_parts(tensor: Tensor) -> list[Tensor] | None:
    """The plain tensors that hold the values of a tensor; None if it hides them."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [strided_parts(getattr(tensor, name)) for name in names]
        return None if None in inner else [part for parts in inner for part in parts or ()]
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.strided:
        return None if tensor.is_quantized else [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def kind_of(tensor: Tensor) -> str:
    """Dtype, shape and strides, and what else decides which kernel runs, as text."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{name} {str(tensor.layout).removeprefix('torch.')}"
    shape, strides = tuple(tensor.shape), tensor.stride()
    laid = ",".join(str(n) if size > 1 else "-" for n, size in zip(strides, shape, strict=True))
    flags = ("~" if tensor.is_conj() else "") + ("-" if tensor.is_neg() else "")
    if tensor.device.type != "cpu" and tensor.numel():
        flags += f" {tensor.device.type}"
        # Libraries choose a kernel by alignment. Subclasses have no address.
        if type(tensor) is Tensor and (off := tensor.data_ptr() % 16):
            flags += f"+{off}"
    return f"{flags}{name}{list(shape)}[{laid}]"[:96]


def constant_text(value: Any) -> str:
    """A value that is no tensor, as text that is the same in every process."""
    if isinstance(value, torch.device):
        return value.type  # the index is that of the rank
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(constant_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {constant_text(v)}" for k, v in value.items()) + "}"
    plain = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout)
    if isinstance(value, (*plain, torch.memory_format)):
        return repr(value)
    return type(value).__name__


@dataclass
class Owner:
    """What is known of one storage.

    Attributes:
        alive: Keeps its key from being used again.
        ticket: Its bytes, as they were logged last.
        born: Where it came from.
        origin: Of a given one, what it is called.
        writer: Position of the operation that wrote it last; -1.
        exposed: Code that a trace cannot see has its address.
        workspace: It holds what an operation keeps for its backward, and may hold garbage.
    """

    alive: Any
    ticket: int
    born: Born
    origin: str = ""
    writer: int = -1
    exposed: bool = False
    workspace: bool = False


class Memory:
    """Who wrote which storage last, and whether it is still what it was then."""

    def __init__(self, fingerprints: Fingerprints) -> None:
        self._fingerprints = fingerprints
        self._owners: dict[int, Owner] = {}

    def owner(self, part: Tensor) -> Owner:
        """What is known of a tensor's storage; unknown ones come from outside."""
        storage = part.untyped_storage()
        known = self._owners.get(internals.storage_key(storage))
        if known is None:
            known = self._register(storage, Born.OUTSIDE)
        return known

    def look(self, part: Tensor) -> tuple[Owner, int, int]:
        """Its owner, and tickets of its bytes as they were logged last and as they are now."""
        owner = self.owner(part)
        before = owner.ticket
        owner.ticket = self._fingerprints.of_storage(part.untyped_storage())
        return owner, before, owner.ticket

    def give(self, part: Tensor, origin: str) -> None:
        """Note a tensor of the micro-batch or of the model, before anything reads it."""
        storage = part.untyped_storage()
        if internals.storage_key(storage) not in self._owners:
            self._register(storage, Born.GIVEN, origin)

    def expose(self, tensor: Tensor) -> None:
        """Note that code which a trace cannot see gets the address of a tensor."""
        for part in strided_parts(tensor) or ():
            self.owner(part).exposed = True

    def write(self, part: Tensor, writer: int, born: Born, *, workspace: bool = False) -> None:
        """Note what an operation has just written."""
        storage = part.untyped_storage()
        owner = self._owners.get(internals.storage_key(storage))
        if owner is None:
            owner = self._register(storage, born)
        else:
            owner.ticket = self._fingerprints.of_storage(storage)
            whole = part.numel() * part.element_size() >= storage.nbytes()
            if whole:
                owner.born, owner.origin = born, ""
            elif owner.born is Born.UNSET:
                owner.born = Born.PARTLY
        owner.writer, owner.workspace = writer, workspace

    def _register(self, storage: torch.UntypedStorage, born: Born, origin: str = "") -> Owner:
        owner = Owner(
            internals.weak_storage(storage), self._fingerprints.of_storage(storage), born, origin
        )
        self._owners[internals.storage_key(storage)] = owner
        return owner


class ModulePaths:
    """In which module code runs, in the forward, in a recomputation and in the backward.

    Hooks for all modules of the process are used, and only for the length of a trace: hooks on one
    module would show on it and switch fast paths off. In the backward a node of the graph tells,
    which belongs to the module that was entered last before it was made.

    Args:
        module: The root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {inner: name for name, inner in module.named_modules()}
        self._thread = threading.local()
        self._nodes: dict[Node, str] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the modules that run inside."""
        handles = (
            global_hooks.register_module_forward_pre_hook(self._enter),
            global_hooks.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._thread.stack = []

    def now(self) -> tuple[str, bool]:
        """The path of the module, and whether it is its backward that runs."""
        stack = self._stack()
        node = internals.running_node()
        # A recomputation runs inside the backward of its own node, a forward of modules again.
        if node is not None and not stack:
            return self._nodes.get(node, ""), True
        return (stack[-1][0] if stack else ""), node is not None

    def _stack(self) -> list[tuple[str, int]]:
        stack: list[tuple[str, int]] | None = getattr(self._thread, "stack", None)
        if stack is None:
            stack = self._thread.stack = []
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self._stack().append((name, internals.next_sequence_number()))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        name, stack = self._names.get(module), self._stack()
        if name is None or not stack:
            return
        entered = stack.pop()[1]
        if not torch.is_grad_enabled():
            return
        with internals.torch_function_off(), internals.dispatch_modes_off():
            roots = [t.grad_fn for t in tensors_in(out) if t.grad_fn is not None]
            # What is older was made before the module was entered.
            for node in internals.walk(roots, lambda n: not self._made_since(n, entered)):
                self._nodes.setdefault(node, name)

    @staticmethod
    def _made_since(node: Node, entered: int) -> bool:
        return not internals.accumulates(node) and internals.sequence_number(node) >= entered


def leaves(values: Any, visit: Callable[[Any], bool]) -> Iterator[Any]:
    """What `visit` accepts in nested lists, tuples and dicts."""
    if visit(values):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from leaves(value, visit)
    elif isinstance(values, dict):
        for value in values.values():
            yield from leaves(value, visit)


def tensor_leaves(values: Any) -> Sequence[Tensor]:
    """The tensors in the arguments or results of an operation."""
    return list(leaves(values, lambda value: isinstance(value, Tensor)))
