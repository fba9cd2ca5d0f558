"""Options that must be the same on every rank, and what they leave unguarded."""

from __future__ import annotations

import json
from dataclasses import fields

import torch

from sdcwatch.config import GuardConfig
from sdcwatch.core.text import count, list_names, list_ranks
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.identity import unguarded_parameters

_OF_ONE_RANK = frozenset(
    ("run", "run_dir", "node", "instance_id", "gpu_uuid", "comm_hook", "telemetry", "console")
)
"""Options that may differ: everything else decides when a rank meets the others."""
_SAID_BY_DESYNC = frozenset(("start_step",))
"""The first header compares steps, and its error says which rank is at which."""


def require_same_options(exchange: Exchange, config: GuardConfig) -> None:
    """Check that every rank was given the same options. Every rank calls it.

    Raises:
        ConfigurationError: They differ; raised on every rank, naming the options and the ranks.
    """
    names = [f.name for f in fields(config) if f.name not in _OF_ONE_RANK | _SAID_BY_DESYNC]
    message = json.dumps({name: repr(getattr(config, name)) for name in names}).encode()
    rows = [json.loads(r) for r in exchange.gather(message, "the comparison of options")]
    said = []
    for name in names:
        sides: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            sides.setdefault(row.get(name, "nothing"), []).append(rank)
        if len(sides) > 1:
            parts = [f"{value} on {list_ranks(ranks)}" for value, ranks in sides.items()]
            said.append(f"`{name}` {', '.join(parts)}")
    if said:
        msg = (
            f"Expected the same options on every rank, but got {'; '.join(said)}. Pass the same "
            "arguments and SDCWATCH_* variables everywhere."
        )
        raise ConfigurationError(msg)


def why_partly_guarded(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sentence about parameters that another optimizer updates, or ""."""
    names = unguarded_parameters(module, optimizer)
    if not names:
        return ""
    return (
        f"{count(len(names), 'trainable parameter')} ({list_names(names)}) not in this optimizer: "
        "after a failed check only the guarded optimizer's update is skipped"
    )
