"""Builds what a guard is made of, each from what it uses. Needs no other rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sdcwatch.checks.calling import choose_caller
from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.determinism import DeterministicSwitches
from sdcwatch.checks.replay import Replayer
from sdcwatch.checks.shadow import ForwardShadow
from sdcwatch.checks.trace import disputed_trace
from sdcwatch.config import GuardConfig
from sdcwatch.core.waiting import Finding
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, GlooExchange
from sdcwatch.guard.fingerprint import ReplicaCheck, ReplicaSet, WeightCheck
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.hook import GradientProbes, guard_hook, released_probes
from sdcwatch.guard.leaving import export_seconds, exporters
from sdcwatch.guard.meeting import Meeting
from sdcwatch.guard.nonfinite import NonfiniteCheck, NonfiniteInvestigation
from sdcwatch.guard.preflight import Preflight, replay_check
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.saved_state import SavedState
from sdcwatch.guard.step import StepController
from sdcwatch.guard.tracing import Tracing
from sdcwatch.guard.updates import UpdateLog
from sdcwatch.guard.watchdog import Watchdog
from sdcwatch.guard.window import Recorder

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a `Guard` is made of. It is taken apart there and handed to nobody else."""

    config: GuardConfig
    guarded: Guarded
    exchange: GlooExchange
    reporter: Reporter
    probes: GradientProbes
    capture: CallCapture
    preflight: Preflight
    gate: CheckpointGate
    replicas: ReplicaCheck
    steps: StepController
    watchdog: Watchdog | None
    exporters: tuple[int, ...]
    """Ranks that report the run to somebody, and leave before those that do not."""
    export_seconds: float
    """The longest that may take at the end."""
    close_console: Callable[[], None]


def build(
    config: GuardConfig,
    guarded: Guarded,
    exchange: GlooExchange,
    meeting: Meeting,
    reporter: Reporter,
    close_console: Callable[[], None],
) -> Assembly:
    """Build every collaborator. Nothing is put on the model yet; see `register_hook`.

    Args:
        config: Of this rank.
        guarded: What is guarded.
        exchange: Between the ranks.
        meeting: What they agreed on.
        reporter: Of this rank.
        close_console: Undoes what was done to the console.
    """
    gate, spoken = CheckpointGate(exchange, reporter), guarded.spoken
    # Late: hooks call what is made below; that of a closed guard, which DDP keeps, calls this one.
    probes = _probes(config, guarded, exchange, lambda: steps.bucket_arrived())
    capture = CallCapture(
        guarded.module,
        guarded.named,
        guarded.device,
        on_gradient=lambda: steps.gradient_arrives(),
        audit=lambda: steps.call_begins(),
        local=guarded.local,
        max_kept_bytes=config.max_payload_mb * MIB,
    )
    shadow = ForwardShadow(capture.state, config.max_payload_mb * MIB)
    replicas = ReplicaCheck(
        WeightCheck(
            ReplicaSet(
                exchange,
                partial(guarded.replicated, buffers=config.buffers),
                lambda name: spoken.get(name, name),
            )
        ),
        config,
        reporter,
        gate,
        software=UpdateLog(guarded, lambda: steps.optimizers, guarded.loss_scale.value),
        saved=SavedState(guarded.named, guarded.module, shadow.take_left_behind),
    )
    replayer = Replayer(capture, choose_caller(guarded.given, guarded.ddp, guarded.module))
    replay = replay_check(config, guarded, exchange, meeting, replayer)
    watchdog = _watchdog(config, exchange, reporter)
    steps = StepController(
        config,
        guarded,
        exchange,
        reporter,
        recorder=Recorder(capture, DeterministicSwitches(guarded.device), shadow),
        nonfinite=NonfiniteCheck(
            probes,
            NonfiniteInvestigation(
                exchange,
                meeting.topology,
                replayer.run,
                guarded.device,
                replay.audit.memory,
                Tracing(exchange, partial(disputed_trace, replayer)),
            ),
        ),
        replay=replay,
        replicas=replicas,
        gate=gate,
        watchdog=watchdog,
    )
    if watchdog is not None:
        watchdog.trains = lambda: steps.thread
    return Assembly(
        config=config,
        guarded=guarded,
        exchange=exchange,
        reporter=reporter,
        probes=probes,
        capture=capture,
        preflight=replay.preflight,
        gate=gate,
        replicas=replicas,
        steps=steps,
        watchdog=watchdog,
        exporters=exporters(config, meeting.topology),
        export_seconds=export_seconds(config),
        close_console=close_console,
    )


def register_hook(guarded: Guarded, probes: GradientProbes) -> None:
    """Put the communication hook on the DDP model: last, because it cannot be taken off again."""
    ddp = guarded.ddp
    if ddp is None or any(state is probes for _, state in ddp._comm_hooks):
        return
    # Marking the hook imports the compiler, which takes seconds: only where it is in use.
    disable: Callable[..., Any] = torch.compiler.disable
    hook = disable(guard_hook) if guarded.compiled else guard_hook
    ddp.register_comm_hook(probes, hook)


def _probes(
    config: GuardConfig, guarded: Guarded, exchange: Exchange, on_bucket: Callable[[], None]
) -> GradientProbes:
    group, world = guarded.process_group, exchange.world_size
    probes = GradientProbes(group, world, on_bucket, config.comm_hook)
    closed = None if guarded.ddp is None else released_probes(guarded.ddp)
    return probes if closed is None else probes.take_over(closed)


def _watchdog(config: GuardConfig, exchange: GlooExchange, reporter: Reporter) -> Watchdog | None:
    if exchange.world_size == 1:
        return None
    watchdog = Watchdog(
        exchange.liveness,
        hang_seconds=config.hang_seconds,
        # From another thread: past the reporter's window, straight to the event log.
        report=reporter.urgent,
        leave=config.on_hang == "exit",
    )

    def on_absent(finding: Finding, operation: str, waited: float) -> None:
        since = time.monotonic() - waited
        reporter.urgent(watchdog.record(finding, operation, since, step=reporter.step))

    exchange.on_absent(on_absent)
    return watchdog
