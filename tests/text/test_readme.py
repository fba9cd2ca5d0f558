from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BEFORE = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp_model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
loss_fn = lambda model, batch: model(batch).square().mean()
loader = torch.randn(1001, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))

"""
AFTER = """

if dist.get_rank() == 0:
    print("last loss", loss.item(), "last verdict", guard.last_verdict)
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=cwd,
        env=environment,
        check=False,
    )


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(README.splitlines()) <= 150


def test_the_sample_in_the_readme_is_one() -> None:
    assert "@@" not in README
    assert "SUSPECT" in README


@pytest.mark.timeout(180)
def test_the_loop_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (loop,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "loop.py"
    script.write_text(BEFORE + loop + AFTER, encoding="utf-8")

    done = torchrun(str(script), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "last loss" in done.stdout
    assert (tmp_path / "ckpt-1000.pt").is_file()
    assert len(list(tmp_path.glob("sdcwatch-runs/*/events.jsonl"))) == 1


@pytest.mark.timeout(180)
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    example = ROOT / "examples" / "train_ddp.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 80

    run_dir = tmp_path / "run"
    done = torchrun(str(example), "--steps", "200", "--run-dir", str(run_dir), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "step 200: loss 0." in done.stdout
    assert (tmp_path / "checkpoints" / "step-200.pt").is_file()
    assert (run_dir / "events.jsonl").is_file()


def _documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return kept.replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    return named | {_anchor(h) for h in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("document", _documents(), ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(target)

    assert broken == []


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))

    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


def test_the_exit_codes_of_the_readme_are_those_of_the_package() -> None:
    from sdcwatch.errors import EXIT_CODES

    assert set(map(int, re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE))) == set(EXIT_CODES)


def test_the_extras_of_the_readme_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE))

    assert {"demo", *re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)} <= extras


def test_ci_and_make_agree_on_what_is_run() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    checked = subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False)

    assert checked.returncode == 0
    assert ci.splitlines()[-2:] == ["make lint", "make test"]
