"""The stand-in for the guard in ``--unguarded`` runs: it checks nothing and stops nothing.

It writes what a person would have looked at, the loss of rank 0, and beside it what nobody looks at
without a guard: whether the replicas still hold the same weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdcwatch.checks.fingerprint import combine, digest_tensors, salt, to_pairs
from sdcwatch.demo.settings import UNGUARDED_LOG
from sdcwatch.demo.text import Batch

_LOOK_EVERY = 10


class Unguarded:
    """Same calls as the guard, none of its checks.

    Args:
        ddp: The model.
        loss_fn: ``loss_fn(model, batch)``.
        run_dir: Where the log goes.
    """

    def __init__(
        self, ddp: nn.Module, loss_fn: Callable[[nn.Module, Batch], Tensor], run_dir: Path
    ) -> None:
        self._ddp, self._loss_fn = ddp, loss_fn
        self._path = run_dir / UNGUARDED_LOG
        self._step = 0
        self._loss: Tensor | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> Unguarded:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._settle(look=True)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch."""
        self._settle(look=self._step % _LOOK_EVERY == 0)
        self._step += 1
        self._started = time.perf_counter()
        self._loss = self._loss_fn(self._ddp, batch)
        return self._loss

    def save_checkpoint(self, save: Callable[[], object]) -> None:
        """Save on rank 0, whatever the weights are."""
        if dist.get_rank() == 0:
            save()

    def _settle(self, *, look: bool) -> None:
        """Log the step that just ended."""
        if self._loss is None:
            return
        entry: dict[str, Any] = {
            "step": self._step,
            "loss": repr(self._loss.item()),
            "seconds": round(time.perf_counter() - self._started, 4),
        }
        if look:
            entry["replicas"] = self._replicas()
        if dist.get_rank() == 0:
            with self._path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")

    @torch.no_grad()
    def _replicas(self) -> list[dict[str, Any]]:
        """Per rank: the digest of its weights, and how far they are from those of rank 0."""
        named = list(self._ddp.named_parameters())
        digest = combine(
            digest_tensors([p for _, p in named]), tuple(salt(name, p) for name, p in named)
        )
        (pair,) = to_pairs(digest.reshape(1, 2))
        own_P = torch.cat([p.flatten() for _, p in named])
        first_P = own_P.clone()
        dist.broadcast(first_P, src=0)
        apart_P = (own_P - first_P).abs()
        mine = {
            "digest": f"{pair[0]:016x}",
            "elements": int((apart_P != 0).sum()),
            "apart": float(apart_P.max()),
        }
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, mine)
        return rows
