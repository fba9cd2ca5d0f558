"""Loops with communication hooks of torch's own, and loops that end before their data do."""

from __future__ import annotations

from typing import Any

from course import Course, loop
from outside import mlp, sgd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power


def hooked(c: Course, hook: tuple[Any, Any]) -> None:
    """Gradients go through a hook: registered in a plain run, passed to `init` in a guarded one."""
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    if c.options is None:
        model.register_comm_hook(*hook)
        c.guard(model, update)
    else:
        c.guard(model, update, comm_hook=hook)
    for step in c.steps():
        update.zero_grad()
        loss = model(c.batch(step)).square().mean()
        loss.backward()
        update.step()
        c.saw(loss)


@loop("fp16_compress_hook")
def sent_as_fp16(c: Course) -> None:
    hooked(c, (c.group, default_hooks.fp16_compress_hook))


@loop("PowerSGD")
def power_sgd(c: Course) -> None:
    state = power.PowerSGDState(
        c.group, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
    )
    hooked(c, (state, power.powerSGD_hook))


@loop("epochs that end early, with a forward that is never gone through backward")
def early_break(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    steps = c.steps()
    while True:
        for _ in range(5):
            step = next(steps)
            update.zero_grad()
            loss = model(c.batch(step)).square().mean()
            if step % 7 == 0:
                break
            loss.backward()
            update.step()
            c.saw(loss)
