"""The guard inside `transformers.Trainer`.

    trainer.add_callback(GuardCallback(trainer, audit_every=100))

`Trainer` makes its DDP model and its optimizer anew in every `train()`, so the guard is made at its
beginning and closed at its end. After an exception no callback is called any more: then the guard
ends with the process, or with the next `train()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy

import sdcwatch
from sdcwatch.integrations.gate import ReplacedMethods

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from typing_extensions import Unpack

    from sdcwatch.config import GuardOptions


class GuardCallback(TrainerCallback):
    """Guards every `train()` of a `Trainer`, from its first step to its last.

    Every rank adds it, with the same options. A checkpoint that `Guard.may_save` gives no leave for
    is not written, whatever asked for it: ``save_strategy`` "steps", "epoch" or "best", or another
    callback. An evaluation whose checkpoint would be withheld is not remembered as the best one.
    On resume the guard's steps go on from ``state.global_step``.

    Args:
        trainer: The trainer that it is added to.
        **options: Those of `sdcwatch.init`, without ``start_step``.

    Attributes:
        guard: The guard of the `train()` that runs, or of the last one; None before the first.

    Raises:
        ConfigurationError: At the beginning of `train()`; see `sdcwatch.init`. Where `Trainer` made
            no DDP model, as in a single process, say ``audit_every=None``.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[GuardOptions]) -> None:
        self._trainer, self._options = trainer, options
        self._methods = ReplacedMethods()
        self.guard: sdcwatch.Guard | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the guard: DDP and the optimizer exist from here on."""
        # `auto_find_batch_size` begins again after an out-of-memory, with another DDP and no end.
        self._end()
        trainer = self._trainer
        options: Any = {"start_step": state.global_step, **self._options}
        # `kwargs["model"]` is the bare module; DDP is around this one only.
        self.guard = sdcwatch.init(trainer.model_wrapped, trainer.optimizer, **options)
        self._methods.replace(trainer, "_save_checkpoint", self._gated_save)
        self._methods.replace(trainer, "_determine_best_metric", self._gated_best)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the guard."""
        self._end()

    def _end(self) -> None:
        self._methods.restore()
        if self.guard is not None:
            self.guard.close()

    def _may_save(self) -> bool:
        return self.guard is None or self.guard.may_save()

    def _gated_save(self, save: Callable[..., None]) -> Callable[..., None]:
        # The flag `control.should_save` is too early: "epoch", "best" and callbacks that come later
        # set it after this one was asked.
        def gated(*args: Any, **kwargs: Any) -> None:
            if self._may_save():
                save(*args, **kwargs)

        return gated

    def _gated_best(self, determine: Callable[..., bool]) -> Callable[..., bool]:
        # Otherwise `best_global_step` would point to a step without a checkpoint, and with
        # save_strategy="best" callbacks would be told of a folder that does not exist.
        def gated(*args: Any, **kwargs: Any) -> bool:
            trainer = self._trainer
            state = trainer.state
            before = state.best_metric, state.best_global_step
            best = determine(*args, **kwargs)
            saves = trainer.control.should_save or trainer.args.save_strategy == SaveStrategy.BEST
            if best and saves and not self._may_save():
                state.best_metric, state.best_global_step = before
                return False
            return best

        return gated
