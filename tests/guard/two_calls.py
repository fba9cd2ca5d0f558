"""Optimizers whose update takes two backwards, as people write them, and loops around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

Parameters = list[nn.Parameter]
Compute = Callable[[], torch.Tensor]
"""Forward and backward of one half of an update."""


class Sam(optim.Optimizer):
    """As trial `m12_sam`: two calls, `step()` itself is never called."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(0.05 * p.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("call first_step and second_step")


class NormedSam(optim.Optimizer):
    """With the norm of all gradients, weights rebound through `.data`, and a `step` of its own."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = optim.AdamW(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        compute = torch.enable_grad()(closure)
        self.first_step()
        compute()
        self.second_step()


class ThroughData(optim.Optimizer):
    """Takes the perturbation off again, all through `.data`, and updates by itself."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["e"] = 0.05 * p.grad / p.grad.norm()
            p.data.add_(self.state[p]["e"])
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.first_step()
            closure()
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.state[p]["e"])
            p.data.sub_(0.05 * p.grad)
        self.zero_grad()


class Minimizer:
    """No optimizer, but holds one, as ASAM does."""

    def __init__(self, parameters: Parameters) -> None:
        self.optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.moved: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def ascent_step(self) -> None:
        for p in self.optimizer.param_groups[0]["params"]:
            self.moved[p] = p.grad * 0.05
            p.add_(self.moved[p])
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descent_step(self) -> None:
        for p in self.optimizer.param_groups[0]["params"]:
            p.sub_(self.moved[p])
        self.optimizer.step()
        self.optimizer.zero_grad()


def _methods(one: Any, compute: Compute) -> None:
    compute()
    one.first_step()
    compute()
    one.second_step()


def _closure(one: Any, compute: Compute) -> None:
    compute()
    one.step(compute)


def _then_step(one: Any, compute: Compute) -> None:
    compute()
    one.first_step()
    compute()
    one.step()


def _ascent(one: Any, compute: Compute) -> None:
    compute()
    one.ascent_step()
    compute()
    one.descent_step()


TWO_CALLS: dict[str, tuple[Callable[[Parameters], Any], Callable[[Any, Compute], None]]] = {
    "SAM": (Sam, _methods),
    "SAM with a norm": (NormedSam, _methods),
    "SAM with a closure": (NormedSam, _closure),
    "SAM through .data": (ThroughData, _then_step),
    "SAM through .data with a closure": (ThroughData, _closure),
    "ASAM": (Minimizer, _ascent),
}
