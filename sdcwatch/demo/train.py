"""What each rank of the demo runs: an ordinary DDP training loop, guarded."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.demo.model import GPT, GPTConfig, draw_batch, load_text
from sdcwatch.demo.settings import (
    AUDIT_EVERY,
    CHECKPOINT_EVERY,
    FINGERPRINT_EVERY,
    DemoSettings,
    after,
    may_stop,
)
from sdcwatch.demo.unguarded import Unguarded
from sdcwatch.faults import FaultPlan, Injector, load_plan
from sdcwatch.report import can_write_pages
from sdcwatch.report.read import read_run

_UNTIL_INTERRUPTED_SECONDS = 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One stretch of a run between two launches.

    Attributes:
        number: Counted from 1.
        start_step: Step of the checkpoint it resumes from; 0 starts afresh.
        failed_step: Step at which the segment before was stopped; what was planted up to there
            is gone with the machine that was replaced.
    """

    number: int = 1
    start_step: int = 0
    failed_step: int = 0


class StepGuard(Protocol):
    """What the loop needs: the guard, or its stand-in that checks nothing."""

    def record_loss(self, loss: Tensor) -> None:
        """Show a loss."""
        ...

    def save_checkpoint(self, save: Any) -> object:
        """Save, if the guard lets it."""
        ...


def train(settings: DemoSettings, segment: Segment) -> int:
    """Train one segment on this rank; every rank of the launch calls it.

    Returns:
        0, or the exit code of the finding that stopped the run.
    """
    torch.set_num_threads(1)
    # Under --serve the leader keeps its endpoint up while the others wait for it.
    patience = timedelta(seconds=_UNTIL_INTERRUPTED_SECONDS if settings.serve else 300.0)
    dist.init_process_group("gloo", timeout=patience)
    code = 0
    try:
        Trainer(settings, segment).run()
    except sdcwatch.CorruptionDetected as finding:
        code = finding.exit_code
    # Without the barrier a rank that is done first can abort one that still talks to it.
    dist.barrier()
    dist.destroy_process_group()
    return code


def learning_rate(step: int, settings: DemoSettings) -> float:
    """Linear warm-up, then half a cosine down to a tenth of the peak."""
    if step <= settings.warmup_steps:
        return settings.peak_learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.peak_learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


class Trainer:
    """Model, data, optimizer and planted faults of one rank."""

    def __init__(self, settings: DemoSettings, segment: Segment) -> None:
        self.settings, self.segment = settings, segment
        self.rank = dist.get_rank()
        self.text = load_text()
        torch.manual_seed(settings.seed)
        self.model = GPT(GPTConfig())
        state = self._checkpoint()
        if state is not None:
            self.model.load_state_dict(state["model"])
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1
        )
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        plan = load_plan(settings.plan) if settings.plan is not None else FaultPlan()
        self.plan = after(plan, segment.failed_step)
        self.injector = Injector(self.plan, rank=self.rank, log_dir=settings.run_dir / "planted")
        self.injector.attach(self.ddp, self.optimizer)

    def run(self) -> None:
        """Train to the last step."""
        with self._guard() as guard:
            for step in range(self.segment.start_step + 1, self.settings.steps + 1):
                self._step(step, guard)
            if self.rank == 0 and not self.settings.unguarded and can_write_pages():
                self._leave_report()

    def _leave_report(self) -> None:
        """Leave a page so far: the W&B sink logs it as an artifact when it closes."""
        from sdcwatch.report.page import write_page

        run_dir = self.settings.run_dir
        write_page(read_run(run_dir), run_dir / "report.html")

    def _step(self, step: int, guard: StepGuard) -> None:
        # Data, dropout and learning rate depend on the step alone: a resumed run repeats itself.
        key = (self.settings.seed * 1_000_003 + step) * 4096 + self.rank
        torch.manual_seed(key)
        self.injector.begin_step(step)
        drawn = draw_batch(
            self.text.train_N, batch=self.settings.batch, context=self.model.config.context, key=key
        )
        batch = self.injector.batch(drawn)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        self.optimizer.zero_grad()
        logit_BTV = self.ddp(batch.token_BT, batch.mask_BT)
        loss = self.injector.loss(
            F.cross_entropy(logit_BTV.flatten(0, 1), batch.target_BT.flatten())
        )
        guard.record_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.settings.unguarded and not torch.isfinite(norm):
            self.optimizer.zero_grad()  # what many loops without a guard do, too
        self.optimizer.step()
        if step % CHECKPOINT_EVERY == 0:
            guard.save_checkpoint(lambda: self._save(step))

    def _save(self, step: int) -> None:
        path = self.settings.checkpoint(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        state = {
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, unfinished)
        unfinished.replace(path)

    def _checkpoint(self) -> dict[str, Any] | None:
        step = self.segment.start_step
        if step == 0:
            return None
        state: dict[str, Any] = torch.load(self.settings.checkpoint(step), weights_only=True)
        return state

    def _guard(self) -> AbstractContextManager[Any]:
        if self.settings.unguarded:
            return Unguarded(self.ddp, self.settings.run_dir)
        settings, node = self.settings, self.rank // self.settings.ranks_per_node
        guard: AbstractContextManager[Any] = sdcwatch.init(
            self.ddp,
            self.optimizer,
            audit_every=AUDIT_EVERY,
            fingerprint_every=FINGERPRINT_EVERY,
            checkpoint_every=CHECKPOINT_EVERY,
            start_step=self.segment.start_step,
            run=settings.run,
            run_dir=settings.run_dir,
            seed=settings.seed,
            node=f"sim-node-{node}",
            instance_id=f"sim-instance-{node}",
            gpu_uuid=f"cpu-sim-node-{node}-{self.rank % settings.ranks_per_node}",
            comm_hook=self.injector.comm_hook(),
            telemetry=self._telemetry(),
        )
        return guard

    def _telemetry(self) -> sdcwatch.TelemetryConfig:
        settings = self.settings
        wandb_init = None
        if settings.wandb != "off" and find_spec("wandb") is not None:
            wandb_init = {
                "project": "sdcwatch-demo",
                "name": f"{settings.run}-{self.segment.number}",
                "group": settings.run,
                "mode": settings.wandb,
                "dir": str(settings.run_dir),
            }
        serve = settings.serve and not may_stop(self.plan)
        return sdcwatch.TelemetryConfig(
            prometheus_host=settings.metrics_host,
            prometheus_port=settings.metrics_port,
            file_sd_dir=settings.file_sd_dir,
            wandb_init=wandb_init,
            linger_seconds=_UNTIL_INTERRUPTED_SECONDS if serve else settings.linger,
        )
