"""Who is where: the identity of each rank, and how ranks fall into fault domains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

FaultDomain = Literal["node", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The identity of one rank.

    Attributes:
        rank: Rank in the replica group.
        node: Name of the node: host name unless configured or `SDCWATCH_NODE`.
        host: Host name of the machine.
        local_rank: Rank within the machine, as the launcher gives it.
        pid: Process id.
        instance_id: What a replacement request names: cloud instance id or host name.
        gpu_index: Index of the GPU on its host, None on CPU.
        gpu_uuid: UUID of the GPU; simulated ranks carry ``cpu-sim-<node>-<i>``.
    """

    rank: int
    node: str
    host: str
    local_rank: int
    pid: int
    instance_id: str
    gpu_index: int | None = None
    gpu_uuid: str | None = None

    @property
    def gpu(self) -> str:
        """The label that names this rank's device: its UUID, or node and index."""
        return self.gpu_uuid or f"{self.node}/{self.local_rank}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a replica group, in rank order, and the fault domain of each.

    Attributes:
        ranks: Identity of each rank; ``ranks[r].rank == r``.
        fault_domain: What counts as independent hardware: a node, or each GPU for itself.
    """

    ranks: tuple[RankInfo, ...]
    fault_domain: FaultDomain = "node"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def domains(self) -> tuple[str, ...]:
        """The fault domain of each rank, in rank order."""
        if self.fault_domain == "gpu":
            return tuple(f"{r.node}#{r.rank}" for r in self.ranks)
        return tuple(r.node for r in self.ranks)

    @property
    def domain_sizes(self) -> dict[str, int]:
        """Ranks per fault domain, in order of first appearance."""
        return dict(Counter(self.domains))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Distinct node names in order of first appearance."""
        return tuple(dict.fromkeys(r.node for r in self.ranks))
