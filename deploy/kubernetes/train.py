"""A guarded training script for a cluster: replace the model, the loss and the batches by yours.

Started by torchrun on every node. What differs from a plain DDP script says sdcwatch or guard.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch


def parse() -> argparse.Namespace:
    """The command line, equal on every node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--run-dir", type=Path, help="where events.jsonl goes; shared, durable")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address /metrics binds to")
    parser.add_argument("--metrics-port", type=int, default=9464)
    parser.add_argument("--file-sd-dir", type=Path, help="where Prometheus looks for targets")
    parser.add_argument("--linger", type=float, default=30.0, help="seconds for a last scrape")
    return parser.parse_args()


def batches(steps: int, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of noise: stands for your data loader."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs, targets = torch.randn(2, 32, 64, generator=draw).to(device)
        yield inputs, targets


def train(options: argparse.Namespace, device: torch.device) -> None:
    """The loop; every rank runs it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    telemetry = sdcwatch.TelemetryConfig(
        prometheus_host=options.metrics_host,
        prometheus_port=options.metrics_port,
        file_sd_dir=options.file_sd_dir,
        export="node",
        linger_seconds=options.linger,
    )
    with sdcwatch.init(
        model,
        optimizer,
        checkpoint_every=options.checkpoint_every,
        run_dir=options.run_dir,
        telemetry=telemetry,
    ) as guard:
        for step, (x, y) in enumerate(batches(options.steps, dist.get_rank(), device), start=1):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.record_loss(loss)
            if step % options.checkpoint_every == 0:
                path = options.checkpoint_dir / f"step-{step:07d}.pt"
                guard.save_checkpoint(lambda path=path: save(layers, path), path=path)


def save(layers: nn.Module, path: Path) -> None:
    """Write the weights; the guard calls it on rank 0 if every check has passed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(layers.state_dict(), path)


def main() -> None:
    """Join the group, train, leave it in order."""
    options = parse()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    train(options, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
