"""What a forward moves outside of its module is put back after a replay."""

import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from sdcwatch.checks.hidden import HiddenState, advanced

CALLS = [0]
COUNT = 0
own = types.ModuleType("a_module_of_the_users")
own.count = 0


class Meter:
    """What a script counts with."""

    seen = 0

    def __init__(self):
        self.total, self.rows = torch.zeros(2), []

    def add(self, x):
        Meter.seen += 1
        self.total += x
        self.rows.append(float(x[0]))


class Slotted:
    __slots__ = ("count", "never")

    def __init__(self):
        self.count = 0


class Net(nn.Module):
    """Calls `between`, whatever it is."""

    calls = 0

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x, kept=[]):  # noqa: B006 - a default that keeps what it was given
        Net.calls += 1
        kept.append(1)
        self.between(x)
        return x


def a_global(x):
    global COUNT
    CALLS[0] += 1
    COUNT += 1
    own.count += 1


def closures():
    meter, bank, table, slow = Meter(), [], {"a": 1}, nn.Linear(2, 2)
    array, drawn, dice = np.zeros(3), torch.Generator().manual_seed(1), random.Random(2)
    generator, slotted, number = np.random.default_rng(3), Slotted(), 0
    legacy = np.random.RandomState(4)

    def between(x):
        nonlocal number
        number += 1
        meter.add(x)
        bank.append(x)
        table["b"] = 2
        with torch.no_grad():
            slow.weight.mul_(0.5)
        slow.bias.data.add_(1)
        slow.flag = True
        array[0] += 1
        torch.randn(1, generator=drawn)
        dice.random()
        generator.random()
        legacy.random()
        slotted.count += 1

    def state():
        held = (meter.total, *bank, slow.weight, slow.bias)
        return (
            [t.detach().clone().tolist() for t in held],
            (number, dict(table), list(meter.rows), array.tolist(), slotted.count, Meter.seen),
            (drawn.get_state().tolist(), dice.getstate(), repr(generator.bit_generator.state)),
            repr(legacy.get_state(legacy=False)),
            "flag" in slow.__dict__,
        )

    return between, state


def test_what_closures_and_objects_hold_stands_as_before():
    between, state = closures()
    net = Net(between)
    net(torch.ones(2))
    before, version = state(), net.between.__closure__
    with HiddenState(net) as hidden:
        net(torch.ones(2))
        assert state() != before
    assert state() == before
    assert net.between.__closure__ is version
    assert "`bank` in the closure of `between`" in hidden.moved
    assert not hidden.lost


def test_globals_classes_defaults_and_modules_stand_as_before():
    net = Net(a_global)
    before = (CALLS[0], COUNT, Net.calls, own.count, len(Net.forward.__defaults__[0]))
    sys.modules[own.__name__] = own
    try:
        with HiddenState(net) as hidden:
            net(torch.ones(2))
            assert before[1] != COUNT
    finally:
        del sys.modules[own.__name__]
    assert before == (CALLS[0], COUNT, Net.calls, own.count, len(Net.forward.__defaults__[0]))
    assert {"the global `COUNT`", "the global `CALLS`", "`Net.calls`"} <= {*hidden.moved}


def test_hooks_and_methods_of_objects_are_looked_into_too():
    meter, net = Meter(), nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, args, out: meter.add(out.detach()[0]))
    with HiddenState(net) as hidden:
        net(torch.ones(1, 2))
    assert meter.rows == []
    assert meter.total.tolist() == [0.0, 0.0]
    assert hidden.moved


def test_a_tensor_that_did_not_move_is_not_written():
    table = torch.full((2,), float("nan"))
    net = Net(lambda x: x + table)
    version = table._version
    with HiddenState(net) as hidden:
        net(torch.ones(2))
    assert (table._version, hidden.moved) == (version, ("`Net.calls`", "a default of `forward`"))


def test_a_restored_tensor_that_a_graph_holds_can_still_be_differentiated():
    scale = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)

    def between(x):
        scale.data.mul_(2)

    loss = (weight * scale).sum()
    with HiddenState(Net(between)):
        between(None)
    loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_what_is_too_large_to_be_kept_is_told():
    large, table = torch.zeros(2 << 20), np.zeros(1 << 20)

    def between(x):
        large.add_(1)
        table[5] += 1

    with HiddenState(Net(between)) as hidden:
        between(None)
    named = {f"`{name}` in the closure of `between`" for name in ("large", "table")}
    assert {*hidden.lost} == named


def test_a_large_array_that_did_not_move_is_not_told():
    table = np.zeros(1 << 20)
    with HiddenState(Net(lambda x: x + table[0])) as hidden:
        pass
    assert hidden.lost == ()


def test_what_a_hook_of_a_parameter_keeps_stands_as_before():
    norms, net = [], nn.Linear(2, 2)
    net.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
    with HiddenState(net) as hidden:
        net(torch.ones(1, 2)).sum().backward()
        assert norms
    assert (norms, bool(hidden.moved)) == ([], True)


class Fresh:
    """A descriptor that makes a new value each time it is asked."""

    def __get__(self, held, kind=None):
        return object()


def test_a_descriptor_of_a_class_stays_one():
    class Scaled(nn.Module):
        scale = Fresh()

    before = vars(Scaled)["scale"]
    with HiddenState(Scaled()) as hidden:
        pass
    assert (vars(Scaled)["scale"], hidden.moved) == (before, ())


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support")
@pytest.mark.parametrize(
    "make",
    [
        lambda: (k for k in range(9)),
        itertools.count,
        lambda: itertools.cycle([1, 2, 3]),
        lambda: iter([1, 2, 3]),
        lambda: map(abs, iter([1, 2, 3])),
        lambda: zip(itertools.count(), range(5), strict=False),
        lambda: enumerate("abc"),
        lambda: itertools.islice(itertools.cycle("ab"), 1, None),
    ],
)
def test_a_generator_of_python_that_a_call_advances_is_told_with_what_to_write(make):
    numbers = make()
    net = Net(lambda x: next(numbers))
    before = HiddenState(net).advancing()
    assert advanced(before, HiddenState(net).advancing()) == ""
    net(torch.ones(2))
    said = advanced(before, HiddenState(net).advancing())
    assert "`numbers` in the closure of `<lambda>`" in said
    assert "keep a number in the module" in said


def test_modules_of_torch_and_their_weights_are_left_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with HiddenState(net) as hidden:
        net(torch.randn(3, 2))
    assert (hidden.moved, hidden.lost) == ((), ())
    assert int(net[1].num_batches_tracked) == 1
