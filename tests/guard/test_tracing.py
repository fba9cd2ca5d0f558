"""The sides of a dispute trace, and every rank comes to the same finding from what crosses."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.core.disputes import Dispute
from sdcwatch.core.records import Coverage
from sdcwatch.core.topology import RankInfo, Topology
from sdcwatch.core.trace_values import Operation, Place, Trace, TraceFinding, TraceOutcome, Value
from sdcwatch.guard.preflight import Preflight
from sdcwatch.guard.replay import OwnStep, SegmentMemory
from sdcwatch.guard.sharing import share_bytes
from sdcwatch.guard.tracing import Tracing
from sdcwatch.testing import ThreadExchange, run_threads

WORLD = 6
HELD = MicroBatch()


def trace(wrong_at: int = -1, length: int = 90) -> Trace:
    def operation(number: int) -> Operation:
        bits = "bad" if number == wrong_at else str(number)
        place = Place(f"aten::op{number}", "a.b")
        return Operation.of(
            place, (Value("float32[4][1]", str(number)),), (Value("float32[4][1]", bits),)
        )

    return Trace(tuple(map(operation, range(length))))


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 5000])
def test_what_a_few_ranks_have_to_say_reaches_all_of_them(size: int) -> None:
    draw = random.Random(size)
    said = {0: draw.randbytes(size), 2: b"\xff" * size}

    def body(exchange: ThreadExchange) -> tuple[list[bytes], list[str]]:
        own = {slot: data for slot, data in said.items() if exchange.rank == slot + 1}
        return share_bytes(exchange, own, 4, "a test"), exchange.calls

    for messages, calls in run_threads(WORLD, body):
        assert messages == [said[0], b"", said[2], b""]
        assert len(calls) <= 2


def found_by(disputes: tuple[Dispute, ...], traces: dict[int, Trace]) -> dict[int, TraceFinding]:
    def body(exchange: ThreadExchange) -> tuple[dict[int, TraceFinding], int]:
        rank = exchange.rank
        made = []

        def make(micro_batch: MicroBatch, options: object) -> Trace:
            made.append(micro_batch)
            return traces.get(rank, trace())

        held = {d.producer: HELD for d in disputes if rank in d.sides}
        return Tracing(exchange, make).findings(disputes, held, "a test"), len(made)

    rows = run_threads(WORLD, body)
    assert all(found == rows[0][0] for found, _ in rows)
    sides = {rank for d in disputes for rank in d.sides}
    assert [made for _, made in rows] == [int(rank in sides) for rank in range(WORLD)]
    return rows[0][0]


def test_every_rank_learns_in_which_operation_a_device_went_wrong() -> None:
    found = found_by((Dispute(3, 1, (1, 5)),), {3: trace(wrong_at=70)})
    assert (found[3].outcome, found[3].rank) == (TraceOutcome.DEVICE, 3)
    assert found[3].where == "aten::op70 in a.b"


def test_two_disputes_are_settled_at_once() -> None:
    disputes = (Dispute(3, 1, (1, 5)), Dispute(0, 0, (4,)))
    found = found_by(disputes, {3: trace(wrong_at=40), 0: trace(length=50)})
    assert found[3].outcome is TraceOutcome.DEVICE
    assert (found[0].outcome, found[0].operator) == (TraceOutcome.SOFTWARE, "aten::op50")


def test_without_a_dispute_nothing_is_sent() -> None:
    def body(exchange: ThreadExchange) -> tuple[dict[int, TraceFinding], list[str]]:
        tracing = Tracing(exchange, lambda micro_batch, options: trace())
        return tracing.findings((), {}, "a test"), exchange.calls

    assert run_threads(WORLD, body) == [({}, [])] * WORLD


def test_a_rank_that_cannot_trace_makes_the_finding_blind_with_the_reason() -> None:
    found = found_by((Dispute(3, 1, (1, 5)),), {3: Trace(blind="compiled code runs")})
    assert (found[3].outcome, found[3].detail) == (TraceOutcome.BLIND, "compiled code runs")


def test_a_rank_asked_alone_says_what_it_does_not_repeat() -> None:
    unrepeated = TraceFinding(
        outcome=TraceOutcome.NONDETERMINISTIC, operator="aten::index_add_", detail="other bits"
    )
    mine = Trace(trace().operations, unrepeated=unrepeated)
    assert found_by((Dispute(2, 2),), {2: mine})[2] == unrepeated
    assert found_by((Dispute(2, 2),), {})[2].outcome is TraceOutcome.EQUAL


def test_wrong_bits_that_are_new_each_time_are_the_device_where_all_others_repeat() -> None:
    unrepeated = TraceFinding(outcome=TraceOutcome.NONDETERMINISTIC, operator="aten::op30")
    restless = Trace(trace(wrong_at=30).operations, unrepeated=unrepeated)
    found = found_by((Dispute(3, 1, (1, 5)),), {3: restless})[3]
    assert (found.outcome, found.operator, found.rank) == (TraceOutcome.DEVICE, "aten::op30", 3)
    found = found_by((Dispute(3, 1, (1, 5)),), {3: restless, 5: restless})[3]
    assert found.outcome is TraceOutcome.NONDETERMINISTIC


def test_preflight_says_on_every_rank_which_operation_does_not_repeat() -> None:
    found = TraceFinding(
        outcome=TraceOutcome.NONDETERMINISTIC,
        operator="aten::index_add_",
        module="blocks.3",
        detail="other bits",
        advice="Set this.",
    )

    def body(exchange: ThreadExchange) -> tuple[Preflight, int]:
        asked: list[MicroBatch] = []
        numbers = itertools.count()

        def make(micro_batch: MicroBatch, options: object) -> Trace:
            asked.append(micro_batch)
            return Trace(trace().operations, unrepeated=found)

        def replay(_: torch.Tensor, options: ReplayOptions) -> ReplayResult:
            number = next(numbers) if exchange.rank < 2 else 7
            return ReplayResult(torch.tensor([[number, 0]]), torch.zeros((1, 2), dtype=torch.int64))

        preflight = Preflight(
            exchange,
            replay,
            ("weight",),
            topology=where,
            memory=SegmentMemory(),
            rounds=1,
            facts=dict,
            max_payload_bytes=1 << 20,
            trace=make,
        )
        own = OwnStep(MicroBatch(), torch.tensor([[7, 0]]), torch.zeros((1, 2), dtype=torch.int64))
        for step in (1, 2):
            preflight.run(step, own)
        return preflight, len(asked)

    where = Topology(
        tuple(
            RankInfo(rank=r, node=f"n{r}", host="h", local_rank=0, pid=r, instance_id=f"i{r}")
            for r in range(3)
        )
    )
    rows = run_threads(3, body)
    assert [asked for _, asked in rows] == [2, 2, 0]
    for preflight, _ in rows:
        assert preflight.coverage is Coverage.OFF
        assert "aten::index_add_ in blocks.3: other bits. Set this" in preflight.reason
        assert "with your own kernels replays do not repeat on ranks 0 and 1" in preflight.notes[0]
