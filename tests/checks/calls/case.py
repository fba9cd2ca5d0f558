"""One way to call a module, as a value, and a small training run of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

D = 16
"""Features of an input."""
Loop = Callable[["Env", Any, Any, int], Any]
"""Called with the environment, the DDP model, the bare module, and the step."""


class Env(SimpleNamespace):
    """What one run of a case shares between its steps.

    Attributes:
        optimizer: Of the module's parameters and of `extra`.
        extra: Parameters outside the module.
        state: What must come out the same besides numbers.
    """


@dataclass(frozen=True)
class Case:
    """One way to call a module.

    Attributes:
        name: What is special about it.
        make: Builds the module.
        loop: One step: forward and backward; returns what must be the same.
        steps: Steps of a run.
        ddp: Options of DistributedDataParallel.
        reason: Part of the reason in which every audit ends; "" if each repeats bit for bit.
        sometimes: The reason appears on some audits only.
        raises: Part of the exception in which the first step ends; "" for none.
        refused: The module cannot be captured, and this is said.
    """

    name: str
    make: Callable[[Env], nn.Module]
    loop: Loop
    steps: int = 2
    ddp: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    sometimes: bool = False
    raises: str = ""
    refused: bool = False

    def __str__(self) -> str:
        return self.name


def xs(count: int = 6, features: int = D) -> torch.Tensor:
    return torch.randn(count, features)


def ys(count: int = 6, classes: int = 8) -> torch.Tensor:
    return torch.randint(0, classes, (count,))


def mlp(out: int = 8, drop: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(D, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(drop), nn.Linear(32, out)
    )


def loss_of(function: Callable[[Any], torch.Tensor]) -> Loop:
    """A loop that calls `function(model)` and runs the backward of the loss it returns."""

    def loop(env: Env, model: Any, net: Any, step: int) -> Any:
        loss = function(model)
        loss.backward()
        return loss

    return loop


def bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    if plain.layout is torch.sparse_coo:
        return bits(plain._indices()), bits(plain._values())
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def told(value: Any) -> Any:
    """What can be seen of a value: bits, and of a tensor its strides, version and graph."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return bits(value)
    seen = (value.dtype, tuple(value.shape), value.stride(), value._version)
    return bits(value), seen, value.requires_grad, value.is_leaf, value.output_nr, graph(value)


def graph(tensor: torch.Tensor) -> list[tuple[str, list[tuple[int, int]]]]:
    """The graph behind a tensor: each node's name, and which it leads to."""
    if tensor.grad_fn is None:
        return []
    nodes, numbers = [tensor.grad_fn], {tensor.grad_fn: 0}
    described = []
    for node in nodes:  # grows meanwhile
        leads = []
        for following, number in node.next_functions:
            if following is not None and following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
            leads.append((-1 if following is None else numbers[following], number))
        described.append((node.name(), leads))
    return described


def one_step(case: Case, env: Env, model: Any, net: nn.Module, step: int) -> list[Any]:
    """What a step returned, or in which exception it ended."""
    fails = bool(case.raises) and step == 0
    try:
        got = case.loop(env, model, net, step)
    except Exception as error:
        if not fails or case.raises not in str(error):
            raise
        return [f"{type(error).__name__}: {error}"]
    assert not fails, f"no exception that says {case.raises!r}"
    return [told(g) for g in (got if isinstance(got, (list, tuple)) else [got])]


def run(case: Case, prepare: Callable[[nn.Module], Any] | None = None) -> list[Any]:
    """Train for some steps; returns every number that came up, as bits, every graph and exception.

    Args:
        case: What to train.
        prepare: Called with the bare module before the first step.
    """
    seed(0)
    env = Env(extra=[], state=lambda: None)
    net = case.make(env)
    model = DistributedDataParallel(net, **case.ddp)
    if prepare is not None:
        prepare(net)
    parameters = [*net.parameters(), *env.extra]
    env.optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], 0.01, momentum=0.9)
    seed(100)
    trace: list[Any] = []
    for step in range(case.steps):
        env.optimizer.zero_grad()
        trace += one_step(case, env, model, net, step)
        trace += [told(p.grad) for p in parameters]
        env.optimizer.step()
    trace += [bits(t) for t in (*parameters, *net.buffers())]
    trace += [bits(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())]
    return [*trace, copy.deepcopy(env.state())]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
