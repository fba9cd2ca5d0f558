"""How ranks, counts, times and evidence are put into words, and a record into a line.

One wording for all: the log of a run, the demo, boards, W&B and the report say it through here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sdcwatch.core.records import Check, Suspect

_SHOWN = 8


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1 and 2", the first eight and how many more."""
    ordered = [str(rank) for rank in sorted(set(ranks))]
    if not ordered:
        return "no rank"
    if len(ordered) > _SHOWN:
        return f"ranks {', '.join(ordered[:_SHOWN])} and {len(ordered) - _SHOWN} more"
    return ("rank " if len(ordered) == 1 else "ranks ") + _joined(ordered)


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = 3
    if len(names) > shown:
        return f"{', '.join(names[:shown])} and {len(names) - shown} more"
    return _joined(names)


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 comparison", "2 comparisons"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """A unix time for a person, in UTC; "never" for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "never"


def shortened(text: str, length: int) -> str:
    """A text cut to a number of characters, which shows that it was."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def evidence(suspect: Suspect) -> str:
    """What supports naming this rank, in one clause."""
    if suspect.check is Check.FINGERPRINT:
        said = (
            f"{suspect.mismatches} of {count(suspect.comparisons, 'tensor')} differ from the "
            "majority"
        )
    elif suspect.check is Check.REPLAY:
        said = f"wrong in {suspect.mismatches} of {count(suspect.comparisons, 'comparison')}"
        if suspect.partners:
            said += f" with {list_ranks(suspect.partners)}"
        if suspect.arbiters:
            said += f", settled by {list_ranks(suspect.arbiters)}"
    else:
        said = "non-finite there, and finite when another node computed it"
    if suspect.reproduced is not None:
        said += f"; {'wrong' if suspect.reproduced else 'right'} when asked again"
    return said + (f"; in {suspect.operator}" if suspect.operator else "")
