"""The common run with accelerate."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from loops import SAVE_EVERY, Harness, Net, loader
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
