from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sdcwatch.core.disputes import conclude_audit
from sdcwatch.core.fingerprint import judge_fingerprints
from sdcwatch.core.grade import Grade, GradedFault, Planted
from sdcwatch.core.records import (
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    GuardState,
    Record,
    RunStarted,
    StateChanged,
)
from sdcwatch.core.replay import REPEATS, AuditFacts, Mismatch, judge_audit
from sdcwatch.core.summary import fold
from sdcwatch.core.topology import RankInfo, Topology
from sdcwatch.core.trace_values import TraceFinding, TraceOutcome
from sdcwatch.demo import closing
from sdcwatch.demo.closing import print_grade
from sdcwatch.demo.display import line_of
from sdcwatch.demo.model import GPT, GPTConfig
from sdcwatch.guard.replay import AuditResult
from sdcwatch.guard.reporter import VerdictBuilder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BEFORE = """\
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp_model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(dist.get_rank())
inputs = torch.randn(1001, 4, 8, generator=draw)
loader = [(x, x[:, :4].argmax(dim=1)) for x in inputs]

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


def _sample() -> list[str]:
    """The lines of the sample, each as it was before it was folded."""
    (text,) = re.findall(r"From its output:\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    return re.sub(r"\n {11}", " ", text).splitlines()


def _topology() -> Topology:
    places = ((rank, rank // 2, rank % 2) for rank in range(6))
    return Topology(
        tuple(
            RankInfo(
                rank=rank,
                node=f"sim-node-{node}",
                host="host",
                local_rank=local,
                pid=1,
                instance_id=f"sim-node-{node}",
            )
            for rank, node, local in places
        ),
        "node",
    )


def _audit_of_a_bad_rank() -> AuditFacts:
    """Rank 3 is wrong as producer and as replayer, and so are all of its repeats."""
    right, wrong = ("ok",) * REPEATS, ("bad",) * REPEATS
    return AuditFacts(
        comparisons_total=6,
        mismatches=(Mismatch(3, 5, "bad", "ok"), Mismatch(1, 3, "ok", "bad")),
        arbitration={3: {0: "ok", 4: "ok"}, 1: {2: "ok", 4: "ok"}},
        repeats={(3, 3): wrong, (5, 3): right, (0, 3): right}
        | {(3, 1): wrong, (1, 1): right, (4, 1): right},
    )


DAMAGED = TraceFinding(
    outcome=TraceOutcome.DAMAGED,
    operator="aten::addmm",
    module="blocks.2.mlp.0",
    rank=3,
    detail="its result changed before aten::gelu in blocks.2.mlp.1 read it",
)
"""What the traces of rank 3 and of two others come to."""


def _records() -> list[Record]:
    """What the demo's guard records, as far as the sample shows it."""
    topology, verdicts = _topology(), VerdictBuilder(_topology(), observing=False)
    names = [name for name, _ in GPT(GPTConfig()).named_parameters()]
    judged = conclude_audit(judge_audit(_audit_of_a_bad_rank(), topology), {3: DAMAGED})
    audit = AuditResult(judged, (), 6)
    tables = [
        [(int(rank == 5 and name == "blocks.3.mlp.2.weight"), 0) for name in names]
        for rank in range(6)
    ]
    weights = verdicts.fingerprint(160, judge_fingerprints(names, tables), len(names))
    start = RunStarted(
        step=120,
        time=1.0,
        run="demo",
        version="",
        ranks=topology.ranks,
        fault_domain="node",
        mode="enforce",
        on_failure="skip",
        audit_every=20,
        fingerprint_every=5,
        checkpoint_every=40,
        max_audit_age=0,
        quorum=2,
        parameters=1,
        parameter_bytes=4,
    )
    saved = [_checkpoint(step, GateReason.OK) for step in (40, 80, 120)]
    return [
        *saved,
        verdicts.replay(60, audit),
        weights,
        StateChanged(
            step=160,
            time=1.0,
            state=GuardState.TAINTED,
            reason="the replicas hold different weights",
        ),
        _checkpoint(160, GateReason.FINGERPRINT, weights.reason),
        start,
        _checkpoint(160, GateReason.OK),
    ]


def _checkpoint(step: int, reason: GateReason, detail: str = "") -> CheckpointEvent:
    saved = reason is GateReason.OK
    result = CheckpointResult.SAVED if saved else CheckpointResult.WITHHELD
    return CheckpointEvent(step=step, time=1.0, result=result, reason=reason, detail=detail)


def _closing_lines(records: list[Record]) -> list[str]:
    planted = Planted(
        name="fault", where="weight", ranks=(1,), first_step=1, last_step=1, expected="miss"
    )
    graded = Grade(tuple(GradedFault(planted, (), ok=True) for _ in range(5)), (), ())
    console = Console(file=io.StringIO(), width=200)
    print_grade(graded, console)
    return [
        console.file.getvalue().splitlines()[-1],  # type: ignore[attr-defined]
        closing.checkpoint_line(records, fold(records)).plain,
    ]


def test_the_sample_in_the_readme_is_what_the_demo_prints() -> None:
    records = _records()
    lines = [line.plain for r in records if (line := line_of(r)) is not None]
    printed = [line for line in lines if "checkpoint saved" not in line] + _closing_lines(records)

    sample = _sample()
    whole = [line for line in sample if not line.endswith("...")]

    assert len(whole) == len(sample) - 2
    for shown, line in zip(sample, printed, strict=True):
        if shown.endswith("..."):
            assert line.startswith(shown.removesuffix("..."))
        else:
            assert shown == line


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
