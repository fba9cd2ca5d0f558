"""Ways to call a module: what it returns, and what the user does with that."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from calls.case import Case, D, loss_of, xs, ys


class Base(nn.Module):
    """A trunk h, a hidden state and logits z; `give` decides what is returned."""

    def __init__(self, give):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(D, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1))
        self.h1, self.h = nn.Linear(32, 32), nn.Linear(32, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.give = give

    def forward(self, x, y=None):
        h = self.t(x)
        hidden = torch.tanh(self.h1(h))
        return self.give(self, x, y, h, hidden, self.h(hidden) * self.temperature)


def giving(give):
    return lambda env: Base(give)


ce = F.cross_entropy
LOSS = giving(lambda s, x, y, h, hidden, z: {"loss": ce(z, y), "logits": z, "hidden": hidden})
LOGITS = giving(lambda s, x, y, h, hidden, z: z)


def retain_grad(env, model, net, step):
    out = model(xs(), ys())
    out["hidden"].retain_grad()
    out["loss"].backward()
    return [out["loss"], out["hidden"].grad]


def grad_of_hidden(env, model, net, step):
    out = model(xs(), ys())
    (gradient,) = torch.autograd.grad(out["loss"], out["hidden"], retain_graph=True)
    loss = out["loss"] + 0 * gradient.sum()
    loss.backward()
    return [loss, gradient]


def penalty_on_hidden(env, model, net, step):
    out = model(xs(), ys())
    (gradient,) = torch.autograd.grad(out["loss"], out["hidden"], create_graph=True)
    loss = out["loss"] + 0.1 * gradient.square().sum()
    loss.backward()
    return [loss, gradient]


def detached_in_place(env, model, net, step):
    out = model(xs(), ys())
    out["logits"].detach_()
    out["loss"].backward()
    return [out["loss"], (out["logits"].argmax(-1) == 0).sum()]


def divided_in_place(env, model, net, step):
    out = model(xs(), ys())
    out["logits"].div_(2.0)
    loss = out["loss"] + 0.1 * out["logits"].square().mean()
    loss.backward()
    return loss


def all_used(model):
    out = model(xs(), ys())
    return out["loss"] + 0.1 * out["logits"].square().mean() + out["hidden"].abs().mean()


def into_parameters(env, model, net, step):
    out = model(xs(), ys())
    torch.autograd.backward(out["loss"], inputs=list(net.parameters()))
    return out["loss"]


def for_metrics(env, model, net, step):
    out = model(xs(), ys())
    out["loss"].backward()
    return [out["loss"], out["logits"].detach().sum()]


def upstream(env):
    env.up = nn.Linear(D, D)
    env.extra = list(env.up.parameters())
    return Base(lambda s, x, y, h, hidden, z: (z, x))


def through_upstream(env, model, net, step):
    z, x = model(env.up(xs()))
    loss = ce(z, ys()) + x.square().mean()
    loss.backward()
    return loss


def view_in_place(env, model, net, step):
    z, flat = model(xs())
    flat.mul_(2.0)
    loss = ce(z, ys())
    loss.backward()
    return loss


def z_and_square(model):
    z, other = model(xs())
    return ce(z, ys()) + other.square().mean()


def repeated(model):
    z, states = model(xs())
    return ce(z, ys()) + states[-1].square().mean() + states[1].mean()


def views(model):
    z, flat, part = model(xs())
    return ce(z, ys()) + flat.square().mean() + part.abs().mean()


def chunks(model):
    one, two, z = model(xs())
    return one.exp().mean() + two.square().mean() + ce(z, ys())


@dataclass
class Plain:
    loss: torch.Tensor = None
    logits: torch.Tensor = None
    extra: object = None


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class Late:
    logits: torch.Tensor
    loss: torch.Tensor = field(init=False, default=None)

    def __post_init__(self):
        self.size = self.logits.shape[0]


@dataclass(slots=True)
class Slotted:
    loss: torch.Tensor
    logits: torch.Tensor


Named = namedtuple("Named", "loss logits")


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class DictWithAttributes(dict):
    __getattr__ = dict.__getitem__


class ListSubclass(list):
    pass


def late(s, x, y, h, hidden, z):
    out = Late(z)
    out.loss = ce(z, y)
    return out


STRUCTURES = {
    "dataclass": lambda s, x, y, h, hidden, z: Plain(ce(z, y), z),
    "dataclass with more in it": lambda s, x, y, h, hidden, z: Plain(
        ce(z, y), z, {"a": [hidden, 3, "k"]}
    ),
    "frozen dataclass": lambda s, x, y, h, hidden, z: Frozen(ce(z, y), z),
    "dataclass with a late field": late,
    "dataclass with slots": lambda s, x, y, h, hidden, z: Slotted(ce(z, y), z),
    "named tuple": lambda s, x, y, h, hidden, z: Named(ce(z, y), z),
    "custom object": lambda s, x, y, h, hidden, z: Holder(loss=ce(z, y), logits=z),
    "dict subclass": lambda s, x, y, h, hidden, z: DictWithAttributes(loss=ce(z, y), logits=z),
}


def by_attributes(model):
    out = model(xs(), ys())
    return out.loss + 0.1 * out.logits.square().mean()


def as_generator(s, x, y, h, hidden, z):
    yield hidden
    yield z


def from_generator(model):
    hidden, z = model(xs())
    return hidden.mean() + ce(z, ys())


def in_attribute(s, x, y, h, hidden, z):
    s.loss = ce(z, y)


def from_attribute(env, model, net, step):
    model(xs(), ys())
    net.loss.backward()
    return net.loss


def kept_list(s, x, y, h, hidden, z):
    s.cache = [h, hidden, z]
    return s.cache


def from_kept_list(env, model, net, step):
    out = model(xs())
    same = out is net.cache
    out.append(1)
    loss = ce(out[2], ys()) + net.cache[1].square().mean()
    loss.backward()
    return [loss, same, len(net.cache)]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(20, 12)
        self.r = nn.LSTM(12, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.o = nn.Linear(16, 20)

    def forward(self, x, state=None):
        out, state = self.r(self.e(x), state)
        return self.o(out), state


def truncated(in_place):
    def loop(env, model, net, step):
        state = getattr(env, "hidden", None)
        if state is not None:
            state = tuple(t.detach_() if in_place else t.detach() for t in state)
        x = torch.randint(0, 20, (3, 9))
        z, env.hidden = model(x, state)
        loss = ce(z.flatten(0, 1), x.flatten())
        loss.backward()
        return loss

    return loop


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.o = nn.GRUCell(D, 32), nn.Linear(32, 8)

    def forward(self, x, h):
        h = self.c(x, h)
        return self.o(h), h


def unrolled(in_place):
    def loop(env, model, net, step):
        h, loss = getattr(env, "h", torch.zeros(6, 32)), 0
        for _ in range(3):
            z, h = model(xs(), h)
            loss = loss + ce(z, ys())
        loss.backward()
        env.h = h.detach_() if in_place else h.detach()
        return loss

    return loop


class Packed(nn.Module):
    def __init__(self, gives_packed):
        super().__init__()
        self.r = nn.LSTM(D, 16, batch_first=True)
        self.gives_packed = gives_packed

    def forward(self, packed):
        out, _ = self.r(packed)
        return out if self.gives_packed else pad_packed_sequence(out, batch_first=True)[0]


def packed():
    lengths = torch.tensor([7, 5, 3, 2])
    return pack_padded_sequence(torch.randn(4, 7, D), lengths, batch_first=True)


def hook_on_output(env, model, net, step):
    z = model(xs())
    z.register_hook(lambda g: g * 2)
    loss = ce(z, ys())
    loss.backward()
    return loss


def hook_on_hidden(env, model, net, step):
    out = model(xs(), ys())
    out["hidden"].register_hook(lambda g: g * 2)
    out["loss"].backward()
    return out["loss"]


def hooked(register):
    def make(env):
        net = LOGITS(env)
        register(net, env)
        return net

    return make


def hooked_late(register):
    def loop(env, model, net, step):
        if step == 0:
            register(net, env)
        loss = ce(model(xs()), ys())
        loss.backward()
        return loss

    return loop


def clamp(net, env):
    for parameter in net.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))


def count(net, env):
    env.counted = [0]
    env.state = lambda: env.counted
    for parameter in net.parameters():
        parameter.register_hook(lambda g: env.counted.__setitem__(0, env.counted[0] + 1))


def step_in_backward(net, env):
    def update(parameter):
        parameter.data.add_(parameter.grad, alpha=-1e-3)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def classify(model):
    return ce(model(xs()), ys())


CLASSIFY = loss_of(classify)
NO_CALL = "outside the call reads the parameter"
CASES = (
    Case("retain_grad on a hidden state", LOSS, retain_grad),
    Case("autograd.grad of the loss by a hidden state", LOSS, grad_of_hidden),
    Case("penalty on a hidden state", LOSS, penalty_on_hidden, reason="outside the call reads"),
    Case("logits.detach_()", LOSS, detached_in_place),
    Case("in-place on logits beside the loss", LOSS, divided_in_place),
    Case("loss, logits and hidden all used", LOSS, loss_of(all_used)),
    Case("backward(inputs=parameters)", LOSS, into_parameters),
    Case("logits for metrics only", LOSS, for_metrics),
    Case(
        "a parameter returned",
        giving(lambda s, x, y, h, hidden, z: (z, s.temperature)),
        loss_of(lambda m: (lambda o: ce(o[0] * o[1], ys()))(m(xs()))),
    ),
    Case(
        "the head's weight returned",
        giving(lambda s, x, y, h, hidden, z: (z, s.h.weight)),
        loss_of(z_and_square),
    ),
    Case(
        "a view of a parameter returned",
        giving(lambda s, x, y, h, hidden, z: (z, s.h.weight[:4])),
        loss_of(z_and_square),
    ),
    Case(
        "a leaf input passed through",
        giving(lambda s, x, y, h, hidden, z: (z, x)),
        loss_of(
            lambda m: (lambda o: ce(o[0], ys()) + o[1].square().mean())(m(xs().requires_grad_()))
        ),
    ),
    Case("an input from upstream passed through", upstream, through_upstream),
    Case(
        "one tensor twice among others",
        giving(lambda s, x, y, h, hidden, z: (z, [h, hidden, z])),
        loss_of(repeated),
    ),
    Case(
        "one tensor twice, one used",
        giving(lambda s, x, y, h, hidden, z: (z, z)),
        loss_of(lambda m: ce(m(xs())[0], ys())),
    ),
    Case(
        "outputs that are views of one another",
        giving(lambda s, x, y, h, hidden, z: (z, z.view(-1), z[:, :4])),
        loss_of(views),
    ),
    Case(
        "views of one another, in-place on one",
        giving(lambda s, x, y, h, hidden, z: (lambda q: (q, q.view(-1)))(z * 1)),
        view_in_place,
    ),
    Case(
        "hidden states, each feeding the next",
        giving(lambda s, x, y, h, hidden, z: [h, hidden, z]),
        loss_of(lambda m: sum(t.square().mean() for t in m(xs()))),
    ),
    Case(
        "several outputs of one node",
        giving(lambda s, x, y, h, hidden, z: (*hidden.chunk(2, -1), z)),
        loss_of(chunks),
    ),
    *(
        Case(f"returns a {name}", giving(give), loss_of(by_attributes))
        for name, give in STRUCTURES.items()
    ),
    Case(
        "returns a list subclass",
        giving(lambda s, x, y, h, hidden, z: ListSubclass([hidden, z])),
        loss_of(from_generator),
    ),
    Case(
        "returns a list of dataclasses",
        giving(lambda s, x, y, h, hidden, z: [Plain(None, z), Plain(None, hidden)]),
        loss_of(lambda m: (lambda o: o[1].logits.mean() + ce(o[0].logits, ys()))(m(xs()))),
    ),
    Case(
        "returns a distribution",
        giving(lambda s, x, y, h, hidden, z: torch.distributions.Categorical(logits=z)),
        loss_of(
            lambda m: -(lambda d: d.log_prob(ys()).mean() + 0.01 * d.entropy().mean())(m(xs()))
        ),
    ),
    Case("returns a generator", giving(as_generator), loss_of(from_generator), reason=NO_CALL),
    Case(
        "returns a function",
        giving(lambda s, x, y, h, hidden, z: lambda target: ce(z, target)),
        loss_of(lambda m: m(xs())(ys())),
    ),
    Case("returns nothing", giving(in_attribute), from_attribute, reason=NO_CALL),
    Case("returns a list that it keeps", giving(kept_list), from_kept_list),
    Case(
        "numbers and flags beside",
        giving(
            lambda s, x, y, h, hidden, z: (
                z,
                z.argmax(-1),
                None,
                3,
                float(z.detach().mean()),
                z > 0,
            )
        ),
        loss_of(lambda m: ce(m(xs())[0], ys())),
    ),
    Case("truncated backpropagation, detach", lambda e: Recurrent(), truncated(False)),
    Case("truncated backpropagation, detach_", lambda e: Recurrent(), truncated(True)),
    Case("cell unrolled, detach", lambda e: Cell(), unrolled(False)),
    Case("cell unrolled, detach_", lambda e: Cell(), unrolled(True)),
    Case(
        "packed sequence in",
        lambda e: Packed(False),
        loss_of(lambda m: m(packed()).square().mean()),
    ),
    Case(
        "packed sequence out",
        lambda e: Packed(True),
        loss_of(lambda m: m(packed()).data.square().mean()),
    ),
    Case("hook of the user's on the output", LOGITS, hook_on_output),
    Case("hook of the user's on a hidden state", LOSS, hook_on_hidden),
    Case(
        "forward pre-hook that changes the input",
        hooked(lambda n, e: n.register_forward_pre_hook(lambda m, a: (a[0] * 2 + 1,))),
        CLASSIFY,
    ),
    Case(
        "forward hook that changes the output",
        hooked(lambda n, e: n.register_forward_hook(lambda m, a, o: o * 2)),
        CLASSIFY,
    ),
    Case(
        "forward hook that changes the output, later",
        LOGITS,
        hooked_late(lambda n, e: n.register_forward_hook(lambda m, a, o: torch.tanh(o))),
    ),
    Case(
        "full backward pre-hook",
        hooked(
            lambda n, e: n.register_full_backward_pre_hook(lambda m, g: tuple(t * 2 for t in g))
        ),
        CLASSIFY,
    ),
    Case("hooks on parameters that clamp", hooked(clamp), CLASSIFY),
    Case("hooks on parameters that clamp, later", LOGITS, hooked_late(clamp)),
    Case("hooks on parameters that count", hooked(count), CLASSIFY),
    Case(
        "an update inside the backward",
        LOGITS,
        hooked_late(step_in_backward),
        reason="the weights here are not those of the call",
    ),
)
