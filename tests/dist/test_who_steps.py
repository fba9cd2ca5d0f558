"""What is said to be skipped is skipped, whoever steps; after `m06_skip_not_carried_out`, `m12_sam`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Note, UpdateSkipped
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET
pytestmark = pytest.mark.dist

BAD, STEPS = 6, 8


class Lookahead(torch.optim.Optimizer):
    """Every second step the weights go half way back, with or without gradients: by inheritance."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = {p: p.detach().clone() for g in inner.param_groups for p in g["params"]}

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for p, slow in self.slow.items():
                    p.lerp_(slow, 0.5)


class Loop:
    def __init__(self, rank: int, group: Any, run_dir: str) -> None:
        torch.manual_seed(0)
        self.rank, self.memory = rank, MemorySink()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.run_dir = run_dir
        self.options = {"node": f"n{rank}", "audit_every": 4, "sinks": [self.memory], **QUIET}

    def guard(self, optimizer: Any) -> Any:
        return sdcwatch.init(self.model, optimizer, run_dir=self.run_dir, **self.options)

    def sgd(self, parameters: Any = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters or self.net.parameters(), lr=0.1, momentum=0.9)

    def backward(self, step: int) -> None:
        torch.manual_seed(100 * self.rank + step)
        x = torch.randn(3, 4) * (float("nan") if (self.rank, step) == (1, BAD) else 1.0)
        self.net.zero_grad()
        self.model(x).square().mean().backward()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if isinstance(r, kind)]


def made_anew(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step in (1, 4):
        held["one"] = loop.sgd()
        if step == 1:
            held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


def on_the_rest(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"], held["two"] = loop.sgd(loop.net[0].parameters()), loop.sgd(loop.net[2].parameters())
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()
    held["two"].step()


def asked_before_the_step(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = loop.sgd()
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["guard"].save_checkpoint(lambda: None)
    held["one"].step()


def looking_ahead(loop: Loop, step: int, held: dict[str, Any]) -> None:
    if step == 1:
        held["one"] = Lookahead(loop.sgd())
        held["guard"] = loop.guard(held["one"])
    loop.backward(step)
    held["one"].step()


LOOPS: dict[str, Callable[[Loop, int, dict[str, Any]], None]] = {
    f.__name__: f for f in (made_anew, on_the_rest, asked_before_the_step, looking_ahead)
}


def run(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    loop, held = Loop(rank, group, run_dir), {}
    for step in range(1, STEPS + 1):
        before = loop.weights()
        LOOPS[name](loop, step, held)
        same = all(map(torch.equal, before, loop.weights()))
        assert same == (step == BAD), (name, step)
    held["guard"].close()
    return {
        "skips": [s.step for s in loop.told(UpdateSkipped)],
        "notes": [n.code for n in loop.told(Note)],
        "finite": all(bool(p.isfinite().all()) for p in loop.net.parameters()),
    }


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_m06_a_skip_is_carried_out_whoever_steps(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    row = pool.run(run, 3, str(tmp_path), name)[0]
    assert row["finite"]
    assert row["skips"] == [BAD]
    found = "optimizer_found" in row["notes"]
    assert found == (name in ("made_anew", "on_the_rest", "looking_ahead"))


def by_hand(rank: int, group: Any, run_dir: str) -> list[str]:
    loop = Loop(rank, group, run_dir)
    one = loop.sgd()
    guard = loop.guard(one)
    for step in range(1, STEPS + 1):
        loop.backward(step)
        one.step()
        with torch.no_grad():
            for p in loop.net.parameters():
                p.mul_(0.99)
    guard.close()
    return [n.code for n in loop.told(Note)]


def test_weights_that_moved_unseen_after_a_skip_are_said_once(
    pool: GlooPool, tmp_path: Path
) -> None:
    assert pool.run(by_hand, 3, str(tmp_path))[0].count("moved_unseen") == 1


def in_the_backward(rank: int, group: Any, run_dir: str) -> str:
    loop = Loop(rank, group, run_dir)
    last = loop.sgd([loop.net[2].bias])
    loop.net[2].bias.register_post_accumulate_grad_hook(lambda p: last.step())
    guard = loop.guard(loop.sgd())
    try:
        loop.backward(1)
    except sdcwatch.ConfigurationError as error:
        return str(error)
    finally:
        guard.close()
    return ""


def test_a_step_from_inside_the_backward_is_refused_by_name(
    pool: GlooPool, tmp_path: Path
) -> None:
    said = pool.run(in_the_backward, 3, str(tmp_path))[0]
    assert said.startswith("Expected updates after the backward, but got a step of SGD")
    assert "2.bias" in said
