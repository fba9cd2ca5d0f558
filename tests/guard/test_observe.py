"""What counts as poisoned state: weights, and the buffers that a forward reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.observing import weights_nonfinite
from sdcwatch.guard.saved_state import SavedState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("least", torch.full((3,), torch.inf))


class Seen:
    """Asks, as check 1 does, of a module that was made in order."""

    def __init__(self) -> None:
        self.net = net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        named = tuple(net.named_parameters())
        self.guarded = Guarded(net, net, None, net, (optimizer,), named, torch.device("cpu"))
        self.saved = SavedState(named, net, tuple)

    def poisoned(self) -> bool:
        return weights_nonfinite(self.guarded, lambda _, buffer: buffer, self.saved.poisoned_before)

    def put(self, name: str, value: float) -> None:
        with torch.no_grad():
            self.net.state_dict()[name].view(-1)[1] = value


def test_what_begins_with_infinities_is_no_poison() -> None:
    assert not Seen().poisoned()


@pytest.mark.parametrize("name", ["linear.weight", "norm.bias", "scale", "phase", "mask"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_or_a_buffer_that_is_not_finite_any_more_is(name: str, value: float) -> None:
    seen = Seen()
    seen.put(name, value)
    assert seen.poisoned()


def test_statistics_count_only_where_the_forward_reads_them() -> None:
    seen = Seen()
    norm = seen.net.norm
    norm(torch.full((2, 3), float("nan")))
    assert norm.running_mean is not None
    assert norm.running_mean.isnan().all()
    assert not seen.poisoned()
    norm.eval()
    assert seen.poisoned()


def saves(seen: Seen) -> bool:
    return not seen.saved.flags()[0]


def test_a_checkpoint_holds_no_infinity_that_was_not_there_at_the_beginning() -> None:
    seen = Seen()
    assert saves(seen)
    for name, value in (("least", -torch.inf), ("least", torch.nan), ("scale", torch.inf)):
        before = seen.net.state_dict()[name].clone()
        seen.put(name, value)
        assert not saves(seen), (name, value)
        seen.net.state_dict()[name].copy_(before)
        seen.put(name, 1.0)
        assert saves(seen), "an element may become finite"
    seen.put("least", torch.inf)
    assert not saves(seen), "and then has to stay so"


def test_a_mask_may_be_moved_and_grow_and_holds_no_nan() -> None:
    seen = Seen()
    seen.net.mask = torch.full((5, 5), -torch.inf).triu(1)
    assert saves(seen)
    seen.net.mask = torch.full((5, 5), -torch.inf).tril(-1)
    assert saves(seen)
    seen.net.register_buffer("later", torch.full((2,), -torch.inf))
    assert saves(seen)
    seen.put("mask", torch.nan)
    assert not saves(seen)


def test_statistics_that_a_run_begins_with_are_finite_by_design() -> None:
    seen = Seen()
    seen.put("norm.running_mean", torch.nan)
    loaded = SavedState(tuple(seen.net.named_parameters()), seen.net, tuple)
    assert loaded.flags()[0]
