"""Liveness checks through a store: who is here, behind, past, has left, or is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sdcwatch.core.waiting import Finding, Position, Stage, describe
from sdcwatch.guard.arrivals import Arrivals
from sdcwatch.guard.watchdog import LivenessCheck

WINDOW_SECONDS = 0.6


class CountingStore:
    """A store between threads that counts the requests of one rank."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def liveness(world: int, window_seconds: float = WINDOW_SECONDS) -> list[LivenessCheck]:
    store = dist.HashStore()
    made = [LivenessCheck(CountingStore(store), r, world, window_seconds) for r in range(world)]
    for one in made:
        one.move(4, Stage.STEP, "in the training loop after step 4")
    return made


@contextmanager
def answering(*ranks: LivenessCheck) -> Iterator[None]:
    """The threads that answer on some ranks."""

    def serve(rank: LivenessCheck) -> None:
        while rank.answer_next(rank._store):
            pass

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for rank in ranks:
            rank.stop_answering()
        for thread in threads:
            thread.join()


def together(*ranks: LivenessCheck) -> list[Finding]:
    """Ranks that begin the same operation, and ask at the same time where the others are."""
    found: list[Finding | None] = [None] * len(ranks)
    for rank in ranks:
        rank.move(4, Stage.SAVE, "before save_checkpoint of step 4")
        rank.begin("save_checkpoint of step 4")

    def call(index: int) -> None:
        found[index] = ranks[index].call()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [f for f in found if f is not None]


def test_a_rank_that_gives_no_sign_is_silent() -> None:
    caller, _ = liveness(2)
    with answering(caller):
        (found,) = together(caller)
    assert (found.silent, found.behind, found.past, found.left) == ((1,), (), (), ())


def test_a_rank_that_is_alive_elsewhere_is_behind_with_what_it_is_doing() -> None:
    caller, other = liveness(2)
    other.move(2, Stage.STEP, "in the training loop after step 2")
    with answering(caller, other):
        (found,) = together(caller)
    assert found.behind == (1,)
    assert found.notes == {1: "is alive, in the training loop after step 2"}
    assert found.steps_behind == 2


def test_a_rank_that_went_on_without_the_operation_is_past_and_learns_of_it() -> None:
    caller, other = liveness(2)
    other.move(5, Stage.COMPUTING, "in step 5")
    with answering(caller, other):
        (found,) = together(caller)
        end = time.monotonic() + 20
        while other.found is None:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert found.past == (1,)
    assert found.notes == {1: "is alive, in step 5"}
    assert other.found.past == (1,)
    assert other.found.operation == "save_checkpoint of step 4"


def test_nobody_waits_for_a_rank_that_has_left_a_note() -> None:
    caller, other = liveness(2, window_seconds=60.0)
    other.leave("the run ended after step 3")
    with answering(caller):
        (found,) = together(caller)
    assert found.left == (1,)
    assert found.notes == {1: "left: the run ended after step 3"}


def test_of_the_ranks_that_wait_one_asks_and_all_know() -> None:
    ranks = liveness(5)
    with answering(*ranks[:4]):
        found = together(*ranks[:4])
    assert [f.silent for f in found] == [(4,)] * 4
    assert sum(f.elected for f in found) == 1


def test_two_threads_of_one_rank_ask_once_and_both_know_who_is_silent() -> None:
    """The watchdog asks, and meanwhile the connection breaks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = LivenessCheck(store, 0, 2, window_seconds=3.0)
    rank.move(4, Stage.COMPUTING, "in step 4")
    store.add("call/4/0/0/1/first", 1)  # another rank asks first, and ends before it has an answer
    found: list[Finding] = []
    threads = [threading.Thread(target=lambda: found.append(rank.call())) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert [f.silent for f in found] == [(1,), (1,)]
    assert store.add("asks", 0) == 1


def test_a_second_question_is_answered_like_the_first() -> None:
    caller, other = liveness(2)
    with answering(caller, other):
        together(caller)
        caller.end("save_checkpoint of step 4")
        other.leave("the run ended")
        (found,) = together(caller)
    assert (found.left, found.behind) == ((1,), ())


def test_what_a_rank_asks_of_the_store_does_not_depend_on_how_many_there_are() -> None:
    def requests(world: int) -> int:
        ranks = liveness(world, window_seconds=20.0)
        with answering(*ranks):
            together(*ranks)
        return sorted(r._store.requests for r in ranks)[world // 2]

    assert requests(64) <= requests(8) + 2


def test_a_question_leaves_nothing_in_the_store_for_each_rank() -> None:
    world, asked = 100, 5
    ranks = liveness(world, window_seconds=20.0)
    store = ranks[0]._store._store
    for rank in ranks:
        rank.begin("save_checkpoint of step 4")
    with answering(*ranks):
        before = store.num_keys()
        for _ in range(asked):
            assert ranks[0].call(afresh=True).absent == ()
    assert store.num_keys() - before < asked * 20 + world  # each was told once to answer no more


def test_what_was_found_before_a_connection_broke_explains_nothing() -> None:
    """A rank is busy; others find so; one of them dies when the busy one comes."""
    busy, other, dies = liveness(3)
    with answering(busy, other):
        with answering(dies):
            (found, _) = together(other, dies)
            assert (found.behind, found.gone) == ((0,), ())
        busy.move(4, Stage.SAVE, "before save_checkpoint of step 4")
        busy.begin("save_checkpoint of step 4")
        assert busy.call_of_broken().silent == (2,)


def test_a_rank_that_answered_and_then_died_is_found_by_a_second_question() -> None:
    caller, dies = liveness(2)
    with answering(caller):
        thread = threading.Thread(target=lambda: dies.answer_next(dies._store))
        thread.start()  # one answer, and no more
        dies.move(4, Stage.SAVE, "before save_checkpoint of step 4")
        dies.begin("save_checkpoint of step 4")
        caller.move(4, Stage.SAVE, "before save_checkpoint of step 4")
        caller.begin("save_checkpoint of step 4")
        assert caller.call_of_broken().silent == (1,)
        thread.join()


def test_whoever_left_because_of_another_is_not_the_one_that_is_named() -> None:
    caller, first, follows = liveness(3, window_seconds=20.0)
    first.leave("the run ended with ValueError")
    follows.leave("the run ended with RankGone", followed=True)
    with answering(caller):
        (found,) = together(caller)
    assert (found.left, found.followed, found.named) == ((1, 2), (2,), (1,))
    assert Finding.decode(found.encode(), rank=0).named == (1,)


def test_a_rank_that_comes_after_the_others_have_given_it_up_names_none_of_them() -> None:
    late, first, next_one = liveness(3, window_seconds=20.0)
    first.leave("the run ended with RankGone", followed=True, unmet=(0,))
    next_one.leave("the run ended with RankGone", followed=True, unmet=(0, 1))
    with answering(late):
        (found,) = together(late)
    assert (found.left, found.followed, found.named) == ((1, 2), (1, 2), (0,))


def test_ranks_beyond_one_word_of_a_bitmap_are_told_apart() -> None:
    ranks = liveness(130)
    quiet = {61, 62, 63, 124, 129}
    there = [r for i, r in enumerate(ranks) if i not in quiet]
    with answering(*there):
        found = together(*there)
    assert {f.silent for f in found} == {tuple(sorted(quiet))}


@pytest.mark.parametrize("answers", [False, True])
def test_a_store_that_is_gone_or_does_not_answer_tells_nothing_of_anybody(answers: bool) -> None:
    never = threading.Event()

    class Gone:
        def add(self, key: str, value: int) -> None:
            if not answers:
                never.wait(20.0)
            message = "Broken pipe"
            raise ConnectionError(message)

    found = LivenessCheck(Gone(), 0, 3, 0.1).call()
    never.set()
    assert found.absent == ()
    assert found.store_error == ("ConnectionError: Broken pipe" if answers else "did not answer")
    assert "global rank 0 unless the launcher hosts it" in describe(found)


def assert_waits_until(rank: LivenessCheck, reported: Callable[[], None]) -> None:
    started = time.monotonic()
    rank.await_exported(0.3)
    assert time.monotonic() - started >= 0.3
    reported()
    rank.await_exported(60.0)
    assert time.monotonic() - started < 30.0


def test_whoever_reports_nothing_waits_for_all_that_do() -> None:
    first, second, other = liveness(3)
    first.exported(2)
    assert_waits_until(other, lambda: second.exported(2))


def test_of_those_that_report_each_may_know_of_others() -> None:
    first, second, third, other = liveness(4)
    second.exported(3)
    first.exported(3, gone=[1])  # which had reported, before it left
    assert_waits_until(other, lambda: third.exported(3))


def test_a_rank_that_waits_for_an_answer_to_read_answers_the_next_question_in_time() -> None:
    # The first question is open for its whole window, because of a rank that is dead.
    first, second, third, alive, _ = liveness(5, window_seconds=3.0)
    for rank in (second, third, alive):
        rank.move(5, Stage.COMPUTING, "in step 5")
    first.move(5, Stage.STEP, "before the end of the backward")
    asked = first.begin("the end of the backward of step 5")
    found: dict[int, Finding] = {}

    def ask(rank: LivenessCheck, place: Position) -> None:
        found[rank.rank] = rank.call(place, afresh=True)

    with answering(first, second, third, alive):
        threads = [threading.Thread(target=ask, args=(first, asked))]
        threads += [threading.Thread(target=ask, args=(r, r.where)) for r in (second, third)]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join()
    assert {rank: one.silent for rank, one in found.items()} == {0: (4,), 1: (4,), 2: (4,)}


def test_the_thread_that_answers_ends_when_its_rank_closes() -> None:
    one, other = liveness(2)
    with answering(one, other):
        pass  # comes back: each rank ended its own wait
    with pytest.raises(RuntimeError):  # nobody left a question behind
        one._store.wait(["ask/2/to/0"], timedelta(milliseconds=10))


def test_of_a_rank_that_never_comes_one_rank_reads_and_all_learn() -> None:
    world, store = 200, dist.HashStore()
    clients = [CountingStore(store) for _ in range(world)]
    found: list[tuple[Finding | None, str]] = []

    def arrive(rank: int) -> None:
        found.append(Arrivals(clients[rank], rank, world).meet(1.0))

    threads = [threading.Thread(target=arrive, args=(r,)) for r in range(world) if r != 130]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == world - 1
    assert all(f is not None and f.silent == (130,) and problem for f, problem in found)
    assert sum(client.requests for client in clients[1:]) < 8 * world
