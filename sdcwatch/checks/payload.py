"""The calls of one backward as a value, and as the bytes that travel to another rank.

`MicroBatch` holds all that the calls of a module and their backward depend on besides the weights.
`pack` makes it one contiguous buffer that carries a fingerprint of itself, so that a receiver can
tell a damaged message, for which nobody is named, from a wrong computation. `packed_size` is known
before anything is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sdcwatch.checks.fingerprint import digest_tensor, to_pairs
from sdcwatch.checks.module_state import Autocast, Generators
from sdcwatch.checks.serialise import (
    ALIGNMENT,
    Frozen,
    NotTransportable,
    Scope,
    Structure,
)
from sdcwatch.errors import SdcwatchError

__all__ = ["Call", "MicroBatch", "NotTransportable", "PayloadDamaged", "pack", "packed_size"]

_HEADER = struct.Struct("<8sqqQQ")  # magic, bytes of the structure and of the rest, two checksums
_MAGIC = b"sdcwmb02"


class PayloadDamaged(SdcwatchError):
    """A micro-batch arrived whose bytes are not the ones that were sent."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the module, and the gradients that arrived at its outputs.

    Attributes:
        inputs: Arguments, keyword arguments and `ModuleState` as the call found them; without a
            state (None) off audit steps.
        method: The method that a redirected forward runs; "" for `forward` itself.
        generators: When the call began.
        generators_after: When it ended, to tell a replay that a thread disturbed; None off
            audit steps.
        autocast: Around the call.
        region: Equal for calls that share one autocast region and its casts; 0 for none.
        default_dtype: Around the call.
        environment: Switches that decide bits; empty off audit steps.
        weights: int64 (2,), fingerprint of the weights; None off audit steps.
        outputs: Tensors with a gradient that the call returned.
        gradients: What arrived at each output that a gradient reached, by number of the output.
        inner: The parts of it that came from inside the call, for outputs that feed others: lists.
    """

    inputs: Frozen
    method: str
    generators: Generators
    generators_after: Generators | None
    autocast: Autocast
    region: int
    default_dtype: torch.dtype
    environment: Mapping[str, str]
    weights: Tensor | None
    outputs: int
    gradients: Mapping[int, Frozen]
    inner: Mapping[int, Frozen]

    @property
    def gradients_bytes(self) -> int:
        """Bytes of what arrived at the outputs."""
        return sum(f.size_bytes for f in (*self.gradients.values(), *self.inner.values()))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """All that the calls of one backward depend on besides the weights.

    Attributes:
        calls: In the order in which they were made.
        generators: At the first gradient.
        autocast: Around the backward.
        reentrant: A part of the graph ran a backward of its own.
        signatures: Of a compiled module: the shapes that it had seen, in order; "" otherwise.
        exact: Copies were taken at the calls (audit steps). Otherwise inputs and state are those
            found at the end of the backward.
        problem: Why it cannot be replayed, or "".
    """

    calls: tuple[Call, ...] = ()
    generators: Generators | None = None
    autocast: Autocast | None = None
    reentrant: bool = False
    signatures: str = ""
    exact: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything lies in the message."""

    structure: bytes
    tensors: tuple[Tensor, ...]
    offsets: tuple[int, ...]
    total: int


def _plan(micro_batch: MicroBatch) -> _Plan:
    structure, tensors = Structure.write(micro_batch)
    begin = _aligned(_HEADER.size + len(structure))
    offsets, end = [], begin
    for tensor in tensors:
        offsets.append(end)
        end = _aligned(end + tensor.numel() * tensor.element_size())
    return _Plan(structure, tuple(tensors), tuple(offsets), end)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def packed_size(micro_batch: MicroBatch) -> int:
    """Bytes that `pack` will give, without copying anything.

    Raises:
        NotTransportable: It does not pickle.
    """
    return _plan(micro_batch).total


def pack(micro_batch: MicroBatch) -> Tensor:
    """`micro_batch` as one contiguous uint8 tensor (n,) on the CPU, with its own fingerprint.

    Raises:
        NotTransportable: It does not pickle.
    """
    plan = _plan(micro_batch)
    message = torch.zeros(plan.total, dtype=torch.uint8, device="cpu")
    structure = torch.frombuffer(bytearray(plan.structure), dtype=torch.uint8)
    message[_HEADER.size : _HEADER.size + structure.numel()] = structure
    for tensor, offset in zip(plan.tensors, plan.offsets, strict=True):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        message[offset : offset + data.numel()].copy_(data)
    checksums = to_pairs(digest_tensor(message[_HEADER.size :])[None])[0]
    rest = plan.total - _HEADER.size
    header = _HEADER.pack(_MAGIC, len(plan.structure), rest, *checksums)
    message[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return message


def unpack(buffer: Tensor, device: torch.device) -> MicroBatch:
    """The micro-batch in `buffer`; what lay on an accelerator goes to `device`, the rest stays.

    On the CPU nothing is copied: the micro-batch reads `buffer`, which must stay as it is.

    Args:
        buffer: What `pack` returned, uint8 (n,) on the CPU.
        device: Where tensors of the producer's accelerator go.

    Raises:
        PayloadDamaged: The bytes are not the ones that were sent.
        NotTransportable: The bytes are right and cannot be read here.
    """
    buffer = buffer.contiguous()
    if buffer.data_ptr() % ALIGNMENT:
        buffer = buffer.clone()
    structure_bytes = _verify(buffer)
    begin, tensors = _aligned(_HEADER.size + structure_bytes), []
    structure = buffer[_HEADER.size : _HEADER.size + structure_bytes].numpy().tobytes()
    reader = Structure(structure, Scope(None, device))
    for shape, dtype, kind in reader.layout:
        count = dtype.itemsize
        for size in shape:
            count *= size
        data = buffer[begin : begin + count].view(dtype).view(shape)
        tensors.append(data if kind == "cpu" else data.to(device))
        begin = _aligned(begin + count)
    micro_batch: MicroBatch = reader.read(tensors)
    return micro_batch


def _verify(buffer: Tensor) -> int:
    """Check a message; returns the bytes of its structure."""
    expected = "Expected the bytes of a micro-batch as they were sent, but got"
    do = "Check the network path between the two ranks."
    if buffer.numel() < _HEADER.size:
        msg = f"{expected} {buffer.numel()} bytes. {do}"
        raise PayloadDamaged(msg)
    fields = _HEADER.unpack(buffer[: _HEADER.size].numpy().tobytes())
    magic, structure_bytes, rest, plain, mixed = fields
    body = buffer[_HEADER.size :]
    if magic != _MAGIC or rest != body.numel() or not 0 <= structure_bytes <= rest:
        msg = f"{expected} a header that does not fit. {do}"
        raise PayloadDamaged(msg)
    if to_pairs(digest_tensor(body)[None])[0] != (plain, mixed):
        msg = f"{expected} another fingerprint. {do}"
        raise PayloadDamaged(msg)
    return int(structure_bytes)


def payload_parts(micro_batch: MicroBatch) -> dict[str, int]:
    """Bytes by what they are: inputs and state, gradients at the outputs, everything else."""
    inputs = sum(call.inputs.size_bytes for call in micro_batch.calls)
    gradients = sum(call.gradients_bytes for call in micro_batch.calls)
    total = packed_size(micro_batch)
    return {"inputs": inputs, "gradients": gradients, "rest": max(0, total - inputs - gradients)}
