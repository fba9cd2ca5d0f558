"""Checks on a GPU what was written for one and never run on one; prints a table for docs/scale.md.

    python tools/gpu_check.py [--device cuda]

One GPU, some minutes. First one process alone: fingerprints, repeated backwards, waits for the
device, copies to the host, bandwidth. Then three ranks with gloo that share the GPU and say that
they are three nodes: every micro-batch of a GPT is replayed by another rank, in bf16 and in fp16
under a GradScaler; peak memory and time of a step against plain DDP; and a rank that computes
wrongly, which has to be named. It ends with code 1 if a row is not as wanted. With ``--device cpu``
the same code runs small and without a GPU: that shows that the script works, and nothing about a
GPU. Three ranks on one GPU do not show how NCCL behaves when a rank is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.checks.fingerprint import digest_tensor, digest_tensors
from sdcwatch.demo.model import GPT, GPTConfig
from sdcwatch.faults import Fault, FaultPlan, Injector
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.waits import DeviceResult, HostBuffer, unfinished
from sdcwatch.testing import GlooPool, RankFailed

STEPS = 5
RANKS = 3
FAR = 10**9
QUIET: dict[str, Any] = {"telemetry": "off", "console": False}
LARGE = GPTConfig(vocabulary=256, context=512, width=768, heads=12, layers=6)
SMALL = GPTConfig(vocabulary=64, context=16, width=32, heads=2, layers=1)


@dataclass(frozen=True, slots=True)
class Row:
    """What one check saw.

    Attributes:
        what: Name of the check.
        seen: In a few words, figures included.
        good: It is as wanted; None where nothing is, as for a figure.
    """

    what: str
    seen: str
    good: bool | None = None

    def __str__(self) -> str:
        mark = {True: "ok", False: "**FAIL**", None: ""}[self.good]
        return f"| {self.what} | {self.seen} | {mark} |"


# --- one process alone ---


class Attention(torch.nn.Module):
    """One block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.split(inputs).unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(-3, -2)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return self.join(mixed.transpose(-3, -2).flatten(-2))


def fingerprints(device: torch.device) -> Row:
    """The fingerprint of the same bits is the same on the device and on the host."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    tensors = [torch.randn(n).to(kind) for kind in kinds for n in (1, 700, 9000, 600_000)]
    there = digest_tensors([t.to(device) for t in tensors]).cpu()
    same = torch.equal(there, digest_tensors(tensors))
    return Row("fingerprints against the host", f"{len(tensors)} tensors, equal is {same}", same)


def repeats(device: torch.device) -> Row:
    """A bf16 backward with attention gives the same bits again."""
    torch.manual_seed(0)
    net, inputs = Attention().to(device), torch.randn(8, 128, 64, device=device)

    def gradients() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = net(inputs).float().square().mean()
        return digest_tensors(torch.autograd.grad(loss, list(net.parameters())))

    first = gradients()
    differing = sum(not torch.equal(first, gradients()) for _ in range(20))
    return Row("bf16 backward repeated 20 times", f"{differing} differ", differing == 0)


def waits(device: torch.device) -> Row:
    """The host waits for the device only as long as it wants to, and reads what was agreed."""
    exchange = GlooExchange(device=device)
    words = torch.tensor([7, -7], device=device)
    own = torch.tensor([1.5, float("inf")], device=device)
    read = exchange.max_and_read(words, own, "a check")
    good = read == ((7, -7), [1.5, float("inf")])
    name, said = f"wait for an all-reduce on {dist.get_backend()}", f"read {read}"
    if device.type != "cuda":
        return Row(name, f"{said}; the wait for a busy device needs one", good)
    torch.cuda._sleep(2_000_000_000)  # about a second of the device
    work = dist.all_reduce(words, op=dist.ReduceOp.MAX, async_op=True)
    result = DeviceResult(work, lambda: words, HostBuffer(device), blocks=False)
    early, late = unfinished(result, 0.05), unfinished(result, 60.0)
    good = good and early == "" and late is None and result.values() == [7, -7]
    return Row(name, f"{said}; busy device: {early!r} after 50 ms, then {late!r}", good)


def reads(device: torch.device) -> Row:
    """A plain guarded step copies to the host once; without a guard it does not."""
    seen = [_copies(device, guarded=guarded) / STEPS for guarded in (False, True)]
    name, said = "copies to the host, plain step", f"{seen[0]:g} without a guard, {seen[1]:g} with"
    if device.type != "cuda":
        return Row(name, f"{said} (a CPU has none: tests/dist/test_device_reads.py counts there)")
    return Row(name, said, seen[1] - seen[0] == 1)


def _copies(device: torch.device, *, guarded: bool) -> int:
    torch.manual_seed(0)
    net = Attention().to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard = (
        sdcwatch.init(
            model, optimizer, run_dir=tempfile.mkdtemp(), audit_every=FAR, fingerprint_every=FAR,
            **QUIET,
        )
        if guarded
        else None
    )  # fmt: skip
    inputs = torch.randn(8, 32, 64, device=device)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    run(10)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        run(STEPS)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if guard is not None:
        guard.close()
    return sum("DtoH" in event.name for event in profile.events())


def bandwidth(device: torch.device) -> Row:
    """How fast a fingerprint reads, beside a sum and a copy of the same bytes."""
    tensor = torch.randn((1 << 28 if device.type == "cuda" else 1 << 22) // 4, device=device)
    ways: dict[str, Callable[[], object]] = {
        "sum": tensor.sum,
        "copy": tensor.clone,
        "fingerprint": lambda: digest_tensor(tensor),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(12):
        for name, way in ways.items():
            seconds = timed(device, way)
            if round_ >= 2:
                taken[name].append(seconds)
    speeds = {name: tensor.nbytes / statistics.median(each) / 1e9 for name, each in taken.items()}
    said = ", ".join(f"{name} {speed:.0f} GB/s" for name, speed in speeds.items())
    return Row(f"{tensor.nbytes >> 20} MiB read", said)


def timed(device: torch.device, way: Callable[[], object]) -> float:
    """Seconds that something takes on the device."""
    synchronise(device)
    started = time.perf_counter()
    way()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


ALONE: tuple[Callable[[torch.device], Row], ...] = (fingerprints, repeats, waits, reads, bandwidth)


# --- three ranks on one device ---


class Loop:
    """A GPT and its training step, guarded or not, on one of the ranks.

    Args:
        rank: The rank; its node is named after it.
        group: Of all ranks.
        device: That they share.
        dtype: Of autocast; with float16 there is a GradScaler.
        plan: Faults to plant.
        guard: Options of `sdcwatch.init`; None trains without a guard.
    """

    def __init__(
        self,
        rank: int,
        group: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plan: FaultPlan | None = None,
        guard: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        config = LARGE if device.type == "cuda" else SMALL
        self.device, self.dtype = device, dtype
        self.model = DistributedDataParallel(GPT(config).to(device), process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self.injector = Injector(plan or FaultPlan(), rank=rank)
        self.injector.attach(self.model, self.optimizer)
        self.run_dir = Path(tempfile.mkdtemp())
        self.guard = None
        if guard is not None:
            options = {"node": f"n{rank}", "run_dir": self.run_dir, **QUIET, **guard}
            self.guard = sdcwatch.init(self.model, self.optimizer, scaler=self.scaler, **options)
        self._tokens = torch.randint(config.vocabulary, (4, config.context + 1), device=device)
        self._steps = 0

    def step(self) -> None:
        """One update."""
        self._steps += 1
        self.injector.begin_step(self._steps)
        self.optimizer.zero_grad()
        tokens = self._tokens.roll(self._steps, 1)
        with torch.autocast(self.device.type, dtype=self.dtype):
            logits = self.model(tokens[:, :-1], torch.ones_like(tokens[:, :-1], dtype=torch.float))
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def peak_mib(self) -> float:
        """The highest point of a step above what was held before it; on a CPU 0."""
        if self.device.type != "cuda":
            self.step()
            return 0.0
        synchronise(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step()
        synchronise(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / (1 << 20)

    def close(self) -> dict[str, Any]:
        """End the run; what its summary says, on the rank that writes one."""
        self.injector.detach()
        if self.guard is not None:
            self.guard.close()
        path = self.run_dir / "summary.json"
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return told


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Ask torch for operations that repeat; only then does flash attention."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def place(name: str) -> torch.device:
    """The device of every rank."""
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def audited(
    rank: int, group: Any, name: str, dtype: torch.dtype, repeatable: bool, steps: int
) -> dict[str, Any]:
    """Train with an audit at every step; the summary."""
    with deterministic(repeatable):
        loop = Loop(rank, group, place(name), dtype, guard={"audit_every": 1})
        for _ in range(steps):
            loop.step()
        return loop.close()


def wrong(rank: int, group: Any, name: str) -> dict[str, Any]:
    """Train with one rank whose first block computes wrongly; the summary."""
    fault = Fault(
        site="activation", target="blocks.0.mlp", kind="scale", factor=1.01,
        ranks=(1,), steps=(6, 6), persistence="sticky",
    )  # fmt: skip
    with deterministic(True):
        loop = Loop(
            rank, group, place(name), torch.bfloat16,
            plan=FaultPlan(faults=(fault,)), guard={"audit_every": 3},
        )  # fmt: skip
        for _ in range(8):
            loop.step()
        return loop.close()


VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain DDP": None,
    "a second plain DDP": None,
    "guarded": {"audit_every": FAR, "fingerprint_every": FAR},
    "weight check": {"audit_every": FAR, "fingerprint_every": 1},
    "audit step": {"audit_every": 1, "fingerprint_every": FAR},
}


def costs(rank: int, group: Any, name: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Seconds of a step, its ratio to plain DDP's of the same round, and its peak in MiB."""
    device = place(name)
    loops = {
        variant: Loop(rank, group, device, torch.bfloat16, guard=options)
        for variant, options in VARIANTS.items()
    }
    for _ in range(3):
        for loop in loops.values():
            loop.step()
    seconds: dict[str, list[float]] = {variant: [] for variant in loops}
    for number in range(rounds):
        turn = number % len(loops)
        for variant in [*list(loops)[turn:], *list(loops)[:turn]]:
            seconds[variant].append(timed(device, loops[variant].step))
    peaks = {variant: loop.peak_mib() for variant, loop in loops.items()}
    for loop in loops.values():
        loop.close()
    plain = seconds["plain DDP"]
    return {
        variant: (
            statistics.median(taken),
            statistics.median(a / b for a, b in zip(taken, plain, strict=True)),
            peaks[variant],
        )
        for variant, taken in seconds.items()
    }


def audit_row(what: str, summary: dict[str, Any], *, repeatable: bool) -> Row:
    """Whether every replay was exact; of a model that does not repeat, whether nobody is named."""
    said = (
        f"coverage {summary['coverage']}, {summary['comparisons']} comparisons, "
        f"{summary['mismatches']} mismatches, {len(summary['suspects'])} suspects"
    )
    exact = summary["coverage"] == "full" and summary["comparisons"] > 0
    exact = exact and summary["mismatches"] == 0
    return Row(what, said, not summary["suspects"] and (exact or not repeatable))


def shared(name: str) -> Iterator[Row]:
    """Three ranks on one device."""
    steps, rounds = (20, 20) if name == "cuda" else (3, 2)
    with contextlib.closing(GlooPool(RANKS, timeout_seconds=240.0)) as pool:
        for dtype in (torch.bfloat16, torch.float16):
            scaled = " under a GradScaler" if dtype is torch.float16 else ""
            for repeatable in (True, False) if name == "cuda" else (True,):
                mode = "deterministic" if repeatable else "as torch is"
                summary = pool.run(audited, RANKS, name, dtype, repeatable, steps)[0]
                what = f"{str(dtype)[6:]} GPT{scaled}, {mode}, replayed"
                yield audit_row(what, summary, repeatable=repeatable)
        summary = pool.run(wrong, RANKS, name)[0]
        named = [(s["rank"], s.get("operator", "")) for s in summary["suspects"]]
        good = [rank for rank, _ in named] == [1]
        yield Row("rank 1 computes wrongly", f"named: {named}", good)
        for variant, (taken, ratio, peak) in pool.run(costs, RANKS, name, rounds)[0].items():
            said = f"{taken * 1e3:.1f} ms, {ratio:.3f} x plain DDP"
            yield Row(f"step, {variant}", f"{said}, peak {peak:.0f} MiB" if peak else said)


# --- all of it ---


def rows(device: torch.device) -> Iterator[Row]:
    """Run every check, one after the other."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        for check in ALONE:
            yield check(device)
        dist.destroy_process_group()
    try:
        yield from shared(device.type)
    except RankFailed as error:
        yield Row(f"{RANKS} ranks on one device", str(error).strip().splitlines()[-1], False)


def main() -> int:
    """Run every check on one device."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    name = parser.parse_args().device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    if name == "cuda" and not torch.cuda.is_available():
        print("Expected a GPU that torch can use, but got none. Run it where there is one.")
        return 1
    device = place(name)
    print("| what | seen | |\n|---|---|---|")
    found = []
    for row in rows(device):
        print(row, flush=True)
        found.append(row.good is not False)
    on = torch.cuda.get_device_name(device) if name == "cuda" else "no GPU: the CPU"
    verdict = "every check holds" if all(found) else "A CHECK FAILED"
    print(f"\ntorch {torch.__version__}, {on}: {verdict}")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
