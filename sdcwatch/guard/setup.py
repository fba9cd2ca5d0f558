"""Puts a guard together: validate, meet, build.

First what this rank was given is checked; then it introduces itself to the others, in one gather,
and all compare; then each collaborator is built from what it uses. Nothing is put on the model or
on the optimizer until all of that has passed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sdcwatch import __version__
from sdcwatch.checks.calling import choose_caller
from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.determinism import DeterministicSwitches, environment_facts
from sdcwatch.checks.replay import Replayer
from sdcwatch.checks.shadow import ForwardShadow
from sdcwatch.checks.trace import REPEATS, disputed_trace, repeated_trace
from sdcwatch.config import GuardConfig, LauncherEnvironment, launcher_environment
from sdcwatch.core.history import Device, device_of, devices_that_matched
from sdcwatch.core.introduction import (
    Introduction,
    files_needed,
    option_differences,
    same_schema,
    schema_differences,
    schema_digest,
    unused_everywhere,
)
from sdcwatch.core.records import RunStarted
from sdcwatch.core.text import count, list_names
from sdcwatch.core.topology import (
    RankInfo,
    Topology,
    choose_fault_domain,
    pairing_problem,
    partners,
)
from sdcwatch.core.waiting import Finding
from sdcwatch.errors import ConfigurationError, RankGone, SchemaMismatch
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, GlooExchange
from sdcwatch.guard.files import (
    answered,
    make_run_dir,
    most_partners,
    open_files_left,
    require_files,
    run_dir_of,
    run_name,
)
from sdcwatch.guard.fingerprint import ReplicaCheck, ReplicaSet, WeightCheck
from sdcwatch.guard.guarded import (
    Guarded,
    require_guardable,
    require_used,
    unguarded_parameters,
    what_is_guarded,
    what_is_left_out,
)
from sdcwatch.guard.hook import GradientProbes, guard_hook, released_probes
from sdcwatch.guard.leaving import export_seconds, exporters
from sdcwatch.guard.nonfinite import NonfiniteCheck, NonfiniteInvestigation
from sdcwatch.guard.places import apart
from sdcwatch.guard.preflight import Preflight, ReplayCheck
from sdcwatch.guard.replay import AuditPolicy, RingAudit, SegmentMemory
from sdcwatch.guard.reporter import LOG, Reporter, VerdictBuilder, open_console
from sdcwatch.guard.saved_state import SavedState
from sdcwatch.guard.sharing import gather_json, share_bytes
from sdcwatch.guard.step import StepController
from sdcwatch.guard.tracing import Tracing
from sdcwatch.guard.updates import UpdateLog
from sdcwatch.guard.watchdog import Watchdog
from sdcwatch.guard.window import Recorder
from sdcwatch.sinks.base import Sink
from sdcwatch.sinks.build import build_sinks
from sdcwatch.sinks.jsonl import run_id_of, segments_of

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks agreed on before anything was built.

    Attributes:
        run: Name of the run.
        run_id: The same in every segment of it, another in a run of the same name.
        run_dir: Where it is written.
        topology: Who is where.
        audits_off: Why there will be no audits, or "".
        notes: What a person should know from the start.
        matched_earlier: Devices here that matched others in earlier segments of the run.
    """

    run: str
    run_id: str
    run_dir: Path
    topology: Topology
    audits_off: str
    notes: tuple[str, ...]
    matched_earlier: frozenset[Device] = frozenset()


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


def assemble(model: torch.nn.Module, optimizer: Any, options: Mapping[str, Any]) -> Assembly:
    """Check the arguments, meet the other ranks, and build. Every rank calls it.

    Nothing is put on the model yet; see `register_hook`.

    Raises:
        ConfigurationError, SchemaMismatch, RankGone: See `sdcwatch.init`.
    """
    arguments = dict(options)
    sinks: Sequence[Sink] = arguments.pop("sinks", ())
    config = GuardConfig.from_env(**arguments)
    ddp, optimizers, wrappers = require_guardable(model, optimizer, config)
    guarded, unused = what_is_guarded(model, ddp, optimizers, config)
    guarded = replace(guarded, wrappers=wrappers)
    close_console = open_console(console=config.console)
    try:
        exchange = GlooExchange(
            guarded.process_group,
            deadline_seconds=config.deadline_seconds,
            late_seconds=config.late_seconds,
            device=guarded.device,
        )
        try:
            meeting = meet(exchange, config, guarded, unused)
            reporter = _report(config, guarded, exchange, meeting, sinks)
            return _build(config, guarded, exchange, meeting, reporter, close_console)
        except BaseException as error:
            exchange.leave(
                f"sdcwatch.init ended with {type(error).__name__}",
                followed=isinstance(error, RankGone),
            )
            exchange.close()
            raise
    except BaseException:
        close_console()
        raise


def meet(
    exchange: GlooExchange, config: GuardConfig, guarded: Guarded, unused: tuple[str, ...] = ()
) -> Meeting:
    """Introduce this rank to the others, compare, and connect to those that audits need.

    One gather, and one message to and from each of them. Every rank calls it.

    Args:
        exchange: Between the ranks.
        config: Of this rank.
        guarded: What this rank guards.
        unused: Patterns of the option `local` that match nothing here.

    Raises:
        ConfigurationError: Ranks were given different options, one that matches nothing, or may
            open too few files; raised on every rank.
        RankGone: A rank did not answer within the deadline.
        SchemaMismatch: Ranks hold different models; raised on every rank.
    """
    schema = schema_of(guarded.replicated(buffers=config.buffers))
    environment = launcher_environment()
    run = run_name(config, environment)
    behind = _apart(exchange, run_dir_of(config, run)) if exchange.rank == 0 else ""
    place = run_dir_of(config, run, behind)
    own = Introduction(
        info=own_identity(exchange.rank, config, environment, guarded.device),
        run=run,
        apart=behind,
        options=_shared_options(config),
        schema=schema_digest(schema),
        # Only rank 0 is sure to see the log of earlier segments.
        run_id=answered(place, lambda: run_id_of(place)) if exchange.rank == 0 else "",
        files=open_files_left(),
        unused=unused,
    )
    ranks = [Introduction.decode(r) for r in exchange.gather(own.encode(), "sdcwatch.init")]
    require_same_options(ranks)
    require_used(unused_everywhere(ranks), guarded)
    if not same_schema(ranks):
        rows = gather_json(exchange, schema, "the comparison of model schemas")
        mismatch = SchemaMismatch(schema_differences(rows))
        LOG.critical(mismatch)  # uncaught it ends the process without a word, as SystemExit does
        raise mismatch
    infos = tuple(one.info for one in ranks)
    domain, note = choose_fault_domain(infos, config.fault_domain)
    topology = Topology(infos, domain)
    off = why_audits_are_off(config, topology)
    others = () if off else partners(topology, [exchange.rank])[exchange.rank]
    require_files(ranks, files_needed(len(ranks), 0 if off else most_partners(topology)))
    exchange.connect(others)
    unguarded = why_partly_guarded(guarded.module, guarded.optimizers)
    first = ranks[0]
    several = _SEVERAL.format(run=first.run + first.apart) if first.apart else ""
    said = (several, note if not off else "", off, unguarded, what_is_left_out(guarded))
    notes = tuple(n for n in said if n)
    earlier = frozenset[Device]() if off else tell_matched(exchange, infos, place)
    return Meeting(
        run=first.run + first.apart,
        run_id=first.run_id,
        run_dir=run_dir_of(config, first.run, first.apart),
        topology=topology,
        audits_off=off,
        notes=notes,
        matched_earlier=earlier,
    )


def _apart(exchange: GlooExchange, run_dir: Path) -> str:
    """What tells this guard's run from those of other guards of the job, or ""."""
    # Of a host: ranks on different ones may name their own disks alike.
    name = f"{socket.gethostname()}/{exchange.first_rank}/{run_dir.absolute()}"
    return apart(exchange.first_rank, exchange.claim(name))


def tell_matched(exchange: Exchange, infos: Sequence[RankInfo], run_dir: Path) -> frozenset[Device]:
    """Devices that matched others in an earlier segment of the run, by the log that rank 0 sees.

    Every rank calls it.
    """
    own = {}
    if exchange.rank == 0:
        known = answered(run_dir, lambda: devices_that_matched(segments_of(run_dir)))
        bits = sum(1 << i.rank for i in infos if device_of(i) in known)
        own[0] = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    (told,) = share_bytes(exchange, own, 1, "sdcwatch.init")
    found = int.from_bytes(told, "little")
    return frozenset(device_of(info) for info in infos if found >> info.rank & 1)


def _report(
    config: GuardConfig,
    guarded: Guarded,
    exchange: Exchange,
    meeting: Meeting,
    sinks: Sequence[Sink],
) -> Reporter:
    """Open the event log and the sinks, and give out the start record."""
    environment = launcher_environment()
    run_dir = meeting.run_dir
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
        if (config.start_step or environment.restart_count) and dispatcher.summary.segments == 1:
            reporter.note_once("history_anew", _HISTORY_ANEW.format(step=config.start_step))
    return reporter


def _build(
    config: GuardConfig,
    guarded: Guarded,
    exchange: GlooExchange,
    meeting: Meeting,
    reporter: Reporter,
    close_console: Callable[[], None],
) -> Assembly:
    gate, spoken = CheckpointGate(exchange, reporter), guarded.spoken()
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
                lambda: guarded.replicated(buffers=config.buffers),
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
    replay = _replay_check(config, guarded, exchange, meeting, replayer)
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


def _replay_check(
    config: GuardConfig,
    guarded: Guarded,
    exchange: Exchange,
    meeting: Meeting,
    replayer: Replayer,
) -> ReplayCheck:
    spoken = guarded.spoken()
    names = [spoken.get(name, name) for name, _ in guarded.compared]
    facts = partial(_facts, guarded)
    rounds = config.preflight_micro_batches
    trace = partial(disputed_trace, replayer)
    policy = AuditPolicy(guarded.device, config.quorum, config.seed, facts, trace)
    memory = SegmentMemory(meeting.matched_earlier)
    return ReplayCheck(
        Preflight(
            exchange,
            replayer.run_packed,
            names,
            topology=meeting.topology,
            memory=memory,
            rounds=rounds,
            facts=facts,
            max_payload_bytes=config.max_payload_mb * MIB,
            covers=replayer.caller.covers,
            trace=partial(repeated_trace, replayer, repeats=REPEATS),
            device=guarded.device,
            widen=replayer.capture.entrances.widen,
        ),
        RingAudit(exchange, meeting.topology, replayer.run, names, policy=policy, memory=memory),
        meeting.audits_off,
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
        environment=_facts(guarded),
        notes=meeting.notes,
        run_id=meeting.run_id,
        run_dir=str(run_dir.absolute()),
    )


def _facts(guarded: Guarded) -> dict[str, str]:
    environment = launcher_environment()
    return environment_facts(
        guarded.device,
        compiled=guarded.compiled,
        cublas_workspace=environment.cublas_workspace,
        variables=environment.kernel_variables,
    )


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

    exchange.on_absent = on_absent
    return watchdog


def own_identity(
    rank: int, config: GuardConfig, environment: LauncherEnvironment, device: torch.device
) -> RankInfo:
    """The identity of this rank."""
    host = socket.gethostname()
    node = config.node or host
    index, uuid = _gpu(device)
    return RankInfo(
        rank=rank,
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


_SEVERAL = "this job has several guards: this one's run is {run}, in a directory of its own"
_HISTORY_ANEW = (
    "the run goes on from step {step}, but its directory holds nothing of what was before: the "
    "history starts anew, without earlier suspects and checkpoints. Keep run_dir on storage that "
    "rank 0 finds wherever it runs"
)
_OF_ONE_RANK = frozenset(
    (
        "run",
        "run_dir",
        "node",
        "instance_id",
        "gpu_uuid",
        "comm_hook",
        "telemetry",
        "console",
        "handle_sigterm",
        "scaler",
    )
)
"""Options that may differ: everything else decides when a rank meets the others."""
_SAID_BY_DESYNC = frozenset(("start_step",))
"""The first header compares steps, and its error says which rank is at which."""


def _as_text(config: GuardConfig) -> dict[str, str]:
    names = [f.name for f in fields(config) if f.name not in _OF_ONE_RANK | _SAID_BY_DESYNC]
    return {name: repr(getattr(config, name)) for name in names}


def _shared_options(config: GuardConfig) -> dict[str, str]:
    """Those that were not left as they are: what is equal everywhere by default need not travel."""
    defaults = _as_text(GuardConfig())
    return {name: text for name, text in _as_text(config).items() if text != defaults[name]}


def require_same_options(ranks: Sequence[Introduction]) -> None:
    """Check that every rank was given the same options.

    Raises:
        ConfigurationError: They differ; names the options and the ranks.
    """
    differences = option_differences(ranks, _as_text(GuardConfig()))
    if differences:
        msg = (
            f"Expected the same options on every rank, but got {'; '.join(differences)}. Pass the "
            "same arguments and SDCWATCH_* variables everywhere."
        )
        raise ConfigurationError(msg)


def schema_of(named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, str, str]]:
    """Name, shape and dtype of each tensor."""
    return [(name, str(tuple(t.shape)), str(t.dtype)) for name, t in named]


def why_partly_guarded(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """A sentence about parameters that another optimizer updates, or ""."""
    names = unguarded_parameters(module, optimizers)
    if not names:
        return ""
    return (
        f"{count(len(names), 'trainable parameter')} ({list_names(names)}) not in the optimizers "
        "that init was given: after a failed check only their updates are skipped. Pass every "
        "optimizer, as sdcwatch.init(model, [one, other])"
    )
