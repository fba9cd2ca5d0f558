"""Ways to call a module: copies of it, other threads, modes, and what only another rank can see."""

from __future__ import annotations

import copy
import io
import random
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from calls.case import Case, D, loss_of, mlp, xs, ys

ce = F.cross_entropy


def classify(model):
    return ce(model(xs()), ys())


PLAIN = loss_of(classify)


def two_roots(env, model, net, step):
    a, b = model(xs()), model(xs())
    torch.autograd.backward([ce(a, ys()), b.square().mean()])
    return [a, b]


def given_gradient(env, model, net, step):
    z = model(xs())
    z.backward(torch.randn_like(z))
    return z


def in_a_thread(env, model, net, step):
    loss = classify(model)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


def counting_flops(env, model, net, step):
    with FlopCounterMode(display=False) as flops:
        loss = PLAIN(env, model, net, step)
    return [loss, flops.get_total_flops()]


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def counting_operations(env, model, net, step):
    with Counter() as counter:
        loss = PLAIN(env, model, net, step)
    return [loss, counter.count]


def three_before_a_step(env, model, net, step):
    for _ in range(3):
        env.optimizer.zero_grad()
        loss = PLAIN(env, model, net, step)
    return loss


def nan_gradient(model):
    return (model(xs()) * torch.where(torch.arange(8) == 0, float("nan"), 1.0)).sum()


def collected(env, model, net, step):
    if step == 0:
        net[2].register_forward_hook(lambda m, a, out: setattr(env, "features", out))
    loss = ce(model(xs()), ys()) + 0.1 * env.features.square().mean()
    loss.backward()
    return loss


def teacher(trainable, with_grad):
    def loop(env, model, net, step):
        if step == 0:
            env.teacher = copy.deepcopy(net).requires_grad_(trainable)
        x = xs()
        with torch.set_grad_enabled(with_grad):
            target = env.teacher(x)
        loss = ce(model(x), ys()) + F.mse_loss(model(x), target)
        loss.backward()
        return loss

    return loop


def saved(env, model, net, step):
    loss = PLAIN(env, model, net, step)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return [loss, again(xs())]


def average(env, model, net, step):
    if step == 0:
        env.average = torch.optim.swa_utils.AveragedModel(net)
    loss = PLAIN(env, model, net, step)
    env.average.update_parameters(net)
    return [loss, env.average(xs())]


def noise_until(after_backward):
    def loop(env, model, net, step):
        before = [p.detach().clone() for p in net.parameters()]
        for parameter in net.parameters():
            parameter.data.add_(0.01 * torch.randn_like(parameter))
        loss = classify(model)
        if after_backward:
            loss.backward()
        for parameter, value in zip(net.parameters(), before, strict=True):
            parameter.data.copy_(value)
        if not after_backward:
            loss.backward()
        return loss

    return loop


def images(model):
    return ce(model(torch.randn(6, 3, 17, 17)).mean((2, 3)), ys())


def without_mkldnn(env, model, net, step):
    with torch.backends.mkldnn.flags(enabled=False):
        loss = images(model)
    loss.backward()
    return loss


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.q(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def one_backend(env, model, net, step):
    with sdpa_kernel(SDPBackend.MATH):
        z = model(torch.randn(3, 40, D))
    loss = z.square().mean()
    loss.backward()
    return loss


def other_precision(env, model, net, step):
    torch.set_default_dtype(torch.float64)
    try:
        z = model(torch.randn(6, D, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    loss = ce(z, ys())
    loss.backward()
    return loss


class Unpicklable:
    """An input that cannot travel."""

    def __init__(self, x):
        self.x, self.function = x, lambda t: t


class TakesObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, holder):
        return self.inner(holder.x)


class Sometimes(nn.Module):
    """Draws from Python's generator as soon as it is told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.draws = mlp(), False

    def forward(self, x):
        return self.inner(x) * (random.random() if self.draws else 1.0)


def draws_later(env, model, net, step):
    net.draws = step > 0
    return PLAIN(env, model, net, step)


def loss_in_the_region(env, model, net, step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = classify(model)
    (loss * 128).backward()
    return loss


def curvature(env, model, net, step):
    """Hutchinson's estimate, as AdaHessian and Sophia-H make it."""
    parameters = list(net.parameters())
    with model.no_sync():
        loss = classify(model)
        loss.backward(create_graph=True)
    gradients = [p.grad for p in parameters]
    signs = [torch.randn_like(g).sign() for g in gradients]
    products = torch.autograd.grad(gradients, parameters, signs, allow_unused=True)
    for parameter in parameters:
        parameter.grad = parameter.grad.detach()
    return [loss.detach(), sum(p.abs().sum() for p in products if p is not None).detach()]


def hooked_nodes(env, model, net, step):
    """A hook of the user's behind a node of the graph, one over two outputs, one taken off."""
    seen = []
    one, other = model(xs()), model(xs())
    one.grad_fn.register_hook(lambda gi, go: seen.append(len(gi)))
    torch.autograd.graph.register_multi_grad_hook((one, other), lambda g: seen.append(len(g)))
    other.register_hook(lambda g: g * 3).remove()
    loss = ce(one, ys()) + ce(other, ys())
    loss.backward()
    return [loss, *seen]


def hooked_before_a_node(env, model, net, step):
    z = model(xs())
    z.grad_fn.register_prehook(lambda g: (g[0] * 2,))
    loss = ce(z, ys())
    loss.backward()
    return loss


def hooked_everywhere(env, model, net, step):
    """Hooks on every module of the process, and one behind the backward of the model."""
    called = []
    everywhere = nn.modules.module
    handles = [
        everywhere.register_module_forward_pre_hook(lambda m, a: called.append(type(m).__name__)),
        everywhere.register_module_forward_hook(lambda m, a, out: out * 1.5),
        net.register_full_backward_hook(lambda m, gi, go: None),
    ]
    loss = classify(model)
    names = tuple(called)
    loss.backward()
    for handle in handles:
        handle.remove()
    return [loss, names]


CASES = (
    Case("two roots", lambda e: mlp(), two_roots),
    Case("a gradient given to backward", lambda e: mlp(), given_gradient),
    Case("backward in another thread", lambda e: mlp(), in_a_thread),
    Case(
        "checkpoint around DDP",
        lambda e: mlp(),
        loss_of(lambda m: ce(checkpoint(m, xs(), use_reentrant=False), ys())),
    ),
    Case("a scripted module", lambda e: torch.jit.script(mlp()), PLAIN, refused=True),
    Case("a counter of FLOPs around the step", lambda e: mlp(), counting_flops),
    Case("a counter of operations around the step", lambda e: mlp(), counting_operations),
    Case("three backwards before an update", lambda e: mlp(), three_before_a_step),
    Case("NaN in the gradient", lambda e: mlp(), loss_of(nan_gradient)),
    Case(
        "an empty batch",
        lambda e: nn.Sequential(nn.Linear(D, 8)),
        loss_of(lambda m: m(xs(0)).square().sum()),
    ),
    Case(
        "features collected by a hook", lambda e: mlp(), collected, reason="outside the call reads"
    ),
    Case("a copy as teacher, under no_grad", lambda e: mlp(), teacher(False, False)),
    Case("a copy as teacher, with gradients on", lambda e: mlp(), teacher(False, True)),
    Case("a copy as peer", lambda e: mlp(), teacher(True, True)),
    Case("the whole module saved and loaded", lambda e: mlp(), saved),
    Case("an averaged model", lambda e: mlp(), average),
    Case("noise on the weights around the step", lambda e: mlp(), noise_until(True)),
    Case(
        "noise on the weights around the forward",
        lambda e: mlp(),
        noise_until(False),
        reason="the weights here are not those of the call",
    ),
    Case(
        "mkldnn off around the forward",
        lambda e: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        without_mkldnn,
        reason="mkldnn was",
    ),
    Case(
        "one attention backend around the forward",
        lambda e: Attention(),
        one_backend,
        reason="sdpa was",
    ),
    Case("draws from the second step on", lambda e: Sometimes(), draws_later),
    Case("autocast, loss in the region", lambda e: mlp(), loss_in_the_region),
    Case(
        "an orthogonal weight",
        lambda e: nn.Sequential(parametrizations.orthogonal(nn.Linear(D, D)), nn.Linear(D, 8)),
        PLAIN,
    ),
    Case(
        "curvature from a graph of the gradients",
        lambda e: nn.Sequential(nn.Linear(D, 32), nn.Tanh(), nn.Linear(32, 8)),
        curvature,
    ),
    Case("hooks of the user's on nodes", lambda e: mlp(), hooked_nodes),
    Case(
        "a hook of the user's before a node, behind the capture's",
        lambda e: mlp(),
        hooked_before_a_node,
        reason="differs",
    ),
    Case("hooks of the user's on every module", lambda e: mlp(), hooked_everywhere),
    Case("another default dtype around the forward", lambda e: mlp(), other_precision),
    Case(
        "an input that does not pickle",
        lambda e: TakesObject(),
        loss_of(lambda m: ce(m(Unpicklable(xs())), ys())),
        reason="[0][0].function",
    ),
)
