"""Random graphs: hooks on nodes change no bit and no stride of what a training computes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from calls.case import bits
from torch import nn

from sdcwatch.checks.capture import CallCapture

GRAPHS = 500
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def changed(pick: random.Random, t: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(t.shape[1], generator=torch.Generator().manual_seed(pick.randrange(9)))
    ways = (
        lambda: t * pick.uniform(0.5, 2),
        lambda: t.exp() * 0.1,
        lambda: t.tanh(),
        lambda: t.t().contiguous().t() * 1.3,
        lambda: F.layer_norm(t, t.shape[-1:]),
        lambda: t.softmax(-1),
        lambda: t[:, order],
        lambda: t + t.mean(),
        lambda: t.relu() + 0.1 * t,
        lambda: t.expand(2, *t.shape).mean(0),
        lambda: torch.cat(t.chunk(2, 1)[::-1], 1),
        lambda: t.reshape(-1).view(t.shape).square(),
    )
    return pick.choice(ways)()


class RandomGraph(nn.Module):
    """Some random operations on inputs and weights, some of whose results are returned."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.seed = seed
        self.w = nn.ParameterList([torch.randn(8, 8, dtype=dtype) for _ in range(3)])

    def forward(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        pick = random.Random(self.seed)
        pool, inner = list(xs), []
        for _ in range(pick.randrange(4, 12)):
            a, way = pick.choice(pool + inner[-3:]), pick.randrange(4)
            if way == 0:
                t = a @ pick.choice(list(self.w))
            elif way == 1:
                t = a * pick.choice(pool)
            else:
                t = a + pick.choice(pool + inner) if way == 2 else changed(pick, a)
            inner.append(t)
            pool.append(t)
        outs = pick.sample(inner, min(len(inner), pick.randrange(2, 6)))
        return [*outs, inner[-1].square().mean()] if pick.random() < 0.5 else outs


def used(seed: int, outs: list[torch.Tensor]) -> torch.Tensor:
    """A random loss on what was returned, in-place writes included."""
    pick, pool, loss = random.Random(seed + 1), list(outs), torch.zeros(())
    for _ in range(pick.randrange(1, 7)):
        a = pick.choice(pool)
        if a.dim() != 2:
            loss = loss + pick.uniform(0.1, 2) * a
            continue
        b = changed(pick, a)
        pool.append(b)
        if pick.random() < 0.2:
            b = b.clone()
            b[:, :3] *= 2.0
        weights = torch.arange(8.0).to(b)
        ends = (b.mean, lambda b=b: b.square().sum(), lambda b=b, w=weights: (b.sum(0) * w).sum())
        loss = loss + pick.choice(ends)()
    return loss


def gradients(seed: int, *, capture: bool, audit: bool = False) -> list:
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 3]
    module = RandomGraph(seed, dtype)
    xs = [torch.randn(6, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    watcher = None
    if capture:
        named = list(module.named_parameters())
        watcher = CallCapture(module, named, torch.device("cpu"), audit=lambda: audit)
        watcher.attach()
    loss = used(seed, module(*xs))
    if not loss.requires_grad:
        return []
    leaves = [*xs, *module.parameters()]
    if seed % 2:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    else:
        loss.backward()
        found = [leaf.grad for leaf in leaves]
    if watcher is not None:
        assert watcher.failure == ""
        watcher.detach()
    return [None if g is None else (g.stride(), bits(g)) for g in found]


@pytest.mark.parametrize("audit", [False, True], ids=["plain", "audit"])
@pytest.mark.parametrize("begin", range(0, GRAPHS, 100))
def test_random_graphs_compute_the_same_bits_and_strides(begin, audit):
    for seed in range(begin, begin + 100):
        expected = gradients(seed, capture=False)
        assert gradients(seed, capture=True, audit=audit) == expected, seed
