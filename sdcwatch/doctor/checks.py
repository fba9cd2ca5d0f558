"""What the facts mean: pure functions from `Facts` to findings, each with what to do.

Three things are looked for: what would stop a bitwise replay on another rank, what would keep the
guard's findings from whoever should see them, and what would end a process before the guard has
said why.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from sdcwatch.core import introduction
from sdcwatch.core.topology import EVERYBODY
from sdcwatch.doctor.facts import Facts, Folder

OLDEST_TORCH = (2, 8)
"""The first whose gloo can connect on demand; pyproject.toml promises the same."""
FILES_BESIDES = 512
"""Open files that a training has for other things than the sockets of gloo."""
THREADS_OF_A_RANK = 256
"""Threads that a rank may have, data loaders included."""
LOCKED_MEMORY_BYTES = 64 * 2**20
"""Less than what NCCL registers for one connection over InfiniBand."""
COMPILES_WRONGLY = (2, 10)
"""The first torch whose inductor fuses reductions as in pytorch/pytorch#193061."""
HEARTBEAT_SECONDS = 480.0
"""What TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is unless set."""
WORKSPACES = (":4096:8", ":16:8")
"""The values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS repeats itself."""

_MIB, _GIB = 2**20, 2**30
_EARLIEST = 1704067200.0  # 2024: a clock before that was never set
_SHOWN_ELSEWHERE = ("torch", "python", "compiled", "cuda", "cudnn", "driver", "gpu", "threads")
_REMOTE = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|fuse|smb|cifs|9p|wekafs")


class Level(str, Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """It costs something, or will matter on other machines than this one."""
    PROBLEM = "problem"
    """The guard cannot work, or is silenced, or is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table.

    Attributes:
        level: How much it matters.
        topic: What it is about: a heading.
        name: The thing itself.
        found: What it is, and what follows.
        do: What to do about it; "" where nothing is to be done.
    """

    level: Level = Level.OK
    topic: str
    name: str
    found: str
    do: str = ""


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Everything there is to say about a machine, in the order of the table."""
    return tuple(finding for check in _CHECKS for finding in check(facts))


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among findings."""
    levels = list(Level)
    return max((f.level for f in findings), key=levels.index, default=Level.OK)


def versions(facts: Facts) -> Iterator[Finding]:
    """Versions, those that are too old, and what this build of torch lacks."""
    software = facts.software
    found = ", ".join([f"Python {software.python}", *map(" ".join, software.packages.items())])
    yield Finding(topic="versions", name="packages", found=found)
    if software.torch is None:
        yield Finding(
            level=Level.PROBLEM,
            topic="versions",
            name="torch",
            found=f"cannot be imported: {software.torch_error}",
            do="Repair the installation of torch in this environment.",
        )
        return
    oldest = ".".join(map(str, OLDEST_TORCH))
    old = _release(software.torch) < OLDEST_TORCH
    yield Finding(
        level=Level.PROBLEM if old else Level.OK,
        topic="versions",
        name="torch",
        found=f"{software.torch}: older than {oldest}, whose gloo is the first to connect on demand"
        if old
        else software.torch,
        do=f"Install torch {oldest} or later." if old else "",
    )
    if not software.gloo:
        yield Finding(
            level=Level.PROBLEM,
            topic="versions",
            name="gloo",
            found="this build of torch has no gloo, over which the guard talks",
            do="Install a build of torch with USE_GLOO=1; those on PyPI for Linux have it.",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def devices(facts: Facts) -> Iterator[Finding]:
    """Devices, their libraries, and whether they are alike."""
    software = facts.software
    if software.torch is None:
        return
    if not software.gpus:
        idle = software.driver is not None
        yield Finding(
            level=Level.WARNING if idle else Level.OK,
            topic="devices",
            name="GPU",
            found=f"none that torch can use, though there is a driver ({software.driver})"
            if idle
            else "none: training on the CPU",
            do="Install a CUDA build of torch, or look at CUDA_VISIBLE_DEVICES." if idle else "",
        )
        return
    libraries = {
        "CUDA": software.cuda,
        "cuDNN": software.cudnn,
        "NCCL": software.nccl,
        "driver": software.driver,
    }
    known = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    kinds = sorted(set(software.gpus))
    mixed = len(kinds) > 1
    yield Finding(
        level=Level.WARNING if mixed else Level.OK,
        topic="devices",
        name="GPU",
        found=f"{len(software.gpus)} × {kinds[0]}; {known}"
        if not mixed
        else f"{' and '.join(kinds)}: other kernels, so replays on the other kind differ in bits",
        do="Train on devices of one kind." if mixed else "",
    )


def kernels(facts: Facts) -> Iterator[Finding]:
    """What decides which kernels run, and with it the bits of a replay."""
    variables, gpu = facts.variables, bool(facts.software.gpus)
    if facts.numerics:
        flags = {k: v for k, v in facts.numerics.items() if v and k not in _SHOWN_ELSEWHERE}
        shown = ", ".join(f"{name} {value}" for name, value in flags.items())
        yield Finding(topic="replay", name="flags", found=f"of a fresh process: {shown}")
    workspace = variables.get("CUBLAS_WORKSPACE_CONFIG")
    if gpu:
        right = workspace in WORKSPACES
        yield Finding(
            level=Level.OK if right else Level.WARNING,
            topic="replay",
            name="CUBLAS_WORKSPACE_CONFIG",
            found=f"{workspace or 'not set'}"
            + ("" if right else ": cuBLAS may not repeat itself, audits then compare outputs only"),
            do="" if right else f"export CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]}",
        )
    yield from _threads(facts)
    for name, value in facts.kernel_variables.items():
        yield Finding(
            level=Level.WARNING,
            topic="replay",
            name=name,
            found=f"{value}: ranks without it run other kernels",
            do="Set it alike on every host, or nowhere.",
        )
    if variables.get("PYTHONHASHSEED", "random") == "random":
        yield Finding(
            topic="replay",
            name="PYTHONHASHSEED",
            found="random: sets of strings are iterated in another order on each rank, which "
            "audits report as software where a model does so",
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    """The number of threads decides bits on a CPU."""
    if facts.software.gpus:
        return
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    given = [f"{name}={facts.variables[name]}" for name in names if name in facts.variables]
    yield Finding(
        level=Level.OK if given else Level.WARNING,
        topic="replay",
        name="threads",
        found=", ".join(given)
        if given
        else f"as many as there are cores ({facts.cores} here): another number gives other bits, "
        "so hosts that differ cannot replay each other",
        do="" if given else "export OMP_NUM_THREADS to one number on every host.",
    )


def nccl(facts: Facts) -> Iterator[Finding]:
    """Variables of NCCL and of torch that end a process before the guard has spoken."""
    for name in ("TORCH_NCCL_NAN_CHECK", "TORCH_DIST_NAN_CHECK"):
        if _on(facts, name):
            yield Finding(
                level=Level.PROBLEM,
                topic="collectives",
                name=name,
                found="on: a NaN ends the process before check 1 can say which rank it came from",
                do=f"unset {name}; check 1 sees the same values and skips the update.",
            )
    if _on(facts, "TORCH_NCCL_BLOCKING_WAIT"):
        yield Finding(
            level=Level.WARNING,
            topic="collectives",
            name="TORCH_NCCL_BLOCKING_WAIT",
            found="on: each collective blocks the host, and a late rank raises a timeout of NCCL's "
            "before the guard has named it",
            do="unset TORCH_NCCL_BLOCKING_WAIT",
        )
    yield from _heartbeat(facts)
    if facts.variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding(
            level=Level.WARNING,
            topic="collectives",
            name="TORCH_DISTRIBUTED_DEBUG",
            found="DETAIL: every collective, the guard's too, is preceded by two others",
            do="Set it to INFO or OFF outside of debugging.",
        )


def _on(facts: Facts, name: str) -> bool:
    """Whether a variable of torch's is on; torch takes 1, true, yes and their kin."""
    return facts.variables.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on")


def _heartbeat(facts: Facts) -> Iterator[Finding]:
    """Torch's monitor ends a process whose NCCL is stuck; the guard has to be faster."""
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    given = facts.variables.get(name)
    monitored = facts.variables.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower() not in (
        "0",
        "false",
    )
    if not facts.software.gpus or not monitored or (given is not None and not given.isdigit()):
        return
    seconds = float(given) if given is not None else HEARTBEAT_SECONDS
    needed = facts.options.patience_seconds
    if seconds <= needed:
        yield Finding(
            level=Level.PROBLEM,
            topic="collectives",
            name=name,
            found=f"{seconds:g} s: torch ends a stuck process before the guard, which needs "
            f"{needed:g} s, has named who is absent",
            do=f"export {name}={2 * needed:.0f}, or lower hang_seconds and deadline_seconds.",
        )


def races(facts: Facts) -> Iterator[Finding]:
    """Faults of torch and gloo, known by version, that look like corruption or a hang."""
    software, switch = facts.software, "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
    affected = software.torch is not None and _release(software.torch) >= COMPILES_WRONGLY
    if affected and software.gpus and facts.variables.get(switch) != "0":
        yield Finding(
            level=Level.WARNING,
            topic="replay",
            name="torch.compile",
            found=f"torch {software.torch}: inductor may leave a part of a gradient unwritten, so "
            "that healthy devices differ from run to run (pytorch/pytorch#193061, and #188890 "
            "since 2.12)",
            do=f"export {switch}=0 where a model is compiled, or install a torch that holds "
            "pytorch/pytorch#193103.",
        )
    if _on(facts, "TORCH_GLOO_LAZY_INIT"):
        yield Finding(
            level=Level.WARNING,
            topic="collectives",
            name="TORCH_GLOO_LAZY_INIT",
            found="on: where a rank dies before a pair has connected, its peer can wait without a "
            "timeout (pytorch/gloo#520)",
            do="Leave it off below about a thousand ranks.",
        )


def network(facts: Facts) -> Iterator[Finding]:
    """Whether gloo of another machine would find this one."""
    there, name = facts.network, "GLOO_SOCKET_IFNAME"
    chosen = facts.variables.get(name)
    absent = [i for i in (chosen or "").split(",") if i and i not in there.interfaces]
    if absent:
        yield Finding(
            level=Level.PROBLEM,
            topic="network",
            name=name,
            found=f"{absent[0]}: no such interface here",
            do=f"export {name} to one of {', '.join(there.interfaces)}.",
        )
        return
    found, reachable = _reach(facts)
    if chosen:
        found, reachable = f"gloo binds to {chosen}", True
    far = facts.job.several_nodes
    serious = Level.PROBLEM if far else Level.WARNING
    yield Finding(
        level=Level.OK if reachable else serious,
        topic="network",
        name="host name",
        found=found,
        do=""
        if reachable
        else f"export {name} to the interface that other nodes reach, or correct /etc/hosts.",
    )


def _reach(facts: Facts) -> tuple[str, bool]:
    """What the host name leads gloo to, and whether other machines could follow."""
    there = facts.network
    if there.error:
        return f"{there.host} does not resolve ({there.error}): gloo binds to loopback", False
    addresses = [ipaddress.ip_address(a.partition("%")[0]) for a in there.addresses]
    outside = [a for a in addresses if not a.is_loopback]
    listed = ", ".join(map(str, addresses))
    if not outside:
        return f"{there.host} resolves to {listed}: other machines cannot connect to that", False
    if all(a.version == 6 for a in outside):
        return (
            f"{there.host} resolves to IPv6 only ({listed}): hosts with IPv4 cannot meet it",
            False,
        )
    return f"{there.host} resolves to {listed}", True


def options(facts: Facts) -> Iterator[Finding]:
    """What the ``SDCWATCH_*`` variables ask for."""
    told = facts.options
    if told.error:
        yield Finding(
            level=Level.PROBLEM,
            topic="guard",
            name="SDCWATCH_*",
            found=told.error,
            do="Correct it.",
        )
    for name, do in told.unknown.items():
        yield Finding(
            level=Level.WARNING, topic="guard", name=name, found="sets no option: ignored", do=do
        )
    silent = {
        "SDCWATCH_AUDIT_EVERY": told.audit_every is None and "no replay audits: check 2 is off",
        "SDCWATCH_FINGERPRINT_EVERY": told.fingerprint_every is None
        and "weights are compared at step 0 and before a checkpoint only",
        "SDCWATCH_MODE": told.observe and "observe: findings are reported, no update is skipped",
        "SDCWATCH_TELEMETRY": not told.telemetry
        and "off: findings reach events.jsonl and stderr only",
    }
    for name, found in silent.items():
        if found:
            yield Finding(
                level=Level.WARNING, topic="guard", name=name, found=found, do=f"unset {name}"
            )
    if not told.error and not told.unknown and not any(silent.values()):
        yield Finding(topic="guard", name="SDCWATCH_*", found="nothing turned off")


def telemetry(facts: Facts) -> Iterator[Finding]:
    """Whether metrics, log records and W&B reach whoever watches."""
    variables = facts.variables
    if _on(facts, "OTEL_SDK_DISABLED"):
        yield Finding(
            level=Level.WARNING,
            topic="telemetry",
            name="OTEL_SDK_DISABLED",
            found="on: OpenTelemetry sends nothing",
            do="unset OTEL_SDK_DISABLED",
        )
    endpoint = variables.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if variables.get("OTEL_METRICS_EXPORTER", "").lower() == "none" and endpoint:
        yield Finding(
            level=Level.WARNING,
            topic="telemetry",
            name="OTEL_METRICS_EXPORTER",
            found=f"none: metrics are not pushed to {endpoint}",
            do="unset OTEL_METRICS_EXPORTER",
        )
    protocol = variables.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if protocol != "http/protobuf":
        yield Finding(
            level=Level.WARNING,
            topic="telemetry",
            name="OTEL_EXPORTER_OTLP_PROTOCOL",
            found=f"{protocol}: sdcwatch pushes http/protobuf only",
            do="Point the endpoint to the collector's HTTP port, 4318 by default.",
        )
    mode = variables.get("WANDB_MODE", "").lower()
    if mode in ("disabled", "offline", "dryrun"):
        off = mode == "disabled"
        yield Finding(
            level=Level.WARNING if off else Level.OK,
            topic="telemetry",
            name="WANDB_MODE",
            found=f"{mode}: W&B gets nothing" if off else f"{mode}: until `wandb sync`",
            do="unset WANDB_MODE" if off else "",
        )


def ports(facts: Facts) -> Iterator[Finding]:
    """Whether /metrics can be served where Prometheus looks for it."""
    taken = {port: why for port, why in facts.ports.items() if why}
    for port, why in taken.items():
        yield Finding(
            level=Level.WARNING,
            topic="telemetry",
            name=f"port {port}",
            found=f"{why}: /metrics moves to the next free port, where Prometheus does not look",
            do="End what holds it, set prometheus_port, or let Prometheus follow file_sd_dir.",
        )
    if facts.ports and not taken:
        shown = "–".join(str(p) for p in dict.fromkeys((min(facts.ports), max(facts.ports))))
        yield Finding(topic="telemetry", name=f"port {shown}", found="free")


def limits(facts: Facts) -> Iterator[Finding]:
    """Open files against the sockets that gloo needs, threads, locked and shared memory."""
    yield _open_files(facts)
    yield from _ulimits(facts)
    memory = facts.shared_memory
    if memory is None:
        return
    small = memory.total_bytes < _GIB
    tiny = memory.total_bytes <= 64 * _MIB
    yield Finding(
        level=Level.PROBLEM if tiny else Level.WARNING if small else Level.OK,
        topic="limits",
        name="/dev/shm",
        found=f"{_size(memory.total_bytes)}"
        + (": NCCL and data loaders die of a bus error when it is full" if small else ""),
        do="Start the container with --shm-size=8g or --ipc=host." if small else "",
    )


def files_needed(ranks: int, *, mesh: bool) -> int:
    """Open files that one rank needs.

    Args:
        ranks: Number of ranks.
        mesh: Whether training itself goes over gloo, which connects each rank with every other.
            The guard connects with a few, however many there are.
    """
    guard = introduction.files_needed(ranks, min(ranks - 1, EVERYBODY))
    return guard + (ranks - 1 if mesh else 0) + FILES_BESIDES


def _open_files(facts: Facts) -> Finding:
    soft, hard = facts.open_files
    ranks, mesh = facts.job.ranks, not facts.software.gpus
    limit = f"{_limit(soft)}, at most {_limit(hard)}"
    if ranks is None:
        return Finding(topic="limits", name="open files", found=f"{limit}; see --ranks")
    need = files_needed(ranks, mesh=mesh)
    if 0 <= hard < need:
        level, do = Level.PROBLEM, f"Raise the hard limit (LimitNOFILE, limits.conf) to {need:,}."
    elif mesh and 0 <= soft < need:  # the guard raises the soft one; the training is there before
        level, do = Level.WARNING, f"ulimit -n {need}"
    else:
        level, do = Level.OK, ""
    found = f"{limit}; {ranks:,} ranks may need {need:,}"
    return Finding(level=level, topic="limits", name="open files", found=found, do=do)


def _ulimits(facts: Facts) -> Iterator[Finding]:
    """Threads, and memory that InfiniBand registers: too little ends a process at its start."""
    need = THREADS_OF_A_RANK * facts.job.ranks_per_node
    if 0 <= facts.processes < need:
        yield Finding(
            level=Level.WARNING,
            topic="limits",
            name="processes",
            found=f"{facts.processes:,} for this user: {facts.job.ranks_per_node:,} ranks may have "
            f"{need:,} threads, and one that cannot start ends its process",
            do=f"ulimit -u {need}",
        )
    locked = facts.locked_memory_bytes
    if facts.software.gpus and facts.job.several_nodes and 0 <= locked < LOCKED_MEMORY_BYTES:
        yield Finding(
            level=Level.WARNING,
            topic="limits",
            name="locked memory",
            found=f"{locked // 1024:,} KiB: over InfiniBand NCCL ends with ibv_reg_mr failed",
            do="ulimit -l unlimited",
        )


def _limit(value: int) -> str:
    return "no limit" if value < 0 else f"{value:,}"


def _size(size_bytes: int) -> str:
    unit, name = (_GIB, "GiB") if size_bytes >= _GIB else (_MIB, "MiB")
    return f"{size_bytes / unit:.0f} {name}"


def run_directory(facts: Facts) -> Iterator[Finding]:
    """Whether events.jsonl can be written."""
    folder = facts.run_dir
    if folder.error:
        yield Finding(
            level=Level.PROBLEM,
            topic="guard",
            name="run directory",
            found=f"{folder.path}: {folder.error}",
            do="Pass another run_dir, or correct its permissions.",
        )
        return
    full = folder.free_bytes < _GIB
    yield Finding(
        level=Level.WARNING if full else Level.OK,
        topic="guard",
        name="run directory",
        found=_place(folder),
        do="Make room: events.jsonl, reports and W&B files go there." if full else "",
    )


def _place(folder: Folder) -> str:
    place = f"{folder.path}: {_size(folder.free_bytes)} free"
    if not folder.file_system:
        return place
    remote = _REMOTE.search(folder.file_system)
    note = ", over the network: a stall there delays records, not training" if remote else ""
    return f"{place} on {folder.file_system}{note}"


def clock(facts: Facts) -> Iterator[Finding]:
    """Whether times of different machines can be compared."""
    never_set = facts.time < _EARLIEST
    loose = facts.clock_synchronised is False
    found = "kept by the kernel's time service" if facts.clock_synchronised else "set"
    if never_set:
        found = "before 2024: it was never set, and TLS to collectors fails"
    elif loose:
        found = "not synchronised: times of records on different hosts cannot be compared"
    yield Finding(
        level=Level.PROBLEM if never_set else Level.WARNING if loose else Level.OK,
        topic="limits",
        name="clock",
        found=found,
        do="Start chronyd or systemd-timesyncd." if never_set or loose else "",
    )


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    versions,
    devices,
    kernels,
    nccl,
    races,
    network,
    options,
    run_directory,
    telemetry,
    ports,
    limits,
    clock,
)
