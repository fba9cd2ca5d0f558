"""The network of the guard: gloo uses what it is told to, and no store is waited for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sdcwatch.config import gloo_interfaces
from sdcwatch.core.waiting import Finding
from sdcwatch.errors import ConfigurationError, RankGone
from sdcwatch.guard.exchange import GlooExchange
from sdcwatch.guard.group import lazy_group
from sdcwatch.guard.waits import Waiting, unfinished
from sdcwatch.guard.watchdog import LivenessCheck


def test_the_interfaces_of_the_environment_are_taken_as_torch_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, names in (("", ()), ("eth0", ("eth0",)), ("eth0,ib7", ("eth0", "ib7"))):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        assert gloo_interfaces() == names
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert gloo_interfaces() == ()


def test_the_group_is_made_on_the_interface_that_gloo_is_told_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lazy_group(dist.HashStore(), 0, 1, timedelta(seconds=5))


@pytest.mark.usefixtures("alone")
def test_an_interface_that_does_not_exist_is_told_before_the_others_hear_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent7")
    monkeypatch.setattr("sdcwatch.guard.group.meet_in_store", pytest.fail)
    with pytest.raises(ConfigurationError, match=r"IFNAME=absent7.*Set GLOO_SOCKET_IF"):
        GlooExchange()


def test_a_store_that_never_answers_ends_the_question_who_has_joined_by_the_deadline() -> None:
    never = threading.Event()

    class CutOff:
        def check(self, keys: list[str]) -> bool:
            return never.wait(60.0)

    told: list[Finding] = []
    exchange = object.__new__(GlooExchange)
    exchange.rank = 1
    exchange._store = CutOff()
    liveness = LivenessCheck(exchange._store, 1, 2)
    exchange._waiting = Waiting(liveness, None, deadline_seconds=0.2, late_seconds=1.0)
    exchange.on_absent(lambda finding, operation, waited: told.append(finding))
    with pytest.raises(RankGone, match="the store is gone too"):
        exchange.anyone_joined()
    never.set()
    assert [finding.store_error for finding in told] == ["did not answer"]


def in_wait(error: RuntimeError) -> Any:
    class Work:
        def wait(self, timeout: timedelta) -> None:
            raise error

    return Work()


def at_issue(error: RuntimeError) -> Any:
    raise error


@pytest.mark.parametrize("fails", [in_wait, at_issue])
def test_a_device_that_has_failed_is_nobody_elses_fault(
    fails: Callable[[RuntimeError], Any],
) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors")
    liveness = LivenessCheck(None, 0, 2)
    waiting = Waiting(liveness, object(), deadline_seconds=1.0, late_seconds=1.0)
    with pytest.raises(RuntimeError) as raised:
        waiting.wait(lambda: fails(error), "the end of the backward of step 4")
    assert raised.value is error  # and no question was put to the others


def test_a_save_that_takes_long_is_spoken_of_before_it_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sdcwatch.guard.waits.SLOW_SECONDS", 0.0)
    monkeypatch.setattr("sdcwatch.guard.waits.MOMENT_SECONDS", 0.0)

    class Saves:
        def __init__(self) -> None:
            self.looks = 0

        def wait(self, timeout: timedelta) -> None:
            self.looks += 1
            if self.looks < 3:  # of the deadline, and once the others were asked
                time.sleep(timeout.total_seconds())
                msg = "timed out"
                raise RuntimeError(msg)

    finding, told = Finding(behind=(0,), notes={0: "is alive, saving"}), []
    liveness = LivenessCheck(None, 1, 2)
    monkeypatch.setattr(liveness, "call", lambda at: finding)
    waiting = Waiting(liveness, object(), deadline_seconds=0.01, late_seconds=1.0)
    waiting.on_absent = lambda *late: told.append(late)
    waiting.wait(Saves, "the end of save_checkpoint of step 3", extra_seconds=3600.0)
    (said,) = caplog.messages
    assert said.startswith("the end of save_checkpoint of step 3 takes long")
    assert "rank 0 is alive, saving" in said
    assert told == []


def test_a_deadline_with_a_part_of_a_millisecond_breaks_no_connection() -> None:
    class LikeGloo:
        def wait(self, timeout: timedelta) -> None:
            time.sleep(timeout // timedelta(milliseconds=1) / 1000)  # whole ones only
            msg = "Operation timed out!"
            raise RuntimeError(msg)

    assert {unfinished(LikeGloo(), 0.001999) for _ in range(20)} == {""}
