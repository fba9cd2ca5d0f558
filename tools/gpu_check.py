"""Checks on a GPU what was written for one and never run on one: reads, waits, and equal bits.

    python tools/gpu_check.py [--device cuda]

One process, one GPU, a minute. It says what it saw, line by line, and ends with code 1 if a check
fails. With ``--device cpu`` the same code runs without a GPU: that shows that the script works, and
nothing about a GPU. One process cannot show what several GPUs do: the ring of check 2, and how NCCL
behaves when a rank is gone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.checks.fingerprint import digest_tensors
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.waits import DeviceResult, HostBuffer, unfinished

STEPS = 5
Check = Callable[[torch.device], tuple[bool, str]]


class Attention(torch.nn.Module):
    """One block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.split(inputs).unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(-3, -2)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return self.join(mixed.transpose(-3, -2).flatten(-2))


def fingerprints(device: torch.device) -> tuple[bool, str]:
    """The fingerprint of the same bits is the same on the device and on the host."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    tensors = [torch.randn(n).to(kind) for kind in kinds for n in (1, 700, 9000, 600_000)]
    there = digest_tensors([t.to(device) for t in tensors]).cpu()
    same = torch.equal(there, digest_tensors(tensors))
    return same, f"fingerprints of {len(tensors)} tensors against the host: equal is {same}"


def repeats(device: torch.device) -> tuple[bool, str]:
    """A bf16 backward with attention gives the same bits again."""
    torch.manual_seed(0)
    net, inputs = Attention().to(device), torch.randn(8, 128, 64, device=device)

    def gradients() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = net(inputs).float().square().mean()
        return digest_tensors(torch.autograd.grad(loss, list(net.parameters())))

    first = gradients()
    differing = sum(not torch.equal(first, gradients()) for _ in range(20))
    return differing == 0, f"bf16 backward repeated 20 times: {differing} differ"


def waits(device: torch.device) -> tuple[bool, str]:
    """The host waits for the device only as long as it wants to, and reads what was agreed."""
    exchange = GlooExchange(device=device)
    words = torch.tensor([7, -7], device=device)
    own = torch.tensor([1.5, float("inf")], device=device)
    read = exchange.max_and_read(words, own, "a check")
    good = read == ((7, -7), [1.5, float("inf")])
    said = f"all-reduce on {dist.get_backend()}: read {read}"
    if device.type != "cuda":
        return good, f"{said}; the wait for a busy device needs one"
    torch.cuda._sleep(2_000_000_000)  # about a second of the device
    work = dist.all_reduce(words, op=dist.ReduceOp.MAX, async_op=True)
    result = DeviceResult(work, lambda: words, HostBuffer(device), blocks=False)
    early, late = unfinished(result, 0.05), unfinished(result, 60.0)
    good = good and early == "" and late is None and result.values() == [7, -7]
    return good, f"{said}; busy device: {early!r} after 50 ms, then {late!r}"


def reads(device: torch.device) -> tuple[bool, str]:
    """A plain guarded step copies to the host once; without a guard it does not."""
    seen = [_copies(device, guarded=guarded) / STEPS for guarded in (False, True)]
    said = f"copies to the host a plain step: {seen[0]:g} without a guard, {seen[1]:g} with one"
    if device.type != "cuda":
        return True, f"{said} (a CPU has none: tests/dist/test_device_reads.py counts there)"
    return seen[1] - seen[0] == 1, said


def _copies(device: torch.device, *, guarded: bool) -> int:
    torch.manual_seed(0)
    net = Attention().to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard = (
        sdcwatch.init(
            model, optimizer, run_dir=tempfile.mkdtemp(), telemetry="off", console=False,
            audit_every=10**6, fingerprint_every=10**6,
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


CHECKS: tuple[Check, ...] = (fingerprints, repeats, waits, reads)


def results(device: torch.device) -> Iterator[bool]:
    """Run every check and say what was seen."""
    for check in CHECKS:
        good, said = check(device)
        print(f"{'ok  ' if good else 'FAIL'} {check.__name__}: {said}", flush=True)
        yield good


def main() -> int:
    """Run every check on one device."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device, 0)
    if device.type == "cpu":
        device = torch.device("cpu")
    elif not torch.cuda.is_available():
        print("Expected a GPU that torch can use, but got none. Run it where there is one.")
        return 1
    else:
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        good = all(list(results(device)))
        dist.destroy_process_group()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: the CPU"
    print(f"torch {torch.__version__}, {name}: {'every check holds' if good else 'A CHECK FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
