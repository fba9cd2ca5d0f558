"""Who reports a run at its end, and how long that may take."""

from __future__ import annotations

from collections.abc import Sequence

from sdcwatch.config import GuardConfig
from sdcwatch.core.topology import Topology
from sdcwatch.errors import Desync, RankGone
from sdcwatch.sinks.base import SCRAPE_SECONDS
from sdcwatch.sinks.build import exporting_ranks

_LOCAL_SECONDS = 2.0  # for the event log and the summary


def exporters(config: GuardConfig, topology: Topology) -> tuple[int, ...]:
    """Ranks that report the run to somebody, and leave before those that do not."""
    if config.telemetry == "off":
        return (0,)  # it still writes the event log
    return exporting_ranks(topology.ranks, config.telemetry.export)


def report_later(exporters: Sequence[int], error: BaseException | None) -> list[int]:
    """Those of `exporters` that report nothing while this rank is there; pure.

    Who is gone never will. Who went past an operation that this rank waited in waits for it in
    turn, in a collective of DDP that ends when this rank has left.

    Args:
        exporters: Ranks that report the run.
        error: What ends it on this rank.
    """
    absent = error.ranks if isinstance(error, Desync | RankGone) else ()
    return [rank for rank in exporters if rank in absent]


def export_seconds(config: GuardConfig) -> float:
    """The longest that may take at the end."""
    telemetry = config.telemetry
    if telemetry == "off":
        return _LOCAL_SECONDS
    return _LOCAL_SECONDS + telemetry.close_seconds + telemetry.linger_seconds + SCRAPE_SECONDS
