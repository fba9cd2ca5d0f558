"""Every collective of the guard, behind one protocol.

Control traffic runs on a gloo group of the guard's own, so that it cannot interleave with DDP's.
Each operation is issued async and waited for with a *soft* deadline, which leaves the group usable.
When it passes, a liveness check through the store finds out where the others are, and
`sdcwatch.core.waiting` says what that means: a rank that is late is waited for, one that has gone
ends in `RankGone`, one that went past the operation in `Desync`.

On CUDA the two-word all-reduce of every step runs on DDP's own group, on the device: the end of the
backward is a fixed point of the host order there, and no second communicator is needed. Everything
else stays on gloo with CPU copies, where a deadline is an exception.

Every operation of the guard begins with one MAX of (word, ~word), a word being (operation, step,
code): the largest and the smallest word of all ranks in one call. If they differ in operation or
step, ranks are not at the same place, and everybody learns it together.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sdcwatch.core.waiting import Stage
from sdcwatch.errors import Desync
from sdcwatch.guard.group import own_group, require_process_group
from sdcwatch.guard.places import Place
from sdcwatch.guard.waits import DeviceResult, HostBuffer, Messages, OnAbsent, Waiting

SAVE_SECONDS = 3600.0
"""How long other ranks wait for one that saves a checkpoint."""
HARD_SECONDS = 2 * SAVE_SECONDS
"""After that long an operation would destroy the group; longer than any soft deadline."""
LOG = logging.getLogger("sdcwatch")
NEUTRAL = -(2**63)
"""What a rank that has no word contributes to a MAX: it never wins."""


class Exchange(Protocol):
    """What the guard needs from a group of ranks. Every method is called by every rank.

    Attributes:
        rank: This rank within the group.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int

    def max_int64s(
        self,
        words: Sequence[int],
        operation: str,
        *,
        extra_seconds: float = 0.0,
    ) -> tuple[int, ...]:
        """Element-wise maximum over all ranks of a few signed 64-bit words.

        Args:
            words: The same number on every rank.
            operation: What is being done, for errors.
            extra_seconds: Added to the deadline, where one rank may be long.
        """
        ...

    def max_and_read(
        self, words: torch.Tensor, own: torch.Tensor, operation: str
    ) -> tuple[tuple[int, ...], list[float]]:
        """`max_int64s` of words on the device, read in one transfer with what else lies there.

        Only at the end of the backward, where it cannot interleave with DDP: on CUDA it uses DDP's
        group.

        Args:
            words: int64 (k,) on the device, the same number on every rank; overwritten.
            own: float32 (n,) on the device, of any n: this rank's alone.
            operation: What is being done, for errors.

        Returns:
            The largest words, and `own` on the host.
        """
        ...

    def gather(self, message: bytes, operation: str, *, extra_seconds: float = 0.0) -> list[bytes]:
        """The message of every rank, in rank order; `extra_seconds` as for `max_int64s`."""
        ...

    def route(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Sequence[int], operation: str
    ) -> dict[int, torch.Tensor]:
        """Send byte tensors to some ranks and receive one from each rank in `incoming`.

        Both sides must name each other; a rank that neither sends nor receives passes nothing.
        """
        ...

    def mark_joined(self) -> None:
        """Say that this rank has run out of inputs. No collective."""
        ...

    def anyone_joined(self) -> bool:
        """Whether a rank has run out of inputs. No collective; equal on all ranks that train."""
        ...

    def all_joined(self) -> None:
        """Every rank has run out of inputs: forget it. No collective."""
        ...

    def move(self, step: int, stage: Stage, doing: str) -> None:
        """This rank goes on in the loop: remembered for a liveness check of another rank."""
        ...

    def leave(self, note: str, *, followed: bool = False, unmet: Sequence[int] = ()) -> None:
        """Leave a note that a later liveness check finds. No collective.

        Args:
            note: Why this rank leaves.
            followed: It leaves because of other ranks.
            unmet: Those that it missed.
        """
        ...

    def close(self) -> None:
        """Give back what the group holds. No collective."""
        ...


class GlooExchange:
    """An `Exchange` over a gloo group of the guard's own.

    Connections are made when two ranks first talk. Those that audits need are made by `connect`,
    within the deadline; there are as many per rank however many ranks there are.

    Args:
        process_group: The group of the replicas, usually DDP's; None for the default group.
        deadline_seconds: After that long in an operation the others are asked where they are.
        late_seconds: How long a rank that is alive and behind is waited for.
        device: Where the two-word all-reduce of a step runs; CUDA means DDP's own group.

    Attributes:
        job_ranks: What the ranks of the group are called in the job, in order.
        liveness: The liveness check.

    Raises:
        ConfigurationError: No process group is initialised.
        RankGone: A rank did not come within the deadline.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        deadline_seconds: float = 60.0,
        late_seconds: float = 3600.0,
        device: torch.device | None = None,
    ) -> None:
        require_process_group()
        parent = process_group if process_group is not None else dist.group.WORLD
        # No device is told of by whoever has only tensors of the host.
        device = device or torch.device("cpu")
        self._device_group = parent if device.type == "cuda" else None
        self._buffer = HostBuffer(device)
        # Far above the soft deadline: it would destroy the group.
        hard_seconds = max(HARD_SECONDS, 2 * late_seconds, 20 * deadline_seconds)
        own = own_group(parent, deadline_seconds=deadline_seconds, hard_seconds=hard_seconds)
        self.rank, self.world_size, self.job_ranks = own.rank, own.world_size, own.job_ranks
        self._store, self.liveness, self._answering = own.store, own.liveness, own.answering
        self._group: Any = own.gloo
        self._waiting = Waiting(
            own.liveness, own.gloo, deadline_seconds=deadline_seconds, late_seconds=late_seconds
        )
        self._place: Place | None = None

    def on_absent(self, told: OnAbsent) -> None:
        """Have somebody told of each liveness check that found ranks absent. No collective."""
        self._waiting.on_absent = told

    def claim(self, name: str) -> int:
        """Which guard of this job it is with that name, from 1 on; until `close`. No collective."""
        c10d = dist.distributed_c10d
        shared = c10d.PrefixStore("sdcwatch/places/", c10d._get_default_store())
        place: Place = self._waiting.ask(lambda: Place(shared, name), "sdcwatch.init")
        self._place = place
        return place.number

    def connect(self, partners: Sequence[int]) -> None:
        """Make connections now, so that no audit has to, all within one deadline.

        Every rank calls it; if one rank names another, so does the other name it.

        Raises:
            RankGone: A rank did not answer.
        """
        one = {rank: torch.ones(1, dtype=torch.uint8, device="cpu") for rank in partners}
        got = {rank: torch.empty(1, dtype=torch.uint8, device="cpu") for rank in partners}
        self._waiting.wait(lambda: self._messages(one, got), "sdcwatch.init")

    def max_int64s(
        self,
        words: Sequence[int],
        operation: str,
        *,
        extra_seconds: float = 0.0,
    ) -> tuple[int, ...]:
        """Element-wise maximum; see `Exchange.max_int64s`."""
        tensor = torch.tensor(words, dtype=torch.int64, device="cpu")
        self._waiting.wait(lambda: self._max(tensor), operation, extra_seconds)
        return tuple(tensor.tolist())

    def _max(self, tensor: torch.Tensor) -> Any:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._group.allreduce([tensor], options)

    def max_and_read(
        self, words: torch.Tensor, own: torch.Tensor, operation: str
    ) -> tuple[tuple[int, ...], list[float]]:
        """Element-wise maximum on the device; see `Exchange.max_and_read`."""
        group, count = self._device_group, words.numel()
        if group is None and words.device.type != "cpu":  # neither CPU nor CUDA
            words, own = words.cpu(), own.cpu()

        def result() -> torch.Tensor:
            # One transfer for both: a float32 as a float64 has 64 bits too.
            return torch.cat((words, own.double().view(torch.int64)))

        def issue() -> DeviceResult:
            if group is None:
                return DeviceResult(self._max(words), result, self._buffer, blocks=True)
            work = dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group, async_op=True)
            # Of a group for several kinds of device, get_backend names them all.
            blocks = group._get_backend(words.device).name().lower() != "nccl"
            return DeviceResult(work, result, self._buffer, blocks=blocks)

        read = self._waiting.wait(issue, operation).values()
        floats = struct.pack(f"={len(read) - count}q", *read[count:])
        return tuple(read[:count]), list(struct.unpack(f"={len(floats) // 8}d", floats))

    def gather(self, message: bytes, operation: str, *, extra_seconds: float = 0.0) -> list[bytes]:
        """Every rank's message; see `Exchange.gather`. Sizes travel first."""
        own = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        sizes = [torch.empty_like(own) for _ in range(self.world_size)]
        self._waiting.wait(lambda: self._group.allgather([sizes], [own]), operation, extra_seconds)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device="cpu")
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._waiting.wait(lambda: self._group.allgather([rows], [padded]), operation)
        return [bytes(row[:n].numpy()) for row, n in zip(rows, lengths, strict=True)]

    def route(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Sequence[int], operation: str
    ) -> dict[int, torch.Tensor]:
        """Point-to-point byte tensors; see `Exchange.route`.

        Sizes travel first: a receive buffer smaller than the message aborts the process on gloo.
        """
        sizes = {
            r: torch.tensor([t.numel()], dtype=torch.int64, device="cpu")
            for r, t in outgoing.items()
        }
        expected = {r: torch.zeros(1, dtype=torch.int64, device="cpu") for r in incoming}
        self._waiting.wait(lambda: self._messages(sizes, expected), operation)
        buffers = {
            r: torch.empty(int(n), dtype=torch.uint8, device="cpu") for r, n in expected.items()
        }
        self._waiting.wait(lambda: self._messages(outgoing, buffers), operation)
        return buffers

    def _messages(
        self, outgoing: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor]
    ) -> Messages:
        works = [self._group.recv([t], r, 0) for r, t in buffers.items()]
        return Messages(works + [self._group.send([t], r, 0) for r, t in outgoing.items()])

    def mark_joined(self) -> None:
        """See `Exchange.mark_joined`."""
        self._waiting.ask(lambda: self._store.set("joined", "1"), "telling the store of no inputs")

    def anyone_joined(self) -> bool:
        """See `Exchange.anyone_joined`."""
        asking = "asking the store who has run out of inputs"
        return bool(self._waiting.ask(lambda: self._store.check(["joined"]), asking))

    def all_joined(self) -> None:
        """See `Exchange.all_joined`."""
        self._waiting.ask(lambda: self._store.delete_key("joined"), "the end of Join")

    def move(self, step: int, stage: Stage, doing: str) -> None:
        """See `Exchange.move`."""
        self.liveness.move(step, stage, doing)

    def leave(self, note: str, *, followed: bool = False, unmet: Sequence[int] = ()) -> None:
        """See `Exchange.leave`."""
        self.liveness.leave(note, followed=followed, unmet=unmet)

    def close(self) -> None:
        """Answer other ranks no more; the group lives as long as the process."""
        if self._place is not None:
            self._place.release()
        self._answering.close()


def all_reduce_async(tensor: torch.Tensor, group: Any) -> torch.futures.Future[Any]:
    """DDP's own all-reduce of one bucket, async, as its communication hook returns it."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future


def join_world(
    rank: int, world_size: int, init_method: str, timeout: timedelta
) -> Callable[[int], Any]:
    """Initialise a gloo world and return the groups over its first 1, 2, ... ranks."""
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )
    groups = [dist.new_group(list(range(n)), timeout=timeout) for n in range(1, world_size)]
    return lambda ranks: dist.group.WORLD if ranks == world_size else groups[ranks - 1]


def leave_world() -> None:
    """End the world; gloo needs everybody to arrive before anybody leaves."""
    try:
        dist.barrier()
    finally:
        dist.destroy_process_group()


_CODE_BITS = 8
_STEP_BITS = 48


class Operation(IntEnum):
    """What a rank is about to do."""

    STEP = 1
    WEIGHTS = 2
    SAVE = 3

    @property
    def words(self) -> str:
        """As it reads in an error."""
        return {1: "the end of the backward", 2: "the weight check", 3: "save_checkpoint"}[self]


STAGES = {
    Operation.STEP: Stage.STEP,
    Operation.WEIGHTS: Stage.WEIGHTS,
    Operation.SAVE: Stage.SAVE,
}
"""Where in a step each operation has its place."""


class Code(IntEnum):
    """What a rank has to say at the end of its backward; the largest of all ranks counts."""

    CLEAN = 0
    NO_RECORD = 1
    """What was computed here cannot be replayed."""
    SEEN = 2
    """A non-finite value, or gradients that were not reduced."""


def agree(exchange: Exchange, operation: Operation, step: int, code: int = 0) -> int:
    """Meet all ranks at an operation of a step. Every rank calls it.

    Returns:
        The largest code of all ranks.

    Raises:
        Desync: Ranks are at different operations or steps; names who is where.
        RankGone: A rank did not answer within the deadline.
    """
    at = f"{operation.words} of step {step}"
    exchange.move(step, STAGES[operation], f"before {at}")
    word = _word(operation, step) | code
    return _agreed(exchange, operation, step, exchange.max_int64s((word, ~word), at))


def agree_on_device(
    exchange: Exchange, step: int, code: int, seen: torch.Tensor, values: torch.Tensor
) -> tuple[int, list[float]]:
    """Meet all ranks at the end of the backward, without reading a verdict first.

    The verdict goes into the word on the device, and the host reads it once, agreed. Every rank
    calls it.

    Args:
        exchange: Between the ranks.
        step: The step.
        code: What the host knows already.
        seen: bool () on the device: this rank has to say `Code.SEEN`.
        values: float32 (n,) on the device, of any n, to be read along.

    Returns:
        The largest code of all ranks, and `values` on the host.

    Raises:
        Desync: Ranks are at different operations or steps; names who is where.
        RankGone: A rank did not answer within the deadline.
    """
    at = f"{Operation.STEP.words} of step {step}"
    exchange.move(step, STAGES[Operation.STEP], f"before {at}")
    # Numbers of the host go along with the kernels: nothing is copied to the device.
    word = seen.to(torch.int64).mul_(int(Code.SEEN)).clamp_(min=code)
    word.add_(_word(Operation.STEP, step))
    words = torch.stack((word, word.bitwise_not()))
    largest, read = exchange.max_and_read(words, values, at)
    return _agreed(exchange, Operation.STEP, step, largest), read


def _word(operation: Operation, step: int) -> int:
    return ((operation << _STEP_BITS) | step) << _CODE_BITS


def _agreed(exchange: Exchange, operation: Operation, step: int, largest: tuple[int, ...]) -> int:
    """The code that all ranks agreed on, if they are at the same place."""
    at = f"{operation.words} of step {step}"
    top, complement = largest
    if top >> _CODE_BITS != ~complement >> _CODE_BITS:
        rows = exchange.gather(at.encode(), at)
        error = Desync({rank: row.decode() for rank, row in enumerate(rows)})
        LOG.critical(error)  # uncaught it ends the process without a word, as SystemExit does
        raise error
    exchange.move(step, STAGES[operation], f"after {at}")
    return top & ((1 << _CODE_BITS) - 1)


def missing_ranks(exchange: Exchange, operation: str, why: str) -> dict[int, str]:
    """Ranks that cannot take part, and why; `why` is "" on those that can. Every rank calls it."""
    rows = exchange.gather(why.encode(), operation)
    return {rank: row.decode() for rank, row in enumerate(rows) if row}
