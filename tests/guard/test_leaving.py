"""Who leaves before whom at the end of a run that failed."""

from __future__ import annotations

import pytest

from sdcwatch.errors import Desync, RankGone
from sdcwatch.guard.leaving import report_later


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        # Rank 0 waits in DDP's backward for the rank that waited in a save: who leaves first?
        (Desync({0: "in step 8"}, past="save_checkpoint of step 7", ranks=(0, 2)), [0]),
        (Desync({1: "in step 8"}, past="save_checkpoint of step 7", ranks=(1,)), []),
        (Desync({0: "step 7", 1: "step 8"}), []),  # every rank ends with that at the same place
        (RankGone((0,), "gave no sign of life", "the weight check of step 6"), [0]),
        (RankGone((2,), "gave no sign of life", "the weight check of step 6"), []),
        (None, []),
    ],
)
def test_nobody_waits_for_the_report_of_a_rank_that_waits_for_it_in_turn(
    error: BaseException | None, expected: list[int]
) -> None:
    assert report_later((0,), error) == expected
