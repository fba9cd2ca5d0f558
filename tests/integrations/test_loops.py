"""The same model, data and faults in every loop: the guard says the same, and changes nothing.

Trial `m11_accelerate` is one of them: the prepared optimizer is looked through, and it skips.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from loops import EXPECTED, WORLD, run

pytestmark = pytest.mark.dist

# From "fabric, marked methods" on they are other runs by nature: weights and losses are their own.
FRAMEWORKS = ["plain", "trainer", "lightning", "accelerate", "fabric"]
LOOPS = [*FRAMEWORKS, "fabric, marked methods", "nanoGPT", "timm"]


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_faults_lead_to_the_same_verdicts_skips_and_checkpoints(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    for row in pool.run(run, WORLD, name, str(tmp_path), "faulty"):
        assert row["story"] == EXPECTED
        assert row["kept"] == [5, 8], "what is said to be skipped is skipped"
        assert row["stopped"] == "CorruptionDetected"
        assert len(row["saved"]) == 1, "the one of step 4; that of step 8 was withheld"


@pytest.mark.parametrize("name", LOOPS)
def test_a_clean_guarded_run_has_the_weights_and_the_logs_of_an_unguarded_one(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    without = pool.run(run, WORLD, name, str(tmp_path / "unguarded"), "unguarded")
    guarded = pool.run(run, WORLD, name, str(tmp_path / "guarded"), "clean")

    assert guarded[0]["saved"] == without[0]["saved"]
    for plain, row in zip(without, guarded, strict=True):
        assert row["weights"] == plain["weights"]
        assert row["logs"] == plain["logs"]
        assert len(row["logs"]) >= 12
        assert [coverage for coverage, _ in row["preflight"]] == ["full"]


def by_accelerate(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    from accelerate_loop import through_a_nan

    return through_a_nan(rank, group, run_dir)


def test_a_skip_of_accelerates_optimizer_is_as_if_the_update_had_been_left_out(
    pool: GlooPool, tmp_path: Path
) -> None:
    for row in pool.run(by_accelerate, WORLD, str(tmp_path)):
        assert row == {"skips": [(5, "skip", "nonfinite")], "rates": True}
