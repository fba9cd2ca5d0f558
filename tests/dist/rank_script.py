"""One rank of a small guarded run, in a process of its own, to which something happens.

`test_failures.py` runs this file with the globals `SCENARIO`, `RANK`, `WORLD`, `PORT` and
`RUN_DIR`. A scenario ends as a training script would: with what it left uncaught.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch

DEADLINE_SECONDS = 2.0
HANG_SECONDS = 2.0
STEPS = 5
VICTIM = 1
WHEN = 3  # the step at which something happens


class Rank:
    """A rank that trains."""

    def __init__(self, rank: int, world: int, port: int, run_dir: Path) -> None:
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        self.rank, self.run_dir = rank, run_dir
        self.is_victim = rank == VICTIM
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def guard(self, *, of_its_own: bool = False, **options: Any) -> sdcwatch.Guard:
        self.model = DistributedDataParallel(self.net)
        if of_its_own:
            self.net.register_buffer("extra", torch.zeros(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        dist.barrier()  # so that no deadline covers the start of a process
        return sdcwatch.init(
            self.model,
            self.optimizer,
            **{
                "audit_every": 2,
                "fingerprint_every": 2,
                "run_dir": self.run_dir,
                "node": f"n{self.rank}",
                "telemetry": "off",
                "deadline_seconds": DEADLINE_SECONDS,
                "hang_seconds": HANG_SECONDS,
                **options,
            },
        )

    def step(self, *, update: bool = True) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4) * (self.rank + 1)).square().mean().backward()
        if update:
            self.optimizer.step()

    def train(self, happens: Callable[[], None] = lambda: None, **options: Any) -> None:
        """Train, and let it happen before a step."""
        with self.guard(**options):
            for step in range(1, STEPS + 1):
                if step == WHEN:
                    self.mark()
                    happens()
                self.step()
        self.finish()

    def mark(self) -> None:
        """The clock of the test starts here."""
        if self.is_victim:
            (self.run_dir / "happened").touch()

    def finish(self) -> None:
        """Gloo needs everybody to arrive before anybody leaves."""
        dist.barrier()
        dist.destroy_process_group()


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: Rank) -> None:
    rank.train(lambda: kill_oneself() if rank.is_victim else None)


def host_killed(rank: Rank) -> None:
    rank.train(lambda: kill_oneself() if rank.rank == 0 else rank.mark())


def stalled(rank: Rank) -> None:
    """Longer than anybody waits, and then it goes on: nothing has broken."""
    seconds = HANG_SECONDS + DEADLINE_SECONDS + 3.0
    rank.train(lambda: time.sleep(seconds) if rank.is_victim else None)


def stopped_and_others_leave(rank: Rank) -> None:
    """No thread of it runs any more: a machine that hangs."""

    def stop() -> None:
        if rank.is_victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    rank.train(stop, on_hang="exit")


def left_the_loop(rank: Rank) -> None:
    """Fewer batches on one rank: it closes its guard and goes on to something else."""
    with rank.guard(on_hang="exit"):
        for step in range(1, STEPS + 1):
            if step == WHEN and rank.is_victim:
                break
            rank.step()
    rank.mark()
    time.sleep(60)


def left_the_process(rank: Rank) -> None:
    """Fewer batches on one rank: its script ends."""
    with rank.guard():
        for step in range(1, STEPS + 1):
            if step == WHEN and rank.is_victim:
                break
            rank.step()
    rank.mark()


def raised(rank: Rank) -> None:
    def fail() -> None:
        if rank.is_victim:
            msg = "a label is out of range"
            raise ValueError(msg)

    rank.train(fail)


def never_started(rank: Rank) -> None:
    if not rank.is_victim:
        rank.train()
    DistributedDataParallel(rank.net)
    dist.barrier()
    rank.mark()
    time.sleep(60)


def resumed_elsewhere(rank: Rank) -> None:
    """One rank resumed from another checkpoint."""
    rank.mark()
    rank.train(start_step=7 if rank.is_victim else 0)


def saved_instead_of_updated(rank: Rank) -> None:
    """Two operations of the guard meet, at the same step."""
    with rank.guard() as guard:
        rank.step()
        rank.step(update=not rank.is_victim)
        guard.save_checkpoint(lambda: None)


def other_buffers(rank: Rank) -> None:
    """DDP has compared what it reduces before; what comes later, nobody compares."""
    rank.mark()
    rank.train(of_its_own=rank.is_victim, buffers=True)


def corrupted(rank: Rank) -> None:
    def corrupt() -> None:
        if rank.is_victim:
            rank.net[0].weight.data[0, 0] += 1.0

    rank.train(corrupt)


if __name__ == "rank":
    given = globals()
    os.dup2(os.open(f"{given['RUN_DIR']}/stderr-{given['RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    me = Rank(given["RANK"], given["WORLD"], given["PORT"], Path(given["RUN_DIR"]))
    given[given["SCENARIO"]](me)
