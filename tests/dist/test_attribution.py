"""Who is named on small topologies, and what is called software or left alone.

Models that trip a comparison of bits, strides or buffers belong to healthy runs and stay quiet.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdcwatch.core.outcomes import is_alarm
from sdcwatch.core.records import (
    Cause,
    Coverage,
    PreflightDone,
    SkipReason,
    UpdateSkipped,
)
from sdcwatch.faults import Fault, FaultPlan
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from training import (
    WIDTH,
    Job,
    mlp,
    of,
    same_on_every_rank,
    started,
    told,
    train,
    verdicts,
)

pytestmark = pytest.mark.dist

MATMUL = Fault(
    site="activation",
    target="3",
    kind="scale",
    factor=1.001,
    ranks=(1,),
    steps=(3, 99),
    persistence="sticky",
)
GUARD = {"audit_every": 4, "fingerprint_every": 1}

# --- topologies ---


def on_topology(rank: int, group: Any, run_dir: str, options: dict[str, Any]) -> Any:
    plan = FaultPlan(faults=(MATMUL,))
    guard = {**GUARD, "run_dir": run_dir, "deadline_seconds": 30.0, **options}
    return train(rank, group, Job(plan=plan, guard=guard, steps=4))


def test_two_nodes_are_enough_to_detect_and_too_few_to_name(pool: GlooPool, tmp_path: Path) -> None:
    results = pool.run(on_topology, 4, str(tmp_path), {"fault_domain": "node"})
    assert same_on_every_rank(results) == [(4, "replay", "unattributed", ())]
    for result in results:
        assert [(s.step, s.reason) for s in of(result, UpdateSkipped)] == [(4, SkipReason.REPLAY)]
        start = started(result)
        assert start.fault_domain == "node"
        assert any("naming one takes 3 nodes" in note for note in start.notes)


def test_two_nodes_fall_back_to_gpus_say_so_and_name_the_right_one(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(on_topology, 4, str(tmp_path), {})
    assert same_on_every_rank(results) == [(4, "replay", "suspect", (1,))]
    for result in results:
        start = started(result)
        assert start.fault_domain == "gpu"
        assert any("2 nodes" in note and "GPU" in note for note in start.notes)
        (suspect,) = verdicts(result)[0].suspects
        assert (suspect.node, suspect.reproduced) == ("n0", True)


def test_three_nodes_need_no_fallback_and_no_warning(pool: GlooPool, tmp_path: Path) -> None:
    results = pool.run(on_topology, 6, str(tmp_path), {})
    assert same_on_every_rank(results) == [(4, "replay", "suspect", (1,))]
    assert {(started(r).fault_domain, started(r).notes) for r in results} == {("node", ())}


def alone(rank: int, group: Any, run_dir: str) -> Any:
    fault = Fault(site="gradient", kind="nan", target="0.weight", ranks=(0,), step=2)
    guard = {**GUARD, "run_dir": run_dir}
    plan = FaultPlan(faults=(fault,))
    return train(rank, group, Job(plan=plan, guard=guard, steps=4, probe=(2,), save_at=(4,)))


def test_one_rank_has_check_1_and_is_told_why_the_rest_is_off(
    pool: GlooPool, tmp_path: Path
) -> None:
    (result,) = pool.run(alone, 1, str(tmp_path))
    assert [told(v) for v in verdicts(result)] == [(2, "nonfinite", "unattributed", ())]
    assert result["probed"][2] == (True, True)
    (note,) = started(result).notes
    assert "audits are off" in note
    assert "weights are not compared" in note
    assert "at least 2 ranks" in note
    (preflight,) = of(result, PreflightDone)
    assert preflight.coverage is Coverage.OFF
    assert result["saved"] == [True]


# --- replicas that differ, and why ---


def change_on_rank_1(rank: int, model: nn.Module) -> None:
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-6


def apart(rank: int, group: Any, run_dir: str, mode: str) -> Any:
    job = Job(
        guard={**GUARD, "run_dir": run_dir, "mode": mode, "node": f"n{rank}"},
        between=functools.partial(change_on_rank_1, rank),
        save_at=(3,),
    )
    return train(rank, group, job)


def test_a_replica_that_starts_apart_stops_before_the_first_step_case_10(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(apart, 3, str(tmp_path), "enforce")
    assert same_on_every_rank(results) == [(0, "fingerprint", "unattributed", ())]
    for result in results:
        code, verdict = result["stopped"]
        assert (code, verdict.cause) == (85, Cause.SOFTWARE)
        assert "before any device has computed" in verdict.reason
        assert [d.tensor for d in verdict.disagreements] == ["0.weight"]


def test_a_replica_that_starts_apart_is_never_blamed_by_an_audit_case_10(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(apart, 3, str(tmp_path), "observe")
    said = same_on_every_rank(results)
    assert said[0] == (0, "fingerprint", "unattributed", ())
    assert said[1:], "no audit step was reached"
    assert {(check, outcome, named) for _, check, outcome, named in said[1:]} == {
        ("replay", "void", ())
    }
    assert [r["saved"] for r in results] == [[False]] * 3


def scaled(rank: int, group: Any, run_dir: str, growth: bool, audit_every: int | None) -> Any:
    """Scales that differ from the start, or from step 4 on, when one of them has grown."""
    on_one = rank == 1
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=512.0 if on_one and not growth else 256.0,
        growth_interval=3 if on_one and growth else 1000,
    )
    guard = {**GUARD, "run_dir": run_dir, "audit_every": audit_every}
    return train(rank, group, Job(guard=guard, scaler=scaler))


@pytest.mark.parametrize("audit_every", [50, None], ids=["audits", "no audits"])
@pytest.mark.parametrize("growth", [False, True], ids=["from the start", "later"])
def test_scalers_of_different_scale_are_named_as_the_cause_case_15(
    pool: GlooPool, tmp_path: Path, growth: bool, audit_every: int | None
) -> None:
    results = pool.run(scaled, 2, str(tmp_path), growth, audit_every)
    (said,) = same_on_every_rank(results)
    assert said == (4 if growth else 1, "fingerprint", "unattributed", ())
    for result in results:
        code, verdict = result["stopped"]
        assert (code, verdict.cause) == (85, Cause.SOFTWARE)
        assert "loss scales" in verdict.reason
        assert "256.0 on rank 0, 512.0 on rank 1" in verdict.reason


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.unused = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def with_unused(rank: int, group: Any, run_dir: str) -> Any:
    guard = {**GUARD, "run_dir": run_dir}
    return train(rank, group, Job(build=Unused, guard=guard, steps=1, probe=(1,)))


def test_gradients_that_were_not_reduced_are_called_software_case_12(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(with_unused, 3, str(tmp_path))
    assert same_on_every_rank(results) == [(1, "nonfinite", "not_reduced", ())]
    for result in results:
        (verdict,) = verdicts(result)
        assert verdict.cause is Cause.NONE
        assert (
            "gradients not reduced: 0 of 1 bucket on ranks 0, 1 and 2, without unused.weight, "
            "unused.bias, used.weight and 1 more; " in verdict.reason
        )
        assert "software" in verdict.reason
        assert is_alarm(verdict)
        assert result["probed"][1][0], "unreduced gradients reached the weights"
    assert len({r["weights"] for r in results}) == 1


# --- models of healthy runs ---


def normalised() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4))


class LocalBuffer(nn.Module):
    """Gives its buffer away for a new one in each forward, which DDP's broadcast then misses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.mean()
        return self.layer(x) * (1 + 0.1 * self.seen)


class Convolution(nn.Module):
    """A channels-last convolution and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.conv(x).flatten(1) @ self.mix


class Odd(nn.Module):
    """Parameters without dimensions, without elements, in double precision; integers to count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(WIDTH, 4)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.precise = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches += 1
        x = torch.cat([self.layer(x), self.empty])
        return x * self.logit_scale.exp() * self.precise.float()


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "case_22 batch norm": normalised,
    "case_21 rank-dependent buffer": LocalBuffer,
    "case_30 strides": Convolution,
    "case_31 odd parameters": Odd,
}


def healthy(rank: int, group: Any, run_dir: str, name: str) -> Any:
    plain = train(rank, group, Job(build=HEALTHY[name]))
    guard = {**GUARD, "run_dir": run_dir, "checkpoint_every": 6}
    guarded = train(rank, group, Job(build=HEALTHY[name], guard=guard, save_at=(6,)))
    return {**guarded, "plain": plain["weights"]}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_left_alone(pool: GlooPool, tmp_path: Path, name: str) -> None:
    results = pool.run(healthy, 3, str(tmp_path), name)
    assert same_on_every_rank(results) == []
    for result in results:
        assert [p.coverage for p in of(result, PreflightDone)] == [Coverage.FULL]
        assert result["saved"] == [True]
        assert result["weights"] == result["plain"]


def compared_with_buffers(rank: int, group: Any, run_dir: str) -> Any:
    guard = {**GUARD, "run_dir": run_dir, "buffers": True}
    return train(rank, group, Job(build=LocalBuffer, guard=guard))


def test_buffers_are_compared_on_request_case_21(pool: GlooPool, tmp_path: Path) -> None:
    results = pool.run(compared_with_buffers, 3, str(tmp_path))
    # Buffers differ right after the forward: the audit of step 1 finds them before its own check.
    assert same_on_every_rank(results) == [
        (1, "replay", "void", ()),
        (1, "fingerprint", "unattributed", ()),
    ]
    assert [d.tensor for d in results[0]["stopped"][1].disagreements] == ["seen"]


def corrupted(rank: int, group: Any, run_dir: str, target: str, bit: int) -> Any:
    fault = Fault(site="weight", kind="bit_flip", bit=bit, target=target, ranks=(2,), step=2)
    guard = {**GUARD, "run_dir": run_dir}
    return train(rank, group, Job(build=Odd, guard=guard, plan=FaultPlan(faults=(fault,))))


@pytest.mark.parametrize(("target", "bit"), [("logit_scale", 0), ("precise", 63), ("precise", 1)])
def test_every_odd_parameter_that_can_be_corrupted_is_watched_case_31(
    pool: GlooPool, tmp_path: Path, target: str, bit: int
) -> None:
    results = pool.run(corrupted, 3, str(tmp_path), target, bit)
    assert same_on_every_rank(results) == [(2, "fingerprint", "suspect", (2,))]
    (disagreement,) = results[0]["stopped"][1].disagreements
    assert disagreement.tensor == target
    assert f"bit {bit} of element" in disagreement.note


def restride(rank: int, model: nn.Module) -> None:
    conv = model.module.conv
    if rank == 1:
        conv.weight.data = conv.weight.data.contiguous()


def other_strides(rank: int, group: Any, run_dir: str) -> Any:
    guard = {**GUARD, "run_dir": run_dir}
    between = functools.partial(restride, rank)
    return train(rank, group, Job(build=Convolution, guard=guard, between=between, steps=0))


def test_strides_that_differ_between_replicas_are_no_difference_case_30(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(other_strides, 3, str(tmp_path))
    assert same_on_every_rank(results) == []
    assert [r["stopped"] for r in results] == [None] * 3


def no_bias() -> nn.Module:
    net = mlp()
    nn.init.zeros_(net[0].bias)
    return net


def negate_zeros(rank: int, model: nn.Module) -> None:
    if rank == 1:
        model.module[0].bias.data.neg_()


def signed_zero(rank: int, group: Any, run_dir: str) -> Any:
    between = functools.partial(negate_zeros, rank)
    return train(
        rank, group, Job(build=no_bias, guard={**GUARD, "run_dir": run_dir}, between=between)
    )


def test_the_sign_of_zero_is_a_difference_and_said_to_be_that_case_32(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(signed_zero, 3, str(tmp_path))
    assert same_on_every_rank(results) == [(0, "fingerprint", "unattributed", ())]
    for result in results:
        (disagreement,) = result["stopped"][1].disagreements
        assert (disagreement.tensor, disagreement.note) == ("0.bias", "sign of zero")
