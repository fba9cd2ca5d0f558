"""The protocol of an audit between threads: who is named, what is blamed on nobody, what it costs.

Results come from a table instead of a model, so that a planted value is the only thing that can
differ; packing, routing, arbitration, repeats and judgement are the real ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.core.history import History
from sdcwatch.core.records import Outcome
from sdcwatch.core.topology import RankInfo, Topology, draw_pairing
from sdcwatch.guard.replay import AuditPolicy, AuditResult, OwnStep, RingAudit, SegmentMemory
from sdcwatch.testing import ThreadExchange, ThreadHub, run_threads

sys.path.insert(0, str(Path(__file__).parent))
from in_memory import LIGHT

LAYOUTS = {"3x1": (1, 1, 1), "3x2": (2, 2, 2), "2+2+1": (2, 2, 1)}
NAMES = ("embedding", "head")
CPU = torch.device("cpu")
AUDITS = 1000


def topology_of(layout: str) -> Topology:
    nodes = [node for node, size in enumerate(LAYOUTS[layout]) for _ in range(size)]
    return Topology(
        tuple(
            RankInfo(rank=r, node=f"n{n}", host="h", local_rank=r, pid=r, instance_id=f"i{n}")
            for r, n in enumerate(nodes)
        )
    )


def everybody_matched(topology: Topology) -> SegmentMemory:
    """What preflight leaves where all ranks made the same of a common micro-batch."""
    memory = SegmentMemory()
    memory.history = History(matched=frozenset(range(topology.world_size)))
    return memory


def micro_batch(producer: int) -> MicroBatch:
    return MicroBatch(signatures=str(producer))


def results(producer: int, error: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Digests of a rank's outputs and gradients; any `error` but 0 makes a gradient wrong."""
    return torch.tensor([[producer, 7]]), torch.tensor([[producer, 1], [producer, 2 + error]])


@dataclass
class Faults:
    """What each rank gets wrong.

    Attributes:
        own: Errors of ranks in their own step.
        replays: Errors of ranks in every replay.
        broken: What the replay of a rank ends with.
        disturbed: Ranks in whose replays a thread draws from `random`.
    """

    own: Mapping[int, int] = field(default_factory=dict)
    replays: Mapping[int, int] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)
    disturbed: Sequence[int] = ()

    def step(self, rank: int) -> OwnStep:
        return OwnStep(micro_batch(rank), *results(rank, self.own.get(rank, 0)))

    def replay(self, rank: int, of: MicroBatch) -> ReplayResult:
        if rank in self.broken:
            return ReplayResult(error=self.broken[rank])
        disturbed = ("random",) if rank in self.disturbed else ()
        values = results(int(of.signatures), self.replays.get(rank, 0))
        return ReplayResult(*values, disturbed=disturbed)


def audit(
    layout: str,
    faults: Faults,
    *,
    step: int = 1,
    quorum: int = 2,
    matched: bool = True,
    exchange: Callable[[ThreadExchange], ThreadExchange] = lambda e: e,
) -> tuple[list[AuditResult], list[list[str]]]:
    """One audit; every rank's result, and the calls that it made to the exchange."""
    topology = topology_of(layout)
    used: list[ThreadExchange] = []

    def body(given: ThreadExchange) -> tuple[AuditResult, list[str]]:
        own = exchange(given)
        used.append(own)
        ring = RingAudit(
            own,
            topology,
            lambda m, options: faults.replay(own.rank, m),
            NAMES,
            policy=AuditPolicy(CPU, quorum=quorum),
            memory=everybody_matched(topology) if matched else SegmentMemory(),
        )
        return ring.run(step, faults.step(own.rank)), own.calls

    pairs = run_threads(topology.world_size, body)
    return [result for result, _ in pairs], [calls for _, calls in pairs]


def agreed(rows: Sequence[AuditResult]) -> AuditResult:
    """The result, after checking that every rank reached the same."""
    assert all(r.judgement == rows[0].judgement for r in rows)
    assert all(r.comparisons == rows[0].comparisons for r in rows)
    return rows[0]


def every_rank() -> list[tuple[str, int]]:
    return [(layout, rank) for layout, sizes in LAYOUTS.items() for rank in range(sum(sizes))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_audit_passes_with_two_routes_and_one_maximum(layout: str) -> None:
    rows, calls = audit(layout, Faults())
    result = agreed(rows)
    assert (result.judgement.outcome, result.comparisons) == (Outcome.PASS, ())
    assert result.total == sum(LAYOUTS[layout])
    assert all(made == ["route", "route", "max_int64s"] for made in calls)


@pytest.mark.parametrize(("layout", "rank"), every_rank())
def test_a_rank_that_is_wrong_in_both_of_its_comparisons_is_named(layout: str, rank: int) -> None:
    result = agreed(audit(layout, Faults(own={rank: 5}, replays={rank: 9}))[0])
    (named,) = result.judgement.named
    pairing = draw_pairing(topology_of(layout), step=1, seed=0)
    assert result.judgement.outcome is Outcome.SUSPECT
    assert (named.rank, named.mismatches, named.comparisons, named.reproduced) == (rank, 2, 2, True)
    assert set(named.partners) == {pairing.replayer[rank], pairing.producer[rank]}
    assert {c.wrong for c in result.comparisons} == {(rank,)}
    assert {c.tensors for c in result.comparisons} == {("head",)}


@pytest.mark.parametrize("rank", range(6))
def test_a_rank_that_has_never_matched_differs_and_is_no_suspect(rank: int) -> None:
    faults = Faults(own={rank: 5}, replays={rank: 9})
    judgement = agreed(audit("3x2", faults, matched=False)[0]).judgement
    assert (judgement.outcome, judgement.named) == (Outcome.DIFFERS, ())
    assert judgement.differing == (rank,)


@pytest.mark.parametrize(("layout", "rank"), every_rank())
def test_a_rank_whose_replays_are_wrong_is_named_with_one_bad_comparison(
    layout: str, rank: int
) -> None:
    result = agreed(audit(layout, Faults(replays={rank: 9}))[0])
    (named,) = result.judgement.named
    assert (named.rank, named.mismatches, named.comparisons, named.reproduced) == (rank, 1, 2, True)
    assert [(c.replayer, c.wrong) for c in result.comparisons] == [(rank, (rank,))]


@pytest.mark.parametrize(("layout", "rank"), every_rank())
def test_a_rank_that_was_wrong_once_in_its_own_step_gets_a_strike_and_no_name(
    layout: str, rank: int
) -> None:
    judgement = agreed(audit(layout, Faults(own={rank: 5}))[0]).judgement
    assert (judgement.outcome, judgement.named) == (Outcome.NOT_REPRODUCED, ())
    assert [s.rank for s in judgement.strikes] == [rank]
    assert judgement.ranks == (rank,)


@pytest.mark.parametrize("quorum", [2, 3])
def test_two_ranks_with_values_of_their_own_are_both_named(quorum: int) -> None:
    faults = Faults(own={1: 5, 4: 6}, replays={1: 7, 4: 8})
    judgement = agreed(audit("3x2", faults, quorum=quorum)[0]).judgement
    assert [n.rank for n in judgement.named] == [1, 4]


def test_a_wrong_output_is_a_mismatch_of_the_outputs() -> None:
    def replay(rank: int, of: MicroBatch) -> ReplayResult:
        outputs, gradients = results(int(of.signatures))
        return ReplayResult(outputs + (rank == 2), gradients)

    faults = Faults()
    faults.replay = replay  # type: ignore[method-assign]
    result = agreed(audit("3x2", faults)[0])
    assert [n.rank for n in result.judgement.named] == [2]
    assert [(c.outputs_equal, c.tensors) for c in result.comparisons] == [(False, ())]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("text", ["OutOfMemoryError: 2 GiB", "ValueError: only on this machine"])
def test_a_replay_that_ends_with_an_error_is_not_run_and_names_nobody(rank: int, text: str) -> None:
    result = agreed(audit("3x1", Faults(broken={rank: text}))[0])
    assert result.judgement.outcome is Outcome.NOT_RUN
    assert (result.judgement.named, result.judgement.strikes) == ((), ())
    assert f"on rank {rank} ended with: {text}" in result.judgement.reason
    assert [c.note for c in result.comparisons] == [text]


def test_replays_that_end_with_an_error_on_every_rank_are_not_run_either() -> None:
    broken = dict.fromkeys(range(6), "ValueError: no")
    judgement = agreed(audit("3x2", Faults(broken=broken))[0]).judgement
    assert (judgement.outcome, judgement.named) == (Outcome.NOT_RUN, ())


def test_a_disturbed_replay_that_came_to_the_same_bits_is_a_match() -> None:
    result = agreed(audit("3x1", Faults(disturbed=range(3)))[0])
    assert (result.judgement.outcome, result.comparisons) == (Outcome.PASS, ())


def test_a_disturbed_replay_that_differs_has_no_vote() -> None:
    result = agreed(audit("3x1", Faults(replays={1: 9}, disturbed=[1]))[0])
    assert result.judgement.outcome is Outcome.NOT_RUN
    assert (result.judgement.named, result.judgement.strikes) == ((), ())
    assert "random disturbed by another thread: no vote" in result.judgement.reason


class DamagingExchange(ThreadExchange):
    """Damages one byte of what one rank receives in one of its routes."""

    def __init__(self, given: ThreadExchange, hub: ThreadHub, which: int) -> None:
        super().__init__(hub, given.rank)
        self._which, self._routed = which, 0

    def route(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Sequence[int], where: str
    ) -> dict[int, torch.Tensor]:
        received = super().route(outgoing, incoming, where)
        if self._routed == self._which:
            for payload in received.values():
                payload[payload.numel() // 2] ^= 4
        self._routed += 1
        return received


@pytest.mark.parametrize("which", [0, 1], ids=["micro-batch", "results"])
@pytest.mark.parametrize("receiver", range(3))
def test_what_arrives_damaged_is_called_transport_and_names_no_device(
    which: int, receiver: int
) -> None:
    def damage(given: ThreadExchange) -> ThreadExchange:
        if given.rank != receiver:
            return given
        return DamagingExchange(given, given._hub, which)

    result = agreed(audit("3x1", Faults(), exchange=damage)[0])
    assert (result.judgement.outcome, result.judgement.named) == (Outcome.TRANSPORT, ())
    (comparison,) = result.comparisons
    assert (comparison.replayer, comparison.note) == (receiver, "transport")
    pair = f"the payload of rank {comparison.producer} to rank {receiver} arrived damaged"
    assert pair in result.judgement.reason


def test_a_micro_batch_that_does_not_pickle_is_not_run_and_says_where() -> None:
    faults = Faults()
    unpicklable = MicroBatch(calls=(lambda: None,))  # type: ignore[arg-type]
    step = faults.step
    faults.step = lambda rank: (  # type: ignore[method-assign]
        OwnStep(unpicklable, *results(1)) if rank == 1 else step(rank)
    )
    judgement = agreed(audit("3x1", faults)[0]).judgement
    assert (judgement.outcome, judgement.named) == (Outcome.NOT_RUN, ())
    assert "does not pickle on the sending rank" in judgement.reason


class Noise:
    """Computations that deviate with some probability, to a value never seen before."""

    def __init__(self, probability: float, rank: int) -> None:
        self._probability, self._random = probability, random.Random(1000 + rank)
        self._deviations = 0
        self._rank = rank

    def error(self) -> int:
        if self._random.random() >= self._probability:
            return 0
        self._deviations += 1
        return 1 + 1000 * self._deviations + self._rank


def noisy_audits(layout: str, probability: float, audits: int) -> list[tuple[Outcome, int, str]]:
    """Outcome, number of named ranks and reason of each audit; strikes are forgotten as in a run.

    A run asks preflight again after `NONDETERMINISTIC` and `WIDESPREAD`; here the next audit
    follows at once, as if preflight had found nothing, which is the harder case.
    """
    topology = topology_of(layout)

    def body(exchange: ThreadExchange) -> list[tuple[Outcome, int, str]]:
        noise = Noise(probability, exchange.rank)

        def replay(of: MicroBatch, options: ReplayOptions) -> ReplayResult:
            return ReplayResult(*results(int(of.signatures), noise.error()))

        memory = everybody_matched(topology)
        ring = RingAudit(exchange, topology, replay, NAMES, policy=AuditPolicy(CPU), memory=memory)
        said = []
        for step in range(1, audits + 1):
            own = OwnStep(micro_batch(exchange.rank), *results(exchange.rank, noise.error()))
            judgement = ring.run(step, own).judgement
            if judgement.outcome in (Outcome.NONDETERMINISTIC, Outcome.WIDESPREAD):
                ring.forget_strikes()
            said.append((judgement.outcome, len(judgement.named), judgement.reason))
        return said

    rows = run_threads(topology.world_size, body)
    assert all(row == rows[0] for row in rows)
    return rows[0]


@pytest.fixture
def light_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels is not framed or digested, so that a thousand audits take seconds."""
    for name, function in LIGHT.items():
        monkeypatch.setattr(f"sdcwatch.guard.replay.{name}", function)


@pytest.mark.usefixtures("light_payloads")
@pytest.mark.parametrize("probability", [0.01, 0.2, 1.0], ids=["1 %", "20 %", "unseeded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_computation_that_does_not_repeat_names_nobody_in_a_thousand_audits(
    layout: str, probability: float
) -> None:
    # 1,000 audits for each kind of noise, over the three layouts together.
    said = noisy_audits(layout, probability, AUDITS // len(LAYOUTS) + 1)
    assert [row for row in said if row[1] or row[0] is Outcome.SUSPECT] == []
    assert sum(row[0] is not Outcome.PASS for row in said) >= 3
