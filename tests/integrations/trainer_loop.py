"""The common run in `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import torch
import transformers
from loops import BATCH, LENGTH, SAVE_EVERY, STEPS, VOCABULARY, WIDTH, Harness, Net, Tokens, loader
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from sdcwatch.integrations.transformers import GuardCallback

transformers.logging.set_verbosity_error()


class OwnData(transformers.Trainer):
    """Takes each rank's batches as they are."""

    harness: Harness

    def get_train_dataloader(self) -> Any:
        return loader(self.harness.rank)


class Faults(TrainerCallback):
    """Plants faults, and tells the harness what was logged."""

    def __init__(self, harness: Harness, trainer: transformers.Trainer) -> None:
        self.harness, self.trainer = harness, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.harness.injector.detach()  # `train` may begin again, with another DDP model
        self.harness.injector.attach(self.trainer.model_wrapped, self.trainer.optimizer)
        if state.global_step == 0:
            torch.manual_seed(self.harness.rank)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.harness.begin_step(state.global_step + 1, self.trainer.model)


def forget_accelerate() -> None:
    """accelerate keeps the settings of the last run in the process."""
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def arguments(harness: Harness, **changed: Any) -> TrainingArguments:
    given = {
        "output_dir": str(harness.run_dir),
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": SAVE_EVERY,
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**{**given, **changed})


def make_trainer(
    harness: Harness, kind: type = OwnData, build: Callable[[], nn.Module] = Net, **changed: Any
) -> transformers.Trainer:
    forget_accelerate()
    transformers.set_seed(0)
    kind.harness = harness
    made = kind(
        model=build(), args=arguments(harness, **changed), eval_dataset=Tokens(99, 2 * BATCH)
    )
    made.remove_callback(transformers.PrinterCallback)
    made.add_callback(Faults(harness, made))
    if harness.guarded:
        made.add_callback(GuardCallback(made, **harness.options))
    return made


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "n_positions": LENGTH}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def logs_of(made: transformers.Trainer) -> list[dict[str, Any]]:
    """The logged history without timings."""
    timed = ("runtime", "per_second", "flos")
    return [
        {k: v for k, v in row.items() if not any(word in k for word in timed)}
        for row in made.state.log_history
    ]


def trainer(harness: Harness, group: Any) -> nn.Module:
    made = make_trainer(harness)
    try:
        made.train()
    finally:
        harness.logs += logs_of(made)
        for callback in made.callback_handler.callbacks:
            if isinstance(callback, GuardCallback):
                callback.guard.close()  # as the end of the process does after an exception
    return made.model
