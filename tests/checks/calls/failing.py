"""Ways to call a module that end in an exception: the same one with a capture as without.

Each fails in its first step; all but one go on in the second, as a loop that catches the error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from calls.case import Case, loss_of, mlp, xs, ys
from calls.inputs import Raises, TwoHeads

ce = F.cross_entropy
PLAIN = loss_of(lambda model: ce(model(xs()), ys()))


def first(failing, then=PLAIN):
    """A loop that fails in its first step."""

    def loop(env, model, net, step):
        return (then if step else failing)(env, model, net, step)

    return loop


def twice(env, model, net, step):
    loss = PLAIN(env, model, net, step)
    loss.backward()


def two_synchronised(env, model, net, step):
    a, b = model(xs())
    ce(a, ys()).backward(retain_graph=True)
    b.square().mean().backward()


def both_heads(model):
    a, b = model(xs())
    return ce(a, ys()) + b.square().mean()


def written_before_backward(env, model, net, step):
    z = model(xs())
    z.add_(1.0)
    ce(z, ys()).backward()


def written_outside(env, model, net, step):
    z = model(xs())
    power = z.exp()
    power.mul_(2.0)
    power.sum().backward()


def detached_view(env, model, net, step):
    model(xs())[1].detach_()


def one_of_several_views(env, model, net, step):
    model(xs())[0].mul_(2.0)


class Gives(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.inner, self.give = mlp(), give

    def forward(self, x):
        return self.give(self.inner(x))


def classify_first(model):
    return ce(model(xs())[0].reshape(6, -1), ys(classes=4))


def in_the_forward(env, model, net, step):
    model(xs(), boom=True)


def of_another_shape(env, model, net, step):
    model(xs(features=5))


def without_arguments(env, model, net, step):
    model()


def in_a_hook(env, model, net, step):
    def hook(gradient):
        msg = "said by a hook"
        raise ValueError(msg)

    z = model(xs())
    z.register_hook(hook)
    ce(z, ys()).backward()


def without_a_graph(env, model, net, step):
    ce(model(xs()).detach(), ys()).backward()


def in_anomaly_mode(env, model, net, step):
    with torch.autograd.detect_anomaly(check_nan=True):
        (model(xs()) * 0.0).sqrt().sum().backward()


def with_another_gradient(env, model, net, step):
    model(xs()).backward(torch.ones(3))


def by_an_output_not_reached(env, model, net, step):
    a, b = model(xs())
    torch.autograd.grad(a.sum(), b)


def without_retained_gradient(env, model, net, step):
    z = model(xs()).detach()
    z.retain_grad()


CASES = (
    Case("two backwards through one call", lambda e: mlp(), first(twice), raises="second time"),
    Case(
        "two synchronising backwards through one call",
        lambda e: TwoHeads(),
        first(two_synchronised),
        steps=1,  # DDP does not recover
        raises="Expected to",
    ),
    Case(
        "an output written in place that its own node needs",
        lambda e: nn.Sequential(mlp(), nn.Tanh()),
        first(written_before_backward),
        raises="is at version 1; expected version 0",
    ),
    Case(
        "a result outside written in place that its node needs",
        lambda e: mlp(),
        first(written_outside),
        raises="is at version 1; expected version 0",
    ),
    Case(
        "detach_() of a view",
        lambda e: Gives(lambda z: (z, z.view(-1))),
        first(detached_view, loss_of(lambda m: ce(m(xs())[0], ys()))),
        raises="detach views",
    ),
    Case(
        "one of several views written in place",
        lambda e: Gives(lambda z: z.chunk(2, 1)),
        first(one_of_several_views, loss_of(classify_first)),
        raises="is a view and is being modified inplace",
    ),
    Case("a forward that raises", lambda e: Raises(), first(in_the_forward), raises="memory"),
    Case("an input of another shape", lambda e: mlp(), first(of_another_shape), raises="shapes"),
    Case("a call without arguments", lambda e: mlp(), first(without_arguments), raises="input"),
    Case("a hook that raises", lambda e: mlp(), first(in_a_hook), raises="said by a hook"),
    Case(
        "a loss without a graph",
        lambda e: mlp(),
        first(without_a_graph),
        raises="does not require grad",
    ),
    Case(
        "NaN in anomaly mode",
        lambda e: mlp(),
        first(in_anomaly_mode),
        raises="returned nan values",
    ),
    Case(
        "a gradient of another shape",
        lambda e: mlp(),
        first(with_another_gradient),
        raises="Mismatch in shape",
    ),
    Case(
        "autograd.grad by an output that was not used",
        lambda e: TwoHeads(),
        first(by_an_output_not_reached, loss_of(both_heads)),
        raises="to not have been used",
    ),
    Case(
        "retain_grad without a graph",
        lambda e: mlp(),
        first(without_retained_gradient),
        raises="retain",
    ),
)
