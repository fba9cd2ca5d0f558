"""The demo as a person runs it: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.stack.cli import DEFAULT_TARGET

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SMALL = ["--nodes", "3", "--ranks-per-node", "1", "--steps", "21", "--wandb", "off"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdcwatch", *arguments]


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def launcher_of(pid: int) -> int | None:
    """The launcher that a demo started: its only child."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


@contextmanager
def demo(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command("demo", *SMALL, "--run-dir", str(run_dir), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(happened: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def has_record(run_dir: Path, kind: str) -> bool:
    log = run_dir / "events.jsonl"
    return log.exists() and f'"kind":"{kind}"' in log.read_text(encoding="utf-8")


def operations(run_dir: Path) -> dict[tuple[str, int], str]:
    """By check and rank, the operation in which each suspect computed wrongly."""
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    suspects = [s for line in lines for s in json.loads(line).get("suspects", ())]
    return {(s["check"], s["rank"]): s["operator"] for s in suspects if s.get("operator")}


def test_every_planted_fault_gets_its_verdict(default_run: Any) -> None:
    output = default_run.output

    assert default_run.code == 0, output
    assert "✓ PASSED: all 5 planted faults as expected, no other alarm" in output
    assert output.count("✓ right") == 5
    assert f"Report: {default_run.run_dir / 'report.html'}" in output
    assert "SUSPECT rank 3 on sim-node-1" in output
    assert operations(default_run.run_dir) == {
        ("nonfinite", 1): "aten::mm in blocks.1.attention.qkv",
        ("replay", 3): "aten::addmm in blocks.2.mlp.0",
    }
    for name in ("in aten::mm in blocks.1.attention.qkv", "in aten::addmm in blocks.2.mlp.0"):
        assert name in output
    assert output.count("in aten::") >= 4, "in the line of each verdict and in the table"
    assert (default_run.run_dir / "report.html").stat().st_size > 1_000_000


def test_a_tainted_run_resumes_from_the_last_good_checkpoint(default_run: Any) -> None:
    resumed = default_run.output.partition("✗ run TAINTED")[2]
    saved = {p.name for p in (default_run.run_dir / "checkpoints").iterdir()}

    assert "▶ restarted from the checkpoint of step 120, guarding 6 ranks on 3 nodes" in resumed
    assert (
        "Checkpoints: saved 40, 80, 120, withheld 160 (fingerprint); "
        "after the restart from step 120: saved 160" in resumed
    )
    assert "■ ended: finished" in resumed
    assert saved == {f"step-{step:06d}.pt" for step in (40, 80, 120, 160)}


def test_the_next_commands_can_be_pasted(default_run: Any) -> None:
    lines = default_run.output.partition("Next:")[2].splitlines()
    commands = [line.strip() for line in lines if line.startswith("  ")]

    assert len(commands) == 4
    assert commands[3].endswith(f"--serve --metrics-port {DEFAULT_TARGET.rpartition(':')[2]}")
    pasted = subprocess.run(
        ["bash", "-c", commands[0]], capture_output=True, text=True, check=False
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "✓ PASSED" in pasted.stdout
    for other in commands[1:]:
        shown = subprocess.run(["bash", "-c", f"{other} --help"], capture_output=True, check=False)
        assert shown.returncode == 0, other


def test_editing_one_verdict_fails_the_check(default_run: Any, tmp_path: Path) -> None:
    run_dir = default_run.run_dir
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if '"kind":"verdict"' in line)
    verdict = json.loads(lines[at])
    verdict["suspects"][0]["rank"] = 0
    edited = [*lines[:at], json.dumps(verdict), *lines[at + 1 :]]
    (tmp_path / "events.jsonl").write_text("\n".join(edited) + "\n", encoding="utf-8")

    checked = subprocess.run(
        command("report", str(tmp_path), "--check", str(run_dir / "plan.yaml")),
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 1
    assert "✗ FAILED" in checked.stdout
    assert "nobody planted this, step 13" in checked.stdout


def test_a_clean_run_serves_its_metrics_until_interrupted_and_raises_no_alarm(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with demo(run_dir, "--faults", "none", "--serve") as process:
        wait_for(lambda: has_record(run_dir, "finish"))
        launcher = launcher_of(process.pid)
        assert launcher is not None
        settings = json.loads((run_dir / "demo.json").read_text(encoding="utf-8"))
        url = f"http://127.0.0.1:{settings['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            scraped = answer.read().decode()
        assert re.search(r'^sdcwatch_guard_state\{.*state="finished".*\} 1\.0$', scraped, re.M)
        assert len(list((run_dir / "file_sd").iterdir())) == 1
        time.sleep(2.0)  # the table is printed while the endpoint stays up
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)

    assert process.returncode == 0, output
    assert f"Serving {url} until Ctrl-C." in output
    assert "✓ PASSED: nothing planted, no other alarm" in output
    assert session_members(launcher) == []
    assert list((run_dir / "file_sd").iterdir()) == []


def test_without_the_guard_the_loss_looks_normal_and_a_replica_drifts(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "faults:\n  - {site: weight, target: norm.weight, kind: bit_flip, bit: 22, rank: 1, "
        "step: 11}\n  - {site: gradient, target: norm.weight, kind: nan, rank: 0, step: 5}\n",
        encoding="utf-8",
    )
    with demo(tmp_path / "run", "--unguarded", "--faults", str(plan)) as process:
        output, _ = process.communicate(timeout=400)

    assert process.returncode == 0, output
    said = " ".join(output.split())
    assert "Rank 1 holds other weights than the rest, seen from step 20 on." in said
    assert "nan" not in output


def _at_once(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_for(lambda: launcher_of(process.pid) is not None)


def _while_ranks_start(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_for(lambda: any(run_dir.glob("logs/*/attempt_0/*")))


def _while_training(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_for(lambda: has_record(run_dir, "progress"))


@pytest.mark.parametrize("moment", [_at_once, _while_ranks_start, _while_training])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_at_any_moment_leaves_no_process(
    tmp_path: Path,
    moment: Callable[[subprocess.Popen[str], Path], None],
    number: signal.Signals,
    code: int,
) -> None:
    run_dir = tmp_path / "run"
    with demo(run_dir, "--faults", "default") as process:
        moment(process, run_dir)
        launcher = launcher_of(process.pid)
        assert launcher is not None
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)

    assert process.returncode == code, output
    assert session_members(launcher) == []
    assert "Interrupted; every rank has been stopped." in output
    if moment is _while_training:
        assert "Planted faults against verdicts (so far)" in output


def test_when_the_process_in_front_is_killed_the_ranks_end_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with demo(run_dir, "--faults", "none") as process:
        _while_training(process, run_dir)
        launcher = launcher_of(process.pid)
        assert launcher is not None
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: session_members(launcher) == [], seconds=30)
