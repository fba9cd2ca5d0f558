"""What tests of the generated files share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.monitor.config import MonitorConfig

ROOT = Path(__file__).parents[2]


def binary(*names: str) -> str:
    """The first of these programs on the PATH; without one the test is skipped and says so."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"none of {names} on the PATH: apt-get install prometheus prometheus-alertmanager")


@pytest.fixture(scope="session")
def config() -> MonitorConfig:
    return MonitorConfig()


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def promtool() -> str:
    return binary("promtool")


@pytest.fixture(scope="session")
def amtool() -> str:
    return binary("amtool")


@pytest.fixture(scope="session")
def rules() -> list[dict[str, Any]]:
    """The committed rules."""
    text = (ROOT / "alerts" / "sdcwatch.rules.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["groups"][0]["rules"]


@pytest.fixture(scope="session")
def dashboards() -> dict[str, dict[str, Any]]:
    """The committed dashboards by the end of their UID."""
    found = {}
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        found[path.stem.removeprefix("sdcwatch-")] = json.loads(path.read_text(encoding="utf-8"))
    return found
