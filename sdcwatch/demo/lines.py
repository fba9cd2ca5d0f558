"""One line for a person per event: words first, a symbol and a colour beside them."""

from __future__ import annotations

from rich.text import Text

from sdcwatch.core.records import (
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    GuardState,
    Hang,
    Note,
    Outcome,
    PreflightDone,
    Record,
    RunFinished,
    RunStarted,
    StateChanged,
    Verdict,
)

CHECK_NAMES = {"nonfinite": "check 1", "replay": "check 2", "fingerprint": "check 3"}

_OUTCOME_WORDS: dict[Outcome, tuple[str, str, str]] = {
    Outcome.PASS: ("✓", "pass", "green"),
    Outcome.SUSPECT: ("✗", "SUSPECT", "bold red"),
    Outcome.REPRODUCIBLE: ("○", "reproducible", "cyan"),
    Outcome.UNATTRIBUTED: ("?", "unattributed", "bold yellow"),
    Outcome.INCONCLUSIVE: ("?", "inconclusive", "bold yellow"),
    Outcome.NOT_REPRODUCED: ("△", "not reproduced", "yellow"),
    Outcome.NONDETERMINISTIC: ("≈", "nondeterministic", "yellow"),
    Outcome.WIDESPREAD: ("?", "widespread", "bold yellow"),
    Outcome.TRANSPORT: ("△", "transport", "yellow"),
    Outcome.NOT_REDUCED: ("✗", "not reduced", "bold yellow"),
    Outcome.SCALE_DIFFERS: ("✗", "scale differs", "bold yellow"),
    Outcome.VOID: ("–", "void", "yellow"),
    Outcome.NOT_RUN: ("–", "not run", "yellow"),
}
_CHECKPOINT_STYLE = {
    CheckpointResult.SAVED: ("✓", "green"),
    CheckpointResult.PROVISIONAL: ("○", "cyan"),
    CheckpointResult.CONFIRMED: ("✓", "green"),
    CheckpointResult.WITHHELD: ("✗", "bold red"),
    CheckpointResult.FAILED: ("✗", "bold red"),
}
_ACTION_WORDS = {
    "skip": "update skipped on every rank",
    "stop": "all ranks stop",
    "observe": "observed only",
}


def outcome_words(outcome: Outcome) -> tuple[str, str, str]:
    """Symbol, word and rich style of an outcome."""
    return _OUTCOME_WORDS[outcome]


def line_of(record: Record) -> Text | None:
    """The line that tells of a record, or None for those that only move the progress bar."""
    match record:
        case Verdict():
            return _verdict(record)
        case CheckpointEvent():
            symbol, style = _CHECKPOINT_STYLE[record.result]
            reason = "" if record.reason is GateReason.OK else f" ({record.reason.value})"
            detail = f": {record.detail}" if record.detail else ""
            words = f"{symbol} checkpoint {record.result.value}{reason}"
            return _line(record.step, words, style, detail)
        case Hang():
            absent = ", ".join(map(str, record.absent)) or "nobody"
            words = f"✗ hang at {record.where}"
            return _line(record.step, words, "bold red", f": rank {absent} did not answer")
        case Note():
            return _line(record.step, f"! {record.code}", "yellow", f": {record.message}")
        case _:
            return _run_line(record)


def _run_line(record: Record) -> Text | None:
    match record:
        case RunStarted():
            nodes = len({r.node for r in record.ranks})
            guarding = f"guarding {len(record.ranks)} ranks on {nodes} nodes"
            words = f"▶ {guarding}"
            if record.step:
                words = f"▶ restarted from the checkpoint of step {record.step}, {guarding}"
            detail = (
                f": audit every {record.audit_every}, "
                f"weights every {record.fingerprint_every}, {record.parameters:,} parameters"
            )
            return _line(record.step, words, "bold", detail)
        case PreflightDone():
            words = f"✓ preflight: coverage {record.coverage.value}"
            return _line(record.step, words, "green", f": {record.reason}")
        case StateChanged() if record.state is GuardState.TAINTED:
            return _line(record.step, "✗ run TAINTED", "bold red", f": {record.reason}")
        case RunFinished():
            clean = record.exit_code == 0
            words = f"■ ended: {record.state.value}"
            return _line(record.step, words, "bold" if clean else "bold red", f": {record.reason}")
        case _:
            return None


def _verdict(verdict: Verdict) -> Text | None:
    if verdict.outcome is Outcome.PASS:
        return None
    symbol, word, style = _OUTCOME_WORDS[verdict.outcome]
    who = "; ".join(f"rank {s.rank} on {s.node}" for s in verdict.suspects)
    words = f"{symbol} {CHECK_NAMES[verdict.check.value]} {verdict.check.value}: {word}"
    if who:
        words += f" {who}"
    action = _ACTION_WORDS.get(verdict.action.value, "")
    return _line(
        verdict.step, words, style, f": {verdict.reason}" + (f" [{action}]" if action else "")
    )


def _line(step: int, words: str, style: str, detail: str) -> Text:
    return Text.assemble((f"step {step:>4}  ", "dim"), (words, style), detail)
