"""What W&B is told, as plain values: columns, rows, history keys, alerts. No wandb in here.

Keys are one level deep, ``sdcwatch/<name>``, so that each can have its own axis. History carries
running totals: in somebody else's run a pending row may be overwritten by the next, and a total
that is overwritten by a later total has lost nothing.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from sdcwatch.core.outcomes import MEANINGS, is_alarm
from sdcwatch.core.records import Check, Outcome, Verdict
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import evidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from sdcwatch.core.records import Suspect

    Cell: TypeAlias = "str | int | float | bool | None"

AXIS = "sdcwatch/step"
TABLE = "sdcwatch/events"
TITLE_LENGTH = 63  # W&B wants less than 64 characters

COLUMNS = (
    "time",
    "step",
    "check",
    "outcome",
    "failed",
    "action",
    "ranks",
    "nodes",
    "gpus",
    "instances",
    "evidence",
    "origin",
    "cause",
    "operator",
    "tensors",
    "reason",
)

_CHECKPOINT_RESULTS = ("saved", "provisional", "withheld")


def history_row(summary: RunSummary) -> dict[str, float]:
    """One history row: fields of the run so far, earlier segments of the run included."""
    overhead = summary.overhead_seconds
    values: dict[str, float] = {
        "comparisons": summary.comparisons,
        "output_mismatches": summary.output_mismatches,
        "gradient_mismatches": summary.gradient_mismatches,
        "weight_checks": summary.weight_checks,
        "disagreements": summary.disagreements,
        "nonfinite_steps": summary.nonfinite_steps,
        "updates_skipped": sum(summary.skipped.values()),
        "audit_steps": summary.audit_steps,
        "plain_steps": summary.plain_steps,
        "step_seconds": summary.step_seconds,
        "overhead_seconds": sum(overhead.values()),
        "steps_at_risk": summary.steps_at_risk,
        "last_clean_audit_step": summary.last_clean_audit_step,
        "last_good_checkpoint_step": summary.last_good_checkpoint_step or 0,
        "audited_ranks": summary.audited_ranks,
        "findings": sum(v.count for v in summary.verdicts if v.outcome is not Outcome.PASS),
        "suspect_count": len({s.device for s in summary.suspects}),
        **{f"overhead_seconds_{c.value}": overhead.get(c.value, 0.0) for c in Check},
        **{f"checkpoints_{r}": summary.checkpoints.get(r, 0) for r in _CHECKPOINT_RESULTS},
    }
    return {AXIS: summary.last_step, **{f"sdcwatch/{name}": n for name, n in values.items()}}


HISTORY_KEYS = tuple(key for key in history_row(RunSummary()) if key != AXIS)


def event_row(verdict: Verdict) -> list[Cell]:
    """One row of the table of events."""
    who = verdict.suspects
    ranks: Sequence[int] = [s.rank for s in who] or verdict.ranks
    return [
        datetime.fromtimestamp(verdict.time, timezone.utc).isoformat(timespec="milliseconds"),
        verdict.step,
        verdict.check.value,
        verdict.outcome.value,
        verdict.failed,
        verdict.action.value,
        _words(ranks),
        _words(s.node for s in who),
        _words(s.gpu for s in who),
        _words(s.instance_id for s in who),
        "; ".join(f"rank {s.rank}: {evidence(s)}" for s in who),
        verdict.origin.value,
        verdict.cause.value,
        verdict.operator,
        _words(_tensors(verdict)),
        verdict.reason,
    ]


def _words(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _tensors(verdict: Verdict) -> list[str]:
    names = [d.tensor for d in verdict.disagreements]
    names += [name for c in verdict.comparisons for name in c.tensors]
    names += [name for s in verdict.suspects for name in s.tensors]
    return list(dict.fromkeys(names))[:10]


def incident(verdict: Verdict) -> tuple[str, str, tuple[int, ...]] | None:
    """What makes two verdicts one incident; None for those that alert nobody."""
    if not is_alarm(verdict):
        return None
    ranks = tuple(sorted(s.rank for s in verdict.suspects))
    return verdict.check.value, verdict.outcome.value, ranks


def alert_title(verdict: Verdict) -> str:
    """A title of less than 64 characters that no other incident of the run has."""
    ranks = [s.rank for s in verdict.suspects]
    where = f"step {verdict.step}"
    who = f", rank {_words(ranks)}" if ranks else ""
    head = f"SDC {verdict.check.value} {MEANINGS[verdict.outcome].label}"
    room = TITLE_LENGTH - len(head) - len(where) - 2
    if len(who) > room:
        who = f", {len(ranks)} ranks"
    return f"{head}{who}, {where}"[:TITLE_LENGTH]


def alert_text(verdict: Verdict, dashboard: str = "") -> str:
    """What the alert says: the sentence of the verdict, who, and where to look."""
    lines = [verdict.reason]
    lines += [
        f"rank {s.rank} on {s.node}, GPU {s.gpu}, instance {s.instance_id}: {evidence(s)}"
        for s in verdict.suspects
    ]
    if verdict.operator:
        lines.append(f"in {verdict.operator}")
    if dashboard:
        lines.append(dashboard)
    return "\n".join(lines)


def summary_values(summary: RunSummary, dashboard: str = "") -> dict[str, Cell]:
    """The summary of the run: is it clean, which GPU is bad, what did it cost, what to keep."""
    suspects = {s.device: s for s in summary.suspects}
    values: dict[str, Cell] = {
        "verdict": summary.verdict.value,
        "reason": summary.reason,
        "state": summary.state.value if summary.state else "",
        "mode": summary.mode,
        "coverage": summary.coverage.value if summary.coverage else "off",
        "segments": summary.segments,
        "run_id": summary.run_id,
        "steps": summary.steps,
        "audits": summary.audits,
        "clean_audits": summary.clean_audits,
        "comparisons": summary.comparisons,
        "mismatches": summary.mismatches,
        "weight_checks": summary.weight_checks,
        "disagreements": summary.disagreements,
        "alarms": summary.alarms,
        "first_alarm_step": summary.first_alarm_step,
        "suspects": "; ".join(_identity(s) for s in suspects.values()),
        "suspect_ranks": _words(s.rank for s in suspects.values()),
        "suspect_nodes": _words(s.node for s in suspects.values()),
        "suspect_gpus": _words(s.gpu for s in suspects.values()),
        "suspect_instances": _words(s.instance_id for s in suspects.values()),
        "updates_skipped": sum(summary.skipped.values()),
        "checkpoints_saved": summary.checkpoints.get("saved", 0),
        "checkpoints_provisional": summary.checkpoints.get("provisional", 0),
        "checkpoints_withheld": summary.checkpoints.get("withheld", 0),
        "suspect_operators": _words(s.operator for s in suspects.values() if s.operator),
        "closed_suspects": "; ".join(dict.fromkeys(s.gpu for s in summary.closed_suspects)),
        "last_good_checkpoint_step": summary.last_good_checkpoint_step,
        "last_good_checkpoint_path": summary.last_good_checkpoint_path,
        "last_clean_audit_step": summary.last_clean_audit_step,
        "steps_at_risk": summary.steps_at_risk,
        "overhead_seconds": sum(summary.overhead_seconds.values()),
        "overhead_ratio": summary.overhead_ratio,
    }
    values.update({f"skipped_{reason}": n for reason, n in summary.skipped.items()})
    if dashboard:
        values["dashboard"] = dashboard
    return {f"sdcwatch/{name}": value for name, value in values.items()}


def _identity(suspect: Suspect) -> str:
    return (
        f"rank {suspect.rank} on {suspect.node}, GPU {suspect.gpu}, instance {suspect.instance_id}"
    )
