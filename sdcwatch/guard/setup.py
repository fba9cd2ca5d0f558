"""Puts a guard together: validate, meet, build.

First what this rank was given is checked; then it introduces itself to the others, in one gather,
and all compare; then each collaborator is built from what it uses. Nothing is put on the model or
on the optimizer until all of that has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from sdcwatch.config import GuardConfig
from sdcwatch.core.text import joined
from sdcwatch.errors import ConfigurationError, RankGone
from sdcwatch.guard.build import Assembly, build
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.guarded import what_is_guarded
from sdcwatch.guard.meeting import meet
from sdcwatch.guard.reporter import open_console
from sdcwatch.guard.starting import give_up_run, open_run
from sdcwatch.sinks.base import Sink

_PARTS = ("name", "emit", "close")
"""What every sink has."""


def assemble(model: torch.nn.Module, optimizer: Any, options: Mapping[str, Any]) -> Assembly:
    """Check the arguments, meet the other ranks, and build. Every rank calls it.

    Nothing is put on the model yet; see `register_hook`.

    Raises:
        ConfigurationError, SchemaMismatch, RankGone: See `sdcwatch.init`.
    """
    arguments = dict(options)
    sinks: Sequence[Sink] = arguments.pop("sinks", ())
    _require_sinks(sinks)
    config = GuardConfig.from_env(**arguments)
    guarded = what_is_guarded(model, optimizer, config)
    with ExitStack() as undo:  # where it fails
        close_console = undo.callback(open_console(console=config.console))
        exchange = GlooExchange(
            guarded.process_group,
            deadline_seconds=config.deadline_seconds,
            late_seconds=config.late_seconds,
            device=guarded.device,
        )
        undo.push(lambda _, error, __: _leave(exchange, error))
        meeting = meet(exchange, config, guarded)
        reporter = open_run(config, guarded, exchange, meeting, sinks)
        undo.push(lambda _, error, __: give_up_run(reporter, error, _reason(error)))
        made = build(config, guarded, exchange, meeting, reporter, close_console)
        undo.pop_all()
        return made


def _require_sinks(sinks: Sequence[object]) -> None:
    for sink in sinks:
        missing = [part for part in _PARTS if not hasattr(sink, part)]
        if missing:
            msg = (
                f"Expected sinks with {joined(_PARTS)}, but got a {type(sink).__name__} without "
                f"{joined(missing)}. Derive it from sdcwatch.sinks.base.BaseSink."
            )
            raise ConfigurationError(msg)


def _leave(exchange: GlooExchange, error: BaseException | None) -> None:
    unmet = error.ranks if isinstance(error, RankGone) else ()
    exchange.leave(_reason(error), followed=isinstance(error, RankGone), unmet=unmet)
    exchange.close()


def _reason(error: BaseException | None) -> str:
    return f"sdcwatch.init ended with {type(error).__name__}"
