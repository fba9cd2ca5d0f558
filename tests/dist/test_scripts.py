"""Whole training scripts as people write them, guarded with at most three lines of their own.

The loops have the order of calls of nanoGPT and of PyTorch's imagenet and multigpu examples, around
small models and random tensors. A line that guards ends in ``# guard``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import sdcwatch
from sdcwatch.core.records import PreflightDone, Progress, Verdict
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

WORLD = 3
Init = Callable[..., Any]


class Unguarded:
    """What the same script calls when nobody guards it."""

    def save_checkpoint(self, save: Callable[[], object]) -> bool:
        return True

    def close(self) -> None:
        pass


# --- a language model with gradient accumulation, a schedule and a scaler, as nanoGPT trains it ---


class GPT(nn.Module):
    """Tied embeddings, dropout, and the loss inside the forward."""

    def __init__(self, vocabulary: int = 32, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.attn = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.drop, self.mlp = nn.Dropout(0.1), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))
        q, k, v = self.attn(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.gelu(self.mlp(x))
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss(model: nn.Module, get_batch: Callable[[], Any]) -> float:
    model.eval()
    losses = torch.tensor([model(*get_batch())[1].item() for _ in range(2)])
    model.train()
    return float(losses.mean())


def language_model(rank: int, group: Any, init: Init) -> nn.Module:
    torch.manual_seed(1337 + rank)
    data = torch.randint(32, (512,))

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        ix = torch.randint(len(data) - 9, (4,))
        x = torch.stack([data[i : i + 8] for i in ix])
        return x, torch.stack([data[i + 1 : i + 9] for i in ix])

    gradient_accumulation_steps, max_iters, eval_interval = 2, 10, 4
    raw_model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model = DDP(raw_model, process_group=group)
    guard = init(model, optimizer, max_audit_age=eval_interval)  # guard
    ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)
    X, Y = get_batch()
    for iter_num in range(max_iters):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 1e-3 * 0.5 * (1.0 + math.cos(math.pi * iter_num / max_iters))
        if iter_num % eval_interval == 0 and rank == 0:
            estimate_loss(raw_model, get_batch)
        if iter_num % eval_interval == 0 and iter_num > 0:
            guard.save_checkpoint(lambda: raw_model.state_dict())  # guard
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with ctx:
                _logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    guard.close()  # guard
    return raw_model


# --- a classifier with a validation after each epoch, as PyTorch's imagenet example trains it ---


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.images = torch.randn(size, 3, 6, 6, generator=draw)
        self.labels = torch.randint(5, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [float(correct[:k].reshape(-1).float().sum()) for k in topk]


def classifier(rank: int, group: Any, init: Init) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    model = DDP(net, process_group=group)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    guard = init(model, optimizer)  # guard
    sampler = DistributedSampler(Images(48), num_replicas=WORLD, rank=rank)
    train_loader = DataLoader(Images(48), batch_size=4, sampler=sampler)
    val_loader = DataLoader(Images(8), batch_size=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            accuracy(output, target, topk=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                accuracy(model(images), target, topk=(1, 5))
        scheduler.step()
        guard.save_checkpoint(lambda: model.state_dict())  # guard
    guard.close()  # guard
    return net


# --- a trainer class, as PyTorch's multigpu example has it ---


class Trainer:
    def __init__(
        self, model: nn.Module, train_data: Any, optimizer: torch.optim.Optimizer, group: Any
    ) -> None:
        self.train_data, self.optimizer = train_data, optimizer
        self.model = DDP(model, process_group=group)

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs: int, init: Init) -> None:
        guard = init(self.model, self.optimizer)  # guard
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            guard.save_checkpoint(lambda: self.model.module.state_dict())  # guard
        guard.close()  # guard


def trainer(rank: int, group: Any, init: Init) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    sampler = DistributedSampler(Images(48), num_replicas=WORLD, rank=rank)
    Trainer(net, DataLoader(Images(48), batch_size=4, sampler=sampler), optimizer, group).train(
        2, init
    )
    return net


SCRIPTS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any]]] = {
    "nanoGPT": (language_model, language_model),
    "imagenet": (classifier, classifier),
    "multigpu": (trainer, Trainer.train),
}


def digest(net: nn.Module) -> str:
    state = net.state_dict().values()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest()


@contextlib.contextmanager
def reseeded() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def both(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    script, memory = SCRIPTS[name][0], MemorySink()

    def init(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> sdcwatch.Guard:
        every = {"audit_every": 3, "fingerprint_every": 2, "node": f"n{rank}", "run_dir": run_dir}
        return sdcwatch.init(model, optimizer, **{**every, **QUIET, **options}, sinks=[memory])

    with reseeded():
        plain = digest(script(rank, group, lambda *given, **options: Unguarded()))
        guarded = digest(script(rank, group, init))
    told = memory.records
    return {
        "same": plain == guarded,
        "weights": guarded,
        "coverage": [r.coverage.value for r in told if type(r) is PreflightDone],
        "verdicts": [r.reason for r in told if type(r) is Verdict],
        "comparisons": sum(r.comparisons for r in told if type(r) is Progress),
        "steps": max(r.step for r in told),
    }


@pytest.mark.parametrize(
    ("name", "steps", "audits"), [("nanoGPT", 10, 5), ("imagenet", 8, 4), ("multigpu", 8, 4)]
)
def test_a_script_with_three_lines_added_is_covered_in_full_and_trains_the_same_weights(
    pool: GlooPool, tmp_path: Path, name: str, steps: int, audits: int
) -> None:
    assert inspect.getsource(SCRIPTS[name][1]).count("# guard") == 3
    for row in pool.run(both, WORLD, str(tmp_path), name):
        assert row["same"]
        assert (row["coverage"], row["verdicts"]) == (["full"], [])
        assert (row["steps"], row["comparisons"]) == (steps, audits * WORLD)
