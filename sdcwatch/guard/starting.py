"""Opens what a run is written to, and says there what runs: its first record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sdcwatch import __version__
from sdcwatch.checks.determinism import environment_facts
from sdcwatch.config import GuardConfig, launcher_environment, misspelt_variables
from sdcwatch.core.records import GuardState, RunFinished, RunStarted
from sdcwatch.core.saved import resumed_from_condemned
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.exits import exit_code_of
from sdcwatch.guard.files import answered, make_run_dir
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.meeting import Meeting
from sdcwatch.guard.reporter import LOG, Reporter, VerdictBuilder
from sdcwatch.sinks.base import Sink
from sdcwatch.sinks.build import build_sinks

_HISTORY_ANEW = (
    "the run goes on from step {step}, but {run_dir} holds nothing of what was before: the history "
    "starts anew, without earlier suspects and checkpoints. Either the run had another name or "
    "run_dir then (torchrun makes up a name at each launch): pass the same run= or run_dir= every "
    "time. Or rank 0 does not find it where it runs now: keep it on storage that rank 0 finds"
)


def open_run(
    config: GuardConfig,
    guarded: Guarded,
    exchange: Exchange,
    meeting: Meeting,
    sinks: Sequence[Sink],
) -> Reporter:
    """Open the event log and the sinks, and give out the start record."""
    environment = launcher_environment()
    run_dir = meeting.run_dir.absolute()  # the program may change its directory
    answered(run_dir, lambda: make_run_dir(run_dir))
    start = _start_record(config, guarded, meeting, run_dir)
    dispatcher, lines = build_sinks(
        config.telemetry,
        start,
        rank=exchange.rank,
        local_rank=environment.local_rank,
        environment=environment,
        run_dir=run_dir,
        extra=sinks,
    )
    leader = exchange.rank == 0
    reporter = Reporter(
        dispatcher,
        VerdictBuilder(meeting.topology, observing=config.mode == "observe"),
        summary_path=run_dir / "summary.json" if leader else None,
        leader=leader,
        start_step=config.start_step,
    )
    reporter.emit(replace(start, links={**start.links, **dispatcher.links}))
    if leader:
        for text in (*lines, *meeting.notes):
            LOG.info(text)
        for name, slip in misspelt_variables().items():
            LOG.warning("the variable %s sets no option: did you mean %s?", name, slip)
        so_far = dispatcher.summary
        if (config.start_step or environment.restart_count) and so_far.segments == 1:
            text = _HISTORY_ANEW.format(step=config.start_step, run_dir=run_dir)
            reporter.note_once("history_anew", text)
        if text := resumed_from_condemned(
            config.start_step, so_far.condemned_checkpoint_steps, so_far.last_good_checkpoint_step
        ):
            reporter.note_once("resumed_from_condemned", text)
    return reporter


def give_up_run(reporter: Reporter, error: BaseException | None, reason: str) -> None:
    """End what `open_run` began: there will be no guard to do so."""
    code = exit_code_of(error)
    step, now = reporter.step, time.time()
    reporter.emit(
        RunFinished(step=step, time=now, state=GuardState.FAILED, reason=reason, exit_code=code)
    )
    reporter.close()


def _start_record(
    config: GuardConfig, guarded: Guarded, meeting: Meeting, run_dir: Path
) -> RunStarted:
    return RunStarted(
        step=config.start_step,
        time=time.time(),
        run=meeting.run,
        version=__version__,
        ranks=meeting.topology.ranks,
        fault_domain=meeting.topology.fault_domain,
        mode=config.mode,
        on_failure=config.on_failure,
        audit_every=config.audit_every or 0,
        fingerprint_every=config.fingerprint_every or 0,
        checkpoint_every=config.checkpoint_every,
        max_audit_age=config.audit_age_limit or 0,
        quorum=config.quorum,
        parameters=sum(p.numel() for _, p in guarded.named),
        parameter_bytes=sum(p.numel() * p.element_size() for _, p in guarded.named),
        environment=environment_of(guarded),
        notes=meeting.notes,
        run_id=meeting.run_id,
        run_dir=str(run_dir),
    )


def environment_of(guarded: Guarded) -> dict[str, str]:
    """What the numbers of this rank depend on besides the model: software, kernels, variables."""
    environment = launcher_environment()
    return environment_facts(
        guarded.device,
        compiled=guarded.compiled,
        cublas_workspace=environment.cublas_workspace,
        variables=environment.kernel_variables,
    )
