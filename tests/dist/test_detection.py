"""What the guard finds, when, by which check and on which rank, and what it cannot find.

The table is detection.yaml; each row is a fault plan of one fault, on six ranks of three nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdcwatch.core.outcomes import is_alarm
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    Outcome,
    Verdict,
)
from sdcwatch.faults import Expectation, Fault, FaultPlan, load_plan
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from training import WIDTH, Job, of, same_on_every_rank, train, verdicts

pytestmark = pytest.mark.dist

WORLD, STEPS = 6, 21
TABLE = load_plan(Path(__file__).with_name("detection.yaml"))
GUARD = {"audit_every": 20, "fingerprint_every": 5}
NOT_IN_WEIGHTS = ("loss",)
"""Sites whose damage does not reach the weights: a derivative does not depend on the value."""


OPERATIONS = ("activation", "replay", "gradient")
"""Sites inside the audited call: what is planted there is told with its operation."""


def operation_of(fault: Fault) -> str:
    """In which operation of `Net` a device has erred that does what a fault does."""
    layer, _, parameter = fault.target.partition(".")
    made_by = {"": "aten::addmm", "weight": "aten::mm", "bias": "aten::sum"}
    return f"{made_by[parameter]} in {layer}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.mid, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("gain", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(nn.functional.gelu(self.first(x)))
        return self.last(nn.functional.gelu(self.mid(x)) * self.gain)


def planted(rank: int, group: Any, run_dir: str, plan: FaultPlan) -> dict[str, Any]:
    options = {**GUARD, "run_dir": run_dir}
    return train(rank, group, Job(build=Net, plan=plan, guard=options, steps=STEPS))


@pytest.fixture(scope="module")
def clean_weights(pool: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    results = pool.run(planted, WORLD, str(tmp_path_factory.mktemp("clean")), FaultPlan())
    assert same_on_every_rank(results) == []
    return str(results[0]["weights"])


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[str, ...]]]:
    """The rows that have run, printed in the end whatever pytest captures."""
    rows: dict[str, tuple[str, ...]] = {}
    yield rows
    head = ("planted", "site", "kind", "", "ranks", "steps", "found at", "by", "as", "naming")
    lines = [head, *rows.values()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        for line in lines:
            print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def cells(fault: Fault, found: list[Verdict]) -> tuple[str, ...]:
    ranks = "all" if fault.ranks == "all" else ",".join(map(str, fault.ranks))
    steps = str(fault.step) if fault.step else "–".join(map(str, fault.steps or ()))
    how = (fault.label, fault.site, fault.kind, fault.persistence, ranks, steps)
    if not found:
        return (*how, "", "missed", "", "")
    v = found[0]
    return (*how, str(v.step), v.check.value, v.outcome.value, ",".join(map(str, blamed(v))) or "-")


def blamed(verdict: Verdict) -> tuple[int, ...]:
    """The ranks that a verdict names, be it as suspects or for a strike."""
    if verdict.outcome is Outcome.NOT_REPRODUCED:
        return verdict.ranks
    return tuple(s.rank for s in verdict.suspects)


def run_row(pool: GlooPool, tmp_path: Path, fault: Fault) -> list[dict[str, Any]]:
    plan = FaultPlan(faults=(fault,), seed=TABLE.seed)
    results = pool.run(planted, WORLD, str(tmp_path), plan)
    same_on_every_rank(results)
    for rank, result in enumerate(results):
        changed = sum(changed for _, _, changed in result["planted"])
        assert (changed > 0) == fault.on_rank(rank), "the fault did not happen as planned"
    return results


@pytest.mark.parametrize("fault", TABLE.faults, ids=[f.name for f in TABLE.faults])
def test_the_table_of_what_is_found_and_what_is_missed(
    pool: GlooPool,
    tmp_path: Path,
    fault: Fault,
    clean_weights: str,
    printed: dict[str, tuple[str, ...]],
) -> None:
    results = run_row(pool, tmp_path, fault)
    found = [v for v in verdicts(results[0]) if is_alarm(v)]
    printed[fault.label] = cells(fault, found)
    wanted = fault.expect
    if not isinstance(wanted, Expectation):
        assert wanted == "miss"
        assert found == []
        if fault.site not in NOT_IN_WEIGHTS:
            assert results[0]["weights"] != clean_weights, "nothing was there to be missed"
        return
    first = wanted.step or fault.step or fault.steps[0]  # type: ignore[index]
    assert found, "missed"
    assert found[0].step == first
    expected = (wanted.check, wanted.outcome, wanted.ranks)
    assert {(v.check, v.outcome, blamed(v)) for v in found} == {expected}
    if wanted.outcome is Outcome.SUSPECT and fault.site in OPERATIONS:
        assert {s.operator for v in found for s in v.suspects} == {operation_of(fault)}
        assert {v.operator for v in found} == {operation_of(fault)}
    stops = wanted.check is Check.FINGERPRINT
    assert [r["stopped"] is not None for r in results] == [stops] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_broken_multiplier_is_named_on_whichever_rank_it_is(
    pool: GlooPool, tmp_path: Path, rank: int
) -> None:
    fault = Fault(
        site="activation",
        target="mid",
        kind="scale",
        factor=1.001,
        element=5,
        ranks=(rank,),
        steps=(18, 99),
        persistence="sticky",
    )
    results = run_row(pool, tmp_path, fault)
    assert same_on_every_rank(results) == [(20, "replay", "suspect", (rank,))]
    (suspect,) = verdicts(results[0])[0].suspects
    assert suspect.node == f"n{rank // 2}"
    assert (suspect.mismatches, suspect.comparisons, suspect.reproduced) == (2, 2, True)
    assert all(partner // 2 != rank // 2 for partner in suspect.partners)


def saving(
    rank: int, group: Any, run_dir: str, at: int, checkpoint_every: int | None
) -> dict[str, Any]:
    fault = Fault(site="weight", target="mid.weight", kind="bit_flip", bit=3, ranks=(4,), step=at)
    job = Job(
        build=Net,
        plan=FaultPlan(faults=(fault,)),
        guard={**GUARD, "run_dir": run_dir, "checkpoint_every": checkpoint_every},
        steps=12,
        save_at=(5, at),
        save=lambda step: Path(run_dir, f"{step}.pt").write_bytes(b"weights"),
    )
    return train(rank, group, job)


# Unannounced, at a step without a weight check: save_checkpoint makes its own.
@pytest.mark.parametrize(("at", "checkpoint_every"), [(10, 5), (8, None)])
def test_a_weight_corrupted_on_a_checkpoint_step_leaves_no_file_behind(
    pool: GlooPool, tmp_path: Path, at: int, checkpoint_every: int | None
) -> None:
    results = pool.run(saving, WORLD, str(tmp_path), at, checkpoint_every)
    assert same_on_every_rank(results) == [(at, "fingerprint", "suspect", (4,))]
    for result in results:
        code, verdict = result["stopped"]
        assert (code, verdict.step) == (80, at)
        assert result["saved"] == [True]
        events = [(e.step, e.result, e.reason) for e in of(result, CheckpointEvent)]
        assert events[-1] == (at, CheckpointResult.WITHHELD, GateReason.FINGERPRINT)
    assert [f.name for f in tmp_path.glob("*.pt")] == ["5.pt"]
