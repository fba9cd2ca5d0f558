"""Which ranks export: a function of the topology and of nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdcwatch.config import Export
    from sdcwatch.core.topology import RankInfo


def exporting_ranks(ranks: Sequence[RankInfo], export: Export) -> tuple[int, ...]:
    """The ranks that export metrics.

    Args:
        ranks: Identity of each rank.
        export: "leader": the lowest rank; "node": the lowest rank of each node; "all".
    """
    ordered = sorted(ranks, key=lambda info: info.rank)
    if export == "all":
        return tuple(info.rank for info in ordered)
    if export == "node":
        first: dict[str, int] = {}
        for info in ordered:
            first.setdefault(info.node, info.rank)
        return tuple(sorted(first.values()))
    return tuple(info.rank for info in ordered[:1])
