"""The test kit: an exchange between threads, one pool of gloo processes, and a sink that keeps all.

`ThreadExchange` runs the protocol of an audit in milliseconds, without a process group. `GlooPool`
starts its processes once; functions then run on sub-groups of it with real collectives.

    pool = GlooPool(6)
    results = pool.run(body, 3, "argument")    # body(rank, group, "argument") on ranks 0, 1 and 2
    pool.close()

`body` must be a function at the top of a file: the processes load that file by its path.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from sdcwatch.core.records import Record
from sdcwatch.core.waiting import Stage
from sdcwatch.guard import exchange as _exchange

T = TypeVar("T")
START_SECONDS = 120.0


class MemorySink:
    """A sink that keeps every record, for ``sdcwatch.init(..., sinks=[sink])``.

    Attributes:
        records: In the order in which they came.
    """

    name = "memory"

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)

    def close(self, timeout_seconds: float) -> None:
        """Nothing to give back."""


class ThreadHub:
    """Where the threads of one `ThreadExchange` group meet.

    Args:
        world_size: Number of threads.
        timeout_seconds: How long a thread waits for the others.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 10.0) -> None:
        self.world_size = world_size
        self.slots: list[Any] = [None] * world_size
        self.notes: dict[int, str] = {}
        self.joined = False
        self._barrier = threading.Barrier(world_size, timeout=timeout_seconds)

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Put a value down and return those of all ranks."""
        self.slots[rank] = value
        self._barrier.wait()
        values = list(self.slots)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        """Wake every thread that waits, because one has failed."""
        self._barrier.abort()


class ThreadExchange:
    """An `sdcwatch.guard.exchange.Exchange` between threads of one process.

    Args:
        hub: Shared by all ranks.
        rank: This thread's rank.
    """

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self.rank, self.world_size = rank, hub.world_size
        self.calls: list[str] = []

    def max_int64s(
        self,
        words: Sequence[int],
        operation: str,
        *,
        extra_seconds: float = 0.0,
    ) -> tuple[int, ...]:
        """Element-wise maximum."""
        self.calls.append("max_int64s")
        rows = self._hub.meet(self.rank, tuple(words))
        return tuple(max(column) for column in zip(*rows, strict=True))

    def max_and_read(
        self, words: torch.Tensor, own: torch.Tensor, operation: str
    ) -> tuple[tuple[int, ...], list[float]]:
        """Element-wise maximum, and this rank's own values."""
        return self.max_int64s(words.tolist(), operation), own.tolist()

    def gather(self, message: bytes, operation: str, *, extra_seconds: float = 0.0) -> list[bytes]:
        """Every rank's message."""
        self.calls.append("gather")
        return self._hub.meet(self.rank, message)

    def route(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Sequence[int], operation: str
    ) -> dict[int, torch.Tensor]:
        """Point-to-point byte tensors; a message that nobody expects is an error."""
        self.calls.append("route")
        rows = self._hub.meet(self.rank, (dict(outgoing), tuple(incoming)))
        for sender, (sent, _) in enumerate(rows):
            for receiver in sent:
                assert sender in rows[receiver][1], f"rank {receiver} expects nothing from {sender}"
        return {r: rows[r][0][self.rank].clone() for r in incoming}

    def mark_joined(self) -> None:
        """Say that this rank has run out of inputs."""
        self._hub.joined = True

    def anyone_joined(self) -> bool:
        """Whether a rank has run out of inputs."""
        return self._hub.joined

    def all_joined(self) -> None:
        """Every rank has run out of inputs."""
        self._hub.joined = False

    def move(self, step: int, stage: Stage, doing: str) -> None:
        """Nothing asks for it."""

    def leave(self, note: str, *, followed: bool = False, unmet: Sequence[int] = ()) -> None:
        """Leave a note on the hub."""
        self._hub.notes[self.rank] = note

    def close(self) -> None:
        """Nothing to give back."""


def run_threads(world_size: int, body: Callable[[ThreadExchange], T]) -> list[T]:
    """Run `body` on one thread per rank and return the results in rank order.

    Raises:
        BaseException: The first exception of a rank.
    """
    hub = ThreadHub(world_size)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadExchange(hub, rank))
        except BaseException as error:
            errors.append((rank, error))
            hub.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next(
            (e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)), errors[0]
        )
        raise first[1]
    return results


_PRELOADED = ("sdcwatch.testing", "sdcwatch.guard.api", "torch._dynamo")
_SERVERS: dict[tuple[str, ...], forkserver.ForkServer] = {}


def fork_server() -> ForkServerContext:
    """A context whose fork server imports torch once for all processes.

    The compiler too, because DDP and optimizers import it: seconds in each process otherwise.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@contextlib.contextmanager
def _server_of(preload: tuple[str, ...]) -> Iterator[None]:
    """Processes that start here come from a server that has imported these modules too.

    The one of the whole program keeps what it began with, and a pool may have started it before.
    """
    if not preload:
        yield
        return
    if preload not in _SERVERS:
        _SERVERS[preload] = forkserver.ForkServer()
        _SERVERS[preload].set_forkserver_preload([*_PRELOADED, *preload])
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _SERVERS[preload].connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


class RankFailed(AssertionError):
    """A function raised on a rank of the pool; the message is that rank's traceback."""


_FIRST_PORT = 10240
_ANY_PORT = random.SystemRandom()  # tests seed the usual one


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago, and that nobody gets by chance.

    Not one that the system gives out by itself: connections that other processes open meanwhile
    would take it before it is listened on.

    Raises:
        OSError: None was found.
    """
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given_out.read_text().split()[0]) if given_out.is_file() else 32768
    for _ in range(1000):
        # Where the system gives out all that an ordinary user may have, one of those has to do.
        port = _ANY_PORT.randrange(_FIRST_PORT, lowest) if lowest > 2 * _FIRST_PORT else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    msg = f"Expected a free port below {lowest}, but got none in 1000 tries. End what listens."
    raise OSError(msg)


MAX_THREADS = 45
"""A process of the pool with more is done with: a thread of each gloo group that a failed guard has
left behind wakes a hundred times a second."""


class GlooPool:
    """Processes with a gloo group over all of them.

    Args:
        world_size: Number of processes.
        timeout_seconds: How long a function may run before the pool is killed.
        preload: Modules that are imported once for all processes.
    """

    def __init__(
        self, world_size: int, timeout_seconds: float = 50.0, *, preload: Sequence[str] = ()
    ) -> None:
        self.world_size, self._timeout = world_size, timeout_seconds
        self._preload = tuple(preload)
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, body: Callable[..., T], ranks: int, *arguments: Any) -> list[T]:
        """Run ``body(rank, group, *arguments)`` on the first `ranks` processes.

        Returns:
            What each rank returned, in rank order; it must pickle.

        Raises:
            RankFailed: `body` raised on a rank, or did not return in time. The pool starts anew.
        """
        self.start()
        path = sys.modules[body.__module__].__file__
        job = (os.path.abspath(str(path)), body.__qualname__, ranks, arguments)
        try:
            return self._results(job, ranks)
        except BaseException:  # a timeout of the test too: what still comes belongs to no other run
            self.close(kill=True)
            raise

    def _results(self, job: tuple[Any, ...], ranks: int) -> list[Any]:
        for _, connection in self._workers[:ranks]:
            connection.send(job)
        results: list[Any] = []
        problems: list[str] = []
        most = 0
        for rank, (process, connection) in enumerate(self._workers[:ranks]):
            if not connection.poll(self._timeout if not problems else 5.0):
                problems.append(f"rank {rank} did not return; alive: {process.is_alive()}")
                continue
            try:
                ok, value, threads = connection.recv()
            except EOFError:
                ok, value, threads = False, f"the process ended with {process.exitcode}", 0
            most = max(most, threads)
            results.append(value)
            if not ok:
                problems.append(f"rank {rank}:\n{value}")
        if problems:
            raise RankFailed("\n".join(problems))
        if most > MAX_THREADS:
            self.close()
        return results

    def close(self, *, kill: bool = False) -> None:
        """End the processes."""
        for process, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
            if kill:
                process.kill()
        for process, connection in self._workers:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
            connection.close()
        self._workers.clear()

    def start(self) -> None:
        """Start the processes, where none run; `run` does it too.

        Raises:
            RankFailed: One did not start in time.
        """
        if self._workers:
            return
        context = fork_server()
        port = free_port()
        with _server_of(self._preload):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, self.world_size, port), daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        for rank, (_, connection) in enumerate(self._workers):
            if not connection.poll(START_SECONDS):
                self.close(kill=True)
                msg = f"rank {rank} of the pool did not start within {START_SECONDS} s"
                raise RankFailed(msg)
            connection.recv()


def _serve(connection: Connection, rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    # What was imported before the fork stays shared: a collection would go through all of it, and
    # copy its pages, in every process.
    gc.freeze()
    group = _exchange.join_world(
        rank, world_size, f"tcp://127.0.0.1:{port}", timedelta(seconds=120)
    )
    connection.send("ready")
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            job = connection.recv()
        except EOFError:
            break
        if job is None:
            break
        path, name, ranks, arguments = job
        try:
            body = _load(modules, path, name)
            result = (True, body(rank, group(ranks), *arguments))
        except BaseException:
            result = (False, traceback.format_exc())
        connection.send((*result, _threads()))
        del result
        gc.collect()  # guards and their gloo groups are cycles
    _exchange.leave_world()


def _threads() -> int:
    """Threads of this process that the kernel knows; 0 where it does not say."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 0


def load_file(path: str | os.PathLike[str], name: str) -> ModuleType:
    """Run a Python file that is part of no package, as a module of this name.

    Raises:
        ImportError: There is no such Python file.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"Expected the path of a Python file, but got {str(path)!r}. Pass one that exists."
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load(modules: dict[str, ModuleType], path: str, name: str) -> Callable[..., Any]:
    if path not in modules:
        # The same name in every process, whatever each has run before: ranks unpickle by it.
        name_of = f"_pool_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
        modules[path] = load_file(path, name_of)
    body: Any = modules[path]
    for part in name.split("."):
        body = getattr(body, part)
    found: Callable[..., Any] = body
    return found
