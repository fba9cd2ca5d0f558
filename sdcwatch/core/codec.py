"""Frozen dataclasses to plain JSON values and back, by their annotations."""

from __future__ import annotations

import math
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    """A value made of frozen dataclasses and enums as plain JSON values."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _typed(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _typed(value, next(a for a in args if a is not type(None)))
    if origin is tuple:
        return tuple(_typed(v, args[0]) for v in value)
    if origin is dict:
        return {k: _typed(v, args[1]) for k, v in value.items()}
    if hint is float:
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    return value


def build(cls: type, data: dict[str, Any]) -> Any:
    """A frozen dataclass from plain JSON values; fields it does not know are left out.

    Raises:
        TypeError, AttributeError, ValueError: The values do not fit its fields.
    """
    hints = _hints(cls)
    known = {f.name for f in fields(cls)}
    return cls(**{k: _typed(v, hints[k]) for k, v in data.items() if k in known})
