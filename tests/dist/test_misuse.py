"""Loops that do not do what the guard expects, and computations that do not repeat."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import (
    Cause,
    Coverage,
    Origin,
    Outcome,
    PreflightDone,
    Progress,
    RunFinished,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.text import list_ranks
from sdcwatch.errors import CorruptionDetected, SchemaMismatch
from sdcwatch.testing import GlooPool, MemorySink

sys.path.insert(0, str(Path(__file__).parent))
from training import QUIET

pytestmark = pytest.mark.dist

WORLD = 3


class Net(nn.Module):
    """Dropout and BatchNorm, so that generators and buffers have something to lose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def nothing(output: torch.Tensor) -> torch.Tensor:
    return output


class Loop:
    """A guarded loop on one rank, each rank on a node of its own.

    Args:
        loss: The loss of the loop, outside of what is audited.
        inside: What the last layer makes of its output, inside of what is audited.
    """

    def __init__(
        self,
        rank: int,
        group: Any,
        run_dir: str,
        loss: Callable[[nn.Module, Any], torch.Tensor] = mean_square,
        *,
        inside: Callable[[torch.Tensor], torch.Tensor] = nothing,
        **options: Any,
    ) -> None:
        self.rank, self.net, self.memory = rank, Net(), MemorySink()
        self.net.last.register_forward_hook(lambda module, args, output: inside(output))
        self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.loss = loss
        self.step = 0
        self.options = {
            "audit_every": 2,
            "fingerprint_every": 2,
            "node": f"n{rank}",
            "run_dir": run_dir,
            "sinks": [self.memory],
            **QUIET,
            **options,
        }
        torch.manual_seed(rank)

    def start(self) -> sdcwatch.Guard:
        self.guard = sdcwatch.init(self.model, self.optimizer, **self.options)
        return self.guard

    def batch(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * self.rank + self.step)
        return torch.randn(6, 4, generator=draw)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            self.loss(self.model, self.batch()).backward()
            self.optimizer.step()

    def of(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.memory.records if type(r) is kind]

    def finished(self) -> dict[str, Any]:
        """What the run left, after its guard was closed."""
        self.guard.close()
        return {
            "verdicts": [
                (v.step, v.check.value, v.outcome.value, tuple(s.rank for s in v.suspects))
                for v in self.of(Verdict)
            ],
            "full": self.of(Verdict),
            "reasons": [v.reason for v in self.of(Verdict)],
            "preflight": [(p.coverage, p.reason) for p in self.of(PreflightDone)],
            "skips": [(s.step, s.reason.value) for s in self.of(UpdateSkipped)],
            "audited": max(p.last_clean_audit_step for p in self.of(Progress)),
            "weights": sum(float(p.detach().double().sum()) for p in self.net.parameters()),
        }


def same(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say, after checking that all say the same."""
    for key in ("verdicts", "reasons", "preflight", "skips", "audited", "weights"):
        assert all(row[key] == rows[0][key] for row in rows), key
    return rows[0]


# --- gradients that do not come through the outputs of the module ---


def penalty(net: nn.Module) -> torch.Tensor:
    """A loss of the weights alone."""
    return torch.stack([p.square().sum() for p in net.parameters()]).sum()


def beside(
    rank: int,
    group: Any,
    run_dir: str,
    who: tuple[int, ...],
    when: tuple[int, ...],
    only: bool,
) -> dict[str, Any]:
    """A penalty on the weights outside of the module: `only` it, or added to the loss."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = mean_square(model, batch)
        if rank not in who or loop.step not in when:
            return value
        return penalty(loop.net) if only else value + 0.01 * penalty(loop.net)

    loop = Loop(rank, group, run_dir, loss)
    loop.start()
    loop.run(8)
    return loop.finished()


@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["on one rank", "on all ranks"])
@pytest.mark.parametrize(
    ("only", "says"),
    [
        (True, "no gradient arrived at an output of the module that DDP wraps"),
        (False, "a gradient entered by another way than the outputs: "),
    ],
    ids=["instead of the loss", "beside the loss"],
)
def test_an_audit_step_whose_gradients_come_by_another_way_is_not_run_and_made_up_for(
    pool: GlooPool, tmp_path: Path, who: tuple[int, ...], only: bool, says: str
) -> None:
    left = same(pool.run(beside, WORLD, str(tmp_path), who, (4,), only))
    assert left["verdicts"] == [(4, "replay", "not_run", ())]
    assert f"{says}" in left["reasons"][0]
    assert list_ranks(who) in left["reasons"][0]
    assert (left["audited"], left["skips"]) == (8, [])


@pytest.mark.parametrize("only", [True, False], ids=["instead of the loss", "beside the loss"])
def test_on_other_steps_it_does_not_matter_by_which_way_a_gradient_came(
    pool: GlooPool, tmp_path: Path, only: bool
) -> None:
    left = same(pool.run(beside, WORLD, str(tmp_path), (1,), (3, 5), only))
    assert (left["verdicts"], left["audited"]) == ([], 8)


def test_a_loop_that_never_uses_the_outputs_is_told_so_and_never_armed(
    pool: GlooPool, tmp_path: Path
) -> None:
    left = same(pool.run(beside, WORLD, str(tmp_path), (0, 1, 2), tuple(range(1, 9)), True))
    assert {outcome for _, _, outcome, _ in left["verdicts"]} == {"not_run"}
    assert (left["audited"], left["preflight"]) == (0, [])


def test_a_penalty_on_weights_outside_of_the_module_is_found_before_arming(
    pool: GlooPool, tmp_path: Path
) -> None:
    left = same(pool.run(beside, WORLD, str(tmp_path), (0, 1, 2), tuple(range(1, 9)), False))
    ((coverage, reason),) = left["preflight"]
    assert (coverage, left["verdicts"], left["audited"]) == (Coverage.OFF, [], 0)
    assert "first.weight" in reason
    assert "let the module return what that term is computed from" in reason


# --- what is outside of the audited call ---


def with_a_loss_of_its_own(rank: int, group: Any, run_dir: str | None) -> dict[str, Any]:
    """A loss that depends on the rank, communicates, draws, counts and keeps outputs."""
    kept: list[torch.Tensor] = []
    drawn = random.Random(rank)  # nobody puts it back for a replay

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        kept.append(output)
        largest = output.detach().abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        weight = (1 + rank + drawn.random()) * len(kept) / largest
        return weight * output.square().mean()

    loop = Loop(rank, group, run_dir or "", loss)
    if run_dir is not None:
        loop.start()
    loop.run(8)
    weights = sum(float(p.detach().double().sum()) for p in loop.net.parameters())
    return {"weights": weights} if run_dir is None else loop.finished()


def test_a_loss_outside_of_the_module_may_do_what_it_likes(pool: GlooPool, tmp_path: Path) -> None:
    left = same(pool.run(with_a_loss_of_its_own, WORLD, str(tmp_path)))
    assert [coverage for coverage, _ in left["preflight"]] == [Coverage.FULL]
    assert (left["verdicts"], left["audited"]) == ([], 8)
    assert left["weights"] == pool.run(with_a_loss_of_its_own, WORLD, None)[0]["weights"]


# --- what is no step ---


def with_more_calls(rank: int, group: Any, run_dir: str | None) -> dict[str, Any]:
    """Between the steps the module is called and differentiated in ways that train nothing."""
    loop = Loop(rank, group, run_dir or "")
    if run_dir is not None:
        loop.start()
    for _ in range(8):
        look = loop.model(loop.batch()).square().mean()
        torch.autograd.grad(look, loop.net.last.weight)
        loop.net.eval()
        with torch.no_grad():
            loop.model(loop.batch())
        loop.net.train()
        loop.net(loop.batch())  # with gradients, and no backward ever
        loop.run(1)
    if run_dir is None:
        return {"weights": sum(float(p.detach().double().sum()) for p in loop.net.parameters())}
    return {**loop.finished(), "step": loop.guard.step}


def test_forwards_without_a_backward_and_autograd_grad_count_nothing_and_change_nothing(
    pool: GlooPool, tmp_path: Path
) -> None:
    left = same(pool.run(with_more_calls, WORLD, str(tmp_path)))
    assert (left["step"], left["audited"], left["verdicts"]) == (8, 8, [])
    assert [coverage for coverage, _ in left["preflight"]] == [Coverage.FULL]
    assert left["weights"] == pool.run(with_more_calls, WORLD, None)[0]["weights"]


# --- exceptions in the middle of a step ---


class Explode(torch.autograd.Function):
    """Raises in the backward."""

    error: BaseException

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Explode.error


def switches_and_hooks(loop: Loop) -> dict[str, Any]:
    """Everything that an audit step turns on or hangs somewhere."""
    modules = list(loop.net.modules())
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "module hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules),
        "tensor hooks": [len(p._backward_hooks or {}) for p in loop.net.parameters()],
        "accumulation hooks": [
            len(p._post_accumulate_grad_hooks or {}) for p in loop.net.parameters()
        ],
        "optimizer hooks": len(loop.optimizer._optimizer_step_pre_hooks)
        + len(loop.optimizer._optimizer_step_post_hooks),
        "training": [m.training for m in modules],
    }


def generators_and_buffers(loop: Loop) -> list[list[float]]:
    state = [torch.get_rng_state().tolist()]
    return state + [b.double().flatten().tolist() for b in loop.net.buffers()]


def interrupted(rank: int, group: Any, run_dir: str, where: str) -> dict[str, Any]:
    """Audit steps that raise on every rank, with kernels that repeat only when asked to."""
    when: dict[str, Any] = {"step": 0, "error": None}
    raised: list[Any] = []
    restless = random.SystemRandom()

    def fail(here: str) -> bool:
        return loop.step == when["step"] and where == here

    def inside(output: torch.Tensor) -> torch.Tensor:
        if not torch.are_deterministic_algorithms_enabled():
            output = output + 1e-3 * restless.random()
        if fail("in the forward"):
            raise when["error"]
        return output

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if fail("before the forward"):
            raised.append(generators_and_buffers(loop))
            raise when["error"]
        loss = mean_square(model, batch)
        if fail("after the forward"):
            raised.append(generators_and_buffers(loop))
            raise when["error"]
        return Explode.apply(loss) if fail("in the backward") else loss

    loop = Loop(rank, group, run_dir, loss_of, inside=inside)
    before_init = switches_and_hooks(loop)
    guard = loop.start()
    loop.run(5)
    armed = switches_and_hooks(loop)
    coverage = [p.coverage for p in loop.of(PreflightDone)]
    rows = []
    for error in (ValueError("a bad label"), KeyboardInterrupt()):
        loop.run(1 - guard.step % 2)  # the next step is audited
        when["step"], when["error"], Explode.error = loop.step + 1, error, error
        raised.clear()
        with pytest.raises(type(error)) as caught:
            loop.run(1)
        immediately = switches_and_hooks(loop)
        as_raised = not raised or raised == [generators_and_buffers(loop)]
        loop.run(1)
        rows.append((caught.value is error, as_raised, switches_and_hooks(loop) == armed))
        rows[-1] += (immediately == armed,)
    loop.run(4)
    left = loop.finished()
    return {
        **left,
        "coverage": coverage,
        "raised": rows,
        "closed": switches_and_hooks(loop) == before_init,
        "steps": guard.step,
    }


@pytest.mark.parametrize(
    "where", ["before the forward", "in the forward", "after the forward", "in the backward"]
)
def test_an_exception_on_an_audit_step_leaves_nothing_behind_and_training_goes_on(
    pool: GlooPool, tmp_path: Path, where: str
) -> None:
    rows = pool.run(interrupted, WORLD, str(tmp_path), where)
    for row in rows:
        assert row["coverage"] == [Coverage.FULL]
        for same_error, as_raised, afterwards, at_once in row["raised"]:
            assert (same_error, as_raised, afterwards) == (True, True, True)
            # Where a call has begun nothing comes back to the guard; the next one cleans up.
            assert at_once or where != "before the forward"
        assert row["closed"]
    left = same(rows)
    assert left["verdicts"] == []
    assert left["audited"] >= 8


def closing_after_an_exception(rank: int, group: Any, run_dir: str) -> tuple[bool, list[Any]]:
    """Only rank 1 leaves; it must not need the others for that."""
    loop = Loop(rank, group, run_dir)
    guard = loop.start()
    loop.run(3)
    if rank == 1:
        message = "a bad label"

        def no_collective(*arguments: Any) -> None:
            pytest.fail("a collective after an exception")

        for collective in ("max_int64s", "max_and_read", "gather", "route"):
            setattr(guard.joined_exchange, collective, no_collective)
        with contextlib.suppress(ValueError), guard:
            raise ValueError(message)
    dist.barrier(group=group)
    guard.close()
    alive = [t.name for t in threading.enumerate() if t.name.startswith("sdcwatch-watchdog")]
    finish = [(f.state.value, f.reason, f.exit_code) for f in loop.of(RunFinished)]
    return bool(alive), finish


def test_closing_after_an_exception_makes_no_collective(pool: GlooPool, tmp_path: Path) -> None:
    rows = pool.run(closing_after_an_exception, WORLD, str(tmp_path))
    assert rows[1] == (False, [("failed", "the run ended with ValueError", 1)])
    assert rows[0] == rows[2] == (False, [("finished", "the run ended", 0)])


def failing_to_start(rank: int, group: Any, run_dir: str, how: str) -> tuple[str, bool, bool, int]:
    loop = Loop(rank, group, run_dir, buffers=True)
    if how == "schema" and rank == 1:
        loop.net.register_buffer("extra", torch.zeros(2))
    if how == "weights" and rank == 1:
        loop.net.last.weight.data[0, 0] += 1.0
    before = switches_and_hooks(loop)
    threads = threading.active_count()
    try:
        loop.start()
    except (CorruptionDetected, SchemaMismatch) as error:
        said = str(error)
    else:
        said = "no error"
    hooked = bool(loop.model._comm_hooks)
    return said, hooked, switches_and_hooks(loop) == before, threading.active_count() - threads


@pytest.mark.parametrize("how", ["weights", "schema"])
def test_a_start_that_fails_leaves_nothing_behind_on_any_rank(
    pool: GlooPool, tmp_path: Path, how: str
) -> None:
    rows = pool.run(failing_to_start, WORLD, str(tmp_path), how)
    assert len({said for said, *_ in rows}) == 1
    expected = {
        "weights": "replicas differ on 1 tensor before any device has computed an update",
        "schema": "extra: missing on ranks 0 and 2, (2,) torch.float32 on rank 1",
    }
    assert expected[how] in rows[0][0]
    assert [row[1:] for row in rows] == [(False, True, 0)] * WORLD


# --- what does not repeat, and what is no device's fault ---


def noisy(
    rank: int, group: Any, run_dir: str, kind: str, probability: float, steps: int
) -> dict[str, Any]:
    calls = array("q", [0])  # goes on in replays: nothing knows how to put it back

    def restlessly(value: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        restless = random.Random(f"{rank} {calls[0]}")
        if restless.random() >= probability:
            return value
        noise = 1e-4 * restless.random()
        # The second changes the gradients and leaves the output: it has the value zero.
        return value + noise if kind != "gradient" else value + noise * (value - value.detach())

    if kind == "loss":
        loss = lambda model, batch: restlessly(mean_square(model, batch))  # noqa: E731
        loop = Loop(rank, group, run_dir, loss, audit_every=1)
    else:
        loop = Loop(rank, group, run_dir, inside=restlessly, audit_every=1)
    loop.start()
    loop.run(steps)
    return loop.finished()


@pytest.mark.parametrize(
    ("kind", "coverage", "says"),
    [
        ("output", Coverage.OFF, "Let the forward depend on its arguments"),
        ("gradient", Coverage.OUTPUTS_ONLY, "only outputs are compared"),
        ("loss", Coverage.FULL, "equal bit for bit"),
    ],
)
def test_a_computation_that_never_repeats_degrades_coverage_and_says_what_to_mend(
    pool: GlooPool, tmp_path: Path, kind: str, coverage: Coverage, says: str
) -> None:
    left = same(pool.run(noisy, WORLD, str(tmp_path), kind, 1.0, 6))
    assert left["verdicts"] == []
    ((found, reason),) = left["preflight"]
    assert (found, says in reason) == (coverage, True)
    # Only an audit of something counts as one.
    assert left["audited"] == (0 if coverage is Coverage.OFF else 6)


@pytest.mark.parametrize(("probability", "steps"), [(0.01, 24), (0.2, 12)], ids=["1 %", "20 %"])
def test_a_computation_that_seldom_repeats_names_nobody(
    pool: GlooPool, tmp_path: Path, probability: float, steps: int
) -> None:
    left = same(pool.run(noisy, WORLD, str(tmp_path), "output", probability, steps))
    assert [v for v in left["verdicts"] if v[3] or v[2] == "suspect"] == []
    ((coverage, reason),) = left["preflight"]
    assert (coverage, "repeat" in reason) == (Coverage.OFF, True)


def in_another_environment(rank: int, group: Any, run_dir: str, fact: str) -> dict[str, Any]:
    loop = Loop(rank, group, run_dir)
    loop.start()
    if fact == "threads":
        torch.set_num_threads(2 if rank == 1 else 1)
    else:
        torch.set_flush_denormal(rank == 1)
    try:
        loop.run(6)
    finally:
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
    return loop.finished()


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("threads", "threads differs: '1' on ranks 0 and 2, '2' on rank 1"),
        ("denormals", "flush_denormal differs: 'False' on ranks 0 and 2, 'True' on rank 1"),
    ],
)
def test_a_rank_in_another_environment_differs_with_the_fact_that_separates_it(
    pool: GlooPool, tmp_path: Path, fact: str, said: str
) -> None:
    left = same(pool.run(in_another_environment, WORLD, str(tmp_path), fact))
    assert [coverage for coverage, _ in left["preflight"]] == [Coverage.FULL]
    assert [(step, check, outcome) for step, check, outcome, *_ in left["verdicts"]] == [
        (1, "replay", "differs")
    ]
    assert said in left["reasons"][0]
    assert left["audited"]


def with_nan(rank: int, group: Any, run_dir: str, source: str, when: tuple[int, ...]) -> Any:
    """A value that is not finite: in the data, or put there on rank 1."""
    nan = float("nan")

    def bad(where: str) -> bool:
        return source == where and rank == 1 and loop.step in when

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model, batch)
        return loss * nan if bad("loss") else loss

    def inside(output: torch.Tensor) -> torch.Tensor:
        return output * nan if bad("forward") else output

    loop = Loop(rank, group, run_dir, loss_of, inside=inside)
    plain = loop.batch

    def batch() -> torch.Tensor:
        return plain() / 0.0 if bad("data") else plain()

    loop.batch = batch  # type: ignore[method-assign]
    loop.net.first.weight.register_hook(lambda g: g * nan if bad("gradient") else None)
    loop.start()
    loop.run(10)
    return loop.finished()


@pytest.mark.parametrize(
    ("source", "outcome", "named", "origin", "cause"),
    [
        ("data", Outcome.REPRODUCIBLE, (), Origin.LOCAL, Cause.DATA),
        ("loss", Outcome.UNATTRIBUTED, (), Origin.LOCAL, Cause.OUTSIDE),
        # Hooks of the script are software, and the trace of operations sees them.
        ("forward", Outcome.UNATTRIBUTED, (), Origin.LOCAL, Cause.SOFTWARE),
        ("gradient", Outcome.UNATTRIBUTED, (), Origin.LOCAL, Cause.SOFTWARE),
    ],
)
def test_a_value_that_is_not_finite_is_seen_before_the_update_and_told_apart_from_data(
    pool: GlooPool,
    tmp_path: Path,
    source: str,
    outcome: Outcome,
    named: tuple[int, ...],
    origin: Origin,
    cause: Cause,
) -> None:
    when = (5, 8)  # a plain step, and one that is audited
    left = same(pool.run(with_nan, WORLD, str(tmp_path), source, when))
    assert left["verdicts"] == [(step, "nonfinite", outcome.value, named) for step in when]
    assert {(v.origin, v.cause) for v in left["full"]} == {(origin, cause)}
    assert left["skips"] == [(step, "nonfinite") for step in when]
    assert left["weights"] == left["weights"]  # no NaN has reached them


# --- uneven inputs ---


def uneven(rank: int, group: Any, run_dir: str) -> tuple[list[Any], int, list[str]]:
    loop = Loop(rank, group, run_dir)
    guard = loop.start()
    with Join([loop.model, guard]):
        loop.run(5 if rank == 1 else 9)
    left = loop.finished()
    return left["verdicts"], loop.step, left["reasons"]


def test_a_rank_that_runs_out_of_inputs_under_join_is_not_blamed(
    pool: GlooPool, tmp_path: Path
) -> None:
    rows = pool.run(uneven, WORLD, str(tmp_path))
    assert [steps for _, steps, _ in rows] == [9, 5, 9]
    assert [verdicts for verdicts, _, _ in rows] == [[], [], []]
