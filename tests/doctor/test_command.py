"""`sdcwatch doctor` on this machine."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from sdcwatch.cli import cli
from sdcwatch.config import relevant_variables
from sdcwatch.doctor.checks import OLDEST_TORCH

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["doctor", *arguments], standalone_mode=False)
    assert done.exception is None, done.output
    return done.return_value, done.output


def as_json(*arguments: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The facts, and the findings by name."""
    data = json.loads(run("--json", *arguments)[1])
    return data["facts"], {finding["name"]: finding for finding in data["findings"]}


def test_the_table_names_what_is_wrong_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "1")
    monkeypatch.setenv("SDCWATCH_AUDIT_EVERY", "none")

    code, shown = run()

    said = re.sub(r"[│\s]+", " ", shown)
    assert code == 1
    assert "✗ problem TORCH_NCCL_NAN_CHECK on: a NaN ends the process" in said
    assert "→ unset TORCH_NCCL_NAN_CHECK" in said
    assert "! warning SDCWATCH_AUDIT_EVERY no replay audits: check 2 is off" in said
    assert re.search(r"^\d+ problems?, \d+ warnings?, \d+ ok$", shown, re.MULTILINE)


def test_a_machine_without_a_problem_ends_with_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    for name in ("TORCH_NCCL_NAN_CHECK", "TORCH_DIST_NAN_CHECK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    code, shown = run("--run-dir", str(tmp_path), "--ranks", "3")

    assert code == 0, shown


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    facts, findings = as_json("--run-dir", str(tmp_path / "a" / "b"), "--ranks", "6")

    assert facts["software"]["torch"] == torch.__version__
    assert facts["software"]["gloo"] is True
    assert facts["network"]["host"] == socket.gethostname()
    assert "lo" in facts["network"]["interfaces"]
    assert facts["numerics"]["threads"] == str(torch.get_num_threads())
    assert facts["job"] == {"ranks": 6, "ranks_per_node": max(1, min(6, torch.cuda.device_count()))}
    assert facts["run_dir"]["error"] == ""
    assert facts["run_dir"]["free_bytes"] > 0
    assert facts["run_dir"]["file_system"]
    assert facts["clock_synchronised"] in (True, False, None)
    assert findings["open files"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_port_that_something_listens_on_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _, findings = as_json("--metrics-port", str(port))
    _, free = as_json("--metrics-port", str(port))

    assert findings[f"port {port}"]["level"] == "warning"
    assert findings[f"port {port}"]["found"].startswith("in use")
    assert free[f"port {port}"]["level"] == "ok"


def test_a_run_directory_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    _, findings = as_json("--run-dir", str(tmp_path / "file" / "run"))

    assert findings["run directory"]["level"] == "problem"
    assert "is not a directory" in findings["run directory"]["found"]


def test_an_option_that_cannot_be_read_and_one_that_does_not_exist_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SDCWATCH_QUORUM", "many")
    monkeypatch.setenv("SDCWATCH_AUDITEVERY", "5")

    _, findings = as_json()

    assert findings["SDCWATCH_*"]["level"] == "problem"
    assert "SDCWATCH_QUORUM" in findings["SDCWATCH_*"]["found"]
    assert "'SDCWATCH_AUDIT_EVERY'" in findings["SDCWATCH_AUDITEVERY"]["do"]


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary-2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:canary-3@collector:4318/v1")
    monkeypatch.setenv("AWS_SECRET", "canary-4")

    _, shown = run("--json")

    assert "canary" not in shown
    assert relevant_variables()["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector:4318/v1"
    assert relevant_variables()["WANDB_API_KEY"] == "(set)"


def test_the_oldest_torch_is_the_one_that_pyproject_promises() -> None:
    promised = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))

    assert promised is not None
    assert ".".join(map(str, OLDEST_TORCH)) == promised[1]
