"""A store and a gloo group between the threads of one process, which count what each rank sends.

The exchange on top of them is the real one: soft deadlines, liveness checks, what a wait means.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.group import meet_in_store
from sdcwatch.guard.waits import Waiting, issued
from sdcwatch.guard.watchdog import Answering, LivenessCheck

LIGHT: dict[str, Callable[..., object]] = {
    "pack_or_nothing": lambda m: torch.tensor([int(m.signatures)], dtype=torch.int32).view(
        torch.uint8
    ),
    "unpack_or_error": lambda payload, device: MicroBatch(
        signatures=str(int(payload.view(torch.int32)))
    ),
    "frame_table": lambda table: table.view(torch.uint8).flatten(),
    "unframe_table": lambda data: data.view(torch.int64).reshape(-1, 2),
    "result_table": lambda outputs, gradients: torch.cat([outputs, gradients]),
    "value_of": lambda table: str(table.tolist()),
}
"""Functions of `sdcwatch.guard.replay` without frames and digests: the audits of a micro-batch that
is only a number in `signatures` then cost little, and are decided as they are with them."""


class MemoryStore:
    """What a store of torch.distributed does. A waiter wakes for its own key only."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._set: dict[str, threading.Event] = defaultdict(threading.Event)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value.encode()
            self._set[key].set()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            self._set[key].set()
            return value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        with self._lock:
            self._set.pop(key, None)
            return self.values.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        for key in keys:
            with self._lock:
                event = self._set[key]
            if not event.wait(min(timeout.total_seconds(), 300.0)):
                msg = f"wait timeout for {key}"
                raise RuntimeError(msg)

    def has_extended_api(self) -> bool:
        return True


class Client:
    """One rank's way to the store. Counts its requests; a killed rank makes none."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.requests = 0
        self.killed = False
        self._clones: list[Client] = []

    def clone(self) -> Client:
        """Another, for another thread of this rank."""
        self._clones.append(Client(self._store))
        return self._clones[-1]

    def kill(self) -> None:
        """No request of this rank is answered any more."""
        for client in (self, *self._clones):
            client.killed = True

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "has_extended_api"
        method = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            answer = method(*arguments)
            if self.killed:
                msg = "killed"
                raise RuntimeError(msg)
            return answer

        return ask


class Traffic:
    """What one rank has sent.

    Attributes:
        operations: Kind of each, in order: "max", "gather" or "send".
        held: Bytes of the largest collective, as a rank holds it at once.
        sent: Bytes of the largest message to one rank.
        peers: Ranks that it has exchanged messages with.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.held = self.sent = 0
        self.peers: set[int] = set()


class _Work:
    """An operation under way."""

    def __init__(
        self, hub: Hub, done: threading.Event, finish: Callable[[], object] = lambda: None
    ) -> None:
        self._hub, self._done, self._finish = hub, done, finish

    def wait(self, timeout: timedelta = timedelta(minutes=5)) -> None:
        if not self._done.wait(timeout.total_seconds()):
            msg = "timed out"
            raise RuntimeError(msg)
        with self._hub.turn:
            self._finish()


class _All:
    """Several operations. Waits here harm no connection: no thread is needed for them."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)


class _Meeting:
    """One collective: what each rank has brought."""

    def __init__(self) -> None:
        self.brought: dict[int, Any] = {}
        self.result: Any = None
        self.done = threading.Event()


class Hub:
    """What the groups of all ranks share.

    Attributes:
        turn: Held by the thread that computes: hundreds that compete for the interpreter at each
            operation of torch take ten times as long.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.turn = threading.Lock()
        self.lock = threading.Lock()
        self.meetings: dict[int, _Meeting] = defaultdict(_Meeting)
        self.mail: dict[tuple[int, int, int], _Meeting] = defaultdict(_Meeting)


class MemoryGroup:
    """One rank's gloo group: operations are matched by the order in which each rank issues them."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._collectives = 0
        self._posted: dict[tuple[str, int], int] = defaultdict(int)
        self.traffic = Traffic()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        self._count("max", tensor.nbytes)

        def largest(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(rows).amax(dim=0)

        meeting = self._join(tensor.clone(), largest)
        return _Work(self._hub, meeting.done, lambda: tensor.copy_(meeting.result))

    def gather(self, message: bytes) -> tuple[_Work, Callable[[], list[bytes]]]:
        """Every rank's message, as it is: W ranks that copy W rows each would take minutes."""
        self._count("gather", len(message) * self._hub.world_size)
        meeting = self._join(message, list)
        return _Work(self._hub, meeting.done), lambda: meeting.result

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        (tensor,) = tensors
        traffic = self.traffic
        traffic.operations.append("send")
        traffic.sent = max(traffic.sent, tensor.nbytes)
        traffic.peers.add(to)
        letter = self._letter("to", self._rank, to)
        letter.result = tensor.clone()
        letter.done.set()
        return _Work(self._hub, letter.done)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work:
        (tensor,) = tensors
        self.traffic.peers.add(source)
        letter = self._letter("from", source, self._rank)
        return _Work(self._hub, letter.done, lambda: tensor.copy_(letter.result))

    def _letter(self, way: str, source: int, to: int) -> _Meeting:
        other = to if way == "to" else source
        number = self._posted[way, other]
        self._posted[way, other] += 1
        with self._hub.lock:
            return self._hub.mail[source, to, number]

    def _join(self, brought: Any, make: Callable[[list[Any]], Any]) -> _Meeting:
        hub = self._hub
        with hub.lock:
            meeting = hub.meetings[self._collectives]
            meeting.brought[self._rank] = brought
            last = len(meeting.brought) == hub.world_size
        self._collectives += 1
        if last:
            meeting.result = make([meeting.brought[r] for r in range(hub.world_size)])
            meeting.done.set()
        return meeting

    def _count(self, kind: str, held: int) -> None:
        self.traffic.operations.append(kind)
        self.traffic.held = max(self.traffic.held, held)


class _InTurn(Waiting):
    """Others compute while this rank waits."""

    def __init__(
        self, exchange: MemoryExchange, deadline_seconds: float, late_seconds: float
    ) -> None:
        super().__init__(
            exchange.liveness,
            exchange._group,
            deadline_seconds=deadline_seconds,
            late_seconds=late_seconds,
        )
        self._exchange = exchange

    def wait(self, issue: Callable[[], Any], operation: str, extra_seconds: float = 0.0) -> Any:
        work = issued(issue)
        with self._exchange.others_turn():
            return super().wait(lambda: work, operation, extra_seconds)


class MemoryExchange(GlooExchange):
    """The exchange of one rank, on a group and a store in memory.

    Its thread holds the turn of the hub, and gives it up to wait.
    """

    def __init__(
        self, hub: Hub, rank: int, client: Client, *, deadline_seconds: float, late_seconds: float
    ) -> None:
        self._hub = hub
        self.rank, self.world_size = rank, hub.world_size
        self._store = client
        with self.others_turn():
            meet_in_store(client, rank, hub.world_size, deadline_seconds)
        self.liveness = LivenessCheck(client, rank, hub.world_size)
        self._answering = Answering(self.liveness, client.clone())
        self._group = MemoryGroup(hub, rank)
        self._waiting = _InTurn(self, deadline_seconds, late_seconds)
        self._device_group = self._place = None
        self.job_ranks = tuple(range(hub.world_size))

    @contextmanager
    def others_turn(self) -> Iterator[None]:
        """This rank waits; others compute."""
        self._hub.turn.release()
        try:
            yield
        finally:
            self._hub.turn.acquire()

    def claim(self, name: str) -> int:
        return 1

    def gather(self, message: bytes, operation: str, *, extra_seconds: float = 0.0) -> list[bytes]:
        work, rows = self._group.gather(message)
        self._waiting.wait(lambda: work, operation, extra_seconds)
        return rows()

    def _messages(
        self, outgoing: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor]
    ) -> Any:
        works = [self._group.recv([t], r, 0) for r, t in buffers.items()]
        return _All([*works, *(self._group.send([t], r, 0) for r, t in outgoing.items())])

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent."""
        return self._group.traffic  # type: ignore[no-any-return]
