"""Updates that did not happen: what was decided, carried out, carried over, and said of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sdcwatch.checks.nonfinite import confirm_nonfinite
from sdcwatch.core.outcomes import finding
from sdcwatch.core.records import Action, Check, SkipReason, UpdateSkipped
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.moves import movers, told
from sdcwatch.guard.optimizer import Snapshot, is_foreign
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.window import Decision

UNSURE = 4
"""Backwards whose weights are fingerprinted, where somebody else's optimizer may write to `.data`;
so many more whenever an update does not follow."""
FORGET = 20
"""Updates of one backward each, in a row, after which those of two are forgotten."""


class SkipTracker:
    """Keeps count of skipped updates.

    An update may take two backwards with weights that a method without a hook moves in between, as
    SAM's. It is one update: what was decided at the first backward is carried to the second, and
    the weights are put back before that.

    Args:
        guarded: Whose gradients are looked at.
        reporter: Takes the records.
        most: Skips in a row after which all ranks stop.
        weights: Fingerprint of all weights now, int64 (2,).
        steppers: What is guarded of those that step.

    Attributes:
        carried: The failed decision of an earlier backward that spoils the next update, or None.
        second: The backward to come, or just over, is the second of its update.
    """

    def __init__(
        self,
        guarded: Guarded,
        reporter: Reporter,
        most: int,
        weights: Callable[[], torch.Tensor],
        steppers: Callable[[], Sequence[Any]],
    ) -> None:
        self._guarded, self._reporter, self._most = guarded, reporter, most
        self._weights, self._steppers = weights, steppers
        self._in_a_row = 0
        self._kept: torch.Tensor | None = None
        self._unstepped: tuple[int, Decision] | None = None
        self.carried: Decision | None = None
        self._decided: torch.Tensor | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self._halves, self._half = 0, False
        self._whole = 0
        self.second = False
        self._said = False
        self._unsure = UNSURE
        self._first: list[torch.Tensor] = []  # weights at the end of a first backward

    # --- an update ---

    def decided(self, decision: Decision) -> None:
        """The backward has just ended, and nothing has moved yet. Does not wait for the device."""
        if self.carried is not None:
            return
        if not self.second and not decision.skip and self.two_calls:
            self._first = self._copied()
        foreign = [one for one in self._steppers() if is_foreign(one)]
        unsure = self._unsure > 0
        self._unsure -= unsure
        self._decided, self._snapshots = None, {}
        kept = foreign or (list(self._steppers()) if self.two_calls else [])
        if (kept and decision.skip) or (foreign and unsure):
            self._decided = self._weights()
        if decision.skip:
            self._snapshots = {id(one): Snapshot(one, self._trained()) for one in kept}

    def _copied(self) -> list[torch.Tensor]:
        weights, held = [p.detach() for p in self._trained()], self._first
        if [h.shape for h in held] != [w.shape for w in weights]:
            return [w.clone() for w in weights]
        torch._foreach_copy_(held, weights)
        return held

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for _, p in self._guarded.trained]

    def kept(self, optimizer: Any) -> Snapshot | None:
        """What an optimizer held when its update was decided against, if that was kept."""
        return self._snapshots.get(id(optimizer))

    def updated(self) -> None:
        """The optimizer has stepped."""
        self._in_a_row = 0
        self._whole = 0 if self.second else self._whole + 1
        if self._whole >= FORGET:  # a person had loaded weights, now and then
            self._halves = 0
        self._let_go()

    def skipped(self, step: int, decision: Decision) -> None:
        """An update did not happen.

        Raises:
            CorruptionDetected: Too many in a row.
        """
        if self.carried is not None:
            for snapshot in self._snapshots.values():
                snapshot.put_back()
        elif self.second and self._first:
            with torch.no_grad():  # adding a perturbation and taking it off leaves a rounding
                torch._foreach_copy_([p.detach() for p in self._trained()], self._first)
        self.carried = None
        self._let_go()
        reason = _reason(decision)
        if reason in (SkipReason.NONFINITE, SkipReason.REPLAY):
            self._in_a_row += 1
        if decision.skip and self._kept is None:
            self._kept = self._weights()
        self._reporter.emit(
            UpdateSkipped(
                step=step, time=time.time(), reason=reason, consecutive=max(1, self._in_a_row)
            )
        )
        if decision.verdict is not None and self._in_a_row > self._most:
            raise finding(replace(decision.verdict, action=Action.STOP))

    def _let_go(self) -> None:
        self.second = False
        self._decided, self._snapshots = None, {}

    # --- weights that moved without a hook ---

    @property
    def two_calls(self) -> bool:
        """Whether updates of this loop take two backwards, with a move of the weights between."""
        if self._halves != 1:
            return self._halves > 1
        return any(map(is_foreign, self._steppers()))  # else a person may have loaded weights

    def moved_between(self, decision: Decision, moved: Sequence[str]) -> None:
        """The module is called, and no optimizer has stepped since the last backward.

        Args:
            decision: What was decided at the end of it.
            moved: Names of the weights that moved since.
        """
        half = bool(moved)
        if not half and self._decided is not None:  # it may have been written through .data
            half = not torch.equal(self._decided, self._weights())
            self._unsure = UNSURE
        if not half:
            return
        if not decision.skip:
            self._halves += 1
        elif not self.two_calls and self._finite():
            return  # loaded by hand, say: the step is given up
        else:
            self._put_back(decision)
        self._half = True

    def _put_back(self, decision: Decision) -> None:
        for snapshot in self._snapshots.values():
            snapshot.put_weights_back()
        self.carried = self.carried or decision
        self._zero_gradients()
        if self._whole:  # the update before this one took one backward
            self._reporter.note_once(
                "two_calls",
                "weights were moved after a backward whose update is skipped, as by the first call "
                "of a sharpness-aware optimizer; they were put back. Load weights before the "
                "backward of a step, or after its update",
            )

    def _finite(self) -> bool:
        return not any(confirm_nonfinite(p.detach()) for _, p in self._guarded.named)

    def say_moved(
        self,
        moved: Sequence[str],
        parameters: Sequence[torch.nn.Parameter] = (),
        *,
        after_skip: bool = False,
    ) -> None:
        """Say once that weights moved by none of the optimizers that are known, and by whom."""
        if self._said:
            return
        self._said = True
        known = self._steppers()
        text, level = told(moved, lambda: movers(known, parameters), after_skip=after_skip)
        self._reporter.note_once("moved_unseen", text, level=level)

    def verify(self) -> None:
        """At the next call: what was said to be skipped has not moved the weights."""
        kept, self._kept = self._kept, None
        if kept is not None and not torch.equal(kept, self._weights()):
            self.say_moved((), self._trained(), after_skip=True)

    # --- a step that was left without an update ---

    def left(self, step: int, decision: Decision) -> None:
        """The next forward came before an update: given up, accumulating, or half an update."""
        self.second, self._half = self._half, False
        if self.second:
            return
        self._unstepped = (step, decision)

    def backward_begins(self) -> None:
        """Find out which, by the gradients that are there now."""
        if self._unstepped is None:
            return
        if not self._gradients_remain():
            self.give_up()
            return
        (_, decision), self._unstepped = self._unstepped, None
        if decision.skip:
            self.carried = decision
            self._zero_gradients()

    def give_up(self) -> None:
        """The step that was left unstepped stays so."""
        unstepped, self._unstepped = self._unstepped, None
        if unstepped is not None:
            self.skipped(*unstepped)

    def _zero_gradients(self) -> None:
        for _, parameter in self._guarded.named:
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    def _gradients_remain(self) -> bool:
        gradients = (p.grad for _, p in self._guarded.named if p.grad is not None)
        return any(bool((g.coalesce().values() if g.is_sparse else g).any()) for g in gradients)


def _reason(decision: Decision) -> SkipReason:
    verdict = decision.verdict
    if verdict is None or not decision.skip:
        return SkipReason.NOT_STEPPED
    if verdict.check is Check.REPLAY:
        return SkipReason.REPLAY
    return SkipReason.SCALER if decision.scaling else SkipReason.NONFINITE
