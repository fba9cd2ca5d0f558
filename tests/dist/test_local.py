"""Tensors of each rank's own: in DDP's ignore list, or named by the option `local`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import Coverage, PreflightDone, RunStarted, Verdict
from sdcwatch.errors import ConfigurationError, CorruptionDetected
from sdcwatch.testing import GlooPool, MemorySink

pytestmark = pytest.mark.dist


class Net(nn.Module):
    """A head that all ranks share, and a table of each rank's own."""

    def __init__(self, rank: int, *, used: bool, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)
        self.table.requires_grad_(trained)
        self.used = used
        self.own(rank)

    def own(self, rank: int) -> None:
        draw = torch.Generator().manual_seed(100 + rank)
        self.table.weight.data.normal_(generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        row = self.table(x).mean(1)
        return self.head(row if self.used else torch.ones_like(row) * x[:, :1])


def run(rank: int, group: Any, run_dir: str, options: dict[str, Any], how: dict[str, Any]) -> Any:
    """Train; `how` may set used, trained, ignored, frozen, and a cell to break."""
    net = Net(rank, used=how.get("used", True), trained=how.get("trained", True))
    if ignored := how.get("ignored", ()):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    net.own(rank)  # DDP has sent that of rank 0 to all, where it is not ignored
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    memory = MemorySink()
    try:
        guard = sdcwatch.init(
            model,
            optimizer,
            sinks=[memory],
            run_dir=run_dir,
            node=f"n{rank}",
            audit_every=3,
            fingerprint_every=2,
            telemetry="off",
            console=False,
            **options,
        )
    except (ConfigurationError, CorruptionDetected) as error:
        return {"error": str(error)}
    left: dict[str, Any] = {"error": ""}
    try:
        for step in range(1, 9):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randint(10, (3, 2), generator=draw)).square().mean().backward()
            optimizer.step()
            if step == 5 and rank == 1 and how.get("broken"):
                net.head.weight.data[0, 0] += 1
    except CorruptionDetected as error:
        left["error"] = str(error)
    finally:
        guard.close()
    records = memory.records
    (start,) = (r for r in records if isinstance(r, RunStarted))
    left["notes"] = " ".join(start.notes)
    left["preflight"] = [(r.coverage, r.reason) for r in records if isinstance(r, PreflightDone)]
    left["named"] = [s.rank for r in records if isinstance(r, Verdict) for s in r.suspects]
    left["verdicts"] = [r.outcome for r in records if isinstance(r, Verdict)]
    return left


TABLE = {"ignored": ["table.weight"]}


def test_m09_ignored_parameters_are_left_out_of_the_checks_and_that_is_said(
    pool: GlooPool, tmp_path: Path
) -> None:
    for row in pool.run(run, 3, str(tmp_path), {}, TABLE):
        assert (row["error"], row["verdicts"]) == ("", [])
        assert "table.weight belong to each rank alone" in row["notes"]
        ((coverage, reason),) = row["preflight"]
        assert coverage is Coverage.OFF
        assert "table.weight, of which each rank has its own" in reason


def test_shared_weights_beside_a_table_of_its_own_are_still_compared(
    pool: GlooPool, tmp_path: Path
) -> None:
    for row in pool.run(run, 3, str(tmp_path), {}, {**TABLE, "broken": True}):
        assert "head.weight" in row["error"]
        assert row["named"] == [1]


def test_a_table_that_the_forward_does_not_use_costs_no_coverage(
    pool: GlooPool, tmp_path: Path
) -> None:
    for row in pool.run(run, 3, str(tmp_path), {}, {**TABLE, "used": False}):
        assert row["verdicts"] == []
        assert [coverage for coverage, _ in row["preflight"]] == [Coverage.FULL]


def test_the_option_names_tensors_that_ddp_does_not_ignore(pool: GlooPool, tmp_path: Path) -> None:
    how = {"used": False, "trained": False}
    (one, *_) = pool.run(run, 3, str(tmp_path / "a"), {}, how)
    assert "replicas differ on 1 tensor before any device" in one["error"]
    for row in pool.run(run, 3, str(tmp_path / "b"), {"local": ["table.*"]}, how):
        assert (row["error"], row["verdicts"]) == ("", [])
        assert [coverage for coverage, _ in row["preflight"]] == [Coverage.FULL]
        assert "table.weight belong" in row["notes"]


@pytest.mark.parametrize(
    ("local", "says"),
    [
        (("tabel.*",), "to match a parameter or a buffer, but got 'tabel.*', which match none"),
        (("*",), "which leave out all 3"),
        ("table.*", "Expected `local` to be a tuple"),
        ((1,), "Expected `local` to hold names or patterns"),
    ],
)
def test_what_the_option_cannot_mean_is_refused_on_every_rank_before_anything_is_changed(
    pool: GlooPool, tmp_path: Path, local: Any, says: str
) -> None:
    for row in pool.run(run, 3, str(tmp_path), {"local": local}, {"used": False}):
        assert says in row["error"]
