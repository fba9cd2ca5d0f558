"""The guard's own gloo group: its ranks meet in the store first, and all of it has a deadline.

Nothing here is a collective; what is done with the group is in `sdcwatch.guard.exchange`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sdcwatch.config import gloo_interfaces
from sdcwatch.core.waiting import Finding, rank_gone
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.arrivals import Arrivals
from sdcwatch.guard.watchdog import Answering, LivenessCheck, bounded

LOG = logging.getLogger("sdcwatch")
_INIT = "sdcwatch.init"


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """A gloo group of the guard's own, over the ranks of another group.

    Attributes:
        rank: This rank within it.
        world_size: Number of ranks.
        job_ranks: What its ranks are called in the job, in order.
        store: A corner of the default store that its ranks share and nobody else uses.
        liveness: The liveness check.
        answering: Answers the liveness checks of other ranks until it is closed.
        gloo: The group.
    """

    rank: int
    world_size: int
    job_ranks: tuple[int, ...]
    store: Any
    liveness: LivenessCheck
    answering: Answering
    gloo: Any


def own_group(parent: Any, *, deadline_seconds: float, hard_seconds: float) -> OwnGroup:
    """Make one over the ranks of `parent`. Every rank of it calls it.

    Args:
        parent: A process group.
        deadline_seconds: After that long whoever has not come is named.
        hard_seconds: After that long an operation would destroy the group.

    Raises:
        ConfigurationError: This rank has no network interface for gloo.
        RankGone: A rank did not come within the deadline.
    """
    devices = gloo_devices()  # before the others hear of this rank
    ranks = dist.get_process_group_ranks(parent)
    rank, world_size, started = dist.get_rank(parent), len(ranks), time.monotonic()
    # A store on a host that was cut off never answers.
    clients, problem = bounded(lambda: _own_store(ranks), deadline_seconds)
    if problem:
        _raise(Finding(store_error=problem), started, "")
    store, another = clients
    meet_in_store(store, rank, world_size, deadline_seconds)
    liveness = LivenessCheck(store, rank, world_size)
    # From here on a rank that is long, with its files for instance, is not taken for dead.
    answering = Answering(liveness, another)
    started, hard = time.monotonic(), timedelta(seconds=hard_seconds)
    # Made directly rather than by new_group, which every rank of the job would have to call, and
    # whose counters must agree on all of them.
    try:
        gloo, problem = bounded(
            lambda: lazy_group(store, rank, world_size, hard, devices), deadline_seconds
        )
        if problem:  # it has talked to nobody but the store
            _raise(Finding(store_error=problem), started, "")
    except BaseException:
        answering.close()
        raise
    return OwnGroup(rank, world_size, tuple(ranks), store, liveness, answering, gloo)


def meet_in_store(store: Any, rank: int, world_size: int, deadline_seconds: float) -> None:
    """Wait for all ranks before a group is made, which would wait for its hard timeout.

    Raises:
        RankGone: A rank did not come within the deadline.
    """
    started = time.monotonic()
    finding, problem = Arrivals(store, rank, world_size).meet(deadline_seconds)
    if finding is not None:
        _raise(finding, started, "" if finding.silent else problem)


def _raise(finding: Finding, started: float, problem: str) -> None:
    gone = rank_gone(finding, _INIT, time.monotonic() - started, problem)
    LOG.critical(gone)  # uncaught it ends the process without a word, as SystemExit does
    raise gone


def _own_store(ranks: list[int]) -> tuple[Any, Any]:
    """A corner of the default store for one group: the same on every rank, and never reused.

    Two clients of it, for two threads.

    Ranks count their arrivals in the store; a group of W ranks is one generation of W arrivals.

    Args:
        ranks: All of it: groups that overlap may share first, last and number of ranks.
    """
    c10d = dist.distributed_c10d
    listed = hashlib.blake2b(repr(ranks).encode(), digest_size=12).hexdigest()
    corner = c10d.PrefixStore(f"sdcwatch/{listed}/", c10d._get_default_store())
    generation = (corner.add("arrivals", 1) - 1) // len(ranks)
    own: Any = c10d.PrefixStore(f"{generation}/", corner)
    return own, own.clone()


def gloo_devices() -> list[Any]:
    """What gloo talks over: the interfaces of GLOO_SOCKET_IFNAME, as in a group that torch makes.

    Raises:
        ConfigurationError: There is no such interface.
    """
    gloo, names = dist.ProcessGroupGloo, gloo_interfaces()
    try:
        return [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
            gloo.create_default_device(lazy_init=True)
        ]
    except RuntimeError as error:
        got = f"GLOO_SOCKET_IFNAME={','.join(names)}" if names else "no GLOO_SOCKET_IFNAME"
        msg = (
            f"Expected gloo, over which the guard talks, to find a network interface, but got "
            f"{got} and {str(error).splitlines()[0]}. Set GLOO_SOCKET_IFNAME to one that the other "
            "ranks reach; `sdcwatch doctor` tells what this host has."
        )
        raise ConfigurationError(msg) from None


def lazy_group(
    store: Any, rank: int, world_size: int, timeout: timedelta, devices: Sequence[Any] = ()
) -> Any:
    """A gloo group that connects two ranks when they first talk, and not everybody with everybody.

    A full mesh is W - 1 sockets on every rank, and 8 W² bytes in the store.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = list(devices) or gloo_devices()
    return gloo(store, rank, world_size, options)


def require_process_group() -> None:
    """Check that torch.distributed is initialised.

    Raises:
        ConfigurationError: It is not.
    """
    if not (dist.is_available() and dist.is_initialized()):
        msg = (
            "Expected an initialised process group, but got none. Call "
            "torch.distributed.init_process_group() before sdcwatch.init()."
        )
        raise ConfigurationError(msg)
