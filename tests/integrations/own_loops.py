"""Two loops that are another run by nature: with a loss scale and accumulation, and with mixup."""

from __future__ import annotations

from typing import Any

import torch
from loops import SAVE_EVERY, Harness, Net, loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch

MICRO, SCALE = 2, 2.0**16


def nanogpt(harness: Harness, group: Any) -> nn.Module:
    """Two micro-batches a step, a loss scale, clipping."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    harness.injector.attach(model, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)
    batches = iter([batch for _ in range(MICRO) for batch in loader(harness.rank)])
    try:
        for step in range(1, 13):
            harness.begin_step(step, net)
            for micro in range(MICRO):
                model.require_backward_grad_sync = micro == MICRO - 1
                loss = model(**next(batches))["loss"] / MICRO
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            harness.logs.append((loss.item(), scaler.get_scale()))
            if step % SAVE_EVERY == 0 and (guard is None or guard.may_save()) and not harness.rank:
                torch.save(net.state_dict(), harness.run_dir / f"step-{step}")
    finally:
        if guard is not None:
            guard.close()
    return net


def timm(harness: Harness, group: Any) -> nn.Module:
    """Mixup of the labels, and an average of the weights that is saved with them."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, process_group=group)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    harness.injector.attach(model, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)

    def save(step: int) -> None:
        state = {"state_dict": net.state_dict(), "state_dict_ema": average.state_dict()}
        torch.save(state, harness.run_dir / f"step-{step}")

    try:
        for step, batch in enumerate(loader(harness.rank), start=1):
            harness.begin_step(step, net)
            part = torch.distributions.Beta(0.8, 0.8).sample()
            logits = model(batch["input_ids"])["logits"].flatten(0, 1)
            one, other = batch["labels"].flatten(), batch["labels"].flip(0).flatten()
            criterion = nn.functional.cross_entropy
            loss = criterion(logits, one) * part + criterion(logits, other) * (1 - part)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
            harness.logs.append((loss.item(), average.module.head.weight.sum().item()))
            if step % SAVE_EVERY == 0:
                if guard is not None:
                    guard.save_checkpoint(lambda step=step: save(step))
                elif harness.rank == 0:
                    save(step)
    finally:
        if guard is not None:
            guard.close()
    return net
