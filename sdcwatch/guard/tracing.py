"""Traces of operations between ranks: the sides of a dispute trace, and every rank judges them.

What crosses does not grow with the number of ranks: outlines and sections have a largest size, and
go to all ranks by a MAX of words of which each rank fills its own. So every rank comes to the same
finding from the same bytes, and no pair of ranks needs a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayOptions
from sdcwatch.core.disputes import Dispute
from sdcwatch.core.trace import Side, judge, window_of
from sdcwatch.core.trace_values import Outline, Section, Trace, TraceFinding, TraceOutcome
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.sharing import share_bytes

MakeTrace = Callable[[MicroBatch, ReplayOptions], Trace]
"""Traces a micro-batch on this rank more than once; see `sdcwatch.checks.trace.disputed_trace`."""
SECONDS_TO_TRACE = 600.0
"""How long others wait for the traces of one rank, each far slower than a plain replay."""


class Tracing:
    """Settles disputes by traces.

    Args:
        exchange: Shares what the sides found.
        trace: Makes a trace; never raises.
    """

    def __init__(self, exchange: Exchange, trace: MakeTrace) -> None:
        self._exchange, self._trace = exchange, trace

    def findings(
        self,
        disputes: Sequence[Dispute],
        held: Mapping[int, MicroBatch],
        operation: str,
        options: ReplayOptions | None = None,
    ) -> dict[int, TraceFinding]:
        """What the traces of each dispute come to, by the rank in dispute. Every rank calls it.

        Four collectives if there are disputes, none without. The same on every rank.

        Args:
            disputes: The same on every rank.
            held: By producer, the micro-batches that this rank has.
            operation: What is being done, for errors.
            options: Of the replays.

        Raises:
            RankGone: A rank did not answer within the deadline.
        """
        if not disputes:
            return {}
        sides = [(number, rank) for number, d in enumerate(disputes) for rank in d.sides]
        # Some ranks trace and others do not: a collective in it would wait for ever.
        stopping = ReplayOptions(forbid_collectives=True, where_eager=True)
        traces = self._own(disputes, sides, held, options or stopping)
        outlines = self._outlines(sides, traces, operation)
        windows = [
            window_of([o for (n, _), o in zip(sides, outlines, strict=True) if n == number])
            for number in range(len(disputes))
        ]
        sections = self._sections(sides, traces, windows, operation)
        together = [
            [
                Side(rank, outline, section)
                for (n, rank), outline, section in zip(sides, outlines, sections, strict=True)
                if n == number
            ]
            for number in range(len(disputes))
        ]
        return {d.rank: _judged(d, mine) for d, mine in zip(disputes, together, strict=True)}

    def _own(
        self,
        disputes: Sequence[Dispute],
        sides: Sequence[tuple[int, int]],
        held: Mapping[int, MicroBatch],
        options: ReplayOptions,
    ) -> dict[int, Trace]:
        """This rank's traces, by slot; each micro-batch is traced once."""
        made: dict[int, Trace] = {}
        mine = [slot for slot, (_, rank) in enumerate(sides) if rank == self._exchange.rank]
        producers = {slot: disputes[sides[slot][0]].producer for slot in mine}
        for producer in dict.fromkeys(producers.values()):
            if producer in held:
                made[producer] = self._trace(held[producer], options)
            else:
                made[producer] = Trace(blind="the micro-batch is not held here")
        return {slot: made[producer] for slot, producer in producers.items()}

    def _outlines(
        self, sides: Sequence[tuple[int, int]], traces: Mapping[int, Trace], operation: str
    ) -> list[Outline]:
        packed = {slot: trace.outline().pack() for slot, trace in traces.items()}
        rows = share_bytes(
            self._exchange, packed, len(sides), operation, extra_seconds=SECONDS_TO_TRACE
        )
        return [_outline(row) for row in rows]

    def _sections(
        self,
        sides: Sequence[tuple[int, int]],
        traces: Mapping[int, Trace],
        windows: Sequence[range | None],
        operation: str,
    ) -> list[Section | None]:
        packed = {
            slot: trace.section(window).pack()
            for slot, trace in traces.items()
            if not trace.blind and (window := windows[sides[slot][0]]) is not None
        }
        rows = share_bytes(self._exchange, packed, len(sides), operation)
        return [_section(row) for row in rows]


def _judged(dispute: Dispute, sides: Sequence[Side]) -> TraceFinding:
    if dispute.right:
        return judge(sides[0], sides[1:])
    outline = sides[0].outline
    if outline.unrepeated is not None:
        return outline.unrepeated
    if outline.blind:
        return TraceFinding(outcome=TraceOutcome.BLIND, detail=outline.blind)
    return TraceFinding(outcome=TraceOutcome.EQUAL, detail="its traces are all the same")


def _outline(data: bytes) -> Outline:
    try:
        return Outline.unpack(data)
    except ValueError:  # damaged on its way
        return Trace(blind="the trace did not arrive").outline()


def _section(data: bytes) -> Section | None:
    try:
        return Section.unpack(data) if data else None
    except ValueError:
        return None
