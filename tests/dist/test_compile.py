"""torch.compile with inductor in its five places: the replay runs the code that training runs.

A tiny module for each place, once in a plain loop and once in a guarded one; what inductor makes is
kept in memory between the two, so each place is compiled once.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Action, Coverage, Outcome, PreflightDone, Progress, Verdict
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
def test_r_ddpcompile_a_module_is_covered_in_full_wherever_it_was_compiled(
    pool: GlooPool, tmp_path: Path, place: str
) -> None:
    for plain, guarded in pool.run(both, 2, place, str(tmp_path)):
        assert [coverage for coverage, _ in guarded["preflight"]] == ["full"], guarded["preflight"]
        assert f"a replay runs {PLACES[place]}" in guarded["notes"]
        assert guarded["verdicts"] == []
        assert guarded["comparisons"] == AUDITS * 2
        assert guarded["weights"] == plain["weights"]


# --- what else is promised of compiled code, without inductor, which takes long ---

DRAWS = torch.Generator()
"""A generator of the script's own."""
installed = types.ModuleType("a_package")
installed.__file__ = "/lib/site-packages/a_package.py"
sys.modules["a_package"] = installed
exec(  # code that counts as installed: a replay does not look through its objects
    "import torch\n"
    "class Holder:\n"
    "    def __init__(self): self.generator = torch.Generator()\n"
    "    def draw(self, x): return torch.randn(x.shape, generator=self.generator)\n"
    "HELD = Holder()\n",
    installed.__dict__,
)


class Noisy(nn.Module):
    """Adds noise of another generator than the default one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kind = nn.Linear(8, 16), nn.Linear(16, 4), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.kind == "of the script":
            return self.last(h + 0.1 * torch.randn(h.shape, generator=DRAWS))
        return self.last(h + 0.1 * installed.HELD.draw(h))


def shortly(rank: int, group: Any, kind: str, place: str, run_dir: str | None) -> dict[str, Any]:
    """A few steps of a module that is compiled without a backend."""
    torch._dynamo.reset()
    for generator in (DRAWS, installed.HELD.generator):
        generator.manual_seed(rank)
    net = Noisy(kind) if kind in ("of the script", "of a package") else Small()
    inner = torch.compile(net, backend="eager") if place == "before DDP" else net
    ddp = DistributedDataParallel(inner, process_group=group)
    model = torch.compile(ddp, backend="eager") if place == "around DDP" else ddp
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    memory, guard = MemorySink(), None
    if run_dir is not None:
        guard = sdcwatch.init(
            model, optimizer, audit_every=2, fingerprint_every=2, run_dir=run_dir, sinks=[memory],
            node=f"n{rank}", **QUIET,
        )  # fmt: skip
    torch.manual_seed(100 + rank)
    draw = torch.Generator().manual_seed(rank)
    uneven = Join([ddp] if guard is None else [ddp, guard])
    with uneven if kind == "uneven" else contextlib.nullcontext():
        for step in range(1, STEPS + 1 - (rank if kind == "uneven" else 0)):
            optimizer.zero_grad()
            x = torch.randn(6, 8, generator=draw)
            if kind == "NaN" and step == 1 and rank == 1:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
    if guard is not None:
        guard.close()
    return {
        "weights": digest(p.detach() for p in net.parameters()),
        "verdicts": [v for v in memory.records if isinstance(v, Verdict)],
        "preflight": [p for p in memory.records if isinstance(p, PreflightDone)],
        "comparisons": sum(p.comparisons for p in memory.records if isinstance(p, Progress)),
    }


def shortly_both(rank: int, group: Any, *arguments: Any) -> tuple[dict[str, Any], ...]:
    return shortly(rank, group, *arguments[:2], None), shortly(rank, group, *arguments)


EITHER = pytest.mark.parametrize("place", ["before DDP", "around DDP"])


@EITHER
def test_a_generator_that_the_script_names_is_put_back_and_turns_audits_off(
    pool: GlooPool, tmp_path: Path, place: str
) -> None:
    for plain, guarded in pool.run(shortly_both, 2, "of the script", place, str(tmp_path)):
        assert guarded["weights"] == plain["weights"]
        (done,) = guarded["preflight"]
        assert done.coverage is Coverage.OFF
        assert "(the global `DRAWS`)" in done.reason


def test_a_generator_inside_an_installed_package_turns_audits_off(
    pool: GlooPool, tmp_path: Path
) -> None:
    for _, guarded in pool.run(shortly_both, 2, "of a package", "before DDP", str(tmp_path)):
        (done,) = guarded["preflight"]
        assert done.coverage is Coverage.OFF
        assert "seed every generator that the forward uses" in done.reason
        assert guarded["verdicts"] == []


@EITHER
def test_uneven_inputs_under_join_are_audited_until_the_first_rank_has_run_out(
    pool: GlooPool, tmp_path: Path, place: str
) -> None:
    for plain, guarded in pool.run(shortly_both, 2, "uneven", place, str(tmp_path)):
        assert guarded["weights"] == plain["weights"]
        assert [p.coverage for p in guarded["preflight"]] == [Coverage.FULL]
        assert guarded["verdicts"] == []
        assert guarded["comparisons"] == (AUDITS - 1) * 2  # not on the last step


@EITHER
def test_a_nan_before_preflight_has_looked_names_nobody_and_says_why(
    pool: GlooPool, tmp_path: Path, place: str
) -> None:
    for row in pool.run(shortly, 2, "NaN", place, str(tmp_path)):
        (found,) = row["verdicts"]
        assert (found.step, found.outcome, found.suspects) == (1, Outcome.UNATTRIBUTED, ())
        assert found.action is Action.SKIP
        assert "preflight has not looked yet" in found.reason
        assert [p.coverage for p in row["preflight"]] == [Coverage.FULL]
