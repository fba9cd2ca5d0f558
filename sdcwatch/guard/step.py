"""One training step in order: what runs at the end of the backward, and around the update.

Everything that decides runs at the end of the synchronising backward, in a callback of the autograd
engine that queues itself once more so as to run behind DDP's own. There the reduced gradients are
final, every rank is at the same place, and an exception leaves ``loss.backward()`` with its type.
`optimizer.step()` only carries the decision out: it is the one call that does not happen when it
matters.

A loop may make several synchronising backwards before one `optimizer.step()`, without `no_sync`.
Only at the beginning of the next backward can the guard see whether the gradients of the last one
are still there. If they are, a failed one among them spoils the update that follows: its gradients
are zeroed and the update is skipped. If they are not, the loop has given that step up, as
GradScaler does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sdcwatch.checks import torch_internals as internals
from sdcwatch.config import GuardConfig
from sdcwatch.core.nonfinite import RankFinite, after_join
from sdcwatch.core.outcomes import finding
from sdcwatch.core.preflight import audited_micro_batch
from sdcwatch.core.records import (
    Action,
    Check,
    Outcome,
    Phase,
    Verdict,
)
from sdcwatch.core.text import list_names
from sdcwatch.errors import CorruptionDetected, Desync, RankGone
from sdcwatch.guard.auditing import Audits, Decide
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Code, Exchange, agree_on_device
from sdcwatch.guard.fingerprint import ReplicaCheck
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.moves import WeightWatch
from sdcwatch.guard.nonfinite import NonfiniteCheck
from sdcwatch.guard.observing import (
    fill_with_nan,
    gradient_homes,
    gradients_hold_nan,
    holds_nan,
    look,
    not_replayable,
    observed,
    weights_nonfinite,
)
from sdcwatch.guard.optimizer import Snapshot, held_by
from sdcwatch.guard.preflight import ReplayCheck
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.skips import SkipTracker
from sdcwatch.guard.watchdog import Watchdog
from sdcwatch.guard.window import Decision, Recorder, StepWindow


class StepController:
    """The state of a guarded loop from step to step.

    Args:
        config: When audits are due, and what a failed check leads to.
        guarded: The model and the optimizer.
        exchange: Where ranks agree on what to do.
        reporter: Takes what happened.
        recorder: Keeps micro-batches for a replay.
        nonfinite: Check 1.
        replay: Check 2, and preflight.
        replicas: Check 3.
        gate: Told of each audit.
        watchdog: Told where the training thread may hang; None for a world of one.

    Attributes:
        optimizers: Those that update the model, found later ones included.
        step: Current step; before the first, the one resumed from.
        last_verdict: Latest verdict that was not a pass.
        audits: Check 2, from step to step.
        skips: Updates that did not happen.
        error: What the guard raised in a backward or an update, for the last record.
        recorded_loss: What `Guard.record_loss` was given, until it is read.
        thread: Which one calls the module.
        over: The run is being ended, perhaps by another thread than the one that trains.
        recover: Puts back what an optimizer step that ended in an exception left.
    """

    def __init__(  # noqa: PLR0913 - the collaborators of a step, each once
        self,
        config: GuardConfig,
        guarded: Guarded,
        exchange: Exchange,
        reporter: Reporter,
        *,
        recorder: Recorder,
        nonfinite: NonfiniteCheck,
        replay: ReplayCheck,
        replicas: ReplicaCheck,
        gate: CheckpointGate,
        watchdog: Watchdog | None,
    ) -> None:
        self._config, self._guarded = config, guarded
        self._exchange, self._reporter = exchange, reporter
        self._recorder, self._nonfinite_check = recorder, nonfinite
        self._replicas, self._watchdog = replicas, watchdog
        self.step = config.start_step
        self.optimizers = list(guarded.optimizers)
        self.last_verdict: Verdict | None = None
        self.audits = Audits(
            config,
            exchange,
            reporter,
            check=replay,
            replicas=replicas,
            gate=gate,
            decide=Decide(self._say, self._failed),
        )
        self._window: StepWindow | None = None
        self._queued = False
        self._watch = WeightWatch(guarded.trained)
        self._running = 0
        self._last_count: int | None = None
        self.skips = SkipTracker(
            guarded,
            reporter,
            config.max_consecutive_skips,
            recorder.capture.weights,
            lambda: (*self.optimizers, *guarded.wrappers),
        )
        self.error: BaseException | None = None
        self._synchronises = True
        self.thread, self.over = threading.get_ident(), False
        self.recorded_loss: torch.Tensor | None = None
        self.recover: Callable[[], None] = lambda: None
        self.audits.begin()

    # --- a call of the module ---

    def call_begins(self) -> bool:
        """A call of the module with gradients begins; whether to copy what a replay needs.

        Raises:
            CorruptionDetected: Too many updates in a row were skipped.
        """
        if internals.current_graph_task() >= 0:  # a checkpoint recomputes
            return False
        self.thread = threading.get_ident()
        self.recover()
        self._look_at_weights()
        before = self._window
        window = self._open()
        begun = self.skips.second and self._recorder.shadow.active  # with the first half
        if window is not before and self._config.mode != "observe" and not begun:
            with internals.dispatch_modes_off():
                self._recorder.shadow.begin()
        self._synchronises = self._guarded.synchronises
        wanted = window.wanted(synchronises=self._synchronises)
        if not wanted or not self.audits.due(window.step):
            return False
        if self.audits.deterministic:
            self._recorder.switches.apply()
        return True

    def _look_at_weights(self) -> None:
        """Whether they moved since the last step or backward, by whom, and what that means."""
        window, moved = self._window, self._watch.called()
        if window is not None and window.decision is not None and not window.stepped:
            self.skips.moved_between(window.decision, moved)
            if self.skips.carried is not None:  # and has put them back
                self._watch.restart()
        if moved and not self.stepping and not self.skips.two_calls:
            self.skips.say_moved(moved, self._watch.parameters)
        self.skips.verify()

    def weights_placed(self) -> None:
        """They have moved, and rightly."""
        self._watch.forget()

    def _open(self) -> StepWindow:
        if self._window is not None and self._window.decision is not None:
            self.settle()
        elif self._queued:  # the last backward died on its way
            self.abandon()
        if self._window is None:
            self.step += 1
            self.error = None  # the loop goes on: whoever caught it has lived with it
            self._reporter.step = self.step
            planned = audited_micro_batch(self._config.seed, self.step, self._last_count)
            self._window = StepWindow(self.step, planned)
        return self._window

    # --- the backward ---

    def gradient_arrives(self) -> None:
        """The first gradient of a backward that adds to the gradients of the module."""
        if self._synchronises:
            self._open()
            self._backward_begins()
        else:
            # Before this backward adds to gradients: afterwards those of the last step seem left.
            self._end_skips()
            internals.at_end_of_backward(self._accumulated)

    def bucket_arrived(self) -> None:
        """DDP reduces a bucket: begins the backward if no gradient came through the module."""
        if not self._queued and internals.current_graph_task() >= 0:
            self._open()
            self._backward_begins()

    def _end_skips(self) -> None:
        """The last step ends here, if nothing has ended it: perhaps one skip too many."""
        try:
            self.skips.backward_begins()
        except BaseException as error:
            self.error = error
            raise

    def _accumulated(self) -> None:
        """A backward under ``no_sync`` has ended: nothing is decided."""
        with internals.dispatch_modes_off():
            backward = self._recorder.capture.end_backward()
            if backward is None:
                return
            if self._window is not None and self._window.accumulate(backward):
                self._recorder.switches.restore()
            self._recorder.capture.keep(backward)

    def _backward_begins(self) -> None:
        if self._queued:
            return
        self._queued = True
        self._enter_danger(self.step)
        self._end_skips()
        skips = self._config.mode != "observe"
        self._nonfinite_check.probes.begin(gradient_homes(self._guarded), keep=skips)
        internals.at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        window, capture = self._window, self._recorder.capture
        if window is None or not self._queued:
            return
        self._leave_danger()
        try:
            with internals.dispatch_modes_off():
                self._recorder.shadow.writes(self._watch.backward_ended())
                window.backward, window.earlier = capture.end_backward(), capture.take_kept()
                self._last_count = window.count
                self._decide(window)
                self._replicas.software.backward_ended()
        except (CorruptionDetected, Desync, RankGone) as error:
            self.error = error
            raise
        finally:
            if window.decision is None or window.decision.verdict or window.decision.audited:
                self._watch.mark()  # replays put back what they write
            self._clear()

    def _decide(self, window: StepWindow) -> None:
        reporter = self._reporter
        probes = self._nonfinite_check.probes
        with reporter.timed(Check.NONFINITE, Phase.PROBE):
            recorded, self.recorded_loss = self.recorded_loss, None
            seen = look(self._guarded, probes, window, recorded)
        missing = self.audits.obstacle(window) if self.audits.due(window.step) else ""
        code = Code.SEEN if seen.short else Code.NO_RECORD if missing else Code.CLEAN
        with reporter.timed(Check.NONFINITE, Phase.AGREE):
            agreed, values = agree_on_device(
                self._exchange, window.step, code, seen.nonfinite, seen.values
            )
        own, loss = observed(self._guarded, probes, seen, values, self._exchange.rank)
        reporter.loss = reporter.loss if loss is None else loss
        window.decision = Decision()
        if agreed == Code.SEEN:
            window.decision = self._nonfinite(window, own)
        if window.decision.verdict is None:
            reporter.passed(Check.NONFINITE)
            # What an investigation has used up cannot be audited; the next step makes up for it.
            if agreed != Code.SEEN and self.audits.due(window.step):
                window.decision = self.audits.run(window, recorded=agreed == Code.CLEAN)
        window.forget()
        self._carry_out(window.decision)

    def _nonfinite(self, window: StepWindow, own: RankFinite) -> Decision:
        if self._exchange.anyone_joined():
            return self._failed(self._reporter.verdicts.nonfinite(window.step, after_join()))
        if self.audits.due(window.step):
            self.audits.postpone(window.step)
        self._reporter.flush()
        with self._reporter.timed(Check.NONFINITE, Phase.REPLAY):
            captured = window.micro_batches()
            reduced_nan = gradients_hold_nan(self._guarded)
            scope = self._recorder.capture.scope
            own = replace(
                own,
                nan=own.nan and holds_nan(own, captured, scope, reduced=reduced_nan),
                not_replayable=not_replayable(window, captured),
                loss_scaled=self._guarded.loss_scale.value() not in (None, 1.0),
                weights=weights_nonfinite(
                    self._guarded,
                    self._recorder.shadow.before,
                    self._replicas.saved.poisoned_before,
                ),
                reduced_nan=reduced_nan,
            )
            judgement = self._nonfinite_check.investigation.run(
                window.step,
                own,
                captured,
                trusted=self.audits.trusted,
                local=self.audits.local,
            )
        if judgement.outcome is Outcome.PASS:  # the screen's sum overflowed; every value is finite
            return Decision()
        decision = self._failed(self._reporter.verdicts.nonfinite(window.step, judgement))
        if judgement.apart:
            self._replicas.at_once(window.step)
        return decision

    def _failed(self, verdict: Verdict, *, stop: bool = False) -> Decision:
        """Check 1 or 2 failed: skip, stop, or only say so."""
        config = self._config
        if config.mode == "observe":
            return self._say(verdict)
        if (stop or config.on_failure == "stop") and not Decision(verdict=verdict).scaling:
            verdict = replace(verdict, action=Action.STOP)
        return replace(self._say(verdict), skip=True)

    def _say(self, verdict: Verdict) -> Decision:
        if self.over:  # hooks are gone: what this thread saw of its step is not all of it
            return Decision()
        self.last_verdict = verdict
        self._reporter.emit(verdict)
        self.audits.named(verdict)
        return Decision(verdict=verdict)

    def _carry_out(self, decision: Decision) -> None:
        verdict, shadow = decision.verdict, self._recorder.shadow
        # An overflow of the loss scale is no fault: statistics stay as moved.
        spoiled = decision.skip and not decision.scaling
        if spoiled or (self.skips.second and self.skips.carried is not None):
            shadow.restore()
            if left := shadow.left_behind:
                text = (
                    f"the skipped step {self.step} has left {list_names(left)} as its forward made "
                    "them: it could not be put back, and the next checkpoint is withheld. Keep it "
                    "in a buffer, or in numbers, lists and tensors that the first steps move too"
                )
                self._reporter.note_once("left_behind", text)
            self._nonfinite_check.probes.put_back()
        else:
            shadow.learn()
            if not self.skips.two_calls:
                shadow.release()
        self._nonfinite_check.probes.forget()
        self.skips.decided(decision)
        if verdict is None or not decision.skip:
            return
        if verdict.check is Check.NONFINITE:
            # So that every scaler and finite test of the user's acts alike on all ranks.
            held = held_by(self.optimizers)
            for _, parameter in self._guarded.named:
                if parameter.grad is not None and id(parameter) in held:
                    fill_with_nan(parameter.grad.detach())
        if verdict.action is Action.STOP:
            raise finding(verdict)

    # --- the update: called by the optimizer hooks ---

    def update_is_skipped(self) -> bool:
        """Whether the decision of this step, or one it carries, forbids the update."""
        window = self._window
        if window is None or window.decision is None:
            return False
        return window.decision.skip or self.skips.carried is not None

    @property
    def stepping(self) -> bool:
        """Whether an optimizer is inside its own step."""
        return self._running > 0

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer steps, perhaps inside the step of another."""
        self._running += 1
        self._guarded.loss_scale.stepping(optimizer)
        if self._running > 1 or self.skips.two_calls:
            return
        if moved := self._watch.moved():
            self.skips.say_moved(moved, self._watch.parameters)

    def step_broken(self) -> None:
        """A step ended in an exception."""
        self._running = max(0, self._running - 1)

    def kept(self, optimizer: Any) -> Snapshot | None:
        """What an optimizer held when its update was decided against, if that was kept."""
        return self.skips.kept(optimizer)

    def after_update(self, optimizer: Any, *, skipped: bool) -> None:
        """An optimizer has stepped, or was made to skip. Check 3 runs after the last of them."""
        self._replicas.software.stepped(optimizer, skipped=skipped)
        self._running = max(0, self._running - 1)
        window = self._window
        if window is not None and window.decision is not None and not window.updated:
            window.stepped.add(id(optimizer))
            if not self.stepping and self._all_stepped(window):
                self._updated(window, window.decision, skipped=skipped)
        if not self.stepping:
            self._watch.mark()

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is guarded from now on, or has loaded a state."""
        self._replicas.software.loaded(optimizer)

    def _all_stepped(self, window: StepWindow) -> bool:
        """Whether no parameter waits for its optimizer; one that was replaced steps no more."""
        stepped = [one for one in self.optimizers if id(one) in window.stepped]
        return len(stepped) == len(self.optimizers) or held_by(stepped) >= held_by(self.optimizers)

    def _updated(self, window: StepWindow, decision: Decision, *, skipped: bool) -> None:
        window.updated = True
        try:
            if skipped:
                carried = self.skips.carried
                self.skips.skipped(
                    window.step, (decision if decision.skip else carried) or decision
                )
                return
            self.skips.updated()
            self._reporter.updated()
            self._replicas.after_update(window.step)
        except (CorruptionDetected, Desync, RankGone) as error:
            self.error = error
            raise

    @property
    def updated(self) -> bool:
        """Whether nothing is left to be done of the current step."""
        return self._window is None or self._window.updated

    def settle(self, *, closing: bool = False) -> None:
        """The step is over, whether every optimizer stepped, some did, or none.

        Args:
            closing: Make no collective.
        """
        window, self._window = self._window, None
        if window is None or window.decision is None:
            return
        if window.stepped and not window.updated and not closing:
            skipped = window.decision.skip or self.skips.carried is not None
            self._updated(window, window.decision, skipped=skipped)
        elif not window.updated and (window.decision.skip or not window.stepped):
            # GradScaler and `continue` never call optimizer.step(). At the end one of several
            # optimizers may have: that step is over, and only its weights are not compared.
            self.skips.left(window.step, window.decision)
        seconds = time.perf_counter() - window.started
        self._reporter.stepped(seconds, audit=window.decision.audited)

    def shadow(self) -> None:
        """Another rank trains a step for which this one has no input."""
        self.settle()
        self.step += 1
        self._reporter.step = self.step
        self.audits.due(self.step)  # counts it, as the ranks that train do

    # --- leaving ---

    def abandon(self) -> None:
        """Leave nothing behind of a step that ended in an exception."""
        self._clear()
        self._recorder.capture.abort()
        if self._window is not None:
            self._window.forget()
            self._window.accumulated = 0

    def _clear(self) -> None:
        self._queued = False
        self._recorder.switches.restore()
        self._leave_danger()

    def _enter_danger(self, step: int) -> None:
        if self._watchdog is not None:
            self._watchdog.enter(step)

    def _leave_danger(self) -> None:
        if self._watchdog is not None:
            self._watchdog.leave_danger()
