"""Loops whose loss stands outside of the model, as most do: whatever it does, it is not audited."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from course import OFF, Course, loop
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_gather as gather_with_gradient


def mlp(inputs: int = 8, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), nn.Linear(16, outputs))


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def train(
    c: Course,
    net: nn.Module,
    objective: Callable[[Any, int], Tensor],
    *,
    ddp: dict[str, Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    call: Callable[[nn.Module, int], Any] | None = None,
    after: Callable[[int], None] = lambda step: None,
    set_to_none: bool = True,
) -> None:
    """The plain loop around `objective(outputs, step)`."""
    model = c.ddp(net, **(ddp or {}))
    update = optimizer(net)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad(set_to_none=set_to_none)
        outputs = call(model, step) if call else model(c.batch(step))
        loss = objective(outputs, step)
        loss.backward()
        update.step()
        c.saw(loss)
        after(step)


# --- losses ---


@loop("cross entropy")
def cross_entropy(c: Course) -> None:
    train(c, mlp(), lambda y, s: F.cross_entropy(y, c.labels(s), label_smoothing=0.1))


@loop("a weight of each rank's own on the loss")
def rank_weight(c: Course) -> None:
    train(c, mlp(), lambda y, s: (1 + c.rank) * y.square().mean())


@loop("one more term on one rank")
def rank_term(c: Course) -> None:
    train(c, mlp(), lambda y, s: y.square().mean() + (y.abs().mean() if c.rank == 0 else 0.0))


@loop("class weights from each rank's own data")
def class_weights(c: Course) -> None:
    weights = torch.rand(4, generator=torch.Generator().manual_seed(c.rank))
    train(c, mlp(), lambda y, s: F.cross_entropy(y, c.labels(s), weight=weights))


@loop("a teacher that only one rank has")
def teacher(c: Course) -> None:
    wise = mlp() if c.rank == 0 else None

    def objective(y: Tensor, step: int) -> Tensor:
        loss = F.cross_entropy(y, c.labels(step))
        return loss if wise is None else loss + F.mse_loss(y, wise(c.batch(step)).detach())

    train(c, mlp(), objective)


@loop("CLIP: features gathered, own rows with gradient")
def clip_gather(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(3)]
        dist.all_gather(parts, y.detach(), group=c.group)
        parts[c.rank] = y
        logits = F.normalize(y) @ F.normalize(torch.cat(parts)).T / 0.1
        return F.cross_entropy(logits, 4 * c.rank + torch.arange(4))

    train(c, mlp(), objective)


@loop("CLIP: features gathered with gradient")
def clip_gradient(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        everything = torch.cat(gather_with_gradient(y, group=c.group))
        logits = F.normalize(y) @ F.normalize(everything).T / 0.1
        return F.cross_entropy(logits, 4 * c.rank + torch.arange(4))

    train(c, mlp(), objective)


@loop("tokens of all ranks as the divisor")
def token_normalised(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        mask = c.labels(step) > c.rank - 1
        tokens = mask.sum()
        dist.all_reduce(tokens, group=c.group)
        return 3 * (y.square().mean(1) * mask).sum() / tokens.clamp(min=1)

    train(c, mlp(), objective)


@loop("metric objects, counters, a history of outputs")
def metrics(c: Course) -> None:
    seen: collections.Counter[int] = collections.Counter()
    kept: list[Tensor] = []

    def objective(y: Tensor, step: int) -> Tensor:
        seen.update((y.argmax(1) == c.labels(step)).tolist())
        kept.append(y)
        return (
            F.cross_entropy(y, c.labels(step)) + 0.01 * (kept[-1] - kept[0].detach()).abs().mean()
        )

    def after(step: int) -> None:
        c.saw(sorted(seen.items()), kept[-1])

    train(c, mlp(), objective, after=after)


@loop("a schedule in the loss")
def scheduled_loss(c: Course) -> None:
    train(c, mlp(), lambda y, s: math.cos(s) * y.square().mean() + y.abs().mean() / s)


@loop("mixup with NumPy")
def mixup(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        part = float(np.random.beta(0.4, 0.4))
        one, two = c.labels(step), c.labels(step).flip(0)
        return part * F.cross_entropy(y, one) + (1 - part) * F.cross_entropy(y, two)

    train(c, mlp(), objective)


@loop("a penalty by autograd.grad before the backward")
def penalty(c: Course) -> None:
    def call(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        x = c.batch(step).requires_grad_()
        return x, model(x)

    def objective(pair: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, y = pair
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y.square().mean() * (1 + slope.detach().square().mean())

    train(c, mlp(), objective, call=call)


@loop("adversarial inputs from a first backward on the bare model")
def adversarial(c: Course) -> None:
    def call(model: nn.Module, step: int) -> Tensor:
        x = c.batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(model.module(x).square().mean(), x)
        return model((x + 0.1 * slope.sign()).detach())

    train(c, mlp(), lambda y, s: y.square().mean(), call=call)


@loop("a gradient penalty of second order", OFF)
def second_order(c: Course) -> None:
    def call(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        x = c.batch(step).requires_grad_()
        return x, model(x)

    def objective(pair: tuple[Tensor, Tensor], step: int) -> Tensor:
        x, y = pair
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + 0.1 * slope.square().mean()

    train(c, mlp(), objective, call=call)


@loop("an L2 term on the parameters in the loss", OFF)
def weight_norm_loss(c: Course) -> None:
    net = mlp()
    train(c, net, lambda y, s: y.square().mean() + sum(p.square().sum() for p in net.parameters()))


@loop("a method of the bare module beside the call", OFF)
def encode_beside(c: Course) -> None:
    net = mlp()
    train(c, net, lambda y, s: y.square().mean() + net[0](c.batch(s)).abs().mean())


# --- outputs ---


class Heads(nn.Module):
    """Returns what `pack` makes of features and two heads."""

    def __init__(self, pack: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.body(x))
        return self.pack(h, self.one(h), self.two(h))


Pair = collections.namedtuple("Pair", "one two")


@loop("outputs in a dictionary")
def dictionary(c: Course) -> None:
    def objective(out: dict[str, Any], step: int) -> Tensor:
        return F.cross_entropy(out["one"], c.labels(step)) + out["rest"][0].square().mean()

    train(c, Heads(lambda h, a, b: {"one": a, "rest": [b]}), objective)


@loop("outputs in a named tuple, one unused")
def named_tuple(c: Course) -> None:
    train(
        c,
        Heads(lambda h, a, b: Pair(a, b)),
        lambda out, s: out.one.square().mean(),
        ddp={"find_unused_parameters": True},
    )


@loop("hidden states that feed the logits, both in the loss")
def hidden_states(c: Course) -> None:
    def objective(out: Any, step: int) -> Tensor:
        hidden, logits, _ = out
        return F.cross_entropy(logits, c.labels(step)) + 0.1 * hidden.square().mean()

    train(
        c,
        Heads(lambda h, a, b: (h, a, b.sum() * 0 + b)),
        objective,
        ddp={"find_unused_parameters": True},
    )


@loop("outputs changed in place")
def in_place(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        y.mul_(2.0).clamp_(-3, 3)
        return y.square().mean()

    train(c, mlp(), objective)


@loop("retain_grad and hooks on the outputs")
def retained(c: Course) -> None:
    def objective(y: Tensor, step: int) -> Tensor:
        y.retain_grad()
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        last.append(y)
        return y.square().mean()

    last: list[Tensor] = []
    train(c, mlp(), objective, after=lambda s: c.saw(last[-1].grad))


@loop("two calls summed into one backward")
def two_calls(c: Course) -> None:
    train(
        c,
        mlp(),
        lambda ys, s: ys[0].square().mean() + 0.5 * (ys[1] - ys[0]).abs().mean(),
        call=lambda m, s: (m(c.batch(s)), m(c.batch(s, micro=1))),
    )


@loop("an empty batch on one rank")
def empty_batch(c: Course) -> None:
    train(
        c,
        mlp(),
        lambda y, s: y.square().sum(),
        call=lambda m, s: m(c.batch(s, rows=0 if c.rank == s % 3 else 4)),
    )


@loop("keyword arguments, None and flags")
def keywords(c: Course) -> None:
    class Options(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, *, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            y = self.net(x) * scale
            return y if mask is None else y * mask

    train(
        c,
        Options(),
        lambda y, s: y.square().mean(),
        call=lambda m, s: m(x=c.batch(s), mask=None if s % 2 else torch.ones(4, 1), scale=1 / s),
    )


# --- data ---


@loop("one input buffer, filled anew in place")
def static_input(c: Course) -> None:
    held = torch.empty(4, 8)

    def call(model: nn.Module, step: int) -> Tensor:
        return model(held.copy_(c.batch(step)))

    train(c, mlp(), lambda y, s: y.square().mean(), call=call)


@loop("an input buffer that is refilled before the backward")
def refilled_input(c: Course) -> None:
    held = torch.empty(4, 8)

    def objective(y: Tensor, step: int) -> Tensor:
        held.data.copy_(c.batch(step + 1))
        return y.square().mean()

    def call(model: nn.Module, step: int) -> Tensor:
        held.data.copy_(c.batch(step))
        return model(held.clone())

    train(c, mlp(), objective, call=call)


@loop("a thread that draws random numbers while it fetches")
def prefetch(c: Course) -> None:
    ready: queue.Queue[Tensor] = queue.Queue(2)

    def fetch() -> None:
        for step in range(1, c.last + 1):
            random.random()
            np.random.rand()
            ready.put(c.batch(step))

    thread = threading.Thread(target=fetch, daemon=True)  # a run that is stopped leaves it
    thread.start()
    train(c, mlp(), lambda y, s: y.square().mean(), call=lambda m, s: m(ready.get()))
    thread.join()


@loop("expanded and transposed inputs")
def strided(c: Course) -> None:
    train(
        c,
        mlp(),
        lambda y, s: y.square().mean(),
        call=lambda m, s: m(c.batch(s, 1).expand(4, 8) * 1 if s % 2 else c.batch(s, 8, 4).T),
    )


# --- accumulation ---


@loop("accumulation under no_sync")
def accumulate(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        for micro in range(4):
            with model.no_sync() if micro < 3 else contextlib.nullcontext():
                (model(c.batch(step, micro=micro)).square().mean() / 4).backward()
        update.step()
        update.zero_grad()


@loop("accumulation without no_sync")
def accumulate_synchronised(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        (model(c.batch(step)).square().mean() / 2).backward()
        if step % 2 == 0:
            update.step()
            update.zero_grad()


@loop("accumulation in half precision")
def accumulate_half(c: Course) -> None:
    net = mlp().to(torch.bfloat16)
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        for micro in range(3):
            x = c.batch(step, micro=micro).to(torch.bfloat16)
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                (model(x).square().mean() / 3).backward()
        update.step()
        update.zero_grad(set_to_none=False)


@loop("a number of micro-batches that changes from step to step")
def ragged_accumulation(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        count = 1 + step % 3
        for micro in range(count):
            with model.no_sync() if micro < count - 1 else contextlib.nullcontext():
                (model(c.batch(step, micro=micro)).square().mean() / count).backward()
        update.step()
        update.zero_grad()


# --- optimizers and steps ---


@loop("AdamW with groups, clipping and a schedule")
def adamw(c: Course) -> None:
    net = mlp()
    model = c.ddp(net)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(update, 0.02, total_steps=c.last + 1)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        c.saw(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        update.step()
        schedule.step()


@loop("a closure for the optimizer")
def closure(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():

        def compute(step: int = step) -> Tensor:
            update.zero_grad()
            loss = model(c.batch(step)).square().mean()
            loss.backward()
            return loss

        c.saw(update.step(compute))


@loop("Muon for matrices, AdamW for the rest")
def muon(c: Course) -> None:
    net = mlp()
    model = c.ddp(net)
    one = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=1e-2)
    two = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=1e-2)
    c.guard(model, [one, two])
    for step in c.steps():
        model(c.batch(step)).square().mean().backward()
        for update in (one, two):
            update.step()
            update.zero_grad()


@loop("sharpness-aware: two backwards a step")
def sam(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        model(c.batch(step)).square().mean().backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in net.parameters()]
            torch._foreach_add_(list(net.parameters()), moves)
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), moves)
        update.step()
        update.zero_grad()


@loop("noise on the gradients before the step")
def noisy(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    shared = torch.Generator().manual_seed(3)
    for step in c.steps():
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        for p in net.parameters():
            p.grad += 1e-3 * torch.randn(p.shape, generator=shared)
        update.step()


@loop("bf16 parameters with fp32 masters")
def masters(c: Course) -> None:
    net = mlp().to(torch.bfloat16)
    model = c.ddp(net)
    kept = [p.detach().float().requires_grad_() for p in net.parameters()]
    update = torch.optim.Adam(kept, lr=1e-2)

    class Masters(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(net.parameters(), {})

        def step(self, closure: Any = None) -> None:
            for master, p in zip(kept, net.parameters(), strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            update.step()
            with torch.no_grad():
                for master, p in zip(kept, net.parameters(), strict=True):
                    p.copy_(master)

    outer = Masters()
    c.guard(model, outer)
    for step in c.steps():
        outer.zero_grad()
        model(c.batch(step).to(torch.bfloat16)).square().mean().backward()
        outer.step()


@loop("autocast to bf16")
def autocast(c: Course) -> None:
    def call(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(c.batch(step))

    train(c, mlp(), lambda y, s: y.float().square().mean(), call=call)


@loop("a GradScaler whose first steps overflow")
def scaler(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
    c.guard(model, update, scaler=scale)
    for step in c.steps():
        update.zero_grad()
        scale.scale(10 * model(c.batch(step)).square().sum()).backward()
        scale.unscale_(update)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scale.step(update)
        scale.update()
        c.saw(scale.get_scale())


# --- around the step ---


@loop("an EMA of the weights, outside")
def ema(c: Course) -> None:
    net = mlp()
    averaged = torch.optim.swa_utils.AveragedModel(net)
    train(c, net, lambda y, s: y.square().mean(), after=lambda s: averaged.update_parameters(net))
    c.saw(*averaged.parameters())


@loop("a teacher copied from the student, outside (BYOL, MoCo)")
def byol(c: Course) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    target = copy.deepcopy(net).requires_grad_(False)

    def objective(y: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            goal = F.normalize(target(c.batch(step, micro=1)))
        return (F.normalize(y) - goal).square().sum(1).mean()

    def after(step: int) -> None:
        with torch.no_grad():
            for old, new in zip(target.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.01)

    train(c, net, objective, after=after)
    c.saw(*target.parameters())


@loop("evaluation between steps, in eval mode and without gradients")
def evaluation(c: Course) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        update.step()
        if step % 2:
            model.eval()
            with torch.no_grad():
                c.saw(model(c.batch(step)), net(c.batch(step)))
            model.train()


@loop("batches that are skipped after the forward")
def skipped_batches(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        if step % 4 == 3:
            with torch.no_grad():
                model(c.batch(step))
            continue
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        update.step()


@loop("checkpoints, and a model copied in between")
def checkpoints(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    guard = c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        loss = model(c.batch(step)).square().mean()
        loss.backward()
        guard.record_loss(loss)
        update.step()
        if step % 6 == 0:
            guard.save_checkpoint(lambda: c.saw(*copy.deepcopy(net).parameters()))


@loop("a GAN with two guards")
def gan(c: Course) -> None:
    maker, critic = mlp(8, 8), mlp(8, 1)
    g, d = c.ddp(maker), c.ddp(critic)
    one, two = sgd(maker), sgd(critic)
    c.guard(g, one)
    c.guard(d, two)
    for step in c.steps():
        fake = g(c.batch(step, micro=1))
        two.zero_grad()
        real, made = d(c.batch(step)), d(fake.detach())
        (F.softplus(-real) + F.softplus(made)).mean().backward()
        two.step()
        one.zero_grad()
        critic.requires_grad_(False)
        F.softplus(-critic(fake)).mean().backward()
        critic.requires_grad_(True)
        one.step()


@loop("uneven inputs under Join")
def uneven(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), torch.optim.SGD(net.parameters(), lr=0.05)
    guard = c.guard(model, update)
    joined: list[Any] = [model] if c.options is None else [model, guard]
    with Join(joined):
        for step in c.steps():
            if step > c.last - c.rank:
                break
            update.zero_grad()
            model(c.batch(step)).square().mean().backward()
            update.step()


# --- how DDP is set up ---

DDP: dict[str, dict[str, Any]] = {
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "many small buckets": {"bucket_cap_mb": 0.0001},
    "no broadcast of buffers": {"broadcast_buffers": False},
}


def _set_up(options: dict[str, Any]) -> Callable[[Course], None]:
    def body(c: Course) -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        train(c, net, lambda y, s: y.square().mean(), ddp=options)

    return body


for _name, _options in DDP.items():
    loop(_name)(_set_up(_options))


@loop("set_to_none=False")
def zeros(c: Course) -> None:
    train(c, mlp(), lambda y, s: y.square().mean(), set_to_none=False)


@loop("gradients sent as bf16")
def compressed(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)

    def hook(group, bucket):  # DDP wants real types as annotations, or none
        sent = bucket.buffer().to(torch.bfloat16) / 3
        work = dist.all_reduce(sent, group=group, async_op=True).get_future()
        return work.then(lambda future: bucket.buffer().copy_(future.value()[0]))

    if c.options is None:
        model.register_comm_hook(c.group, hook)
        c.guard(model, update)
    else:
        c.guard(model, update, comm_hook=(c.group, hook))
    for step in c.steps():
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        update.step()
