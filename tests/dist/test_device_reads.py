"""A plain step waits for the device once: everything that a host could read is counted.

On a CPU no tensor is away from the host, so what counts is what is asked for. A dispatch mode sees
the operations that read a value. ``tolist()`` and the like are none on a CPU: they are counted as
calls, except of the buffer on the host that the one copy goes to.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import sdcwatch
from sdcwatch.checks import torch_internals
from sdcwatch.errors import RankGone
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.waits import DeviceResult, HostBuffer, unfinished
from sdcwatch.testing import GlooPool

READING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
}
"""Operations that wait for the device."""
ASKING = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}
"""Methods that do, and show as no operation where the tensor is on the host already."""


class Operations(TorchDispatchMode):
    """Operations that read a value of the device on the host, and copies to the host."""

    def __init__(self, on_host: torch.Tensor) -> None:
        super().__init__()
        self._memory = on_host.untyped_storage().data_ptr()
        self.reading: list[str] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in READING:
            self.reading.append(name)
        device = (kwargs or {}).get("device")
        to_host = name == "aten::_to_copy" and torch.device(device or "meta").type == "cpu"
        into_buffer = name == "aten::copy_" and args[0].untyped_storage().data_ptr() == self._memory
        if to_host or into_buffer:
            self.copies += 1
        return func(*args, **(kwargs or {}))


class Methods:
    """Methods of tensors that give a value to Python, while it is entered."""

    def __init__(self, on_host: torch.Tensor) -> None:
        self._on_host = on_host
        self.asked: list[str] = []

    def __enter__(self) -> Methods:
        for name in ASKING:
            setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        return self

    def _counting(self, name: str, method: Any) -> Any:
        memory = self._on_host.untyped_storage().data_ptr()

        def counting(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.untyped_storage().data_ptr() != memory:
                self.asked.append(name)
            return method(tensor, *args)

        return counting

    def __exit__(self, *exception: object) -> None:
        for name in ASKING - OWN:
            delattr(torch.Tensor, name)
        for name, method in INHERITED.items():
            setattr(torch.Tensor, name, method)


OWN = ASKING & vars(torch.Tensor).keys()
INHERITED = {name: vars(torch.Tensor)[name] for name in OWN}


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(16)] if kind == "buffers" else []
    return nn.Sequential(nn.Linear(8, 16), *norm, nn.Linear(16, 16), nn.Linear(16, 1))


def steps(rank: int, group: Any, kind: str, run_dir: str) -> dict[int, Any]:
    """What plain steps read: the guard's own reads, by step."""
    with mock.patch.object(torch_internals, "dispatch_modes_off", nullcontext):
        return counted(group, kind, run_dir)  # the modes see the guard


def counted(group: Any, kind: str, run_dir: str) -> dict[int, Any]:
    net = network(kind)
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard = sdcwatch.init(
        model, optimizer, run_dir=run_dir, telemetry="off", console=False, fault_domain="gpu",
        audit_every=1000, fingerprint_every=1000,
    )  # fmt: skip
    buffer = guard.joined_exchange._buffer.memory
    rows = {}
    for step in range(1, 13):
        inputs, micro_batches = torch.randn(6, 8), 2 if kind == "accumulated" else 1
        with Operations(buffer) as operations, Methods(buffer) as methods:
            optimizer.zero_grad()
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                with nullcontext() if last else model.no_sync():
                    loss = model(inputs).square().mean()
                    if kind == "recorded":
                        guard.record_loss(loss)
                    loss.backward()
            optimizer.step()
        rows[step] = (operations.reading, operations.copies, methods.asked)
    guard.close()
    return rows


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["plain", "buffers", "accumulated", "recorded"])
def test_a_plain_step_reads_the_device_once(pool: GlooPool, tmp_path: Any, kind: str) -> None:
    for rows in pool.run(steps, 2, kind, str(tmp_path)):
        for step in range(8, 13):
            assert rows[step] == ([], 1, []), step


def forced_onto_the_device(exchange: GlooExchange, group: Any) -> None:
    """As on CUDA: the group of DDP, and a device that is done only when its event has passed."""
    exchange._device_group = group


def on_the_group_of_ddp(rank: int, group: Any) -> Any:
    exchange = GlooExchange(group)
    forced_onto_the_device(exchange, group)
    own = torch.tensor([1.5, float("inf"), -float(rank)])
    words = torch.tensor([rank, -rank, 2**62 + rank])
    return exchange.max_and_read(words, own, "a test")


@pytest.mark.dist
def test_words_and_values_come_along_in_one_read_on_the_group_of_ddp(pool: GlooPool) -> None:
    rows = pool.run(on_the_group_of_ddp, 3)
    for rank, (words, values) in enumerate(rows):
        assert words == (2, 0, 2**62 + 2)
        assert values == [1.5, float("inf"), -float(rank)]


def one_device_hangs(rank: int, group: Any) -> tuple[str, float]:
    """The device of rank 1 never gets to the end of the backward, and its host is elsewhere."""
    exchange = GlooExchange(group, deadline_seconds=1.0)
    forced_onto_the_device(exchange, group)
    started = time.monotonic()
    if rank == 1:
        exchange._buffer.arrived = lambda: False  # type: ignore[method-assign]
    exchange.liveness.window_seconds = 1.0
    try:
        exchange.max_and_read(torch.tensor([rank, -rank]), torch.zeros(1), "the backward")
    except RankGone as error:
        return str(error), time.monotonic() - started
    finally:  # the other one ends its run, where it would go on
        exchange.leave("the run ended")
        exchange.close()
    return "", time.monotonic() - started


@pytest.mark.dist
def test_a_device_that_hangs_ends_the_wait_by_the_soft_deadline(pool: GlooPool) -> None:
    rows = pool.run(one_device_hangs, 2)
    assert rows[0][0] == ""
    assert "the backward" in rows[1][0]
    assert rows[1][1] < 30


class Event:
    """An event that passes after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.recorded = looks, 0

    def record(self, stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Work:
    """A collective of NCCL: a wait with a timeout would end the communicator."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait(self, *arguments: Any, **options: Any) -> None:
        self.waits.append((arguments, options))


def device_result(looks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceResult, Work]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    buffer, work = HostBuffer(torch.device("cpu")), Work()
    buffer._event = Event(looks)  # type: ignore[assignment]
    return DeviceResult(work, lambda: torch.tensor([1, -(2**63)]), buffer, blocks=False), work


def test_the_copy_is_queued_behind_the_all_reduce_and_the_host_waits_for_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, work = device_result(3, monkeypatch)
    assert work.waits == [((), {})]
    assert unfinished(result, 5.0) is None
    assert result.values() == [1, -(2**63)]


def test_a_wait_for_the_device_that_takes_long_can_be_taken_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, work = device_result(10**9, monkeypatch)
    assert unfinished(result, 0.05) == ""
    result._buffer._event.looks = 0  # type: ignore[union-attr, attr-defined]
    assert unfinished(result, 0.05) is None
    assert work.waits == [((), {})]


def test_the_buffer_on_the_host_grows_with_what_is_read() -> None:
    buffer = HostBuffer(torch.device("cpu"))
    assert buffer.begin(torch.arange(1000)).tolist() == list(range(1000))
    assert buffer.memory.numel() >= 1000
    assert buffer.begin(torch.arange(3)).tolist() == [0, 1, 2]


def test_a_collective_of_gloo_is_waited_for_with_the_deadline() -> None:
    work = Work()
    buffer = HostBuffer(torch.device("cpu"))
    result = DeviceResult(work, lambda: torch.tensor([7]), buffer, blocks=True)
    assert work.waits == []
    result.wait(timedelta(seconds=2))
    assert work.waits == [((), {"timeout": timedelta(seconds=2)})]
    assert result.values() == [7]
