"""One of three processes that train together; what is different about one is in its environment."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import PreflightDone, Verdict
from sdcwatch.testing import MemorySink

torch.set_num_threads(int(os.environ["THREADS"]))
torch.set_flush_denormal(os.environ["FLUSH"] == "1")
dist.init_process_group("gloo")
rank = dist.get_rank()


class Parts(nn.Module):
    """Adds its parts up in the order of a set of strings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcdefgh"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), 8)
        for name in set(self.parts):
            total = total + self.parts[name](x)
        return total


net = Parts()
model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
memory = MemorySink()
options = {"audit_every": 2, "telemetry": "off", "console": False, "run_dir": sys.argv[1]}
with sdcwatch.init(model, optimizer, node=f"n{rank}", sinks=[memory], **options):
    for step in range(5):
        draw = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=draw)).square().mean().backward()
        optimizer.step()
verdicts = [r for r in memory.records if isinstance(r, Verdict)]
print(
    json.dumps(
        {
            "said": [(v.outcome, v.cause, list(v.ranks), v.reason) for v in verdicts],
            "named": [s.rank for v in verdicts for s in v.suspects],
            "left_out": [list(r.left_out) for r in memory.records if isinstance(r, PreflightDone)],
        }
    )
)
dist.destroy_process_group()
