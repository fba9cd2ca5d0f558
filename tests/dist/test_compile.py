"""torch.compile with inductor in its five places: the replay runs the code that training runs.

A tiny module for each place, once in a plain loop and once in a guarded one; what inductor makes is
kept in memory between the two, so each place is compiled once.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import PreflightDone, Progress, Verdict
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET, digest

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(150),  # every process imports the compiler, which takes 20 s each
    pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler"),
]

STEPS = 6
AUDITS = 4  # two steps of preflight, then steps 4 and 6
PLACES = {
    "before DDP": "the module as compiled before DDP",
    "around DDP": "the module as compiled with DDP around it",
    "ddp.compile()": "the module as compiled with DDP around it",
    "model.compile()": "the module as compiled by module.compile()",
    "a part": "parts that are compiled, compiled",
}


class Small(nn.Module):
    """A fused part between two products, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)) * 1.1)


def compiled(place: str, group: Any) -> tuple[nn.Module, nn.Module]:
    """What the loop calls, and the bare module."""
    net = Small()
    if place == "a part":
        net.middle = torch.compile(net.middle, dynamic=False)
    if place == "model.compile()":
        net.compile(dynamic=False, fullgraph=True)
    inner = torch.compile(net, dynamic=False) if place == "before DDP" else net
    model: nn.Module = DistributedDataParallel(inner, process_group=group)
    if place == "ddp.compile()":
        model.compile(dynamic=False)
    return (torch.compile(model, dynamic=False) if place == "around DDP" else model), net


def trained(rank: int, group: Any, place: str, run_dir: str | None) -> dict[str, Any]:
    torch._dynamo.reset()
    model, net = compiled(place, group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    memory, guard = MemorySink(), None
    if run_dir is not None:
        guard = sdcwatch.init(
            model,
            optimizer,
            audit_every=2,
            fingerprint_every=2,
            run_dir=run_dir,
            sinks=[memory],
            **QUIET,
        )
    torch.manual_seed(100 + rank)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=draw)).square().mean().backward()
        optimizer.step()
    if guard is not None:
        guard.close()
    return {
        "weights": digest(p.detach() for p in net.parameters()),
        "verdicts": [v.reason for v in memory.records if isinstance(v, Verdict)],
        "preflight": [
            (p.coverage.value, p.reason) for p in memory.records if isinstance(p, PreflightDone)
        ],
        "notes": [n for p in memory.records if isinstance(p, PreflightDone) for n in p.notes],
        "comparisons": sum(p.comparisons for p in memory.records if isinstance(p, Progress)),
    }


def both(rank: int, group: Any, place: str, run_dir: str) -> tuple[dict[str, Any], ...]:
    return trained(rank, group, place, None), trained(rank, group, place, run_dir)


@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_module_is_covered_in_full_wherever_it_was_compiled(
    pool: GlooPool, tmp_path: Path, place: str
) -> None:
    for plain, guarded in pool.run(both, 2, place, str(tmp_path)):
        assert [coverage for coverage, _ in guarded["preflight"]] == ["full"], guarded["preflight"]
        assert f"a replay runs {PLACES[place]}" in guarded["notes"]
        assert guarded["verdicts"] == []
        assert guarded["comparisons"] == AUDITS * 2
        assert guarded["weights"] == plain["weights"]
