"""Preflight: finds out on the first real steps what the audits can promise, before arming them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sdcwatch.checks.payload import pack, packed_size
from sdcwatch.checks.replay import ReplayOptions, ReplayResult
from sdcwatch.checks.serialise import NotTransportable
from sdcwatch.core.disputes import TRACED, Dispute
from sdcwatch.core.preflight import (
    PreflightJudgement,
    SelfAudit,
    environment_differences,
    judge_preflight,
)
from sdcwatch.core.records import SHOWN, Coverage
from sdcwatch.core.trace_values import TraceOutcome
from sdcwatch.guard.exchange import Exchange, gather_json
from sdcwatch.guard.replay import OwnStep, RingAudit, result_table, table_of
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
        rounds: Steps on which everything must repeat.
        facts: What decides which kernels run on this rank.
        max_payload_bytes: Largest micro-batch that may travel.
        covers: How compiled code is covered, or "".
        trace: Traces the operations of a micro-batch, to say which does not repeat; None for no.

    Attributes:
        coverage: The answer; None while there is none.
        deterministic: Deterministic kernels are needed, from the next step on.
        repeats: Recomputations without a mismatch, over all ranks.
        local: No replay has communicated.
        payload_bytes: Bytes of the largest micro-batch of any rank so far.
    """

    def __init__(  # noqa: PLR0913 - what a preflight is made of, most of it by name
        self,
        exchange: Exchange,
        replay_packed: Callable[[torch.Tensor, ReplayOptions], ReplayResult],
        names: Sequence[str],
        *,
        rounds: int,
        facts: Callable[[], dict[str, str]],
        max_payload_bytes: int,
        covers: str = "",
        trace: MakeTrace | None = None,
    ) -> None:
        self._tracing = None if trace is None else Tracing(exchange, trace)
        self._exchange, self._replay_packed = exchange, replay_packed
        self._max_payload_bytes, self._covers = max_payload_bytes, covers
        self._names, self._rounds, self._facts = tuple(names), rounds, facts
        self.coverage: Coverage | None = None
        self.deterministic = False
        self.repeats = 0
        self.local = True
        self.payload_bytes = 0
        self.reason = ""
        self.notes: tuple[str, ...] = ()
        self._passed = 0

    def restart(self) -> None:
        """Ask again, because an audit found that the computation does not repeat."""
        self.coverage, self._passed, self.repeats = None, 0, 0
        self.deterministic = True

    def decide(self, coverage: Coverage, reason: str) -> None:
        """End with an answer that was found elsewhere."""
        self.coverage, self.reason = coverage, reason

    def run(self, step: int, own: OwnStep) -> bool:
        """One preflight step. Every rank calls it with its own step's results.

        Returns:
            Whether an audit over the ring is worth making on this step.
        """
        operation = f"the preflight of step {step}"
        audit = asdict(self._audit(own))
        message = {"audit": audit, "bytes": self.payload_bytes, "facts": self._facts()}
        rows = gather_json(self._exchange, message, operation)
        differences = environment_differences([row["facts"] for row in rows])
        if differences:
            self.decide(Coverage.OFF, "ranks run different software: " + "; ".join(differences))
            return False
        audits = [SelfAudit(**_tuples(row["audit"])) for row in rows]
        audits = self._traced(audits, own, operation)
        self.local = self.local and not any(audit.collectives for audit in audits)
        self.payload_bytes = max(row["bytes"] for row in rows)
        return self._take(judge_preflight(audits, deterministic=self.deterministic))

    def _take(self, judgement: PreflightJudgement) -> bool:
        self.notes = tuple(dict.fromkeys((*self.notes, *judgement.notes)))
        if judgement.coverage is None:
            self.deterministic, self._passed, self.repeats = True, 0, 0
            return False
        if judgement.coverage is not Coverage.FULL:
            self.decide(judgement.coverage, judgement.reason)
            return False
        self._passed += 1
        self.repeats += 2 * self._exchange.world_size
        if self._passed < self._rounds:
            return False
        kernels = "deterministic kernels" if self.deterministic else "your own kernels"
        self.notes = (*self.notes, *self._said_of_the_payload())
        self.decide(Coverage.FULL, f"{judgement.reason} on {self._passed} steps, with {kernels}")
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
        one, two = (self._replay_packed(message, ReplayOptions(watch=True)) for _ in range(2))
        audit = SelfAudit(
            rank=rank,
            error=one.error or two.error,
            out_of_memory="OutOfMemory" in one.error + two.error,
            collectives=one.collectives or two.collectives,
            left_behind=tuple(m for m in one.trace if m.startswith("parameter ")),
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
