"""What a run says at its end, and of whom."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sdcwatch.core.advice import closing_line
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    Outcome,
    Suspect,
    Verdict,
)
from sdcwatch.core.summary import SummaryBuilder
from sdcwatch.core.text import line_of
from sdcwatch.core.topology import Topology
from sdcwatch.guard.reporter import Reporter, VerdictBuilder
from sdcwatch.sinks.dispatch import Dispatcher


def suspect_verdict() -> Verdict:
    rank = Suspect(
        rank=1, node="n0", instance_id="i-0", gpu="GPU-7", gpu_index=1, check=Check.REPLAY,
        mismatches=2, comparisons=2, first_step=2, last_step=2,
    )  # fmt: skip
    return Verdict(
        step=2, time=time.time(), check=Check.REPLAY, outcome=Outcome.SUSPECT,
        reason="it was wrong", failed=True, suspects=(rank,),
    )  # fmt: skip


def test_the_line_of_a_verdict_says_where_the_suspect_is() -> None:
    said = "step 2: check 2 replay: SUSPECT rank 1 on n0 (GPU-7): it was wrong"
    assert str(line_of(suspect_verdict())) == said


def test_a_run_in_which_something_was_found_does_not_end_looking_healthy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts = VerdictBuilder(Topology(()), observing=False)
    reporter = Reporter(
        Dispatcher(), verdicts, summary_path=tmp_path / "summary.json", leader=True, start_step=0
    )
    reporter.step = 2
    reporter.steps_at_risk = 2
    reporter.emit(suspect_verdict())
    with caplog.at_level("INFO", logger="sdcwatch"):
        reporter.close()
    line = caplog.messages[-1]
    assert line.startswith("SUSPECT: ")
    assert "what to do: docs/runbook.md, SdcwatchSuspectRank; " in line
    assert "last good checkpoint: none" in line
    assert line.endswith(f"sdcwatch report {tmp_path}")


def test_the_update_of_a_step_that_was_audited_clean_is_not_at_risk(tmp_path: Path) -> None:
    verdicts = VerdictBuilder(Topology(()), observing=False)
    reporter = Reporter(Dispatcher(), verdicts, summary_path=None, leader=False, start_step=0)
    for step in range(1, 4):
        reporter.step = step
        if step == 2:
            reporter.last_clean_audit, reporter.steps_at_risk = (step, time.time()), 0
        reporter.updated()
        assert reporter.steps_at_risk == (1, 0, 1)[step - 1]


def test_the_last_line_names_checkpoints_that_an_audit_has_not_confirmed(tmp_path: Path) -> None:
    builder = SummaryBuilder()
    for step in (20, 40):
        builder.add(
            CheckpointEvent(
                step=step, time=1.0, result=CheckpointResult.PROVISIONAL, reason=GateReason.OK
            )
        )
    builder.add(suspect_verdict())
    line = closing_line(builder.summary(), tmp_path)
    assert "; the checkpoints of steps 20 and 40 were never confirmed: do not resume" in line
