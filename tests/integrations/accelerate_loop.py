"""The common run with accelerate."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from loops import SAVE_EVERY, Harness, Net, as_launched, loader
from torch import nn

import sdcwatch


def accelerated(harness: Harness, group: Any) -> nn.Module:
    accelerate.state.AcceleratorState._reset_state()  # of an earlier run in this process
    accelerate.state.GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    harness.injector.attach(model, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)
    try:
        for step, batch in enumerate(loader(harness.rank), start=1):
            harness.begin_step(step, net)
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            harness.logs.append(loss.item())
            if step % SAVE_EVERY == 0 and (guard is None or guard.may_save()):
                accelerator.save_state(str(harness.run_dir / f"step-{step}"))
    finally:
        if guard is not None:
            guard.close()
    return net


BAD = 5


def through_a_nan(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    """Guarded, with a NaN on one rank at step `BAD`; and unguarded, without the update of it."""
    as_launched(rank)
    left: list[Any] = []
    before = torch.get_rng_state()
    for guarded in (True, False):
        accelerate.state.AcceleratorState._reset_state()
        accelerate.state.GradientState._reset_state()
        harness = Harness(rank, run_dir, guarded=guarded, faults=None)
        torch.manual_seed(0)
        net = Net()
        made = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)
        model, optimizer = Accelerator(cpu=True).prepare(net, made)
        guard = sdcwatch.init(model, optimizer, **harness.options) if guarded else None
        for step, batch in enumerate(loader(rank), start=1):
            torch.manual_seed(100 * rank + step)
            if guarded or step != BAD:
                poison = float("nan") if (rank, step) == (1, BAD) else 1.0
                (model(**batch)["loss"] * poison).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        if guard is not None:
            guard.close()
            left.append([told for told in harness.story() if told[1] == "skip"])
        left += [net.state_dict(), made.state_dict()["state"], schedule.get_last_lr()]
    torch.set_rng_state(before)
    skips, weights, state, rates, *others = left
    torch.testing.assert_close((weights, state), tuple(others[:2]), rtol=0, atol=0)
    return {"skips": skips, "rates": rates == others[2]}
