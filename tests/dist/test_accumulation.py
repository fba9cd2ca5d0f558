"""Gradient accumulation: which micro-batch of a step an audit looks at."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.checks import torch_internals as internals
from sdcwatch.core.preflight import audited_micro_batch
from sdcwatch.core.records import Coverage, PreflightDone, Verdict
from sdcwatch.errors import CorruptionDetected
from sdcwatch.testing import GlooPool, MemorySink

pytestmark = pytest.mark.dist

BROKEN, BROKEN_FROM, STEPS = 1, 6, 30


def go(rank: int, group: Any, run_dir: str, counts: list[int], broken: bool) -> dict[str, Any]:
    """Train with ``counts[step % len]`` micro-batches a step; the first input says which one it is.

    A broken device computes the first layer wrongly in every micro-batch but the last of the four.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    memory = MemorySink()
    guard = sdcwatch.init(
        model,
        optimizer,
        sinks=[memory],
        run_dir=run_dir,
        node=f"n{rank}",
        audit_every=2,
        telemetry="off",
        console=False,
    )
    step = 0

    def wrong(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        with internals.dispatch_modes_off():  # no operation of the script's does it
            if step >= BROKEN_FROM and float(args[0][0, 0]) != 3:
                out.data.mul_(1.01)

    if broken and rank == BROKEN:
        net[0].register_forward_hook(wrong)
    audited: dict[int, int] = {}
    ring, copied = guard._steps.audits._ring, []
    run, freeze = ring.run, guard._capture._open_audit

    def seen(at: int, own: Any) -> Any:
        call = own.micro_batch.calls[0]
        audited[at] = int(call.inputs.thaw(guard._capture.scope)[0][0][0, 0])
        return run(at, own)

    ring.run = seen
    guard._capture._open_audit = lambda record: (copied.append(step), freeze(record))
    stopped = ""
    try:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            count = counts[step % len(counts)]
            for k in range(count):
                x = torch.randn(
                    3, 4, generator=torch.Generator().manual_seed(99 * step + 9 * k + rank)
                )
                x[0, 0] = k
                with contextlib.nullcontext() if k == count - 1 else model.no_sync():
                    (model(x).square().mean() / count).backward()
            optimizer.step()
    except CorruptionDetected as error:
        stopped = str(error)
    finally:
        guard.close()
    verdicts = [r for r in memory.records if isinstance(r, Verdict)]
    (preflight,) = (r for r in memory.records if isinstance(r, PreflightDone))
    return {
        "audited": audited,
        "copied": copied,
        "stopped": stopped,
        "named": sorted({s.rank for v in verdicts for s in v.suspects}),
        "verdicts": [(v.step, v.outcome.value) for v in verdicts],
        "coverage": preflight.coverage,
        "reason": preflight.reason,
        "micro_batches": preflight.micro_batches,
        "notes": [r.message for r in memory.records if hasattr(r, "message")],
    }


def test_the_audited_micro_batch_is_drawn_anew_the_same_on_every_rank_and_the_share_is_said(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(go, 3, str(tmp_path), [4], False)
    for row in rows:
        assert row["verdicts"] == []
        assert row["coverage"] is Coverage.FULL
        assert row["micro_batches"] == 4
        assert "audits look at 1 of 4 micro-batches of each audited step" in row["reason"]
        assert row["audited"] == rows[0]["audited"]
        expected = {at: audited_micro_batch(0, at, 4) for at in row["audited"]}
        assert row["audited"] == expected
        assert set(row["audited"].values()) == {0, 1, 2, 3}
        # One copy in a step that is audited, and none in any other.
        assert len(row["copied"]) == len(set(row["copied"]))
        assert set(row["audited"]) <= set(row["copied"])


def test_a_step_that_turns_out_shorter_is_audited_in_its_last_micro_batch(
    pool: GlooPool, tmp_path: Path
) -> None:
    counts = [4, 2, 1]
    for row in pool.run(go, 3, str(tmp_path), counts, False):
        assert row["verdicts"] == []
        for at, index in row["audited"].items():
            planned = audited_micro_batch(0, at, counts[(at - 1) % 3])
            last = counts[at % 3] - 1
            assert index == (last if planned is None or planned > last else planned)


def test_r_accum_a_device_that_is_wrong_in_three_of_four_micro_batches_is_found(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(go, 3, str(tmp_path), [4], True)
    for row in rows:
        assert row["coverage"] is Coverage.FULL
        assert row["named"] == [BROKEN]
        found = {at for at, outcome in row["verdicts"] if outcome == "suspect"}
        assert found == {at for at, k in row["audited"].items() if at >= BROKEN_FROM and k != 3}


def inputs_alive(rank: int, group: Any, run_dir: str) -> list[int]:
    """How many inputs of earlier micro-batches are alive behind each backward of a step."""
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    alive = []
    options = {"audit_every": 2, "telemetry": "off", "console": False, "run_dir": run_dir}
    with sdcwatch.init(model, optimizer, node=f"n{rank}", **options):
        for _ in range(3):
            optimizer.zero_grad()
            inputs = []
            for micro in range(3):
                x = torch.ones(5, 4)
                inputs.append(weakref.ref(x))
                with contextlib.nullcontext() if micro == 2 else model.no_sync():
                    model(x).sum().backward()
                del x
            alive.append(sum(ref() is not None for ref in inputs))
            optimizer.step()
    return alive


def test_micro_batches_are_kept_until_the_checks_of_their_step_are_done_and_no_longer(
    pool: GlooPool, tmp_path: Path
) -> None:
    assert pool.run(inputs_alive, 2, str(tmp_path)) == [[0, 0, 0]] * 2
