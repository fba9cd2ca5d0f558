"""How the ranks of a guard meet: each introduces itself, in one gather, and all compare.

What they agree on, and every refusal that takes more than one rank to see, comes from here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

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
from sdcwatch.core.records import Record
from sdcwatch.core.text import counted_in_group
from sdcwatch.core.topology import (
    RankInfo,
    Topology,
    choose_fault_domain,
    pairing_problem,
    partners,
)
from sdcwatch.errors import ConfigurationError, SchemaMismatch, nearest
from sdcwatch.guard.exchange import Exchange, GlooExchange
from sdcwatch.guard.files import (
    answered,
    most_partners,
    open_files_left,
    require_files,
    run_dir_of,
    run_name,
)
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.places import apart
from sdcwatch.guard.reporter import LOG
from sdcwatch.guard.sharing import gather_json, share_bytes
from sdcwatch.sinks.jsonl import run_id_of, segments_of

_SEVERAL = "this job has several guards: this one's run is {run}, in a directory of its own"
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


def meet(exchange: GlooExchange, config: GuardConfig, guarded: Guarded) -> Meeting:
    """Introduce this rank to the others, compare, and connect to those that audits need.

    One gather, and one message to and from each of them. Every rank calls it.

    Args:
        exchange: Between the ranks.
        config: Of this rank.
        guarded: What this rank guards.

    Raises:
        ConfigurationError: Ranks were given different options, one that matches nothing, or may
            open too few files; raised on every rank.
        RankGone: A rank did not answer within the deadline.
        SchemaMismatch: Ranks hold different models; raised on every rank.
    """
    environment = launcher_environment()
    run = run_name(config, environment)
    behind = _apart(exchange, run_dir_of(config, run)) if exchange.rank == 0 else ""
    place = run_dir_of(config, run, behind)
    # Only rank 0 is sure to see the log of earlier segments.
    earlier = answered(place, lambda: list(segments_of(place))) if exchange.rank == 0 else []
    own = Introduction(
        info=own_identity(exchange.rank, config, environment, guarded.device),
        run=run,
        apart=behind,
        options=_shared_options(config),
        schema=schema_digest(guarded.schema),
        run_id=run_id_of(earlier) if exchange.rank == 0 else "",
        files=open_files_left(),
        unused=guarded.unused,
    )
    ranks = [Introduction.decode(r) for r in exchange.gather(own.encode(), "sdcwatch.init")]
    require_same_options(ranks)
    if unused := unused_everywhere(ranks):
        names = sorted({n for n, _ in (*guarded.named, *guarded.module.named_buffers())})
        msg = (
            f"Expected every pattern in `local` to match a parameter or a buffer, but got "
            f"{', '.join(map(repr, unused))}, which match none. {nearest(unused[0], names)}"
        )
        raise ConfigurationError(msg)
    if not same_schema(ranks):
        rows = gather_json(exchange, guarded.schema, "the comparison of model schemas")
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
    first = ranks[0]
    several = _SEVERAL.format(run=first.run + first.apart) if first.apart else ""
    counted = counted_in_group(exchange.job_ranks)
    said = (several, counted, note if not off else "", off, *guarded.notes)
    return Meeting(
        run=first.run + first.apart,
        run_id=first.run_id,
        run_dir=run_dir_of(config, first.run, first.apart),
        topology=topology,
        audits_off=off,
        notes=tuple(n for n in said if n),
        matched_earlier=frozenset() if off else tell_matched(exchange, infos, earlier),
    )


def _apart(exchange: GlooExchange, run_dir: Path) -> str:
    """What tells this guard's run from those of other guards of the job, or ""."""
    # Of a host: ranks on different ones may name their own disks alike.
    name = f"{socket.gethostname()}/{exchange.job_ranks[0]}/{run_dir.absolute()}"
    return apart(exchange.job_ranks[0], exchange.claim(name))


def tell_matched(
    exchange: Exchange, infos: Sequence[RankInfo], earlier: Sequence[Record]
) -> frozenset[Device]:
    """Devices that matched others in an earlier segment of the run. Every rank calls it.

    Args:
        exchange: Between the ranks.
        infos: Who they are.
        earlier: Starts and preflights of earlier segments; looked at on rank 0.
    """
    own = {}
    if exchange.rank == 0:
        known = devices_that_matched(earlier)
        bits = sum(1 << i.rank for i in infos if device_of(i) in known)
        own[0] = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    (told,) = share_bytes(exchange, own, 1, "sdcwatch.init")
    found = int.from_bytes(told, "little")
    return frozenset(device_of(info) for info in infos if found >> info.rank & 1)


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
