"""One rank of small guarded runs, in a process that differs in what only a process can.

`test_other_processes.py` forks ranks from an interpreter that has torch, with the globals `RANK`,
`PORT` and `RUN_DIR`; the rank with another hash seed needs an interpreter of its own, which gets
them as arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import PreflightDone, Verdict
from sdcwatch.testing import MemorySink

WORLD = 3


class Parts(nn.Module):
    """Adds its parts up in the order of a set of strings."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcdefgh"})

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 8)
        for name in set(self.parts):
            total = total + self.parts[name](x)
        return total


@dataclass(frozen=True)
class Case:
    """One fact in which one process differs.

    Attributes:
        fact: What the guard calls it.
        odd: The rank that differs. Facts that separate other ranks explain nothing.
        net: Makes the module.
        differ: Called on that rank alone.
    """

    fact: str
    odd: int
    net: Callable[[], nn.Module]
    differ: Callable[[], object]


def linear() -> nn.Module:
    return nn.Linear(8, 8)


CASES = (
    Case("string_hash", 1, Parts, lambda: None),
    Case("flush_denormal", 2, linear, lambda: torch.set_flush_denormal(True)),
    Case("threads", 0, linear, lambda: torch.set_num_threads(2)),
)
"""The interpreter of rank 1 has another hash seed."""


def trained(rank: int, case: Case, run_dir: Path) -> dict[str, Any]:
    """Five steps, and what the guard said."""
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    if rank == case.odd:
        case.differ()
    torch.manual_seed(0)
    net = case.net()
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
    memory = MemorySink()
    with sdcwatch.init(
        model,
        optimizer,
        audit_every=2,
        node=f"n{rank}",
        run_dir=run_dir / case.fact,
        telemetry="off",
        console=False,
        sinks=[memory],
    ):
        for step in range(5):
            draw = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=draw)).square().mean().backward()
            optimizer.step()
    verdicts = [r for r in memory.records if isinstance(r, Verdict)]
    return {
        "said": [(v.outcome, v.cause, v.ranks, v.reason) for v in verdicts],
        "named": [s.rank for v in verdicts for s in v.suspects],
        "left_out": [r.left_out for r in memory.records if isinstance(r, PreflightDone)],
    }


def main(rank: int, port: int, run_dir: Path) -> None:
    """Every case, and what the guard said of each, into a file."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    told = {case.fact: trained(rank, case, run_dir) for case in CASES}
    (run_dir / f"told-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "rank":
    given = globals()
    main(given["RANK"], given["PORT"], Path(given["RUN_DIR"]))
elif __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
