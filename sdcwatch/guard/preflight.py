"""Preflight: finds out on the first real steps what the audits can promise, before arming them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from sdcwatch.checks.determinism import software_facts
from sdcwatch.checks.payload import MicroBatch, PayloadDamaged, pack, packed_size, unpack
from sdcwatch.checks.replay import Replayer, ReplayOptions, ReplayResult
from sdcwatch.checks.serialise import NotTransportable
from sdcwatch.checks.trace import REPEATS, disputed_trace, repeated_trace
from sdcwatch.config import GuardConfig
from sdcwatch.core.arbitration import error_value
from sdcwatch.core.disputes import TRACED, Dispute, conclude_common, plan_common_traces
from sdcwatch.core.preflight import (
    ATTEMPTS,
    COMPARED_NOTHING,
    CommonJudgement,
    FirstRings,
    PreflightJudgement,
    SelfAudit,
    audited_share,
    judge_common,
    judge_preflight,
)
from sdcwatch.core.records import SHOWN, Coverage, Outcome
from sdcwatch.core.topology import Topology
from sdcwatch.core.trace_values import TraceOutcome
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.meeting import Meeting
from sdcwatch.guard.replay import (
    AuditPolicy,
    OwnStep,
    RingAudit,
    SegmentMemory,
    pack_or_nothing,
    result_table,
    table_of,
    value_of,
)
from sdcwatch.guard.sharing import gather_json, spread
from sdcwatch.guard.starting import environment_of
from sdcwatch.guard.tracing import MakeTrace, Tracing

MIB = 2**20
LARGE_BYTES = 256 * MIB
"""From here on the advice is to put the loss inside the module."""


class Preflight:
    """Runs on consecutive steps until it has an answer.

    Args:
        exchange: Gathers what each rank found.
        replay_packed: Recomputes one micro-batch from its bytes.
        names: Parameter names in the order of the gradient tables.
        topology: Who is where.
        memory: Told who has matched and who differs; shared with the audits.
        rounds: Steps on which everything must repeat.
        facts: What decides which kernels run on this rank.
        max_payload_bytes: Largest micro-batch that may travel.
        covers: How compiled code is covered, or "".
        trace: Traces the operations of a micro-batch, to say which does not repeat, or in which
            ranks differ; None for no.
        device: Where received micro-batches go; the CPU by default.
        widen: Captures more than so far, if it can, and says what; asked before coverage is lost.

    Attributes:
        coverage: The answer; None while there is none.
        deterministic: Deterministic kernels are needed, from the next step on.
        repeats: Recomputations without a mismatch, over all ranks.
        local: No replay has communicated.
        payload_bytes: Bytes of the largest micro-batch of any rank so far.
        micro_batches: Most micro-batches that a step of any rank had so far: an audit looks at one.
        common: What all ranks made of one micro-batch; None before they were asked.
        waits: The first audits were not clean: the next due step goes on, not the next step.
    """

    def __init__(  # noqa: PLR0913 - what a preflight is made of, most of it by name
        self,
        exchange: Exchange,
        replay_packed: Callable[[torch.Tensor, ReplayOptions], ReplayResult],
        names: Sequence[str],
        *,
        topology: Topology,
        memory: SegmentMemory,
        rounds: int,
        facts: Callable[[], dict[str, str]],
        max_payload_bytes: int,
        covers: str = "",
        trace: MakeTrace | None = None,
        device: torch.device | None = None,
        widen: Callable[[], str] = lambda: "",
    ) -> None:
        self._tracing = None if trace is None else Tracing(exchange, trace)
        self._exchange, self._replay_packed = exchange, replay_packed
        self._device = device or torch.device("cpu")
        self._max_payload_bytes, self._covers = max_payload_bytes, covers
        self._names, self._rounds, self._facts = tuple(names), rounds, facts
        self._topology, self._memory = topology, memory
        self.coverage: Coverage | None = None
        self.deterministic = False
        self.repeats = 0
        self.local = True
        self.payload_bytes = 0
        self.micro_batches = 1
        self.reason = ""
        self.notes: tuple[str, ...] = ()
        self.common: CommonJudgement | None = None
        self.waits = False
        self._passed = 0
        self._attempt = 1
        self._rings = FirstRings()
        self._idle = 0
        self._widen = widen

    @property
    def differing(self) -> tuple[int, ...]:
        """Ranks that the audits leave out."""
        return tuple(sorted(self._memory.history.differing))

    def restart(self, *, wait: bool = False, deterministic: bool = True) -> None:
        """Ask again, because an audit found that a clause does not hold any more.

        Args:
            wait: At the next due step, not at the next step.
            deterministic: The computation does not repeat: with deterministic kernels.
        """
        self._start_over()
        self.waits = self.waits or wait
        self.coverage, self.common = None, None
        self.deterministic = self.deterministic or deterministic

    def _start_over(self) -> None:
        self._passed, self.repeats, self._rings = 0, 0, FirstRings()

    def decide(self, coverage: Coverage, reason: str) -> None:
        """End with an answer that was found elsewhere."""
        self.coverage, self.reason = coverage, reason

    def run(self, step: int, own: OwnStep) -> bool:
        """One preflight step. Every rank calls it with its own step's results.

        Returns:
            Whether an audit over the ring is worth making on this step; tell `ringed` what it came
            to.
        """
        operation = f"the preflight of step {step}"
        message = {"audit": asdict(self._audit(own)), "bytes": self.payload_bytes, "of": own.of}
        rows = gather_json(self._exchange, message, operation)
        audits = [SelfAudit(**_tuples(row["audit"])) for row in rows]
        audits = self._traced(audits, own, operation)
        self.local = self.local and not any(audit.collectives for audit in audits)
        self.payload_bytes = max(row["bytes"] for row in rows)
        self.micro_batches = max(self.micro_batches, *(row["of"] for row in rows))
        judgement = judge_preflight(
            audits,
            deterministic=self.deterministic,
            topology=self._topology,
            attempt=self._attempt,
        )
        return self._take(judgement) and self._same_everywhere(own, operation)

    def ringed(self, outcome: Outcome) -> None:
        """The first audits over the ring: coverage is full after two in a row without a mismatch.

        A device that is named is evidence that everything else repeats, and ends it too.
        """
        self._rings = self._rings.after(outcome)
        self._idle = self._idle + 1 if outcome in COMPARED_NOTHING else 0
        self.waits = not self._rings.clean and not 0 < self._idle < ATTEMPTS
        named = outcome is Outcome.SUSPECT
        if self._passed >= self._rounds and (self._rings.enough or named):
            kernels = "deterministic kernels" if self.deterministic else "your own kernels"
            share = audited_share(self.micro_batches)
            self.notes = (*self.notes, *self._said_of_the_payload())
            self.decide(
                Coverage.FULL,
                f"step and replay are equal bit for bit on {self._passed} steps, with {kernels}"
                + (f"; audits look at {share}" if share else ""),
            )

    def _same_everywhere(self, own: OwnStep, operation: str) -> bool:
        """Every rank replays the micro-batch of rank 0, once; whether audits can be made."""
        if self.common is not None:
            return True
        message = pack_or_nothing(own.micro_batch)
        message = spread(self._exchange, message, operation)
        value, voteless = self._common_value(message)
        here = {**self._facts(), **_at_the_call(own)}
        told = {"value": value, "voteless": voteless, "facts": here, "more": dict(software_facts())}
        rows = gather_json(self._exchange, told, operation)
        # A replay that a thread disturbed, and that came to what another has, was not.
        sound = {row["value"] for row in rows if not row["voteless"]}
        common = judge_common(
            [r["value"] if not r["voteless"] or r["value"] in sound else None for r in rows],
            [{**row["facts"], **row["more"]} for row in rows],
            self._topology,
            deciding={name for row in rows for name in row["facts"]},
            known=self._memory.history.known(self._topology.ranks),
        )
        self.common = common = self._common_traced(common, message, operation)
        self._memory.compared(common)
        if common.coverage is not None:
            self.decide(common.coverage, common.reason)
            return False
        if self.differing or common.audited:
            self.notes = tuple(dict.fromkeys((*self.notes, common.reason)))
        return True

    def _common_traced(
        self, common: CommonJudgement, message: torch.Tensor, operation: str
    ) -> CommonJudgement:
        """With the operation in which ranks begin to differ. Every rank calls it."""
        disputes = plan_common_traces(common)
        if self._tracing is None or not disputes:
            return common
        held: dict[int, MicroBatch] = {}
        if any(self._exchange.rank in dispute.sides for dispute in disputes):
            with suppress(PayloadDamaged, NotTransportable):
                held[0] = unpack(message, self._device)
        options = ReplayOptions(any_environment=True, forbid_collectives=True, where_eager=True)
        findings = self._tracing.findings(disputes, held, operation, options)
        return conclude_common(common, findings)

    def _common_value(self, message: torch.Tensor) -> tuple[str | None, bool]:
        """What this rank makes of a micro-batch, and whether a thread has disturbed it."""
        try:
            asked = ReplayOptions(any_environment=True, forbid_collectives=True, where_eager=True)
            result = self._replay_packed(message, asked)
        except PayloadDamaged:
            return None, False
        if result.not_run:
            return None, False
        if result.error:
            return error_value(result.error), False
        return value_of(table_of(result, gradients=True)), bool(result.disturbed)

    def _take(self, judgement: PreflightJudgement) -> bool:
        self.notes = tuple(dict.fromkeys((*self.notes, *judgement.notes)))
        if judgement.out_of_memory:
            self._attempt += 1
            return False
        self._attempt = 1
        if judgement.coverage is None:
            self._start_over()
            self.deterministic = True
            return False
        if judgement.coverage is not Coverage.FULL:
            if wider := self._widen():
                self.notes = (*self.notes, f"{wider}: {judgement.reason}")
                self._start_over()
                return False
            self.decide(judgement.coverage, judgement.reason)
            return False
        self._passed += 1
        self.repeats += 2 * self._exchange.world_size
        return True

    def _traced(self, audits: Sequence[SelfAudit], own: OwnStep, operation: str) -> list[SelfAudit]:
        """With the operation that does not repeat, on ranks whose two replays differ."""
        restless = [a.rank for a in audits if not (a.loss_repeats and a.gradients_repeat)]
        if self._tracing is None or not restless:
            return list(audits)
        disputes = [Dispute(rank, rank) for rank in restless[:TRACED]]
        held = {self._exchange.rank: own.micro_batch}
        found = self._tracing.findings(disputes, held, operation)
        said = {r: f.said for r, f in found.items() if f.outcome is TraceOutcome.NONDETERMINISTIC}
        return [replace(audit, unrepeated=said.get(audit.rank, "")) for audit in audits]

    def _said_of_the_payload(self) -> tuple[str, ...]:
        """What an audit sends, and how compiled code is replayed."""
        sent = f"an audit sends {self.payload_bytes / MIB:,.2f} MiB from each rank to another"
        if self.payload_bytes >= LARGE_BYTES:
            sent += ": compute the loss inside the module, so that no large output travels"
        return (sent, f"a replay runs {self._covers}") if self._covers else (sent,)

    def _audit(self, own: OwnStep) -> SelfAudit:
        """Replay this rank's own step twice, from the bytes that another rank would get."""
        rank = self._exchange.rank
        if own.doors or own.problem:
            return SelfAudit(rank=rank, doors=own.doors, not_run=own.problem)
        try:
            if (size := packed_size(own.micro_batch)) > self._max_payload_bytes:
                return SelfAudit(rank=rank, not_run=_too_large(size, self._max_payload_bytes))
            message = pack(own.micro_batch)
        except NotTransportable as error:
            return SelfAudit(rank=rank, not_run=str(error))
        self.payload_bytes = max(self.payload_bytes, size)
        # Where the step has run one, a replay is only asked for the line: it is stopped there.
        watch = ReplayOptions(watch=True, forbid_collectives=True, where_eager=True)
        one = self._replay_packed(message, watch)
        two = one if one.collectives else self._replay_packed(message, watch)
        collectives = one.collectives or two.collectives
        if own.communicates and not collectives:
            collectives = ("in the step, and in no replay of it",)
        audit = SelfAudit(
            rank=rank,
            error="" if collectives else one.error or two.error,
            out_of_memory="OutOfMemory" in one.error + two.error,
            collectives=collectives,
            left_behind=(*(m for m in one.trace if m.startswith("parameter ")), *one.lost),
            hidden=one.hidden[:SHOWN],
            disturbed=one.disturbed or two.disturbed,
            not_run=one.not_run or two.not_run,
        )
        if one.outputs is None or two.outputs is None:
            return audit
        first, second = (table_of(result, gradients=True) for result in (one, two))
        differs = (result_table(own.outputs, own.gradients) != first).any(dim=1)
        names = [self._names[i] for i in differs[1:].nonzero().flatten().tolist()]
        # Equal bits do not depend on what a thread drew: exporters draw at any moment.
        unmoved = not differs.any() and torch.equal(first, second)
        return replace(
            audit,
            disturbed=() if unmoved else audit.disturbed,
            outputs_equal=not bool(differs[0]),
            gradients_equal=not names,
            loss_repeats=torch.equal(first[0], second[0]),
            gradients_repeat=torch.equal(first[1:], second[1:]),
            differing=tuple(names[:SHOWN]),
        )


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record from JSON, which knows no tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}


def _at_the_call(own: OwnStep) -> dict[str, str]:
    """Switches at the call of the step that decide bits; hooks on saved tensors may be exact."""
    calls = own.micro_batch.calls
    environment = calls[0].environment if calls else {}
    return {name: value for name, value in environment.items() if name != "saved_tensor_hooks"}


def _too_large(size: int, limit: int) -> str:
    return (
        f"a micro-batch is {size / MIB:,.0f} MiB, and max_payload_mb allows {limit / MIB:,.0f}: "
        "raise it, or compute the loss inside the module, so that no large output travels"
    )


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """Check 2.

    Attributes:
        preflight: Says what audits can promise, before they begin.
        audit: Makes one.
        off: Why there are none, or "".
    """

    preflight: Preflight
    audit: RingAudit
    off: str


def replay_check(
    config: GuardConfig,
    guarded: Guarded,
    exchange: Exchange,
    meeting: Meeting,
    replayer: Replayer,
) -> ReplayCheck:
    """Build check 2.

    Args:
        config: Of this rank.
        guarded: What is guarded.
        exchange: Between the ranks.
        meeting: What they agreed on.
        replayer: Repeats calls of the module.
    """
    spoken = guarded.spoken
    names = [spoken.get(name, name) for name, _ in guarded.compared]
    facts = partial(environment_of, guarded)
    rounds = config.preflight_micro_batches
    trace = partial(disputed_trace, replayer)
    policy = AuditPolicy(guarded.device, config.quorum, config.seed, facts, trace)
    memory = SegmentMemory(meeting.matched_earlier)
    return ReplayCheck(
        Preflight(
            exchange,
            replayer.run_packed,
            names,
            topology=meeting.topology,
            memory=memory,
            rounds=rounds,
            facts=facts,
            max_payload_bytes=config.max_payload_mb * MIB,
            covers=replayer.caller.covers,
            trace=partial(repeated_trace, replayer, repeats=REPEATS),
            device=guarded.device,
            widen=replayer.capture.entrances.widen,
        ),
        RingAudit(exchange, meeting.topology, replayer.run, names, policy=policy, memory=memory),
        meeting.audits_off,
    )
