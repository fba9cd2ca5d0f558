"""Check 2 in the course of a run: when a step is audited, what preflight has to say first.

`sdcwatch.guard.preflight` and `sdcwatch.guard.replay` make one preflight step and one audit; here
is what happens between them, from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

from sdcwatch.config import GuardConfig
from sdcwatch.core.checkpoint import audit_due
from sdcwatch.core.history import CONFIRMED_TO_STOP
from sdcwatch.core.preflight import LONGEST_WAIT, Backoff, Owed, audited_share
from sdcwatch.core.records import Check, Coverage, Device, GuardState, Outcome, Phase, Verdict
from sdcwatch.core.replay import LISTED
from sdcwatch.core.text import list_names, list_ranks
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, missing_ranks
from sdcwatch.guard.fingerprint import ReplicaCheck
from sdcwatch.guard.nonfinite import own_step
from sdcwatch.guard.preflight import ReplayCheck
from sdcwatch.guard.replay import COLLECTIVE, AuditResult, OwnStep
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.window import Decision, StepWindow

_PERTURBED = (
    "weights differ between the ranks during a backward and are equal after the update, as in "
    "sharpness-aware steps that climb by each rank's own gradient: climb by the reduced gradient"
)


class AuditedFacts(TypedDict):
    """What audits say to `sdcwatch.core.checkpoint.GateFacts`."""

    last_clean_audit_step: int | None
    preflighted: bool
    audits_on: bool
    suspects: tuple[str, ...]
    widespread: bool
    differing: tuple[int, ...]


class Fail(Protocol):
    """Takes a verdict of a check that failed."""

    def __call__(self, verdict: Verdict, *, stop: bool = False) -> Decision:
        """Give it out and skip the update; or stop, as the configuration says, or if `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class Decide:
    """What becomes of a verdict.

    Attributes:
        say: Gives it out and goes on.
        fail: Gives it out, and skips the update or stops as the configuration says.
    """

    say: Callable[[Verdict], Decision]
    fail: Fail


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
        suspects: Devices named since the last clean audit, in words.
        widespread: More differed than broken devices explain, in a run that was armed, and no audit
            has been clean since.
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
        self._owed = Owed()
        self.suspects: dict[Device, str] = {}
        self.widespread = False
        self._apart_at: int | None = None
        self._backoff = Backoff()
        self._counted, self._left_out = -1, False
        self._said: tuple[int, ...] = ()

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
        if preflight.coverage is Coverage.OFF:
            return False
        if self._owed.due(step) or (preflight.coverage is None and not preflight.waits):
            return True
        due = audit_due(
            step, audit_every=config.audit_every, checkpoint_every=config.checkpoint_every
        )
        return due and not self._backs_off(step)

    def postpone(self, step: int) -> None:
        """The audit of this step cannot be made; a later one makes up for it."""
        every = self._config.audit_every or self._config.checkpoint_every
        self._owed = self._owed.missed(step, every or LONGEST_WAIT)

    def _backs_off(self, step: int) -> bool:
        """Whether a due step is left out because replays ended with errors; asked once a step."""
        if self._counted != step:
            tries, self._backoff = self._backoff.due()
            self._counted, self._left_out = step, not tries
        return self._left_out

    def named(self, verdict: Verdict) -> None:
        """A check has given its verdict: until an audit is clean, the gate knows the suspects."""
        for s in verdict.suspects:
            self.suspects[s.device] = f"rank {s.rank} on {s.node} ({s.gpu})"

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

    def gate_facts(self) -> AuditedFacts:
        """What the gate has to know of the audits."""
        off = self._preflight.coverage is Coverage.OFF
        return {
            "last_clean_audit_step": self.last_clean,
            "preflighted": self.armed or self.widespread,
            "audits_on": self.widespread or not off,
            "suspects": tuple(self.suspects.values()),
            "widespread": self.widespread,
            "differing": self._preflight.differing,
        }

    def obstacle(self, window: StepWindow) -> str:
        """Why the step of this rank cannot be audited, or ""; preflight judges obstacles itself."""
        audited = window.audited
        if audited is None or not audited.calls:
            return "no gradient arrived at an output of the module that DDP wraps"
        if not audited.audited:
            return "the module was called before the step was known to be audited"
        own = own_step(window)
        if own is None:  # pragma: no cover - an audited backward has digests
            return "nothing was captured"
        if self._preflight.coverage is None:
            return ""  # preflight says what to write instead
        if own.doors:
            return f"a gradient entered by another way than the outputs: {list_names(own.doors)}"
        return COLLECTIVE if own.communicates else own.problem

    def run(self, window: StepWindow, *, recorded: bool) -> Decision:
        """Audit a step, if every rank can. Every rank calls it.

        Args:
            window: The step.
            recorded: Every rank has captured what can be audited.
        """
        step = window.step
        if self._exchange.anyone_joined():
            self.postpone(step)
            reason = "a rank has run out of inputs; audits need every rank and wait for it"
            self._reporter.note_once("joined", reason)
            return Decision()
        if not recorded:
            return self._not_recorded(window)
        own = own_step(window)
        assert own is not None  # every rank has said so in the header
        if self._preflight.coverage is None and own.moved:
            self._replicas.forward_writes = True
        self._reporter.flush()
        operation = f"the weights before the audit of step {step}"
        with self._reporter.timed(Check.REPLAY, Phase.DIGEST):
            equal = self._replicas.weights.equal(operation)
        if not equal:
            return self._apart(step)
        if self._preflight.coverage is None:
            self._owed = Owed()
            with self._reporter.timed(Check.REPLAY, Phase.REPLAY):
                go_on = self._preflight.run(step, own)
            self._say_who_differs(step)
            if not go_on:
                if self.widespread and self._preflight.coverage is Coverage.OFF:
                    self._preflight.restart(wait=True)  # until the ring has been clean once
                elif self._preflight.coverage is not None:
                    self._arm()
                return Decision(audited=True)
        return self._audit(step, own)

    def _apart(self, step: int) -> Decision:
        """Weights of this backward differ between the ranks. Check 3 judges after the update.

        What a sharpness-aware optimizer does under `no_sync` is put back by then; damage is not.
        """
        put_back = self._apart_at is not None and self._replicas.passed_at == self._apart_at
        self._apart_at = step
        self._replicas.apart()
        if not put_back:
            reason = "the replicas differ in this backward, so no comparison means anything"
            verdict = self._reporter.verdicts.not_run(step, reason, outcome=Outcome.VOID)
            return self._decide.say(verdict)
        if self._preflight.coverage is None:
            self._preflight.decide(Coverage.OFF, _PERTURBED)
            self._arm()
            return Decision(audited=True)
        return self._decide.say(self._reporter.verdicts.not_run(step, _PERTURBED))

    def _say_who_differs(self, step: int) -> None:
        """Once for each set of ranks that make something else of the common micro-batch."""
        preflight = self._preflight
        common = preflight.common
        if common is None:
            return
        everybody = tuple(range(self._exchange.world_size))
        ranks = everybody if common.sides else preflight.differing
        if ranks and ranks != self._said:
            self._decide.say(self._reporter.verdicts.differs(step, common, ranks[:LISTED]))
        self._said = ranks

    def _not_recorded(self, window: StepWindow) -> Decision:
        step, again = window.step, self._owed.misses > 0
        self.postpone(step)
        why = self.obstacle(window)
        reasons = missing_ranks(self._exchange, f"the audit of step {step}", why)
        if COLLECTIVE in reasons.values():
            verdict = self._reporter.verdicts.without_record(step, reasons)
            self._ask_again(verdict, deterministic=False)
            return self._decide.say(verdict)
        if again:  # said at the first of them; the rest is counted
            self._reporter.counted(Check.REPLAY, Outcome.NOT_RUN)
            return Decision()
        return self._decide.say(self._reporter.verdicts.without_record(step, reasons))

    def _audit(self, step: int, own: OwnStep) -> Decision:
        preflight = self._preflight
        self._owed = Owed()
        if preflight.coverage is Coverage.OUTPUTS_ONLY:
            own = replace(own, gradients=None)
        self._say_the_share(own)
        result = self._ring.run(step, own)
        self._reporter.audited(result.total, result.comparisons, result.seconds)
        outcome = result.judgement.outcome
        if preflight.coverage is None and self._first_ring(result):
            return Decision(audited=True)
        verdict = self._reporter.verdicts.replay(step, result)
        if outcome in (Outcome.PASS, Outcome.DIFFERS):
            self._clean(step, verdict)
            return Decision(audited=True)
        if outcome is Outcome.NOT_RUN:
            return replace(self._not_run(verdict), audited=True)
        self._backoff = self._backoff.succeeded()
        # What was saved since the last clean audit may hold what this one has found.
        self.last_clean = None
        judged = self._judged(verdict)
        self._gate.condemn(step)
        return replace(judged, audited=True)

    def _say_the_share(self, own: OwnStep) -> None:
        """The preflight record tells it; a loop may accumulate more later."""
        known = self._preflight.coverage is None or own.of == self._preflight.micro_batches
        if not known and (share := audited_share(own.of)):
            self._reporter.note_once(f"share_{own.of}", f"audits look at {share}", level="info")

    def _first_ring(self, result: AuditResult) -> bool:
        """One of the first audits; whether it ended preflight without full coverage."""
        preflight, outcome = self._preflight, result.judgement.outcome
        again = self.widespread and outcome is Outcome.WIDESPREAD
        if outcome in (Outcome.WIDESPREAD, Outcome.NONDETERMINISTIC) and not again:
            preflight.decide(*ring_coverage(result))
            self._arm()
            return True
        preflight.ringed(outcome)
        if preflight.coverage is not None:
            self._arm()
        return False

    def _not_run(self, verdict: Verdict) -> Decision:
        """Replays ended with errors: ever fewer due steps try again; the first error is told."""
        self._backoff = self._backoff.failed()
        if self._backoff.alarms:
            return self._decide.say(verdict)
        self._reporter.counted(Check.REPLAY, Outcome.NOT_RUN)
        return Decision()

    def _judged(self, verdict: Verdict) -> Decision:
        """An audit that compared something was not clean."""
        outcome, history = verdict.outcome, self._ring.history
        self.widespread = self.widespread or (self.armed and outcome is Outcome.WIDESPREAD)
        if outcome in (Outcome.WIDESPREAD, Outcome.NONDETERMINISTIC) or history.asks_for_preflight:
            self._ask_again(verdict)
        if not verdict.failed:
            return self._decide.say(verdict)
        if often := history.must_stop:
            reason = (
                f"{verdict.reason}; {CONFIRMED_TO_STOP} audits in a row have confirmed "
                f"{list_ranks(often)}, so the run stops"
            )
            return self._decide.fail(replace(verdict, reason=reason), stop=True)
        return self._decide.fail(verdict)

    def _clean(self, step: int, verdict: Verdict) -> None:
        """Everything matched but ranks that differ from the start, which are left out."""
        reporter, differing = self._reporter, self._preflight.differing
        self._backoff = self._backoff.succeeded()
        self.suspects.clear()
        self.widespread = False
        self.last_clean = step
        reporter.last_clean_audit = (step, time.time())
        reporter.audited_ranks = self._exchange.world_size - len(differing)
        reporter.steps_at_risk = 0
        if verdict.outcome is Outcome.PASS:
            reporter.passed(Check.REPLAY)
            self._gate.confirm(step)
        elif set(differing) <= set(self._said):
            reporter.counted(Check.REPLAY, Outcome.DIFFERS, verdict.cause)
        else:
            self._decide.say(verdict)
        self._said = differing

    def _arm(self) -> None:
        """Preflight has an answer."""
        self.armed = True
        observing = self._config.mode == "observe"
        self._reporter.arm(self._preflight, self._reporter.step, observing=observing)

    def _ask_again(self, verdict: Verdict, *, deterministic: bool = True) -> None:
        """What audits can promise is asked again: nobody is blamed until the next preflight."""
        self.armed = False
        self._ring.forget_strikes()
        self._preflight.restart(deterministic=deterministic)
        self._reporter.enter(GuardState.PREFLIGHT, verdict.reason)


def ring_coverage(result: AuditResult) -> tuple[Coverage, str]:
    """What is left to compare if ranks do not even agree in the first audit."""
    losses = all(c.outputs_equal for c in result.comparisons)
    said = "; ".join((result.judgement.reason, *result.notes))
    coverage = Coverage.OUTPUTS_ONLY if losses else Coverage.OFF
    return coverage, f"ranks do not compute the same bits: {said}"
