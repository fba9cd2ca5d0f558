"""Digests of the gradients of one backward, taken as they arrive at the parameters.

The producer's own backward and the replay use the same recorder, so both see the same thing: the
gradient of this backward, before it is accumulated, after every other tensor hook. Two rules make
the digests comparable:

- A parameter inside a reentrant checkpoint receives one gradient per recomputed region. Its digests
  are kept in the order of arrival, which the engine repeats, and mixed into one.
- A sparse gradient is coalesced; its indices and values are digested.

No call here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sdcwatch.checks.fingerprint import digest_tensor, digest_tensors

SMALL_BYTES = 1 << 20
"""Gradients up to this size are digested together."""
WAITING_BYTES = 32 << 20
"""Copies of small gradients that may wait."""


def digest_gradient(gradient: Tensor) -> Tensor:
    """The int64 digest (2,) of a dense or sparse gradient, on its device."""
    gradient = gradient.detach()
    if gradient.layout is torch.strided:
        return digest_tensor(gradient)
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        return _mixed([digest_tensor(gradient.indices()), digest_tensor(gradient.values())])
    return digest_tensor(gradient.to_dense())


def _mixed(digests: Sequence[Tensor]) -> Tensor:
    return digests[0] if len(digests) == 1 else digest_tensor(torch.stack(tuple(digests)))


class GradientLog:
    """The digests of one backward, by position of the parameter.

    A digest has a fixed cost of some thousand elements, and a list is digested at about the cost of
    one. So small gradients are set aside as copies, because the engine may hand their memory to
    `.grad`, which DDP overwrites, and digested together.
    """

    def __init__(self, size: int) -> None:
        self._digests: list[list[Tensor]] = [[] for _ in range(size)]
        self._waiting: list[tuple[int, int, Tensor]] = []
        self._waiting_bytes = 0

    def add(self, index: int, gradient: Tensor) -> None:
        """Record a gradient that arrived at parameter `index`."""
        size_bytes = gradient.numel() * gradient.element_size()
        if gradient.layout is not torch.strided or size_bytes > SMALL_BYTES:
            self._digests[index].append(digest_gradient(gradient))
            return
        slot = len(self._digests[index])
        copied = gradient.detach().clone()
        self._digests[index].append(copied)  # until `_flush` puts its digest here
        self._waiting.append((index, slot, copied))
        self._waiting_bytes += size_bytes
        if self._waiting_bytes > WAITING_BYTES:
            self._flush()

    @property
    def arrived(self) -> set[int]:
        """Positions of the parameters at which a gradient has arrived."""
        return {index for index, digests in enumerate(self._digests) if digests}

    def table(self, device: torch.device) -> Tensor:
        """The int64 table (n, 2); a parameter without a gradient has the digest of None."""
        self._flush()
        table_N2 = digest_tensors([None] * len(self._digests)).to(device)
        arrived = [i for i, digests in enumerate(self._digests) if digests]
        if arrived:
            rows = [_mixed(self._digests[i]).to(device) for i in arrived]
            table_N2[torch.tensor(arrived, device=device)] = torch.stack(rows)
        return table_N2

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for device in dict.fromkeys(copy.device for _, _, copy in waiting):
            here = [entry for entry in waiting if entry[2].device == device]
            for (index, slot, _), row in zip(
                here, digest_tensors([copy for _, _, copy in here]).unbind(), strict=True
            ):
                self._digests[index][slot] = row


class GradientHooks:
    """Tensor hooks on parameters that pass each gradient on; `remove` is idempotent.

    Args:
        tensors: The leaves; those that need no gradient get no hook.
        arrived: Called with the position and the gradient. What it returns replaces the gradient,
            None leaves it as it is.
    """

    def __init__(
        self, tensors: Sequence[Tensor], arrived: Callable[[int, Tensor], Tensor | None]
    ) -> None:
        self._handles = [
            tensor.register_hook(_hook(index, arrived))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
            if tensor.requires_grad
        ]

    def remove(self) -> None:
        """Take every hook off."""
        while self._handles:
            self._handles.pop().remove()


def _hook(
    index: int, arrived: Callable[[int, Tensor], Tensor | None]
) -> Callable[[Tensor | None], Tensor | None]:
    # The engine passes None where a custom function returned no gradient.
    return lambda gradient: None if gradient is None else arrived(index, gradient)
