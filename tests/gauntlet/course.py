"""Healthy loops as people write them, each run plain, guarded, and guarded on a broken device.

A loop is a function of a `Course`: it builds its model, calls `guard`, and goes through `steps` as
a script would. What it hands to `saw` stands for what the user keeps of a step. The same function
runs without a guard, with one, and with one and a planted fault; only what `Course` does differs.

Processes of the pool load this file by its path; what crosses them are plain values.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.core.records import PreflightDone, UpdateSkipped, Verdict
from sdcwatch.errors import CorruptionDetected
from sdcwatch.faults import Fault, FaultPlan, Injector
from sdcwatch.faults.targets import bare_module
from sdcwatch.testing import MemorySink

WORLD, BROKEN = 3, 1
FAULT_FROM = 12

FULL, OUTPUTS, OFF = "full", "outputs_only", "off"


@dataclass(frozen=True)
class Loop:
    """One idiom.

    Attributes:
        name: What a table calls it.
        body: The script.
        coverage: What preflight must come to.
        because: A part of the reason that the preflight record must give, where it is not full.
        fault: The module that a broken device computes wrongly; the first Linear by default.
        left_out: Ranks that preflight finds to compute something else.
        software_on: Ranks whose software computes something else from some step on.
        trial: The kind of trial that it is a variant of; "" for none.
        software: A part of the operation by which software is told in an armed run; "" for none.
        later: The coverage after something has come that preflight could not see; "" for the same.
    """

    name: str
    body: Callable[[Course], None]
    coverage: str = FULL
    because: str = ""
    fault: str = ""
    left_out: tuple[int, ...] = ()
    software_on: tuple[int, ...] = ()
    trial: str = ""
    software: str = ""
    later: str = ""

    @property
    def covered(self) -> bool:
        """Whether audits still cover it when a device breaks: then that rank must be named."""
        return self.coverage == FULL and not self.later

    @property
    def broken(self) -> int:
        """The rank whose device breaks, one that audits cover."""
        apart = {*self.left_out, *self.software_on} if self.covered else set()
        return next(rank for rank in (BROKEN, 0) if rank not in apart)

    @property
    def ranks(self) -> int:
        """Ranks of a broken run: two that are left cannot tell which of them is wrong."""
        apart = self.covered and (self.left_out or self.software_on)
        return WORLD + 1 if apart else WORLD


LOOPS: dict[str, Loop] = {}


def loop(
    name: str,
    coverage: str = FULL,
    because: str = "",
    fault: str = "",
    left_out: tuple[int, ...] = (),
    **more: Any,
) -> Callable[[Callable[[Course], None]], Callable[[Course], None]]:
    """Enter a loop into the gauntlet."""

    def enter(body: Callable[[Course], None]) -> Callable[[Course], None]:
        assert name not in LOOPS, name
        LOOPS[name] = Loop(name, body, coverage, because, fault, left_out, **more)
        return body

    return enter


class Unguarded:
    """Stands where the guard stands in a plain run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def save_checkpoint(self, save: Callable[[], object]) -> bool:
        if self._rank == 0:
            save()
        return True

    def record_loss(self, loss: Tensor) -> None:
        pass


@dataclass
class Course:
    """One run of one loop on one rank.

    Attributes:
        rank: Of this process.
        group: All ranks.
        last: Number of steps.
        options: Of `sdcwatch.init`; None runs without a guard.
        fault: The module that is computed wrongly on rank `broken`, "" for the first Linear; None
            for a healthy machine.
        broken: That rank.
        fault_from: The first step at which it is.
    """

    rank: int
    group: Any
    last: int
    options: dict[str, Any] | None
    fault: str | None = None
    broken: int = BROKEN
    fault_from: int = FAULT_FROM
    digest: Any = field(default_factory=hashlib.sha256)
    memory: MemorySink = field(default_factory=MemorySink)
    guards: list[Any] = field(default_factory=list)
    nets: list[nn.Module] = field(default_factory=list)
    injector: Injector | None = None
    stopped: str = ""
    step: int = 0

    def ddp(self, net: nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap a model, and note that its weights are to be compared in the end."""
        self.nets.append(net)
        options = {"process_group": self.group, **options}
        return DistributedDataParallel(net, **options)

    def guard(self, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        """`sdcwatch.init`, or nothing in a plain run."""
        if self.options is None:
            return Unguarded(self.rank)
        if self.fault is not None and self.injector is None:
            self._break(model)
        options = {"sinks": [self.memory], **self.options, **options}
        options["run_dir"] = f"{options['run_dir']}/{len(self.guards)}"
        guard = sdcwatch.init(model, optimizer, **options)
        self.guards.append(guard)
        return guard

    def steps(self) -> Iterator[int]:
        """1, 2, ...: also tells the planted fault which step it is."""
        for step in range(1, self.last + 1):
            self.step = step
            if self.injector is not None:
                self.injector.begin_step(step)
            yield step

    def saw(self, *values: Any) -> None:
        """What the user keeps of a step: tensors and numbers, compared bit for bit."""
        for value in values:
            if isinstance(value, Tensor):
                flat = value.detach().contiguous().reshape(-1)
                self.digest.update(flat.view(torch.uint8).numpy().tobytes())
            else:
                self.digest.update(repr(value).encode())

    def batch(self, step: int, rows: int = 4, width: int = 8, micro: int = 0) -> Tensor:
        """This rank's inputs: float32 (rows, width)."""
        draw = torch.Generator().manual_seed(100_000 * self.rank + 100 * step + micro)
        return torch.randn(rows, width, generator=draw)

    def labels(self, step: int, rows: int = 4, classes: int = 4, micro: int = 0) -> Tensor:
        """This rank's labels: int64 (rows,)."""
        draw = torch.Generator().manual_seed(77 + 100_000 * self.rank + 100 * step + micro)
        return torch.randint(classes, (rows,), generator=draw)

    def _break(self, model: nn.Module) -> None:
        target = self.fault or next(
            n for n, m in bare_module(model).named_modules() if isinstance(m, nn.Linear)
        )
        fault = Fault(
            site="activation",
            kind="scale",
            factor=1.01,
            target=target,
            ranks=(self.broken,),
            steps=(self.fault_from, self.last),
            persistence="sticky",
        )
        self.injector = Injector(FaultPlan(faults=(fault,)), rank=self.rank)
        self.injector.attach(model)

    def run(self, body: Callable[[Course], None]) -> dict[str, Any]:
        """Run a loop, and tell what it came to."""
        torch.manual_seed(5)
        random.seed(100 + self.rank)
        np.random.seed(100 + self.rank)
        try:
            with contextlib.suppress(StopIteration):
                body(self)
        except CorruptionDetected as error:
            self.stopped = f"{type(error).__name__}: {error}"
        finally:
            for guard in self.guards:
                guard.close()
            if self.injector is not None:
                self.injector.detach()
        return self._results()

    def _results(self) -> dict[str, Any]:
        weights = hashlib.sha256()
        for net in self.nets:
            for name, tensor in net.state_dict().items():
                if isinstance(tensor, Tensor):
                    flat = tensor.detach().contiguous().reshape(-1)
                    weights.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
        records = self.memory.records
        preflights = [r for r in records if isinstance(r, PreflightDone)]
        return {
            "weights": weights.hexdigest(),
            "seen": self.digest.hexdigest(),
            "stopped": self.stopped,
            "coverage": [p.coverage.value for p in preflights],
            "reason": [p.reason for p in preflights],
            "verdicts": [r for r in records if isinstance(r, Verdict)],
            "skips": [(r.step, r.reason.value) for r in records if isinstance(r, UpdateSkipped)],
            "planted": 0 if self.injector is None else sum(p.changed for p in self.injector.log),
        }


def several(
    rank: int, group: Any, names: Sequence[str], kinds: Sequence[str], last: int, audit_every: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """`arms` of several loops, by name."""
    return {name: arms(rank, group, name, kinds, last, audit_every) for name in names}


def arms(
    rank: int,
    group: Any,
    name: str,
    kinds: Sequence[str],
    last: int,
    audit_every: int,
    fault_from: int = FAULT_FROM,
) -> dict[str, dict[str, Any]]:
    """Run one loop plain, guarded or broken, each from the same start.

    Args:
        rank: Of this process.
        group: All ranks.
        name: Of the loop.
        kinds: Among "plain", "guarded", "broken".
        last: Number of steps.
        audit_every: Steps between two audits.
        fault_from: The first step at which a device is broken.
    """
    entry = LOOPS[name]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "audit_every": audit_every,
            "fingerprint_every": 2,
            "node": f"n{rank}",
            "telemetry": "off",
            "console": False,
        }
        for kind in kinds:
            shared = [f"{folder}/{kind}"]
            dist.broadcast_object_list(shared, src=0, group=group)
            course = Course(
                rank,
                group,
                last,
                None if kind == "plain" else {**options, "run_dir": shared[0]},
                entry.fault if kind == "broken" else None,
                entry.broken,
                fault_from,
            )
            found[kind] = course.run(entry.body)
        dist.barrier(group)
    return found
