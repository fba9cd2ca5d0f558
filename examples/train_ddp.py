"""A plain DDP training script under guard.

    torchrun --nproc-per-node 2 examples/train_ddp.py

One line guards it, marked with "guard:"; a second lets the checks decide about checkpoints. A
student network learns what a fixed teacher computes, so there is nothing to download; on a machine
with GPUs each rank takes one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 8))


def batches(steps: int, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    teacher = network(16).to(device).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        inputs = torch.randn(64, 32, generator=draw).to(device)
        yield inputs, teacher(inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--run-dir", type=Path, help="default: sdcwatch-runs/<run>")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network(256).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)

    # guard: every rank makes one, after DDP and the optimizer
    guard = sdcwatch.init(model, optimizer, run_dir=options.run_dir)
    for step, (x, y) in enumerate(batches(options.steps, dist.get_rank(), device), start=1):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            path = options.checkpoint_dir / f"step-{step}.pt"
            # guard: every rank calls it, and rank 0 saves if every check stands behind it
            guard.save_checkpoint(lambda path=path: torch.save(model.state_dict(), path), path=path)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    guard.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
