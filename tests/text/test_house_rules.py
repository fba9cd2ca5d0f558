"""Rules that no linter holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / ".ci" / "packages").read_text(encoding="utf-8")

SKIPS = """\
import pytest

def test_that_passes():
    pass

def test_that_skips():
    pytest.skip("no such binary")

@pytest.mark.gpu
def test_that_may_skip():
    pytest.skip("no GPU")

@pytest.mark.xfail(strict=True, reason="known")
def test_that_is_known_to_fail():
    raise AssertionError
"""


def run_pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of `folder` under a copy of our conftest."""
    for name in ("tests/conftest.py", ".ci/packages"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for test in folder.glob("test_*.py"):
        test.rename(folder / "tests" / test.name)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)],
        capture_output=True,
        text=True,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables},
        cwd=folder,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 0, "1 passed, 2 skipped, 1 xfailed"),
        (["--require-all"], 1, "1 failed, 1 passed, 1 skipped, 1 xfailed"),
    ],
)
def test_a_skip_is_a_failure_where_everything_is_required(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS, encoding="utf-8")

    done = run_pytest(tmp_path, *arguments)

    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


def test_a_module_that_skips_itself_is_a_failure_too(tmp_path: Path) -> None:
    text = "import pytest\npytest.importorskip('no_such_module')\n"
    (tmp_path / "test_module.py").write_text(text, encoding="utf-8")

    assert run_pytest(tmp_path).returncode in (0, 5)
    assert run_pytest(tmp_path, "--require-all").returncode not in (0, 5)


def test_the_last_line_but_one_names_the_debian_packages_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    wanted = [line.split() for line in PACKAGES.splitlines() if not line.startswith("#")]
    for binary in (row[0] for row in wanted):
        (binaries / binary).touch(mode=0o755)

    complete = run_pytest(tmp_path, PATH=str(binaries))
    (binaries / "amtool").unlink()
    (binaries / "chromium").unlink()
    lacking = run_pytest(tmp_path, PATH=str(binaries))

    assert "Debian" not in complete.stdout
    assert lacking.stdout.splitlines()[-2] == (
        "Missing Debian packages, which tests need: chromium, prometheus-alertmanager. "
        "Do: apt-get install --no-install-recommends chromium prometheus-alertmanager"
    )


def test_no_module_is_longer_than_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in ROOT.glob("sdcwatch/**/*.py")
    }
    assert {name for name, n in lengths.items() if n > 600} == set()


def test_nothing_is_left_to_be_done_later() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    files = [*ROOT.glob("sdcwatch/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/*.md")]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if "node_modules" not in path.parts
        and any(word in path.read_text(encoding="utf-8") for word in words)
    ]

    assert found == []
