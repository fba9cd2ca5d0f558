"""`GuardCallback` in `transformers.Trainer`: where it saves, begins again, fails and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcwatch.core.records import PreflightDone, Progress, RunFinished, RunStarted
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from loops import STEPS, WORLD, Harness, as_launched, digest

pytestmark = pytest.mark.dist


def harness(rank: int, run_dir: str, **changed: Any) -> Harness:
    as_launched(rank)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    return Harness(rank, run_dir, **{"guarded": True, "faults": None, **changed})


def folders(made: Harness) -> list[int]:
    return sorted(int(name.partition("-")[2]) for name in made.saved() if "checkpoint-" in name)


# --- what Trainer saves ---


def withholding(rank: int, group: Any, run_dir: str, how: str) -> dict[str, Any]:
    """The gate says no at steps 4 and 8."""
    from trainer_loop import OwnData, TrainerCallback, make_trainer

    import sdcwatch

    asked: list[int] = []
    told: list[tuple[int, bool]] = []

    class Withholding(OwnData):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": 1.0 / self.state.global_step}  # better every time

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if how == "callback" and state.global_step == 4:
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            told.append((state.global_step, folder.is_dir()))

    def may_save(guard: sdcwatch.Guard) -> bool:
        asked.append(guard.step)
        return guard.step not in (4, 8)

    settings = {
        "steps": {"save_steps": 2, "max_steps": 8},
        "epoch": {"save_strategy": "epoch", "num_train_epochs": 1, "max_steps": -1},
        "best": {
            "save_strategy": "best",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
            "greater_is_better": False,
            "load_best_model_at_end": True,
            "max_steps": 8,
        },
        "callback": {"save_strategy": "no", "max_steps": 8},
    }
    before, sdcwatch.Guard.may_save = sdcwatch.Guard.may_save, may_save
    try:
        made = harness(rank, run_dir)
        trainer = make_trainer(made, Withholding, **settings[how])
        trainer.add_callback(Watch())
        trainer.train()
    finally:
        sdcwatch.Guard.may_save = before
    best = trainer.state.best_model_checkpoint
    return {
        "asked": asked,
        "told": told,
        "folders": folders(made),
        "best": (trainer.state.best_global_step, Path(best).name if best else None),
        "restored": "_save_checkpoint" not in vars(trainer),
    }


@pytest.mark.parametrize(
    ("how", "asked", "saved", "best"),
    [
        ("steps", [2, 4, 6, 8], [2, 6], (None, None)),
        ("epoch", [12], [12], (None, None)),
        ("best", [2, 2, 4, 6, 6, 8, 8], [2, 6], (6, "checkpoint-6")),
        ("callback", [4], [], (None, None)),
    ],
)
def test_no_checkpoint_is_written_without_leave_whatever_asks_for_it(
    pool: GlooPool, tmp_path: Path, how: str, asked: list[int], saved: list[int], best: Any
) -> None:
    for row in pool.run(withholding, WORLD, str(tmp_path), how):
        assert (row["asked"], row["folders"], row["best"]) == (asked, saved, best)
        assert row["restored"]
        if how == "best":
            assert row["told"] == [(2, True), (6, True)]


# --- resume ---


def resuming(rank: int, group: Any, run_dir: str) -> dict[str, Any]:
    from trainer_loop import logs_of, make_trainer

    constant = {"lr_scheduler_type": "constant"}  # the other depends on max_steps
    made = harness(rank, f"{run_dir}/guarded")
    make_trainer(made, max_steps=4, **constant).train()
    checkpoint = f"{made.run_dir}/checkpoint-4"
    reference = make_trainer(harness(rank, f"{run_dir}/plain", guarded=False), **constant)
    reference.train(resume_from_checkpoint=checkpoint)
    told_before = len(made.memory.records)
    second = make_trainer(made, **constant)
    second.train(resume_from_checkpoint=checkpoint)

    told = made.memory.records[told_before:]
    summary = json.loads((made.run_dir / "sdcwatch" / "summary.json").read_text())
    return {
        "same": digest(second.model) == digest(reference.model),
        "logs": logs_of(second)[:STEPS] == logs_of(reference)[:STEPS],
        "start": next(r.step for r in told if type(r) is RunStarted),
        "audits": [r.step for r in told if type(r) is Progress and r.comparisons],
        "finish": next(r.step for r in told if type(r) is RunFinished),
        "summary": summary,
    }


def test_a_resumed_run_goes_on_with_steps_schedule_and_summary(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(resuming, WORLD, str(tmp_path))

    for row in rows:
        assert row["same"], "weights as of the run that is resumed unguarded"
        assert row["logs"]
        assert (row["start"], row["finish"]) == (4, STEPS)
        assert row["audits"][-2:] == [8, 12], "preflight first, then on schedule"
    summary = rows[0]["summary"]
    assert (summary["segments"], summary["steps"], summary["last_step"]) == (2, STEPS, STEPS)


# --- begun again, failed ---


def begun_again(rank: int, group: Any, run_dir: str, how: str) -> dict[str, Any]:
    from trainer_loop import OwnData, TrainerCallback, make_trainer

    import sdcwatch

    made = harness(rank, run_dir)
    guards: list[sdcwatch.Guard] = []

    class Failing(OwnData):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2 and len(guards) == 1:
                if how == "memory":
                    raise RuntimeError("CUDA out of memory. Tried to allocate")
                raise ValueError("a label is out of range")
            return super().training_step(*args, **kwargs)

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            callbacks = trainer.callback_handler.callbacks
            guards.extend(c.guard for c in callbacks if hasattr(c, "guard"))

    settings = {"auto_find_batch_size": True} if how == "memory" else {}
    trainer = make_trainer(made, Failing, **settings)
    trainer.add_callback(Watch())
    if how == "memory":
        trainer.train()
    else:
        with pytest.raises(ValueError, match="a label is out of range"):
            trainer.train()
        trainer.train()
    ended = [r.step for r in made.memory.records if type(r) is RunFinished]
    coverage = [r.coverage.value for r in made.memory.records if type(r) is PreflightDone]
    return {
        "guards": len({id(g) for g in guards}),
        "ended": ended,
        "coverage": coverage,
        "closed": [g._closed for g in guards],
    }


@pytest.mark.parametrize("how", ["memory", "exception"])
def test_a_train_that_begins_again_closes_the_guard_before(
    pool: GlooPool, tmp_path: Path, how: str
) -> None:
    for row in pool.run(begun_again, WORLD, str(tmp_path), how):
        assert row["guards"] == 2
        assert row["closed"] == [True, True]
        assert row["ended"] == [2, STEPS]


# --- settings that people train with ---

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation in bf16, with label smoothing": {
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "label_smoothing_factor": 0.1,
    },
    "checkpointing, and evaluation in between": {
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
    },
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def with_settings(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    from trainer_loop import gpt2, logs_of, make_trainer

    left = []
    for guarded in (False, True):
        made = harness(rank, f"{run_dir}/{guarded}", guarded=guarded)
        changed = {"save_strategy": "no", "max_steps": 5, **SETTINGS[name]}
        trainer = make_trainer(made, build=gpt2, **changed)
        trainer.train()
        left.append((digest(trainer.model), logs_of(trainer)))
    done = [r for r in made.memory.records if type(r) is PreflightDone]
    return {
        "same": left[0] == left[1],
        "coverage": [(r.coverage.value, r.reason) for r in done],
        "story": [told for told in made.story() if told[1] != "checkpoint"],
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_covered_in_full_and_changes_no_number(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    for row in pool.run(with_settings, WORLD, str(tmp_path), name):
        assert row["same"]
        assert [coverage for coverage, _ in row["coverage"]] == ["full"], row["coverage"]
        assert row["story"] == []
