"""Files: how many a rank may open, whether that is enough, and the directory of the run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sdcwatch.config import GuardConfig, LauncherEnvironment
from sdcwatch.core.introduction import Introduction, file_problem
from sdcwatch.core.topology import Topology, partners
from sdcwatch.errors import ConfigurationError
from sdcwatch.sinks import patience
from sdcwatch.sinks.patience import Errand
from sdcwatch.sinks.wandb import active_run_id

_MANY_FILES = 2**20
_T = TypeVar("_T")
_USED_FILES = 256  # where the process cannot be asked


def most_partners(topology: Topology) -> int:
    """With how many others a rank may exchange micro-batches."""
    some = range(min(topology.world_size, 64))  # in one layout they differ by few
    return max(map(len, partners(topology, some).values()))


def open_files_left() -> int:
    """How many more files this process may open, after raising its limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a limit may be forbidden to be raised
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return _MANY_FILES
    descriptors = Path("/proc/self/fd")
    return soft - (len(list(descriptors.iterdir())) if descriptors.is_dir() else _USED_FILES)


def require_files(ranks: Sequence[Introduction], needed: int) -> None:
    """Check that every rank may open enough sockets.

    Raises:
        ConfigurationError: Some may not; names them and the number.
    """
    if problem := file_problem(ranks, needed):
        msg = (
            f"Expected every rank to be allowed {needed} more open files, but got {problem}. Raise "
            "the hard limit (ulimit -Hn, LimitNOFILE= or --ulimit nofile=) there."
        )
        raise ConfigurationError(msg)


def answered(path: Path, do: Callable[[], _T]) -> _T:
    """What is read or written under the run's directory, unless nothing answers there.

    Args:
        path: The directory, for the error.
        do: Reads or writes; what it raises is raised here.

    Raises:
        ConfigurationError: The file system does not answer.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:
            errors.append(error)

    if not Errand().run(run, patience.READ_SECONDS):
        msg = (
            f"Expected the file system of `run_dir` to answer, but got nothing from {path} for "
            f"{patience.READ_SECONDS:g} s. Look at its mount, or pass another run_dir."
        )
        raise ConfigurationError(msg)
    for error in errors:
        raise error
    return results[0]


def run_dir_of(config: GuardConfig, run: str, apart: str = "") -> Path:
    """Where the event log of a run goes: one folder, whatever characters its name has.

    Args:
        config: May name it.
        run: Name of the run.
        apart: What stands behind either name, where a job has several guards.
    """
    run += apart
    if config.run_dir is not None:
        return Path(f"{Path(config.run_dir)}{apart}")
    return Path("sdcwatch-runs") / re.sub(r"[/\0]|^\.+$", "-", run)


def make_run_dir(path: Path) -> None:
    """Make the run's directory, and find it writable.

    Raises:
        ConfigurationError: It is not.
    """
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
        raise ConfigurationError(msg) from None


def run_name(config: GuardConfig, environment: LauncherEnvironment) -> str:
    """Name of the run: configured, else the launcher's, else the W&B run's, else the start time."""
    known = config.run or environment.run or active_run_id()
    return known or time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())
