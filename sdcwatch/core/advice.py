"""What a person should hear of a run at its end, and do about it (docs/runbook.md)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from sdcwatch.core.enums import RunWord
from sdcwatch.core.saved import distrust
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import count, list_names

RUNBOOK = "docs/runbook.md"
SECTIONS: Mapping[RunWord, str] = {
    RunWord.TAINTED: "SdcwatchFingerprintDisagreement",
    RunWord.SUSPECT: "SdcwatchSuspectRank",
    RunWord.UNATTRIBUTED: "SdcwatchUnattributedMismatch",
    RunWord.NONDETERMINISTIC: "SdcwatchNondeterministicModel",
}
"""Where the runbook says more, by the word of a run."""


def runbook_section(word: RunWord) -> str:
    """The page and section of the runbook for a run of this word; "" if it needs none."""
    return f"{RUNBOOK}, {SECTIONS[word]}" if word in SECTIONS else ""


def what_to_do(summary: RunSummary) -> list[str]:
    """What to do now about a run in which a device was named or weights differ, as sentences.

    Returns:
        No sentence for any other run.
    """
    if summary.verdict not in (RunWord.TAINTED, RunWord.SUSPECT):
        return []
    devices = {s.device: s for s in summary.suspects}
    said = []
    if devices:
        names = [f"{s.gpu} on {s.node}" for s in devices.values()]
        it = "it" if len(names) == 1 else "them"
        said.append(f"Drain {list_names(names)}; keep {it} for diagnosis, do not restart on {it}.")
    said.append(_resume(summary))
    for suspect in list(devices.values())[:1]:
        close = ["sdcwatch", "close", summary.run_dir, "--gpu", suspect.gpu, "--reason", "..."]
        each = " (once for each device)" if len(devices) > 1 else ""
        said.append(f"When that is done, close the finding{each}: {shlex.join(close)}")
    said.append(f"More: {runbook_section(summary.verdict)}.")
    return said


def _resume(summary: RunSummary) -> str:
    step, path = summary.last_good_checkpoint_step, summary.last_good_checkpoint_path
    if step is None:
        return "No checkpoint of this run has passed the checks: start again from an older one."
    where = f" ({path})" if path else ""
    unless = ", unless the run has been resumed so already" if summary.segments > 1 else ""
    return f"Resume from the last good checkpoint, that of step {step}{where}{unless}."


def closing_line(summary: RunSummary, run_dir: Path, unwritten: Sequence[str] = ()) -> str:
    """The last line of a run: a run in which something was found must not end looking healthy."""
    good = summary.last_good_checkpoint_step
    section = runbook_section(summary.verdict)
    missing = f" ({' and '.join(unwritten)} could not be written to the end)" if unwritten else ""
    clauses = (
        f"{summary.verdict.upper()}: {summary.reason.rstrip('.')}",
        f"{count(summary.steps_at_risk, 'step')} at risk",
        *distrust(summary.condemned_checkpoint_steps, summary.provisional_checkpoint_steps),
        f"last good checkpoint: {f'step {good}' if good else 'none'}",
        *([f"what to do: {section}"] if section else []),
        f"details: sdcwatch report {run_dir}{missing}",
    )
    return "; ".join(clauses)
