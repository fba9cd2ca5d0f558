"""The runbook: a section per alert, links that lead there, commands and PromQL that work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Coverage,
    GateReason,
    Hang,
    Outcome,
    PreflightDone,
    Progress,
    SkipReason,
    UpdateSkipped,
    Verdict,
    encode,
)
from sdcwatch.monitor.alerts import DRILL, alerts
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.texts import annotations_of
from sdcwatch.stack.runbook import anchor

PARTS = ("What it means.", "How sure it is.", "Do first.", "Replace when", "Do not replace when")
QUIET = {"vector(1)"}
"""Expressions that read no series."""


def _sections() -> dict[str, str]:
    text = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SECTIONS = _sections()


def _block(section: str, language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return block.strip()


def test_there_is_a_section_for_every_alert_and_for_the_drill(config: MonitorConfig) -> None:
    assert list(SECTIONS) == [*(a.name for a in alerts(config)), DRILL]


def test_every_runbook_url_leads_to_a_heading(config: MonitorConfig) -> None:
    anchors = {anchor(heading) for heading in SECTIONS}
    for alert in alerts(config):
        url, _, fragment = annotations_of(alert, config)["runbook_url"].partition("#")
        assert url == config.runbook_url
        assert fragment in anchors


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_every_part_once(name: str) -> None:
    section = " ".join(SECTIONS[name].split())
    for part in PARTS:
        assert section.count(f"**{part}") == 1, part
    assert _block(SECTIONS[name], "sh")
    assert _block(SECTIONS[name], "promql")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, synthetic: Any) -> Path:
    """A run directory with one record of every kind the commands look for."""
    folder = tmp_path_factory.mktemp("run")
    at: dict[str, Any] = {"step": 5, "time": 1.0}
    records = [
        synthetic.started("r", 0.0),
        PreflightDone(
            **at, coverage=Coverage.FULL, reason="equal", deterministic_kernels=False, repeats=4
        ),
        *(
            Verdict(**at, check=check, outcome=outcome, reason="a sentence")
            for check in Check
            for outcome in Outcome
        ),
        UpdateSkipped(**at, reason=SkipReason.REPLAY, consecutive=1),
        CheckpointEvent(**at, result=CheckpointResult.WITHHELD, reason=GateReason.REPLAY),
        Hang(**at, reporter=0, operation="audit", absent=(2,)),
        Progress(**at, first_step=1),
    ]
    text = "".join(encode(record) + "\n" for record in records)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", SECTIONS)
def test_the_command_of_a_section_works_as_it_stands(name: str, run_dir: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _block(SECTIONS[name], "sh")],
        env={**os.environ, "RUN_DIR": str(run_dir), "PATH": path},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.promtool
def test_the_promql_of_every_section_is_answered(recorded: Any) -> None:
    """By one of the recorded runs, at its end; a comparison may honestly find nothing."""
    for name, section in SECTIONS.items():
        expression = _block(section, "promql")
        answers = [
            answer for r in recorded.runs.values() for answer in recorded.instant(expression, r.end)
        ]
        if not re.search(r" > 0$", expression):
            assert answers, name


def test_the_vendor_is_told_what_counts() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
    head = " ".join(text.split("## ")[0].split())
    for words in ("serial number", "in n of m comparisons", "XID", "ECC", "replacement"):
        assert words in head
