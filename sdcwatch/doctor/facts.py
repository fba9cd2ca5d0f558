"""What `sdcwatch doctor` knows of a machine and its environment: one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, as text.

    Attributes:
        python: Of the interpreter.
        packages: Distributions of interest to their versions; absent ones are not in it.
        torch: None if it cannot be imported.
        torch_error: Why it cannot be imported, or "".
        gloo: Whether this build of torch has gloo.
        cuda: Of the toolkit that torch was built with; None for a build without CUDA.
        cudnn: None without.
        nccl: None without.
        driver: Version of the NVIDIA driver; None if there is none.
        gpus: Names of the devices that torch sees, in order.
    """

    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    torch_error: str = ""
    gloo: bool = True
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    driver: str | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training that is planned.

    Attributes:
        ranks: Number of ranks; None if nobody said.
        ranks_per_node: Ranks on this machine.
    """

    ranks: int | None = None
    ranks_per_node: int = 1

    @property
    def several_nodes(self) -> bool:
        """Whether it spans machines, as far as anybody said."""
        return self.ranks is not None and self.ranks > self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the ``SDCWATCH_*`` variables make of the guard.

    Attributes:
        error: Why they cannot be read, or "".
        unknown: Names that set nothing, each with what to do about it.
        audit_every: Steps between audits; None if check 2 is off.
        fingerprint_every: Steps between weight checks; None if check 3 is off.
        observe: Whether the guard only reports.
        telemetry: Whether records go anywhere besides events.jsonl.
        patience_seconds: How long a hang may last until the guard has named who is absent.
    """

    error: str = ""
    unknown: Mapping[str, str] = field(default_factory=dict)
    audit_every: int | None = 100
    fingerprint_every: int | None = 10
    observe: bool = False
    telemetry: bool = True
    patience_seconds: float = 360.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A place that is written to.

    Attributes:
        path: Where it is or would be made.
        error: Why nothing can be written there, or "".
        free_bytes: Space left.
        total_bytes: Size of its file system.
        file_system: Its type, such as "ext4" or "nfs4"; "" if unknown.
    """

    path: str
    error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    file_system: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How other machines would reach this one.

    Attributes:
        host: The host name.
        addresses: What it resolves to, IPv4 and IPv6.
        error: Why it does not resolve, or "".
        interfaces: Names of the network interfaces.
    """

    host: str = ""
    addresses: tuple[str, ...] = ()
    error: str = ""
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `sdcwatch.doctor.checks` judges.

    Attributes:
        numerics: What decides which kernels run, as `sdcwatch.checks.determinism` tells it, in a
            fresh process; a script may still change it.
        variables: Relevant variables of the environment that are set.
        kernel_variables: Those of them that choose kernels.
        cores: Cores that this process may use.
        open_files: Soft and hard limit on open files; -1 is none.
        processes: Processes and threads that this user may have; -1 is no limit.
        locked_memory_bytes: Memory that a process may lock; -1 is no limit.
        ports: Ports of /metrics to why each cannot be bound, "" for a free one.
        shared_memory: /dev/shm; None where there is none.
        time: Seconds since the epoch.
        clock_synchronised: None if the kernel does not tell.
    """

    software: Software
    job: Job = field(default_factory=Job)
    options: Options = field(default_factory=Options)
    numerics: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    kernel_variables: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    open_files: tuple[int, int] = (-1, -1)
    processes: int = -1
    locked_memory_bytes: int = -1
    ports: Mapping[int, str] = field(default_factory=dict)
    shared_memory: Folder | None = None
    run_dir: Folder
    network: Network = field(default_factory=Network)
    time: float
    clock_synchronised: bool | None = None
