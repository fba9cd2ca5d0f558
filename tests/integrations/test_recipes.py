"""Each code block of docs/recipes.md, executed as it stands, and again without its guard lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sdcwatch.config
from sdcwatch.core.records import PreflightDone, Progress, Verdict
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import GlooPool

sys.path.insert(0, str(Path(__file__).parent))
from loops import WORLD, Tokens, as_launched, digest

pytestmark = pytest.mark.dist

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", TEXT, flags=re.MULTILINE | re.S))
LINES = {"transformers": 1, "Lightning": 1}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 5))


def images(rank: int, size: int = 64) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(rank)
    x, y = torch.randn(size, 12, generator=draw), torch.randint(5, (size,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def names_of(name: str, rank: int, folder: str) -> dict[str, Any]:
    """What the script around a block has made."""
    given: dict[str, Any] = {"folder": folder, "net": classifier(), "loader": images(rank)}
    if name == "transformers":
        from trainer_loop import forget_accelerate, gpt2, transformers

        forget_accelerate()
        transformers.set_seed(0)
        settings = {"use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True}
        model = gpt2()
        return {**given, "model": model, "net": model, "dataset": Tokens(0), "settings": settings}
    if name == "Lightning":
        from lightning_loop import Model, TorchElasticEnvironment, pl
        from loops import loader

        pl.seed_everything(0, verbose=False)
        settings = {"accelerator": "cpu", "devices": WORLD, "plugins": [TorchElasticEnvironment()]}
        settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        model = Model()
        return {
            **given,
            "module": model,
            "net": model,
            "loader": loader(rank),
            "settings": settings,
        }
    if name == "Fabric":
        from fabric_loop import made_fabric

        return {**given, "fabric": made_fabric(precision="bf16-mixed")}
    if name == "accelerate":
        from trainer_loop import accelerate, forget_accelerate

        forget_accelerate()
        made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(given["net"].parameters(), lr=1e-3)
        loader = images(0, WORLD * 64)  # `prepare` gives each rank its part
        return {**given, "accelerator": made, "optimizer": optimizer, "loader": loader}
    return given


def without_guard(block: str) -> str:
    """The block before anything was added to it."""
    lines = []
    for line in block.splitlines():
        if " and guard.may_save()" in line:
            lines.append(line.replace(" and guard.may_save()", ""))
        elif "# guard" not in line:
            lines.append(line)
        elif not line.partition("  # guard")[0].endswith(","):  # an entry of a list leaves nothing
            lines.append(re.sub(r"\S.*", "pass", line))
    return "\n".join(lines)


def executed(rank: int, group: Any, run_dir: str, name: str) -> dict[str, Any]:
    as_launched(rank)
    sdcwatch.config.os.environ.update(
        SDCWATCH_NODE=f"n{rank}", SDCWATCH_TELEMETRY="off", SDCWATCH_CONSOLE="no"
    )
    before = torch.get_rng_state()
    left = {}
    for how, code in (("plain", without_guard(BLOCKS[name])), ("guarded", BLOCKS[name])):
        folder = Path(run_dir) / how
        folder.mkdir(parents=True, exist_ok=True)
        sdcwatch.config.os.environ["SDCWATCH_RUN_DIR"] = str(folder / "sdcwatch")
        given = names_of(name, rank, str(folder))
        torch.manual_seed(rank)
        exec(compile(code, f"docs/recipes.md: {name}", "exec"), given)
        torch.distributed.barrier()
        left[how] = digest(given["net"])
    torch.set_rng_state(before)
    records = read_records(folder / "sdcwatch")
    return {
        "same": left["plain"] == left["guarded"],
        "coverage": [r.coverage.value for r in records if isinstance(r, PreflightDone)],
        "audits": sum(r.comparisons for r in records if isinstance(r, Progress)),
        "verdicts": [r.reason for r in records if isinstance(r, Verdict)],
        "saved": [p.name for p in folder.glob("*") if p.name != "sdcwatch"],
    }


@pytest.mark.parametrize("name", BLOCKS)
def test_a_recipe_runs_as_it_stands_is_covered_in_full_and_trains_the_same_weights(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    rows = pool.run(executed, WORLD, str(tmp_path), name)

    assert BLOCKS[name].count("# guard") == LINES.get(name, 3)
    for row in rows:
        assert row["same"]
        assert (row["coverage"], row["verdicts"]) == (["full"], [])
        assert row["audits"] > 0
        assert row["saved"]


def test_every_framework_of_the_table_has_a_recipe() -> None:
    expected = ["transformers", "Lightning", "Fabric", "accelerate", "timm", "nanoGPT"]
    assert list(BLOCKS) == [*expected, "PyTorch's imagenet example"]


def test_the_table_says_how_many_lines_are_added_and_that_is_three_at_most() -> None:
    table = re.findall(r"^\| (\S+)[^|]* \| [^|]+ \| (\d+) \|", TEXT, flags=re.MULTILINE)
    said = {name: int(lines) for name, lines in table}
    own = said.pop("a")  # loop of your own
    assert said.keys() < BLOCKS.keys()
    added = {name: block.count("# guard") for name, block in BLOCKS.items()}
    assert added == {name: said.get(name, own) for name in BLOCKS}
    assert max(added.values()) <= 3
