"""The same model, data and faults through five training loops, and what was said in each.

Every loop has its own way to call the model, to step and to save. What the guard says must not
depend on it: `story` is the list that is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sdcwatch
from sdcwatch.core.records import CheckpointEvent, UpdateSkipped, Verdict
from sdcwatch.faults import Fault, FaultPlan, Injector
from sdcwatch.testing import MemorySink

WORLD = 3
STEPS, SAVE_EVERY, BATCH = 12, 4, 4
VOCABULARY, WIDTH, LENGTH = 32, 16, 6

OPTIONS: dict[str, Any] = {
    "audit_every": 4,
    "fingerprint_every": 2,
    "telemetry": "off",
    "console": False,
}


class Net(nn.Module):
    """Embeddings, dropout, and the loss where there are labels, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        logits = self.head(self.norm(x + self.drop(F.gelu(self.mid(x)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences; another part of them for each rank."""

    def __init__(self, rank: int, size: int = STEPS * BATCH) -> None:
        draw = torch.Generator().manual_seed(17 + rank)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].roll(-1)}


def loader(rank: int, size: int = STEPS * BATCH) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Tokens(rank, size), batch_size=BATCH)


def plan(prefix: str = "") -> FaultPlan:
    """A NaN, a wrong matmul and a flipped weight, each on another rank."""
    return FaultPlan(
        faults=(
            Fault(
                site="gradient",
                kind="nan",
                target=f"{prefix}mid.weight",
                ranks=(1,),
                step=5,
                persistence="sticky",
            ),
            Fault(
                site="activation",
                kind="bit_flip",
                bit=24,
                element=3,
                target=f"{prefix}mid",
                ranks=(2,),
                step=8,
                persistence="sticky",
            ),
            Fault(
                site="weight",
                kind="bit_flip",
                bit=28,
                target=f"{prefix}mid.weight",
                ranks=(0,),
                step=10,
            ),
        )
    )


EXPECTED = [
    (4, "checkpoint", "allowed"),
    (5, "nonfinite", "suspect", (1,)),
    (5, "skip", "nonfinite"),
    (8, "replay", "suspect", (2,)),
    (8, "skip", "replay"),
    (8, "checkpoint", "withheld"),
    (10, "fingerprint", "suspect", (0,)),
]


class Harness:
    """What a loop is given: faults, the options of its guard, and where it saves."""

    def __init__(self, rank: int, run_dir: str, *, guarded: bool, faults: FaultPlan | None) -> None:
        self.rank, self.run_dir, self.guarded = rank, Path(run_dir), guarded
        self.memory = MemorySink()
        self.injector = Injector(faults or FaultPlan(), rank=rank)
        self.options: dict[str, Any] = {
            **OPTIONS,
            "run_dir": self.run_dir / "sdcwatch",
            "node": f"n{rank}",
            "sinks": [self.memory],
        }
        self.logs: list[Any] = []
        self.stopped: str = ""
        self._before = ""
        self.kept: list[int] = []

    def begin_step(self, step: int, net: nn.Module) -> None:
        """Plants what is due; notes in `kept` the steps whose update left every weight."""
        now, before = digest(net), self._before
        self.kept += [step - 1] if now == before else []
        self._before = now
        self.injector.begin_step(step)

    def story(self) -> list[tuple[Any, ...]]:
        """Step, check, outcome, named ranks; skips; checkpoints: in order."""
        told: list[tuple[Any, ...]] = []
        for record in self.memory.records:
            if isinstance(record, Verdict):
                ranks = tuple(s.rank for s in record.suspects)
                told.append((record.step, record.check.value, record.outcome.value, ranks))
            elif isinstance(record, UpdateSkipped):
                told.append((record.step, "skip", record.reason.value))
            elif isinstance(record, CheckpointEvent):
                # Of a file that a framework writes nobody here knows whether it was written.
                withheld = record.result.value == "withheld"
                told.append((record.step, "checkpoint", "withheld" if withheld else "allowed"))
        return told

    def saved(self) -> list[str]:
        """Checkpoints that lie on the disk."""
        return sorted(p.name for p in self.run_dir.glob("*") if p.name != "sdcwatch")


def digest(net: nn.Module) -> str:
    state = net.state_dict().values()
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in state)).hexdigest()


def as_launched(rank: int, world: int = WORLD) -> None:
    """The variables that torchrun sets."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@contextlib.contextmanager
def stopping(harness: Harness) -> Iterator[None]:
    try:
        yield
    except sdcwatch.CorruptionDetected as error:
        harness.stopped = type(error).__name__
    finally:
        harness.injector.detach()


# --- plain PyTorch ---


def plain(harness: Harness, group: Any) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    harness.injector.attach(model, optimizer)
    guard = sdcwatch.init(model, optimizer, **harness.options) if harness.guarded else None
    torch.manual_seed(harness.rank)
    try:
        for step, batch in enumerate(loader(harness.rank), start=1):
            harness.begin_step(step, net)
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            harness.logs.append(loss.item())
            if step % SAVE_EVERY == 0 and (guard is None or guard.may_save()) and not harness.rank:
                torch.save(net.state_dict(), harness.run_dir / f"step-{step}")
    finally:
        if guard is not None:
            guard.close()
    return net


def run(rank: int, group: Any, name: str, run_dir: str, mode: str) -> dict[str, Any]:
    """Train in one of the loops: `mode` is "unguarded", "clean" or "faulty"."""
    as_launched(rank)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    before = torch.get_rng_state()
    prefix = "net." if name == "lightning" else ""
    harness = Harness(
        rank,
        run_dir,
        guarded=mode != "unguarded",
        faults=plan(prefix) if mode == "faulty" else None,
    )
    weights = ""
    with stopping(harness):
        weights = digest(loop_of(name)(harness, group))
    torch.set_rng_state(before)
    return {
        "story": harness.story(),
        "weights": weights,
        "logs": harness.logs,
        "saved": harness.saved(),
        "stopped": harness.stopped,
        "kept": harness.kept,
        "preflight": [
            (r.coverage.value, r.reason)
            for r in harness.memory.records
            if type(r).__name__ == "PreflightDone"
        ],
    }


def loop_of(name: str) -> Callable[[Harness, Any], nn.Module]:
    """A loop; its framework is imported when it is asked for."""
    if name == "plain":
        return plain
    if name == "trainer":
        from trainer_loop import trainer

        return trainer
    if name == "lightning":
        from lightning_loop import lightning

        return lightning
    if name in ("fabric", "fabric, marked methods"):
        import fabric_loop

        return fabric_loop.fabric if name == "fabric" else fabric_loop.marked
    if name in ("nanoGPT", "timm"):
        import own_loops

        return own_loops.nanogpt if name == "nanoGPT" else own_loops.timm
    from accelerate_loop import accelerated

    return accelerated
