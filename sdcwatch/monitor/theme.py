"""How values look on a board: words, symbols and colors, looked up in `sdcwatch.core.outcomes`.

Nothing here decides what something means: roles, symbols and colors of outcomes and of the run's
word are those of core, and the states of guard and coverage get a role of the same palette.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sdcwatch.core.outcomes import COLORS, MEANINGS, WORDS, Role
from sdcwatch.core.records import (
    CheckpointResult,
    Coverage,
    GuardState,
    Outcome,
    RankState,
    SkipReason,
)

GOOD = COLORS[Role.GOOD]
BROKEN = COLORS[Role.BROKEN]
DOUBT = COLORS[Role.DOUBT]
CAUTION = COLORS[Role.CAUTION]
SOFTWARE = COLORS[Role.SOFTWARE]
MUTED = COLORS[Role.MUTED]
LINE = "#56B4E9"
"""Sky: the color of a line that means nothing by itself."""
PALETTE = (*COLORS.values(), LINE)

VANISHED = "vanished"
"""What the boards call a run whose last state was an active one and that nothing exports."""


@dataclass(frozen=True, slots=True)
class Look:
    """A state as people see it.

    Attributes:
        text: A symbol and a word.
        color: Of the palette.
    """

    text: str
    color: str


def _look(symbol: str, word: str, role: Role) -> Look:
    return Look(f"{symbol} {word}", COLORS[role])


WORD_LOOKS: Mapping[str, Look] = {
    word.value: _look(look.symbol, word.value.upper(), look.role) for word, look in WORDS.items()
}
"""The run's word, as `sdcwatch_run_verdict` spells it."""

GUARD_LOOKS: Mapping[str, Look] = {
    GuardState.PREFLIGHT.value: _look("…", "preflight", Role.MUTED),
    GuardState.ARMED.value: _look("✓", "armed", Role.GOOD),
    GuardState.OBSERVING.value: _look("◉", "observing", Role.SOFTWARE),
    GuardState.DEGRADED.value: _look("◐", "degraded", Role.CAUTION),
    GuardState.TAINTED.value: _look("✗", "tainted", Role.BROKEN),
    GuardState.FINISHED.value: _look("■", "finished", Role.MUTED),
    GuardState.FAILED.value: _look("▲", "failed", Role.DOUBT),
    VANISHED: _look("▽", VANISHED, Role.DOUBT),
}

RANK_LOOKS: Mapping[RankState, Look] = {
    RankState.SUSPECT: _look(
        MEANINGS[Outcome.SUSPECT].symbol, "suspect", MEANINGS[Outcome.SUSPECT].role
    ),
    RankState.CLOSED: _look("○", "closed", Role.MUTED),
}

COVERAGE_LOOKS: Mapping[str, Look] = {
    Coverage.FULL.value: _look("✓", "full", Role.GOOD),
    Coverage.OUTPUTS_ONLY.value: _look("◐", "outputs only", Role.CAUTION),
    Coverage.OFF.value: _look("–", "off", Role.CAUTION),
}

MODE_LOOKS: Mapping[str, Look] = {
    "enforce": _look("✓", "enforce", Role.GOOD),
    "observe": _look("◉", "observe", Role.SOFTWARE),
}

NOBODY = 0
"""Code of a run in which nobody is suspect; a table says so in words."""
ENDED = -1
"""Value of an age that has no meaning any more, because the run has ended."""
NOBODY_LOOK = _look("✓", "nobody", Role.GOOD)
ENDED_LOOK = _look("■", "ended", Role.MUTED)

OUTCOME_COLORS: Mapping[str, str] = {o.value: COLORS[m.role] for o, m in MEANINGS.items()}
OUTCOME_LOOKS: Mapping[str, Look] = {
    o.value: _look(m.symbol, m.label, m.role) for o, m in MEANINGS.items()
}
RESULT_COLORS: Mapping[str, str] = {
    CheckpointResult.SAVED.value: GOOD,
    CheckpointResult.CONFIRMED.value: GOOD,
    CheckpointResult.PROVISIONAL.value: CAUTION,
    CheckpointResult.WITHHELD.value: BROKEN,
    CheckpointResult.FAILED.value: DOUBT,
}
SKIP_COLORS: Mapping[str, str] = {
    SkipReason.NONFINITE.value: BROKEN,
    SkipReason.REPLAY.value: BROKEN,
    SkipReason.SCALER.value: MUTED,
    SkipReason.NOT_STEPPED.value: SOFTWARE,
}
CAUSE_COLORS: Mapping[str, str] = {
    "none": MUTED,
    "device": BROKEN,
    "data": SOFTWARE,
    "scaling": MUTED,
    "reduction": DOUBT,
    "outside": SOFTWARE,
    "software": SOFTWARE,
    "weights": DOUBT,
    "unknown": DOUBT,
}
KIND_COLORS: Mapping[str, str] = {
    "comparisons": GOOD,
    "checks": GOOD,
    "output mismatch": BROKEN,
    "gradient mismatch": BROKEN,
    "disagreeing tensors": BROKEN,
    "plain": GOOD,
    "audit": CAUTION,
    "nonfinite": LINE,
    "replay": CAUTION,
    "fingerprint": SOFTWARE,
}

GUARD_CODES: Mapping[str, int] = {s: i for i, s in enumerate(GUARD_LOOKS, start=1)}
RANK_CODES: Mapping[RankState, int] = {s: i for i, s in enumerate(RankState, start=11)}
"""Numbers for the states, apart from each other so that one timeline can show both."""

STATES_BY_CODE: Mapping[str, Look] = {
    **{str(GUARD_CODES[state]): look for state, look in GUARD_LOOKS.items()},
    **{str(RANK_CODES[state]): look for state, look in RANK_LOOKS.items()},
    str(NOBODY): NOBODY_LOOK,
}
