"""docs/options.md says what the config classes say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sdcwatch.config import GuardConfig, TelemetryConfig

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| `[^|]+` \| `([^|]+)` \| \S.* \|$", re.MULTILINE)


def shown(field: dataclasses.Field[object]) -> str:
    """A default as Python source, with double quotes."""
    if field.default_factory is not dataclasses.MISSING:
        return f"{type(field.default_factory()).__name__}()"
    return repr(field.default).replace("'", '"')


@pytest.mark.parametrize("config", [GuardConfig, TelemetryConfig], ids=lambda c: c.__name__)
def test_every_field_stands_in_the_page_with_its_default(
    config: type[GuardConfig] | type[TelemetryConfig],
) -> None:
    section = PAGE.split(f"## {config.__name__}\n")[1].split("\n## ")[0]

    assert dict(ROW.findall(section)) == {f.name: shown(f) for f in dataclasses.fields(config)}
