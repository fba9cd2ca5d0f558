"""The all-reduce site on real DDP: three gloo ranks, where 1/W and division by W differ in bits."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.faults import Fault, FaultPlan, Injector
from sdcwatch.testing import GlooPool

pytestmark = pytest.mark.dist

WORLD_SIZE = 3
STEPS = 3
NEVER = 10_000


class Sometimes(nn.Module):
    """A branch that every other call leaves out, so that its parameters are unused there."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.calls = nn.Linear(24, 24), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls % 2 == 0 else x + self.branch(x)


def build(unused: bool) -> nn.Module:
    torch.manual_seed(0)
    last = Sometimes() if unused else nn.Identity()
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), last, nn.Linear(24, 3))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(
    group: Any,
    plan: FaultPlan | None,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    zero_late: bool = False,
    **ddp: Any,
) -> tuple[str, Injector | None]:
    net = build(unused="find_unused_parameters" in ddp)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.002, **ddp)
    rank = dist.get_rank(group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    injector = None
    if plan is not None:
        injector = Injector(plan, rank=rank)
        injector.attach(model, optimizer)
        pair = injector.comm_hook(group)
        assert pair is not None
        model.register_comm_hook(*pair)
    torch.manual_seed(10 + rank)
    for step in range(1, STEPS + 1):
        if injector is not None:
            injector.begin_step(step)
        if not zero_late:
            optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(accumulate):
            quiet = model.no_sync() if i < accumulate - 1 else contextlib.nullcontext()
            batch = torch.randn(8, 24), torch.randn(8, 3)
            with quiet:
                loss = loss_of(model, batch)
                if zero_late and i == 0:
                    optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(weights).hexdigest(), injector


def compare_with_plain(group: Any) -> dict[str, list[str]]:
    quiet = FaultPlan(faults=(Fault(site="all_reduce", kind="nan", ranks="all", step=NEVER),))
    results = {}
    for view, none, late, accumulate in itertools.product((False, True), repeat=4):
        options = {"gradient_as_bucket_view": view, "set_to_none": none, "zero_late": late}
        for extra in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            if accumulate and "static_graph" in extra:
                continue  # DDP itself fails: its first backward has to synchronise
            how = {**options, "accumulate": 1 + accumulate, **extra}
            results[json.dumps(how)] = [train(group, None, **how)[0], train(group, quiet, **how)[0]]
    return results


def planted(group: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for ranks in ((1,), "all"):
        for target in (None, "0.weight", "4.bias"):
            fault = Fault(
                site="all_reduce", kind="bit_flip", bit=20, ranks=ranks, step=2, target=target
            )
            digest, injector = train(group, FaultPlan(faults=(fault,), seed=3))
            assert injector is not None
            log = [[p.step, p.target, p.element, p.after, p.changed] for p in injector.log]
            results[f"{ranks} {target}"] = {"digest": digest, "log": log}
    return results


def work(rank: int, group: Any) -> dict[str, Any]:
    return {"compared": compare_with_plain(group), "planted": planted(group)}


@pytest.fixture(scope="module")
def ranks(pool: GlooPool) -> list[dict[str, Any]]:
    return pool.run(work, WORLD_SIZE)


def test_hook_without_a_due_fault_trains_bit_for_bit_as_plain_ddp(ranks: Any) -> None:
    for rank in ranks:
        different = [how for how, (plain, hook) in rank["compared"].items() if plain != hook]
        assert different == []
        assert len(rank["compared"]) == 40


@pytest.mark.parametrize("target", [None, "0.weight", "4.bias"])
def test_fault_on_one_rank_makes_that_replica_alone_differ(ranks: Any, target: Any) -> None:
    runs = [rank["planted"][f"(1,) {target}"] for rank in ranks]
    assert runs[0]["digest"] == runs[2]["digest"] != runs[1]["digest"]
    assert [len(run["log"]) for run in runs] == [0, 1, 0]
    assert runs[1]["log"][0][:2] == [2, target or ""]
    assert runs[1]["log"][0][4] == 1


@pytest.mark.parametrize("target", [None, "0.weight", "4.bias"])
def test_fault_on_all_ranks_is_equal_on_all_and_changes_the_run(ranks: Any, target: Any) -> None:
    runs = [rank["planted"][f"all {target}"] for rank in ranks]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]["log"]) == 1
    how = json.dumps(
        {"gradient_as_bucket_view": False, "set_to_none": True, "zero_late": False, "accumulate": 1}
    )
    assert runs[0]["digest"] != ranks[0]["compared"][how][0]
