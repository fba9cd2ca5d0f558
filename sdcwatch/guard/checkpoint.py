"""The checkpoint gate: saves, withholds, and confirms what was saved between two audits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from sdcwatch.core.checkpoint import GateDecision, is_confirmable
from sdcwatch.core.records import CheckpointEvent, CheckpointResult, GateReason, Note
from sdcwatch.core.saved import condemnation
from sdcwatch.errors import ConfigurationError, SdcwatchError
from sdcwatch.guard.exchange import SAVE_SECONDS, Exchange
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.sharing import gather_json


class CheckpointGate:
    """Carries out the gate's decision on every rank, and remembers what is provisional."""

    def __init__(self, exchange: Exchange, reporter: Reporter) -> None:
        self._exchange, self._reporter = exchange, reporter
        self._provisional: list[tuple[int, str]] = []
        self._saving = False

    def carry_out(
        self,
        step: int,
        decision: GateDecision,
        save: Callable[[], object],
        *,
        on: Literal["rank0", "all"],
        path: str,
    ) -> bool:
        """Save or withhold. Every rank calls it with the same decision.

        Returns:
            Whether the checkpoint was saved.

        Raises:
            BaseException: What `save` raised, on the rank where it did.
            SdcwatchError: `save` raised on another rank, or calls `save_checkpoint` itself.
        """
        if self._saving:
            msg = (
                "Expected `save` to write a checkpoint, but got one that calls save_checkpoint, "
                "which every rank would have to. Write there with torch.save."
            )
            raise SdcwatchError(msg)
        if not decision.save:
            self.withhold(step, decision.reason, decision.detail, decision.audit_age)
            return False
        error: BaseException | None = None
        if on == "all" or self._exchange.rank == 0:
            self._saving = True
            try:
                save()
            except BaseException as raised:  # DCP raises one; the others wait for this rank
                error = raised
            finally:
                self._saving = False
        operation = f"the end of save_checkpoint of step {step}"
        failed = self._exchange.max_int64s(
            (int(error is not None),), operation, extra_seconds=SAVE_SECONDS
        )[0]
        if failed:
            self._failed(step, decision, error, operation)
        self._allowed(step, decision, decision.reason, path)
        return True

    def allow(self, step: int, decision: GateDecision) -> bool:
        """Answer one who saves without the guard. Every rank calls it with the same decision.

        Returns:
            Whether a checkpoint may be saved. Whether it was, nobody says.
        """
        if not decision.save:
            self.withhold(step, decision.reason, decision.detail, decision.audit_age)
            return False
        framework = GateReason.FRAMEWORK if decision.reason is GateReason.OK else decision.reason
        self._allowed(step, decision, framework, "")
        return True

    def _allowed(self, step: int, decision: GateDecision, reason: GateReason, path: str) -> None:
        self._emit(step, decision.result, reason, decision.detail, decision.audit_age, path)
        if is_confirmable(decision):
            self._provisional.append((step, path))

    def withhold(self, step: int, reason: GateReason, detail: str, audit_age: int | None) -> None:
        """Say that a checkpoint was withheld."""
        self._emit(step, CheckpointResult.WITHHELD, reason, detail, audit_age)

    def confirm(self, step: int) -> None:
        """A clean audit confirms what was provisional."""
        confirmed, self._provisional = self._provisional, []
        for saved, path in confirmed:
            self._reporter.emit(
                CheckpointEvent(
                    step=saved,
                    time=time.time(),
                    result=CheckpointResult.CONFIRMED,
                    reason=GateReason.OK,
                    detail=f"the audit of step {step} was clean",
                    audit_age=0,
                    path=path,
                )
            )

    def condemn(self, step: int) -> None:
        """An audit was not clean: nothing will confirm what was saved since the last clean one."""
        condemned, self._provisional = [saved for saved, _ in self._provisional], []
        if condemned:
            code, text = "checkpoints_condemned", condemnation(condemned)
            self._reporter.emit(Note(step=step, time=time.time(), code=code, message=text))

    def _failed(
        self, step: int, decision: GateDecision, error: BaseException | None, operation: str
    ) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        rows = gather_json(self._exchange, text, operation)
        said = {rank: row for rank, row in enumerate(rows) if row}
        detail = "; ".join(f"save raised on rank {r}: {t.rstrip('.')}" for r, t in said.items())
        self._emit(step, CheckpointResult.FAILED, GateReason.SAVE_ERROR, detail, decision.audit_age)
        if error is not None:
            raise error
        msg = f"Expected the checkpoint of step {step} to be saved, but {detail}. See its log."
        raise SdcwatchError(msg)

    def _emit(
        self,
        step: int,
        result: CheckpointResult,
        reason: GateReason,
        detail: str,
        audit_age: int | None,
        path: str = "",
    ) -> None:
        self._reporter.emit(
            CheckpointEvent(
                step=step,
                time=time.time(),
                result=result,
                reason=reason,
                detail=detail,
                audit_age=audit_age,
                path=path,
            )
        )


def require_savable(save: object, on: str) -> None:
    """Check how and where a checkpoint is to be saved.

    Raises:
        ConfigurationError: `save` cannot be called, or `on` is neither "rank0" nor "all".
    """
    if not callable(save):
        msg = (
            f"Expected `save` to be a function that writes the checkpoint, but got {save!r:.80}. "
            "Pass one, as lambda: torch.save(model.state_dict(), path)."
        )
        raise ConfigurationError(msg)
    if on not in ("rank0", "all"):
        msg = f'Expected `on` to be "rank0" or "all", but got {on!r}. Pass one of them.'
        raise ConfigurationError(msg)
