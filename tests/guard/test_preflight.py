"""What preflight promises between threads: full, outputs only or off, and what it says to mend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.core.records import Coverage
from sdcwatch.guard.preflight import Preflight
from sdcwatch.guard.replay import OwnStep
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
    max_payload_bytes: int = 1 << 20,
) -> tuple[Preflight, int]:
    """Preflight as rank 0 leaves it, and the step at which it had an answer; all ranks agree."""

    def body(exchange: ThreadExchange) -> tuple[Preflight, int]:
        rank, number = exchange.rank, 0

        def computed() -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal number
            output, gradient = compute(rank, number)
            number += 1
            return torch.tensor([[output, 0]]), torch.tensor([[rank, 0], [gradient, 1]])

        def replay(_: torch.Tensor, options: ReplayOptions) -> ReplayResult:
            assert options.watch
            if found := replayed(rank):
                return ReplayResult(*computed(), **found)
            return ReplayResult(*computed())

        preflight = Preflight(
            exchange,
            replay,
            NAMES,
            rounds=rounds,
            facts=lambda: facts(rank),
            max_payload_bytes=max_payload_bytes,
        )
        for step in range(1, steps + 1):
            number = 0
            own = OwnStep(MicroBatch(), *computed(), doors=doors(rank))
            worth_an_audit = preflight.run(step, own)
            assert worth_an_audit is (preflight.coverage is Coverage.FULL)
            if preflight.coverage is not None:
                return preflight, step
        return preflight, 0

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
    preflight, step = outcome_of(lambda rank, number: (rank, number if rank == 1 else 0), rounds=1)
    assert (preflight.coverage, step) == (Coverage.FULL, 1)
    assert preflight.notes[0] == (
        "rank 1 alone deviates from its own replay; the audits will tell why"
    )


def test_ranks_in_different_environments_are_not_compared_and_nobody_is_blamed() -> None:
    facts = lambda rank: {"threads": "2" if rank == 1 else "1", "compiled": "False"}  # noqa: E731
    preflight, step = outcome_of(steady, facts=facts)
    assert (preflight.coverage, step) == (Coverage.OFF, 1)
    assert preflight.reason == (
        "ranks run different software: threads differs: '1' on ranks 0 and 2, '2' on rank 1"
    )


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
