"""The common run with Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from loops import SAVE_EVERY, WORLD, Harness, Net, loader
from torch import nn

import sdcwatch


def made_fabric(**changed: Any) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
        **changed,
    )
    fabric.launch()
    return fabric


def fabric(harness: Harness, group: Any) -> nn.Module:
    made = made_fabric()
    torch.manual_seed(0)
    net = Net()
    model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    harness.injector.attach(model._forward_module, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)
    try:
        for step, batch in enumerate(loader(harness.rank), start=1):
            harness.begin_step(step, net)
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            made.backward(loss)
            optimizer.step()
            harness.logs.append(loss.item())
            if step % SAVE_EVERY == 0 and (guard is None or guard.may_save()):
                made.save(harness.run_dir / f"step-{step}", {"model": model})
    finally:
        if guard is not None:
            guard.close()
    return net
