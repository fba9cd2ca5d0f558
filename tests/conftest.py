"""What every test shares: one thread per process, and no skips that CI would not notice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Set before any test imports torch: the number of threads decides bits, and the machine is shared.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

_MAY_SKIP = ("gpu", "netns")
_PACKAGES = Path(__file__).parents[1] / ".ci" / "packages"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-all",
        action="store_true",
        default=os.environ.get("CI", "").lower() in ("1", "true"),
        help="a skipped test is a failure, unless it needs a GPU or network namespaces; on by "
        "default where CI=true",
    )


# Folders whose tests share one pool of processes: on one worker, so that there is one pool.
_TOGETHER = ("dist", "endings", "gauntlet", "integrations")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole when tests run in parallel; what is started once stays on one worker."""
    from xdist.scheduler import LoadScopeScheduling

    # Not `xdist_group`: xdist 3.8 writes it where pytest 9.2 does not read it.
    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByFile(config, log)


def _group(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    folder = path.rpartition("/")[0]
    return folder if folder.removeprefix("tests/") in _TOGETHER else path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    may_skip = any(item.get_closest_marker(mark) for mark in _MAY_SKIP)
    required = item.config.getoption("--require-all") and not may_skip
    if report.skipped and required and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("--require-all"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but nothing may be skipped here: {_reason(report)}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    where = report.longrepr
    return str(where[2]) if isinstance(where, tuple) else str(where)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which Debian packages the tests would have used, if any is missing."""
    rows = (line.split() for line in _PACKAGES.read_text(encoding="utf-8").splitlines())
    wanted = [row for row in rows if row and row[0] != "#"]
    missing = sorted({package for binary, package in wanted if shutil.which(binary) is None})
    if missing:
        names = " ".join(missing)
        terminalreporter.write_line(
            f"Missing Debian packages, which tests need: {', '.join(missing)}. "
            f"Do: apt-get install --no-install-recommends {names}",
            yellow=True,
        )
