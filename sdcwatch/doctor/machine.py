"""Reads the facts of this machine. Everything that is looked at from outside is looked at here."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sdcwatch import __version__
from sdcwatch.config import (
    GuardConfig,
    kernel_variables,
    relevant_variables,
    unknown_options,
)
from sdcwatch.doctor.facts import Facts, Folder, Job, Network, Options, Software
from sdcwatch.errors import ConfigurationError

_PACKAGES = ("numpy", "opentelemetry-sdk", "prometheus-client", "wandb")
_SHARED_MEMORY = Path("/dev/shm")
_TIME_ERROR = 5
"""What adjtimex(2) returns while the clock is not synchronised."""


def read_facts(
    *, ranks: int | None, ranks_per_node: int | None, run_dir: Path | None, port: int, host: str
) -> Facts:
    """Look at this machine.

    Args:
        ranks: Ranks of the planned training; None takes WORLD_SIZE or SLURM_NTASKS, if set.
        ranks_per_node: Ranks on this machine; None takes LOCAL_WORLD_SIZE, else one per GPU.
        run_dir: Where events.jsonl would go; None takes SDCWATCH_RUN_DIR, else the default.
        port: Port of /metrics of local rank 0.
        host: Address that /metrics would bind to.
    """
    variables = relevant_variables()
    software, numerics = _read_software()
    told = ranks or _number(variables, "WORLD_SIZE") or _number(variables, "SLURM_NTASKS")
    local = ranks_per_node or _number(variables, "LOCAL_WORLD_SIZE") or len(software.gpus) or 1
    where = run_dir or Path(variables.get("SDCWATCH_RUN_DIR", "sdcwatch-runs"))
    return Facts(
        software=software,
        numerics=numerics,
        job=Job(ranks=told, ranks_per_node=min(local, told or local)),
        options=_read_options(variables),
        variables=variables,
        kernel_variables=kernel_variables(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        processes=_limit("RLIMIT_NPROC"),
        locked_memory_bytes=_limit("RLIMIT_MEMLOCK"),
        ports={port: _why_taken(host, port)} if port else {},
        shared_memory=_read_folder(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None,
        run_dir=_read_folder(where),
        network=_read_network(),
        time=time.time(),
        clock_synchronised=_clock_synchronised(),
    )


def _limit(name: str) -> int:
    """The soft limit of a name that not every system has; -1 where nothing is limited."""
    number = getattr(resource, name, None)
    return -1 if number is None else resource.getrlimit(number)[0]


def _number(variables: dict[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _read_software() -> tuple[Software, dict[str, str]]:
    """Versions, and what decides which kernels run."""
    packages = {"sdcwatch": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    python = platform.python_version()
    try:
        import torch
        from torch import distributed

        from sdcwatch.checks.determinism import driver_version, environment_facts
    except (ImportError, OSError) as error:
        return Software(python=python, packages=packages, torch_error=str(error)), {}
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    device = torch.device("cuda" if gpus else "cpu")
    nccl = torch.cuda.nccl.version() if gpus else None  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version() if gpus else None  # type: ignore[no-untyped-call]
    driver = driver_version()
    software = Software(
        python=python,
        packages=packages,
        torch=torch.__version__,
        gloo=distributed.is_available() and distributed.is_gloo_available(),
        cuda=torch.version.cuda,
        cudnn=str(cudnn) if cudnn else None,
        nccl=".".join(map(str, nccl)) if nccl else None,
        driver=None if driver == "unknown" else driver,
        gpus=gpus,
    )
    return software, environment_facts(device)


def _read_options(variables: dict[str, str]) -> Options:
    unknown = unknown_options(variables)
    try:
        config = GuardConfig.from_env()
    except ConfigurationError as error:
        return Options(error=str(error), unknown=unknown)
    return Options(
        unknown=unknown,
        audit_every=config.audit_every,
        fingerprint_every=config.fingerprint_every,
        observe=config.mode == "observe",
        telemetry=config.telemetry != "off",
        patience_seconds=config.hang_seconds + config.deadline_seconds,
    )


def _why_taken(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the endpoint binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
    return ""


def _read_folder(path: Path) -> Folder:
    """Whether something can be written at `path`, which need not exist; it is left as it was."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    error = ""
    try:
        if not existing.is_dir():
            error = f"{existing} is not a directory"
        else:
            with tempfile.TemporaryFile(dir=existing):
                pass
    except OSError as problem:
        error = problem.strerror or str(problem)
    usage = shutil.disk_usage(existing)
    return Folder(
        path=str(path),
        error=error,
        free_bytes=usage.free,
        total_bytes=usage.total,
        file_system=_file_system(existing),
    )


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on, from the longest mount point above it."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    rows = [line.split()[1:3] for line in mounts]
    above = [(len(point), kind) for point, kind in rows if path.resolve().is_relative_to(point)]
    return max(above, default=(0, ""))[1]


def _read_network() -> Network:
    host = socket.gethostname()
    interfaces = tuple(name for _, name in socket.if_nameindex())
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return Network(host=host, error=error.strerror or str(error), interfaces=interfaces)
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return Network(host=host, addresses=addresses, interfaces=interfaces)


def _clock_synchronised() -> bool | None:
    """What the kernel says of its clock; None where there is no adjtimex(2)."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # modes 0: nothing is changed
    return None if state < 0 else state != _TIME_ERROR
