"""Loops whose model does more than compute: state, draws, collectives, what differs by rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from course import OFF, Course, loop
from outside import mlp, sgd, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

UNUSED = {"find_unused_parameters": True}


def square(y: Tensor, step: int) -> Tensor:
    return y.square().mean()


class Model(nn.Module):
    """Two layers, and what `between` does between them with the module and the features."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between = between
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, F.gelu(self.first(x))))


# --- the loss inside, and kinds of models ---


@loop("the loss inside the module")
def loss_inside(c: Course) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    train(c, WithLoss(), lambda loss, s: loss, call=lambda m, s: m(c.batch(s), c.labels(s)))


@loop("frozen parameters")
def frozen(c: Course) -> None:
    net = mlp()
    net[2].weight.requires_grad_(False)
    train(c, net, square)


@loop("tied weights")
def tied(c: Course) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mid = nn.Embedding(4, 8), nn.Linear(8, 8)
            self.out = nn.Linear(8, 4, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(F.gelu(self.mid(self.words(ids))))

    train(
        c,
        Tied(),
        lambda y, s: F.cross_entropy(y, c.labels(s + 1)),
        call=lambda m, s: m(c.labels(s)),
    )


@loop("one layer used several times")
def reused(c: Course) -> None:
    layer = nn.Linear(8, 8)
    train(c, Model(lambda m, h: layer(layer(h)), layer=layer), square)


@loop("a branch that some steps do not take")
def branch(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return m.side(h) if float(h.detach().sum()) > 0 else h

    train(c, Model(between, side=nn.Linear(8, 8)), square, ddp=UNUSED)


@loop("an LSTM")
def lstm(c: Course) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(8, 8, num_layers=2, dropout=0.1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x[:, None])[0])

    train(c, Recurrent(), square)


@loop("a transformer layer with SDPA and dropout", fault="layer.linear1")
def transformer(c: Course) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(1, 4, dtype=torch.bool)
            return self.out(self.layer(x[None], src_key_padding_mask=mask))

    train(c, Block(), square, ddp=UNUSED)


@loop("double precision and complex numbers")
def spectral(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(h) * torch.view_as_complex(m.filter)).real

    train(
        c, Model(between, filter=nn.Parameter(torch.ones(8, 2))).double(), square, call=_double(c)
    )


def _double(c: Course) -> Callable[[nn.Module, int], Any]:
    return lambda m, s: m(c.batch(s).double())


@loop("a sparse embedding")
def sparse(c: Course) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids))

    train(
        c,
        Sparse(),
        square,
        call=lambda m, s: m(c.labels(s)),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    )


@loop("weight and spectral normalisation", fault="last")
def normalised(c: Course) -> None:
    net = Model(lambda m, h: m.mid(h), mid=nn.Linear(8, 8))
    nn.utils.parametrizations.spectral_norm(net.mid)
    nn.utils.parametrizations.weight_norm(net.first)
    train(c, net, square)


@loop("checkpointing, not reentrant")
def checkpointed(c: Course) -> None:
    train(
        c, Model(lambda m, h: checkpoint(_part, m, h, use_reentrant=False), mid=mlp(8, 8)), square
    )


@loop("checkpointing, reentrant")
def reentrant(c: Course) -> None:
    train(c, Model(lambda m, h: checkpoint(_part, m, h, use_reentrant=True), mid=mlp(8, 8)), square)


def _part(m: Any, h: Tensor) -> Tensor:
    return F.dropout(m.mid(h), 0.2)


@loop("torch.compile of the model, eager backend")
def compiled(c: Course) -> None:
    net = mlp()
    torch._dynamo.reset()
    model = c.ddp(torch.compile(net, backend="eager"))
    update = sgd(net)
    c.guard(model, update)
    for step in c.steps():
        update.zero_grad()
        model(c.batch(step)).square().mean().backward()
        update.step()


# --- state that a forward changes ---


@loop("BatchNorm")
def batch_norm(c: Course) -> None:
    train(c, Model(lambda m, h: m.norm(h), norm=nn.BatchNorm1d(8)), square)


@loop("a codebook in buffers that the forward moves")
def codebook(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        nearest = torch.cdist(h.detach(), m.codes).argmin(1)
        with torch.no_grad():
            for code in nearest.unique():
                m.codes[code].lerp_(h.detach()[nearest == code].mean(0), 0.1)
        return h + (m.codes[nearest] - h).detach()

    codes = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    train(c, Model(between, codes=codes), square)


@loop("a counter and a schedule in attributes")
def counter(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        m.temperature = max(0.5, m.temperature * 0.99)
        return h / m.temperature

    net = Model(between, calls=0, temperature=1.0)
    train(c, net, square, after=lambda s: c.saw(net.calls, net.temperature))


@loop("a log of losses in a list")
def log_list(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.log.append(round(float(h.detach().sum()), 3))
        return h

    net = Model(between, log=[])
    train(c, net, square, after=lambda s: c.saw(net.log))


@loop("a memory bank in a list of tensors")
def bank(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.bank = [*m.bank, h.detach()][-3:]
        return h + 0.1 * torch.stack([b.mean(0) for b in m.bank]).mean(0)

    net = Model(between, bank=[])
    train(c, net, square, after=lambda s: c.saw(*net.bank))


@loop("a queue of negatives with a pointer (MoCo), in buffers")
def negatives(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        at = int(m.at)
        m.queue[at : at + 4] = h.detach()
        m.at[()] = (at + 4) % 12
        return h - 0.01 * m.queue.mean(0)

    queue = torch.zeros(12, 8)
    train(c, Model(between, queue=queue, at=torch.zeros((), dtype=torch.int64)), square)


@loop("outputs kept in an attribute for metrics")
def kept_outputs(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.seen = h
        return h

    net = Model(between, seen=None)
    train(c, net, square, after=lambda s: c.saw(net.seen))


@loop("a momentum encoder that the forward moves", OFF, "change them after optimizer.step()")
def momentum(c: Course) -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for old, new in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    old.lerp_(new, 0.1)
                goal = self.teacher(x)
            return self.student(x) - goal

    train(c, Twin(), square)


@loop("a parameter that the forward clamps", OFF, "change them after optimizer.step()")
def clamped(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.gain.mul_(0.999)
        return h * m.gain

    train(c, Model(between, gain=nn.Parameter(torch.ones(8))), square)


@loop("an auxiliary loss in an attribute", OFF)
def auxiliary(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        m.extra = h.abs().mean()
        return h

    net = Model(between, extra=None)
    train(c, net, lambda y, s: square(y, s) + 0.1 * net.extra)


# --- draws ---


@loop("dropout")
def dropout(c: Course) -> None:
    train(c, Model(lambda m, h: F.dropout(h, 0.3)), square)


@loop("layers left out by Python's random")
def layer_drop(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h if random.random() < 0.3 else m.side(h)

    train(c, Model(between, side=nn.Linear(8, 8)), square, ddp=UNUSED)


@loop("noise from NumPy")
def numpy_noise(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h + torch.from_numpy(np.random.randn(*h.shape).astype(np.float32))

    train(c, Model(between), square)


@loop("noise from a generator of the script's own", OFF, "depends on something besides")
def own_generator(c: Course) -> None:
    drawn = torch.Generator().manual_seed(c.rank)

    def between(m: Any, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(h.shape, generator=drawn)

    train(c, Model(between), square)


@loop(
    "noise from a generator in an attribute, seeded by rank",
    OFF,
    "not the same function",
    left_out=(0, 1, 2),
)
def attribute_generator(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn(h.shape, generator=m.drawn)

    train(c, Model(between, drawn=torch.Generator().manual_seed(c.rank)), square)


@loop(
    "noise from a NumPy generator in an attribute, seeded by rank",
    OFF,
    "not the same function",
    left_out=(0, 1, 2),
)
def attribute_numpy(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        return h + 0.1 * torch.from_numpy(m.drawn.standard_normal(h.shape).astype(np.float32))

    train(c, Model(between, drawn=np.random.default_rng(c.rank)), square)


# --- collectives ---


class Reduced(torch.autograd.Function):
    """A sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@loop("statistics over ranks in the forward (SyncBatchNorm)", OFF, "collective")
def sync_norm(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        mean = Reduced.apply(h.mean(0), c.group) / 3
        return h - mean

    train(c, Model(between), square)


@loop("a codebook reduced over ranks in the forward", OFF, "collective")
def reduced_codebook(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        mean = h.detach().mean(0)
        dist.all_reduce(mean, group=c.group)
        m.codes.lerp_(mean / 3, 0.1)
        return h - m.codes

    train(c, Model(between, codes=torch.zeros(8)), square)


@loop("a gather in the forward (CLIP)", OFF, "collective")
def gather_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        parts = [torch.empty_like(h) for _ in range(3)]
        dist.all_gather(parts, h.detach(), group=c.group)
        return h - torch.cat(parts).mean(0)

    train(c, Model(between), square)


@loop("a token count over ranks in the forward", OFF, "collective")
def count_inside(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        count = torch.tensor(float(len(h)))
        dist.all_reduce(count, group=c.group)
        return h * 12 / count

    train(c, Model(between), square)


@loop("a collective that only some steps need", OFF, "collective")
def sometimes(c: Course) -> None:
    calls = [0]

    def between(m: Any, h: Tensor) -> Tensor:
        if m.training and not torch.is_inference_mode_enabled():
            calls[0] += 1
            dist.all_reduce(torch.ones(1), group=c.group)
        return h

    train(c, Model(between), square)


# --- what differs from rank to rank ---


@loop("a scale that depends on the rank", OFF, "not the same function", left_out=(0, 1, 2))
def rank_scale(c: Course) -> None:
    train(c, Model(lambda m, h: h * (1 + 0.1 * c.rank)), square)


@loop("a constant read from each rank's own file", OFF, "not the same function", left_out=(0, 1, 2))
def rank_constant(c: Course) -> None:
    shift = torch.full((8,), float(c.rank) * 0.01)
    train(c, Model(lambda m, h: h + shift), square)


@loop(
    "a sum whose order differs by rank, as over a set of strings",
    OFF,
    "not the same function",
    left_out=(0, 1, 2),
)
def hash_order(c: Course) -> None:
    order = [(k + c.rank) % 5 for k in range(5)]

    def between(m: Any, h: Tensor) -> Tensor:
        parts = [m.parts[k](h) for k in order]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    train(c, Model(between, parts=nn.ModuleList(nn.Linear(8, 8) for _ in range(5))), square)


@loop("a scale that one rank reads from its own configuration", left_out=(2,))
def one_scale(c: Course) -> None:
    train(c, Model(lambda m, h: h * (1.5 if c.rank == 2 else 1.0)), square)


@loop("a sum whose order differs on one rank", left_out=(0,))
def one_order(c: Course) -> None:
    def between(m: Any, h: Tensor) -> Tensor:
        parts = [part(h) for part in m.parts]
        total = torch.zeros_like(h)
        for part in reversed(parts) if c.rank == 0 else parts:
            total = total + part
        return total

    train(c, Model(between, parts=nn.ModuleList(nn.Linear(8, 8) for _ in range(5))), square)


@loop("experts of each rank's own, ignored by DDP", OFF, "each rank has its own")
def experts(c: Course) -> None:
    net = Model(lambda m, h: h + m.expert(h), expert=nn.Linear(8, 8))
    nn.init.normal_(net.expert.weight, generator=torch.Generator().manual_seed(c.rank))
    names = ["expert.weight", "expert.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    train(c, net, square)


@loop("a branch that depends on the rank", left_out=(2,))
def rank_branch(c: Course) -> None:
    train(c, Model(lambda m, h: h.tanh() if c.rank == 2 else h.sigmoid()), square)
