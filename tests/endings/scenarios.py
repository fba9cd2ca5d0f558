"""The loops that end in one way or another. Run in a process of its own per rank.

The environment says who this is: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as for torchrun,
RUN_DIR, and HOW: "with", "close" or "neither".
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdcwatch

STEPS = 8
WHEN = 4  # the step before which something happens
VICTIM = 1


class Rank:
    """One rank of a small guarded run."""

    def __init__(self) -> None:
        environment = os.environ
        self.rank = int(environment["RANK"])
        self.run_dir = Path(environment["RUN_DIR"])
        self.how = environment.get("HOW", "with")
        self.deadline = float(environment.get("DEADLINE", "3"))
        torch.manual_seed(0)
        dist.init_process_group("gloo")
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.nan = False

    @property
    def is_victim(self) -> bool:
        return self.rank == VICTIM

    def guard(self, **options: Any) -> sdcwatch.Guard:
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
                "deadline_seconds": self.deadline,
                **options,
            },
        )

    def step(self, guard: sdcwatch.Guard) -> None:
        batch = torch.ones(2, 4) * (self.rank + 1)
        if self.nan:
            batch[0, 0] = float("nan")
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def loop(
        self,
        guard: sdcwatch.Guard,
        happens: Callable[[sdcwatch.Guard], None],
        steps: int = STEPS,
    ) -> None:
        for step in range(1, steps + 1):
            if step == WHEN:
                if self.is_victim:
                    (self.run_dir / "happened").touch()
                happens(guard)
            self.step(guard)

    def train(
        self,
        happens: Callable[[sdcwatch.Guard], None] = lambda guard: None,
        *,
        steps: int = STEPS,
        **options: Any,
    ) -> None:
        """Train, and let it happen before a step."""
        guard = self.guard(**options)
        if self.how == "with":
            with guard:
                self.loop(guard, happens, steps)
        else:
            self.loop(guard, happens, steps)
            if self.how == "close":
                guard.close()
        dist.barrier()
        dist.destroy_process_group()


def finished(me: Rank) -> None:
    me.train()


def finding(me: Rank) -> None:
    """A weight of one rank changes between two steps: check 3 stops the run."""

    def corrupt(guard: sdcwatch.Guard) -> None:
        if me.is_victim:
            me.model.module[0].weight.data[0, 0] += 1.0

    me.train(corrupt)


def software_finding(me: Rank) -> None:
    """Data that is not a number, step after step: no device is at fault."""

    def poison(guard: sdcwatch.Guard) -> None:
        me.nan = me.is_victim

    me.train(poison, max_consecutive_skips=1)


def rank_killed(me: Rank) -> None:
    me.train(lambda guard: os.kill(os.getpid(), signal.SIGKILL) if me.is_victim else None)


def alive_and_late(me: Rank) -> None:
    """A long evaluation on one rank before a save: longer than anybody waits."""

    def save(guard: sdcwatch.Guard) -> None:
        if me.is_victim:
            time.sleep(120)
        guard.save_checkpoint(lambda: None)

    me.train(save, late_seconds=2 * me.deadline)


def late_and_waited_for(me: Rank) -> None:
    """The same, and it comes back in time."""

    def save(guard: sdcwatch.Guard) -> None:
        if me.is_victim:
            time.sleep(2.5 * me.deadline)
        guard.save_checkpoint(lambda: None)

    me.train(save)


def only_rank_0_saves(me: Rank) -> None:
    me.train(lambda guard: guard.save_checkpoint(lambda: None) if me.rank == 0 else None)


def only_rank_0_saves_with_buffers(me: Rank) -> None:
    """The others wait in the next forward, for the buffers of rank 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    me.model = DistributedDataParallel(net)
    me.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    only_rank_0_saves(me)


def exception(me: Rank) -> None:
    def fail(guard: sdcwatch.Guard) -> None:
        if me.is_victim:
            msg = "a label is out of range"
            raise ValueError(msg)

    me.train(fail)


def exits(me: Rank) -> None:
    """A script that ends with a code of its own."""
    me.train(lambda guard: sys.exit(3))


def closes_at_exit(me: Rank) -> None:
    """The guard is closed by a handler of the program's, and that after an exception."""
    guard = me.guard()
    atexit.register(guard.close)
    me.loop(guard, lambda guard: _fail())


def _slowly(me: Rank) -> None:
    def wait(guard: sdcwatch.Guard) -> None:
        (me.run_dir / f"steady-{me.rank}").touch()
        for _ in range(100_000):
            me.step(guard)
            time.sleep(0.01)

    me.train(wait)


def sigterm(me: Rank) -> None:
    """The test sends the signal, to every rank."""
    _slowly(me)


def sigint(me: Rank) -> None:
    _slowly(me)


def sleeps(me: Rank) -> None:
    """No rank computes when the signal comes, and there is something to be cleaned up."""

    def sleep(guard: sdcwatch.Guard) -> None:
        (me.run_dir / f"steady-{me.rank}").touch()
        try:
            time.sleep(100)
        finally:
            (me.run_dir / "cleaned").touch()

    me.train(sleep)


def trains_in_a_thread(me: Rank) -> None:
    """The main thread only waits, and is told to end."""
    guard = me.guard()
    training = threading.Thread(target=me.loop, args=(guard, lambda _: None, 100_000))
    training.start()
    with guard:
        while guard.step < STEPS:
            time.sleep(0.01)
        (me.run_dir / f"steady-{me.rank}").touch()
        training.join()


def in_an_event_loop(me: Rank) -> None:
    """An event loop that waits for another signal takes the descriptor that signals are told by."""

    async def main() -> None:
        with me.guard() as guard:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print)
            (me.run_dir / f"steady-{me.rank}").touch()
            while True:
                me.step(guard)
                await asyncio.sleep(0.01)

    asyncio.run(main())


def own_handler(me: Rank) -> None:
    """The program handles SIGTERM itself, and stops at the end of a step."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _until_asked(me, me.guard(), asked)


def later_handler(me: Rank) -> None:
    """The same, set after the guard was made."""
    asked: list[int] = []
    guard = me.guard()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _until_asked(me, guard, asked)


def chained_handler(me: Rank) -> None:
    """A handler that was set later calls the one that it found."""
    guard = me.guard()
    found = signal.getsignal(signal.SIGTERM)
    assert callable(found)

    def handle(number: int, frame: FrameType | None) -> None:
        (me.run_dir / f"handled-{me.rank}").touch()
        found(number, frame)

    signal.signal(signal.SIGTERM, handle)
    with guard:
        (me.run_dir / f"steady-{me.rank}").touch()
        while True:
            me.step(guard)
            time.sleep(0.01)


def _until_asked(me: Rank, guard: sdcwatch.Guard, asked: list[int]) -> None:
    with guard:
        (me.run_dir / f"steady-{me.rank}").touch()
        while True:
            me.step(guard)
            time.sleep(0.01)
            told = torch.tensor([len(asked)])
            dist.all_reduce(told)
            if told.item() == dist.get_world_size():
                break
    dist.barrier()
    dist.destroy_process_group()


def _stderr_through_a_pipe() -> None:
    """A launcher's: what a rank says there does not depend on what its disk takes."""
    file = os.dup(2)
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    atexit.register(reader.wait)  # first registered, last to run
    atexit.register(os.dup2, file, 2)


def forks_helpers(me: Rank) -> None:
    """Helpers that the program forks leave as a script does, through atexit, or in an exception.

    But for the last step: destructors of torch's gloo groups wait for threads that a fork lacks.
    """
    program = os.getpid()

    def fork(guard: sdcwatch.Guard) -> None:
        for leave in (sys.exit, _fail):
            helper = os.fork()
            if helper == 0:
                leave()
            os.waitpid(helper, 0)

    try:
        me.train(fork)
    finally:
        if os.getpid() != program:
            atexit._run_exitfuncs()
            os._exit(0)


def _fail() -> None:
    msg = "a helper failed"
    raise OSError(msg)


def full_disk(me: Rank) -> None:
    """No file may grow any further, as on a disk that is full."""
    _stderr_through_a_pipe()

    def fill(guard: sdcwatch.Guard) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    me.train(fill)


def stalled_file(me: Rank) -> None:
    """From now on nothing in the run directory that the event log is written to answers."""

    def stall(guard: sdcwatch.Guard) -> None:
        log = me.run_dir / "events.jsonl"
        if me.rank == 0:
            log.rename(me.run_dir / "events.jsonl.1")
            os.mkfifo(log)  # to be opened for writing it waits for a reader, which never comes

    me.train(stall)


def store_gone(me: Rank) -> None:
    """Rank 0 hosts the store, and is killed."""
    me.train(lambda guard: os.kill(os.getpid(), signal.SIGKILL) if me.rank == 0 else None)


def busy_and_killed(me: Rank) -> None:
    """The test makes one rank busy for a while, and kills another, each at some moment."""

    def busy(number: int, frame: FrameType | None) -> None:
        (me.run_dir / f"busy-{me.rank}").touch()
        end = time.monotonic() + float(os.environ["BUSY"])
        while time.monotonic() < end:
            sum(range(10_000))

    signal.signal(signal.SIGUSR1, busy)
    with me.guard() as guard:
        (me.run_dir / f"steady-{me.rank}").touch()
        for step in range(100_000):
            me.step(guard)
            if step % 3 == 0:
                guard.save_checkpoint(lambda: None)
            time.sleep(0.02)


def partition(me: Rank) -> None:
    """The test cuts a host off from the others, which then meet in a save."""

    def save(guard: sdcwatch.Guard) -> None:
        (me.run_dir / f"steady-{me.rank}").touch()
        while not (me.run_dir / "cut").exists():
            time.sleep(0.02)
        guard.save_checkpoint(lambda: None)

    me.train(save)


def save_raises(me: Rank) -> None:
    """What `save` raises is no Exception, as in torch.distributed.checkpoint."""

    class CheckpointError(BaseException):
        pass

    def save() -> None:
        raise CheckpointError("the disk is full")

    me.train(lambda guard: guard.save_checkpoint(save))


def second_init(me: Rank) -> None:
    """The first init is refused on every rank; the second one works."""
    try:
        me.guard(audit_every=2 + me.rank)
    except sdcwatch.ConfigurationError:
        me.train()
    else:
        sys.exit("the first init was not refused")


def play(name: str) -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER", "45")))
    me = Rank()
    globals()[name](me)


if __name__ == "__main__":
    with open(f"{os.environ['RUN_DIR']}/stderr-{os.environ['RANK']}", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    play(sys.argv[1])
