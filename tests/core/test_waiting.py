"""Who is late is judged by position: pure, and the same for every rank that waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdcwatch.core.waiting import (
    Answer,
    Finding,
    Position,
    Relation,
    Stage,
    describe,
    in_next_forward,
    judge_wait,
    relation,
)

SAVE_OF_10 = Position(10, Stage.SAVE, 31, "at save_checkpoint of step 10", operation=True)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Position(10, Stage.SAVE, 31, operation=True), Relation.HERE),
        (Position(10, Stage.STEP, 30), Relation.BEHIND),
        (Position(3, Stage.COMPUTING, 9), Relation.BEHIND),
        (Position(11, Stage.COMPUTING, 30), Relation.PAST),
        (Position(10, Stage.SAVE, 30), Relation.BEHIND),  # before a second save of the same step
        # The last rank came while others were asked: whoever has taken part is not past it.
        (Position(11, Stage.COMPUTING, 31), Relation.HERE),
        (Position(11, Stage.STEP, 32, operation=True), Relation.HERE),
    ],
)
def test_a_rank_that_began_the_operation_is_here_and_one_beyond_it_without_is_past(
    other: Position, expected: Relation
) -> None:
    assert relation(other, SAVE_OF_10) is expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Position(11, Stage.COMPUTING, 30), Relation.HERE),
        (Position(11, Stage.STEP, 31, operation=True), Relation.HERE),
        (SAVE_OF_10, Relation.BEHIND),
        (Position(10, Stage.STEP, 30), Relation.BEHIND),
    ],
)
def test_in_a_collective_of_ddp_only_the_place_in_the_loop_counts(
    other: Position, expected: Relation
) -> None:
    assert relation(other, Position(11, Stage.COMPUTING, 30)) is expected


@pytest.mark.parametrize(
    ("finding", "waited", "broken", "expected"),
    [
        (Finding(behind=(1,)), 60, False, Answer.WAIT),
        (Finding(behind=(1,)), 3700, False, Answer.GONE),
        (Finding(behind=(1,)), 1, True, Answer.GONE),
        (Finding(), 60, False, Answer.WAIT),
        (Finding(behind=(1,), silent=(2,)), 60, False, Answer.GONE),
        (Finding(left=(2,)), 60, False, Answer.GONE),
        (Finding(store_error="did not answer"), 60, False, Answer.GONE),
        (Finding(past=(1,), silent=(2,)), 60, True, Answer.DESYNC),
    ],
)
def test_a_rank_that_is_alive_and_behind_is_waited_for_and_nobody_else(
    finding: Finding, waited: float, broken: bool, expected: Answer
) -> None:
    answer = judge_wait(finding, waited_seconds=waited, late_seconds=3600, broken=broken)
    assert answer is expected


def test_positions_and_findings_arrive_as_they_were_sent() -> None:
    assert Position.decode(SAVE_OF_10.encode()) == SAVE_OF_10
    finding = Finding(behind=(1, 2), notes={1: "is alive, in step 9"}, steps_behind=1)
    got = Finding.decode(finding.encode(), rank=7)
    assert (got.behind, got.notes, got.elected) == ((1, 2), finding.notes, False)


def test_a_rank_that_reads_what_another_found_knows_that_it_is_here_itself() -> None:
    finding = Finding(behind=(1, 2), silent=(0,), notes={1: "is alive, in step 9"})
    got = Finding.decode(finding.encode(), rank=1)
    assert (got.behind, got.silent, got.notes) == ((2,), (0,), {})


def test_a_finding_that_another_rank_reads_keeps_whom_the_first_to_leave_missed() -> None:
    finding = Finding(left=(1, 2), followed=(1, 2), unmet=(0,))
    assert Finding.decode(finding.encode(), rank=0).named == (0,)


def test_a_finding_about_many_ranks_stays_one_line_a_person_reads() -> None:
    text = describe(Finding(silent=tuple(range(1000))))
    assert text.count("gave no sign of life") == 8
    assert text.endswith("992 more")


def test_how_far_a_rank_is_behind_is_said() -> None:
    finding = Finding(behind=(3,), notes={3: "is alive, in step 7"}, steps_behind=2)
    assert describe(finding) == "rank 3 is alive, in step 7; rank 3 alive, 2 steps behind"


def test_a_rank_in_the_forward_of_the_next_step_has_gone_past_what_lies_before_it() -> None:
    saving = Position(4, Stage.SAVE, 9, "at save_checkpoint of step 4", operation=True)
    updated = Position(4, Stage.WEIGHTS, 8)
    assert relation(updated, saving) is Relation.BEHIND
    assert relation(in_next_forward(updated), saving) is Relation.PAST
    backward = Position(5, Stage.STEP, 9, "at the end of the backward of step 5", operation=True)
    assert relation(in_next_forward(updated), backward) is Relation.BEHIND


def test_a_rank_whose_loop_ended_before_the_others_is_told_apart_from_one_that_failed() -> None:
    early = Finding(left=(1,), notes={1: "left: the run ended after step 7"})
    assert "the loop of rank 1 ended before the others': make as many steps" in describe(early)
    assert "Join([model, guard])" in describe(early)
    failed = Finding(left=(1,), notes={1: "left: the run ended with OSError after step 7"})
    followed = replace(early, followed=(1,))
    assert describe(failed) == "rank 1 left: the run ended with OSError after step 7"
    assert describe(followed) == "rank 1 left: the run ended after step 7"
