"""The exchange over real gloo, held against the one between threads by the same tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdcwatch.core.records import Outcome
from sdcwatch.errors import Desync
from sdcwatch.guard.exchange import NEUTRAL, Exchange, GlooExchange, Operation, agree
from sdcwatch.guard.fingerprint import ReplicaSet, WeightCheck
from sdcwatch.testing import GlooPool, ThreadExchange, run_threads

Body = Callable[[Exchange], Any]


def maximum(exchange: Exchange) -> tuple[int, ...]:
    return exchange.max_int64s((exchange.rank, -exchange.rank, NEUTRAL, 2**62), "a test")


def gathered(exchange: Exchange) -> list[bytes]:
    return exchange.gather(b"x" * exchange.rank, "a test")


def ring(exchange: Exchange) -> list[int]:
    me, world = exchange.rank, exchange.world_size
    sent = torch.full((me + 1,), me, dtype=torch.uint8)
    got = exchange.route({(me + 1) % world: sent}, [(me - 1) % world], "a test")
    return [int(v) for v in got[(me - 1) % world]]


def one_to_two(exchange: Exchange) -> list[int]:
    outgoing = {1: torch.tensor([7], dtype=torch.uint8)} if exchange.rank == 0 else {}
    if exchange.rank == 0:
        outgoing[2] = torch.empty(0, dtype=torch.uint8)
    got = exchange.route(outgoing, [0] if exchange.rank in (1, 2) else [], "a test")
    return [int(v) for tensor in got.values() for v in tensor]


def out_of_step(exchange: Exchange) -> str:
    operation = Operation.SAVE if exchange.rank == 0 else Operation.STEP
    try:
        agree(exchange, operation, 7)
    except Desync as error:
        return str(error)
    return "no error"


def disagreement(exchange: Exchange) -> tuple[Any, ...]:
    """Rank 2 holds other bits in all of a hundred tensors, then in one."""
    said: list[Any] = []
    for wrong in (range(100), (41,)):
        named = [(f"w{i}", torch.full((3,), float(i))) for i in range(100)]
        for i in wrong if exchange.rank == 2 else ():
            named[i][1][1] += 1
        check = WeightCheck(ReplicaSet(exchange, lambda named=named: named))  # type: ignore[misc]
        assert not check.equal("a test")
        judgement = check.dissent("a test", None)
        differing = judgement.disagreements
        said += [judgement.outcome, judgement.reason, len(differing), differing[0].note]
    return tuple(said)


def on_gloo(rank: int, group: Any, name: str) -> Any:
    return globals()[name](GlooExchange(group))


@pytest.fixture(params=["threads", pytest.param("gloo", marks=pytest.mark.dist)])
def everywhere(request: pytest.FixtureRequest) -> Callable[[Body, int], list[Any]]:
    if request.param == "threads":
        return lambda body, world: run_threads(world, lambda e: body(e))
    pool: GlooPool = request.getfixturevalue("pool")
    return lambda body, world: pool.run(on_gloo, world, body.__name__)


def test_max_int64s_takes_the_largest_of_each(everywhere: Callable[[Body, int], list[Any]]) -> None:
    assert everywhere(maximum, 3) == [(2, 0, NEUTRAL, 2**62)] * 3


def test_gather_keeps_messages_of_any_length_in_rank_order(
    everywhere: Callable[[Body, int], list[Any]],
) -> None:
    assert everywhere(gathered, 4) == [[b"", b"x", b"xx", b"xxx"]] * 4


def test_route_carries_messages_of_different_sizes_around_a_ring(
    everywhere: Callable[[Body, int], list[Any]],
) -> None:
    assert everywhere(ring, 3) == [[2, 2, 2], [0], [1, 1]]


def test_route_lets_ranks_stand_aside_and_send_nothing(
    everywhere: Callable[[Body, int], list[Any]],
) -> None:
    assert everywhere(one_to_two, 4) == [[], [7], [], []]


def test_ranks_at_different_operations_all_learn_who_is_where(
    everywhere: Callable[[Body, int], list[Any]],
) -> None:
    said = everywhere(out_of_step, 3)
    assert len(set(said)) == 1
    assert "rank 0: save_checkpoint of step 7" in said[0]
    assert "rank 2: the end of the backward of step 7" in said[0]


def test_of_a_disagreement_the_tensors_that_differ_are_gathered_and_a_few_of_them_looked_at(
    everywhere: Callable[[Body, int], list[Any]],
) -> None:
    rows = everywhere(disagreement, 4)
    assert rows == [rows[0]] * 4
    every, one = rows[0][:4], rows[0][4:]
    assert "rank 2 dissents from the majority of 4" in every[1]
    assert every[2] == 64
    assert "rank 2 dissents from the majority of 4 on 1 of 100 tensors (w41)" in one[1]
    assert (one[0], one[2]) == (Outcome.SUSPECT, 1)
    assert "element 1" in one[3]


def test_a_message_that_nobody_expects_is_an_error_between_threads() -> None:
    def body(exchange: ThreadExchange) -> None:
        exchange.route({0: torch.zeros(1, dtype=torch.uint8)}, [], "a test")

    with pytest.raises(AssertionError, match="expects nothing"):
        run_threads(2, body)


def in_two_groups(rank: int, group: Any, first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    """Groups with the same first and last rank, and as many; ranks in one of them come early."""
    found: dict[tuple[int, ...], list[int]] = {}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in (first, second)}
    for ranks, one in groups.items():
        if rank in ranks:
            exchange = GlooExchange(one, deadline_seconds=20.0)
            found[ranks] = [int(row) for row in exchange.gather(str(rank).encode(), "a test")]
            exchange.close()
    return found


def test_groups_that_overlap_are_never_cross_wired(pool: GlooPool) -> None:
    first, second = (0, 1, 2, 5), (0, 3, 4, 5)
    for rank, found in enumerate(pool.run(in_two_groups, 6, first, second)):
        assert found == {ranks: list(ranks) for ranks in (first, second) if rank in ranks}
