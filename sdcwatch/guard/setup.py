"""Puts a guard together: everything is checked before the model or optimizer is touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch import __version__
from sdcwatch.checks.capture import Capture
from sdcwatch.checks.determinism import DeterministicSwitches, EagerStance, environment_facts
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayResult, replay
from sdcwatch.config import GuardConfig, launcher_environment
from sdcwatch.core.pairing import choose_fault_domain, pairing_problem
from sdcwatch.core.records import Hang, RunStarted
from sdcwatch.core.topology import Topology
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.checkpoint import Checkpoints
from sdcwatch.guard.exchange import Exchange, GlooExchange
from sdcwatch.guard.fingerprint import ReplicaSet, WeightCheck, require_same_schema
from sdcwatch.guard.hook import GradientScreen, guard_hook, released_screen
from sdcwatch.guard.identity import (
    agree_on_run,
    bare_module,
    gather_ranks,
    is_compiled,
    make_run_dir,
    own_identity,
    require_guardable,
    run_name,
)
from sdcwatch.guard.nonfinite import NonfiniteInvestigation
from sdcwatch.guard.options import require_same_options, why_partly_guarded
from sdcwatch.guard.preflight import Preflight
from sdcwatch.guard.replay import AuditPolicy, RingAudit
from sdcwatch.guard.reporter import Reporter, announce, say
from sdcwatch.guard.verdicts import Verdicts
from sdcwatch.guard.watchdog import Watchdog
from sdcwatch.sinks.base import Sink
from sdcwatch.sinks.build import build_sinks
from sdcwatch.sinks.dispatch import Dispatcher

LossFn = Callable[[torch.nn.Module, Any], torch.Tensor]
POLLS_PER_DEADLINE = 10


@dataclass(frozen=True, slots=True)
class Guarded:
    """What is guarded, as `sdcwatch.init` was given it.

    Attributes:
        model: As the loop calls it.
        ddp: The DDP wrapper, or None.
        module: What DDP calls: the bare module, compiled or not.
        loss_fn: Computes the loss of a micro-batch.
        optimizer: The innermost optimizer.
        named: Name and parameter, frozen ones included.
        device: Device of the module.
    """

    model: torch.nn.Module
    ddp: DistributedDataParallel | None
    module: torch.nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    named: tuple[tuple[str, torch.nn.Parameter], ...]
    device: torch.device

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced; None for the default group."""
        return None if self.ddp is None else self.ddp.process_group

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is around the model, inside DDP, or on a part of it."""
        return is_compiled(self.model, self.module)

    @property
    def compiled_around(self) -> bool:
        """Whether torch.compile is around DDP: a replay of the bare module would run eagerly."""
        return self.ddp is not None and self.ddp is not self.model

    def replicated(self, *, buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        tensors: list[tuple[str, torch.Tensor]] = list(self.named)
        if buffers:
            tensors += [(n, b) for n, b in self.module.named_buffers() if b.dtype.is_floating_point]
        return tensors

    def replay(self, micro_batch: MicroBatch, scale_free: bool = False) -> ReplayResult:
        """Recompute a micro-batch on the bare module."""
        return replay(self.module, self.loss_fn, micro_batch, self.named, scale_free=scale_free)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a guard."""

    config: GuardConfig
    guarded: Guarded
    exchange: Exchange
    topology: Topology
    reporter: Reporter
    capture: Capture
    switches: DeterministicSwitches
    stance: EagerStance
    screen: GradientScreen
    preflight: Preflight
    audit: RingAudit
    investigation: NonfiniteInvestigation
    weights: WeightCheck
    verdicts: Verdicts
    checkpoints: Checkpoints
    watchdog: Watchdog | None
    audits_off: str
    """Why audits are off; empty if they are on."""


def assemble(
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: LossFn,
    options: Mapping[str, Any],
    on_bucket: Callable[[], None],
) -> Parts:
    """Check the arguments, meet the other ranks, and build every part. Every rank calls it.

    Nothing is put on the model yet; see `register_hook`.

    Raises:
        ConfigurationError, SchemaMismatch, RankGone: See `sdcwatch.init`.
    """
    arguments = dict(options)
    sinks: Sequence[Sink] = arguments.pop("sinks", ())
    config = GuardConfig.from_env(**arguments)
    ddp, inner = require_guardable(model, optimizer, loss_fn, config)
    guarded = _guarded(model, ddp, inner, loss_fn)
    exchange = GlooExchange(
        guarded.process_group, deadline_seconds=config.deadline_seconds, device=guarded.device
    )
    try:
        return _meet(config, guarded, exchange, sinks, on_bucket)
    except BaseException as error:
        exchange.leave(f"sdcwatch.init ended with {type(error).__name__}")
        raise


def _meet(
    config: GuardConfig,
    guarded: Guarded,
    exchange: GlooExchange,
    sinks: Sequence[Sink],
    on_bucket: Callable[[], None],
) -> Parts:
    """Compare notes with the other ranks, and build every part."""
    environment = launcher_environment()
    require_same_options(exchange, config)
    require_same_schema(exchange, guarded.replicated(buffers=config.buffers))
    run = agree_on_run(exchange, run_name(config, environment))
    run_dir = make_run_dir(config, run)
    own = own_identity(exchange, config, environment, guarded.device)
    ranks = gather_ranks(exchange, own)
    domain, note = choose_fault_domain(ranks, config.fault_domain)
    topology = Topology(ranks, domain)
    audits_off = why_audits_are_off(config, topology)
    unguarded = why_partly_guarded(guarded.module, guarded.optimizer)
    notes = tuple(n for n in (note if not audits_off else "", audits_off, unguarded) if n)
    start = _start_record(config, guarded, topology, run, notes)
    dispatcher, lines = build_sinks(
        config.telemetry,
        start,
        rank=exchange.rank,
        local_rank=environment.local_rank,
        environment=environment,
        run_dir=run_dir,
        extra=sinks,
    )
    reporter = _reporter(config, exchange, dispatcher, run_dir)
    reporter.emit(replace(start, links={**start.links, **dispatcher.links}))
    if exchange.rank == 0 and config.console:
        announce(lines)
        for text in notes:
            say(f"sdcwatch: {text}")
    return _parts(config, guarded, exchange, topology, reporter, on_bucket, audits_off)


def register_hook(parts: Parts) -> None:
    """Put the communication hook on the DDP model: last, because it cannot be taken off again."""
    ddp, guarded = parts.guarded.ddp, parts.guarded
    if ddp is None or any(state is parts.screen for _, state in ddp._comm_hooks):
        return
    # Marking the hook imports the compiler, which takes seconds: only where it is in use.
    disable: Callable[..., Any] = torch.compiler.disable
    hook = disable(guard_hook) if guarded.compiled else guard_hook
    ddp.register_comm_hook(parts.screen, hook)


def _guarded(
    model: torch.nn.Module,
    ddp: DistributedDataParallel | None,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
) -> Guarded:
    named = tuple(bare_module(model).named_parameters())
    module = model if ddp is None else ddp.module
    return Guarded(model, ddp, module, loss_fn, optimizer, named, named[0][1].device)


def why_audits_are_off(config: GuardConfig, topology: Topology) -> str:
    """Why there will be no audits, or "".

    Raises:
        ConfigurationError: They are asked for on a topology on which they cannot work.
    """
    if config.audit_every is None:
        return "replay audits are off: audit_every is None"
    problem = pairing_problem(topology)
    if problem is None:
        return ""
    if topology.world_size == 1:
        return f"replay audits are off and weights are not compared: {problem}"
    msg = (
        f"Expected a topology in which ranks can audit each other, but got one where {problem}. "
        'Spread the ranks evenly, or pass fault_domain="gpu" or audit_every=None.'
    )
    raise ConfigurationError(msg)


def _start_record(
    config: GuardConfig, guarded: Guarded, topology: Topology, run: str, notes: tuple[str, ...]
) -> RunStarted:
    return RunStarted(
        step=config.start_step,
        time=time.time(),
        run=run,
        version=__version__,
        ranks=topology.ranks,
        fault_domain=topology.fault_domain,
        mode=config.mode,
        on_failure=config.on_failure,
        audit_every=config.audit_every or 0,
        fingerprint_every=config.fingerprint_every or 0,
        checkpoint_every=config.checkpoint_every,
        max_audit_age=config.audit_age_limit or 0,
        quorum=config.quorum,
        parameters=sum(p.numel() for _, p in guarded.named),
        parameter_bytes=sum(p.numel() * p.element_size() for _, p in guarded.named),
        environment=_facts(guarded),
        notes=notes,
    )


def _facts(guarded: Guarded) -> dict[str, str]:
    environment = launcher_environment()
    return environment_facts(
        guarded.device,
        compiled=guarded.compiled,
        cublas_workspace=environment.cublas_workspace,
        variables=environment.kernel_variables,
    )


def _reporter(
    config: GuardConfig, exchange: Exchange, dispatcher: Dispatcher, run_dir: Path
) -> Reporter:
    leader = exchange.rank == 0
    return Reporter(
        dispatcher,
        summary_path=run_dir / "summary.json" if leader else None,
        console=config.console and leader,
        start_step=config.start_step,
    )


def _parts(  # noqa: PLR0913 - what _meet has found out
    config: GuardConfig,
    guarded: Guarded,
    exchange: GlooExchange,
    topology: Topology,
    reporter: Reporter,
    on_bucket: Callable[[], None],
    audits_off: str,
) -> Parts:
    names = [name for name, _ in guarded.named]
    facts = partial(_facts, guarded)
    policy = AuditPolicy(guarded.device, config.quorum, config.seed, facts)
    replicas = ReplicaSet(exchange, lambda: guarded.replicated(buffers=config.buffers))
    return Parts(
        config=config,
        guarded=guarded,
        exchange=exchange,
        topology=topology,
        reporter=reporter,
        capture=Capture(guarded.module, guarded.named, guarded.device),
        switches=DeterministicSwitches(guarded.device),
        stance=EagerStance(),
        screen=_screen(config, guarded, exchange, on_bucket),
        preflight=Preflight(
            exchange,
            guarded.replay,
            names,
            rounds=config.preflight_micro_batches,
            facts=facts,
        ),
        audit=RingAudit(exchange, topology, guarded.replay, names, policy=policy),
        investigation=NonfiniteInvestigation(exchange, topology, guarded.replay, guarded.device),
        weights=WeightCheck(replicas),
        verdicts=Verdicts(topology, observing=config.mode == "observe"),
        checkpoints=Checkpoints(exchange, reporter),
        watchdog=_watchdog(config, exchange, reporter),
        audits_off=audits_off,
    )


def _screen(
    config: GuardConfig, guarded: Guarded, exchange: Exchange, on_bucket: Callable[[], None]
) -> GradientScreen:
    group, world = guarded.process_group, exchange.world_size
    screen = GradientScreen(group, world, on_bucket, config.comm_hook)
    closed = None if guarded.ddp is None else released_screen(guarded.ddp)
    return screen if closed is None else screen.succeed(closed)


def _watchdog(config: GuardConfig, exchange: GlooExchange, reporter: Reporter) -> Watchdog | None:
    if exchange.world_size == 1:
        return None

    def report(hang: Hang) -> None:
        # From another thread: past the reporter's window, straight to the event log.
        reporter.urgent(hang)

    def on_absent(
        where: str, absent: tuple[int, ...], known: dict[int, str], waited: float
    ) -> None:
        report(
            Hang(
                step=reporter.step,
                time=time.time(),
                reporter=exchange.rank,
                where=where,
                absent=absent,
                left={str(rank): text for rank, text in known.items()},
                waited_seconds=round(waited, 1),
            )
        )

    exchange.on_absent = on_absent
    return Watchdog(
        exchange.rolls,
        hang_seconds=config.hang_seconds,
        poll_seconds=min(10.0, config.deadline_seconds / POLLS_PER_DEADLINE),
        report=report,
        leave=config.on_hang == "exit",
    )
