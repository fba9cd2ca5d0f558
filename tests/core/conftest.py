"""Topologies of the core tests."""

import pytest

from sdcwatch.core.topology import RankInfo, Topology


def topology_of(layout: str, fault_domain: str = "node") -> Topology:
    """A topology from "3x2" (nodes x ranks) or "3+2+2" (ranks per node)."""
    if "x" in layout:
        nodes, per_node = map(int, layout.split("x"))
        sizes = [per_node] * nodes
    else:
        sizes = [int(size) for size in layout.split("+")]
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    ranks = tuple(
        RankInfo(
            rank=rank,
            node=f"node-{node}",
            host="one-machine",
            local_rank=local,
            pid=1000 + rank,
            instance_id=f"i-{node}",
            gpu_uuid=f"cpu-sim-node-{node}-{local}",
        )
        for rank, (node, local) in enumerate(places)
    )
    return Topology(ranks, fault_domain)


@pytest.fixture(scope="session")
def topology():
    return topology_of
