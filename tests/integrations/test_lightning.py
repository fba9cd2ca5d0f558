"""`GuardCallback` in Lightning's Trainer: ways to write a step, what is saved, resume, failure."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdcwatch.core.records import PreflightDone, Progress, RunFinished, RunStarted
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from loops import STEPS, WORLD, Harness, as_launched, digest, loader

pytestmark = pytest.mark.dist


def harness(rank: int, run_dir: str, **changed: Any) -> Harness:
    as_launched(rank)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    return Harness(rank, run_dir, **{"guarded": True, "faults": None, **changed})


# --- ways to write a training_step ---


def models() -> dict[str, Any]:
    """Made where Lightning is."""
    import torchmetrics
    from lightning_loop import Model, pl
    from loops import VOCABULARY, WIDTH

    class Logging(Model):
        """Logs metrics of every kind, and keeps lists and counters of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=VOCABULARY)
            self.mean = torchmetrics.MeanMetric()
            self.seen: list[Any] = []
            self.calls = 0

        def forward(self, batch: Any) -> Any:
            return self.net(**batch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch)
            self.calls += 1
            self.accuracy(out["logits"].flatten(0, 1), batch["labels"].flatten())
            self.mean.update(out["loss"].detach())
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.log("synced", out["loss"], sync_dist=True, on_step=True, on_epoch=True)
            self.log_dict({"calls": float(self.calls)}, on_step=True, on_epoch=True)
            self.seen.append(float(out["loss"]))
            return {"loss": out["loss"] * (1 + 0.1 * self.calls), "extra": batch_idx}

    class Direct(Logging):
        """Uses a parameter of its own, and all of them in a penalty, outside of any call."""

        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            penalty = sum(p.square().sum() for p in self.parameters())
            return loss * self.temperature + 1e-3 * penalty

    class Gathering(Model):
        """A contrastive loss over all ranks."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            z = self.net(batch["input_ids"])["logits"].mean(1)
            everyone = self.all_gather(z, sync_grads=True).flatten(0, 1)
            loss = F.cross_entropy(z @ everyone.T, torch.arange(len(z)) + len(z) * self.global_rank)
            self.log("loss", loss)
            return loss

    class Gan(pl.LightningModule):
        """Manual optimisation: two optimizers, four calls, two backwards a step."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.parts = nn.ModuleDict(
                {
                    "generator": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, WIDTH)),
                    "critic": nn.Sequential(
                        nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.Linear(16, 1)
                    ),
                }
            )

        def training_step(self, batch: Any, batch_idx: int) -> None:
            make, judge = self.parts["generator"], self.parts["critic"]
            of_generator, of_critic = self.optimizers()
            real = F.one_hot(batch["input_ids"], VOCABULARY).float().mean(1)[:, :WIDTH]
            self.toggle_optimizer(of_generator)
            loss = F.softplus(-judge(make(torch.randn(len(real), 8)))).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_critic)
            fake = make(torch.randn(len(real), 8)).detach()
            against = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
            of_critic.zero_grad()
            self.manual_backward(against)
            of_critic.step()
            self.untoggle_optimizer(of_critic)
            self.log_dict({"g": loss, "c": against})

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in self.parts.values()]

    return {"logging": Logging, "direct": Direct, "gathering": Gathering, "gan": Gan}


PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    # name: model, settings, steps of the guard
    "logging": ("logging", {"gradient_clip_val": 0.5}, 12),
    "bf16 and accumulation": (
        "logging",
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_steps": 6},
        6,
    ),
    "a parameter used directly": ("direct", {"max_steps": 6}, 6),
    "a loss that communicates": ("gathering", {"max_steps": 6}, 6),
    "manual optimisation": ("gan", {"max_steps": 8}, 8),
}


def step_written(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    from lightning_loop import DDPStrategy, make_trainer, pl

    model_name, settings, _ = PLANS[name]
    left = []
    for guarded in (False, True):
        made = harness(rank, f"{run_dir}/{guarded}", guarded=guarded)
        pl.seed_everything(0, verbose=False)
        model = models()[model_name]()
        unused = model_name == "gan"
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
        trainer = make_trainer(made, strategy=strategy, **settings)
        trainer.fit(model, loader(rank))
        numbers = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
        left.append((digest(model), made.logs, numbers, getattr(model, "seen", None)))
    told = made.memory.records
    preflight = [r for r in told if type(r) is PreflightDone]
    return {
        "same": [a == b for a, b in zip(*left, strict=True)],
        "logged": len(made.logs),
        "coverage": [(r.coverage.value, r.reason, r.notes) for r in preflight],
        "audits": sum(r.comparisons for r in told if type(r) is Progress),
        "steps": max(r.step for r in told),
        "story": [one for one in made.story() if one[1] != "checkpoint"],
    }


@pytest.mark.parametrize("name", PLANS)
def test_a_way_to_write_a_step_is_covered_in_full_and_changes_no_number(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    for row in pool.run(step_written, WORLD, str(tmp_path), name):
        assert [c for c, _, _ in row["coverage"]] == ["full"], row["coverage"]
        assert row["story"] == []
        assert row["same"] == [True] * 4, "weights, rows, callback metrics, the user's own list"
        assert row["steps"] == PLANS[name][2]
        assert row["audits"] > 0
        assert row["logged"] > 0
        whole = any("training_step itself" in note for note in row["coverage"][0][2])
        assert whole == (name == "a parameter used directly")


# --- what ModelCheckpoint saves ---


def withholding(rank: int, group: Any, run_dir: str, how: str) -> dict[str, Any]:
    """The gate says no at steps 4 and 8."""
    from lightning_loop import Model, ModelCheckpoint, make_trainer, pl

    import sdcwatch

    def may_save(guard: sdcwatch.Guard) -> bool:
        return guard.step not in (4, 8)

    class Falling(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("falls", 1.0 / (batch_idx + 1))
            return loss

    settings: dict[str, dict[str, Any]] = {
        "top": {"monitor": "falls", "save_top_k": 2, "mode": "min", "save_last": True},
        "last": {"save_top_k": 0, "save_last": True},
        "epoch": {"save_top_k": -1, "save_last": True},
    }
    every = {} if how == "epoch" else {"every_n_train_steps": 2}
    before, sdcwatch.Guard.may_save = sdcwatch.Guard.may_save, may_save
    try:
        made = harness(rank, run_dir)
        pl.seed_everything(0, verbose=False)
        kept = ModelCheckpoint(
            dirpath=made.run_dir / "kept", filename="{step}", **settings[how], **every
        )
        trainer = make_trainer(made, more=[kept], max_steps=8)
        trainer.fit(Falling(), loader(rank))
        trainer.strategy.barrier()
    finally:
        sdcwatch.Guard.may_save = before
    files = sorted(p.name for p in (made.run_dir / "kept").glob("*"))
    return {
        "files": files,
        "best": Path(kept.best_model_path).name,
        "exists": not kept.best_model_path or Path(kept.best_model_path).is_file(),
        "restored": "_save_topk_checkpoint" not in vars(kept),
    }


@pytest.mark.parametrize(
    ("how", "files", "best"),
    [
        ("top", ["last.ckpt", "step=2.ckpt", "step=6.ckpt"], "step=6.ckpt"),
        ("last", ["last.ckpt"], ""),
        ("epoch", [], ""),
    ],
)
def test_no_checkpoint_is_written_without_leave_and_the_best_one_exists(
    pool: GlooPool, tmp_path: Path, how: str, files: list[str], best: str
) -> None:
    for row in pool.run(withholding, WORLD, str(tmp_path), how):
        assert (row["files"], row["best"]) == (files, best)
        assert row["exists"]
        assert row["restored"]


# --- resume and failure ---


def resuming(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    from lightning_loop import Model, make_trainer, pl

    made = harness(rank, f"{run_dir}/broken")
    pl.seed_everything(0, verbose=False)
    make_trainer(made, max_epochs=1, max_steps=-1).fit(Model(), loader(rank))
    told_before = len(made.memory.records)
    trainer = make_trainer(made, max_epochs=2, max_steps=2 * STEPS)
    checkpoint: dict[str, Any] = {"ckpt_path": str(made.run_dir / f"step={STEPS}.ckpt")}
    if "weights_only" in inspect.signature(trainer.fit).parameters:  # not in Lightning 2.4
        checkpoint["weights_only"] = False
    trainer.fit(Model(), loader(rank), **checkpoint)
    trainer.strategy.barrier()

    told = made.memory.records[told_before:]
    summary = json.loads((made.run_dir / "sdcwatch" / "summary.json").read_text())
    return {
        "start": next(r.step for r in told if type(r) is RunStarted),
        "audits": [r.step for r in told if type(r) is Progress and r.comparisons],
        "finish": next(r.step for r in told if type(r) is RunFinished),
        "summary": (summary["segments"], summary["steps"], summary["last_step"]),
    }


def test_a_resumed_fit_goes_on_with_steps_schedule_and_summary(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(resuming, WORLD, str(tmp_path))

    for row in rows:
        assert (row["start"], row["finish"]) == (STEPS, 2 * STEPS)
        assert row["audits"][-3:] == [16, 20, 24], "preflight first, then on schedule"
    assert rows[0]["summary"] == (2, 2 * STEPS, 2 * STEPS)


def failing(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    from lightning_loop import Model, ModelCheckpoint, guard_of, make_trainer, pl

    class Failing(Model):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3 and self.fails:
                raise ValueError("a label is out of range")
            return super().training_step(batch, batch_idx)

    made = harness(rank, run_dir)
    pl.seed_everything(0, verbose=False)
    model = Failing()
    emergency = ModelCheckpoint(dirpath=made.run_dir / "kept")
    emergency.save_on_exception = True  # an argument since Lightning 2.6
    trainer = make_trainer(made, more=[emergency])
    with pytest.raises(ValueError, match="a label is out of range"):
        trainer.fit(model, loader(rank))
    first = guard_of(trainer)
    model.fails = False
    trainer.fit(model, loader(rank))
    second = guard_of(trainer)
    return {
        "closed": (first is not second, first._closed, second._closed),
        "ended": [r.step for r in made.memory.records if type(r) is RunFinished],
    }


def test_a_fit_after_an_exception_closes_the_guard_before(pool: GlooPool, tmp_path: Path) -> None:
    for row in pool.run(failing, WORLD, str(tmp_path)):
        assert row["closed"] == (True, True, True)
        assert row["ended"][0] == 3
