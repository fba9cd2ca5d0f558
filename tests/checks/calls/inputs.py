"""Ways to call a module: inputs, several calls, several losses."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from calls.case import Case, D, loss_of, mlp, xs, ys


def simple(env):
    return mlp()


def fgsm(env, model, net, step):
    x, y = xs().requires_grad_(), ys()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    loss = F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), y)
    loss.backward()
    return loss


def fgsm_by_two_backwards(env, model, net, step):
    x, y = xs().requires_grad_(), ys()
    F.cross_entropy(model(x), y).backward()
    net.zero_grad()
    loss = F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y)
    loss.backward()
    return [loss, x.grad]


def with_upstream(env):
    env.up = nn.Linear(D, D)
    env.extra = list(env.up.parameters())
    return mlp()


def from_upstream(env, model, net, step):
    loss = F.cross_entropy(model(torch.tanh(env.up(xs()))), ys())
    loss.backward()
    return loss


def discriminator(env):
    env.generator = nn.Linear(4, D)
    env.extra = list(env.generator.parameters())
    return mlp(out=1)


def gan_discriminator(env, model, net, step):
    fake = env.generator(torch.randn(6, 4))
    loss = F.softplus(-model(xs())).mean() + F.softplus(model(fake.detach())).mean()
    loss.backward()
    return loss


def gan_generator(env, model, net, step):
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    loss = F.softplus(-model(env.generator(torch.randn(6, 4)))).mean()
    loss.backward()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    return loss


def gan_both(env, model, net, step):
    first = F.softplus(-model(env.generator(torch.randn(6, 4)))).mean()
    first.backward()
    env.optimizer.zero_grad()
    return [first, gan_discriminator(env, model, net, step)]


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.encode = mlp(), nn.Linear(D, D)

    def forward(self, x):
        if isinstance(x, dict):
            x["h"] = self.encode(x["x"])
            x["x"] = x["h"]
            return self.inner(x["x"])
        if isinstance(x, Batch):
            x.x = self.encode(x.x)
            return self.inner(x.x)
        x.add_(1).mul_(0.5)
        return self.inner(self.encode(x))


class Batch:
    """An input object, as PyTorch Geometric hands one in."""

    def __init__(self, x):
        self.x = x


class Unsaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x * 1)


def static_buffer(env, model, net, step):
    if step == 0:
        env.buffer = torch.empty(6, D)
    env.buffer.copy_(xs())
    loss = F.cross_entropy(model(env.buffer), ys())
    loss.backward()
    env.buffer.zero_()
    return loss


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = mlp(out=32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x):
        h = self.trunk(x)
        return self.a(h), self.b(h)


def two_backwards(env, model, net, step):
    with model.no_sync():
        a, b = model(xs())
        first, second = F.cross_entropy(a, ys()), b.square().mean()
        first.backward(retain_graph=True)
        second.backward()
    return [first, second]


def one_head(env, model, net, step):
    a, b = model(xs())
    loss = a.square().mean()
    loss.backward()
    return [loss, b]


def siamese(env, model, net, step):
    a, b = model(xs(6)), model(xs(4))
    with torch.no_grad():
        target = model(xs(6))
    loss = (a - target).square().mean() + b.square().mean()
    loss = loss + F.cosine_similarity(a[:4], b).mean()
    loss.backward()
    return [loss, target]


def fed_back(model):
    y = model(xs())
    return (y * model(torch.cat([y, y], 1))).mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Linear(D, 32), nn.Linear(32, 8)

    def encode(self, x):
        return torch.tanh(self.e(x))

    def forward(self, x):
        return self.h(self.encode(x))


def encode_only(model):
    return model.module.encode(xs()).square().mean()


def encode_beside(model):
    x = xs()
    return F.cross_entropy(model(x), ys()) + 0.1 * model.module.encode(x).square().mean()


def encode_later(env, model, net, step):
    x = xs()
    loss = F.cross_entropy(model(x), ys())
    if step == 1:
        loss = loss + 0.1 * net.encode(x).square().mean()
    loss.backward()
    return loss


def accumulate(env, model, net, step):
    with model.no_sync():
        first = F.cross_entropy(model(xs()), ys())
        first.backward()
    second = F.cross_entropy(model(xs()), ys())
    second.backward()
    return [first, second]


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x, boom=False):
        h = self.inner(x)
        if boom:
            raise MemoryError("out of memory")
        return h


def retry(env, model, net, step):
    with contextlib.suppress(MemoryError):
        net(xs(), boom=True)
    loss = F.cross_entropy(model(xs(4)), ys(4))
    loss.backward()
    return loss


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(drop=0.0)

    def forward(self, x, flip=True):
        return self.inner(x) + (self(x.flip(1), flip=False) if flip else 0)


def regularised(factor):
    def loop(env, model, net, step):
        squares = sum(p.square().sum() for p in net.parameters())
        loss = F.cross_entropy(model(xs()), ys()) + factor(step) * squares
        loss.backward()
        return loss

    return loop


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Linear(D, 32), nn.Linear(32, 8)

    def forward(self, x):
        h = torch.tanh(self.e(x))
        self.aux = h.square().mean()
        return self.h(h)


def auxiliary(factor):
    def loop(env, model, net, step):
        loss = F.cross_entropy(model(xs()), ys()) + factor(step) * net.aux
        loss.backward()
        return loss

    return loop


def penalty(when):
    def loop(env, model, net, step):
        x = xs().requires_grad_()
        out = model(x)
        loss = out.mean()
        if when(step):
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + 10 * (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    return loop


def grad_norm(env, model, net, step):
    a, b = model(xs())
    first, second = a.square().mean(), b.square().mean()
    weight = net.trunk[4].weight
    one = torch.autograd.grad(first, weight, retain_graph=True)[0].norm()
    two = torch.autograd.grad(second, weight, retain_graph=True)[0].norm()
    loss = first + (one / two) * second
    loss.backward()
    return loss


def grad_after(env, model, net, step):
    a, b = model(xs())
    first, second = a.square().mean(), b.square().mean()
    (first + second).backward(retain_graph=True)
    return [first, torch.autograd.grad(first, net.trunk[4].weight)[0].norm()]


def maml(env, model, net, step):
    named = dict(net.named_parameters())
    loss = F.cross_entropy(torch.func.functional_call(net, named, (xs(),)), ys())
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(named.items(), gradients, strict=True)}
    loss = F.cross_entropy(torch.func.functional_call(net, fast, (xs(),)), ys())
    loss.backward()
    return loss


def per_sample(env, model, net, step):
    x, y = xs(), ys()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    named = {n: p.detach() for n, p in net.named_parameters()}

    def one(named, x, y):
        return F.cross_entropy(torch.func.functional_call(net, named, (x[None],)), y[None])

    gradients = torch.vmap(torch.func.grad(one), (None, 0, 0))(named, x, y)
    return [loss, torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).sum()]


def forward_mode(env, model, net, step):
    x = xs()
    _, tangent = torch.func.jvp(lambda x: net(x), (x,), (torch.ones_like(x),))
    loss = F.cross_entropy(model(x), ys()) + tangent.detach().mean()
    loss.backward()
    return loss


def sam(env, model, net, step):
    x, y = xs(), ys()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in net.parameters()]
        for parameter, move in zip(net.parameters(), moves, strict=True):
            parameter.add_(move)
    env.optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter, move in zip(net.parameters(), moves, strict=True):
            parameter.sub_(move)
    return loss


def classify(model):
    return F.cross_entropy(model(xs()), ys())


UNUSED = {"find_unused_parameters": True}
PARAMETER = "outside the call reads the parameter"
INSIDE = "inside it"
CASES = (
    Case("adversarial, autograd.grad on the input", simple, fgsm),
    Case("adversarial, two backwards a step", simple, fgsm_by_two_backwards),
    Case("input from a trainable module outside DDP", with_upstream, from_upstream),
    Case("GAN, real and fake in one backward", discriminator, gan_discriminator),
    Case("GAN, generator through a frozen discriminator", discriminator, gan_generator),
    Case("GAN, both in turn", discriminator, gan_both),
    Case("forward writes into its input", lambda e: WritesInput(), loss_of(classify), ddp=UNUSED),
    Case(
        "forward writes into its input dict",
        lambda e: WritesInput(),
        loss_of(lambda m: F.cross_entropy(m({"x": xs()}), ys())),
    ),
    Case(
        "forward writes into its input object",
        lambda e: WritesInput(),
        loss_of(lambda m: F.cross_entropy(m(Batch(xs())), ys())),
    ),
    Case("static input buffer overwritten after", lambda e: Unsaved(), static_buffer),
    Case("two losses, two backwards, retain_graph", lambda e: TwoHeads(), two_backwards),
    Case("backward on one of two outputs", lambda e: TwoHeads(), one_head, ddp=UNUSED),
    Case(
        "zero times an unused output",
        lambda e: TwoHeads(),
        loss_of(lambda m: (lambda o: o[0].square().mean() + 0.0 * o[1].sum())(m(xs()))),
    ),
    Case("siamese, two sizes, one call under no_grad", simple, siamese),
    Case("output fed back as input", simple, loss_of(fed_back)),
    Case("only ddp.module.encode", lambda e: Encoder(), loss_of(encode_only)),
    Case(
        "ddp and ddp.module.encode", lambda e: Encoder(), loss_of(encode_beside), reason=PARAMETER
    ),
    Case(
        "ddp.module.encode later",
        lambda e: Encoder(),
        encode_later,
        reason=PARAMETER,
        sometimes=True,
    ),
    Case(
        "ddp and ddp.module",
        lambda e: Encoder(),
        loss_of(lambda m: classify(m) + 0.1 * m.module(xs(3)).square().mean()),
    ),
    Case("accumulation under no_sync", simple, accumulate),
    Case("forward raises and is tried again", lambda e: Raises(), retry),
    Case("module calls itself", lambda e: CallsItself(), loss_of(classify)),
    Case("L2 on the parameters", simple, regularised(lambda s: 1e-2), reason=PARAMETER),
    Case(
        "L2 with a factor of 0 at first", simple, regularised(lambda s: s * 1e-2), reason=PARAMETER
    ),
    Case(
        "auxiliary loss in an attribute",
        lambda e: Auxiliary(),
        auxiliary(lambda s: 0.1),
        reason=INSIDE,
    ),
    Case(
        "auxiliary loss with a factor of 0 at first",
        lambda e: Auxiliary(),
        auxiliary(lambda s: 0.1 * s),
        reason=INSIDE,
    ),
    Case("gradient penalty", simple, penalty(lambda s: True), reason="outside the call reads"),
    Case(
        "gradient penalty now and then",
        simple,
        penalty(lambda s: s == 1),
        reason="outside the call reads",
        sometimes=True,
    ),
    Case("autograd.grad on a weight before the backward", lambda e: TwoHeads(), grad_norm),
    Case("autograd.grad on a weight after the backward", lambda e: TwoHeads(), grad_after),
    Case("MAML", lambda e: mlp(drop=0.0), maml, reason="two calls share"),
    Case("gradients per sample beside", lambda e: mlp(drop=0.0), per_sample),
    Case("forward mode through the module", lambda e: mlp(drop=0.0), forward_mode),
    Case("SAM", simple, sam),
)
