"""The all-reduce site on real DDP: three gloo ranks, where 1/W and division by W differ in bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD_SIZE = 3
# three processes that import torch: most of a minute where two cores are busy with other things
pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("store") / "store"
    worker = Path(__file__).with_name("ddp_worker.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(WORLD_SIZE), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        finished = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(started, finished, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in finished]


def test_hook_without_a_due_fault_trains_bit_for_bit_as_plain_ddp(ranks: Any) -> None:
    for rank in ranks:
        different = [how for how, (plain, hook) in rank["compared"].items() if plain != hook]
        assert different == []
        assert len(rank["compared"]) == 40


@pytest.mark.parametrize("target", [None, "0.weight", "4.bias"])
def test_fault_on_one_rank_makes_that_replica_alone_differ(ranks: Any, target: Any) -> None:
    runs = [rank["planted"][f"(1,) {target}"] for rank in ranks]
    assert runs[0]["digest"] == runs[2]["digest"] != runs[1]["digest"]
    assert [len(run["log"]) for run in runs] == [0, 1, 0]
    assert runs[1]["log"][0][:2] == [2, target or ""]
    assert runs[1]["log"][0][4] == 1


@pytest.mark.parametrize("target", [None, "0.weight", "4.bias"])
def test_fault_on_all_ranks_is_equal_on_all_and_changes_the_run(ranks: Any, target: Any) -> None:
    runs = [rank["planted"][f"all {target}"] for rank in ranks]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]["log"]) == 1
    how = json.dumps(
        {"gradient_as_bucket_view": False, "set_to_none": True, "zero_late": False, "accumulate": 1}
    )
    assert runs[0]["digest"] != ranks[0]["compared"][how][0]
