"""Non-finite values, with and without a GradScaler: the same verdict, scale and weights everywhere.

A skipped update leaves weights and optimizer state bit for bit, whichever optimizer it is.
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
from sdcwatch.core.records import Cause, Origin, Outcome, SkipReason, UpdateSkipped
from sdcwatch.faults import Fault, FaultPlan
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from training import Job, mse, of, random_batch, same_on_every_rank, train, verdicts

pytestmark = pytest.mark.dist

WORLD, BAD, BAD_STEP = 3, 1, 3
NAN = Fault(
    site="gradient",
    kind="nan",
    target="3.weight",
    ranks=(BAD,),
    step=BAD_STEP,
    persistence="sticky",
)
ACTIVATION = Fault(
    site="activation",
    kind="scale",
    factor=1.5,
    target="3",
    ranks=(BAD,),
    steps=(BAD_STEP, 99),
    persistence="sticky",
)


class Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups, and steps inside its own step."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


# Every optimizer of torch, in one process: tests/guard/test_as_if_left_out.py.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "a number in its groups": functools.partial(Counting, lr=0.05),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01, t0=1.0),
}


def scaler(init_scale: float = 256.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)


def options(rank: int, run_dir: str, **more: Any) -> dict[str, Any]:
    """Every rank on a node of its own, so that a single one can be named."""
    default = {"audit_every": 20, "fingerprint_every": 1, "run_dir": run_dir, "node": f"n{rank}"}
    return {**default, **more}


def poisoned(rank: int, group: Any, run_dir: str, with_scaler: bool, *faults: Fault) -> Any:
    job = Job(
        guard=options(rank, run_dir),
        plan=FaultPlan(faults=faults),
        scaler=scaler() if with_scaler else None,
        probe=(BAD_STEP,),
        clip=1.0 if not with_scaler else None,
    )
    return train(rank, group, job)


@pytest.mark.parametrize("with_scaler", [True, False], ids=["scaler", "no scaler"])
def test_a_nan_in_one_gradient_before_the_reduction_names_its_rank_case_7(
    pool: GlooPool, tmp_path: Path, with_scaler: bool
) -> None:
    results = pool.run(poisoned, WORLD, str(tmp_path), with_scaler, NAN)
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "suspect", (BAD,))]
    (verdict,) = verdicts(results[0])
    assert (verdict.origin, verdict.cause) == (Origin.LOCAL, Cause.DEVICE)
    all_went_on_alike(results, scale=128.0 if with_scaler else None)


@pytest.mark.parametrize("with_scaler", [True, False], ids=["scaler", "no scaler"])
def test_a_nan_in_the_reduced_gradient_of_one_rank_only_is_a_strike_for_it(
    pool: GlooPool, tmp_path: Path, with_scaler: bool
) -> None:
    fault = Fault(site="all_reduce", kind="nan", ranks=(BAD,), step=BAD_STEP)
    results = pool.run(poisoned, WORLD, str(tmp_path), with_scaler, fault)
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "not_reproduced", ())]
    (verdict,) = verdicts(results[0])
    assert (verdict.origin, verdict.cause) == (Origin.REDUCED, Cause.REDUCTION)
    assert "reduction on rank 1" in verdict.reason
    all_went_on_alike(results, scale=128.0 if with_scaler else None)


def test_a_nan_in_the_reduced_gradient_of_every_rank_names_nobody(
    pool: GlooPool, tmp_path: Path
) -> None:
    fault = Fault(site="all_reduce", kind="nan", ranks="all", step=BAD_STEP)
    results = pool.run(poisoned, WORLD, str(tmp_path), True, fault)
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "unattributed", ())]
    all_went_on_alike(results, scale=128.0)


def all_went_on_alike(results: list[Any], *, scale: float | None) -> None:
    for result in results:
        assert result["stopped"] is None
        assert [(s.step, s.reason) for s in of(result, UpdateSkipped)] == [
            (BAD_STEP, SkipReason.NONFINITE)
        ]
        assert result["probed"][BAD_STEP][0], "the skipped update moved weights or state"
    assert {r["scale"] for r in results} == {scale}
    assert len({r["weights"] for r in results}) == 1


def half(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return mse(model, batch)


def large_on(ranks: tuple[int, ...], at: int, rank: int, step: int, micro: int) -> Any:
    x, y = random_batch(rank, step, micro)
    return (x, y + 4000.0) if rank in ranks and step == at else (x, y)


def overflow(rank: int, group: Any, run_dir: str, ranks: tuple[int, ...]) -> Any:
    job = Job(
        guard=options(rank, run_dir, node=f"n{rank // 2}"),
        loss_fn=half,
        batch=functools.partial(large_on, ranks, 2),
        scaler=scaler(2.0**11),
        probe=(2,),
    )
    return train(rank, group, job)


@pytest.mark.parametrize(
    ("world", "ranks"),
    [(3, (1,)), (3, (0, 1, 2)), (6, (2, 5)), (2, (0, 1)), (1, (0,))],
    ids=["one rank", "every rank", "two nodes", "two ranks", "one process"],
)
def test_an_overflow_of_the_loss_scale_is_no_alarm_case_17(
    pool: GlooPool, tmp_path: Path, world: int, ranks: tuple[int, ...]
) -> None:
    results = pool.run(overflow, world, str(tmp_path), ranks)
    assert same_on_every_rank(results) == [(2, "nonfinite", "reproducible", ())]
    for result in results:
        (verdict,) = verdicts(result)
        assert verdict.cause is Cause.SCALING
        assert not is_alarm(verdict)
        assert [(s.step, s.reason) for s in of(result, UpdateSkipped)] == [(2, SkipReason.SCALER)]
        assert result["probed"][2][0]
    assert {r["scale"] for r in results} == {2.0**10}
    assert len({r["weights"] for r in results}) == 1


def brain(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse(model, batch)


def brain_float(rank: int, group: Any, run_dir: str) -> Any:
    fault = Fault(
        site="gradient",
        kind="inf",
        target="0.weight",
        ranks=(BAD,),
        step=BAD_STEP,
        persistence="sticky",
    )
    job = Job(
        guard=options(rank, run_dir),
        loss_fn=brain,
        optimizer=OPTIMIZERS["AdamW"],
        plan=FaultPlan(faults=(fault,)),
        probe=(BAD_STEP,),
    )
    return train(rank, group, job)


def test_one_inf_gradient_under_bfloat16_does_not_reach_adams_state_case_18(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(brain_float, WORLD, str(tmp_path))
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "suspect", (BAD,))]
    assert is_alarm(verdicts(results[0])[0])
    all_went_on_alike(results, scale=None)


def bad_data(rank: int, group: Any, run_dir: str) -> Any:
    fault = Fault(site="batch", kind="nan", target="0", ranks=(BAD,), step=BAD_STEP)
    job = Job(guard=options(rank, run_dir), plan=FaultPlan(faults=(fault,)), probe=(BAD_STEP,))
    return train(rank, group, job)


def test_a_nan_in_the_data_is_an_alarm_that_blames_no_device_case_6_19(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(bad_data, WORLD, str(tmp_path))
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "reproducible", ())]
    (verdict,) = verdicts(results[0])
    assert verdict.cause is Cause.DATA
    assert verdict.ranks == (BAD,)
    assert is_alarm(verdict)
    all_went_on_alike(results, scale=None)


def ever_again(rank: int, group: Any, run_dir: str, with_scaler: bool) -> Any:
    fault = Fault(
        site="gradient",
        kind="nan",
        target="0.weight",
        ranks=(BAD,),
        steps=(2, 99),
        persistence="sticky",
    )
    job = Job(
        guard=options(rank, run_dir, max_consecutive_skips=2),
        plan=FaultPlan(faults=(fault,)),
        scaler=scaler() if with_scaler else None,
        steps=12,
    )
    return train(rank, group, job)


@pytest.mark.parametrize("with_scaler", [True, False], ids=["scaler", "no scaler"])
def test_more_skips_in_a_row_than_allowed_stop_every_rank_case_18(
    pool: GlooPool, tmp_path: Path, with_scaler: bool
) -> None:
    results = pool.run(ever_again, WORLD, str(tmp_path), with_scaler)
    for result in results:
        code, verdict = result["stopped"]
        assert code == 80
        assert (verdict.step, verdict.outcome) == (4, Outcome.SUSPECT)
        assert [s.consecutive for s in of(result, UpdateSkipped)] == [1, 2, 3]
    assert len({r["weights"] for r in results}) == 1


def infinite(rank: int, group: Any, run_dir: str) -> Any:
    fault = Fault(site="gradient", kind="inf", target="0.weight", ranks=(BAD,), steps=(2, 4))
    guard = options(rank, run_dir, max_consecutive_skips=1)
    return train(rank, group, Job(guard=guard, plan=FaultPlan(faults=(fault,)), scaler=scaler()))


def test_infinities_under_a_scaler_are_its_own_business_whoever_made_them(
    pool: GlooPool, tmp_path: Path
) -> None:
    """By design: they look like an overflow of the scale, which is skipped and halved away."""
    results = pool.run(infinite, WORLD, str(tmp_path))
    said = [(step, "nonfinite", "reproducible", ()) for step in (2, 3, 4)]
    assert same_on_every_rank(results) == said
    for result in results:
        assert {v.cause for v in verdicts(result)} == {Cause.SCALING}
        assert {s.reason for s in of(result, UpdateSkipped)} == {SkipReason.SCALER}
        assert result["stopped"] is None
    assert {r["scale"] for r in results} == {32.0}
    assert len({r["weights"] for r in results}) == 1


def inside_a_closure(rank: int, group: Any, run_dir: str) -> Any:
    job = Job(
        guard=options(rank, run_dir),
        plan=FaultPlan(faults=(NAN,)),
        closure=True,
        probe=(2, BAD_STEP),
        optimizer=OPTIMIZERS["AdamW"],
    )
    return train(rank, group, job)


def test_a_closure_that_computes_inside_step_obeys_the_decision(
    pool: GlooPool, tmp_path: Path
) -> None:
    results = pool.run(inside_a_closure, WORLD, str(tmp_path))
    assert same_on_every_rank(results) == [(BAD_STEP, "nonfinite", "suspect", (BAD,))]
    all_went_on_alike(results, scale=None)
    for result in results:
        assert not result["probed"][2][0], "an update that should have happened did not"


def skip_with_every_optimizer(rank: int, group: Any, run_dir: str, check: str) -> Any:
    plan = FaultPlan(faults=(NAN if check == "nonfinite" else ACTIVATION,))
    results = {}
    for name, optimizer in OPTIMIZERS.items():
        guard = options(rank, f"{run_dir}/{name}", checkpoint_every=BAD_STEP)
        job = Job(
            guard=guard,
            plan=plan,
            optimizer=optimizer,
            probe=(2, BAD_STEP),
            steps=BAD_STEP + 1,
            scaler=scaler() if check == "replay" and "foreach" not in name else None,
        )
        results[name] = train(rank, group, job)
    return results


@pytest.mark.parametrize("check", ["nonfinite", "replay"])
def test_a_skipped_update_leaves_weights_and_state_of_every_optimizer_untouched(
    pool: GlooPool, tmp_path: Path, check: str
) -> None:
    by_rank = pool.run(skip_with_every_optimizer, WORLD, str(tmp_path), check)
    for name in OPTIMIZERS:
        results = [r[name] for r in by_rank]
        said = same_on_every_rank(results)
        assert said == [(BAD_STEP, check, "suspect", (BAD,))], name
        reason = SkipReason.NONFINITE if check == "nonfinite" else SkipReason.REPLAY
        for result in results:
            assert [(s.step, s.reason) for s in of(result, UpdateSkipped)] == [(BAD_STEP, reason)]
            assert result["probed"][BAD_STEP] == (True, True), name
            assert not result["probed"][2][0], name
        assert len({r["weights"] for r in results}) == 1, name
