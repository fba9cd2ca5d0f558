"""Planted faults: damage a training run from outside, on purpose, the same way every time.

A `FaultPlan` says what is planted, where, when and on which rank; an `Injector` applies it through
wrappers and hooks. The guard has no line about faults. Importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sdcwatch.faults.plan import Expectation, Fault, FaultPlan

if TYPE_CHECKING:
    from sdcwatch.faults.injector import Injector
    from sdcwatch.faults.plan import load_plan, parse_plan
    from sdcwatch.faults.planter import Planted, read_log

__all__ = [
    "Expectation",
    "Fault",
    "FaultPlan",
    "Injector",
    "Planted",
    "load_plan",
    "parse_plan",
    "read_log",
]

_LAZY = {
    "Injector": "injector",
    "Planted": "planter",
    "read_log": "planter",
    "load_plan": "plan",
    "parse_plan": "plan",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"sdcwatch.faults.{_LAZY[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
