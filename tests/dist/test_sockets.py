"""A rank's connections: as many as audits need, made at the start, and no more ever after.

Here ranks are threads; ``python benchmarks/sockets.py`` counts on 32 processes, over 500 pairings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdcwatch.core.introduction import files_needed
from sdcwatch.core.topology import EVERYBODY, RankInfo, Topology, draw_pairing, partners
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.files import open_files_left
from sdcwatch.guard.group import lazy_group
from sdcwatch.testing import GlooPool, load_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

WORLD, AUDITS = 40, 60


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def on_every_rank(do: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            do(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_audits_open_no_connection_that_was_not_made_at_the_start() -> None:
    infos = [
        RankInfo(rank=r, node=f"n{r // 4}", host="h", local_rank=r % 4, pid=r, instance_id=f"i{r}")
        for r in range(WORLD)
    ]
    topology = Topology(tuple(infos))
    reach = partners(topology, range(WORLD))
    most = max(map(len, reach.values()))
    assert WORLD > EVERYBODY
    assert most < WORLD - 1
    assert open_files_left() > WORLD * files_needed(WORLD, most) / 2

    store = dist.HashStore()
    groups: list[Any] = [None] * WORLD
    before = open_files()

    def make(rank: int) -> None:
        groups[rank] = lazy_group(store, rank, WORLD, timedelta(seconds=120))

    def exchange(rank: int, to: tuple[int, ...], sources: tuple[int, ...]) -> None:
        works = [groups[rank].recv([torch.zeros(1)], r, 0) for r in sources]
        works += [groups[rank].send([torch.ones(1)], r, 0) for r in to]
        for work in works:
            work.wait()

    def maximum(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2)]).wait()

    on_every_rank(make)
    on_every_rank(lambda rank: exchange(rank, reach[rank], reach[rank]))
    on_every_rank(maximum)
    connected = open_files()
    assert (connected - before) / WORLD < files_needed(WORLD, most)
    for step in range(AUDITS):
        pairing = draw_pairing(topology, step=step, seed=0)
        to, source = pairing.replayer, pairing.producer
        on_every_rank(lambda rank: exchange(rank, (to[rank],), (source[rank],)))  # noqa: B023
    on_every_rank(maximum)
    assert open_files() <= connected


def counted(rank: int, group: Any, pairings: int) -> tuple[int, ...]:
    sockets = load_file(Path(__file__).parents[2] / "benchmarks" / "sockets.py", "sockets_command")
    exchange = GlooExchange(group, deadline_seconds=20.0)
    grown: tuple[int, ...] = sockets.count(exchange, sockets.topology_of(6), pairings)
    exchange.close()
    return grown


def test_each_process_keeps_the_sockets_of_its_start_as_the_command_counts_them(
    pool: GlooPool,
) -> None:
    for *grown, needed in pool.run(counted, 6, 30):
        assert (grown, needed) == ([0] * 6, files_needed(6, 5))
