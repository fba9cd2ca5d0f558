"""How ranks, counts, times and evidence are put into words, and a record into a line.

One wording for all: the log of a run, the demo, boards, W&B and the report say it through here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdcwatch.core.outcomes import CHECKPOINTS, MEANINGS, Role
from sdcwatch.core.records import (
    Action,
    Check,
    CheckpointEvent,
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
    Suspect,
    UpdateSkipped,
    Verdict,
)

CHECK_NAMES = {
    Check.NONFINITE: "check 1 nonfinite",
    Check.REPLAY: "check 2 replay",
    Check.FINGERPRINT: "check 3 fingerprint",
}
ACTIONS = {
    Action.NONE: "",
    Action.SKIP: "update skipped on every rank",
    Action.STOP: "all ranks stop",
    Action.OBSERVE: "observed only",
}
_SIMULATED = "cpu-sim-"

_SHOWN = 8


def joined(words: Sequence[str]) -> str:
    """One word or more: "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def counted_in_group(job_ranks: Sequence[int]) -> str:
    """What a person has to know of the ranks that the guard names, or "".

    Args:
        job_ranks: Of each rank of the group, in order, its rank in the job.
    """
    if all(rank == job for rank, job in enumerate(job_ranks)):
        return ""
    said = [f"rank {rank} is rank {job} of the job" for rank, job in enumerate(job_ranks[:_SHOWN])]
    if len(job_ranks) > _SHOWN:
        said.append(f"{len(job_ranks) - _SHOWN} more")
    return f"ranks are counted within the group of the DDP model: {', '.join(said)}"


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1 and 2", the first eight and how many more."""
    ordered = [str(rank) for rank in sorted(set(ranks))]
    if not ordered:
        return "no rank"
    if len(ordered) > _SHOWN:
        return f"ranks {', '.join(ordered[:_SHOWN])} and {len(ordered) - _SHOWN} more"
    return ("rank " if len(ordered) == 1 else "ranks ") + joined(ordered)


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = 3
    if len(names) > shown:
        return f"{', '.join(names[:shown])} and {len(names) - shown} more"
    return joined(names)


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 comparison", "2 comparisons"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """A unix time for a person, in UTC; "never" for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "never"


def shortened(text: str, length: int) -> str:
    """A text cut at a word to at most a number of characters, which shows that it was."""
    if len(text) <= length:
        return text
    kept = text[: length - 1]
    at_word, _, rest = kept.rpartition(" ")
    whole = text[length - 1].isspace()
    # A word that alone is half of the text, as a path, is cut within.
    return (at_word if not whole and len(rest) < length / 2 else kept).rstrip(" ,;:") + "…"


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
        said = "non-finite there and finite elsewhere"
    if suspect.reproduced is not None:
        said += f"; {'wrong' if suspect.reproduced else 'right'} when asked again"
    return said + (f"; in {suspect.operator}" if suspect.operator else "")


@dataclass(frozen=True, slots=True)
class Line:
    """A record as a line for a person; `str` gives it as the log has it.

    Attributes:
        step: Its step.
        words: What happened, in a few words.
        detail: Why, and what was done about it; may be empty.
        symbol: One character for what it means.
        role: Of its color.
    """

    step: int
    words: str
    detail: str = ""
    symbol: str = "·"
    role: Role = Role.MUTED

    def __str__(self) -> str:
        return f"step {self.step}: {self.words}" + (f": {self.detail}" if self.detail else "")


def line_of(record: Record) -> Line | None:
    """The line that tells of a record, or None for passes and progress."""
    match record:
        case Verdict():
            return _verdict_line(record)
        case CheckpointEvent():
            look = CHECKPOINTS[record.result]
            reason = "" if record.reason is GateReason.OK else f" ({record.reason.value})"
            words = f"checkpoint {record.result.value}{reason}"
            return Line(record.step, words, record.detail, look.symbol, look.role)
        case UpdateSkipped():
            return Line(record.step, f"update skipped ({record.reason.value})", role=Role.CAUTION)
        case Hang():
            return _hang_line(record)
        case Note():
            return Line(record.step, record.code, record.message, "!", Role.CAUTION)
        case _:
            return _run_line(record)


def _verdict_line(verdict: Verdict) -> Line | None:
    if verdict.outcome is Outcome.PASS:
        return None
    meaning = MEANINGS[verdict.outcome]
    label = meaning.label.upper() if meaning.role is Role.BROKEN else meaning.label
    who = "; ".join(f"rank {s.rank} on {s.node}{_device(s)}" for s in verdict.suspects)
    words = f"{CHECK_NAMES[verdict.check]}: {label}" + (f" {who}" if who else "")
    told = not verdict.operator or verdict.operator in verdict.reason
    where = "" if told else f"; in {verdict.operator}"
    action = ACTIONS[verdict.action]
    detail = verdict.reason + where + (f" [{action}]" if action else "")
    return Line(verdict.step, words, detail, meaning.symbol, meaning.role)


def _device(suspect: Suspect) -> str:
    # Of a rank without a GPU of its own the name says nothing that the rank does not.
    plain = suspect.gpu.startswith((_SIMULATED, f"{suspect.node}/"))
    return "" if plain else f" ({suspect.gpu})"


def _hang_line(hang: Hang) -> Line:
    notes = [f"rank {rank} {text}" if rank.isdigit() else text for rank, text in hang.left.items()]
    if hang.reporter and "store" not in hang.left:  # rank 0 says it too, where it can
        notes.append(f"told by rank {hang.reporter}")
    words = f"{list_ranks(hang.absent)} absent at {hang.operation}"
    if not hang.absent and "store" in hang.left:  # through which the others would be asked
        words = f"neither the store nor, through it, any rank can be reached at {hang.operation}"
        notes = [f"waited {hang.waited_seconds:.0f} s", f"the store: {hang.left['store']}"]
    return Line(hang.step, words, "; ".join(notes), "✗", Role.BROKEN)


def _run_line(record: Record) -> Line | None:
    match record:
        case RunStarted():
            nodes = len({r.node for r in record.ranks})
            words = f"guarding {len(record.ranks)} ranks on {nodes} nodes"
            if record.step:
                words = f"restarted from the checkpoint of step {record.step}, {words}"
            detail = (
                f"audit every {record.audit_every}, weights every {record.fingerprint_every}, "
                f"{record.parameters:,} parameters"
            )
            return Line(record.step, words, detail, "▶")
        case PreflightDone():
            words = f"preflight: coverage {record.coverage.value}"
            return Line(record.step, words, record.reason, "✓", Role.GOOD)
        case StateChanged():
            tainted = record.state is GuardState.TAINTED
            words = "run TAINTED" if tainted else f"guard {record.state.value}"
            symbol, role = ("✗", Role.BROKEN) if tainted else ("·", Role.MUTED)
            return Line(record.step, words, record.reason, symbol, role)
        case RunFinished():
            role = Role.BROKEN if record.exit_code else Role.MUTED
            return Line(record.step, f"ended: {record.state.value}", record.reason, "■", role)
        case _:
            return None
