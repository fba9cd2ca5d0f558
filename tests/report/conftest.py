"""A run in records, as the guard writes it for the demo's default faults, shortened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdcwatch.core.grade import Planted
from sdcwatch.core.records import (
    Action,
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Comparison,
    Count,
    Coverage,
    Disagreement,
    Durations,
    GateReason,
    GuardState,
    Origin,
    Outcome,
    Phase,
    PreflightDone,
    Progress,
    Record,
    RunFinished,
    RunStarted,
    SkipReason,
    StateChanged,
    Suspect,
    UpdateSkipped,
    Verdict,
    encode,
)
from sdcwatch.core.topology import RankInfo

EPOCH = 1_700_000_000.0


def rank_info(rank: int) -> RankInfo:
    node = f"node-{rank // 2}"
    return RankInfo(
        rank=rank,
        node=node,
        host="host",
        local_rank=rank,
        pid=100 + rank,
        instance_id=f"instance-{rank // 2}",
        gpu_uuid=f"GPU-{rank}",
    )


def suspect(rank: int, check: Check, **evidence: object) -> Suspect:
    known: dict[str, object] = {"mismatches": 1, "comparisons": 2, **evidence}
    return Suspect(
        rank=rank,
        node=f"node-{rank // 2}",
        instance_id=f"instance-{rank // 2}",
        gpu=f"GPU-{rank}",
        gpu_index=None,
        check=check,
        **known,  # type: ignore[arg-type]
    )


def start(step: int, time: float) -> RunStarted:
    return RunStarted(
        step=step,
        time=time,
        run="story",
        version="0.1.0",
        ranks=tuple(rank_info(r) for r in range(6)),
        fault_domain="node",
        mode="enforce",
        on_failure="skip",
        audit_every=20,
        fingerprint_every=5,
        checkpoint_every=40,
        max_audit_age=20,
        quorum=2,
        parameters=1000,
        parameter_bytes=4000,
        environment={"torch": "2.13.0"},
        notes=("ranks are simulated",),
    )


def progress(first: int, last: int, time: float, loss: float) -> Progress:
    return Progress(
        step=last,
        time=time,
        first_step=first,
        counts=(
            Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=last - first + 1),
            Count(check=Check.REPLAY, outcome=Outcome.PASS, count=1),
        ),
        comparisons=6,
        weight_checks=2,
        loss=loss,
        durations=(Durations.of(Check.REPLAY, Phase.REPLAY, (0.2, 0.4, 0.3)),),
        plain_steps=last - first,
        plain_seconds=1.0,
        audit_steps=1,
        audit_seconds=0.5,
        overhead_seconds={"nonfinite": 0.05, "replay": 0.3, "fingerprint": 0.02},
        last_clean_audit_step=last,
        last_clean_audit_time=time,
    )


def nan_verdict(step: int, time: float) -> Verdict:
    return Verdict(
        step=step,
        time=time,
        check=Check.NONFINITE,
        outcome=Outcome.SUSPECT,
        reason="the gradient of rank 1 is not finite, and finite when rank 2 computes it",
        failed=True,
        action=Action.SKIP,
        origin=Origin.LOCAL,
        cause=Cause.DEVICE,
        suspects=(suspect(1, Check.NONFINITE),),
        ranks=(1,),
    )


def audit_verdict(step: int, time: float) -> Verdict:
    tensors = ("blocks.0.weight", "blocks.1.weight")
    return Verdict(
        step=step,
        time=time,
        check=Check.REPLAY,
        outcome=Outcome.SUSPECT,
        reason="rank 3 was wrong in both of its comparisons",
        failed=True,
        action=Action.SKIP,
        suspects=(
            suspect(3, Check.REPLAY, mismatches=2, partners=(0, 5), arbiters=(1,), reproduced=True),
        ),
        comparisons=(
            Comparison(producer=3, replayer=0, tensors=tensors, tensors_differing=12, wrong=(3,)),
            Comparison(producer=5, replayer=3, outputs_equal=False, arbiters=(1,), wrong=(3,)),
        ),
        comparisons_total=6,
    )


def strike_verdict(step: int, time: float) -> Verdict:
    return Verdict(
        step=step,
        time=time,
        check=Check.REPLAY,
        outcome=Outcome.NOT_REPRODUCED,
        reason="rank 4 was wrong once and is right when asked again",
        ranks=(4,),
    )


def weight_verdict(step: int, time: float) -> Verdict:
    return Verdict(
        step=step,
        time=time,
        check=Check.FINGERPRINT,
        outcome=Outcome.SUSPECT,
        reason="rank 5 dissents from the majority of 6 on 1 tensor",
        failed=True,
        action=Action.STOP,
        suspects=(suspect(5, Check.FINGERPRINT, tensors=("blocks.1.weight",), comparisons=40),),
        disagreements=(
            Disagreement(
                tensor="blocks.1.weight",
                dissenters=(5,),
                groups=((0, 1, 2, 3, 4), (5,)),
                fingerprints=("aa", "bb"),
            ),
        ),
        tensors_total=40,
    )


def skip(step: int, time: float, reason: SkipReason) -> UpdateSkipped:
    return UpdateSkipped(step=step, time=time, reason=reason, consecutive=1)


def checkpoint(step: int, time: float, result: CheckpointResult) -> CheckpointEvent:
    withheld = result is CheckpointResult.WITHHELD
    reason = GateReason.FINGERPRINT if withheld else GateReason.OK
    return CheckpointEvent(step=step, time=time, result=result, reason=reason, audit_age=0)


@pytest.fixture
def story() -> list[Record]:
    """Two segments: two findings, a strike, a tainted stop, and a clean second segment."""
    clock = iter(range(1000))

    def now() -> float:
        return EPOCH + next(clock)

    return [
        start(0, now()),
        PreflightDone(
            step=2,
            time=now(),
            coverage=Coverage.FULL,
            reason="step and replay are equal bit for bit.",
            deterministic_kernels=False,
            repeats=30,
        ),
        progress(1, 12, now(), 5.0),
        nan_verdict(13, now()),
        skip(13, now(), SkipReason.NONFINITE),
        progress(14, 40, now(), 4.0),
        checkpoint(40, now(), CheckpointResult.SAVED),
        audit_verdict(60, now()),
        skip(60, now(), SkipReason.REPLAY),
        progress(61, 79, now(), 3.0),
        strike_verdict(80, now()),
        weight_verdict(120, now()),
        StateChanged(step=120, time=now(), state=GuardState.TAINTED, reason="weights differ"),
        checkpoint(120, now(), CheckpointResult.WITHHELD),
        RunFinished(step=120, time=now(), state=GuardState.FAILED, reason="tainted", exit_code=80),
        start(40, now()),
        progress(41, 140, now(), 2.5),
        checkpoint(120, now(), CheckpointResult.SAVED),
        RunFinished(step=140, time=now(), state=GuardState.FINISHED, reason="the loop ended"),
    ]


@pytest.fixture
def planted() -> tuple[Planted, ...]:
    """What was planted in `story`, and one fault that cannot be seen."""

    def fault(name: str, rank: int, first: int, last: int | None = None, **more: object) -> Planted:
        return Planted(
            name=name,
            where="somewhere",
            ranks=(rank,),
            first_step=first,
            last_step=first if last is None else last,
            **{"expected": "verdict", **more},  # type: ignore[arg-type]
        )

    found = Outcome.SUSPECT
    return (
        fault("nan", 1, 13, check=Check.NONFINITE, outcome=found, named=(1,)),
        fault("sticky", 3, 55, 63, check=Check.REPLAY, outcome=found, named=(3,), step=60),
        fault("once", 4, 80, check=Check.REPLAY, outcome=Outcome.NOT_REPRODUCED, named=(4,)),
        fault("weight", 5, 120, check=Check.FINGERPRINT, outcome=found, named=(5,)),
        fault("between audits", 2, 91, expected="miss"),
    )


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[[list[Record]], Path]:
    """Writes records as the event log of a run, and gives its directory."""

    def write(records: list[Record]) -> Path:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        lines = "".join(encode(r) + "\n" for r in records)
        (run_dir / "events.jsonl").write_text(lines, encoding="utf-8")
        return run_dir

    return write
