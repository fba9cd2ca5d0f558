"""Infinities are a loss scale's normal business only where the scaler is that of this loop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from sdcwatch.guard.loss_scale import LossScale


class Training:
    """A model, its optimizer and a scaler of its own, on the CPU."""

    def __init__(self, init_scale: float = 8.0) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def backward(self, *, scaled: bool) -> None:
        self.optimizer.zero_grad()
        loss = self.net(torch.ones(3, 2)).sum()
        (self.scaler.scale(loss) if scaled else loss).backward()

    def watched_by(self, scale: LossScale) -> None:
        self.optimizer.register_step_pre_hook(lambda one, *_: scale.stepping(one))


@pytest.fixture
def other() -> Iterator[Training]:
    """A model that trains beside ours, under a loss scale."""
    other = Training(init_scale=1024.0)
    other.backward(scaled=True)
    yield other
    del other
    gc.collect()


def by_scaler(own: Training) -> None:
    own.backward(scaled=True)
    own.scaler.step(own.optimizer)
    own.scaler.update()


def under_a_schedule(own: Training) -> None:
    torch.optim.lr_scheduler.StepLR(own.optimizer, 1)  # wraps `step`
    by_scaler(own)


def by_hand(own: Training) -> None:
    """Clipping code that steps by itself."""
    own.backward(scaled=True)
    own.scaler.unscale_(own.optimizer)
    own.optimizer.step()
    own.scaler.update()


@pytest.mark.parametrize("step", [by_scaler, under_a_schedule, by_hand])
def test_the_scaler_that_serves_the_optimizer_is_found_whoever_else_has_one(
    other: Training, step: Callable[[Training], None]
) -> None:
    own, scale = Training(), LossScale()
    own.watched_by(scale)
    for _ in range(2):
        step(own)
    assert scale.value() == 8.0


def test_without_one_the_scaler_of_another_model_explains_nothing(other: Training) -> None:
    own, scale = Training(), LossScale()
    own.watched_by(scale)
    assert scale.value() == 1024.0, "before the first update nobody can tell whose it is"
    own.backward(scaled=False)
    own.optimizer.step()
    assert scale.value() is None


def test_a_scaler_that_is_used_from_some_step_on_is_found(other: Training) -> None:
    own, scale = Training(), LossScale()
    own.watched_by(scale)
    own.backward(scaled=False)
    own.optimizer.step()
    by_scaler(own)
    assert scale.value() == 8.0


def test_the_scaler_that_init_was_given_wins(other: Training) -> None:
    own = Training()
    scale = LossScale(own.scaler)
    own.watched_by(scale)
    own.backward(scaled=False)
    own.optimizer.step()
    assert scale.value() == 8.0


def test_a_scaler_that_is_garbage_explains_nothing() -> None:
    gone = Training()
    gone.backward(scaled=True)
    gone.cycle = gone  # type: ignore[attr-defined]
    del gone
    assert LossScale().value() is None
