"""How values look: colours, words and symbols. Colour alone never carries a meaning.

The colours are those of Okabe and Ito, which people with any common colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sdcwatch.core.records import Coverage, GuardState, Outcome, RankState

GREEN = "#009E73"
SKY = "#56B4E9"
BLUE = "#0072B2"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"
PALETTE = (GREEN, SKY, BLUE, YELLOW, ORANGE, VERMILLION, PURPLE, GREY)


@dataclass(frozen=True, slots=True)
class Look:
    """A state as people see it.

    Attributes:
        text: A symbol and a word.
        color: Of the palette.
    """

    text: str
    color: str


class VerdictCode(int, Enum):
    """A run in one number, worst last; the dashboards show the word."""

    CLEAN = 1
    OUTPUTS_ONLY = 2
    NOT_CHECKED = 3
    NO_NAME = 4
    TAINTED = 5
    SUSPECT = 6


VERDICT_LOOKS: Mapping[VerdictCode, Look] = {
    VerdictCode.CLEAN: Look("✔ CLEAN", GREEN),
    VerdictCode.OUTPUTS_ONLY: Look("◐ PARTLY CHECKED", YELLOW),
    VerdictCode.NOT_CHECKED: Look("? NOT CHECKED", ORANGE),
    VerdictCode.NO_NAME: Look("▲ WRONG, NO NAME", PURPLE),
    VerdictCode.TAINTED: Look("✖ TAINTED", VERMILLION),
    VerdictCode.SUSPECT: Look("✖ SUSPECT", VERMILLION),
}

GUARD_LOOKS: Mapping[GuardState, Look] = {
    GuardState.PREFLIGHT: Look("… preflight", SKY),
    GuardState.ARMED: Look("✔ armed", GREEN),
    GuardState.OBSERVING: Look("◉ observing", BLUE),
    GuardState.DEGRADED: Look("◐ degraded", ORANGE),
    GuardState.TAINTED: Look("✖ tainted", VERMILLION),
    GuardState.FINISHED: Look("■ finished", GREY),
    GuardState.FAILED: Look("▲ failed", PURPLE),
}

RANK_LOOKS: Mapping[RankState, Look] = {
    RankState.SUSPECT: Look("✖ suspect", VERMILLION),
    RankState.CLOSED: Look("○ closed", GREY),
}

COVERAGE_LOOKS: Mapping[Coverage, Look] = {
    Coverage.FULL: Look("✔ full", GREEN),
    Coverage.OUTPUTS_ONLY: Look("◐ outputs only", ORANGE),
    Coverage.OFF: Look("? off", ORANGE),
}

MODE_LOOKS: Mapping[str, Look] = {
    "enforce": Look("✔ enforce", GREEN),
    "observe": Look("◉ observe", BLUE),
}

OUTCOME_COLORS: Mapping[Outcome, str] = {
    Outcome.SUSPECT: VERMILLION,
    Outcome.REPRODUCIBLE: SKY,
    Outcome.UNATTRIBUTED: PURPLE,
    Outcome.INCONCLUSIVE: PURPLE,
    Outcome.WIDESPREAD: PURPLE,
    Outcome.TRANSPORT: BLUE,
    Outcome.NOT_REPRODUCED: ORANGE,
    Outcome.NONDETERMINISTIC: YELLOW,
    Outcome.NOT_REDUCED: BLUE,
    Outcome.DIFFERS: PURPLE,
    Outcome.VOID: GREY,
    Outcome.NOT_RUN: GREY,
}

GUARD_CODES: Mapping[GuardState, int] = {s: i for i, s in enumerate(GuardState, start=1)}
RANK_CODES: Mapping[RankState, int] = {s: i for i, s in enumerate(RankState, start=11)}
"""Numbers for the states, apart from each other so that one timeline can show both."""


def coded(
    looks: Mapping[GuardState, Look] | Mapping[RankState, Look],
    codes: Mapping[GuardState, int] | Mapping[RankState, int],
) -> dict[str, Look]:
    """Looks by number instead of by state."""
    numbers = {str(state.value): code for state, code in codes.items()}
    return {str(numbers[str(state.value)]): look for state, look in looks.items()}
