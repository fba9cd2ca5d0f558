"""The common run in Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from loops import SAVE_EVERY, STEPS, WORLD, Harness, Net, loader
from torch import nn

from sdcwatch.integrations.lightning import GuardCallback

for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", 0

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {k: float(v) for k, v in sorted(metrics.items())}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Faults(pl.Callback):
    def __init__(self, harness: Harness) -> None:
        self.harness, self.step = harness, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.harness.injector.detach()
        self.harness.injector.attach(trainer.strategy.model, trainer.optimizers[0])
        torch.manual_seed(self.harness.rank)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.harness.begin_step(trainer.global_step + 1, trainer.strategy.model)


def make_trainer(harness: Harness, **changed: Any) -> pl.Trainer:
    guard = [GuardCallback(**harness.options)] if harness.guarded else []
    checkpoint = ModelCheckpoint(
        dirpath=harness.run_dir, save_top_k=-1, every_n_train_steps=SAVE_EVERY, filename="{step}"
    )
    given = {
        "accelerator": "cpu",
        "devices": WORLD,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "plugins": [TorchElasticEnvironment()],
        "max_steps": STEPS,
        "logger": Rows(harness.logs),
        "log_every_n_steps": 1,
        "callbacks": [checkpoint, Faults(harness), *changed.pop("more", []), *guard],
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**given, **changed})


def guard_of(trainer: pl.Trainer) -> Any:
    (callback,) = (c for c in trainer.callbacks if isinstance(c, GuardCallback))
    return callback.guard


def lightning(harness: Harness, group: Any) -> nn.Module:
    pl.seed_everything(0, verbose=False)
    model, trainer = Model(), make_trainer(harness)
    try:
        trainer.fit(model, loader(harness.rank))
    finally:
        if harness.guarded:
            guard_of(trainer).close()  # as the end of the process does after an exception
    return model
