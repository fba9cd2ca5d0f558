"""What an audit puts on the wire, and how it reads it: micro-batches, tables of results."""

from __future__ import annotations

import torch

from sdcwatch.checks.fingerprint import digest_tensor
from sdcwatch.checks.payload import MicroBatch, NotTransportable, PayloadDamaged, pack, unpack


def pack_or_nothing(micro_batch: MicroBatch) -> torch.Tensor:
    """The packed micro-batch, or no bytes if it does not pickle: the receiver reports that."""
    try:
        return pack(micro_batch)
    except NotTransportable:
        return torch.empty(0, dtype=torch.uint8)


def unpack_or_error(payload: torch.Tensor, device: torch.device) -> MicroBatch | str:
    """The micro-batch in `payload`, or why it cannot be read here; "transport" if damaged."""
    if payload.numel() == 0:
        return "NotTransportable: the batch does not pickle on the sending rank"
    try:
        return unpack(payload, device)
    except PayloadDamaged:
        return "transport"
    except NotTransportable as error:
        return f"NotTransportable: {error}"


def result_table(loss: tuple[int, int], gradients: torch.Tensor | None) -> torch.Tensor:
    """Loss digest and gradient fingerprints as one int64 (1 + parameters, 2) CPU tensor."""
    signed = [v - 2**64 if v >= 2**63 else v for v in loss]
    head = torch.tensor([signed], dtype=torch.int64)
    return head if gradients is None else torch.cat([head, gradients.cpu()])


def value_of(table: torch.Tensor) -> str:
    """One opaque word that is equal exactly if two tables are."""
    return "-".join(f"{v & (2**64 - 1):016x}" for v in digest_tensor(table).tolist())


def frame_table(table: torch.Tensor) -> torch.Tensor:
    """A table and its own fingerprint as bytes."""
    return torch.cat([table, digest_tensor(table).reshape(1, 2)]).view(torch.uint8).flatten()


def unframe_table(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `frame_table`.

    Raises:
        PayloadDamaged: The fingerprint does not fit.
    """
    words = data.view(torch.int64).reshape(-1, 2)
    table = words[:-1]
    if not torch.equal(digest_tensor(table), words[-1]):
        msg = "Expected the table that was sent, but its fingerprint differs. Check the network."
        raise PayloadDamaged(msg)
    return table
