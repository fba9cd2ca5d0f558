"""What the guard costs: a plain step, an audit step, a weight check, against plain DDP.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--ranks 2] [--pairs 40] [--accumulate 4]

Interleaved: every round makes one step of plain DDP, one of a second plain DDP (same against same),
one guarded step without an audit, and one with. Ratios are medians over rounds of wall time on rank
0. Ranks beyond the number of cores share them, so use 2 here.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.demo.model import GPT, GPTConfig
from sdcwatch.testing import GlooPool

BATCH, CONTEXT = 16, 64


@dataclass
class Loop:
    """One model and its training step."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    forward: Callable[[Any], torch.Tensor]
    accumulate: int = 1

    def step(self) -> float:
        batch = torch.randint(0, 256, (BATCH, CONTEXT + 1))
        started = time.perf_counter()
        self.optimizer.zero_grad()
        for micro in range(self.accumulate):
            last = micro == self.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.forward(batch).backward()
        self.optimizer.step()
        return time.perf_counter() - started


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    tokens = batch[:, :-1]
    logits = model(tokens, torch.ones(tokens.shape))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make(group: Any, accumulate: int, **options: Any) -> Loop:
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(GPTConfig(width=192, heads=6)), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not options:
        return Loop(model, optimizer, lambda b: loss_fn(model, b), accumulate)
    sdcwatch.init(
        model, optimizer, run_dir=tempfile.mkdtemp(), telemetry="off", console=False,
        fault_domain="gpu", preflight_micro_batches=1, **options,
    )  # fmt: skip
    return Loop(model, optimizer, lambda b: loss_fn(model, b), accumulate)


def measure(rank: int, group: Any, pairs: int, accumulate: int) -> dict[str, list[float]]:
    far = 10**9
    loops = {
        "plain": make(group, accumulate),
        "same": make(group, accumulate),
        "guarded": make(group, accumulate, audit_every=far, fingerprint_every=far),
        "weights": make(group, accumulate, audit_every=far, fingerprint_every=1),
        "audit": make(group, accumulate, audit_every=1, fingerprint_every=far),
    }
    for _ in range(3):
        for loop in loops.values():
            loop.step()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(pairs):
        order = list(loops) if index % 2 else list(reversed(loops))
        for name in order:
            times[name].append(loops[name].step())
    return times


def report(times: dict[str, list[float]], accumulate: int) -> None:
    def ratio(name: str) -> float:
        pairs = zip(times[name], times["plain"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    plain = statistics.median(times["plain"])
    print(f"{accumulate} micro-batch(es) a step, plain step {plain * 1e3:.1f} ms")
    for name in ("same", "guarded", "weights", "audit"):
        print(f"  {name:8s} {ratio(name):.3f} x a plain step")
    mixed = ratio("guarded") + (ratio("audit") - 1) / 100 + (ratio("weights") - 1) / 10
    print(f"  audit every 100, weights every 10: {mixed:.3f} x (from the ratios above)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=4)
    arguments = parser.parse_args()
    pool = GlooPool(max(2, arguments.ranks), timeout_seconds=1200)
    for accumulate in dict.fromkeys((1, arguments.accumulate)):
        results = pool.run(measure, arguments.ranks, arguments.pairs, accumulate)
        report(results[0], accumulate)
    pool.close()


if __name__ == "__main__":
    main()
