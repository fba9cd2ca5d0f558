"""Puts a guard together: everything is checked before the model or optimizer is touched.

First what this rank was given, then the other ranks: the same options, the same model, who is
where. Then the parts are built. Nothing is put on the model until all of that has passed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch import __version__
from sdcwatch.checks.capture import Capture
from sdcwatch.checks.determinism import DeterministicSwitches, EagerStance, environment_facts
from sdcwatch.config import GuardConfig, LauncherEnvironment, launcher_environment
from sdcwatch.core.records import Hang, RunStarted
from sdcwatch.core.text import count, list_names, list_ranks
from sdcwatch.core.topology import RankInfo, Topology, choose_fault_domain, pairing_problem
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, GlooExchange
from sdcwatch.guard.fingerprint import ReplicaSet, WeightCheck, require_same_schema
from sdcwatch.guard.guarded import Guarded, LossFn, bare_module, find_ddp
from sdcwatch.guard.hook import GradientProbes, guard_hook, released_probes
from sdcwatch.guard.nonfinite import NonfiniteInvestigation
from sdcwatch.guard.optimizer import unwrap
from sdcwatch.guard.preflight import Preflight
from sdcwatch.guard.replay import AuditPolicy, RingAudit
from sdcwatch.guard.reporter import LOG, Reporter, VerdictBuilder, open_console
from sdcwatch.guard.watchdog import Watchdog
from sdcwatch.sinks.base import Sink
from sdcwatch.sinks.build import build_sinks
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.wandb import active_run_id

POLLS_PER_DEADLINE = 10


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
    screen: GradientProbes
    preflight: Preflight
    audit: RingAudit
    investigation: NonfiniteInvestigation
    weights: WeightCheck
    verdicts: VerdictBuilder
    checkpoints: CheckpointGate
    watchdog: Watchdog | None
    audits_off: str
    """Why audits are off; empty if they are on."""
    close_console: Callable[[], None] = lambda: None
    """Gives back what the log put on stderr."""


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
    close_console = open_console(console=config.console)
    try:
        exchange = GlooExchange(
            guarded.process_group, deadline_seconds=config.deadline_seconds, device=guarded.device
        )
        try:
            parts = _meet(config, guarded, exchange, sinks, on_bucket)
        except BaseException as error:
            exchange.leave(f"sdcwatch.init ended with {type(error).__name__}")
            raise
    except BaseException:
        close_console()
        raise
    return replace(parts, close_console=close_console)


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
    if exchange.rank == 0:
        for text in (*lines, *notes):
            LOG.info(text)
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
        leader=leader,
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
        verdicts=VerdictBuilder(topology, observing=config.mode == "observe"),
        checkpoints=CheckpointGate(exchange, reporter),
        watchdog=_watchdog(config, exchange, reporter),
        audits_off=audits_off,
    )


def _screen(
    config: GuardConfig, guarded: Guarded, exchange: Exchange, on_bucket: Callable[[], None]
) -> GradientProbes:
    group, world = guarded.process_group, exchange.world_size
    screen = GradientProbes(group, world, on_bucket, config.comm_hook)
    closed = None if guarded.ddp is None else released_probes(guarded.ddp)
    return screen if closed is None else screen.take_over(closed)


def _watchdog(config: GuardConfig, exchange: GlooExchange, reporter: Reporter) -> Watchdog | None:
    if exchange.world_size == 1:
        return None

    def report(hang: Hang) -> None:
        # From another thread: past the reporter's window, straight to the event log.
        reporter.urgent(hang)

    def on_absent(
        operation: str, absent: tuple[int, ...], known: dict[int, str], waited: float
    ) -> None:
        report(
            Hang(
                step=reporter.step,
                time=time.time(),
                reporter=exchange.rank,
                operation=operation,
                absent=absent,
                left={str(rank): text for rank, text in known.items()},
                waited_seconds=round(waited, 1),
            )
        )

    exchange.on_absent = on_absent
    return Watchdog(
        exchange.liveness,
        hang_seconds=config.hang_seconds,
        poll_seconds=min(10.0, config.deadline_seconds / POLLS_PER_DEADLINE),
        report=report,
        leave=config.on_hang == "exit",
    )


def unguarded_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the trainable parameters of `module` that `optimizer` does not hold."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def require_guardable(
    model: torch.nn.Module, optimizer: Any, loss_fn: Callable[..., Any], config: GuardConfig
) -> tuple[DistributedDataParallel | None, torch.optim.Optimizer]:
    """Check what `sdcwatch.init` was given.

    Returns:
        The DDP wrapper or None, and the innermost optimizer.

    Raises:
        ConfigurationError: Something cannot be guarded; the message says what to do.
    """
    if not isinstance(model, torch.nn.Module):
        msg = (
            f"Expected `model` to be a torch.nn.Module, but got {type(model)}. Pass the DDP model."
        )
        raise ConfigurationError(msg)
    if not callable(loss_fn):
        msg = (
            f"Expected `loss_fn` to be callable as loss_fn(model, batch), but got {type(loss_fn)}. "
            "Pass the function that computes the loss."
        )
        raise ConfigurationError(msg)
    inner = unwrap(optimizer)
    _refuse_sharding(model, inner)
    ddp = find_ddp(model)
    if ddp is None and config.audit_every is not None:
        msg = (
            "Expected `model` to be a DistributedDataParallel model, because audits are on, but "
            f"got {type(model).__name__}. Wrap it in DDP, or pass audit_every=None."
        )
        raise ConfigurationError(msg)
    if ddp is not None and has_comm_hook(ddp):
        msg = (
            "Expected a DDP model without a communication hook, but got one that has one. Pass it "
            "as sdcwatch.init(..., comm_hook=(state, hook)) instead of registering it."
        )
        raise ConfigurationError(msg)
    ours = {id(p) for p in bare_module(model).parameters()}
    theirs = [p for group in inner.param_groups for p in group["params"]]
    if not any(id(p) in ours for p in theirs):
        msg = (
            "Expected `optimizer` to update parameters of `model`, but got one that holds none of "
            "them. Build it from model.parameters()."
        )
        raise ConfigurationError(msg)
    return ddp, inner


def _is_a(thing: object, name: str) -> bool:
    """Whether a class of that name is among its types; no such class is imported for the answer."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def _refuse_sharding(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what keeps another part of the weights or of the state on each rank."""
    if any(_is_a(part, "FullyShardedDataParallel") for part in model.modules()):
        msg = (
            "Expected every rank to hold the whole model, but got FullyShardedDataParallel. Train "
            "with DistributedDataParallel: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    sharded = [name for name, p in model.named_parameters() if _is_a(p, "DTensor")]
    if sharded:
        msg = (
            f"Expected every rank to hold the whole model, but got DTensor parameters, the first "
            f"of {len(sharded)} is {sharded[0]}. Train with DistributedDataParallel, without "
            "fully_shard or tensor parallelism: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    if _is_a(optimizer, "ZeroRedundancyOptimizer"):
        msg = (
            "Expected an optimizer that updates all weights on every rank, but got "
            "ZeroRedundancyOptimizer. Pass the optimizer that it shards, built from "
            "model.parameters(): one rank's update would reach the others without a comparison."
        )
        raise ConfigurationError(msg)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered already, other than a closed guard's."""
    return bool(getattr(ddp, "_comm_hooks", None)) and released_probes(ddp) is None


def make_run_dir(config: GuardConfig, run: str) -> Path:
    """The run's directory, made and found writable.

    Raises:
        ConfigurationError: It is not.
    """
    path = Path(config.run_dir) if config.run_dir is not None else Path("sdcwatch-runs") / run
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        msg = (
            f"Expected `run_dir` to be writable, but got {error.strerror} for {path}. Pass a "
            "directory that every rank's user may write."
        )
        raise ConfigurationError(msg) from error
    return path


def run_name(config: GuardConfig, environment: LauncherEnvironment) -> str:
    """Name of the run: configured, else the launcher's, else the W&B run's, else the start time."""
    known = config.run or environment.run or active_run_id()
    return known or time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())


def agree_on_run(exchange: Exchange, name: str) -> str:
    """The leader's name of the run: start times differ between ranks. Every rank calls it."""
    return exchange.gather(name.encode(), "the name of the run")[0].decode()


def own_identity(
    exchange: Exchange, config: GuardConfig, environment: LauncherEnvironment, device: torch.device
) -> RankInfo:
    """The identity of this rank."""
    host = socket.gethostname()
    node = config.node or host
    index, uuid = _gpu(device)
    return RankInfo(
        rank=exchange.rank,
        node=node,
        host=host,
        local_rank=environment.local_rank,
        pid=os.getpid(),
        instance_id=config.instance_id or node,
        gpu_index=index,
        gpu_uuid=config.gpu_uuid or uuid,
    )


def _gpu(device: torch.device) -> tuple[int | None, str | None]:
    if device.type != "cuda":
        return None, None
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return index, None if uuid is None else f"GPU-{uuid}"


def gather_ranks(exchange: Exchange, own: RankInfo) -> tuple[RankInfo, ...]:
    """The identity of every rank. Every rank calls it."""
    rows = exchange.gather(json.dumps(asdict(own)).encode(), "the gathering of the topology")
    return tuple(RankInfo(**json.loads(row)) for row in rows)


_OF_ONE_RANK = frozenset(
    ("run", "run_dir", "node", "instance_id", "gpu_uuid", "comm_hook", "telemetry", "console")
)
"""Options that may differ: everything else decides when a rank meets the others."""
_SAID_BY_DESYNC = frozenset(("start_step",))
"""The first header compares steps, and its error says which rank is at which."""


def require_same_options(exchange: Exchange, config: GuardConfig) -> None:
    """Check that every rank was given the same options. Every rank calls it.

    Raises:
        ConfigurationError: They differ; raised on every rank, naming the options and the ranks.
    """
    names = [f.name for f in fields(config) if f.name not in _OF_ONE_RANK | _SAID_BY_DESYNC]
    message = json.dumps({name: repr(getattr(config, name)) for name in names}).encode()
    rows = [json.loads(r) for r in exchange.gather(message, "the comparison of options")]
    said = []
    for name in names:
        sides: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            sides.setdefault(row.get(name, "nothing"), []).append(rank)
        if len(sides) > 1:
            parts = [f"{value} on {list_ranks(ranks)}" for value, ranks in sides.items()]
            said.append(f"`{name}` {', '.join(parts)}")
    if said:
        msg = (
            f"Expected the same options on every rank, but got {'; '.join(said)}. Pass the same "
            "arguments and SDCWATCH_* variables everywhere."
        )
        raise ConfigurationError(msg)


def why_partly_guarded(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sentence about parameters that another optimizer updates, or ""."""
    names = unguarded_parameters(module, optimizer)
    if not names:
        return ""
    return (
        f"{count(len(names), 'trainable parameter')} ({list_names(names)}) not in this optimizer: "
        "after a failed check only the guarded optimizer's update is skipped"
    )
