"""Uneven inputs: the guard under ``torch.distributed.algorithms.Join``.

A rank that has run out of inputs shadows the one all-reduce that the guard makes in every step.
Audits, weight checks and investigations need every rank and are off from then on; the ranks that
still train learn it from a flag in the store, which is set before the first shadowed word.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from sdcwatch.errors import ConfigurationError, Desync, RankGone
from sdcwatch.guard.exchange import NEUTRAL, Exchange


class _Shadow(JoinHook):
    def __init__(self, guard: JoinableGuard) -> None:
        super().__init__()
        self._guard = guard

    def main_hook(self) -> None:
        """Stand in for this rank in a step of the others, if gradients are reduced in it."""
        guard = self._guard
        # DDP's own hook ran before this one and knows whether the others synchronise.
        if not guard.others_synchronise():
            return
        guard.shadow_step()
        device = guard.join_device
        try:
            guard.joined_exchange.mark_joined()
            guard.joined_exchange.max_and_read(
                torch.full((2,), NEUTRAL, dtype=torch.int64, device=device),
                torch.zeros(0, device=device),
                "a step after this rank ran out of inputs",
            )
        except (Desync, RankGone) as error:
            guard.remember(error)
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank has run out of inputs."""
        self._guard.joined_exchange.all_joined()
        self._guard.weights_synchronised()


class JoinableGuard(Joinable):
    """What `Join` needs of a guard: ``with Join([ddp_model, guard]): ...``."""

    def __init__(self, exchange: Exchange, device: torch.device, process_group: Any) -> None:
        super().__init__()
        self.joined_exchange = exchange
        self._joined_device, self._joined_group = device, process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that runs on ranks without inputs.

        Raises:
            ConfigurationError: ``divide_by_initial_world_size=False``: gradients would be divided
                by another number than the guard's communication hook divides by.
        """
        if not kwargs.get("divide_by_initial_world_size", True):
            msg = (
                "Expected Join(..., divide_by_initial_world_size=True), but got False. Leave it "
                "True with a guard: its communication hook divides by the initial world size."
            )
            raise ConfigurationError(msg)
        return _Shadow(self)

    def require_joined(self, ddp: Any) -> None:
        """Refuse a loop whose ranks run out of inputs one by one without the guard knowing.

        Raises:
            ConfigurationError: `Join` was given the model and not the guard, or the guard first.
        """
        theirs = ddp._join_config
        if not theirs.enable or (self._join_config.enable and theirs.is_first_joinable):
            return
        got = "the guard first" if self._join_config.enable else "a Join without the guard"
        msg = (
            f"Expected uneven inputs under Join([ddp_model, guard]), but got {got}: the others "
            "would wait for a rank that has no inputs left. Write `with Join([ddp_model, guard]):` "
            "(torch.distributed.algorithms.Join) in the place of ddp_model.join()."
        )
        raise ConfigurationError(msg)

    @abstractmethod
    def others_synchronise(self) -> bool:
        """Whether the ranks that still train reduce gradients in this iteration."""

    @abstractmethod
    def remember(self, error: BaseException) -> None:
        """What ends the run, for its last record."""

    @abstractmethod
    def shadow_step(self) -> None:
        """Count a step of the others."""

    @abstractmethod
    def weights_synchronised(self) -> None:
        """DDP has given every rank the weights of the last one to train."""

    @property
    def join_device(self) -> torch.device:
        """Device for the collectives of `Join` itself."""
        return self._joined_device

    @property
    def join_process_group(self) -> Any:
        """Group for the collectives of `Join` itself."""
        return self._joined_group
