import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdcwatch.core.catalog import CATALOG

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "metrics_doc.py"
PAGE = ROOT / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("metrics_doc", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_writes():
    checked = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)

    assert (checked.returncode, checked.stderr) == (0, "")


def test_an_outdated_page_is_noticed(generator, tmp_path, monkeypatch, capsys):
    outdated = tmp_path / "metrics.md"
    outdated.write_text(PAGE.read_text().replace("sdcwatch_loss", "sdcwatch_lost"))
    monkeypatch.setattr(generator, "PATH", outdated)
    monkeypatch.setattr(sys, "argv", ["metrics_doc.py", "--check"])

    assert generator.main() == 1
    assert "outdated" in capsys.readouterr().err


def test_the_page_names_every_metric_once_as_a_heading():
    headings = re.findall(r"^## `(\w+)`$", PAGE.read_text(), re.MULTILINE)

    assert headings == [metric.prometheus for metric in CATALOG]


def test_a_scrape_at_16384_ranks_with_40_suspects_is_within_the_budget_of_the_page(generator):
    assert (generator.WORLD_SIZE, generator.SUSPECTS, generator.BUDGET) == (16_384, 40, 720)
    (named,) = [r for r in generator.scale_records() if r.kind == "verdict"]
    assert len({s.rank for s in named.suspects}) == 40

    lines = generator.scrape_lines()

    assert lines <= 720
    assert f"**{lines} lines**" in PAGE.read_text()


def test_the_phases_that_are_timed_are_those_of_the_scrape_at_scale(generator):
    source = "".join(p.read_text() for p in (ROOT / "sdcwatch" / "guard").glob("*.py"))
    used = {
        (check, phase) for check, phase in re.findall(r"Check\.([A-Z]+), Phase\.([A-Z]+)", source)
    }
    counted = {(c.name, p.name) for c, phases in generator.TIMED.items() for p in phases}

    assert used
    assert used <= counted
