"""When weights are compared and what follows: a failed check 3 taints the run for good."""

from __future__ import annotations

import time

import torch

from sdcwatch.core.records import Check, GateReason, GuardState, Phase, Verdict
from sdcwatch.core.schedule import fingerprint_due
from sdcwatch.errors import CorruptionDetected
from sdcwatch.guard.agreement import Operation, agree
from sdcwatch.guard.setup import Parts


class Replicas:
    """Check 3 in the course of a run.

    Attributes:
        tainted: The verdict that tainted the run, or None.
        passed_at: Step of the latest check that passed.
        loss_gradient: The gradient that arrived at the latest loss: tells apart loss scales.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.tainted: Verdict | None = None
        self.passed_at: int | None = None
        self.loss_gradient: torch.Tensor | None = None

    def after_update(self, step: int) -> None:
        """Compare if it is due. Every rank calls it after the same update."""
        config = self._parts.config
        due = fingerprint_due(
            step,
            fingerprint_every=config.fingerprint_every,
            checkpoint_every=config.checkpoint_every,
        )
        if due and self.tainted is None and not self._parts.exchange.anyone_joined():
            agree(self._parts.exchange, Operation.WEIGHTS, step)
            self.check(step)

    def check(self, step: int, *, saving: bool = False) -> None:
        """Compare now. Every rank calls it at the same step.

        Args:
            step: The step.
            saving: A checkpoint waits for the answer; it is withheld if replicas differ.

        Raises:
            CorruptionDetected: Replicas differ, unless the guard only observes.
        """
        reporter = self._parts.reporter
        with reporter.timed(Check.FINGERPRINT, Phase.DIGEST):
            equal = self._parts.weights.equal(f"the weight check of step {step}")
        reporter.window.weight_checks += 1
        if not equal:
            self.differ(step, saving=saving)
            return
        reporter.passed(Check.FINGERPRINT)
        reporter.last_weight_check = (step, time.time())
        self.passed_at = step

    def differ(self, step: int, *, saving: bool = False) -> None:
        """Replicas differ: say who dissents, once, and stop unless the guard only observes.

        The checkpoint of this step is withheld if one waits for the answer or is due.

        Raises:
            CorruptionDetected: Unless the guard only observes.
        """
        if self.tainted is not None:
            return
        parts, config = self._parts, self._parts.config
        gradient = self.loss_gradient
        judgement = parts.weights.dissent(
            f"the weight check of step {step}", None if gradient is None else float(gradient)
        )
        tensors = len(parts.guarded.replicated(buffers=config.buffers))
        verdict = self.tainted = parts.verdicts.fingerprint(step, judgement, tensors)
        parts.reporter.emit(verdict)
        parts.reporter.enter(GuardState.TAINTED, "the replicas hold different weights")
        if config.mode == "observe":
            return
        every = config.checkpoint_every
        if saving or (every is not None and step % every == 0 < step):
            parts.checkpoints.withhold(step, GateReason.FINGERPRINT, verdict.reason, None)
        raise CorruptionDetected(verdict)
