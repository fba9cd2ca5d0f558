"""Sockets of a rank over many audits.

    python benchmarks/sockets.py [--ranks 32] [--pairings 500]

As many processes as ranks, each with the guard's own gloo group. After the connections of init each
pairing of an audit is drawn and one byte goes to and from every rank. Open files are counted on
each rank as it goes; the exit code is 1 if they ever grow.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sdcwatch.core.introduction import files_needed
from sdcwatch.core.topology import RankInfo, Topology, draw_pairing, partners
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.files import open_files_left
from sdcwatch.testing import fork_server, free_port

A_NODE = 2
LOOKS = 5


def topology_of(world: int) -> Topology:
    """Nodes of two ranks."""
    return Topology(
        tuple(
            RankInfo(
                rank=r, node=f"n{r // A_NODE}", host="h", local_rank=r % A_NODE, pid=r,
                instance_id=f"i{r // A_NODE}",
            )
            for r in range(world)
        )
    )  # fmt: skip


def open_files() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def count(exchange: GlooExchange, topology: Topology, pairings: int) -> tuple[int, ...]:
    """Files of the rank that has most, by and by, and what init would have asked for.

    Every rank calls it: as many pairings of audits are drawn, and one byte goes around in each.
    """
    rank, world = exchange.rank, exchange.world_size
    others = partners(topology, [rank])[rank]
    exchange.connect(others)
    exchange.max_int64s((0,), "the first maximum")
    rows = [open_files()]
    for step in range(1, pairings + 1):
        pairing = draw_pairing(topology, step=step, seed=0)
        to, source = pairing.replayer[rank], pairing.producer[rank]
        one = torch.full((1,), rank % 256, dtype=torch.uint8)
        got = exchange.route({to: one}, [source], f"pairing {step}")
        assert int(got[source]) == source % 256
        if step % max(1, pairings // LOOKS) == 0:
            rows.append(open_files())
    rows = [row - rows[0] for row in rows]
    return exchange.max_int64s((*rows, files_needed(world, len(others))), "what was counted")


def play(rank: int, world: int, pairings: int, port: int) -> None:
    """One rank; the first prints, and all end with 1 if the sockets of one have grown."""
    torch.set_num_threads(1)
    open_files_left()  # raises the limit
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    before = open_files()
    exchange = GlooExchange(deadline_seconds=300.0)
    started = time.monotonic()
    *grown, needed = count(exchange, topology_of(world), pairings)
    took = time.monotonic() - started
    held = exchange.max_int64s((open_files() - before,), "what is held")[0]
    if rank == 0:
        print(
            f"{world} ranks, {pairings} pairings in {took:.1f} s: the guard of the rank with most"
        )
        print(f"holds {held} files, of {needed} that init asks for; by and by {grown} more")
    exchange.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(int(max(grown) > 0 or held > needed))


def main() -> int:
    """Play all ranks, and say whether every one ended well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--pairings", type=int, default=500)
    options = parser.parse_args()
    context, port = fork_server(), free_port()
    processes = [
        context.Process(target=play, args=(rank, options.ranks, options.pairings, port))
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = {process.exitcode for process in processes}
    print("constant" if codes == {0} else f"NOT CONSTANT, or a rank failed: {codes}")
    return int(codes != {0})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
