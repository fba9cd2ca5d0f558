"""Kinds of loops that once had a healthy device named, hung, or trained other weights.

Each kind stands here with the mistake or the idiom outside of the module, where it is not audited
and nothing is lost, and inside of it, in several variants: another collective, another place of a
side effect, another way to depend on the rank, another dtype.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from course import OFF, Course, loop
from inside import Model, square
from outside import mlp, sgd, train
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torch.nn.parallel import DistributedDataParallel

UNUSED = {"find_unused_parameters": True}
DIFFERENT = "not the same function"
LATE = 8
"""A step at which audits have long been armed."""


# --- m01: a loss that is another one on one rank ---


class WithLoss(nn.Module):
    """The loss inside of the module: `loss(logits, labels)`."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = mlp(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def with_loss(c: Course, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    train(c, WithLoss(loss), lambda v, s: v, call=lambda m, s: m(c.batch(s), c.labels(s)))


@loop("one more term on one rank, in the forward", trial="m01", left_out=(0,))
def term_inside(c: Course) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(logits, labels)
        return value + 1e-3 * logits.abs().mean() if c.rank == 0 else value

    with_loss(c, loss)


@loop(
    "class weights from each rank's own data, in the forward",
    OFF,
    DIFFERENT,
    trial="m01",
    left_out=(0, 1, 2),
)
def class_weights_inside(c: Course) -> None:
    weights = torch.rand(4, generator=torch.Generator().manual_seed(c.rank))
    with_loss(c, lambda logits, labels: F.cross_entropy(logits, labels, weight=weights))


@loop("a value of one rank's environment, in the forward", trial="m01", left_out=(1,))
def environment_inside(c: Course) -> None:
    name = "SDCWATCH_TEST_SMOOTHING"
    os.environ[name] = "0.1" if c.rank == 1 else "0.0"

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=float(os.environ[name]))

    with_loss(c, loss)


@loop("a teacher of one rank's own, in the forward", trial="m01", left_out=(2,))
def teacher_inside(c: Course) -> None:
    wise = mlp(4, 4)  # after the model was made, and drawn anew where its file was found
    if c.rank == 2:
        nn.init.normal_(wise[0].weight, generator=torch.Generator().manual_seed(3))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, wise(logits).detach())

    with_loss(c, loss)


@loop("one rank computes a part in bfloat16", trial="m01", left_out=(1,))
def half_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h.bfloat16().tanh().float() if c.rank == 1 else h.tanh()

    train(c, Model(between), square)


@loop("one rank computes a part in double precision", trial="m01", left_out=(0,))
def double_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return F.softmax(h.double() if c.rank == 0 else h, 1).float() * 3

    train(c, Model(between), square)


class Scaled(torch.autograd.Function):
    """Leaves the values alone and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@loop("a gradient that one rank scales in its backward", trial="m01", left_out=(2,))
def scaled_backward(c: Course) -> None:
    train(c, Model(lambda m, h: Scaled.apply(h, 0.5 if c.rank == 2 else 1.0)), square)


@loop("a gradient that one rank clips by a hook in the forward", trial="m01", left_out=(1,))
def clipped_backward(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        if c.rank == 1:
            h.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
        return h

    train(c, Model(between), square)


@loop("one rank's own values in a buffer", trial="m01")
def table_inside(c: Course) -> None:
    net = Model(lambda m, h: h + m.table, table=torch.zeros(8))
    net.register_buffer("table", torch.full((8,), 0.01 * (c.rank == 1)), persistent=False)
    train(c, net, square, ddp={"broadcast_buffers": False})


@loop("the rank's number in the forward", OFF, DIFFERENT, trial="m01", left_out=(0, 1, 2))
def rank_number(c: Course) -> None:
    train(c, Model(lambda m, h: h + 0.01 * dist.get_rank()), square)


@loop("the rank's number as an argument", trial="m01")
def rank_argument(c: Course) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, rank: int) -> Tensor:
            return self.net(x) * (1 + 0.1 * rank)

    train(c, Told(), square, call=lambda m, s: m(c.batch(s), c.rank))


@loop("the rank's number in the batch", trial="m01")
def rank_in_batch(c: Course) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, batch: dict[str, Any]) -> Tensor:
            return self.net(batch["x"]) * batch["meta"].rank

    train(c, Told(), square, call=lambda m, s: m({"x": c.batch(s), "meta": Meta(c.rank + 1)}))


@dataclasses.dataclass
class Meta:
    """What a batch says about itself."""

    rank: int


@loop(
    "a scale of one rank's own that comes late",
    trial="m01",
    software="aten::mul",
    software_on=(1,),
)
def late_scale(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h * (1.5 if c.rank == 1 and c.step >= LATE else 1.0)

    train(c, Model(between), square)


@loop(
    "a branch of one rank's own that comes late",
    trial="m01",
    software="aten::",
    software_on=(2,),
)
def late_branch(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h.sin() if c.rank == 2 and c.step >= LATE else h

    train(c, Model(between), square)


@loop(
    "a gradient that one rank scales from some step on",
    trial="m01",
    software="aten::",
    software_on=(0,),
)
def late_gradient(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return Scaled.apply(h, 0.5 if c.rank == 0 and c.step >= LATE else 1.0)

    train(c, Model(between), square)


@loop(
    "a hook on a parameter of one rank that comes late",
    trial="m01",
    software="aten::",
    software_on=(1,),
)
def late_hook(c: Course) -> None:
    net = Model(lambda m, h: h)
    net.last.weight.register_hook(lambda g: g * 1.01 if c.rank == 1 and c.step >= LATE else None)
    train(c, net, square)


# --- m02: collectives in the forward ---


@loop("contrast with the keys of all ranks, in the forward", OFF, "collective", trial="m02")
def contrast_inside(c: Course) -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            z = F.normalize(self.net(x), dim=1)
            a, t = z[:, :3], z[:, 3:]
            keys = [torch.empty_like(t) for _ in range(3)]
            dist.all_gather(keys, t.detach().contiguous(), group=c.group)
            keys[c.rank] = t
            return F.cross_entropy(a @ torch.cat(keys).T, torch.arange(4) + 4 * c.rank)

    train(c, Contrast(), lambda v, s: v)


def collective_inside(c: Course, run: Callable[[Tensor], Tensor], **ddp: Any) -> None:
    train(c, Model(lambda m, h: run(h)), square, **ddp)


@loop("all_gather_into_tensor in the forward", OFF, "collective", trial="m02")
def into_tensor(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        everything = torch.empty(12, 8)
        dist.all_gather_into_tensor(everything, h.detach(), group=c.group)
        return h - everything.mean(0)

    collective_inside(c, run)


@loop("a gather with gradient in the forward", OFF, "collective", trial="m02")
def gather_gradient_inside(c: Course) -> None:
    collective_inside(c, lambda h: h - torch.cat(gather_with_gradient(h, c.group)).mean(0))


@loop("a functional collective in the forward", OFF, "collective", trial="m02")
def functional_inside(c: Course) -> None:
    collective_inside(
        c, lambda h: h - functional.all_reduce(h.detach(), "sum", c.group).mean(0) / 3
    )


@loop("a functional gather in the forward", OFF, "collective", trial="m02")
def functional_gather(c: Course) -> None:
    collective_inside(c, lambda h: h - functional.all_gather_tensor(h.detach(), 0, c.group).mean(0))


@loop("all_to_all in the forward (experts)", OFF, "collective", trial="m02")
def experts_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        sent, got = h.detach()[:3].contiguous(), torch.empty(3, 8)
        dist.all_to_all_single(got, sent, group=c.group)
        return h + got.mean(0)

    collective_inside(c, run)


@loop("a broadcast in the forward", OFF, "collective", trial="m02")
def broadcast_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        first = h.detach().mean(0)
        dist.broadcast(first, src=0, group=c.group)
        return h - first

    collective_inside(c, run)


@loop("send and receive in the forward", OFF, "collective", trial="m02")
def neighbours_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        got, mine = torch.empty_like(h), h.detach().contiguous()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (c.rank + 1) % 3, c.group),
                dist.P2POp(dist.irecv, got, (c.rank + 2) % 3, c.group),
            ]
        )
        for work in works:
            work.wait()
        return h + 0.1 * got

    collective_inside(c, run)


@loop("a blocking send and receive in the forward", OFF, "collective", trial="m02")
def blocking_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        got, mine = torch.empty_like(h), h.detach().contiguous()
        if c.rank == 0:
            dist.send(mine, 1, c.group)
            return h
        if c.rank == 1:
            dist.recv(got, 0, c.group)
            return h + 0 * got
        return h

    collective_inside(c, run)


@loop("objects gathered in the forward", OFF, "collective", trial="m02")
def objects_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        lengths: list[Any] = [None] * 3
        dist.all_gather_object(lengths, len(h), group=c.group)
        return h * 12 / sum(lengths)

    collective_inside(c, run)


@loop("a barrier in the forward", OFF, "collective", trial="m02")
def barrier_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        dist.barrier(group=c.group)
        return h

    collective_inside(c, run)


@loop("an asynchronous sum in the forward", OFF, "collective", trial="m02")
def asynchronous_inside(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        total = h.detach().mean(0)
        work = dist.all_reduce(total, group=c.group, async_op=True)
        value = h.sigmoid()
        work.wait()
        return value - total / 3

    collective_inside(c, run)


@loop("a sum over a group of the script's own in the forward", OFF, "collective", trial="m02")
def other_group(c: Course) -> None:
    group = dist.new_group([0, 1, 2])

    def run(h: Tensor) -> Tensor:
        total = h.detach().mean(0)
        dist.all_reduce(total, group=group)
        return h - total / 3

    collective_inside(c, run)


@loop("a sum over a group that one rank is not in", OFF, "collective", trial="m02")
def smaller_group(c: Course) -> None:
    group = dist.new_group([0, 1])

    def run(h: Tensor) -> Tensor:
        total = h.detach().mean(0)
        if c.rank < 2:
            dist.all_reduce(total, group=group)
        return h - total / 3

    collective_inside(c, run)


class SummedBackward(torch.autograd.Function):
    """A sum over ranks in the backward alone, as of tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total / 3, None


@loop("a sum over ranks in the backward alone", OFF, "collective", trial="m02")
def backward_alone(c: Course) -> None:
    collective_inside(c, lambda h: SummedBackward.apply(h, c.group))


@loop("a sum over ranks in a hook on a gradient", OFF, "collective", trial="m02")
def hook_alone(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        def summed(gradient: Tensor) -> Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=c.group)
            return total / 3

        if h.requires_grad:
            h.register_hook(summed)
        return h

    collective_inside(c, run)


@loop("a collective that comes late in the forward", trial="m02", later=OFF)
def late_collective(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        mean = h.detach().mean(0)
        if c.step >= LATE:
            dist.all_reduce(mean, group=c.group)
        return h - mean

    collective_inside(c, run)


@loop("a collective every fifth step in the forward", trial="m02")
def seldom_collective(c: Course) -> None:
    def run(h: Tensor) -> Tensor:
        mean = h.detach().mean(0)
        if c.step % 5 == 4:
            dist.all_reduce(mean, group=c.group)
        return h - mean

    collective_inside(c, run)


# --- closure_trap: another DDP module in the forward, or another call than that of the model ---


@loop("a loss that calls the model from its closure", trial="closure")
def closure_outside(c: Course) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model = c.ddp(net)
    update = sgd(net)
    c.guard(model, update)
    loss_fn = lambda _, x: model(x).square().mean()  # noqa: E731
    for step in c.steps():
        update.zero_grad()
        loss = loss_fn(None, c.batch(step))
        loss.backward()
        update.step()
        c.saw(loss)


@loop("a forward that calls another DDP module", OFF, "", trial="closure")
def ddp_inside(c: Course) -> None:
    other = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), process_group=c.group
    )
    c.nets.append(other.module)
    held = [other]
    second = sgd(other.module)
    net = Model(lambda m, h: held[0](h))
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        second.zero_grad()
        loss = model(c.batch(step)).square().mean()
        loss.backward()
        update.step()
        second.step()
        c.saw(loss)


@loop("a forward that calls another DDP module without gradient", OFF, "", trial="closure")
def ddp_teacher_inside(c: Course) -> None:
    wise = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    other = DistributedDataParallel(wise, process_group=c.group)

    def between(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            goal = other(h)
        return h - goal

    train(c, Model(between), square)


@loop("a second call of the bare module beside the model's", trial="closure")
def bare_beside(c: Course) -> None:
    net = mlp()
    train(c, net, lambda y, s: (y - net(c.batch(s + 1))).square().mean())


# --- m07, r_bank, r_aux: what a forward leaves behind ---


@loop("a momentum encoder written through .data", OFF, "change", trial="m07")
def data_momentum(c: Course) -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
            self.k.load_state_dict(self.q.state_dict())

        def forward(self, x: Tensor) -> Tensor:
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                b.data.lerp_(a.data, 0.1)
            return F.cross_entropy(self.q(x) @ self.k(x).T, torch.arange(len(x)))

    train(c, Twin(), lambda v, s: v)


@loop("a momentum encoder whose weights are replaced", OFF, "", trial="m07")
def replaced_momentum(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.slow.weight.data = 0.9 * m.slow.weight.data + 0.1 * m.fast.weight.data
        return m.fast(h) - m.slow(h).detach()

    slow = nn.Linear(8, 8).requires_grad_(False)
    train(c, Model(between, fast=nn.Linear(8, 8), slow=slow), square)


@loop("a momentum encoder outside of the model, moved in the forward", OFF, "", trial="m07")
def hidden_momentum(c: Course) -> None:
    slow = nn.Linear(8, 8).requires_grad_(False)

    def between(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            slow.weight.lerp_(m.fast.weight, 0.1)
        return m.fast(h) - slow(h).detach()

    train(c, Model(between, fast=nn.Linear(8, 8)), square)


@loop("weights renormalised in the forward", OFF, "", trial="m07")
def renormalised(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.head.weight.div_(m.head.weight.norm(dim=1, keepdim=True))
        return m.head(h)

    train(c, Model(between, head=nn.Linear(8, 8, bias=False)), square)


@loop("a memory bank that is used once it is full", trial="r_bank")
def full_bank(c: Course) -> None:
    class Banked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m, self.bank = mlp(), []

        def forward(self, x: Tensor) -> Tensor:
            y = self.m(x)
            self.bank = [*self.bank, y.detach()][-9:]
            full = len(self.bank) == 9
            return y + (0.1 * torch.stack(self.bank).mean((0, 1)) if full else 0.0)

    net = Banked()
    train(c, net, square, after=lambda s: c.saw(*net.bank))


@loop("a memory bank in a deque of a submodule", trial="r_bank")
def deque_bank(c: Course) -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows: collections.deque[Tensor] = collections.deque(maxlen=5)

        def forward(self, h: Tensor) -> Tensor:
            self.rows.append(h.detach())
            return h - 0.1 * torch.cat(tuple(self.rows)).mean(0)

    net = Model(lambda m, h: m.bank(h), bank=Bank())
    train(c, net, square, after=lambda s: c.saw(*net.bank.rows))


@loop("a memory bank in a plain tensor, written in place", trial="r_bank")
def tensor_bank(c: Course) -> None:
    net = Model(lambda m, h: h)
    net.__dict__["rows"], net.__dict__["at"] = torch.zeros(12, 8), 0

    def between(m: Any, h: Tensor) -> Tensor:
        m.rows[m.at : m.at + 4] = h.detach()
        m.at = (m.at + 4) % 12
        return h - 0.1 * m.rows.mean(0)

    net.between = between
    train(c, net, square, after=lambda s: c.saw(net.rows, net.at))


@loop("a memory bank in a dictionary by label", trial="r_bank")
def dictionary_bank(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        for label, row in zip(h.argmax(1).tolist(), h.detach(), strict=True):
            m.rows.setdefault(label, []).append(row)
        return h - 0.01 * torch.stack([*itertools.chain(*m.rows.values())]).mean(0)

    net = Model(between, rows={})
    train(c, net, square, after=lambda s: c.saw(*itertools.chain(*net.rows.values())))


@loop("a memory bank in half precision", trial="r_bank")
def half_bank(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.bank = [*m.bank, h.detach().half()][-4:]
        return h - 0.1 * torch.cat(m.bank).float().mean(0)

    net = Model(between, bank=[])
    train(c, net, square, after=lambda s: c.saw(*net.bank))


@loop(
    "a memory bank in a list outside of the module",
    OFF,
    DIFFERENT,
    trial="r_bank",
    left_out=(0, 1, 2),
)
def hidden_bank(c: Course) -> None:
    bank: list[Tensor] = []

    def between(m: Any, h: Tensor) -> Tensor:
        bank.append(h.detach())
        return h - 0.1 * torch.cat(bank[-3:]).mean(0)

    train(c, Model(between), square)


class Meter:
    """A mean over what it was given, as metric objects keep it."""

    def __init__(self) -> None:
        self.total, self.count, self.history = torch.zeros(8), 0, []

    def add(self, h: Tensor) -> None:
        self.total += h.detach().mean(0)
        self.count += 1
        self.history.append(float(self.total[0]))


@loop("a metric object in the module", trial="m07")
def meter_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.meter.add(h)
        return h

    net = Model(between, meter=Meter())
    train(
        c, net, square, after=lambda s: c.saw(net.meter.total, net.meter.count, net.meter.history)
    )


@loop("statistics in an object of the module, that the forward uses", trial="m07")
def meter_used(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.meter.add(h)
        return h - m.meter.total / m.meter.count

    net = Model(between, meter=Meter())
    train(c, net, square, after=lambda s: c.saw(net.meter.total, net.meter.count))


@loop("an array of NumPy in the module, written in place", trial="m07")
def array_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.seen *= 0.9
        m.seen += 0.1 * h.detach().mean(0).numpy()
        return h - torch.from_numpy(m.seen)

    net = Model(between, seen=torch.zeros(8).numpy())
    train(c, net, square, after=lambda s: c.saw(net.seen.tolist()))


@loop("an iterator in the module", trial="m07")
def iterator_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h * (1 + 0.01 * next(m.numbers))

    train(c, Model(between, numbers=itertools.count()), square)


@loop("a generator of the script in the module", OFF, "", trial="m07")
def script_generator(c: Course) -> None:
    def schedule() -> Any:
        for k in itertools.count():
            yield 1 / (1 + k)

    train(c, Model(lambda m, h: h * (1 + next(m.numbers)), numbers=schedule()), square)


@loop("a count in the class of a module", OFF, "", trial="m07")
def class_counter(c: Course) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, h: Tensor) -> Tensor:
            Counting.calls += 1
            return h * (1 + 0.01 * Counting.calls)

    net = Model(lambda m, h: m.counting(h), counting=Counting())
    train(c, net, square)


@loop("a cached method", trial="m07")
def cached_method(c: Course) -> None:
    @functools.lru_cache
    def table(rows: int) -> Tensor:
        return torch.arange(8.0) / rows

    train(c, Model(lambda m, h: h + table(len(h))), square)


@loop("a count that every forward hook raises", trial="m07")
def hooked_counter(c: Course) -> None:
    net = Model(lambda m, h: h * m.factor, factor=1.0)

    def count(module: Any, args: Any, output: Any) -> None:
        module.factor *= 0.99

    net.register_forward_hook(count)
    train(c, net, square, after=lambda s: c.saw(net.factor))


@loop("outputs kept for the accuracy after the update", trial="r_aux")
def kept_outside(c: Course) -> None:
    last: dict[str, Tensor] = {}
    logged: list[int] = []

    def objective(y: Tensor, step: int) -> Tensor:
        last["out"] = y
        logged.append(step)
        return F.cross_entropy(y, c.labels(step))

    train(c, mlp(), objective, after=lambda s: c.saw(last["out"], logged))


@loop("outputs kept in a dictionary of the module", trial="r_aux")
def kept_in_dictionary(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.kept["out"] = h
        return h

    net = Model(between, kept={})
    train(c, net, square, after=lambda s: c.saw(net.kept["out"]))


@loop("outputs kept by a forward hook in an object of the module", trial="r_aux")
def kept_in_object(c: Course) -> None:
    class Kept:
        out: Any = None

    net = Model(lambda m, h: h, kept=Kept())

    def keep(module: Any, args: Any, output: Any) -> None:
        net.kept.out = output

    net.first.register_forward_hook(keep)
    train(c, net, square, after=lambda s: c.saw(net.kept.out))


@loop("an auxiliary loss in a list of a submodule", OFF, "", trial="r_aux")
def auxiliary_list(c: Course) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def forward(self, h: Tensor) -> Tensor:
            self.losses.append(h.abs().mean())
            return h

    net = Model(lambda m, h: m.gate(h), gate=Gate())

    def objective(y: Tensor, step: int) -> Tensor:
        total = square(y, step) + 0.1 * sum(net.gate.losses)
        net.gate.losses.clear()
        return total

    train(c, net, objective)


@loop("an auxiliary loss in a list outside of the module", OFF, "", trial="r_aux")
def auxiliary_hidden(c: Course) -> None:
    losses: list[Tensor] = []

    def between(m: Any, h: Tensor) -> Tensor:
        losses.append(h.abs().mean())
        return h

    train(c, Model(between), lambda y, s: square(y, s) + 0.1 * losses[-1])


# --- r_penalty: derivatives of the script's own ---


@loop("a penalty on the gradients, in the loss", OFF, trial="r_penalty")
def penalty_outside(c: Course) -> None:
    net = mlp()
    model, update = c.ddp(net), sgd(net)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        loss = F.cross_entropy(model(c.batch(step)), c.labels(step))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.01 * sum(g.square().sum() for g in grads)).backward()
        update.step()
        c.saw(loss)


class Forces(nn.Module):
    """Energies and their derivative by the positions, both in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -slope


def forces_loss(outputs: tuple[Tensor, Tensor], step: int) -> Tensor:
    return outputs[0].square().mean() + outputs[1].square().mean()


@loop("forces as derivatives of an energy, in the forward", trial="r_penalty")
def forces_inside(c: Course) -> None:
    train(c, Forces(), forces_loss)


@loop("forces in double precision", trial="r_penalty")
def forces_double(c: Course) -> None:
    train(c, Forces().double(), forces_loss, call=lambda m, s: m(c.batch(s).double()))


@loop("derivatives by torch.func in the forward", trial="r_penalty")
def functional_derivative(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        value = lambda v: m.side(v).square().sum()  # noqa: E731
        return h - 0.1 * torch.func.vmap(torch.func.grad(value))(h)

    train(c, Model(between, side=nn.Linear(8, 8)), square)


@loop("an inner step on fast weights, in the forward", trial="r_penalty")
def inner_step(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = m.side(h).square().mean()
            (slope,) = torch.autograd.grad(inner, m.side.weight, create_graph=True)
        return F.linear(h, m.side.weight - 0.1 * slope, m.side.bias)

    train(c, Model(between, side=nn.Linear(8, 8)), square)


@loop("a penalty on the gradients, in the forward", trial="r_penalty")
def penalty_inside(c: Course) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.net(x), y)
            grads = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
            return loss + 0.01 * sum(g.square().sum() for g in grads)

    train(c, Penalised(), lambda v, s: v, call=lambda m, s: m(c.batch(s), c.labels(s)))
