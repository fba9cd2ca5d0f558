"""A small guarded (or plain) training run on one rank of the pool, and what it left behind.

Test files put this directory on `sys.path` and import it; so do the processes of the pool, which
load a test file by its path. What crosses the processes are plain values and sdcwatch's own types.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Record, RunStarted, Verdict
from sdcwatch.errors import CorruptionDetected
from sdcwatch.faults import FaultPlan, Injector
from sdcwatch.testing import MemorySink

WIDTH = 12
QUIET: dict[str, Any] = {"telemetry": "off", "console": False}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8), nn.Linear(8, 4)
    )


def mse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def random_batch(rank: int, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10_000 * rank + 10 * step + micro)
    return torch.randn(6, WIDTH, generator=draw), torch.randn(6, 4, generator=draw)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(kw_only=True)
class Job:
    """What to train and how.

    Attributes:
        guard: Options of `sdcwatch.init`; None trains without a guard.
        between: Called with the DDP model after it was made, before the guard sees it.
        probe: Steps around whose update weights and optimizer state are digested.
        save_at: Steps at which a checkpoint is asked for.
    """

    build: Callable[[], nn.Module] = mlp
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] = mse
    batch: Callable[[int, int, int], Any] = random_batch
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    ddp: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 6
    accumulate: int = 1
    set_to_none: bool = True
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    closure: bool = False
    plan: FaultPlan | None = None
    guard: Mapping[str, Any] | None = None
    between: Callable[[nn.Module], None] | None = None
    probe: tuple[int, ...] = ()
    save_at: tuple[int, ...] = ()
    save: Callable[[int], object] = lambda step: None


def train(rank: int, group: Any, job: Job) -> dict[str, Any]:
    """Train and return what can be asserted on: digests, records, errors."""
    run = _Run(rank, group, job)
    try:
        run.loop()
    except CorruptionDetected as error:
        run.left["stopped"] = (error.exit_code, error.verdict)
    finally:
        if run.guard is not None:
            run.guard.close()
    return run.results()


class _Run:
    def __init__(self, rank: int, group: Any, job: Job) -> None:
        self.rank, self.job = rank, job
        self.net = job.build()
        self.model = DistributedDataParallel(
            self.net, process_group=group, bucket_cap_mb=0.001, **job.ddp
        )
        if job.between is not None:
            job.between(self.model)
        self.optimizer = job.optimizer(self.net.parameters())
        self.memory = MemorySink()
        self.injector = Injector(job.plan or FaultPlan(), rank=rank)
        self.injector.attach(self.model, self.optimizer)
        self.guard: sdcwatch.Guard | None = None
        self.group = group
        self.left: dict[str, Any] = {"stopped": None, "saved": [], "probed": {}}
        torch.manual_seed(100 + rank)

    def loop(self) -> None:
        job = self.job
        if job.guard is not None:
            options = {"node": f"n{self.rank // 2}", **QUIET, **job.guard}
            hook = self.injector.comm_hook(self.group)
            self.guard = sdcwatch.init(
                self.model,
                self.optimizer,
                sinks=[self.memory],
                comm_hook=hook,
                **options,
            )
        for step in range(1, job.steps + 1):
            self.injector.begin_step(step)
            before = self._state() if step in job.probe else ""
            self._step(step)
            if step in job.probe:
                grads = [p.grad for p in self.net.parameters() if p.grad is not None]
                zeroed = all(not bool(g.any()) for g in grads)
                self.left["probed"][step] = (before == self._state(), zeroed)
            if step in job.save_at and self.guard is not None:
                self.left["saved"].append(self.guard.save_checkpoint(lambda s=step: job.save(s)))

    def _step(self, step: int) -> None:
        job = self.job
        if job.closure:
            self.optimizer.step(lambda: self._compute(step))
            return
        self._compute(step)
        if job.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), job.clip)
        if job.scaler is None:
            self.optimizer.step()
            return
        job.scaler.step(self.optimizer)
        job.scaler.update()

    def _compute(self, step: int) -> torch.Tensor:
        job = self.job
        self.optimizer.zero_grad(set_to_none=job.set_to_none)
        for micro in range(job.accumulate):
            last = micro == job.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                batch = self.injector.batch(job.batch(self.rank, step, micro))
                loss = self.injector.loss(job.loss_fn(self.model, batch))
                scaled = loss / job.accumulate
                (scaled if job.scaler is None else job.scaler.scale(scaled)).backward()
        return loss.detach()

    def _state(self) -> str:
        tensors = [p.detach() for p in self.net.parameters()]
        numbers: list[Any] = []
        for group in self.optimizer.param_groups:
            numbers.append(sorted((k, repr(v)) for k, v in group.items() if k != "params"))
            for parameter in group["params"]:
                for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        tensors.append(value)
                    else:
                        numbers.append((key, repr(value)))
        return digest(tensors) + repr(numbers)

    def results(self) -> dict[str, Any]:
        self.injector.detach()
        scaler = self.job.scaler
        return {
            **self.left,
            "weights": digest(p.detach() for p in self.net.parameters()),
            "records": self.memory.records,
            "planted": [(p.step, p.role, p.changed) for p in self.injector.log],
            "scale": None if scaler is None else scaler.get_scale(),
        }


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"empty")
    return sha.hexdigest()


def of(result: Mapping[str, Any], kind: type[Record]) -> list[Any]:
    """The records of one type that a rank's guard gave out."""
    return [r for r in result["records"] if type(r) is kind]


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    return of(result, Verdict)


def started(result: Mapping[str, Any]) -> RunStarted:
    (start,) = of(result, RunStarted)
    return start


def told(verdict: Verdict) -> tuple[int, str, str, tuple[int, ...]]:
    """A verdict in short: step, check, outcome, named ranks."""
    named = tuple(s.rank for s in verdict.suspects)
    return verdict.step, verdict.check.value, verdict.outcome.value, named


def same_on_every_rank(results: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """The verdicts in short, after checking that every rank reached the same."""
    said = [[told(v) for v in verdicts(r)] for r in results]
    assert all(row == said[0] for row in said), said
    return said[0]
