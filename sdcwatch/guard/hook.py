"""The DDP communication hook: screens local and reduced gradients around the all-reduce.

Nothing in it reads a value on the host or raises: an exception in a communication hook breaks DDP
for good. Results wait on the device until the end of the backward.

DDP requires the annotation of the second parameter at run time, hence no
``from __future__ import annotations`` in this module.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from sdcwatch.checks.kept import KeptAttributes
from sdcwatch.checks.nonfinite import probe
from sdcwatch.guard.exchange import all_reduce_async

UserHook = tuple[Any, Callable[..., Any]]
LEARNED_BACKWARDS = 4
"""Backwards in which it is asked which parameters a bucket holds."""


class GradientProbes:
    """State of the communication hook over one synchronising backward.

    Attributes:
        buckets_total: Buckets of the model; 0 before one backward was reduced as a whole.
        local: One screen per bucket, of the local gradient before the all-reduce.
        reduced: One screen per bucket, of the reduced gradient.
        elements: Gradient elements reduced so far.
        homes: For each parameter, by id, the address of the storage that held its gradient before
            this backward.
    """

    def __init__(
        self,
        group: Any,
        world_size: int,
        on_bucket: Callable[[], None],
        user_hook: UserHook | None = None,
    ) -> None:
        self._group, self._world_size = group, world_size
        self._on_bucket: Callable[[], None] | None = on_bucket
        self._user_hook = user_hook
        self.local: list[torch.Tensor] = []
        self.reduced: list[torch.Tensor] = []
        self.elements = 0
        self.buckets: list[tuple[int, int]] = []  # number and size of each that was reduced
        self.buckets_total = 0
        self._held: dict[tuple[int, int], tuple[int, ...]] = {}
        self._backwards = 0
        self.homes: Mapping[int, int] = {}
        self._kept: KeptAttributes | None = None

    @property
    def released(self) -> bool:
        """Its guard has been closed. DDP keeps a hook for good, so it averages and nothing else."""
        return self._on_bucket is None

    def release(self) -> None:
        """Let go of the guard."""
        self.begin(self.homes)
        self._on_bucket = None

    def take_over(self, closed: "GradientProbes") -> "GradientProbes":
        """Take the place of a released screen, which DDP keeps, and return it."""
        closed.__dict__.update(self.__dict__)
        return closed

    def begin(self, homes: Mapping[int, int], *, keep: bool = False) -> None:
        """Start over, at the start of a synchronising backward.

        Args:
            homes: See the attribute.
            keep: Copy what the user's hook remembers, so that `put_back` can undo this backward.
        """
        self._kept = KeptAttributes(self._user_hook[0]) if keep and self._user_hook else None
        self.local.clear()
        self.reduced.clear()
        self.elements = 0
        self.buckets.clear()
        self._backwards += 1
        self.homes = homes

    def put_back(self) -> None:
        """The step is skipped: the user's hook remembers what it did before this backward."""
        if self._kept is not None:
            self._kept.put_back()
        self._kept = None

    def forget(self) -> None:
        """Let go of what was kept for `put_back`."""
        self._kept = None

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Screen, average over the ranks as DDP would, screen again."""
        buffer = bucket.buffer()
        if self._on_bucket is not None:
            self._on_bucket()
            self.elements += _elements(buffer, bucket)
            self._note(bucket, buffer)
            self.local.append(probe(buffer))
        if self._user_hook is not None:
            state, hook = self._user_hook
            future = hook(state, bucket)
        else:
            self._average(buffer, bucket)
            future = all_reduce_async(buffer, self._group)
        screened: torch.futures.Future[torch.Tensor] = future.then(self._reduced)
        return screened

    def _note(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        known = bucket.index(), buffer.numel()
        self.buckets.append(known)
        # DDP makes other buckets after the first backward, perhaps of the same sizes.
        if known not in self._held or self._backwards <= LEARNED_BACKWARDS:
            self._held[known] = tuple(map(id, bucket.parameters()))

    def complete(self) -> None:
        """Every gradient of the backward has been reduced: so many buckets there are."""
        self.buckets_total = len(self.buckets)

    def reduced_parameters(self) -> set[int]:
        """Ids of the parameters whose gradients were reduced in this backward."""
        return {one for known in self.buckets for one in self._held[known]}

    def _average(self, buffer: torch.Tensor, bucket: GradBucket) -> None:
        # DDP multiplies by 1/W, but divides sparse gradients and those that already were views of
        # the bucket; the bits differ unless W is a power of two.
        if buffer.is_sparse:
            buffer.div_(self._world_size)
            return
        here = buffer.untyped_storage().data_ptr()
        aliased = [self.homes.get(id(p)) == here for p in bucket.parameters()]
        if not any(aliased):
            buffer.mul_(1.0 / self._world_size)
        elif all(aliased):
            buffer.div_(self._world_size)
        else:
            for view, is_view in zip(bucket.gradients(), aliased, strict=True):
                view.div_(self._world_size) if is_view else view.mul_(1.0 / self._world_size)

    def _reduced(self, future: torch.futures.Future[Any]) -> torch.Tensor:
        value = future.value()
        tensor: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
        if not self.released:
            self.reduced.append(probe(tensor))
        return tensor


def released_probes(ddp: torch.nn.parallel.DistributedDataParallel) -> GradientProbes | None:
    """The screen that a closed guard left on a DDP model, if there is one."""
    for _, state in getattr(ddp, "_comm_hooks", ()):
        if isinstance(state, GradientProbes) and state.released:
            return state
    return None


def _elements(buffer: torch.Tensor, bucket: GradBucket) -> int:
    if buffer.is_sparse:
        return sum(p.numel() for p in bucket.parameters())
    return buffer.numel()


def guard_hook(state: GradientProbes, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function that DDP calls for each bucket."""
    future: torch.futures.Future[torch.Tensor] = state.reduce(bucket)
    return future
