"""How the report says things: the run in a sentence, evidence in a sentence, marks and colours.

Colours are from the Okabe-Ito palette, which people with any colour vision can tell apart; a word
and a shape always stand beside them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sdcwatch.core.grade import named_ranks
from sdcwatch.core.records import Check, Outcome, Suspect, Verdict
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import count, list_ranks

BLACK = "#1b1f24"
ORANGE = "#e69f00"
SKY = "#56b4e9"
GREEN = "#009e73"
BLUE = "#0072b2"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"
GREY = "#6b7280"


@dataclass(frozen=True, slots=True)
class Mark:
    """How an outcome looks.

    Attributes:
        word: The word for it.
        symbol: A character beside the word.
        colour: Its colour.
        shape: Its plotly marker.
    """

    word: str
    symbol: str
    colour: str
    shape: str

    @property
    def ink(self) -> str:
        """The colour for text: orange is too light to read on white."""
        return "#8a5a00" if self.colour == ORANGE else self.colour


CHECKS: dict[Check, str] = {
    Check.NONFINITE: "1 · non-finite",
    Check.REPLAY: "2 · replay audit",
    Check.FINGERPRINT: "3 · weight fingerprint",
}

MARKS: dict[Outcome, Mark] = {
    Outcome.PASS: Mark("pass", "✓", GREEN, "circle"),
    Outcome.SUSPECT: Mark("suspect", "✗", VERMILLION, "x"),
    Outcome.REPRODUCIBLE: Mark("reproducible", "○", BLUE, "circle-open"),
    Outcome.UNATTRIBUTED: Mark("unattributed", "?", PURPLE, "square"),
    Outcome.INCONCLUSIVE: Mark("inconclusive", "?", PURPLE, "square-open"),
    Outcome.NOT_REPRODUCED: Mark("not reproduced", "△", ORANGE, "triangle-up"),
    Outcome.NONDETERMINISTIC: Mark("nondeterministic", "≈", ORANGE, "diamond"),
    Outcome.WIDESPREAD: Mark("widespread", "?", PURPLE, "hexagon"),
    Outcome.TRANSPORT: Mark("transport", "△", ORANGE, "triangle-down"),
    Outcome.NOT_REDUCED: Mark("not reduced", "!", PURPLE, "star"),
    Outcome.DIFFERS: Mark("differs", "≠", PURPLE, "star-open"),
    Outcome.VOID: Mark("void", "–", GREY, "line-ew"),
    Outcome.NOT_RUN: Mark("not run", "–", GREY, "line-ns"),
}

_HEADS: dict[str, tuple[str, str]] = {
    "clean": ("✓", GREEN),
    "warning": ("△", ORANGE),
    "nondeterministic": ("≈", ORANGE),
    "unattributed": ("?", PURPLE),
    "suspect": ("✗", VERMILLION),
    "tainted": ("✗", VERMILLION),
    "not checked": ("–", GREY),
}


def head(summary: RunSummary) -> tuple[str, str]:
    """Symbol and colour of a run's one word."""
    return _HEADS[summary.verdict]


def sentences(summary: RunSummary) -> list[str]:
    """The run in plain words, the most important thing first."""
    said = [_finding(summary)]
    if summary.strikes:
        struck = list_ranks(s.rank for s in summary.strikes).capitalize()
        said.append(f"{struck}: wrong once and right when asked again, which counts as a strike.")
    skipped = sum(summary.skipped.values())
    if skipped:
        said.append(f"{count(skipped, 'update')} did not happen, on any rank.")
    said.append(_checkpoint(summary))
    if summary.segments > 1:
        again = "once" if summary.segments == 2 else f"{summary.segments - 1} times"
        said.append(f"The run was resumed {again}.")
    if not summary.finished:
        said.append("It has not said that it ended: it is still running, or it was killed.")
    elif summary.exit_code:
        said.append(f"It ended with exit code {summary.exit_code}.")
    return said


def _finding(summary: RunSummary) -> str:
    reason = f": {summary.reason}." if summary.reason else "."
    match summary.verdict:
        case "clean":
            return f"No corruption was found{reason}"
        case "not checked":
            return f"Nobody can say whether this run is clean{reason}"
        case "suspect":
            return f"Corruption was found, and it points to hardware{reason}"
        case "tainted":
            return f"The weights of this run cannot be trusted any more{reason}"
        case _:
            return f"Something is wrong{reason}"


def _checkpoint(summary: RunSummary) -> str:
    withheld = summary.checkpoints.get("withheld", 0)
    kept_back = f" {count(withheld, 'checkpoint')} withheld." if withheld else ""
    if not summary.last_good_checkpoint_step:
        return "There is no checkpoint that passed the checks." + kept_back
    return (
        f"The last good checkpoint is that of step {summary.last_good_checkpoint_step}." + kept_back
    )


def evidence(suspect: Suspect) -> str:
    """What supports naming this rank, in a sentence or two."""
    if suspect.check is Check.REPLAY:
        said = f"Wrong in {suspect.mismatches} of {count(suspect.comparisons, 'comparison')}"
        if suspect.partners:
            said += f" with {list_ranks(suspect.partners)}"
        if suspect.arbiters:
            said += f", settled by {list_ranks(suspect.arbiters)}"
        return said + "." + _again(suspect)
    if suspect.check is Check.FINGERPRINT:
        dissent = count(suspect.mismatches, "tensor")
        return f"{dissent} of {suspect.comparisons} differ from the majority."
    return "Non-finite there, and finite when another node computed it."


def _again(suspect: Suspect) -> str:
    if suspect.reproduced is None:
        return ""
    if suspect.reproduced:
        return " Wrong every time it was asked again."
    return " Right when it was asked again."


def who(verdict: Verdict) -> str:
    """The ranks a verdict is about, and whether they are blamed."""
    if named := named_ranks(verdict):
        return list_ranks(named)
    return f"nobody named ({list_ranks(verdict.ranks)} saw it)" if verdict.ranks else "nobody named"


def clock(seconds: float) -> str:
    """A unix time for a person, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "never"


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
