"""Scripts that once had a healthy device named, hung, or trained other weights; each is a kind.

A kind is here with the mistake outside of the module, where nothing is audited and nothing lost,
and inside of it, in variants: `trials` has more of each, which `tools/gauntlet.py` runs too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdcwatch.core.records import Cause, Check, Outcome
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
import course
from course import LOOPS, Course
from inside import Model
from outside import mlp, sgd
from test_gauntlet import check_healthy

pytestmark = pytest.mark.dist

STEPS, AUDIT_EVERY, NAN_AT = 12, 3, 10


def several(rank: int, group: Any, *arguments: Any) -> dict[str, dict[str, dict[str, Any]]]:
    return course.several(rank, group, *arguments)


def check(pool: GlooPool, *names: str) -> None:
    """Each loop names nobody, loses nothing and trains as without a guard."""
    rows = pool.run(several, 3, names, ("plain", "guarded"), STEPS, AUDIT_EVERY)
    for name in names:
        check_healthy(LOOPS[name], [row[name] for row in rows])


def test_m01_rank_in_loss_outside_of_the_module_is_covered_in_full(pool: GlooPool) -> None:
    check(pool, "one more term on one rank", "a teacher that only one rank has")


def test_m01_rank_in_loss_inside_is_software_before_arming_with_its_operation(
    pool: GlooPool,
) -> None:
    check(
        pool,
        "one more term on one rank, in the forward",
        "class weights from each rank's own data, in the forward",
        "a teacher of one rank's own, in the forward",
        "one rank computes a part in bfloat16",
        "a gradient that one rank scales in its backward",
    )


def test_m01_rank_in_loss_that_comes_late_is_software_with_its_operation(pool: GlooPool) -> None:
    check(
        pool,
        "a branch of one rank's own that comes late",
        "a gradient that one rank scales from some step on",
    )


def test_m01_what_depends_on_the_rank_by_its_arguments_is_covered_in_full(pool: GlooPool) -> None:
    check(pool, "the rank's number in the batch", "one rank's own values in a buffer")


def test_m02_gather_in_loss_outside_of_the_module_is_covered_in_full(pool: GlooPool) -> None:
    check(pool, "CLIP: features gathered, own rows with gradient")


def test_m02_gather_in_loss_inside_turns_audits_off_and_names_the_line(pool: GlooPool) -> None:
    names = (
        "contrast with the keys of all ranks, in the forward",
        "send and receive in the forward",
        "a functional collective in the forward",
        "a sum over a group that one rank is not in",
        "a sum over ranks in the backward alone",
    )
    rows = pool.run(several, 3, names, ("plain", "guarded"), STEPS, AUDIT_EVERY)
    for name in names:
        check_healthy(LOOPS[name], [row[name] for row in rows])
        reason = rows[0][name]["guarded"]["reason"][0]
        assert f"{Path(course.__file__).parent / 'trials.py'}:" in reason
        assert "Return what it gathers from the module, and gather in the training loop" in reason


def test_m02_gather_that_comes_late_is_never_replayed(pool: GlooPool) -> None:
    check(
        pool,
        "a collective that comes late in the forward",
        "a collective every fifth step in the forward",
    )


def test_closure_trap_outside_of_the_module_is_covered_in_full(pool: GlooPool) -> None:
    check(
        pool,
        "a loss that calls the model from its closure",
        "a second call of the bare module beside the model's",
    )


def test_closure_trap_inside_is_named_before_arming_and_leaves_no_trace(pool: GlooPool) -> None:
    check(
        pool,
        "a forward that calls another DDP module",
        "a forward that calls another DDP module without gradient",
    )


def test_m07_forward_writes_of_weights_are_named_before_arming(pool: GlooPool) -> None:
    check(
        pool,
        "a momentum encoder written through .data",
        "a momentum encoder outside of the model, moved in the forward",
        "a momentum encoder whose weights are replaced",
    )


def test_m07_forward_writes_outside_of_the_module_leave_no_trace(pool: GlooPool) -> None:
    check(
        pool,
        "a metric object in the module",
        "a generator of the script in the module",
        "a count in the class of a module",
        "an array of NumPy in the module, written in place",
    )


def test_r_bank_is_covered_in_full_where_the_module_holds_it_and_leaves_no_trace_elsewhere(
    pool: GlooPool,
) -> None:
    check(
        pool,
        "a memory bank that is used once it is full",
        "a memory bank in a deque of a submodule",
        "a memory bank in half precision",
        "a memory bank in a list outside of the module",
    )


def test_r_aux_the_outputs_in_the_users_hands_are_those_of_the_users_batch(
    pool: GlooPool,
) -> None:
    check(
        pool,
        "outputs kept for the accuracy after the update",
        "outputs kept in a dictionary of the module",
        "outputs kept by a forward hook in an object of the module",
        "an auxiliary loss in a list of a submodule",
    )


def test_r_penalty_works(pool: GlooPool) -> None:
    check(
        pool,
        "a penalty on the gradients, in the loss",
        "a penalty on the gradients, in the forward",
        "forces as derivatives of an energy, in the forward",
        "derivatives by torch.func in the forward",
    )


# --- m03: one NaN, where a replay cannot be local ---


def count_by_sum(c: Course, rows: int) -> float:
    count = torch.tensor(float(rows))
    dist.all_reduce(count, group=c.group)
    return float(count)


def count_by_objects(c: Course, rows: int) -> float:
    counts: list[Any] = [None] * 3
    dist.all_gather_object(counts, rows, group=c.group)
    return float(sum(counts))


def poisoned(c: Course, y: Tensor) -> Tensor:
    return y * float("nan") if c.rank == 1 and c.step == NAN_AT else y


def outside(c: Course) -> nn.Module:
    net = mlp()
    net[2].register_forward_hook(lambda module, args, out: poisoned(c, out))
    return net


def inside(c: Course, count: Callable[[Course, int], float], since: int = 0) -> nn.Module:
    def between(m: Any, h: Tensor) -> Tensor:
        rows = count(c, len(h)) if c.step >= since else 12.0
        return poisoned(c, h) * 4 / rows

    return Model(between)


def in_the_backward(c: Course) -> nn.Module:
    def between(m: Any, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: poisoned(c, g) * 12 / count_by_sum(c, len(g)))
        return h

    return Model(between)


NAN_IN: dict[str, Callable[[Course], nn.Module]] = {
    "the loss alone communicates": outside,
    "the forward sums": lambda c: inside(c, count_by_sum),
    "the forward gathers objects": lambda c: inside(c, count_by_objects),
    "the backward sums": in_the_backward,
    "the forward sums from that step on": lambda c: inside(c, count_by_sum, NAN_AT),
}


def through_a_nan(rank: int, group: Any, run_dir: str, names: tuple[str, ...]) -> Any:
    """Loops divided by a count over all ranks, with one NaN on rank 1."""

    def body(c: Course, build: Callable[[Course], nn.Module]) -> None:
        net = build(c)
        model, update = c.ddp(net), sgd(net)
        c.guard(model, update)
        for step in c.steps():
            update.zero_grad()
            loss = model(c.batch(step)).square().mean()
            (loss * 12 / count_by_sum(c, 4)).backward()
            update.step()
        assert all(p.isfinite().all() for p in net.parameters())

    found = {}
    for number, name in enumerate(names):
        options = {"audit_every": AUDIT_EVERY, "fingerprint_every": 2, "node": f"n{rank}"}
        options |= {"telemetry": "off", "console": False, "run_dir": f"{run_dir}/{number}"}
        c = Course(rank, group, STEPS, options)
        found[name] = c.run(lambda c, build=NAN_IN[name]: body(c, build))
    return found


def test_m03_hang_on_nan_nobody_waits_for_a_replay_that_is_not_local(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(through_a_nan, 3, str(tmp_path), tuple(NAN_IN))
    for name in NAN_IN:
        for row in rows:
            result = row[name]
            (found,) = [v for v in result["verdicts"] if v.check is Check.NONFINITE]
            where = f"{name}: {found}"
            assert (found.step, found.outcome) == (NAN_AT, Outcome.UNATTRIBUTED), where
            assert (found.suspects, found.ranks) == ((), (1,)), where
            assert result["skips"] == [(NAN_AT, "nonfinite")], where
            assert result["stopped"] == "", where
    alone = rows[0]["the loss alone communicates"]
    assert [v.cause for v in alone["verdicts"]] == [Cause.SOFTWARE]
    for name in list(NAN_IN)[1:]:
        (found,) = [v for v in rows[0][name]["verdicts"] if v.check is Check.NONFINITE]
        assert "collective" in found.reason, f"{name}: why nobody is named: {found.reason}"


# --- replicas that forwards drive apart, with or without a guard ---


def max_norm(c: Course) -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 4))


def written_codebook(c: Course) -> nn.Module:
    def between(m: Any, h: Tensor) -> Tensor:
        if c.rank == 2:  # whose data alone has the code
            m.codes.data[1].lerp_(h.detach().mean(0), 0.1)
        return h - m.codes[0]

    codes = nn.Parameter(torch.zeros(2, 8), requires_grad=False)
    return Model(between, codes=codes)


def driven_apart(rank: int, group: Any, run_dir: str) -> list[dict[str, Any]]:
    def body(c: Course, build: Callable[[Course], nn.Module]) -> None:
        net = build(c)
        model, update = c.ddp(net), sgd(net)
        c.guard(model, update)
        for step in c.steps():
            update.zero_grad()
            words = torch.full((4,), 4 * rank + step % 4) if build is max_norm else c.batch(step)
            model(words).square().mean().backward()
            update.step()

    found = []
    for build in (max_norm, written_codebook):
        options = {"audit_every": AUDIT_EVERY, "fingerprint_every": 2, "node": f"n{rank}"}
        options |= {"telemetry": "off", "console": False, "run_dir": f"{run_dir}/{build.__name__}"}
        c = Course(rank, group, STEPS, options)
        found.append(c.run(lambda c, build=build: body(c, build)))
    return found


def test_m07_forward_writes_that_drive_replicas_apart_are_nobodys_device(
    pool: GlooPool, tmp_path: Path
) -> None:
    for row in pool.run(driven_apart, 3, str(tmp_path)):
        for result in row:
            (found,) = [v for v in result["verdicts"] if v.check is Check.FINGERPRINT]
            assert (found.outcome, found.cause) == (Outcome.UNATTRIBUTED, Cause.SOFTWARE), found
            assert found.suspects == ()
            assert "the forward writes weights" in found.reason
            assert result["stopped"].startswith("SoftwareDivergence"), result["stopped"]
