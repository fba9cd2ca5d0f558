"""What a training script calls: `init` and `Guard`."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from sdcwatch.core.checkpoint import GateDecision, GateFacts, judge_checkpoint
from sdcwatch.core.records import (
    Check,
    CheckpointResult,
    GateReason,
    GuardState,
    RunFinished,
    Verdict,
)
from sdcwatch.core.text import list_ranks
from sdcwatch.core.waiting import ENDED, SHOWN_NOTES
from sdcwatch.errors import (
    EXIT_HANG,
    ConfigurationError,
    CorruptionDetected,
    Desync,
    RankGone,
    SdcwatchError,
)
from sdcwatch.guard.build import register_hook
from sdcwatch.guard.checkpoint import require_savable
from sdcwatch.guard.exchange import Operation, agree
from sdcwatch.guard.exits import Exits, exit_code_of
from sdcwatch.guard.join import JoinableGuard
from sdcwatch.guard.leaving import report_later
from sdcwatch.guard.optimizer import Adoption, OptimizerHooks, WrapperHooks
from sdcwatch.guard.reporter import LOG
from sdcwatch.guard.setup import assemble
from sdcwatch.guard.sigterm import Terminated, TerminationHandler
from sdcwatch.guard.watchdog import END_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sdcwatch.config import GuardOptions


def init(
    model: torch.nn.Module, optimizer: Any, *moved: object, **options: Unpack[GuardOptions]
) -> Guard:
    """Guard a training run. Every rank must call it, at the same point, with the same options.

    The training loop stays as it is: calls of the module that DDP wraps are seen by hooks. One
    guard per DDP model.

    Args:
        model: The `DistributedDataParallel` model, as the loop calls it; what torch.compile, Fabric
            and accelerate put around it is looked through.
        optimizer: The optimizer that updates it, or a list of all that do; wrappers are looked
            through.
        *moved: Nothing. The third argument of earlier versions is refused by name.
        **options: Fields of `sdcwatch.GuardConfig`; those not given are read from ``SDCWATCH_*``.
            ``sinks=`` takes further sinks.

    Returns:
        The guard, which is also a context manager.

    Raises:
        ConfigurationError: An argument cannot work; says what was expected, what came, what to do.
        SchemaMismatch: Ranks hold different models.
        CorruptionDetected: The replicas already differ, before the first step.
        RankGone: A rank did not call it within the deadline.

    Example:
        >>> guard = sdcwatch.init(ddp_model, optimizer, audit_every=100)  # doctest: +SKIP
    """
    if moved and not callable(moved[0]):
        msg = (
            f"Expected sdcwatch.init(model, optimizer, option=...), but got {moved[0]!r:.80} as a "
            "third argument. Name the option, as audit_every=100; pass several optimizers as a "
            "list."
        )
        raise ConfigurationError(msg)
    if moved or "loss_fn" in options:
        msg = (
            "Expected sdcwatch.init(model, optimizer, ...), but got a loss_fn as well. Leave it "
            "out and keep the training loop as it is: the calls of the model are audited, not a "
            "loss function. CHANGELOG.md says how to move."
        )
        raise ConfigurationError(msg)
    return Guard(model, optimizer, **options)


PROCESS_SECONDS = 5.0
"""How long a thread that has ended the run may take to end the process."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _remembers(
    method: Callable[Concatenate[Guard, _P], _T],
) -> Callable[Concatenate[Guard, _P], _T]:
    """What ends the run in a method of the guard is remembered for its last record.

    Those errors are `SystemExit` too, which the interpreter does not keep for atexit handlers.
    """

    @functools.wraps(method)
    def remembering(guard: Guard, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(guard, *args, **kwargs)
        except (CorruptionDetected, Desync, RankGone) as error:
            guard.remember(error)
            raise

    return remembering


class Guard(JoinableGuard):
    """Guards one run; made by `sdcwatch.init`. Use it as a context manager or call `close`.

    For uneven inputs, ``with Join([ddp_model, guard]): ...``.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, **options: Unpack[GuardOptions]
    ) -> None:
        self._closed = self._ending = self._explaining = False
        self._claim, self._ender, self._ended = threading.Lock(), 0, threading.Event()
        self._ends_process = False
        self._pid, self._entered = os.getpid(), 0
        self._error: BaseException | None = None
        self._asked: tuple[int, GateDecision] | None = None
        made = assemble(model, optimizer, options)
        super().__init__(made.exchange, made.guarded.device, made.guarded.process_group)
        self._config, self._exchange, self._ddp = made.config, made.exchange, made.guarded.ddp
        self._reporter, self._watchdog = made.reporter, made.watchdog
        self._gate, self._probes = made.gate, made.probes
        self._replicas, self._steps = made.replicas, made.steps
        self._capture, self._close_console = made.capture, made.close_console
        trained = [p for _, p in made.guarded.trained]
        self._hooks = [OptimizerHooks(one, self._steps) for one in made.guarded.optimizers]
        around = [w for w in made.guarded.wrappers if callable(getattr(w, "step", None))]
        self._hooks += [WrapperHooks(w, self._steps, trained) for w in around]
        self._adoption = Adoption(
            made.guarded.named,
            self._hooks,
            self._steps,
            lambda text: self._reporter.note_once("optimizer_found", text),
        )
        self._steps.recover = self._recover
        self._exporters, self._export_seconds = made.exporters, made.export_seconds
        self._exits = Exits(lambda: self._steps.step)
        self._sigterm = (
            TerminationHandler(
                self._is_busy, self._end_now, self._exits.remember, lambda: self._steps.thread
            )
            if made.config.handle_sigterm
            else None
        )
        if self._watchdog is not None:
            self._watchdog.end = self._end_hang
        atexit.register(self._at_exit)
        self._exits.call_in_child(self.close)
        try:
            self._replicas.check(self._steps.step)
            register_hook(made.guarded, made.probes)
            self._capture.attach()
        except BaseException as error:
            self._close(error)
            raise

    def record_loss(self, loss: torch.Tensor | float) -> None:
        """Show a loss on the board. Optional; a scalar that the module returns is taken by itself.

        It is read with the step's own look at the device, and never waits. Needs no other rank.

        Args:
            loss: One number, or a tensor with one element, of any dtype and device.

        Raises:
            ConfigurationError: It has more than one element.
        """
        tensor = torch.as_tensor(loss).detach()
        if tensor.numel() != 1:
            msg = (
                f"Expected one number, but got a tensor of shape {tuple(tensor.shape)}. Reduce the "
                "loss, for instance with .mean()."
            )
            raise ConfigurationError(msg)
        self._steps.recorded_loss = tensor

    def _recover(self) -> None:
        self.require_joined(self._ddp)
        for hooks in self._hooks:
            hooks.recover()

    @_remembers
    def save_checkpoint(
        self,
        save: Callable[[], object],
        on: Literal["rank0", "all"] = "rank0",
        *,
        path: str | os.PathLike[str] = "",
    ) -> bool:
        """Save a checkpoint if every check stands behind it. Every rank must call it.

        Args:
            save: Writes the checkpoint; called on rank 0, or on all ranks.
            on: "rank0", or "all" for sharded and DCP saves.
            path: Where it goes, for the people who look for the last good one.

        Returns:
            Whether it was saved, the same on every rank. The reason is in the event log.

        Raises:
            RankGone: Some rank did not call it within the deadline.
            Desync: Ranks called it at different steps.
            CorruptionDetected: The replicas differ.
            BaseException: What `save` raised, on its rank; `SdcwatchError` on the others.
        """
        require_savable(save, on)
        self._require_open()
        step, decision = self._gate_decision()
        return self._gate.carry_out(step, decision, save, on=on, path=os.fspath(path))

    @_remembers
    def may_save(self) -> bool:
        """Whether every check stands behind a checkpoint of this step. Every rank must call it.

        For frameworks that save by themselves: ``if guard.may_save(): ...``. Whether their save
        succeeds is not known here. Asking again in the same step gives the same answer.

        Raises:
            RankGone: Some rank did not call it within the deadline.
            Desync: Ranks called it at different steps.
            CorruptionDetected: The replicas differ.
        """
        self._require_open()
        known = self._asked is not None and self._asked[0] == self._steps.step
        step, decision = self._gate_decision()
        return decision.save if known else self._gate.allow(step, decision)

    def _gate_decision(self) -> tuple[int, GateDecision]:
        """Ask every check, once per step."""
        if self._steps.updated:  # else a decision waits for an optimizer that has not stepped yet
            self._settle()
        step = self._steps.step
        if self._asked is None or self._asked[0] != step:
            self._asked = step, self._ask(step)
        return self._asked

    def _ask(self, step: int) -> GateDecision:
        if self._exchange.anyone_joined():
            detail = "a rank has run out of inputs and cannot be asked"
            return GateDecision(False, CheckpointResult.WITHHELD, GateReason.NO_AUDIT, detail, None)
        self._reporter.flush()
        agree(self._exchange, Operation.SAVE, step)
        if self._replicas.tainted is None:
            # Also where they were compared after the update: what is saved is what was compared.
            self._replicas.check(step, saving=True)
        return judge_checkpoint(self._gate_facts(step))

    @property
    def last_verdict(self) -> Verdict | None:
        """The latest verdict that was not a pass; None while every check has passed."""
        return self._replicas.tainted or self._steps.last_verdict

    @property
    def step(self) -> int:
        """The current step, counted from 1, skipped ones included; before the first, start_step."""
        return self._steps.step

    def close(self) -> None:
        """End the guarded run: settle the last step, write the summary, close the sinks.

        Every rank calls it; it makes no collective. May be called again. In a `finally` or an
        `except` the run has ended with the exception that is being handled there.
        """
        self._end_with(self._exits.error() or self._steps.error)

    def __enter__(self) -> Guard:
        self._require_open()
        self._entered += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if self._entered:  # one `with` in another: the outer one ends the run
            return
        error = self._exits.behind(error)
        gone = None if error is None else self._explained(error)
        self._close(gone or error)
        if gone is not None:
            raise gone from error

    def _explained(self, error: BaseException) -> SdcwatchError | Terminated | None:
        """What ended the run, where `error` is only what this rank saw of it."""
        if self._ending or self._watchdog is None or os.getpid() != self._pid:
            return None
        self._explaining = True
        gone = self._watchdog.explain(error)
        if gone is None and (cause := error.__cause__ or error.__context__) is not None:
            self._watchdog.explain(cause)  # who is gone is told, and the program's error stays
        seen = gone or error
        if isinstance(seen, RankGone) and self._all_terminated(seen):
            return Terminated()
        return gone

    def _all_terminated(self, gone: RankGone) -> bool:
        """This process was told to end, as those that are absent were, and left before it."""
        told = self._sigterm is not None and self._sigterm.received
        notes = gone.reason.count(f"ended with {Terminated.__name__}")
        return told and bool(gone.ranks) and notes >= min(len(gone.ranks), SHOWN_NOTES)

    def _is_busy(self) -> bool:
        """Whether the training thread ends the run, or finds out why it ends."""
        return self._ending or self._explaining or self._exchange.liveness.asking

    def _end_now(self) -> int:
        """End the run from another thread, because the training thread does not come back."""
        if self._ending:
            return exit_code_of(self._error)
        self._ends_process = True
        error = (self._watchdog.missing() if self._watchdog is not None else None) or Terminated()
        self._close(error)
        return exit_code_of(error)

    def remember(self, error: BaseException) -> None:
        """See `JoinableGuard`."""
        self._exits.remember(error)

    def others_synchronise(self) -> bool:
        """See `JoinableGuard`."""
        ddp = self._ddp
        return ddp is None or bool(ddp.require_forward_param_sync)

    def shadow_step(self) -> None:
        """See `JoinableGuard`."""
        self._steps.shadow()

    def weights_synchronised(self) -> None:
        """See `JoinableGuard`."""
        self._steps.weights_placed()

    def _settle(self, *, closing: bool = False) -> None:
        self._steps.settle(closing=closing)
        self._steps.skips.give_up()

    def _gate_facts(self, step: int) -> GateFacts:
        verdict, config = self._steps.last_verdict, self._config
        failed = verdict.check if verdict and verdict.step == step and verdict.failed else None
        on_schedule = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        return GateFacts(
            step=step,
            tainted=self._replicas.tainted is not None,
            nonfinite_passed=failed is not Check.NONFINITE,
            replay_failed=failed is Check.REPLAY,
            fingerprint_passed=self._replicas.passed_at == step,
            audit_age_limit=0 if on_schedule else config.audit_age_limit,
            weights_finite=self._replicas.finite,
            left_behind=self._replicas.left_behind,
            **self._steps.audits.gate_facts(),
        )

    def _require_open(self) -> None:
        if self._closed:
            msg = (
                "Expected an open guard, but got a closed one: close() and the end of `with` close "
                "it for good. Call sdcwatch.init() again, or put the whole loop into one `with`."
            )
            raise SdcwatchError(msg)

    def _close(self, error: BaseException | None, exit_code: int | None = None) -> None:
        if os.getpid() != self._pid:  # a forked helper ends no run
            return
        if not self._claim.acquire(blocking=False) and not self._is_unclaimed():
            return
        self._ending, self._ender = True, threading.get_ident()
        try:
            self._end_run(error, exit_code)
        finally:
            self._ended.set()
            self._exits.close()
            atexit.unregister(self._at_exit)

    def _is_unclaimed(self) -> bool:
        """Whether whoever began to end the run was interrupted before it could do so."""
        if self._ender == threading.get_ident():
            return False
        # Another thread ends the run: nobody goes on before somebody was told.
        while not self._ended.wait(1.0):
            if not self._ender:
                return True
        if self._ends_process:  # with the code of the last record, and not with this thread's
            time.sleep(PROCESS_SECONDS)
        return False

    def _end_run(self, error: BaseException | None, exit_code: int | None) -> None:
        try:
            if error is None:
                self._settle(closing=True)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._closed = self._steps.over = True
            self._steps.abandon()
            self._adoption.remove()
            for hooks in self._hooks:
                hooks.remove()
            self._capture.detach()
            self._probes.release()
            self._error = error = error or self._error or self._steps.error
            self._say_once_more(error)
            code = exit_code_of(error) if exit_code is None else exit_code
            self._leave(self._finished(error, code))

    def _at_exit(self) -> None:
        """The script ends without close(): after an exception that nobody caught, or by mistake."""
        self._end_with(self._exits.last() or self._steps.error)

    def _end_with(self, error: BaseException | None) -> None:
        """End the run with what ends the program, whose exit code is settled by now."""
        if error is None:
            self._close(None)
        else:
            self._close(self._explained(error) or error, exit_code_of(error))

    def _end_hang(self, gone: RankGone) -> None:
        """End the run from another thread, because the process is about to leave a hang."""
        if self._ending:
            # The training thread came out of it, and ends the process with its own code.
            time.sleep(END_SECONDS)
            return
        self._ends_process = True
        self._close(gone, EXIT_HANG)

    def _say_once_more(self, error: BaseException | None) -> None:
        """A finding ends the process without a traceback: the leader says it, whatever happens."""
        if isinstance(error, CorruptionDetected) and self._exchange.rank == 0:
            LOG.critical("stopped: %s", error)

    def _leave(self, finished: RunFinished) -> None:
        ended, *_ = finished.reason.split(": ", 1)  # a note that quoted notes would grow and grow
        followed = isinstance(self._error, Desync | RankGone)
        unmet = self._error.ranks if isinstance(self._error, RankGone) else ()
        if unmet and finished.exit_code:
            ended += f" ({list_ranks(unmet)} absent)"
        note = f"{ended} after step {finished.step}"
        # From its end to its beginning, whatever a second Ctrl-C cuts short.
        with ExitStack() as then:
            if self._sigterm is not None:
                code = finished.exit_code
                then.callback(self._sigterm.close, failed=code != 0, code=code)
            then.callback(self._close_console)
            then.callback(self._leave_in_order)
            then.callback(self._reporter.close)
            then.callback(self._reporter.emit, finished)
            then.callback(self._exchange.close)
            if self._watchdog is not None:
                then.callback(self._watchdog.close)
            self._exchange.leave(note, followed=followed, unmet=unmet)

    def _leave_in_order(self) -> None:
        """After a failure of all ranks, those that report leave first.

        A launcher ends every process once one has failed: whoever is scraped must not be one of
        those it finds alive before the last state was fetched.
        """
        liveness, error = self._exchange.liveness, self._error
        gone = report_later(self._exporters, error)
        if self._exchange.rank in self._exporters:
            liveness.exported(len(self._exporters), gone)
        elif len(gone) < len(self._exporters) and isinstance(
            error, CorruptionDetected | Desync | RankGone
        ):
            liveness.await_exported(self._export_seconds)

    def _finished(self, error: BaseException | None, code: int) -> RunFinished:
        state, reason = GuardState.FINISHED, ENDED
        if error is not None and code != 0:
            state, reason = GuardState.FAILED, told_of(error)
        if self._replicas.tainted is not None:
            state = GuardState.TAINTED
            reason = f"the run was tainted at step {self._replicas.tainted.step}"
        return RunFinished(
            step=self._steps.step, time=time.time(), state=state, reason=reason, exit_code=code
        )


def told_of(error: BaseException) -> str:
    """How the run ended; of an error of the program's own no more than its class."""
    said = f"the run ended with {type(error).__name__}"
    match error:
        case RankGone():
            absent = list_ranks(error.ranks) if error.ranks else "a rank"
            return f"{said}: {absent} absent at {error.operation}: {error.reason}"
        case SdcwatchError() | CorruptionDetected() | Terminated():
            return f"{said}: {error}"
        case _:
            return said
