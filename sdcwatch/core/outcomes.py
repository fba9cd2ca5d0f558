"""What a verdict means to the people around a run: an alarm or not, and the run's one word.

Console lines, alerts, the report and summaries all ask here, so that they never disagree.
"""

from __future__ import annotations

from typing import Literal

from sdcwatch.core.records import Cause, Outcome, Verdict

RunWord = Literal[
    "clean", "warning", "nondeterministic", "unattributed", "suspect", "tainted", "not checked"
]
"""The run in one word. "clean" takes a clean audit in this segment: never green while blind."""

_NO_ALARM = frozenset((Outcome.PASS, Outcome.VOID))
_WORDS: dict[Outcome, RunWord] = {
    Outcome.SUSPECT: "suspect",
    Outcome.UNATTRIBUTED: "unattributed",
    Outcome.INCONCLUSIVE: "unattributed",
    Outcome.WIDESPREAD: "unattributed",
    Outcome.NONDETERMINISTIC: "nondeterministic",
}
_GRAVEST_FIRST: tuple[RunWord, ...] = ("suspect", "unattributed", "nondeterministic", "warning")


def is_alarm(verdict: Verdict) -> bool:
    """Whether a person should hear of this verdict.

    Everything but a pass, with two exceptions: an overflow that a loss scale explains is
    GradScaler's normal business, and a void audit comes with the weight check's own verdict.
    """
    if verdict.outcome is Outcome.REPRODUCIBLE:
        return verdict.cause is not Cause.SCALING
    return verdict.outcome not in _NO_ALARM


def alarm_word(outcome: Outcome) -> RunWord:
    """The word of a run whose gravest alarm has this outcome."""
    return _WORDS.get(outcome, "warning")


def gravest(words: set[RunWord]) -> RunWord | None:
    """The gravest of some words of alarms, or None."""
    return next((word for word in _GRAVEST_FIRST if word in words), None)
