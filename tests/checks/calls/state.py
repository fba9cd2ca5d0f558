"""Ways to call a module: state, randomness, checkpoints, autocast, norms, dtypes, layouts."""

from __future__ import annotations

import random
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from calls.case import Case, D, loss_of, mlp, xs, ys

ce = F.cross_entropy


def classify(model):
    return ce(model(xs()), ys())


PLAIN = loss_of(classify)
UNSYNCED = {"broadcast_buffers": False}
UNUSED = {"find_unused_parameters": True}


class Function(nn.Module):
    """A trunk t, a head o, and a forward made of them."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.t, self.o, self.function = mlp(out=32), nn.Linear(32, 8), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.function(self, *args)


def of(function, **attributes):
    return lambda env: Function(function, **attributes)


def with_memory(s, x):
    h = s.t(x)
    memory = torch.zeros_like(h) if s.memory is None else s.memory
    s.memory = h.detach()
    return s.o(h + memory)


def with_list(s, x):
    h = s.t(x)
    s.seen.append(h.detach().mean(0))
    return s.o(h + sum(s.seen) / len(s.seen))


def counted(s, x):
    s.count += 1
    return s.o(s.t(x)) / (1 + 0.1 * s.count)


def scaled_by_object(s, x):
    return s.o(s.t(x)) * s.config.alpha


class Config:
    def __init__(self):
        self.alpha = 1.0


def with_cache(s, x):
    if x.shape[0] not in s.table:
        s.table[x.shape[0]] = x.mean(1, keepdim=True).detach()
    return s.o(s.t(x + s.table[x.shape[0]]))


class Domains(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.domain = mlp(out=32), 0
        self.heads = nn.ModuleList([nn.Linear(32, 8) for _ in range(3)])

    def forward(self, x):
        return self.heads[self.domain](self.t(x))


def set_before(name, value):
    def loop(env, model, net, step):
        holder, _, last = name.rpartition(".")
        setattr(getattr(net, holder) if holder else net, last, value(step))
        return PLAIN(env, model, net, step)

    return loop


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.o = mlp(out=32), nn.Linear(32, 8)
        self.register_buffer("k", torch.zeros(1, 32))

    def forward(self, x):
        h = self.t(x)
        self.k = torch.cat([self.k, h.detach()])[-20:]
        return self.o(h + self.k.mean(0))


class GraphInState(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.o, self.h = nn.GRUCell(D, 32), nn.Linear(32, 8), None

    def forward(self, x):
        self.h = self.c(x, torch.zeros(x.shape[0], 32) if self.h is None else self.h)
        return self.o(self.h)


def graph_in_state(env, model, net, step):
    net.h = None
    loss = sum(classify(model) for _ in range(3))
    loss.backward()
    return loss


def host_random(s, x):
    return s.o(s.t(x) * (random.random() + float(np.random.rand())))


def own_torch(s, x):
    return s.o(s.t(x + 0.1 * torch.randn(x.shape, generator=s.generator)))


def own_numpy(s, x):
    return s.o(s.t(x + 0.1 * float(s.generator.random())))


def checkpointed(reentrant, keep):
    def function(s, x):
        x = x.requires_grad_() if reentrant else x
        return s.o(checkpoint(s.t, x, use_reentrant=reentrant, preserve_rng_state=keep))

    return function


def draws_between(env, model, net, step):
    z = model(xs())
    torch.randn(3)
    loss = ce(z, ys())
    loss.backward()
    return loss


def noisy_gradient(s, x):
    h = s.t(x)
    h.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
    return s.o(h)


def region(cache=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)


def one_region(cache):
    def loop(env, model, net, step):
        with region(cache):
            loss = classify(model) + classify(model)
        loss.backward()
        return loss

    return loop


def two_regions(env, model, net, step):
    with region():
        loss = classify(model)
    with region():
        loss = loss + classify(model)
    loss.backward()
    return loss


def scaled_outside(env, model, net, step):
    with region():
        z = model(xs())
    loss = ce(z.float(), ys())
    (loss * 128).backward()
    return loss


def backward_in_region(env, model, net, step):
    with region():
        with model.no_sync():
            first = classify(model)
            first.backward()
        second = classify(model)
        second.backward()
    return [first, second]


def region_over_steps(env, model, net, step):
    if step == 0:
        env.region = region()
        env.region.__enter__()
    loss = classify(model)
    loss.backward()
    if step == 1:
        env.region.__exit__(None, None, None)
    return loss


def region_inside(s, x):
    with region():
        h = s.t(x)
    return s.o(h.float())


class Normed(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        self.c, self.b, self.o = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8)
        self.p = nn.BatchNorm1d(8) if last else nn.Identity()

    def forward(self, x):
        return self.p(self.o(F.relu(self.b(self.c(x))).mean((2, 3))))


def images():
    return torch.randn(6, 3, 9, 9)


def last(images_):
    return images_.contiguous(memory_format=torch.channels_last)


def normed_first(env):
    return nn.Sequential(nn.BatchNorm1d(D), mlp())


def of_input(make):
    return loss_of(lambda model: ce(model(make()), ys()))


def of_images(model):
    return ce(model(images()), ys())


def wrapped(wrap, out=8):
    return lambda env: nn.Sequential(wrap(nn.Linear(D, 32)), nn.ReLU(), nn.Linear(32, out))


def cached(env, model, net, step):
    with parametrize.cached():
        loss = classify(model) + classify(model)
        loss.backward()
    return loss


def tokens():
    return torch.randint(0, 30, (6,))


def embedded(**options):
    return lambda env: nn.Sequential(nn.Embedding(30, D, **options), mlp())


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.b, self.t = nn.EmbeddingBag(30, D), mlp()

    def forward(self, values, offsets):
        return self.t(self.b(values, offsets))


def attention(same):
    def loop(env, model, net, step):
        x = torch.randn(5, 3, 16)
        key = x if same else torch.randn(5, 3, 16)
        out, _ = model(x, key, key)
        loss = out.square().mean()
        loss.backward()
        return loss

    return loop


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.r, self.e = nn.Linear(D, 3), nn.ModuleList([mlp() for _ in range(3)])

    def forward(self, x):
        p = self.r(x + 0.1 * torch.randn_like(x)).softmax(-1)
        k, y = p.argmax(-1), torch.zeros(x.shape[0], 8)
        for i, expert in enumerate(self.e):
            if (k == i).any():
                part = expert(x[k == i]) * p[k == i, i : i + 1]
                y = y.index_add(0, (k == i).nonzero()[:, 0], part)
        return y, 3 * (p.mean(0) * torch.bincount(k, minlength=3) / len(k)).sum()


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, positions):
        positions.requires_grad_(True)
        energy = self.t(positions).sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -force


def forces(model):
    energy, force = model(torch.randn(6, 3))
    return energy.square() * 0.1 + force.square().mean()


def early_exit(s, x):
    return s.o(s.t(x)) if float(x.detach().mean()) > 0 else s.o(s.t(x).detach())


def with_view(model):
    x = xs()
    return ce(model(x, x[:, :4]), ys())


def zeroes_view(s, x, view):
    view.zero_()
    return s.o(s.t(x))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -2 * g


def anomaly(env, model, net, step):
    with torch.autograd.detect_anomaly(check_nan=True):
        return PLAIN(env, model, net, step)


def deterministic(env, model, net, step):
    torch.use_deterministic_algorithms(True)
    try:
        return PLAIN(env, model, net, step)
    finally:
        torch.use_deterministic_algorithms(False)


def saved_as(pack, unpack):
    def loop(env, model, net, step):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            z = model(xs())
        loss = ce(z, ys())
        loss.backward()
        return loss

    return loop


def eval_between(env, model, net, step):
    z = model(xs())
    net.eval()
    loss = ce(z, ys())
    loss.backward()
    net.train()
    return loss


def two_through_one_graph(env, model, net, step):
    with model.no_sync():
        z = model(xs())
        first, second = ce(z, ys()), z.square().mean()
        first.backward(retain_graph=True)
        second.backward()
    third = classify(model)
    third.backward()
    return [first, second, third]


def unfreeze(env, model, net, step):
    for parameter in net[0].parameters():
        parameter.requires_grad_(step > 0)
    return PLAIN(env, model, net, step)


def in_threads(env, model, net, step):
    inputs, outputs = [xs(), xs()], [None, None]

    def go(place):
        outputs[place] = model(inputs[place])

    for place in (0, 1):
        thread = threading.Thread(target=go, args=(place,))
        thread.start()
        thread.join()
    loss = sum(ce(out, ys()) for out in outputs)
    loss.backward()
    return loss


def jagged():
    parts = [torch.randn(k, D) for k in (2, 4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def complex_loss(model):
    return model(torch.randn(6, D, dtype=torch.complex64)).abs().square().mean()


STATE = (
    Case("memory in an attribute", of(with_memory, memory=None), PLAIN),
    Case("memory in a list", lambda e: Function(with_list, seen=[]), PLAIN),
    Case("a counter that changes the result", of(counted, count=0), PLAIN),
    Case("a cache filled by the first batch", lambda e: Function(with_cache, table={}), PLAIN),
    Case(
        "an object in an attribute, set before the call",
        lambda e: Function(scaled_by_object, config=Config()),
        set_before("config.alpha", lambda step: 1.0 + step),
    ),
    Case(
        "a domain set before the call", lambda e: Domains(), set_before("domain", int), ddp=UNUSED
    ),
    Case("a buffer that grows", lambda e: Growing(), PLAIN, ddp=UNSYNCED),
    Case(
        "a state with its graph",
        lambda e: GraphInState(),
        graph_in_state,
        reason="goes on in the state of the module",
    ),
    Case("random and numpy in a forward", of(host_random), PLAIN),
    Case(
        "a generator of torch's own",
        lambda e: Function(own_torch, generator=torch.Generator()),
        PLAIN,
    ),
    Case(
        "a generator of NumPy's own",
        lambda e: Function(own_numpy, generator=np.random.default_rng(1)),
        PLAIN,
    ),
    *(
        Case(f"checkpoint reentrant={r} preserve_rng={k}{text}", of(checkpointed(r, k)), loop)
        for r in (False, True)
        for k in (False, True)
        for text, loop in (("", PLAIN), (", draws before the backward", draws_between))
    ),
    Case("gradient noise from a hook inside", of(noisy_gradient), draws_between),
    Case("autocast, loss outside", lambda e: mlp(), scaled_outside),
    Case("two calls in one region", lambda e: mlp(drop=0.0), one_region(cache=True)),
    Case("two calls in two regions", lambda e: mlp(drop=0.0), two_regions),
    Case("backward in the region", lambda e: mlp(drop=0.0), backward_in_region),
    Case(
        "one region over steps",
        lambda e: mlp(drop=0.0),
        region_over_steps,
        reason="older than the weights",
        sometimes=True,
    ),
    Case("autocast inside", of(region_inside), PLAIN),
    Case("autocast without a cache", lambda e: mlp(drop=0.0), one_region(cache=False)),
)
LAYERS = (
    Case("BatchNorm", lambda e: Normed(), loss_of(of_images)),
    Case("BatchNorm, channels last", lambda e: Normed(), of_input(lambda: last(images()))),
    Case(
        "BatchNorm, model channels last",
        lambda e: Normed().to(memory_format=torch.channels_last),
        of_input(lambda: last(images())),
    ),
    Case("expanded gradient", lambda e: Normed(True), loss_of(lambda m: m(images()).mean())),
    Case(
        "gradient expanded along rows",
        lambda e: Normed(True),
        loss_of(lambda m: (m(images()).sum(0) * torch.arange(8.0)).sum()),
    ),
    Case("expanded input", normed_first, of_input(lambda: xs(1).expand(6, D))),
    Case("sliced input", normed_first, of_input(lambda: torch.randn(6, D + 5)[:, 2 : 2 + D])),
    Case("narrow slice", normed_first, of_input(lambda: torch.randn(6, 9000)[:, 7 : 7 + D])),
    Case("transposed input", normed_first, of_input(lambda: torch.randn(D, 6).T)),
    Case(
        "two calls through BatchNorm",
        lambda e: Normed(),
        loss_of(lambda m: of_images(m) + of_images(m)),
        ddp=UNSYNCED,
    ),
    Case(
        "cumulative BatchNorm",
        lambda e: nn.Sequential(nn.BatchNorm1d(D, momentum=None), mlp()),
        PLAIN,
    ),
    Case("weight_norm", wrapped(parametrizations.weight_norm), PLAIN),
    Case("spectral_norm", wrapped(parametrizations.spectral_norm), PLAIN),
    Case("spectral_norm, old", wrapped(nn.utils.spectral_norm), PLAIN),
    Case("weight_norm, old", wrapped(nn.utils.weight_norm), PLAIN),
    Case(
        "spectral_norm, two calls",
        wrapped(parametrizations.spectral_norm),
        loss_of(lambda m: classify(m) + classify(m)),
        ddp=UNSYNCED,
    ),
    Case("parametrize.cached", wrapped(parametrizations.weight_norm), cached, reason="calls share"),
    Case("sparse embedding", embedded(sparse=True), of_input(tokens)),
    Case(
        "embedding that writes its weights",
        embedded(max_norm=1.0),
        of_input(tokens),
        reason="the weights here are not those of the call",
    ),
    Case(
        "EmbeddingBag",
        lambda e: Bag(),
        loss_of(
            lambda m: ce(m(torch.randint(0, 30, (20,)), torch.tensor([0, 3, 5, 9, 12, 17])), ys())
        ),
    ),
    Case("attention, q is k", lambda e: nn.MultiheadAttention(16, 4), attention(True)),
    Case("attention, q and k", lambda e: nn.MultiheadAttention(16, 4), attention(False)),
    Case(
        "transformer with dropout",
        lambda e: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        loss_of(lambda m: m(torch.randn(3, 5, 16)).square().mean()),
    ),
    Case(
        "mixture of experts",
        lambda e: Experts(),
        loss_of(lambda m: (lambda o: ce(o[0], ys()) + 0.1 * o[1])(m(xs()))),
        ddp=UNUSED,
    ),
    Case("early exit on data", of(early_exit), PLAIN, ddp=UNUSED),
    Case("energy and forces", lambda e: Forces(), loss_of(forces)),
)
TYPES = (
    Case(
        "complex",
        lambda e: nn.Sequential(nn.Linear(D, 8, dtype=torch.complex64)),
        loss_of(complex_loss),
    ),
    Case("float64", lambda e: mlp().double(), of_input(lambda: xs().double())),
    Case("bfloat16", lambda e: mlp().bfloat16(), of_input(lambda: xs().bfloat16())),
    Case(
        "float16",
        lambda e: mlp().half(),
        loss_of(lambda m: ce(m(xs().half()).float(), ys())),
    ),
    Case(
        "float8 input",
        of(lambda s, x: s.o(s.t(x.float()))),
        of_input(lambda: xs().to(torch.float8_e4m3fn)),
    ),
    Case(
        "sparse COO input",
        of(lambda s, a, x: s.o(torch.sparse.mm(a, s.t(x)))),
        loss_of(lambda m: ce(m(torch.eye(6).to_sparse() * 2, xs()), ys())),
    ),
    Case(
        "sparse CSR input",
        of(lambda s, a, x: s.o(a @ s.t(x))),
        loss_of(lambda m: ce(m((torch.rand(6, 6) > 0.5).float().to_sparse_csr(), xs()), ys())),
    ),
    Case(
        "jagged input",
        of(lambda s, x: s.o(torch.stack([t.mean(0) for t in s.t(x).unbind()]))),
        loss_of(lambda m: ce(m(jagged()), ys(3))),
    ),
    Case("a view as second input, written", of(zeroes_view), loss_of(with_view)),
)
MODES = (
    Case(
        "custom function in the loss",
        lambda e: mlp(),
        loss_of(lambda m: ce(Reversal.apply(m(xs())), ys())),
    ),
    Case("anomaly mode", lambda e: mlp(), anomaly),
    Case("deterministic algorithms", lambda e: mlp(), deterministic),
    Case(
        "saved tensors moved, exactly",
        lambda e: mlp(),
        saved_as(lambda t: t.clone(), lambda t: t),
    ),
    Case(
        "saved tensors cast",
        lambda e: mlp(),
        saved_as(lambda t: (t.bfloat16(), t.dtype), lambda t: t[0].to(t[1])),
        reason="differs",
    ),
    Case("eval between forward and backward", lambda e: mlp(), eval_between),
    *(
        Case(f"DDP {options}", lambda e: mlp(), PLAIN, ddp=options)
        for options in (
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
            {"static_graph": True, "gradient_as_bucket_view": True},
        )
    ),
    Case("two backwards through one graph", normed_first, two_through_one_graph, ddp=UNSYNCED),
    Case("unfreezing", lambda e: mlp(), unfreeze, ddp=UNUSED),
    Case("calls from two threads", lambda e: mlp(drop=0.0), in_threads),
)
CASES = (*STATE, *LAYERS, *TYPES, *MODES)
