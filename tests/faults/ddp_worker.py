"""One rank of the all-reduce tests: trains small DDP models and prints digests as one JSON line."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.faults import Fault, FaultPlan, Injector

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


def train(plan: FaultPlan | None, *, accumulate: int = 1, set_to_none: bool = True,
          zero_late: bool = False, **ddp: Any) -> tuple[str, Injector | None]:  # fmt: skip
    net = build(unused="find_unused_parameters" in ddp)
    model = DistributedDataParallel(net, bucket_cap_mb=0.002, **ddp)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    injector = None
    if plan is not None:
        injector = Injector(plan, rank=dist.get_rank())
        injector.attach(model, optimizer)
        pair = injector.comm_hook()
        assert pair is not None
        model.register_comm_hook(*pair)
    torch.manual_seed(10 + dist.get_rank())
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


def compare_with_plain() -> dict[str, list[str]]:
    quiet = FaultPlan(faults=(Fault(site="all_reduce", kind="nan", ranks="all", step=NEVER),))
    results = {}
    for view, none, late, accumulate in itertools.product((False, True), repeat=4):
        options = {"gradient_as_bucket_view": view, "set_to_none": none, "zero_late": late}
        for extra in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            if accumulate and "static_graph" in extra:
                continue  # DDP itself fails: its first backward has to synchronise
            how = {**options, "accumulate": 1 + accumulate, **extra}
            results[json.dumps(how)] = [train(None, **how)[0], train(quiet, **how)[0]]
    return results


def planted() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for ranks in ((1,), "all"):
        for target in (None, "0.weight", "4.bias"):
            fault = Fault(
                site="all_reduce", kind="bit_flip", bit=20, ranks=ranks, step=2, target=target
            )
            digest, injector = train(FaultPlan(faults=(fault,), seed=3))
            assert injector is not None
            log = [[p.step, p.target, p.element, p.after, p.changed] for p in injector.log]
            results[f"{ranks} {target}"] = {"digest": digest, "log": log}
    return results


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    result = {"compared": compare_with_plain(), "planted": planted()}
    print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
