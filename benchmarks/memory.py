"""What the guard keeps from being freed: the peak of a step above plain DDP's.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--accumulate 1,4,16] [--steps 2]

Two ranks on the CPU, Linux. The peak is that of the process (VmHWM, reset before the steps that
count) above what it held before them, on rank 0, in MiB; glibc is told to give every tensor back to
the system when it is freed. "same" is a second plain DDP. A micro-batch brings 4 MiB of inputs and,
where the loss stands outside of the module, gets 4 MiB of gradients at its outputs; those are what
`max_payload_mb` bounds. A row with a limit below one micro-batch shows the bound.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.testing import GlooPool

WIDTH, ROWS = 512, 2048  # 4 MiB an activation
FAR = 10**9
VARIANTS: dict[str, dict[str, Any]] = {
    "plain DDP": {},
    "same": {},
    "plain step": {"audit_every": FAR},
    "plain step, limit 6 MiB": {"audit_every": FAR, "max_payload_mb": 6},
    "audit step": {"audit_every": 1},
}


class Layers(nn.Module):
    """Four layers; with the loss inside it returns a scalar."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out.square().mean() if self.inside else out


def memory(name: str) -> float:
    """MiB of a line in the status of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def peak(rank: int, group: Any, variant: str, accumulate: int, inside: bool, steps: int) -> float:
    """MiB of the highest point of some steps above what was held before."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(inside), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = None
    if VARIANTS[variant]:
        guard = sdcwatch.init(
            model, optimizer, run_dir=tempfile.mkdtemp(), telemetry="off", console=False,
            fault_domain="gpu", fingerprint_every=FAR, **VARIANTS[variant],
        )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                out = model(torch.randn(ROWS, WIDTH))
                (out if inside else out.square().mean()).backward()
        optimizer.step()

    for _ in range(2):  # preflight is in the first
        step()
    optimizer.zero_grad()
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for _ in range(steps):
        step()
    found = memory("VmHWM") - before
    if guard is not None:
        guard.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", default="1,4,16")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.accumulate.split(",")]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)  # fixed: it grows by itself otherwise
    print("MiB above what was held before the step, for micro-batches a step: " + str(counts))
    with contextlib.closing(GlooPool(2, timeout_seconds=1200)) as pool:
        for inside in (False, True):
            print("loss " + ("inside the module" if inside else "outside"))
            for variant in VARIANTS:
                peaks = [
                    pool.run(peak, 2, variant, count, inside, arguments.steps)[0]
                    for count in counts
                ]
                print(f"  {variant:24s}" + "".join(f"{found:8.0f}" for found in peaks))


if __name__ == "__main__":
    main()
