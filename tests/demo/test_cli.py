from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sdcwatch import __version__
from sdcwatch.cli import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdcwatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_help_lists_every_command_and_version_says_the_version() -> None:
    shown = CliRunner().invoke(cli, ["--help"])

    assert shown.exit_code == 0
    for name in ("demo", "monitor", "report", "stack"):
        assert f"\n  {name} " in shown.output
    assert CliRunner().invoke(cli, ["--version"]).output == f"sdcwatch, version {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["demo", "--help"], ["report", "--help"], ["stack", "--help"]],
)
def test_help_loads_neither_torch_nor_a_telemetry_sdk(arguments: list[str]) -> None:
    code = (
        "import sys; from sdcwatch.cli import cli\n"
        f"cli.main({arguments!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'opentelemetry', 'wandb', 'plotly'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_in_front_of_the_demo_loads_no_torch() -> None:
    code = (
        "import sys, sdcwatch.demo.run, sdcwatch.demo.settings, sdcwatch.demo.closing\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("grafana_foundation_sdk", ["monitor", "build", "--out", "RUN/built"], "monitor"),
        ("plotly", ["report", "RUN"], "report"),
        ("yaml", ["demo", "--run-dir", "RUN/new"], "monitor"),
    ],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, missing: str, command: list[str], extra: str
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"sys.argv = ['sdcwatch', *{[a.replace('RUN', str(tmp_path)) for a in command]!r}]\n"
        "from sdcwatch.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)

    assert done.returncode == 1
    assert f"pip install 'sdcwatch[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report", "nowhere"], 1, "Expected the directory of a run, but got nowhere"),
        (["demo", "--faults", "nowhere.yaml"], 1, "Expected a fault plan at nowhere.yaml"),
        (["demo", "--nodes", "0"], 2, "0 is not in the range"),
        (["demo", "--nodes", "1", "--ranks-per-node", "2"], 1, "at least 3 ranks"),
        (["no-such-command"], 2, "No such command 'no-such-command'"),
    ],
)
def test_bad_input_is_an_error_in_one_sentence(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sdcwatch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)

    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
