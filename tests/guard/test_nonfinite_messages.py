"""Check 1 between ranks: little crosses, and an overflow of the loss scale replays nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdcwatch.core.nonfinite import REPLAYED, NonfiniteJudgement, RankFinite, plan_own_replays
from sdcwatch.core.records import Cause, Outcome
from sdcwatch.core.topology import RankInfo, Topology
from sdcwatch.guard.nonfinite import NonfiniteInvestigation, pack_facts, unpack_facts
from sdcwatch.testing import ThreadExchange, run_threads

CLEAN = RankFinite(
    rank=0, local=False, reduced=False, loss=False, weights=False, buckets_reduced=0,
    buckets_expected=0,
)  # fmt: skip
MARKS = ("local", "reduced", "loss", "weights", "loss_scaled", "reduced_nan", "arrived", "nan")


@pytest.mark.parametrize("mark", MARKS)
def test_what_a_rank_saw_arrives_in_twenty_bytes(mark: str) -> None:
    own = replace(CLEAN, buckets_reduced=2**40, buckets_expected=2**41, **{mark: True})

    rows = [pack_facts(CLEAN, 0), pack_facts(own, 70_000)]

    facts, counts = unpack_facts(rows)
    assert facts == [CLEAN, replace(own, rank=1)]
    assert counts == [0, 2**16 - 1]
    assert {len(row) for row in rows} == {20}


def topology(world: int, domains: int) -> Topology:
    return Topology(
        tuple(
            RankInfo(
                rank=r, node=f"n{r % domains}", host="h", local_rank=r, pid=r,
                instance_id=f"i{r % domains}",
            )
            for r in range(world)
        )
    )  # fmt: skip


def investigate(
    world: int, domains: int, own: dict[int, RankFinite]
) -> list[tuple[NonfiniteJudgement, list[str], int]]:
    def body(exchange: ThreadExchange) -> tuple[NonfiniteJudgement, list[str], int]:
        replays: list[Any] = []

        def replay(*arguments: Any) -> Any:
            replays.append(arguments)
            raise AssertionError

        check = NonfiniteInvestigation(
            exchange, topology(world, domains), replay, torch.device("cpu")
        )
        seen = replace(own[exchange.rank], rank=exchange.rank)
        judgement = check.run(7, seen, [object()] * 3)  # type: ignore[list-item]
        return judgement, exchange.calls, len(replays)

    return run_threads(world, body)


@pytest.mark.parametrize("domains", [1, 6])
def test_an_overflow_of_the_scale_is_one_gather_and_no_replay(domains: int) -> None:
    overflow = replace(CLEAN, local=True, reduced=True, loss_scaled=True)

    for judgement, calls, replays in investigate(6, domains, dict.fromkeys(range(6), overflow)):
        assert (judgement.outcome, judgement.cause) == (Outcome.REPRODUCIBLE, Cause.SCALING)
        assert (calls, replays) == (["gather"], 0)


def test_why_a_rank_cannot_be_replayed_is_told_by_that_rank_alone() -> None:
    own = dict.fromkeys(range(4), replace(CLEAN, reduced=True))
    own[2] = replace(own[2], local=True, nan=True, not_replayable="2 earlier ones were not kept")

    rows = investigate(4, 4, own)

    assert all(calls == ["gather", "max_int64s", "max_int64s"] for _, calls, _ in rows)
    assert {j.reason for j, _, _ in rows} == {rows[0][0].reason}
    assert rows[0][0].outcome is Outcome.UNATTRIBUTED
    assert "rank 2 cannot be replayed: 2 earlier ones were not kept" in rows[0][0].reason


def test_which_parameters_were_not_reduced_is_told_by_the_first_rank_that_left_some_out() -> None:
    own = dict.fromkeys(range(4), replace(CLEAN, buckets_reduced=3, buckets_expected=3))
    short = replace(own[2], buckets_reduced=2, not_reduced=("a", "b", "c"), not_reduced_total=5)

    for judgement, _, _ in investigate(4, 4, {**own, 2: short, 3: replace(short, not_reduced=())}):
        assert judgement.outcome is Outcome.NOT_REDUCED
        assert judgement.reason.startswith(
            "gradients not reduced: 2 of 3 buckets on ranks 2 and 3, without a, b, c and 2 more; "
        )


def test_without_another_domain_a_few_ranks_replay_their_own() -> None:
    flagged = replace(CLEAN, local=True, reduced=True, loss_scaled=True, nan=True)
    facts = [replace(flagged, rank=r) for r in range(40)]

    assert plan_own_replays(facts) == tuple(range(REPLAYED))
    assert plan_own_replays([replace(f, nan=False) for f in facts]) == ()
    assert plan_own_replays([replace(f, loss_scaled=f.rank > 0) for f in facts]) == ()
