"""Liveness checks through a store: who is here, has left, is alive elsewhere, or is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from sdcwatch.guard.watchdog import LivenessCheck, what_is_known


def liveness(world: int, window_seconds: float = 0.4) -> list[LivenessCheck]:
    store = dist.HashStore()
    made = [LivenessCheck(store, rank, world, window_seconds) for rank in range(world)]
    for rank, roll in enumerate(made):
        roll.position(f"in step {rank}")
    return made


def while_answering(roll: LivenessCheck, do: Callable[[], object]) -> object:
    """Run `do` while a watchdog of another rank answers."""
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.02):
            roll.answer()

    watchdog = threading.Thread(target=answer)
    watchdog.start()
    try:
        return do()
    finally:
        stop.set()
        watchdog.join()


def test_a_rank_that_gives_no_sign_is_absent_and_nothing_is_known_of_it() -> None:
    assert liveness(2)[0].call("the audit") == ((1,), {}, "")


def test_a_rank_that_is_alive_elsewhere_is_absent_with_what_it_is_doing() -> None:
    caller, other = liveness(2)
    found = while_answering(other, lambda: caller.call("the audit"))
    assert found == ((1,), {1: "is alive, in step 1"}, "")


def test_the_answer_to_an_earlier_call_does_not_count_as_a_sign_of_life() -> None:
    caller, other = liveness(2)
    while_answering(other, lambda: caller.call("the audit"))
    assert caller.call("the audit of the next step") == ((1,), {}, "")


def test_nobody_waits_for_a_rank_that_has_left_a_note() -> None:
    caller, other = liveness(2, window_seconds=60.0)
    other.leave("the run ended after step 3")
    assert caller.call("the audit") == ((1,), {1: "left: the run ended after step 3"}, "")


def test_two_ranks_that_call_for_different_operations_learn_of_each_other() -> None:
    one, other = liveness(2)
    found: dict[int, object] = {}

    def call(rank: int, roll: LivenessCheck, where: str) -> None:
        found[rank] = roll.call(where)

    threads = [
        threading.Thread(target=call, args=(0, one, "save_checkpoint")),
        threading.Thread(target=call, args=(1, other, "the backward")),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert found == {
        0: ((1,), {1: "is alive, in step 1"}, ""),
        1: ((0,), {0: "is alive, in step 0"}, ""),
    }


def test_a_store_that_is_gone_tells_nothing_of_anybody() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            message = "Broken pipe"
            raise ConnectionError(message)

    absent, known, problem = LivenessCheck(Gone(), 0, 3, 1.0).call("the audit")
    assert (absent, known, problem) == ((), {}, "ConnectionError: Broken pipe")
    assert "global rank 0 unless the launcher hosts it" in what_is_known(absent, known, problem)
