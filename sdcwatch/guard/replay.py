"""Check 2, the ring replay audit: the protocol of one audit over an `Exchange`.

Every rank sends its micro-batch to a rank on another node and recomputes the one it receives; loss
bits and gradient fingerprints must be equal. On a mismatch ranks on third nodes recompute too, and
before anybody is named, the rank and some that agree recompute again. Who is named is decided in
`sdcwatch.core.replay`; this module only moves facts.

Collectives on a clean audit: two point-to-point rounds and one MAX of one word. Source of the
scheme: docs/protocol.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sdcwatch.checks.fingerprint import digest_tensor
from sdcwatch.checks.payload import MicroBatch, PayloadDamaged, pack, unpack
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.checks.serialise import NotTransportable
from sdcwatch.core.arbitration import REPEATS
from sdcwatch.core.disputes import conclude_audit, plan_audit_traces
from sdcwatch.core.history import Device, History
from sdcwatch.core.preflight import CommonJudgement, environment_differences
from sdcwatch.core.records import SHOWN, Cause, Comparison, Outcome, Phase
from sdcwatch.core.replay import (
    AuditFacts,
    AuditJudgement,
    Mismatch,
    Repeat,
    asks_everybody,
    compared_only,
    error_value,
    is_widespread,
    judge_audit,
    plan_arbitration,
    plan_repeats,
    remember,
    settle,
    usable_facts,
)
from sdcwatch.core.text import list_names
from sdcwatch.core.topology import Pairing, Topology, draw_pairing
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.sharing import gather_json
from sdcwatch.guard.tracing import MakeTrace, Tracing

Replay = Callable[[MicroBatch, ReplayOptions], ReplayResult]
COMPARISONS_SHOWN = 64
"""Comparisons that did not match, of which a verdict carries the details."""
COLLECTIVE = "the forward ran a collective"
STOPPING = ReplayOptions(forbid_collectives=True, where_eager=True)
"""Of replays that some ranks make and others do not: one that communicates would wait for ever."""
SLACK = 3.0
"""How much slower than this rank's slowest replay another rank's may be."""


@dataclass(frozen=True, slots=True)
class OwnStep:
    """What a rank computed in its own step.

    Attributes:
        micro_batch: What it computed from.
        outputs: Digests of the outputs that got a gradient, int64 (k, 2).
        gradients: Fingerprints of this backward's gradients, int64 (parameters, 2); None to compare
            the outputs only.
        doors: Ways by which gradients entered other than by the outputs.
        problem: Why it must not be compared for another reason, or "".
        communicates: The call has run a collective.
        of: Micro-batches of the step, of which this is one.
        moved: Names of weights that were written between the call and the end of its backward.
    """

    micro_batch: MicroBatch
    outputs: torch.Tensor
    gradients: torch.Tensor | None
    doors: tuple[str, ...] = ()
    problem: str = ""
    communicates: bool = False
    of: int = 1
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What one audit came to, the same on every rank.

    Attributes:
        judgement: Outcome, reason, and who is named.
        comparisons: Those that did not match.
        total: Comparisons made.
        notes: What ranks do not repeat, and differences between environments.
        seconds: Wall time per phase on this rank.
        separating: Facts that separate ranks that differ from the start.
        why_differing: Why they do, as far as was found out.
    """

    judgement: AuditJudgement
    comparisons: tuple[Comparison, ...]
    total: int
    notes: tuple[str, ...] = ()
    seconds: dict[Phase, float] = field(default_factory=dict)
    separating: tuple[str, ...] = ()
    why_differing: Cause = Cause.UNKNOWN


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one replayer found; crosses ranks as JSON."""

    producer: int
    replayer: int
    producer_value: str = ""
    replayer_value: str = ""
    outputs_equal: bool = True
    differing: tuple[int, ...] = ()
    differing_total: int = 0
    error: str = ""
    transport: bool = False

    @property
    def matches(self) -> bool:
        return self.producer_value == self.replayer_value and not (self.error or self.transport)

    @property
    def as_mismatch(self) -> Mismatch:
        value = error_value(self.error) if self.error else self.replayer_value
        return Mismatch(self.producer, self.replayer, self.producer_value, value)


@dataclass(frozen=True, slots=True)
class AuditPolicy:
    """What does not change from audit to audit.

    Attributes:
        device: Where received micro-batches go.
        quorum: Different ranks that must agree before another is named.
        seed: Seed of the pairing.
        facts: What decides which kernels run on this rank.
        trace: Traces the operations of a micro-batch before anybody is named; None to go by the
            results alone.
    """

    device: torch.device
    quorum: int = 2
    seed: int = 0
    facts: Callable[[], dict[str, str]] = dict
    trace: MakeTrace | None = None


class SegmentMemory:
    """Holds what a segment remembers, once for all checks.

    Args:
        matched_earlier: Devices that matched others in earlier segments of the run.

    Attributes:
        history: Replaced after each check, with the same value on every rank.
        separating: Facts that separate the ranks that differ from the others.
        why_differing: Why they do, as far as was found out.
    """

    def __init__(self, matched_earlier: frozenset[Device] = frozenset()) -> None:
        self.history = History(matched_earlier=matched_earlier)
        self.separating: tuple[str, ...] = ()
        self.why_differing = Cause.UNKNOWN

    def compared(self, common: CommonJudgement) -> None:
        """All ranks have replayed one micro-batch."""
        self.separating, self.why_differing = common.separating, common.cause
        self.history = self.history.compared(matched=common.matched, differing=common.differing)


class RingAudit:
    """Runs audits.

    Args:
        exchange: Moves the payloads.
        topology: Who is where.
        replay: Recomputes one micro-batch; returns errors as results, never raises.
        names: Parameter names in the order of the gradient tables.
        policy: Quorum and seed.
        memory: What the segment remembers; shared with check 1.
    """

    def __init__(
        self,
        exchange: Exchange,
        topology: Topology,
        replay: Replay,
        names: Sequence[str],
        *,
        policy: AuditPolicy,
        memory: SegmentMemory | None = None,
    ) -> None:
        self.memory = memory or SegmentMemory()
        self._exchange, self._topology, self._replay = exchange, topology, replay
        self._names, self._device = tuple(names), policy.device
        self._quorum, self._seed, self._facts = policy.quorum, policy.seed, policy.facts
        self._tracing = None if policy.trace is None else Tracing(exchange, policy.trace)
        self._held: dict[int, MicroBatch] = {}
        self._seconds: dict[Phase, float] = {}
        self._slowest = 0.0

    @property
    def history(self) -> History:
        """What this segment remembers from check to check."""
        return self.memory.history

    def forget_strikes(self) -> None:
        """A new preflight has been asked for: streaks start over."""
        self.memory.history = self.history.preflighted()

    def run(self, step: int, own: OwnStep) -> AuditResult:
        """One audit. Every rank calls it at the same step with its own step's results.

        Raises:
            RankGone: A rank did not answer within the deadline.
        """
        operation = f"the audit of step {step}"
        self._seconds = {}
        self._held = {self._exchange.rank: own.micro_batch}
        pairing = draw_pairing(self._topology, step=step, seed=self._seed)
        try:
            finding = self._compare(pairing, own, operation)
            trouble = self._exchange.max_int64s((int(not finding.matches),), operation)[0]
            if not trouble:
                world = self._topology.world_size
                facts = AuditFacts(
                    comparisons_total=world,
                    pairing=pairing,
                    separating=self.memory.separating,
                )
                judgement = judge_audit(facts, self._topology, history=self.history)
                result = self._result(judgement, (), world)
            else:
                facts, result = self._blame(finding, pairing, own, operation)
            self.memory.history = remember(
                self.history, facts, result.judgement, self._topology, step=step
            )
            return result
        finally:
            self._held = {}

    def _compare(self, pairing: Pairing, own: OwnStep, operation: str) -> _Finding:
        me = self._exchange.rank
        to, producer = pairing.replayer[me], pairing.producer[me]
        started = time.perf_counter()
        table = result_table(own.outputs, own.gradients)
        packed = pack_or_nothing(own.micro_batch)
        payload = self._exchange.route({to: packed}, [producer], operation)[producer]
        theirs = self._exchange.route({to: frame_table(table)}, [producer], operation)[producer]
        self._spent(Phase.EXCHANGE, started)
        received = unpack_or_error(payload, self._device)
        try:
            expected = unframe_table(theirs)
        except PayloadDamaged:
            received = "transport"
        if isinstance(received, str):
            damaged = received == "transport"
            error = "" if damaged else received
            return _Finding(producer, me, transport=damaged, error=error)
        self._held[producer] = received
        # Every rank replays here, so that nobody waits; what has communicated has no vote.
        got, error = self._recompute(
            producer,
            gradients=own.gradients is not None,
            expected=expected,
            options=ReplayOptions(),
        )
        return self._finding(producer, expected, got, error)

    def _finding(
        self, producer: int, expected: torch.Tensor, got: torch.Tensor | None, error: str
    ) -> _Finding:
        me = self._exchange.rank
        if got is None:
            return _Finding(producer, me, producer_value=value_of(expected), error=error)
        differs = (expected != got).any(dim=1)
        differing = differs[1:].nonzero().flatten().tolist()
        return _Finding(
            producer,
            me,
            producer_value=value_of(expected),
            replayer_value=value_of(got),
            outputs_equal=not bool(differs[0]),
            differing=tuple(differing[:SHOWN]),
            differing_total=len(differing),
        )

    def _recompute(
        self,
        producer: int,
        *,
        gradients: bool,
        expected: torch.Tensor | None = None,
        options: ReplayOptions = STOPPING,
    ) -> tuple[torch.Tensor | None, str]:
        """The table of one more replay; None and why if it has no vote.

        One that a thread disturbed but that came to `expected` did not depend on what was drawn:
        exporters and loggers draw from `random` at any moment.
        """
        started = time.perf_counter()
        result = self._replay(self._held[producer], options)
        self._slowest = max(self._slowest, time.perf_counter() - started)
        self._spent(Phase.REPLAY, started)
        if not (problem := problem_of(result)):
            return table_of(result, gradients=gradients), ""
        if expected is not None and not (result.error or result.not_run or result.collectives):
            table = table_of(result, gradients=gradients)
            if torch.equal(table, expected):
                return table, ""
        return None, problem

    def _blame(
        self, finding: _Finding, pairing: Pairing, own: OwnStep, operation: str
    ) -> tuple[AuditFacts, AuditResult]:
        started = time.perf_counter()
        gradients = own.gradients is not None
        rows = gather_json(self._exchange, _as_json(finding), operation)
        findings = [_from_json(row) for row in rows]
        facts = AuditFacts(
            comparisons_total=len(findings),
            mismatches=tuple(f.as_mismatch for f in findings if not (f.matches or f.transport)),
            transport=tuple(sorted(f.producer for f in findings if f.transport)),
            pairing=pairing,
            separating=self.memory.separating,
        )
        notes: list[str] = []
        usable = usable_facts(facts, self.history)
        if is_widespread(
            compared_only(usable.mismatches),
            self._topology,
            comparisons_total=usable.comparisons_total,
        ):
            notes += self._survey(own, operation, gradients=gradients)
        elif usable.mismatches:
            arbitration = self._arbitrate(usable, own, operation, gradients=gradients)
            facts = replace(
                facts,
                arbitration=arbitration,
                repeats=self._repeat(usable, arbitration, operation, gradients=gradients),
            )
        judgement = self._judge(facts)
        if asks_everybody(judgement, self.history):
            restless = self._restless(own, operation, gradients=gradients)
            facts = replace(facts, restless=restless)
            judgement = self._judge(facts)
        judgement = self._traced(judgement, facts, operation)
        self._spent(Phase.BLAME, started)
        comparisons = tuple(
            self._record(f, facts.arbitration, judgement) for f in findings if not f.matches
        )[:COMPARISONS_SHOWN]
        if judgement.outcome is Outcome.DIFFERS and judgement.cause is not Cause.NONE:
            self.memory.why_differing = judgement.cause
        return facts, self._result(judgement, comparisons, len(findings), tuple(notes))

    def _result(
        self,
        judgement: AuditJudgement,
        comparisons: tuple[Comparison, ...],
        total: int,
        notes: tuple[str, ...] = (),
    ) -> AuditResult:
        memory = self.memory
        why = memory.separating, memory.why_differing
        return AuditResult(judgement, comparisons, total, notes, dict(self._seconds), *why)

    def _judge(self, facts: AuditFacts) -> AuditJudgement:
        return judge_audit(facts, self._topology, quorum=self._quorum, history=self.history)

    def _traced(
        self, judgement: AuditJudgement, facts: AuditFacts, operation: str
    ) -> AuditJudgement:
        """Before anybody is named: in which operation results began to differ."""
        if self._tracing is None:
            return judgement
        disputes = plan_audit_traces(judgement, facts)
        return conclude_audit(judgement, self._tracing.findings(disputes, self._held, operation))

    def _restless(self, own: OwnStep, operation: str, *, gradients: bool) -> tuple[int, ...]:
        """Ranks that do not get their own step's result in every repeat of it."""
        expected = value_of(result_table(own.outputs, own.gradients))
        wrong = False
        for _ in range(REPEATS):
            table, _ = self._recompute(self._exchange.rank, gradients=gradients)
            wrong = wrong or (table is not None and value_of(table) != expected)
        rows = gather_json(self._exchange, wrong, operation, extra_seconds=self._patience(REPEATS))
        return tuple(rank for rank, row in enumerate(rows) if row)

    def _arbitrate(
        self, facts: AuditFacts, own: OwnStep, operation: str, *, gradients: bool
    ) -> dict[int, dict[int, str]]:
        me = self._exchange.rank
        plan = plan_arbitration(
            facts.mismatches,
            self._topology,
            quorum=self._quorum,
            comparisons_total=facts.comparisons_total,
            left_out=self.history.differing,
        )
        outgoing = {a: pack_or_nothing(own.micro_batch) for a in plan.get(me, ())}
        incoming = [p for p, arbiters in plan.items() if me in arbiters]
        received = self._exchange.route(outgoing, incoming, operation)
        values: dict[str, str] = {}
        for producer, payload in received.items():
            micro_batch = unpack_or_error(payload, self._device)
            if isinstance(micro_batch, str):
                continue
            self._held[producer] = micro_batch
            table, _ = self._recompute(producer, gradients=gradients)
            if table is not None:
                values[str(producer)] = value_of(table)
        rows = gather_json(
            self._exchange, values, operation, extra_seconds=self._patience(len(plan))
        )
        arbitration: dict[int, dict[int, str]] = {p: {} for p in plan}
        for arbiter, row in enumerate(rows):
            for producer_text, value in row.items():
                arbitration[int(producer_text)][arbiter] = value
        return arbitration

    def _repeat(
        self,
        facts: AuditFacts,
        arbitration: dict[int, dict[int, str]],
        operation: str,
        *,
        gradients: bool,
    ) -> dict[tuple[int, int], tuple[str, ...]]:
        """Those to be named, and those they are measured against, compute again."""
        me = self._exchange.rank
        domains = self._topology.domains
        plan = plan_repeats(
            settle(facts.mismatches, arbitration, quorum=self._quorum, domains=domains)
        )
        own: dict[str, list[str]] = {}
        for repeat in plan:
            if repeat.rank != me or repeat.producer not in self._held:
                continue
            values = []
            for _ in range(repeat.times):
                table, error = self._recompute(repeat.producer, gradients=gradients)
                values.append(error_value(error) if table is None else value_of(table))
            own[str(repeat.producer)] = values
        rows = gather_json(
            self._exchange, own, operation, extra_seconds=self._patience(_most_replays(plan))
        )
        return {
            (rank, int(producer)): tuple(values)
            for rank, row in enumerate(rows)
            for producer, values in row.items()
        }

    def _patience(self, replays: int) -> float:
        """Seconds that a rank with so many replays may take, while this one only waits."""
        return SLACK * replays * self._slowest

    def _survey(self, own: OwnStep, operation: str, *, gradients: bool) -> list[str]:
        """Too many mismatches for a broken device: does each rank repeat itself, and in what?"""
        table, error = self._recompute(self._exchange.rank, gradients=gradients)
        same = table is not None and value_of(table) == value_of(
            result_table(own.outputs, own.gradients)
        )
        message = {"same": same, "error": error, "environment": self._facts()}
        rows = gather_json(self._exchange, message, operation)
        notes = []
        unequal = [r for r, row in enumerate(rows) if not row["same"]]
        if unequal:
            notes.append(f"ranks {unequal} do not repeat their own micro-batch")
        notes += environment_differences([row["environment"] for row in rows])
        return notes

    def _record(
        self,
        finding: _Finding,
        arbitration: Mapping[int, Mapping[int, str]],
        judgement: AuditJudgement,
    ) -> Comparison:
        pair = (finding.producer, finding.replayer)
        wrong = judgement.settlement.wrong
        return Comparison(
            producer=finding.producer,
            replayer=finding.replayer,
            outputs_equal=finding.outputs_equal,
            tensors=tuple(self._names[i] for i in finding.differing),
            tensors_differing=finding.differing_total,
            arbiters=tuple(sorted(arbitration.get(finding.producer, {}))),
            wrong=tuple(r for r in pair if finding.producer in wrong.get(r, ())),
            note="transport" if finding.transport else finding.error,
        )

    def _spent(self, phase: Phase, started: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started


def _most_replays(plan: Sequence[Repeat]) -> int:
    """Replays of the rank that has most of them to do."""
    each = Counter[int]()
    for repeat in plan:
        each[repeat.rank] += repeat.times
    return max(each.values(), default=0)


def _as_json(finding: _Finding) -> dict[str, object]:
    return {name: getattr(finding, name) for name in _Finding.__dataclass_fields__}


def _from_json(data: dict[str, object]) -> _Finding:
    return _Finding(**{**data, "differing": tuple(data["differing"])})  # type: ignore[arg-type]


def pack_or_nothing(micro_batch: MicroBatch) -> torch.Tensor:
    """The packed micro-batch, or no bytes if it does not pickle: the receiver reports that."""
    try:
        return pack(micro_batch)
    except NotTransportable:
        return torch.empty(0, dtype=torch.uint8, device="cpu")


def unpack_or_error(payload: torch.Tensor, device: torch.device) -> MicroBatch | str:
    """The micro-batch in `payload`, or why it cannot be read here; "transport" if damaged."""
    if payload.numel() == 0:
        return "NotTransportable: the batch does not pickle on the sending rank"
    try:
        return unpack(payload, device)
    except PayloadDamaged:
        return "transport"
    except NotTransportable as error:
        return f"NotTransportable: {error}"


def problem_of(result: ReplayResult) -> str:
    """Why a replay has no vote, or ""."""
    if result.collectives:
        return f"{COLLECTIVE} in a replay ({list_names(result.collectives)})"
    if result.error or result.not_run:
        return result.error or result.not_run
    if result.disturbed:
        return f"{list_names(result.disturbed)} disturbed by another thread: no vote"
    return ""


def table_of(result: ReplayResult, *, gradients: bool) -> torch.Tensor:
    """What a replay that has a vote came to, in the form of `result_table`."""
    assert result.outputs is not None
    table = result_table(result.outputs, result.gradients if gradients else None)
    if not result.inner_equal:  # of the producer's own step it is equal by definition
        table[0] += 1
    return table


def result_table(outputs: torch.Tensor, gradients: torch.Tensor | None) -> torch.Tensor:
    """One digest of all outputs and the fingerprints of gradients: int64 (1 + n, 2), on the CPU."""
    head = digest_tensor(outputs.cpu()).reshape(1, 2)
    return head if gradients is None else torch.cat([head, gradients.cpu()])


def value_of(table: torch.Tensor) -> str:
    """One opaque word that is equal exactly if two tables are."""
    return "-".join(f"{v & (2**64 - 1):016x}" for v in digest_tensor(table).tolist())


def frame_table(table: torch.Tensor) -> torch.Tensor:
    """A table and its own fingerprint as bytes."""
    return torch.cat([table, digest_tensor(table).reshape(1, 2)]).view(torch.uint8).flatten()


def unframe_table(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `frame_table`.

    Raises:
        PayloadDamaged: The fingerprint does not fit.
    """
    words = data.view(torch.int64).reshape(-1, 2)
    table = words[:-1]
    if not torch.equal(digest_tensor(table), words[-1]):
        msg = "Expected the table that was sent, but its fingerprint differs. Check the network."
        raise PayloadDamaged(msg)
    return table
