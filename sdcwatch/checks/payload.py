"""One micro-batch as a value, and as the bytes that travel to another rank.

`MicroBatch` holds all that a forward and backward depend on besides the weights. `pack` makes it
one contiguous buffer that carries a fingerprint of itself, so that a receiver can tell a damaged
message (nobody is named) from a wrong computation.

The batch may be anything that pickles: containers, dataclasses, opaque objects with tensors inside.
Tensors are found by the pickler itself. Their strides and their alignment travel too, because
kernels choose their path, and with it their rounding, by both.

Unpickling runs code. All ranks of one job are one trust domain: they run the same program and
already hand each other gradients. Never unpack bytes from anywhere else.
"""

from __future__ import annotations

import copy
import io
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sdcwatch.checks.fingerprint import digest_tensor, digest_tensors, to_pairs
from sdcwatch.errors import SdcwatchError

_HEADER = struct.Struct("<8sqQQ")  # magic, length of the body in bytes, its two checksums
_MAGIC = b"sdcwmb01"
_ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, and the widest vector
_WIDEST = 4  # a view that spans more than this many times its own elements is copied compactly
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class PayloadDamaged(SdcwatchError):
    """A micro-batch arrived whose bytes are not the ones that were sent."""


class NotTransportable(SdcwatchError):
    """A micro-batch cannot be pickled, or cannot be unpickled here."""


@dataclass(frozen=True, slots=True)
class RngState:
    """States of the random generators when the forward began.

    Attributes:
        torch_cpu: torch's CPU generator, uint8.
        device: The generator of the current device, uint8 on the CPU; None on a CPU.
        python: `random.getstate()`; None where the forward does not advance it.
        numpy: `numpy.random.get_state()`; None where the forward does not advance it.
    """

    torch_cpu: Tensor
    device: Tensor | None = None
    python: Any = None
    numpy: Any = None


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast as the forward found it.

    Attributes:
        kinds: Device type, enabled, dtype; one entry per device type.
        cache: Whether casts of weights are cached.
    """

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool


Buffers = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """All that a forward and backward depend on besides the weights.

    Attributes:
        batch: What `loss_fn` was called with, as it was before the call.
        rng: Random generators.
        autocast: Autocast around the forward.
        grad_mode: Whether gradients were recorded.
        training: The training flag of every module, in the order of `modules()`.
        buffers: Buffers of the bare module: when the forward began, then at each call of it. Empty
            off audit steps.
        loss_gradient: The gradient that arrived at the returned loss; None before a backward.
        backward_autocast: Autocast around the backward.
        calls: How often the bare module was called (audit steps).
        reentrant: Whether the graph holds a reentrant checkpoint.
        together: Earlier micro-batches whose losses went into the same backward.
    """

    batch: Any
    rng: RngState
    autocast: AutocastState
    grad_mode: bool = True
    training: tuple[bool, ...] = ()
    buffers: tuple[Buffers, ...] = ()
    loss_gradient: Tensor | None = None
    backward_autocast: AutocastState | None = None
    calls: int = 0
    reentrant: bool = False
    together: tuple[MicroBatch, ...] = ()

    @property
    def parts(self) -> tuple[MicroBatch, ...]:
        """Every forward of the backward, in order."""
        return (*self.together, replace(self, together=()))


def join(micro_batches: Sequence[MicroBatch]) -> MicroBatch:
    """One micro-batch out of several whose losses went into one backward, in forward order."""
    *earlier, last = [part for whole in micro_batches for part in whole.parts]
    return replace(last, together=tuple(earlier))


def join_losses(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The digest of the losses of one backward: the pair itself if there is one."""
    if len(pairs) == 1:
        return pairs[0]
    words = [word - (1 << 64) if word >> 63 else word for pair in pairs for word in pair]
    return to_pairs(digest_tensor(torch.tensor(words, dtype=torch.int64))[None])[0]


def shallow_copy(batch: Any) -> Any:
    """A copy of the containers of `batch` with the same tensors in them."""
    if isinstance(batch, (Tensor, *_PLAIN)):
        return batch
    try:
        return _shallow_copy(batch)
    except Exception:  # an object of the user's that refuses to be copied is kept as it is
        return batch


def _shallow_copy(batch: Any) -> Any:
    if isinstance(batch, tuple):
        items = [shallow_copy(item) for item in batch]
        if type(batch) is tuple:
            return tuple(items)
        return type(batch)(*items) if hasattr(batch, "_fields") else batch
    copied = copy.copy(batch)
    if isinstance(copied, list):
        copied[:] = [shallow_copy(item) for item in copied]
    elif isinstance(copied, dict):
        for key, value in copied.items():
            copied[key] = shallow_copy(value)
    return copied


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, which are set aside in the order in which they are met."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._seen[id(obj)]


class _Unpickler(pickle.Unpickler):
    """The inverse of `_Pickler`."""

    def __init__(self, structure: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[int(pid)]


def _split(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        msg = (
            f"Expected a batch that pickles, but got {type(error).__name__}: {error}. Let loss_fn "
            "take tensors and plain containers, or set audit_every=None."
        )
        raise NotTransportable(msg) from error
    return file.getvalue(), pickler.tensors


def clone_batch(batch: Any) -> Any:
    """A copy of `batch` that shares no tensor with it; strides and alignment are kept.

    Raises:
        NotTransportable: The batch does not pickle.
    """
    structure, tensors = _split(batch)
    return _Unpickler(structure, [faithful_clone(tensor) for tensor in tensors]).load()


def fingerprint_batch(batch: Any) -> tuple[bytes, Tensor]:
    """What changes when `batch` is changed in place: its structure, and digests (n, 2) on the CPU.

    Raises:
        NotTransportable: The batch does not pickle.
    """
    structure, tensors = _split(batch)
    return structure, digest_tensors([_dense(tensor.detach()) for tensor in tensors]).cpu()


def _dense(plain: Tensor) -> Tensor:
    if plain.is_nested:
        return torch.cat([part.reshape(-1) for part in plain.unbind()])
    return plain if plain.layout is torch.strided else plain.to_dense()


def faithful_clone(tensor: Tensor) -> Tensor:
    """A detached leaf with the same values, size, strides, and alignment to 64 bytes.

    A view that spans much more memory than it has elements is copied compactly instead.
    """
    plain = tensor.detach()
    ordinary = type(plain) is Tensor and plain.layout is torch.strided and not plain.is_nested
    copied = _clone_window(plain) if ordinary and plain.numel() else plain.clone()
    return copied.requires_grad_(tensor.requires_grad)


def _clone_window(plain: Tensor) -> Tensor:
    size, stride = plain.size(), plain.stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if extent > max(_WIDEST * plain.numel(), _ALIGNMENT):
        return plain.clone()
    lead = plain.data_ptr() % _ALIGNMENT // plain.element_size()
    memory = plain.new_empty(lead + extent)
    memory[lead:].copy_(torch.as_strided(plain, (extent,), (1,), plain.storage_offset()))
    memory[:lead].zero_()
    return torch.as_strided(memory, size, stride, lead)


def pack(micro_batch: MicroBatch) -> Tensor:
    """`micro_batch` as one contiguous uint8 tensor (n,) on the CPU, with its own fingerprint.

    Raises:
        NotTransportable: The batch does not pickle.
    """
    structure, tensors = _split(micro_batch)
    file = io.BytesIO()
    file.write(bytes(_HEADER.size))
    body = io.BytesIO()
    torch.save((structure, [faithful_clone(tensor) for tensor in tensors]), body)
    file.write(body.getbuffer())
    message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    checksums = to_pairs(digest_tensor(message[_HEADER.size :])[None])[0]
    header = _HEADER.pack(_MAGIC, message.numel() - _HEADER.size, *checksums)
    message[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return message


def unpack(buffer: Tensor, device: torch.device) -> MicroBatch:
    """The micro-batch in `buffer`; what lay on an accelerator goes to `device`, the rest stays.

    Args:
        buffer: What `pack` returned, uint8 (n,) on the CPU.
        device: Where tensors of the producer's accelerator go.

    Raises:
        PayloadDamaged: The bytes are not the ones that were sent.
        NotTransportable: The bytes are right and cannot be read here.
    """
    body = _verified(buffer.contiguous())
    try:
        structure, tensors = torch.load(
            io.BytesIO(body.numpy().tobytes()), map_location=_relocate(device), weights_only=False
        )
        micro_batch: MicroBatch = _Unpickler(structure, tensors).load()
    except Exception as error:
        msg = (
            f"Expected to unpickle the micro-batch of another rank, but got "
            f"{type(error).__name__}: {error}. Run the same program and packages on every rank."
        )
        raise NotTransportable(msg) from error
    return micro_batch


def _verified(buffer: Tensor) -> Tensor:
    expected = "Expected the bytes of a micro-batch as they were sent, but got"
    do = "Check the network path between the two ranks."
    if buffer.numel() < _HEADER.size:
        msg = f"{expected} {buffer.numel()} bytes. {do}"
        raise PayloadDamaged(msg)
    magic, length, plain, mixed = _HEADER.unpack(buffer[: _HEADER.size].numpy().tobytes())
    body = buffer[_HEADER.size :]
    if magic != _MAGIC or length != body.numel():
        msg = f"{expected} a header that does not fit. {do}"
        raise PayloadDamaged(msg)
    if to_pairs(digest_tensor(body)[None])[0] != (plain, mixed):
        msg = f"{expected} another fingerprint. {do}"
        raise PayloadDamaged(msg)
    return body


def _relocate(device: torch.device) -> Callable[[Any, str], Any]:
    def place(storage: Any, location: str) -> Any:
        target = "cpu" if location == "cpu" else str(device)
        return torch.serialization.default_restore_location(storage, target)  # type: ignore[no-untyped-call]

    return place
