"""What `import sdcwatch` gives, and what it does not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sdcwatch

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_few_sorted_and_all_there() -> None:
    assert sdcwatch.__all__ == sorted(sdcwatch.__all__)
    assert len(sdcwatch.__all__) <= 18
    assert [n for n in dir(sdcwatch) if not n.startswith("_")] == sdcwatch.__all__
    assert all(getattr(sdcwatch, name).__name__ == name for name in sdcwatch.__all__)
    assert all(getattr(sdcwatch, name).__doc__ for name in sdcwatch.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'sdcwatch' has no attribute 'Gaurd'"):
        _ = sdcwatch.Gaurd


def test_the_version_is_that_of_the_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{sdcwatch.__version__}"\n' in text


def test_importing_it_loads_nothing_heavy_starts_nothing_and_reads_no_environment() -> None:
    code = """
import os, sys, threading
class Untouchable(dict):
    def __getitem__(self, key): raise AssertionError(key)
    get = __contains__ = __getitem__
os.environ = Untouchable()
import sdcwatch
sdcwatch.GuardConfig, sdcwatch.Verdict, sdcwatch.RankGone, sdcwatch.TelemetryConfig
heavy = {"torch", "numpy", "opentelemetry", "wandb", "prometheus_client", "click", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
