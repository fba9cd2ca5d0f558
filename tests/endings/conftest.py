"""One process with torch imported, from which the ranks of every test here are forked."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Record, RunFinished
from sdcwatch.sinks.jsonl import read_records
from sdcwatch.testing import free_port

from .hosts import Hosts

HERE = Path(__file__).parent
WORLD = 3
DEADLINE_SECONDS = 3.0
MARGIN_SECONDS = 10.0
"""Every process ends within deadline + this on a machine of its own."""
SLACK = 5
"""Times that, on a machine that others use too: what is tested is that nothing hangs."""


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        codes: Exit code of each rank; None for one that had to be killed.
        stderr: What each rank wrote there.
        run_dir: Its directory.
        records: Those of the leader's event log.
        seconds: For each rank, from when it happened until its process was gone.
    """

    codes: list[int | None]
    stderr: list[str]
    run_dir: Path
    records: list[Record]
    seconds: list[float]

    def of(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.records if isinstance(r, kind)]

    @property
    def finish(self) -> RunFinished:
        (record,) = self.of(RunFinished)
        return record  # type: ignore[no-any-return]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())  # type: ignore[no-any-return]

    def last_line(self, rank: int = 0) -> str:
        lines = [x for x in self.stderr[rank].splitlines() if x.startswith("sdcwatch: ")]
        return lines[-1].removeprefix("sdcwatch: ") if lines else ""


@dataclass
class Play:
    """Ranks that run."""

    nursery: Nursery
    run_dir: Path
    names: list[str]
    pids: list[int] = field(default_factory=list)

    def kill(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait_for_files(self, pattern: str, number: int, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while len(list(self.run_dir.glob(pattern))) < number:
            assert time.monotonic() < end, f"{pattern} did not appear"
            time.sleep(0.02)

    def end(self, seconds: float = 100.0, *, kill_after: tuple[int, ...] = ()) -> Ended:
        """Wait until every rank has ended; those in `kill_after` are killed after the others."""
        codes: list[int | None] = [None] * len(self.names)
        times = [0.0] * len(self.names)
        deadline = time.monotonic() + seconds
        for rank, name in enumerate(self.names):
            if rank in kill_after:
                continue
            got = self.nursery.ended(name, deadline - time.monotonic())
            if got is not None:
                codes[rank], times[rank] = got
        for rank, pid in enumerate(self.pids):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                self.nursery.ended(self.names[rank], 10.0)
        happened = self.run_dir / "happened"
        since = happened.stat().st_mtime if happened.exists() else 0.0
        log = self.run_dir / "events.jsonl"
        return Ended(
            codes,
            [(self.run_dir / f"stderr-{r}").read_text() for r in range(len(self.names))],
            self.run_dir,
            read_records(self.run_dir) if log.is_file() else [],
            [t - since if since and t else 0.0 for t in times],
        )


class Nursery:
    """The process from which ranks are forked."""

    def __init__(self) -> None:
        path = os.pathsep.join(sys.path)
        self._folder = tempfile.TemporaryDirectory()
        self.socket = f"{self._folder.name}/nursery"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "NURSERY": self.socket,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._said: dict[str, queue.Queue[dict[str, Any]]] = {"": queue.Queue()}
        self._count = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        ready = self._said[""].get(timeout=600)
        assert ready == {"ready": 1}, "a process with threads must not be forked"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self._said[message.get("id", "")].put(message)

    def play(
        self, scenario: str, run_dir: Path, *, how: str = "with", world: int = WORLD, **more: str
    ) -> Play:
        self._count += 1
        port = free_port()
        play = Play(self, run_dir, [f"{self._count}/{rank}" for rank in range(world)])
        for rank, name in enumerate(play.names):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RUN_DIR": str(run_dir),
                "STDERR": str(run_dir / f"stderr-{rank}"),
                "HOW": how,
                "DEADLINE": str(DEADLINE_SECONDS),
                **more,
            }
            self._ask(name, "scenarios", scenario, environment)
        play.pids = [self._said[name].get(timeout=60)["pid"] for name in play.names]
        return play

    def launch(self, scenario: str, run_dir: Path, *, port: int) -> tuple[str, int]:
        """Start torchrun with ranks of `launched.py`; the name of the job and its process."""
        self._count += 1
        name = f"{self._count}"
        arguments = f"--nnodes 1 --nproc-per-node {WORLD} --master-addr 127.0.0.1 "
        arguments += f"--master-port {free_port()} --no-python "
        arguments += f"{sys.executable} -S {HERE / 'stub.py'} launched {scenario}"
        environment = {
            "RUN_DIR": str(run_dir),
            "STDERR": str(run_dir / "launcher"),
            "PORT": str(port),
            "DEADLINE": "10",
            "DUMP_AFTER": "250",
            "WANDB_X_SERVICE_WAIT": "150",
        }
        self._ask(name, "torchrun", arguments, environment)
        return name, self._said[name].get(timeout=60)["pid"]

    def _ask(self, name: str, module: str, scenario: str, environment: dict[str, str]) -> None:
        assert self._process.stdin is not None
        self._said[name] = queue.Queue()
        job = {"id": name, "module": module, "scenario": scenario, "environment": environment}
        self._process.stdin.write((json.dumps(job) + "\n").encode())
        self._process.stdin.flush()

    def ended(self, name: str, seconds: float) -> tuple[int, float] | None:
        try:
            message = self._said[name].get(timeout=max(0.1, seconds))
        except queue.Empty:
            return None
        return int(message["status"]), float(message["time"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._listener.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Skips only where namespaces cannot be made."""
    made = Hosts(f"sdcwatch-{os.getpid()}-")
    try:
        try:
            made.make()
        except OSError as error:  # not root, no iproute2, or a kernel or container without them
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.remove()
