"""How the report says things: the run in a sentence, and marks for what happened.

What an outcome means, its symbol and its color stand in `sdcwatch.core.outcomes`; here are only the
shapes that charts draw and the sentences of the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcwatch.core.grade import named_ranks
from sdcwatch.core.outcomes import COLORS, MEANINGS, WORDS, Role
from sdcwatch.core.records import Outcome, RunWord, Verdict
from sdcwatch.core.saved import distrust
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import ACTIONS as ACTIONS
from sdcwatch.core.text import CHECK_NAMES as CHECK_NAMES
from sdcwatch.core.text import clock as clock
from sdcwatch.core.text import count, list_ranks
from sdcwatch.core.text import evidence as evidence

VANISHED_SECONDS = 900.0
"""A run that lives reports about once a second, and a liveness check after minutes at most."""
TEXT_COLOR = "#1b1f24"
_DARK_CAUTION = "#8a5a00"

_SHAPES: dict[Outcome, str] = {
    Outcome.PASS: "circle",
    Outcome.SUSPECT: "x",
    Outcome.REPRODUCIBLE: "circle-open",
    Outcome.UNATTRIBUTED: "square",
    Outcome.INCONCLUSIVE: "square-open",
    Outcome.NOT_REPRODUCED: "triangle-up",
    Outcome.NONDETERMINISTIC: "diamond",
    Outcome.WIDESPREAD: "hexagon",
    Outcome.TRANSPORT: "triangle-down",
    Outcome.NOT_REDUCED: "star",
    Outcome.DIFFERS: "star-open",
    Outcome.VOID: "line-ew",
    Outcome.NOT_RUN: "line-ns",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """How an outcome looks on the page.

    Attributes:
        word: The word for it.
        symbol: A character beside the word.
        color: Its color.
        ink: The color for text: that of caution is too light to read on white.
        shape: Its plotly marker.
    """

    word: str
    symbol: str
    color: str
    ink: str
    shape: str


def mark(outcome: Outcome) -> Mark:
    """How an outcome looks."""
    meaning = MEANINGS[outcome]
    color = COLORS[meaning.role]
    ink = _DARK_CAUTION if meaning.role is Role.CAUTION else color
    return Mark(meaning.label, meaning.symbol, color, ink, _SHAPES[outcome])


def head(summary: RunSummary) -> tuple[str, str]:
    """Symbol and color of a run's one word."""
    look = WORDS[summary.verdict]
    return look.symbol, COLORS[look.role]


def sentences(summary: RunSummary, now: float) -> list[str]:
    """The run in plain words at a unix time, the most important thing first."""
    said = [_finding(summary)]
    if summary.strikes:
        struck = list_ranks(s.rank for s in summary.strikes).capitalize()
        said.append(f"{struck}: wrong once and right when asked again, which counts as a strike.")
    skipped = sum(summary.skipped.values())
    if skipped:
        said.append(f"{count(skipped, 'update')} did not happen, on any rank.")
    said.append(_checkpoint(summary))
    if summary.closed_suspects:
        said.append(_closed(summary))
    if summary.segments > 1:
        again = "once" if summary.segments == 2 else f"{summary.segments - 1} times"
        said.append(f"The run was resumed {again}.")
    if vanished := summary.vanished_segments:
        said.append(f"{count(vanished, 'earlier segment').capitalize()} vanished without an end.")
    if not summary.finished:
        said.append(_unfinished(summary, now))
    elif summary.exit_code:
        said.append(f"It ended with exit code {summary.exit_code}.")
    return said


def _finding(summary: RunSummary) -> str:
    reason = f": {summary.reason}." if summary.reason else "."
    match summary.verdict:
        case RunWord.CLEAN:
            return f"No corruption was found{reason}"
        case RunWord.PARTLY_CHECKED:
            return f"No corruption was found in what could be compared{reason}"
        case RunWord.NOT_CHECKED:
            return f"Nobody can say whether this run is clean{reason}"
        case RunWord.SUSPECT:
            return f"Corruption was found, and it points to hardware{reason}"
        case RunWord.TAINTED:
            return f"The weights of this run cannot be trusted any more{reason}"
        case _:
            return f"Something is wrong{reason}"


def _closed(summary: RunSummary) -> str:
    devices = dict.fromkeys(s.gpu for s in summary.closed_suspects)
    because = {c.gpu: c for c in summary.closings}
    said = [
        f"{gpu} was closed by {because[gpu].by or 'somebody'}: {because[gpu].reason}"
        for gpu in devices
    ]
    return "; ".join(said) + "."


def _unfinished(summary: RunSummary, now: float) -> str:
    silent = now - summary.last_time
    if silent > VANISHED_SECONDS:
        return (
            f"It vanished: its last record is of {clock(summary.last_time)}, and it never said "
            "that it ended."
        )
    return "It has not said that it ended: it is still running, or it was killed."


def _checkpoint(summary: RunSummary) -> str:
    withheld = summary.checkpoints.get("withheld", 0)
    kept_back = f" {count(withheld, 'checkpoint')} withheld." if withheld else ""
    condemned, provisional = (
        summary.condemned_checkpoint_steps,
        summary.provisional_checkpoint_steps,
    )
    for clause in distrust(condemned, provisional):
        kept_back += f" {clause[0].upper()}{clause[1:]}."
    if not summary.last_good_checkpoint_step:
        return "There is no checkpoint that passed the checks." + kept_back
    path = summary.last_good_checkpoint_path
    where = f" ({path})" if path else ""
    step = summary.last_good_checkpoint_step
    return f"The last good checkpoint is that of step {step}{where}." + kept_back


def who(verdict: Verdict) -> str:
    """The ranks a verdict is about, and whether they are blamed."""
    if named := named_ranks(verdict):
        return list_ranks(named)
    return f"nobody named ({list_ranks(verdict.ranks)} saw it)" if verdict.ranks else "nobody named"


def duration(seconds: float) -> str:
    """A duration with a fitting unit."""
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.2f} ms"


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends in a mark already or is empty."""
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
