"""The common run with Fabric: through the call of the module, and through methods marked for it."""

from __future__ import annotations

from collections.abc import Callable
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
    return trained(harness, Net, called)


def marked(harness: Harness, group: Any) -> nn.Module:
    return trained(harness, WithSteps, redirected)


def called(model: Any, step: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)["loss"]


class WithSteps(Net):
    """Its loop calls no `forward`: two methods that Fabric sends through DDP's."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self(**batch)["loss"]

    def reversed_step(
        self, input_ids: torch.Tensor, *, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"loss": self(input_ids.flip(0), labels.flip(0))["loss"]}


def redirected(model: Any, step: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One method or the other: steps 4 and 12, which are audited, have another one than step 8."""
    if step // SAVE_EVERY % 2:
        return model.reversed_step(batch["input_ids"], labels=batch["labels"])["loss"]
    return model.training_step(batch)


def trained(harness: Harness, build: Callable[[], nn.Module], loss_of: Any) -> nn.Module:
    made = made_fabric()
    torch.manual_seed(0)
    net = build()
    model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if isinstance(net, WithSteps):
        model.mark_forward_method("training_step")
        model.mark_forward_method(net.reversed_step)
    harness.injector.attach(model._forward_module, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)
    try:
        for step, batch in enumerate(loader(harness.rank), start=1):
            harness.begin_step(step, net)
            optimizer.zero_grad()
            loss = loss_of(model, step, batch)
            made.backward(loss)
            optimizer.step()
            harness.logs.append(loss.item())
            if step % SAVE_EVERY == 0 and (guard is None or guard.may_save()):
                made.save(harness.run_dir / f"step-{step}", {"model": model})
    finally:
        if guard is not None:
            guard.close()
    return net
