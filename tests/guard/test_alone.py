"""What a guard does in the loop of a single process: there is nobody to compare with."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Note, RunFinished
from sdcwatch.errors import ConfigurationError, CorruptionDetected, Desync
from sdcwatch.guard.skips import FORGET
from sdcwatch.testing import MemorySink

OPTIONS: dict[str, Any] = {"node": "n", "audit_every": 100, "telemetry": "off", "console": False}
pytestmark = pytest.mark.usefixtures("alone")


class Loop:
    """A small model, an optimizer, and a guard that keeps its records in memory."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model, self.memory = DistributedDataParallel(self.net), MemorySink()
        halves = [list(part.parameters()) for part in (self.net[0], self.net[2])]
        self.optimizers = [optim.SGD(half, lr=0.1) for half in halves]
        self.guard = sdcwatch.init(
            self.model, self.optimizers, run_dir=run_dir, sinks=[self.memory], **OPTIONS, **options
        )

    def backward(self, poison: float = 1.0) -> None:
        (self.model(torch.randn(5, 4)).square().mean() * poison).backward()

    def step(self, poison: float = 1.0) -> None:
        for one in self.optimizers:
            one.zero_grad()
        self.backward(poison)
        for one in self.optimizers:
            one.step()

    def told(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.memory.records if isinstance(record, kind)]


def test_a_stop_that_is_due_at_the_next_call_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path, max_consecutive_skips=3)
    loop.step()

    def go_on() -> None:
        for _ in range(9):
            loop.backward(float("nan"))
            loop.optimizers[0].step()  # and never the other: the next call settles the step
            loop.optimizers[0].zero_grad()

    with pytest.raises(CorruptionDetected):
        go_on()
    loop.guard.close()
    (finished,) = loop.told(RunFinished)
    assert finished.exit_code == 80


def test_what_ends_the_run_in_the_gate_of_a_framework_stands_in_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path)
    loop.step()

    def disagree(*_: object) -> None:
        raise Desync({0: "step 1"})

    monkeypatch.setattr("sdcwatch.guard.api.agree", disagree)
    with pytest.raises(Desync):
        loop.guard.may_save()
    loop.guard.close()
    (finished,) = loop.told(RunFinished)
    assert (finished.state.value, finished.exit_code) == ("failed", 82)


@pytest.mark.parametrize("which", ["ddp.join()", "Join without the guard", "the guard first"])
def test_uneven_inputs_without_the_guard_are_refused_at_the_first_call(
    tmp_path: Path, which: str
) -> None:
    loop = Loop(tmp_path)
    context = {
        "ddp.join()": lambda: loop.model.join(),
        "Join without the guard": lambda: Join([loop.model]),
        "the guard first": lambda: Join([loop.guard, loop.model]),
    }[which]()
    with context, pytest.raises(ConfigurationError, match=r"Join\(\[ddp_model, guard\]\)"):
        loop.step()
    loop.guard.close()


def test_uneven_inputs_with_the_guard_behind_the_model_go_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with Join([loop.model, loop.guard]):
        loop.step()
    loop.step()
    assert loop.guard.step == 2
    loop.guard.close()


def test_optimizers_that_a_loop_makes_anew_are_let_go(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    made: list[weakref.ref[Any]] = []
    for _ in range(9):
        fresh = optim.AdamW(loop.net.parameters(), lr=0.01)
        made.append(weakref.ref(fresh))
        loop.optimizers = [fresh]
        loop.step()
    del fresh
    gc.collect()
    assert sum(one() is not None for one in made) <= 4
    assert [note.code for note in loop.told(Note)].count("unknown_optimizer") <= 1
    loop.optimizers = []
    loop.guard.close()
    gc.collect()
    assert [one() for one in made] == [None] * 9


def test_weights_that_were_loaded_now_and_then_do_not_make_an_update_of_two(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    for _ in range(2):
        loop.backward()
        loop.net.load_state_dict({k: v * 0.5 for k, v in loop.net.state_dict().items()})
        loop.step()
    for _ in range(FORGET):
        loop.step()
    loop.backward(float("nan"))
    loaded = {name: torch.ones_like(held) for name, held in loop.net.state_dict().items()}
    loop.net.load_state_dict(loaded)
    loop.model(torch.randn(5, 4))
    held = loop.net.state_dict()
    assert all(torch.equal(held[name], loaded[name]) for name in loaded)
    loop.guard.close()
