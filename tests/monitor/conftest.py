"""What tests of the generated files share."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.monitor.config import MonitorConfig

ROOT = Path(__file__).parents[2]


def _load(name: str, folder: str) -> Any:
    """A module of a folder that is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recorded_runs = _load("recorded", "tools")
real_servers = _load("servers", "tests/monitor")
synthetic = _load("scrapes", "tests/monitor")


@pytest.fixture(scope="session")
def config() -> MonitorConfig:
    return MonitorConfig()


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def promtool() -> str:
    return real_servers.binary("promtool")


@pytest.fixture(scope="session")
def amtool() -> str:
    return real_servers.binary("amtool")


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


@pytest.fixture
def inbox() -> Iterator[Any]:
    box = real_servers.Inbox()
    yield box
    box.close()


@pytest.fixture
def alertmanager(inbox: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of a real Alertmanager with our routes, quick, that notifies `inbox`."""
    with real_servers.quick_alertmanager(inbox.url, tmp_path) as url:
        yield url


@pytest.fixture
def ask_json() -> Callable[..., Any]:
    return real_servers.ask


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The recorded runs in a real Prometheus."""
    real_servers.binary("prometheus")
    real_servers.binary("promtool")
    folder = tmp_path_factory.mktemp("recorded")
    with recorded_runs.recorded_prometheus(folder, synthetic.everything()) as server:
        yield server


@pytest.fixture(scope="session", name="synthetic")
def _synthetic() -> Any:
    """Synthetic runs, as they are loaded beside the recorded ones."""
    return synthetic


@pytest.fixture(scope="session")
def substitute() -> Callable[..., str]:
    return recorded_runs.substitute


@pytest.fixture(scope="session", name="servers")
def _servers() -> Any:
    """Real servers, started on free ports."""
    return real_servers
