"""What the hooks of a plain step cost: a call of a module with the capture on it, and without.

    OMP_NUM_THREADS=1 python benchmarks/hooks.py [--rounds 4000] [--outputs 1,2,3]

One process, no DDP and no check: only what every call of a guarded model pays, whatever its size.
So the model does next to nothing. Interleaved: a round makes one step of the bare module, one of a
second bare module (same against same) and one of a module with the hooks on, in turning order.
Shown are the difference of the smallest times and the median of the differences in a round, in
microseconds of CPU time of the thread, for the call, for its backward and for both. The smallest
times of the bare module beside them tell how fast the machine was: of two operations and their
backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.capture import CallCapture

WARM_UP = 50


class Outputs(nn.Module):
    """One small product, returned as so many outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.outputs = nn.Linear(8, 8), outputs

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        return tuple(hidden * scale for scale in range(1, self.outputs + 1))


def captured(module: nn.Module) -> nn.Module:
    """The module with the hooks on it, as on a step that is not audited."""

    def begin() -> None:
        internals.at_end_of_backward(end)

    def end() -> None:
        capture.end_backward()

    capture = CallCapture(
        module, list(module.named_parameters()), torch.device("cpu"), on_gradient=begin
    )
    capture.attach()
    return module


def step(module: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of one call, and of its backward."""
    started = time.thread_time_ns()
    outputs = module(x)
    called = time.thread_time_ns()
    loss = torch.stack([out.sum() for out in outputs]).sum()
    summed = time.thread_time_ns()
    loss.backward()
    return (called - started) / 1e3, (time.thread_time_ns() - summed) / 1e3


def measure(outputs: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Microseconds of the call and of the backward, by name of the module, round by round."""
    modules: dict[str, nn.Module] = {
        "bare": Outputs(outputs),
        "same": Outputs(outputs),
        "hooks": captured(Outputs(outputs)),
    }
    x = torch.randn(4, 8)
    names = list(modules)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(WARM_UP + rounds):
        turn = index % len(names)
        for name in (*names[turn:], *names[:turn]):
            taken = step(modules[name], x)
            if index >= WARM_UP:
                times[name].append(taken)
    return times


def row(name: str, outputs: int, times: dict[str, list[tuple[float, float]]]) -> str:
    """One line of the table."""
    parts: tuple[Callable[[tuple[float, float]], float], ...] = (
        lambda t: t[0],
        lambda t: t[1],
        sum,
    )
    cells = []
    for part in parts:
        own, bare = ([part(one) for one in times[which]] for which in (name, "bare"))
        median = statistics.median(a - b for a, b in zip(own, bare, strict=True))
        cells.append(f"{min(bare):8.0f} {min(own) - min(bare):8.0f} {median:8.0f}")
    return f"{outputs:7d}  {name:5s}" + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--outputs", default="1,2,3")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("µs: bare, smallest; more than that, of the smallest times; more, median")
    print("outputs                 call                    backward                       both")
    for outputs in map(int, arguments.outputs.split(",")):
        times = measure(outputs, arguments.rounds)
        for name in ("same", "hooks"):
            print(row(name, outputs, times))


if __name__ == "__main__":
    main()
