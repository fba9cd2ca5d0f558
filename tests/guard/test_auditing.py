"""Check 2 from step to step between threads: preflight, first audits, what the gate is told.

Results come from a table instead of a model, so that a planted value is the only thing that can
differ. Preflight, pairing, packing, arbitration, repeats, judgement and gate are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from sdcwatch.checks.captured import Backward
from sdcwatch.checks.payload import MicroBatch, unpack
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.config import GuardConfig
from sdcwatch.core.checkpoint import GateFacts, judge_checkpoint
from sdcwatch.core.records import (
    Action,
    Cause,
    CheckpointEvent,
    Coverage,
    GateReason,
    GuardState,
    Note,
    Outcome,
    PreflightDone,
    Progress,
    Record,
    StateChanged,
    Verdict,
)
from sdcwatch.core.summary import RunSummary, SummaryBuilder
from sdcwatch.core.topology import RankInfo, Topology
from sdcwatch.guard.auditing import Audits, Decide
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.preflight import Preflight, ReplayCheck
from sdcwatch.guard.replay import AuditPolicy, RingAudit, SegmentMemory
from sdcwatch.guard.reporter import Reporter, VerdictBuilder
from sdcwatch.guard.window import Decision, StepWindow
from sdcwatch.testing import ThreadExchange, run_threads

CPU = torch.device("cpu")
NAMES = ("embedding", "head")
Wrong = Callable[[int, int, int, int], "int | str"]
"""(rank, step, number of its computation in the step, 0 is its own, producer of the micro-batch) ->
an error of a gradient, 0 for none, or the words with which the computation ends."""


def topology_of(nodes: int, per_node: int) -> Topology:
    return Topology(
        tuple(
            RankInfo(
                rank=rank,
                node=f"n{rank // per_node}",
                host="h",
                local_rank=rank % per_node,
                pid=rank,
                instance_id=f"i{rank // per_node}",
            )
            for rank in range(nodes * per_node)
        )
    )


class Kept:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._builder = SummaryBuilder()

    @property
    def summary(self) -> RunSummary:
        return self._builder.summary()

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def close(self, timeout_seconds: float | None = None) -> None:
        pass


class EqualReplicas:
    """Check 3 where nothing ever differs."""

    class weights:
        @staticmethod
        def equal(operation: str) -> bool:
            return True


@dataclass
class Run:
    """What a run of audits left, the same on every rank."""

    records: list[Record] = field(default_factory=list)
    gates: dict[int, GateReason] = field(default_factory=dict)
    results: dict[int, str] = field(default_factory=dict)
    audited: list[int] = field(default_factory=list)

    def told(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.records if isinstance(r, kind)]

    @property
    def outcomes(self) -> list[tuple[int, Outcome]]:
        return [(v.step, v.outcome) for v in self.told(Verdict)]

    @property
    def suspects(self) -> set[int]:
        return {s.rank for v in self.told(Verdict) for s in v.suspects}

    @property
    def coverage(self) -> list[tuple[int, Coverage]]:
        return [(p.step, p.coverage) for p in self.told(PreflightDone)]

    def counted(self, outcome: Outcome) -> int:
        counts = [c for p in self.told(Progress) for c in p.counts if c.outcome is outcome]
        return sum(c.count for c in counts)


class _Rank:
    """One rank of a run."""

    def __init__(
        self, exchange: ThreadExchange, topology: Topology, wrong: Wrong, options: dict[str, Any]
    ) -> None:
        self.rank, self.wrong = exchange.rank, wrong
        self.facts = options.pop("facts", lambda rank: {})
        config = GuardConfig(**{"audit_every": 2, **options})
        sink = self.sink = Kept()
        verdicts = VerdictBuilder(topology, observing=config.mode == "observe")
        self.reporter = Reporter(sink, verdicts, summary_path=None, leader=False, start_step=0)
        self.gate = CheckpointGate(exchange, self.reporter)
        memory = SegmentMemory()
        self.preflight = Preflight(
            exchange,
            lambda message, options: self.replay(unpack(message, CPU), options),
            NAMES,
            topology=topology,
            memory=memory,
            rounds=2,
            facts=lambda: self.facts(self.rank),
            max_payload_bytes=1 << 20,
        )
        ring = RingAudit(
            exchange, topology, self.replay, NAMES, policy=AuditPolicy(CPU), memory=memory
        )
        self.step = self.number = 0
        self.audits = Audits(
            config,
            exchange,
            self.reporter,
            check=ReplayCheck(self.preflight, ring, ""),
            replicas=cast(Any, EqualReplicas()),
            gate=self.gate,
            decide=Decide(self.say, self.fail),
        )
        self.audits.begin()

    def say(self, verdict: Verdict) -> Decision:
        self.reporter.emit(verdict)
        self.audits.named(verdict)
        return Decision(verdict=verdict)

    def fail(self, verdict: Verdict, *, stop: bool = False) -> Decision:
        action = Action.STOP if stop else Action.SKIP
        self.say(replace(verdict, action=action))
        return Decision(skip=True, verdict=verdict)

    def compute(self, producer: int) -> tuple[torch.Tensor, torch.Tensor] | str:
        error = self.wrong(self.rank, self.step, self.number, producer)
        self.number += 1
        if isinstance(error, str):
            return error
        return torch.tensor([[producer, 7]]), torch.tensor([[producer, 1], [producer, 2 + error]])

    def replay(self, of: MicroBatch, options: ReplayOptions) -> ReplayResult:
        made = self.compute(int(of.signatures))
        return ReplayResult(error=made) if isinstance(made, str) else ReplayResult(*made)

    def train(self, step: int, run: Run) -> None:
        self.step, self.number, self.reporter.step = step, 0, step
        if self.audits.due(step):
            run.audited.append(step)
            made = self.compute(self.rank)
            assert not isinstance(made, str)
            mine = MicroBatch(signatures=str(self.rank))
            backward = Backward(1, True, lambda: mine, outputs=made[0], gradients=made[1])
            self.audits.run(StepWindow(step, backward=backward), recorded=True)
        decision = judge_checkpoint(
            GateFacts(
                step=step,
                tainted=False,
                nonfinite_passed=True,
                replay_failed=False,
                fingerprint_passed=True,
                audit_age_limit=2,
                **self.audits.gate_facts(),
            )
        )
        run.gates[step], run.results[step] = decision.reason, decision.result.value
        self.gate.allow(step, decision)


def run_of(
    wrong: Wrong, *, steps: int = 12, nodes: int = 3, per_node: int = 2, **options: Any
) -> Run:
    """A run of some steps, audited every second one, as every rank saw it."""
    topology = topology_of(nodes, per_node)

    def body(exchange: ThreadExchange) -> Run:
        rank, run = _Rank(exchange, topology, wrong, dict(options)), Run()
        for step in range(1, steps + 1):
            rank.train(step, run)
        rank.reporter.flush()
        run.records = rank.sink.records
        return run

    rows = run_threads(topology.world_size, body)
    assert all(r.outcomes == rows[0].outcomes and r.gates == rows[0].gates for r in rows)
    return rows[0]


def sticky(ranks: Sequence[int], since: int) -> Wrong:
    """Devices that are wrong in everything from a step on, each in its own way."""
    return lambda rank, step, number, producer: 10 + rank if rank in ranks and step >= since else 0


def test_a_run_in_which_nothing_differs_is_armed_after_two_rings_and_stays_quiet() -> None:
    run = run_of(lambda *_: 0)
    assert run.coverage == [(2, Coverage.FULL)]
    assert run.outcomes == []
    assert run.audited == [1, 2, 4, 6, 8, 10, 12]
    assert run.counted(Outcome.PASS) == 7  # one for each ring, those of preflight included
    assert run.gates[1] is GateReason.NOT_PREFLIGHTED
    assert {run.gates[step] for step in range(2, 13)} == {GateReason.OK}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("known", [True, False], ids=["another library", "no fact"])
def test_a_rank_that_is_wrong_from_the_first_step_differs_and_the_run_goes_on(
    rank: int, known: bool
) -> None:
    facts = lambda r: {"torch": "2.8" if known and r == rank else "2.13"}  # noqa: E731
    run = run_of(sticky([rank], since=1), facts=facts)
    (verdict,) = run.told(Verdict)
    assert (verdict.step, verdict.outcome, verdict.ranks) == (1, Outcome.DIFFERS, (rank,))
    assert verdict.cause is (Cause.SOFTWARE if known else Cause.UNKNOWN)
    assert (verdict.failed, verdict.suspects) == (False, ())
    assert ("torch differs" in verdict.reason) is known
    assert run.coverage == [(2, Coverage.FULL)]
    assert run.told(StateChanged)[-1].state is GuardState.DEGRADED
    # The audit age goes on, and nothing is ever confirmed.
    assert {(run.results[s], run.gates[s]) for s in range(2, 13)} == {
        ("provisional", GateReason.DIFFERS)
    }
    counts = [c for p in run.told(Progress) for c in p.counts if c.outcome is Outcome.DIFFERS]
    assert {c.cause for c in counts} == {verdict.cause}
    assert sum(c.count for c in counts) == 7


def test_a_device_that_breaks_beside_one_that_differs_is_still_named() -> None:
    both = lambda r, s, n, p: 7 if r == 0 else (11 if r == 3 and s >= 6 else 0)  # noqa: E731
    run = run_of(both)
    assert run.suspects == {3}
    assert run.outcomes[0] == (1, Outcome.DIFFERS)


@pytest.mark.parametrize(("nodes", "per_node"), [(3, 4), (4, 2)])
@pytest.mark.parametrize("node", [0, 2])
def test_a_whole_node_that_breaks_is_named_with_every_rank_and_no_gate_is_green(
    nodes: int, per_node: int, node: int
) -> None:
    bad = range(node * per_node, (node + 1) * per_node)
    run = run_of(sticky(bad, since=4), nodes=nodes, per_node=per_node, steps=7)
    verdict = run.told(Verdict)[0]
    assert (verdict.step, verdict.outcome) == (4, Outcome.SUSPECT)
    assert run.suspects == set(bad)
    assert f"all {per_node} ranks of n{node} are wrong" in verdict.reason
    assert {run.results[s] for s in range(4, 8)} == {"withheld"}
    assert {run.gates[s] for s in range(4, 8)} == {GateReason.SUSPECT}


@pytest.mark.parametrize(("nodes", "per_node"), [(3, 4), (4, 2)])
def test_a_node_that_is_bad_from_the_start_differs_and_nobody_is_named(
    nodes: int, per_node: int
) -> None:
    bad = range(per_node, 2 * per_node)
    run = run_of(sticky(bad, since=1), nodes=nodes, per_node=per_node, steps=5)
    assert run.suspects == set()
    (verdict,) = run.told(Verdict)
    assert (verdict.outcome, verdict.ranks) == (Outcome.DIFFERS, tuple(bad))
    assert "green" not in {run.results[s] for s in range(1, 6)} - {"withheld", "provisional"}
    assert {run.results[s] for s in range(2, 6)} == {"provisional"}


def test_after_widespread_checkpoints_are_withheld_and_the_ring_is_tried_again() -> None:
    run = run_of(lambda r, s, n, p: 10 + r if 4 <= s < 10 else 0, steps=16, per_node=1, nodes=5)
    assert run.outcomes[0] == (4, Outcome.WIDESPREAD)
    assert run.suspects == set()
    assert {run.gates[s] for s in range(4, 10)} == {GateReason.WIDESPREAD}
    assert {run.results[s] for s in range(4, 10)} == {"withheld"}
    assert run.gates[12] is GateReason.OK  # it has been clean again since step 10
    assert all(step % 2 == 0 for step in run.audited if 6 <= step <= 9)


def test_an_audit_that_is_not_clean_says_which_checkpoints_it_leaves_unconfirmed() -> None:
    run = run_of(sticky([3], since=4), steps=5)
    assert run.results[3] == "provisional"
    notes = [n for n in run.told(Note) if n.code == "checkpoints_condemned"]
    assert [(n.step, n.message.partition(",")[0]) for n in notes] == [
        (4, "the checkpoint of step 3 will never be confirmed")
    ]
    confirmed = [e.step for e in run.told(CheckpointEvent) if e.result.value == "confirmed"]
    assert 3 not in confirmed


def test_three_inconclusive_audits_in_a_row_ask_for_a_new_preflight() -> None:
    # Whoever replays the micro-batch of rank 0 comes to a number of their own.
    odd = lambda r, s, n, p: 100 * s + r if p == 0 and n and s in (4, 6, 8) else 0  # noqa: E731
    run = run_of(odd, per_node=1, nodes=6, steps=12)
    assert run.outcomes == [(step, Outcome.INCONCLUSIVE) for step in (4, 6, 8)]
    assert run.suspects == set()
    assert run.audited == [1, 2, 4, 6, 8, 9, 10, 12]
    assert run.coverage == [(2, Coverage.FULL), (10, Coverage.FULL)]
    assert run.gates[9] is GateReason.NOT_PREFLIGHTED
    assert run.gates[12] is GateReason.OK


def test_a_device_confirmed_in_three_audits_in_a_row_stops_the_run_under_skip_too() -> None:
    run = run_of(sticky([3], since=4))
    actions = [(v.step, v.action) for v in run.told(Verdict)][:3]
    assert actions == [(4, Action.SKIP), (6, Action.SKIP), (8, Action.STOP)]
    stop = run.told(Verdict)[2]
    assert "3 audits in a row have confirmed rank 3, so the run stops" in stop.reason


def test_replays_that_end_with_errors_are_told_once_and_tried_ever_more_rarely() -> None:
    broken = lambda r, s, n, p: "OutOfMemoryError: 2 GiB" if r == 1 and n and s >= 4 else 0  # noqa: E731
    run = run_of(broken, steps=40)
    assert run.outcomes == [(4, Outcome.NOT_RUN)]
    assert [s for s in run.audited if s >= 4] == [4, 6, 10, 18, 34]
    assert run.counted(Outcome.NOT_RUN) == 4
    assert run.suspects == set()
    assert run.gates[40] is GateReason.AUDIT_TOO_OLD


def test_errors_that_end_leave_no_waiting_behind() -> None:
    broken = lambda r, s, n, p: "ValueError: no" if r == 1 and n and s in (4, 6) else 0  # noqa: E731
    run = run_of(broken, steps=16)
    assert [s for s in run.audited if s >= 4] == [4, 6, 10, 12, 14, 16]
    assert run.outcomes == [(4, Outcome.NOT_RUN)]


def test_a_suspect_is_what_the_gate_says_until_an_audit_is_clean() -> None:
    run = run_of(sticky([3], since=4), steps=5)
    assert {run.gates[s] for s in (4, 5)} == {GateReason.SUSPECT}
    passing = run_of(lambda r, s, n, p: 13 if r == 3 and s == 4 else 0, steps=7)
    assert passing.gates[5] is GateReason.SUSPECT
    assert passing.gates[6] is GateReason.OK
