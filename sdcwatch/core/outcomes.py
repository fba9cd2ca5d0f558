"""What an outcome means to the people around a run, and the run's one word: one table each.

Console lines, summaries, W&B, alerts, boards and the report all look things up here, so that they
never disagree. A color role says what something means; `COLORS` gives each role a color of Okabe
and Ito, which people with any common color vision tell apart. No color stands without its symbol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sdcwatch.core.enums import Cause, Check, CheckpointResult, Outcome, RunWord
from sdcwatch.errors import EXIT_CORRUPTION, EXIT_SOFTWARE, CorruptionDetected, SoftwareDivergence

if TYPE_CHECKING:
    from sdcwatch.core.records import Verdict


class Role(str, Enum):
    """What a color says."""

    GOOD = "good"
    BROKEN = "broken"
    """A device or the weights: act now."""
    DOUBT = "doubt"
    """Something is wrong, and no device is named."""
    CAUTION = "caution"
    SOFTWARE = "software"
    """The training program, its data or its settings."""
    MUTED = "muted"
    """Nothing was found out."""


COLORS: Mapping[Role, str] = {
    Role.GOOD: "#009E73",
    Role.BROKEN: "#D55E00",
    Role.DOUBT: "#CC79A7",
    Role.CAUTION: "#E69F00",
    Role.SOFTWARE: "#0072B2",
    Role.MUTED: "#8C8C8C",
}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an outcome means.

    Attributes:
        label: The outcome in words.
        symbol: One character beside it.
        role: Of its color.
        failed: The check failed: the update is skipped (checks 1, 2) or the run tainted (check 3).
        alarm: The word that it gives the run; None if nobody needs to hear of it.
        compared: Check 2 compared something.
        exit_code: What the process ends with if the run stops because of it.
    """

    label: str
    symbol: str
    role: Role
    failed: bool = True
    alarm: RunWord | None = RunWord.WARNING
    compared: bool = True
    exit_code: int = EXIT_CORRUPTION


MEANINGS: Mapping[Outcome, Meaning] = {
    Outcome.PASS: Meaning("pass", "✓", Role.GOOD, failed=False, alarm=None),
    Outcome.SUSPECT: Meaning("suspect", "✗", Role.BROKEN, alarm=RunWord.SUSPECT),
    Outcome.REPRODUCIBLE: Meaning("reproducible", "○", Role.SOFTWARE, exit_code=EXIT_SOFTWARE),
    Outcome.UNATTRIBUTED: Meaning("unattributed", "?", Role.DOUBT, alarm=RunWord.UNATTRIBUTED),
    Outcome.INCONCLUSIVE: Meaning("inconclusive", "?", Role.DOUBT, alarm=RunWord.UNATTRIBUTED),
    Outcome.NOT_REPRODUCED: Meaning("not reproduced", "△", Role.CAUTION),
    Outcome.NONDETERMINISTIC: Meaning(
        "nondeterministic", "≈", Role.CAUTION, failed=False, alarm=RunWord.NONDETERMINISTIC
    ),
    Outcome.WIDESPREAD: Meaning("widespread", "?", Role.DOUBT, alarm=RunWord.UNATTRIBUTED),
    Outcome.DIFFERS: Meaning("differs", "≠", Role.DOUBT, failed=False, alarm=RunWord.UNATTRIBUTED),
    Outcome.TRANSPORT: Meaning("transport", "△", Role.CAUTION),
    Outcome.NOT_REDUCED: Meaning("not reduced", "!", Role.SOFTWARE, exit_code=EXIT_SOFTWARE),
    Outcome.VOID: Meaning("void", "–", Role.MUTED, failed=False, alarm=None, compared=False),
    Outcome.NOT_RUN: Meaning("not run", "–", Role.MUTED, failed=False, compared=False),
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a word looks: a character beside it, and what its color says."""

    symbol: str
    role: Role


WORDS: Mapping[RunWord, Look] = {
    RunWord.TAINTED: Look("✗", Role.BROKEN),
    RunWord.SUSPECT: Look("✗", Role.BROKEN),
    RunWord.UNATTRIBUTED: Look("?", Role.DOUBT),
    RunWord.NONDETERMINISTIC: Look("≈", Role.CAUTION),
    RunWord.WARNING: Look("△", Role.CAUTION),
    RunWord.NOT_CHECKED: Look("–", Role.MUTED),
    RunWord.PARTLY_CHECKED: Look("◐", Role.CAUTION),
    RunWord.CLEAN: Look("✓", Role.GOOD),
}


CHECKPOINTS: Mapping[CheckpointResult, Look] = {
    CheckpointResult.SAVED: Look("✓", Role.GOOD),
    CheckpointResult.PROVISIONAL: Look("○", Role.CAUTION),
    CheckpointResult.CONFIRMED: Look("✓", Role.GOOD),
    CheckpointResult.WITHHELD: Look("✗", Role.BROKEN),
    CheckpointResult.FAILED: Look("✗", Role.BROKEN),
}
"""How what became of a checkpoint looks."""


def is_alarm(verdict: Verdict) -> bool:
    """Whether a person should hear of this verdict.

    Everything but a pass, with two exceptions: an overflow that a loss scale explains is
    GradScaler's normal business, and a void audit comes with the weight check's own verdict.
    """
    return alarm_word(verdict) is not None


def is_grave(verdict: Verdict) -> bool:
    """Whether it is an error and not a warning: a check failed, or somebody is named."""
    return verdict.failed or bool(verdict.suspects)


def ends_confirmation(verdict: Verdict) -> bool:
    """Whether an audit compared something and was not clean.

    What was saved since the last clean audit may hold what it has found: nothing will confirm it.
    """
    found = MEANINGS[verdict.outcome].compared
    clean = verdict.outcome in (Outcome.PASS, Outcome.DIFFERS)
    return verdict.check is Check.REPLAY and found and not clean


def alarm_word(verdict: Verdict) -> RunWord | None:
    """The word that this verdict gives the run; None if it gives none."""
    if verdict.cause is Cause.SCALING:
        return None
    if verdict.cause is Cause.SOFTWARE and verdict.check is not Check.FINGERPRINT:
        return RunWord.WARNING  # the operation is known: nothing is left unattributed
    return MEANINGS[verdict.outcome].alarm


def exit_code(verdict: Verdict) -> int:
    """What the process ends with if the run stops because of this verdict."""
    software = verdict.cause in (Cause.SOFTWARE, Cause.DATA)
    return EXIT_SOFTWARE if software else MEANINGS[verdict.outcome].exit_code


def finding(verdict: Verdict) -> CorruptionDetected:
    """The error that stops the run because of this verdict."""
    kind = SoftwareDivergence if exit_code(verdict) == EXIT_SOFTWARE else CorruptionDetected
    return kind(verdict)


def gravest(words: Iterable[RunWord]) -> RunWord | None:
    """The gravest of some words, or None. `RunWord` lists the gravest first."""
    found = set(words)
    return next((word for word in RunWord if word in found), None)
