"""What preflight promises between threads: full, outputs only or off, and what it says to mend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdcwatch.checks.payload import MicroBatch, unpack
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.core.preflight import ATTEMPTS
from sdcwatch.core.records import Coverage, Outcome
from sdcwatch.core.topology import RankInfo, Topology
from sdcwatch.guard.preflight import Preflight
from sdcwatch.guard.replay import OwnStep, SegmentMemory
from sdcwatch.testing import ThreadExchange, run_threads

NAMES = ("embedding", "head")
Compute = Callable[[int, int], tuple[int, int]]
"""(rank, number of the computation, 0 is the step's own) -> output and gradient as numbers."""


def steady(rank: int, number: int) -> tuple[int, int]:
    return rank, rank


def outcome_of(
    compute: Compute,
    *,
    world: int = 3,
    rounds: int = 2,
    steps: int = 4,
    facts: Callable[[int], dict[str, str]] = lambda rank: {"threads": "1"},
    replayed: Callable[[int], dict[str, Any]] = lambda rank: {},
    doors: Callable[[int], tuple[str, ...]] = lambda rank: (),
    common: Callable[[int], int | str] = lambda rank: 7,
    rings: Callable[[int], Outcome] = lambda step: Outcome.PASS,
    max_payload_bytes: int = 1 << 20,
) -> tuple[Preflight, int]:
    """Preflight as rank 0 leaves it, and the step at which it had an answer; all ranks agree.

    `common` is what a rank makes of the common micro-batch, or what its replay ends with; `rings`
    what the audit of a step comes to.
    """

    def body(exchange: ThreadExchange) -> tuple[Preflight, int]:
        rank, number = exchange.rank, 0

        def computed() -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal number
            output, gradient = compute(rank, number)
            number += 1
            return torch.tensor([[output, 0]]), torch.tensor([[rank, 0], [gradient, 1]])

        def replay(message: torch.Tensor, options: ReplayOptions) -> ReplayResult:
            if options.any_environment:
                assert unpack(message, torch.device("cpu")).signatures == "0"
                value = common(rank)
                if isinstance(value, str):
                    return ReplayResult(error=value)
                return ReplayResult(torch.tensor([[value, 0]]), torch.zeros(2, 2).long())
            assert options.watch
            if found := replayed(rank):
                return ReplayResult(*computed(), **found)
            return ReplayResult(*computed())

        preflight = Preflight(
            exchange,
            replay,
            NAMES,
            topology=topology,
            memory=SegmentMemory(),
            rounds=rounds,
            facts=lambda: facts(rank),
            max_payload_bytes=max_payload_bytes,
        )
        for step in range(1, steps + 1):
            number = 0
            own = OwnStep(MicroBatch(signatures=str(rank)), *computed(), doors=doors(rank))
            if preflight.run(step, own):
                assert preflight.coverage is None
                preflight.ringed(rings(step))
            if preflight.coverage is not None:
                return preflight, step
        return preflight, 0

    topology = Topology(
        tuple(
            RankInfo(rank=r, node=f"n{r}", host="h", local_rank=0, pid=r, instance_id=f"i{r}")
            for r in range(world)
        )
    )
    rows = run_threads(world, body)
    said = [(p.coverage, p.reason, p.deterministic, p.repeats, p.notes, at) for p, at in rows]
    assert all(row == said[0] for row in said)
    return rows[0]


def test_what_repeats_on_as_many_steps_as_asked_is_covered_in_full() -> None:
    preflight, step = outcome_of(steady, rounds=3)
    assert (preflight.coverage, step) == (Coverage.FULL, 3)
    assert preflight.repeats == 3 * 2 * 3  # steps, replays each, ranks
    assert not preflight.deterministic
    assert "your own kernels" in preflight.reason


def test_gradients_that_never_repeat_leave_the_outputs_after_deterministic_kernels() -> None:
    preflight, step = outcome_of(lambda rank, number: (rank, number))
    assert (preflight.coverage, step, preflight.deterministic) == (Coverage.OUTPUTS_ONLY, 2, True)
    assert "gradients do not repeat on ranks 0, 1 and 2" in preflight.reason
    assert "only outputs are compared" in preflight.reason


def test_kernels_that_repeat_once_they_are_deterministic_are_covered_in_full() -> None:
    tried: list[int] = []

    def compute(rank: int, number: int) -> tuple[int, int]:
        tried.append(rank)
        return rank, number if tried.count(rank) <= 3 else 0  # one step and its two replays

    preflight, step = outcome_of(compute)
    assert (preflight.coverage, step, preflight.deterministic) == (Coverage.FULL, 3, True)
    assert "with deterministic kernels" in preflight.reason


def test_outputs_that_do_not_repeat_turn_audits_off_and_it_says_what_to_do() -> None:
    preflight, _ = outcome_of(lambda rank, number: (number, number))
    assert preflight.coverage is Coverage.OFF
    assert "seed every generator that the forward uses" in preflight.reason


def test_a_step_that_differs_from_its_own_replay_in_the_gradients_leaves_the_outputs() -> None:
    preflight, step = outcome_of(lambda rank, number: (rank, 1 if number == 0 else 2))
    assert (preflight.coverage, step) == (Coverage.OUTPUTS_ONLY, 1)
    assert "(head)" in preflight.reason
    assert "by another way than the outputs" in preflight.reason


def test_a_step_that_differs_from_its_own_replay_in_the_outputs_turns_audits_off() -> None:
    preflight, step = outcome_of(lambda rank, number: (1 if number == 0 else 2, rank))
    assert (preflight.coverage, step) == (Coverage.OFF, 1)
    assert "the outputs of the step differ" in preflight.reason


def test_one_rank_that_deviates_alone_is_left_to_the_audits() -> None:
    preflight, step = outcome_of(lambda rank, number: (rank, number if rank == 1 else 0))
    assert (preflight.coverage, step) == (Coverage.FULL, 2)
    assert preflight.notes[0] == (
        "rank 1 alone deviates from its own replay; the audits will tell why"
    )


def test_a_rank_in_another_environment_is_left_out_with_the_fact_that_separates_it() -> None:
    facts = lambda rank: {"threads": "2" if rank == 1 else "1", "compiled": "False"}  # noqa: E731
    preflight, step = outcome_of(steady, facts=facts)
    assert (preflight.coverage, step, preflight.differing) == (Coverage.FULL, 2, (1,))
    assert preflight.common is not None
    assert preflight.common.separating == ("threads differs: '1' on ranks 0 and 2, '2' on rank 1",)
    assert preflight.common.reason.startswith("rank 1 runs in another environment than ranks 0 and")


@pytest.mark.parametrize("fact", ["", "threads", "flush_denormal"])
@pytest.mark.parametrize("world", [3, 5])
def test_a_rank_that_makes_something_else_of_the_common_micro_batch_is_left_out(
    fact: str, world: int
) -> None:
    preflight, _ = outcome_of(
        steady,
        world=world,
        common=lambda rank: 8 if rank == 2 else 7,
        facts=lambda rank: {fact: str(rank == 2)} if fact else {},
    )
    assert (preflight.coverage, preflight.differing) == (Coverage.FULL, (2,))
    assert preflight.common is not None
    assert [f.partition(" ")[0] for f in preflight.common.separating] == ([fact] if fact else [])
    assert preflight.common.reason in preflight.notes
    assert "rank 2 computes other bits than" in preflight.common.reason


@pytest.mark.parametrize("world", [2, 4])
def test_without_a_majority_the_audits_are_off_and_both_sides_are_told(world: int) -> None:
    preflight, step = outcome_of(
        steady,
        world=world,
        common=lambda rank: rank % 2,
        facts=lambda rank: {"threads": str(rank % 2)},
    )
    assert (preflight.coverage, step, preflight.differing) == (Coverage.OFF, 1, ())
    assert "not the same function on every rank" in preflight.reason
    assert "threads differs" in preflight.reason


def test_a_rank_whose_replay_of_the_common_micro_batch_raises_is_left_out() -> None:
    said = "RuntimeError: 1 tensors with a gradient were returned, not 2"
    preflight, _ = outcome_of(steady, common=lambda rank: said if rank == 0 else 7)
    assert preflight.differing == (0,)
    assert preflight.common is not None
    assert said in preflight.common.reason


def test_memory_that_runs_out_once_is_tried_again_without_other_kernels() -> None:
    left = dict.fromkeys(range(3), ATTEMPTS - 1)

    def replayed(rank: int) -> dict[str, Any]:
        if rank != 1 or not left[rank]:
            return {}
        left[rank] -= 0.5  # two replays a step
        return {"error": "OutOfMemoryError: 2 GiB"}

    preflight, step = outcome_of(steady, steps=8, replayed=replayed)
    assert (preflight.coverage, step) == (Coverage.FULL, ATTEMPTS + 1)
    assert not preflight.deterministic
    always, step = outcome_of(
        steady, replayed=lambda rank: {"error": "OutOfMemoryError: 2 GiB"} if rank == 1 else {}
    )
    assert (always.coverage, step) == (Coverage.OFF, ATTEMPTS)
    assert "OutOfMemoryError" in always.reason


@pytest.mark.parametrize("outcome", [Outcome.NOT_REPRODUCED, Outcome.UNATTRIBUTED])
def test_full_coverage_takes_two_first_audits_in_a_row_without_a_mismatch(outcome: Outcome) -> None:
    preflight, step = outcome_of(
        steady, steps=6, rings=lambda s: outcome if s == 2 else Outcome.PASS
    )
    assert (preflight.coverage, step) == (Coverage.FULL, 4)
    assert not preflight.waits


def test_a_first_audit_that_did_not_match_is_followed_by_one_at_a_due_step() -> None:
    preflight, _ = outcome_of(steady, steps=3, rings=lambda s: Outcome.INCONCLUSIVE)
    assert (preflight.coverage, preflight.waits) == (None, True)


def test_a_device_that_is_named_ends_preflight_because_everything_else_repeats() -> None:
    preflight, step = outcome_of(steady, rings=lambda s: Outcome.SUSPECT)
    assert (preflight.coverage, step) == (Coverage.FULL, 2)


def test_a_replay_that_raises_turns_audits_off_with_its_words() -> None:
    text = "AttributeError: 'GPT' object has no attribute 'module'"
    preflight, _ = outcome_of(steady, replayed=lambda rank: {"error": text} if rank == 2 else {})
    assert preflight.coverage is Coverage.OFF
    assert text in preflight.reason
    assert "must be callable again with the same inputs" in preflight.reason


@pytest.mark.parametrize(
    ("found", "says", "local"),
    [
        ({"collectives": ("dp",)}, "the forward runs a collective on rank 1 (dp)", False),
        (
            {"trace": ("parameter head",)},
            "the forward changes what no replay can put back on rank 1 (parameter head)",
            True,
        ),
        ({"not_run": "the weights were changed"}, "the weights were changed", True),
    ],
)
def test_a_clause_that_does_not_hold_on_one_rank_turns_audits_off_for_all(
    found: dict[str, Any], says: str, local: bool
) -> None:
    preflight, step = outcome_of(steady, replayed=lambda rank: found if rank == 1 else {})
    assert (preflight.coverage, step, preflight.local) == (Coverage.OFF, 1, local)
    assert says in preflight.reason
    assert "rank 1" in preflight.reason


def test_what_the_step_itself_showed_needs_no_replay() -> None:
    door = "MulBackward0 -> parameter head"
    preflight, step = outcome_of(steady, doors=lambda rank: (door,) if rank != 1 else ())
    assert (preflight.coverage, step) == (Coverage.OFF, 1)
    assert "by another way than its outputs on ranks 0 and 2" in preflight.reason
    assert door in preflight.reason


def test_a_micro_batch_above_the_limit_turns_audits_off_and_says_what_to_do() -> None:
    preflight, _ = outcome_of(steady, max_payload_bytes=16)
    assert preflight.coverage is Coverage.OFF
    assert "raise it, or compute the loss inside the module" in preflight.reason


def test_asking_again_keeps_deterministic_kernels_on() -> None:
    preflight, _ = outcome_of(steady)
    preflight.restart()
    assert (preflight.coverage, preflight.repeats, preflight.deterministic) == (None, 0, True)


def test_the_record_says_what_an_audit_sends_and_advises_where_it_is_much() -> None:
    said, _ = outcome_of(steady)
    assert "an audit sends 0.00 MiB from each rank to another" in said.notes
