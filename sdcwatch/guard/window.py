"""One optimizer step of the guard: the micro-batches in it and what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.captured import Backward, Kept
from sdcwatch.checks.determinism import DeterministicSwitches
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.shadow import ForwardShadow
from sdcwatch.core.records import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks agreed on at the end of the synchronising backward.

    Attributes:
        skip: No update on any rank.
        verdict: The verdict behind it, if a check failed.
        audited: An audit or a preflight step was made.
    """

    skip: bool = False
    verdict: Verdict | None = None
    audited: bool = False

    @property
    def scaling(self) -> bool:
        """The loss scale overflowed: the scaler skips the step by itself, and rightly."""
        return self.verdict is not None and self.verdict.cause is Cause.SCALING


@dataclass(frozen=True, slots=True)
class Recorder:
    """What keeps a micro-batch for a replay, and what is switched so that the replay can repeat it.

    Attributes:
        capture: Keeps what a call of the module is made of.
        switches: Deterministic kernels, for steps that are audited.
        shadow: Keeps what forwards move, to be put back after a skipped step.
    """

    capture: CallCapture
    switches: DeterministicSwitches
    shadow: ForwardShadow


@dataclass(slots=True)
class StepWindow:
    """Everything between one update and the next.

    Attributes:
        step: Its number.
        backward: What the synchronising backward left; None before it has ended, and where no call
            of the module got a gradient in it.
        planned: Number of the micro-batch that an audit of the step looks at, from 0; None for the
            last one.
        earlier: What backwards of the same step left that only accumulated.
        accumulated: How many of them there were.
        chosen: The one of these that an audit looks at; None if it looks at the last one.
        decision: None until the synchronising backward has ended.
        stepped: Optimizers that have stepped, or were made to skip, by id.
        updated: All of them have.
        started: When it began, in seconds of `time.perf_counter`.
    """

    step: int
    planned: int | None = None
    backward: Backward | None = None
    earlier: Kept = field(default_factory=lambda: Kept((), 0))
    accumulated: int = 0
    chosen: Backward | None = None
    decision: Decision | None = None
    stepped: set[int] = field(default_factory=set)
    updated: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def count(self) -> int:
        """Micro-batches of the step, at the end of its synchronising backward."""
        return self.accumulated + 1

    @property
    def audited(self) -> Backward | None:
        """The backward that an audit looks at."""
        return self.chosen or self.backward

    def wanted(self, *, synchronises: bool) -> bool:
        """Whether an audit of the step would look at the call that begins.

        One call in a step, wherever in it: where the planned micro-batch never came, the last one.
        """
        if self.chosen is not None:
            return False
        return synchronises or self.accumulated == self.planned

    def accumulate(self, backward: Backward) -> bool:
        """A backward that only accumulated has ended; whether it is the one to be audited."""
        self.accumulated += 1
        if self.chosen is not None or not backward.audited:
            return False
        self.chosen = backward
        return True

    def forget(self) -> None:
        """Let go of what was kept for checks 1 and 2: inputs and gradients of every micro-batch."""
        self.backward = self.chosen = None
        self.earlier = Kept((), self.earlier.dropped)

    def micro_batches(self) -> list[MicroBatch]:
        """Every micro-batch of the step that was kept, in order. Copies those of plain steps."""
        backwards = [*self.earlier.backwards, *([self.backward] if self.backward else [])]
        return [b.micro_batch for b in backwards]
