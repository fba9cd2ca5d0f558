"""256 ranks: they meet, audit, wait for a straggler, and end when one of them is killed.

A thread for each; ``python tools/endings.py --ranks`` plays 20 audits instead of three. Exchange,
liveness check, meeting and ring audit are the real ones; the group and the store below them are in
memory, and results come from a table instead of a model.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.config import GuardConfig
from sdcwatch.core.history import History
from sdcwatch.core.records import Outcome
from sdcwatch.core.topology import EVERYBODY, partners
from sdcwatch.core.waiting import Finding
from sdcwatch.errors import RankGone
from sdcwatch.guard.exchange import Operation, agree
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.meeting import Meeting, meet
from sdcwatch.guard.replay import AuditPolicy, AuditResult, OwnStep, RingAudit, SegmentMemory

sys.path.insert(0, str(Path(__file__).parent))
from in_memory import LIGHT, Client, Hub, MemoryExchange, MemoryStore, Traffic

WORLD, A_NODE = 256, 8
AUDITS = int(os.environ.get("SDCWATCH_AUDITS", "3"))
WRONG, STRAGGLER, KILLED = 100, 77, 200
WRONG_AT, LATE_AT = 2, 3
DEADLINE_SECONDS, WINDOW_SECONDS = 2.0, 10.0  # 256 threads answer on one core
NAMES = ("embedding", "head")
REQUESTS = 20
"""Of one rank in the store, in a liveness check; the one that asks reads bitmaps besides."""

pytestmark = pytest.mark.timeout(120 + 20 * AUDITS)


def results(producer: int, error: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[producer, 7]]), torch.tensor([[producer, 1], [producer, 2 + error]])


@dataclass
class Rank:
    """One rank, and what it saw."""

    number: int
    client: Client
    exchange: MemoryExchange | None = None
    meeting: Meeting | None = None
    at_init: Traffic | None = None
    audits: list[AuditResult] = field(default_factory=list)
    operations: list[list[str]] = field(default_factory=list)
    """Of each audit."""
    late: list[Finding] = field(default_factory=list)
    requests: int = 0
    """Of its latest liveness check, or of the wait in which there was one."""
    ended: RankGone | None = None


class Run:
    """All ranks, played once."""

    def __init__(self, run_dir: Path) -> None:
        self.hub, store = Hub(WORLD), MemoryStore()
        self.ranks = [Rank(number, Client(store)) for number in range(WORLD)]
        self._run_dir = run_dir
        self._somebody_is_late = threading.Event()
        self._errors: list[BaseException] = []
        net = torch.nn.Linear(3, 2)
        self._guarded = Guarded(
            model=net,
            given=net,
            ddp=None,
            module=net,
            optimizers=(torch.optim.SGD(net.parameters(), lr=0.1),),
            named=tuple(net.named_parameters()),
            device=torch.device("cpu"),
        )

    def play(self) -> None:
        threads = [threading.Thread(target=self._safely, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in self.ranks:
            if rank.exchange is not None:
                rank.exchange.close()
        self.hub.meetings.clear()
        self.hub.mail.clear()
        if self._errors:
            raise self._errors[0]

    def _safely(self, rank: Rank) -> None:
        try:
            with self.hub.turn:
                self._rank(rank)
        except BaseException as error:
            self._errors.append(error)

    def _rank(self, rank: Rank) -> None:
        exchange = self._met(rank)
        assert rank.meeting is not None
        memory = SegmentMemory()
        memory.history = History(matched=frozenset(range(WORLD)))

        def replay(of: MicroBatch, options: ReplayOptions) -> ReplayResult:
            return ReplayResult(*results(int(of.signatures), self._error_of(rank.number, step)))

        policy = AuditPolicy(torch.device("cpu"))
        ring = RingAudit(
            exchange, rank.meeting.topology, replay, NAMES, policy=policy, memory=memory
        )
        for step in range(1, AUDITS + 1):
            if (rank.number, step) == (STRAGGLER, LATE_AT):
                with exchange.others_turn():
                    assert self._somebody_is_late.wait(60)
            self._at_the_end_of(rank, step)
            before = len(exchange.traffic.operations)
            own = results(rank.number, self._error_of(rank.number, step))
            batch = MicroBatch(signatures=str(rank.number))
            rank.audits.append(ring.run(step, OwnStep(batch, *own)))
            rank.operations.append(exchange.traffic.operations[before:])
        if rank.number == KILLED:
            rank.client.kill()
            return
        try:
            self._at_the_end_of(rank, AUDITS + 1)
        except RankGone as gone:
            rank.ended = gone

    def _met(self, rank: Rank) -> MemoryExchange:
        exchange = MemoryExchange(
            self.hub,
            rank.number,
            rank.client,
            deadline_seconds=60.0,  # to meet: 256 threads take turns
            late_seconds=600.0,
        )
        exchange.liveness.window_seconds = WINDOW_SECONDS
        config = GuardConfig(
            node=f"n{rank.number // A_NODE}", run="many", run_dir=self._run_dir, telemetry="off"
        )
        rank.exchange, rank.meeting = exchange, meet(exchange, config, self._guarded)
        rank.at_init, exchange._group.traffic = exchange.traffic, Traffic()
        exchange._waiting._deadline = DEADLINE_SECONDS

        def absent(finding: Finding, operation: str, waited: float) -> None:
            rank.late.append(finding)
            if finding.behind == (STRAGGLER,):
                self._somebody_is_late.set()

        exchange.on_absent(absent)
        return exchange

    def _at_the_end_of(self, rank: Rank, step: int) -> None:
        assert rank.exchange is not None
        before = rank.client.requests
        try:
            agree(rank.exchange, Operation.STEP, step)
        finally:
            rank.requests = max(rank.requests, rank.client.requests - before)

    def _error_of(self, rank: int, step: int) -> int:
        return 1000 * (rank + 1) if (rank, step) == (WRONG, WRONG_AT) else 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = Run(tmp_path_factory.mktemp("many"))
    with pytest.MonkeyPatch.context() as patched:
        for name, function in LIGHT.items():
            patched.setattr(f"sdcwatch.guard.replay.{name}", function)
        made.play()
    return made


def test_all_ranks_meet_and_agree_on_who_is_where(run: Run) -> None:
    first = run.ranks[0].meeting
    assert first is not None
    assert all(rank.meeting == first for rank in run.ranks)
    assert [info.node for info in first.topology.ranks[::A_NODE]] == [f"n{n}" for n in range(32)]
    assert first.audits_off == ""


def test_what_a_rank_sends_at_the_start_is_bounded(run: Run) -> None:
    for rank in run.ranks:
        assert rank.at_init is not None
        assert rank.at_init.operations.count("send") <= EVERYBODY
        assert rank.at_init.held < WORLD * 1024


def test_the_rank_that_is_wrong_is_named_by_all_and_no_other_is(run: Run) -> None:
    for rank in run.ranks:
        outcomes = [audit.judgement.outcome for audit in rank.audits]
        expected = [Outcome.PASS] * AUDITS
        expected[WRONG_AT - 1] = Outcome.SUSPECT
        assert outcomes == expected
        assert [n.rank for n in rank.audits[WRONG_AT - 1].judgement.named] == [WRONG]


def test_a_clean_audit_is_two_messages_to_one_rank_and_one_maximum(run: Run) -> None:
    for rank in run.ranks:
        for step, operations in enumerate(rank.operations, start=1):
            # Sizes travel ahead of what is sent.
            assert step == WRONG_AT or operations == ["send"] * 4 + ["max"]


def test_audits_send_to_a_few_ranks_only_and_hold_little_at_once(run: Run) -> None:
    first = run.ranks[0].meeting
    assert first is not None
    known = partners(first.topology, range(WORLD))
    for rank in run.ranks:
        assert rank.exchange is not None
        traffic = rank.exchange.traffic
        assert traffic.peers <= set(known[rank.number])
        assert len(traffic.peers) < EVERYBODY
        assert traffic.held < WORLD * 4096
        assert traffic.sent < 64 * 1024


def test_a_straggler_is_waited_for_and_told_of_by_the_rank_that_asked(run: Run) -> None:
    tellers = [rank for rank in run.ranks if any(f.behind == (STRAGGLER,) for f in rank.late)]
    assert 1 <= len(tellers) <= 2  # rank 0 tells too
    assert all(f.gone == () for rank in tellers for f in rank.late if f.behind)
    assert all(len(rank.audits) == AUDITS for rank in run.ranks)


def test_a_rank_that_is_killed_is_named_by_all_others_and_nobody_healthy_is(run: Run) -> None:
    ended = {rank.number: rank.ended for rank in run.ranks if rank.number != KILLED}
    assert {gone.ranks if gone else None for gone in ended.values()} == {(KILLED,)}
    assert all(
        gone and f"rank {KILLED} gave no sign of life" in gone.reason for gone in ended.values()
    )


def test_what_a_rank_asks_of_the_store_while_it_waits_is_bounded(run: Run) -> None:
    # The one that is killed may never have had to ask: it waited for the straggler alone.
    most = sorted(rank.requests for rank in run.ranks if rank.number != KILLED)
    assert most[0] > 0
    assert most[-8] <= REQUESTS  # but for those that asked for all
