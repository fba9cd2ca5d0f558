"""The all-reduce site: a DDP communication hook that reduces as plain DDP does, then corrupts.

DDP requires the annotation of the second parameter at run time, hence no
``from __future__ import annotations`` in this module.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

Corrupt = Callable[[torch.Tensor, GradBucket, Sequence[torch.Tensor]], torch.Tensor]
CommHook = tuple[object, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]


class GradientAliases:
    """Which gradients were views of a DDP bucket before the current backward.

    DDP multiplies a gradient by 1/W when it copies it into the bucket, but divides one that
    already lives there, and the bits differ unless W is a power of two. A hook that is to reduce
    bit for bit as plain DDP does has to know which is which, and can only see it beforehand.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._storages: dict[int, int] = {}

    def look(self) -> None:
        """Note where every gradient lives; call it when a backward starts."""
        self._storages = {
            id(p): p.grad.untyped_storage().data_ptr()
            for p in self._parameters
            if p.grad is not None and p.grad.layout is torch.strided
        }

    def divide(self, bucket: GradBucket, world_size: int) -> None:
        """Turn the sum over ranks that is to come into a mean, with the bits of plain DDP."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            buffer.div_(world_size)
            return
        here = buffer.untyped_storage().data_ptr()
        lived_here = [self._storages.get(id(p)) == here for p in bucket.parameters()]
        if not any(lived_here):
            buffer.mul_(1.0 / world_size)
            return
        for gradient, view in zip(bucket.gradients(), lived_here, strict=True):
            gradient.div_(world_size) if view else gradient.mul_(1.0 / world_size)


def corrupting_hook(process_group: Any, aliases: GradientAliases, corrupt: Corrupt) -> CommHook:
    """The pair that `DistributedDataParallel.register_comm_hook` takes.

    Args:
        process_group: The group of the all-reduce; None for the default group.
        aliases: Looked at when the backward starts.
        corrupt: Called with the reduced bucket, the bucket and the views of its gradients;
            returns the tensor that DDP is to use.
    """

    def all_reduce_with_faults(
        state: object, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        aliases.divide(bucket, dist.get_world_size(process_group))
        views = [] if buffer.is_sparse else bucket.gradients()
        work = dist.all_reduce(buffer, group=process_group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: corrupt(done.value()[0], bucket, views))

    return process_group, all_reduce_with_faults
