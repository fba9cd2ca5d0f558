"""A guard against silent data corruption in PyTorch DistributedDataParallel training.

Importing this package loads no torch, starts nothing and reads no environment: names resolve on
first use. Start with `sdcwatch.init`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdcwatch.checks.replaying import replaying
    from sdcwatch.config import GuardConfig, TelemetryConfig
    from sdcwatch.core.records import Check, Outcome, Verdict
    from sdcwatch.errors import (
        ConfigurationError,
        CorruptionDetected,
        Desync,
        RankGone,
        SchemaMismatch,
        SdcwatchError,
        SoftwareDivergence,
    )
    from sdcwatch.guard.api import Guard, init

__version__ = "0.1.0"

_HOMES = {
    "Check": "sdcwatch.core.records",
    "ConfigurationError": "sdcwatch.errors",
    "CorruptionDetected": "sdcwatch.errors",
    "Desync": "sdcwatch.errors",
    "Guard": "sdcwatch.guard.api",
    "GuardConfig": "sdcwatch.config",
    "Outcome": "sdcwatch.core.records",
    "RankGone": "sdcwatch.errors",
    "SchemaMismatch": "sdcwatch.errors",
    "SdcwatchError": "sdcwatch.errors",
    "SoftwareDivergence": "sdcwatch.errors",
    "TelemetryConfig": "sdcwatch.config",
    "Verdict": "sdcwatch.core.records",
    "init": "sdcwatch.guard.api",
    "replaying": "sdcwatch.checks.replaying",
}

__all__ = [
    "Check",
    "ConfigurationError",
    "CorruptionDetected",
    "Desync",
    "Guard",
    "GuardConfig",
    "Outcome",
    "RankGone",
    "SchemaMismatch",
    "SdcwatchError",
    "SoftwareDivergence",
    "TelemetryConfig",
    "Verdict",
    "init",
    "replaying",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module 'sdcwatch' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
