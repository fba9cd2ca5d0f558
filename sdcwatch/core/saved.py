"""What became of checkpoints that were saved: good, provisional, or never to be resumed from.

A checkpoint between two audits is provisional. A clean audit confirms those before it; one that was
not clean, and weights that differ, condemn them: they may hold what it has found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sdcwatch.core.records import CheckpointEvent, CheckpointResult, GateReason
from sdcwatch.core.text import count, joined

CHECKPOINTS_KEPT = 100
"""Of those that nobody vouches for, the newest are kept."""
_LISTED = 4


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was saved.

    Attributes:
        step: Its step.
        time: Its unix time.
        path: Where it is, if the script said so.
        audited: Audits vouch for checkpoints of its kind: the next clean one confirms it.
    """

    step: int
    time: float
    path: str = ""
    audited: bool = True


class SavedCheckpoints:
    """Which checkpoints of a run can be trusted, event by event."""

    def __init__(self) -> None:
        self.good: Saved | None = None
        self._provisional: list[Saved] = []
        self._condemned: list[Saved] = []

    @property
    def provisional(self) -> tuple[int, ...]:
        """Steps of checkpoints that no clean audit has confirmed so far, oldest first."""
        return tuple(saved.step for saved in self._provisional)

    @property
    def condemned(self) -> tuple[int, ...]:
        """Steps of checkpoints that will never be confirmed, in the order of their ends."""
        return tuple(saved.step for saved in self._condemned)

    def add(self, event: CheckpointEvent) -> None:
        """Take an event into account."""
        reason, result = event.reason, event.result
        audited = reason in (GateReason.OK, GateReason.FRAMEWORK)
        saved = Saved(event.step, event.time, event.path, audited)
        if result in (CheckpointResult.PROVISIONAL, CheckpointResult.SAVED):
            self._provisional = _without(self._provisional, saved)
            self._condemned = _without(self._condemned, saved)
        if result is CheckpointResult.PROVISIONAL:
            self._provisional = [*self._provisional, saved][-CHECKPOINTS_KEPT:]
        elif result is CheckpointResult.SAVED:
            self.good = saved
        elif result is CheckpointResult.CONFIRMED:
            self._confirmed(saved)

    def condemn(self) -> None:
        """An audit was not clean, or weights differ: nothing will confirm what is provisional."""
        self._condemned = [*self._condemned, *self._provisional][-CHECKPOINTS_KEPT:]
        self._provisional = []

    def _confirmed(self, event: Saved) -> None:
        # The record may carry the step of the checkpoint or of the audit that confirmed it.
        before = [saved for saved in self._provisional if saved.step <= event.step]
        known = max(before, key=lambda saved: saved.step, default=event)
        self.good = Saved(known.step, known.time, event.path or known.path)
        self._provisional = [
            saved for saved in self._provisional if saved not in before or not saved.audited
        ]


def _without(kept: Sequence[Saved], new: Saved) -> list[Saved]:
    """Those that `new` has not overwritten, as far as paths and steps can tell."""
    return [
        saved
        for saved in kept
        if (saved.path != new.path) or (not new.path and saved.step != new.step)
    ]


def list_checkpoints(steps: Iterable[int]) -> str:
    """Checkpoints in words: "the checkpoint of step 20", "the checkpoints of steps 20 to 80"."""
    ordered = sorted(set(steps))
    if len(ordered) == 1:
        return f"the checkpoint of step {ordered[0]}"
    if len(ordered) <= _LISTED:
        return f"the checkpoints of steps {joined(list(map(str, ordered)))}"
    first_step, last_step = ordered[0], ordered[-1]
    return f"{count(len(ordered), 'checkpoint')} of steps {first_step} to {last_step}"


def _it(steps: Sequence[int]) -> str:
    return "it" if len(set(steps)) == 1 else "them"


def condemnation(steps: Sequence[int]) -> str:
    """What an audit that was not clean means for the checkpoints that it should have confirmed."""
    return (
        f"{list_checkpoints(steps)} will never be confirmed, because this audit was not clean: do "
        f"not resume from {_it(steps)}"
    )


def resumed_from_condemned(step: int, condemned: Sequence[int], good: int | None) -> str:
    """What to say of a run that goes on from `step`; "" unless its checkpoint was condemned.

    Args:
        step: The start step of the new segment.
        condemned: Steps of the checkpoints that will never be confirmed.
        good: Step of the last good one, if there is any.
    """
    if step not in condemned or step == good:  # saved there once more, by a later segment
        return ""
    instead = f"from that of step {good}, the last good one" if good else "from an older run"
    return (
        f"the run goes on from step {step}, whose checkpoint was never confirmed: an audit or a "
        "comparison of weights after it was not clean, and what was found may be in these weights. "
        f"Resume {instead}"
    )


def distrust(condemned: Sequence[int], provisional: Sequence[int]) -> list[str]:
    """Which checkpoints nobody vouches for, as clauses; empty where there are none.

    Args:
        condemned: Steps of those that will never be confirmed.
        provisional: Steps of those that no audit has confirmed so far.
    """
    said = []
    if condemned:
        it = _it(condemned)
        was = "was" if it == "it" else "were"
        said.append(f"{list_checkpoints(condemned)} {was} never confirmed: do not resume from {it}")
    if provisional:
        still = "is" if _it(provisional) == "it" else "are"
        said.append(
            f"{list_checkpoints(provisional)} {still} provisional: not confirmed by an audit"
        )
    return said
