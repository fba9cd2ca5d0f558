"""The stand-in for the guard in ``--unguarded`` runs: it checks nothing and stops nothing.

It writes what a person would have looked at, the loss of rank 0, and beside it what nobody looks at
without a guard: whether the replicas still hold the same weights. At the end it shows both.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sdcwatch.checks.fingerprint import combine, digest_tensors, salt, to_pairs
from sdcwatch.demo.display import EntryTail
from sdcwatch.demo.settings import UNGUARDED_LOG

_LOOK_EVERY = 10


class Unguarded:
    """Same calls as the guard, none of its checks.

    Args:
        ddp: The model.
        run_dir: Where the log goes.
    """

    def __init__(self, ddp: nn.Module, run_dir: Path) -> None:
        self._ddp = ddp
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

    def record_loss(self, loss: Tensor) -> None:
        """Log the step before, and keep the loss of this one."""
        self._settle(look=self._step % _LOOK_EVERY == 0)
        self._step += 1
        self._started = time.perf_counter()
        self._loss = loss.detach()

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


_CHART_ROWS, _MOST_COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Drift:
    """What the log of an unguarded run shows.

    Attributes:
        losses: Loss of rank 0 by step; NaN where it was.
        replicas: For each rank at the end: digest, elements that differ from rank 0's, and the
            largest difference.
        apart_since: First step at which replicas were seen to differ; None if they never were.
        dissenters: Ranks that differ from the most common digest at the end.
    """

    losses: tuple[tuple[int, float], ...]
    replicas: tuple[dict[str, Any], ...]
    apart_since: int | None
    dissenters: tuple[int, ...]


def read_drift(run_dir: Path) -> Drift:
    """Read the log of an unguarded run."""
    entries = list(EntryTail(run_dir / UNGUARDED_LOG).entries())
    looks = [(e["step"], e["replicas"]) for e in entries if "replicas" in e]
    apart = [step for step, rows in looks if len({r["digest"] for r in rows}) > 1]
    last = tuple(looks[-1][1]) if looks else ()
    common = Counter(r["digest"] for r in last).most_common(1)
    return Drift(
        losses=tuple((e["step"], float(e["loss"])) for e in entries),
        replicas=last,
        apart_since=apart[0] if apart else None,
        dissenters=tuple(i for i, r in enumerate(last) if r["digest"] != common[0][0]),
    )


def tell_drift(drift: Drift, console: Console) -> None:
    """Print the loss curve, the digest of every replica, and what follows from the two."""
    console.print("\nWhat a person watching the loss sees", style="bold")
    for line in chart(drift.losses):
        console.print(line, highlight=False, markup=False)
    table = Table(title="What nobody looks at: the weights of each replica", title_justify="left")
    for heading in ("rank", "digest of all weights", "elements that differ", "largest difference"):
        table.add_column(heading, justify="right" if heading != "rank" else "left")
    for rank, row in enumerate(drift.replicas):
        style = "bold red" if rank in drift.dissenters else ""
        cells = (str(rank), row["digest"], f"{row['elements']:,}", f"{row['apart']:.3g}")
        table.add_row(*cells, style=style)
    console.print(table)
    console.print(conclusion(drift), highlight=False)


def conclusion(drift: Drift) -> str:
    """One or two sentences about what happened."""
    finite = [loss for _, loss in drift.losses if math.isfinite(loss)]
    if not finite:
        return "No step was finished."
    course = f"The loss went from {finite[0]:.2f} to {finite[-1]:.2f}. "
    if drift.apart_since is None:
        return course + "All replicas hold the same weights."
    who = ", ".join(map(str, drift.dissenters))
    return course + (
        f"Rank {who} holds other weights than the rest, seen from step {drift.apart_since} on. "
        "Nothing reported it, and every checkpoint since then was written as if all were well."
    )


def chart(losses: Sequence[tuple[int, float]]) -> list[str]:
    """A curve in text: one column per group of steps, the mean of its finite losses."""
    finite = [loss for _, loss in losses if math.isfinite(loss)]
    if not finite:
        return ["(no finite loss)"]
    low, high = min(finite), max(finite)
    scale = (_CHART_ROWS - 1) / (high - low) if high > low else 0.0
    last = losses[-1][0]
    width = min(_MOST_COLUMNS, last)
    groups: list[list[float]] = [[] for _ in range(width)]
    for step, loss in losses:
        if math.isfinite(loss):
            groups[(step - 1) * width // last].append(loss)
    rows = [[" "] * width for _ in range(_CHART_ROWS)]
    for column, group in enumerate(groups):
        if group:
            height = round((sum(group) / len(group) - low) * scale)
            rows[_CHART_ROWS - 1 - height][column] = "•"
    labels = [f"{high:6.2f}", *[" " * 6] * (_CHART_ROWS - 2), f"{low:6.2f}"]
    lines = [f"{label} ┤{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    axis = f"step 1{f'step {last}':>{max(10, width - 6)}}"
    return [*lines, f"       └{'─' * width}", f"        {axis}"]
