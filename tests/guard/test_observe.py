"""What counts as poisoned state: weights, and the buffers that a forward reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.observing import weights_nonfinite


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def poisoned(net: nn.Module) -> bool:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    named = tuple(net.named_parameters())
    guarded = Guarded(net, net, None, net, (optimizer,), named, torch.device("cpu"))
    return weights_nonfinite(guarded)


def test_finite_state_and_a_mask_of_negative_infinities_are_no_poison() -> None:
    assert not poisoned(Net())


@pytest.mark.parametrize("name", ["linear.weight", "norm.bias", "scale", "phase"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_or_a_buffer_that_is_not_finite_is(name: str, value: float) -> None:
    net = Net()
    with torch.no_grad():
        net.state_dict()[name].view(-1)[1] = value
    assert poisoned(net)


def test_a_mask_with_a_nan_among_its_infinities_is() -> None:
    net = Net()
    net.state_dict()["mask"][0, 0] = float("nan")
    assert poisoned(net)


def test_statistics_count_only_where_the_forward_reads_them() -> None:
    net = Net()
    net.norm(torch.full((2, 3), float("nan")))
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.isnan().all()
    assert not poisoned(net)
    net.norm.eval()
    assert poisoned(net)
