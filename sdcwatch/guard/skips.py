"""Updates that do not happen, and gradients that outlive the backward they came from.

A loop may make several synchronising backwards before one `optimizer.step()`, without `no_sync`.
Only at the beginning of the next backward can the guard see whether the gradients of the last one
are still there. If they are, a failed one among them spoils the update that follows: its gradients
are zeroed and the update is skipped. If they are not, the loop has given that step up, as
GradScaler does.
"""

from __future__ import annotations

import time
from dataclasses import replace

from sdcwatch.core.records import Action, Check, SkipReason, UpdateSkipped
from sdcwatch.errors import CorruptionDetected
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.setup import Guarded
from sdcwatch.guard.window import Decision


class Skips:
    """Keeps count of skipped updates.

    Args:
        guarded: Whose gradients are looked at.
        reporter: Takes the records.
        most: Skips in a row after which all ranks stop.

    Attributes:
        carried: The failed decision of an earlier backward that spoils the next update, or None.
    """

    def __init__(self, guarded: Guarded, reporter: Reporter, most: int) -> None:
        self._guarded, self._reporter, self._most = guarded, reporter, most
        self._in_a_row = 0
        self._unstepped: tuple[int, Decision] | None = None
        self.carried: Decision | None = None

    def updated(self) -> None:
        """The optimizer has stepped."""
        self._in_a_row = 0

    def skipped(self, step: int, decision: Decision) -> None:
        """An update did not happen.

        Raises:
            CorruptionDetected: Too many in a row.
        """
        self.carried = None
        reason = _reason(decision)
        if reason in (SkipReason.NONFINITE, SkipReason.REPLAY):
            self._in_a_row += 1
        self._reporter.emit(
            UpdateSkipped(
                step=step, time=time.time(), reason=reason, consecutive=max(1, self._in_a_row)
            )
        )
        if decision.verdict is not None and self._in_a_row > self._most:
            raise CorruptionDetected(replace(decision.verdict, action=Action.STOP))

    def left(self, step: int, decision: Decision) -> None:
        """The next forward came before an update: given up, or accumulating."""
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
            for _, parameter in self._guarded.named:
                if parameter.grad is not None:
                    parameter.grad.detach().zero_()

    def give_up(self) -> None:
        """The step that was left unstepped stays so."""
        unstepped, self._unstepped = self._unstepped, None
        if unstepped is not None:
            self.skipped(*unstepped)

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
