"""Check 2 in the course of a run: when a step is audited, what preflight has to say first.

`sdcwatch.guard.preflight` and `sdcwatch.guard.replay` make one preflight step and one audit; here
is what happens between them, from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sdcwatch.config import GuardConfig
from sdcwatch.core.checkpoint import audit_due
from sdcwatch.core.records import Check, Coverage, GuardState, Outcome, Phase, Verdict
from sdcwatch.core.text import list_names
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, missing_ranks
from sdcwatch.guard.fingerprint import ReplicaCheck
from sdcwatch.guard.nonfinite import own_step
from sdcwatch.guard.preflight import ReplayCheck
from sdcwatch.guard.replay import AuditResult, OwnStep
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.window import Decision, StepWindow

_PERTURBED = (
    "weights differ between the ranks during a backward and are equal after the update, as in "
    "sharpness-aware steps that climb by each rank's own gradient: climb by the reduced gradient"
)


@dataclass(frozen=True, slots=True)
class Decide:
    """What becomes of a verdict.

    Attributes:
        say: Gives it out and goes on.
        fail: Gives it out, and skips the update or stops as the configuration says.
    """

    say: Callable[[Verdict], Decision]
    fail: Callable[[Verdict], Decision]


class Audits:
    """Check 2 from step to step.

    Args:
        config: When audits are due.
        exchange: Where ranks agree on what to do.
        reporter: Takes what happened.
        check: Preflight, and what makes one audit.
        replicas: Check 3: weights are compared before replays are.
        gate: Told of each audit.
        decide: What becomes of a verdict.

    Attributes:
        last_clean: Step of the latest clean audit; None before the first, and since one failed.
        armed: Preflight has ended.
        postponed: An audit was due and could not be made: the next step makes up for it.
    """

    def __init__(  # noqa: PLR0913 - the collaborators of an audit, each once
        self,
        config: GuardConfig,
        exchange: Exchange,
        reporter: Reporter,
        *,
        check: ReplayCheck,
        replicas: ReplicaCheck,
        gate: CheckpointGate,
        decide: Decide,
    ) -> None:
        self._config, self._exchange, self._reporter = config, exchange, reporter
        self._preflight, self._ring, self._off = check.preflight, check.audit, check.off
        self._replicas, self._gate, self._decide = replicas, gate, decide
        self.last_clean: int | None = None
        self.armed = False
        self.postponed = False
        self._missing_since = -1
        self._apart_at: int | None = None

    def begin(self) -> None:
        """The run begins: there are no audits, or preflight asks first."""
        if self._off:
            self._preflight.decide(Coverage.OFF, self._off)
            self._arm()
        else:
            self._reporter.enter(
                GuardState.PREFLIGHT, "the first steps are checked against themselves"
            )

    def due(self, step: int) -> bool:
        """Whether `step` is to be audited. The same on every rank."""
        preflight, config = self._preflight, self._config
        if preflight.coverage is None:
            return True
        if preflight.coverage is Coverage.OFF:
            return False
        return self.postponed or audit_due(
            step, audit_every=config.audit_every, checkpoint_every=config.checkpoint_every
        )

    @property
    def deterministic(self) -> bool:
        """Whether audited steps need deterministic kernels."""
        return self._preflight.deterministic

    @property
    def trusted(self) -> bool:
        """Preflight did not find that replays differ from steps."""
        return bool(self._off) or self._preflight.coverage in (None, Coverage.FULL)

    @property
    def local(self) -> bool | None:
        """Whether replays run no collective; None before preflight has looked."""
        looked = self._preflight.coverage is not None and not self._off
        return self._preflight.local if looked else None

    def obstacle(self, window: StepWindow) -> str:
        """Why the step of this rank cannot be audited, or ""; preflight judges obstacles itself."""
        if window.backward is None or not window.backward.calls:
            return "no gradient arrived at an output of the module that DDP wraps"
        if not window.backward.audited:
            return "the module was called before the step was known to be audited"
        own = own_step(window)
        if own is None:  # pragma: no cover - an audited backward has digests
            return "nothing was captured"
        if self._preflight.coverage is None:
            return ""  # preflight says what to write instead
        if own.doors:
            return f"a gradient entered by another way than the outputs: {list_names(own.doors)}"
        return own.problem

    def run(self, window: StepWindow, *, recorded: bool) -> Decision:
        """Audit a step, if every rank can. Every rank calls it.

        Args:
            window: The step.
            recorded: Every rank has captured what can be audited.
        """
        step = window.step
        if self._exchange.anyone_joined():
            self.postponed = True
            reason = "a rank has run out of inputs; audits need every rank and wait for it"
            self._reporter.note_once("joined", reason)
            return Decision()
        if not recorded:
            return self._not_recorded(window)
        own = own_step(window)
        assert own is not None  # every rank has said so in the header
        self._reporter.flush()
        operation = f"the weights before the audit of step {step}"
        with self._reporter.timed(Check.REPLAY, Phase.DIGEST):
            equal = self._replicas.weights.equal(operation)
        if not equal:
            return self._apart(step)
        if self._preflight.coverage is None:
            with self._reporter.timed(Check.REPLAY, Phase.REPLAY):
                go_on = self._preflight.run(step, own)
            if not go_on:
                if self._preflight.coverage is not None:
                    self._arm()
                return Decision(audited=True)
        return self._audit(step, own)

    def _apart(self, step: int) -> Decision:
        """Weights of this backward differ between the ranks. Check 3 judges after the update.

        What a sharpness-aware optimizer does under `no_sync` is put back by then; damage is not.
        """
        put_back = self._apart_at is not None and self._replicas.passed_at == self._apart_at
        self._apart_at, self._replicas.disputed = step, True
        if not put_back:
            reason = "the replicas differ in this backward, so no comparison means anything"
            verdict = self._reporter.verdicts.not_run(step, reason, outcome=Outcome.VOID)
            return self._decide.say(verdict)
        if self._preflight.coverage is None:
            self._preflight.decide(Coverage.OFF, _PERTURBED)
            self._arm()
            return Decision(audited=True)
        return self._decide.say(self._reporter.verdicts.not_run(step, _PERTURBED))

    def _not_recorded(self, window: StepWindow) -> Decision:
        self.postponed = True
        step = window.step
        why = self.obstacle(window)
        reasons = missing_ranks(self._exchange, f"the audit of step {step}", why)
        again, self._missing_since = self._missing_since == step - 1, step
        if again:  # said at the first of them; the rest is counted
            self._reporter.window.counts[(Check.REPLAY, Outcome.NOT_RUN)] += 1
            return Decision()
        return self._decide.say(self._reporter.verdicts.without_record(step, reasons))

    def _audit(self, step: int, own: OwnStep) -> Decision:
        preflight = self._preflight
        self.postponed = False
        if preflight.coverage is Coverage.OUTPUTS_ONLY:
            own = replace(own, gradients=None)
        result = self._ring.run(step, own)
        self._reporter.audited(result.total, result.comparisons, result.seconds)
        outcome = result.judgement.outcome
        if not self.armed:
            if outcome in (Outcome.WIDESPREAD, Outcome.NONDETERMINISTIC):
                preflight.decide(*ring_coverage(result))
                self._arm()
                return Decision(audited=True)
            self._arm()
        if outcome is Outcome.PASS:
            self._clean(step)
            return Decision(audited=True)
        if outcome is not Outcome.NOT_RUN:
            # What was saved since the last clean audit may hold what this one has found.
            self.last_clean = None
            self._gate.forget()
        verdict = self._reporter.verdicts.replay(step, result)
        if outcome in (Outcome.WIDESPREAD, Outcome.NONDETERMINISTIC):
            self._ask_again(verdict)
        self.postponed = outcome is Outcome.NOT_RUN
        decision = self._decide.fail(verdict) if verdict.failed else self._decide.say(verdict)
        return replace(decision, audited=True)

    def _clean(self, step: int) -> None:
        reporter = self._reporter
        reporter.passed(Check.REPLAY)
        self.last_clean = step
        reporter.last_clean_audit = (step, time.time())
        reporter.audited_ranks = self._exchange.world_size
        reporter.steps_at_risk = 0
        self._gate.confirm(step)

    def _arm(self) -> None:
        """Preflight has an answer."""
        self.armed = True
        observing = self._config.mode == "observe"
        self._reporter.arm(self._preflight, self._reporter.step, observing=observing)

    def _ask_again(self, verdict: Verdict) -> None:
        """The computation does not repeat after all: nobody is blamed until the next preflight."""
        self.armed = False
        self._ring.forget_strikes()
        self._preflight.restart()
        self._reporter.enter(GuardState.PREFLIGHT, verdict.reason)


def ring_coverage(result: AuditResult) -> tuple[Coverage, str]:
    """What is left to compare if ranks do not even agree in the first audit."""
    losses = all(c.outputs_equal for c in result.comparisons)
    said = "; ".join((result.judgement.reason, *result.notes))
    coverage = Coverage.OUTPUTS_ONLY if losses else Coverage.OFF
    return coverage, f"ranks do not compute the same bits: {said}"
