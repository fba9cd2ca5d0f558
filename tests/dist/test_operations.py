"""What a rank's program computes differently is software, with the operation, and names no device.

All of it passes preflight, repeats on its own rank, and differs from every other rank: only a trace
of operations tells it from a broken device.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdcwatch.core.outcomes import alarm_word, is_alarm
from sdcwatch.core.records import Cause, Coverage, Outcome, PreflightDone, RunWord
from sdcwatch.faults import Fault, FaultPlan
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from training import WIDTH, Job, mse, of, same_on_every_rank, train, verdicts

pytestmark = pytest.mark.dist

WORLD, ODD, FROM, AUDIT = 6, 3, 5, 6
NAMES = "abcd"
SCALE = 1.0


class Sum(nn.Module):
    """Adds up several layers; `around` may do anything to the sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tasks = nn.ModuleDict({name: nn.Linear(WIDTH, 8) for name in NAMES})
        self.head = nn.Linear(8, 4)
        self.__dict__["order"] = lambda: NAMES
        self.__dict__["around"] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = sum(self.tasks[name](x) for name in self.order())
        return self.head(self.around(total).relu())


def late(rank: int, step: list[int]) -> bool:
    """It is the odd rank, and preflight is over."""
    return rank == ODD and step[0] >= FROM


def closure(net: Sum, rank: int, step: list[int]) -> None:
    held = {"scale": torch.ones(8)}

    def around(x: torch.Tensor) -> torch.Tensor:
        held["scale"].fill_(1.5 if late(rank, step) else 1.0)
        return x * held["scale"]

    net.__dict__["around"] = around


def a_global(net: Sum, rank: int, step: list[int]) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        globals()["SCALE"] = 2.0 if late(rank, step) else 1.0
        return x * SCALE

    net.__dict__["around"] = around


def hash_order(net: Sum, rank: int, step: list[int]) -> None:
    # what sum(... for name in {"a", "b", ...}) comes to under another PYTHONHASHSEED
    net.__dict__["order"] = lambda: "dcba" if late(rank, step) else NAMES


def a_branch(net: Sum, rank: int, step: list[int]) -> None:
    net.__dict__["around"] = lambda x: x.sin() if late(rank, step) else x


def a_damaging_hook(net: Sum, rank: int, step: list[int]) -> None:
    def hook(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        return out * 1.001 if late(rank, step) else out

    net.head.register_forward_hook(hook)


KINDS = {f.__name__: f for f in (closure, a_global, hash_order, a_branch, a_damaging_hook)}
OPERATIONS = {
    "closure": {"aten::mul", "aten::fill_"},
    "a_global": {"aten::mul"},
    "hash_order": {"aten::t in tasks.d", "aten::addmm in tasks.d"},
    "a_branch": {"aten::sin"},
    "a_damaging_hook": {"aten::mul", "aten::mul in head"},
}


def build(kind: str, rank: int, step: list[int]) -> nn.Module:
    net = Sum()
    KINDS[kind](net, rank, step)
    return net


def count_steps(step: list[int], model: nn.Module, batch: Any) -> torch.Tensor:
    step[0] += 1
    return mse(model, batch)


def differing(rank: int, group: Any, run_dir: str, kind: str, options: dict[str, Any]) -> Any:
    step = [0]
    job = Job(
        build=functools.partial(build, kind, rank, step),
        loss_fn=functools.partial(count_steps, step),
        guard={"audit_every": AUDIT, "fingerprint_every": 1, "run_dir": run_dir, **options},
        steps=AUDIT,
    )
    return train(rank, group, job)


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_computes_differently_is_software_with_its_operation(
    pool: GlooPool, tmp_path: Path, kind: str
) -> None:
    results = pool.run(differing, WORLD, str(tmp_path), kind, {})
    same_on_every_rank(results)
    (found,) = [v for v in verdicts(results[0]) if is_alarm(v)]
    assert (found.step, found.outcome, found.cause) == (
        AUDIT,
        Outcome.UNATTRIBUTED,
        Cause.SOFTWARE,
    )
    assert found.suspects == ()
    assert found.operator in OPERATIONS[kind]
    assert f"the software of rank {ODD} computes something else" in found.reason
    assert not found.failed, "an update that DDP would have made is lost"
    assert alarm_word(found) is RunWord.WARNING


class Counts(nn.Module):
    """Adds a number of the system's, which no replay puts back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + 0.001 * secrets.randbelow(10**6))


def counting(rank: int, group: Any, run_dir: str) -> Any:
    options = {"audit_every": AUDIT, "run_dir": run_dir}
    return train(rank, group, Job(build=Counts, guard=options, steps=4))


def test_preflight_names_the_operation_that_does_not_repeat_and_says_what_to_write(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(counting, 3, str(tmp_path))
    (done,) = of(results[0], PreflightDone)
    assert done.coverage is Coverage.OFF
    said = "): each repeat gets there in another way or with other inputs. Let the forward"
    for text in (done.reason, " ".join(done.notes)):
        assert "aten::add (`" in text, "the user's own line"
        assert f"{__file__}:" in text
        assert said in text
    assert verdicts(results[0]) == []


# --- faults whose wrong bits are new each time, or that hit what shares memory ---


class Views(nn.Module):
    """Modules whose result is their input's memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.flat, self.act = nn.Linear(WIDTH, 8), nn.Flatten(), nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.flat(self.first(x))))


def faulty(
    rank: int, group: Any, run_dir: str, build: Callable[[], nn.Module], fault: Fault
) -> Any:
    options = {"audit_every": AUDIT, "fingerprint_every": 1, "run_dir": run_dir}
    job = Job(build=build, plan=FaultPlan(faults=(fault,)), guard=options, steps=AUDIT)
    return train(rank, group, job)


def at(target: str, **more: Any) -> Fault:
    return Fault(
        site="activation",
        target=target,
        ranks=(ODD,),
        steps=(FROM, 99),
        persistence="sticky",
        **more,
    )


FAULTS: Iterable[tuple[str, Fault, str]] = (
    ("another bit each time", at("first", kind="bit_flip", bit=22), "aten::addmm in first"),
    ("a view", at("flat", kind="scale", factor=1.01, element=2), "in first"),
    ("in place", at("act", kind="scale", factor=1.01, element="all"), "aten::relu_ in act"),
    ("the output", at("last", kind="bit_flip", bit=20, element=1), "aten::addmm in last"),
)


@pytest.mark.parametrize(("name", "fault", "operator"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_sticky_fault_is_told_with_the_operation_that_made_what_it_hit(
    pool: GlooPool, tmp_path: Path, name: str, fault: Fault, operator: str
) -> None:
    results = pool.run(faulty, WORLD, str(tmp_path), Views, fault)
    same_on_every_rank(results)
    (found,) = [v for v in verdicts(results[0]) if is_alarm(v)]
    assert (found.outcome, found.cause) == (Outcome.SUSPECT, Cause.DEVICE)
    assert [s.rank for s in found.suspects] == [ODD]
    assert operator in found.operator
    assert found.suspects[0].operator == found.operator
