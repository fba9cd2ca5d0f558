"""The guard inside Lightning's Trainer, with ``strategy="ddp"``.

    Trainer(strategy="ddp", callbacks=[GuardCallback(audit_every=100)])

What is audited are the outermost calls inside `training_step`: of the LightningModule's own forward
and of the modules in it. So nothing is logged or counted twice, and manual optimisation, several
optimizers and losses that communicate need nothing special. If the self-audit finds that this is
not all, because `training_step` uses a parameter directly, then `training_step` itself is replayed,
with `log` and `log_dict` muted.

Fabric needs no callback: pass `sdcwatch.init` the module and the optimizer that it has set up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

import sdcwatch
from sdcwatch.integrations.gate import ReplacedMethods

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from typing_extensions import Unpack

    from sdcwatch.config import GuardOptions


class GuardCallback(Callback):
    """Guards every `fit` of a `Trainer`, from its first step to its last.

    Every rank adds it, with the same options. A checkpoint that `Guard.may_save` gives no leave for
    is not written, whatever `ModelCheckpoint` it belongs to; ``best_model_path`` stays on one that
    exists. The guard's step is saved with the checkpoint, and goes on from there on resume.

    Args:
        **options: Those of `sdcwatch.init`, without ``start_step``.

    Attributes:
        guard: The guard of the `fit` that runs, or of the last one; None before the first.

    Raises:
        ConfigurationError: At the beginning of `fit`; see `sdcwatch.init`. Where the strategy made
            no DDP model, as on a single device, say ``audit_every=None``.
    """

    def __init__(self, **options: Unpack[GuardOptions]) -> None:
        self._options = options
        self._methods = ReplacedMethods()
        self._resumed: int | None = None
        self._failed = False
        self.guard: sdcwatch.Guard | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the guard: DDP and the optimizers exist from here on."""
        self._end()
        self._failed = False
        # A step of the guard is one backward of DDP: as many as there are updates, as a rule.
        start = trainer.global_step if self._resumed is None else self._resumed
        self._resumed = None
        options: Any = {"start_step": start, **self._options}
        self.guard = sdcwatch.init(trainer.strategy.model, list(trainer.optimizers), **options)
        for checkpoint in trainer.checkpoint_callbacks:
            # Later, in `Trainer.save_checkpoint`, `best_model_path` would already name the file.
            for name in ("_save_topk_checkpoint", "_save_last_checkpoint"):
                self._methods.replace(checkpoint, name, self._gated)
            self._methods.replace(checkpoint, "on_exception", self._unless_corrupted)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Show the loss of an automatic step on the board."""
        if self.guard is not None and pl_module.automatic_optimization:
            self.guard.record_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the guard: `ModelCheckpoint` writes its last checkpoint in `on_train_end`."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """No rank can be asked any more; the guard ends with the process, or with the next fit."""
        self._failed = True

    def state_dict(self) -> dict[str, Any]:
        """The guard's step, for the checkpoint."""
        return {} if self.guard is None else {"step": self.guard.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The guard's step, from the checkpoint."""
        self._resumed = state_dict.get("step")

    def _end(self) -> None:
        self._methods.restore()
        if self.guard is not None:
            self.guard.close()

    def _gated(self, save: Callable[..., None]) -> Callable[..., None]:
        def gated(*args: Any, **kwargs: Any) -> None:
            if self._failed or self.guard is None or self.guard.may_save():
                save(*args, **kwargs)

        return gated

    def _unless_corrupted(self, save: Callable[..., None]) -> Callable[..., None]:
        # `ModelCheckpoint(save_on_exception=True)` saves on this rank alone, and nobody is asked.
        def gated(trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if not isinstance(exception, sdcwatch.CorruptionDetected):
                save(trainer, pl_module, exception)

        return gated
