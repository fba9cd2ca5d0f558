"""How many files and sockets a rank may open, and whether that is enough."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Sequence
from pathlib import Path

from sdcwatch.core.introduction import Introduction, file_problem
from sdcwatch.core.topology import Topology, partners
from sdcwatch.errors import ConfigurationError

_MANY_FILES = 2**20
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
