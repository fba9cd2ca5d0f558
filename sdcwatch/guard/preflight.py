"""Preflight: finds out on the first real steps what the audits can promise, before arming them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from sdcwatch.core.preflight import (
    PreflightJudgement,
    SelfAudit,
    environment_differences,
    judge_preflight,
)
from sdcwatch.core.records import SHOWN, Coverage
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.replay import OwnStep, Replay, RingAudit, result_table


class Preflight:
    """Runs on consecutive steps until it has an answer.

    Args:
        exchange: Gathers what each rank found.
        replay: Recomputes one micro-batch.
        names: Parameter names in the order of the gradient tables.
        rounds: Steps on which everything must repeat.
        facts: What decides which kernels run on this rank.

    Attributes:
        coverage: The answer; None while there is none.
        deterministic: Deterministic kernels are needed, from the next step on.
        repeats: Recomputations without a mismatch, over all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        replay: Replay,
        names: Sequence[str],
        *,
        rounds: int,
        facts: Callable[[], dict[str, str]],
    ) -> None:
        self._exchange, self._replay = exchange, replay
        self._names, self._rounds, self._facts = tuple(names), rounds, facts
        self.coverage: Coverage | None = None
        self.deterministic = False
        self.repeats = 0
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
        message = {"audit": asdict(self._audit(own)), "facts": self._facts()}
        rows = [
            json.loads(r) for r in self._exchange.gather(json.dumps(message).encode(), operation)
        ]
        differences = environment_differences([row["facts"] for row in rows])
        if differences:
            self.decide(Coverage.OFF, "ranks run different software: " + "; ".join(differences))
            return False
        audits = [
            SelfAudit(**{**row["audit"], "differing": tuple(row["audit"]["differing"])})
            for row in rows
        ]
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
        self.decide(Coverage.FULL, f"{judgement.reason} on {self._passed} steps, with {kernels}")
        return True

    def _audit(self, own: OwnStep) -> SelfAudit:
        first, second = self._replay(own.micro_batch), self._replay(own.micro_batch)
        rank = self._exchange.rank
        for result in (first, second):
            if result.error:
                return SelfAudit(rank=rank, error=result.error)
        expected = result_table(own.loss, own.gradients)
        one = result_table(first.loss, first.gradients)
        two = result_table(second.loss, second.gradients)
        differs = (expected != one).any(dim=1)
        names = [self._names[i] for i in differs[1:].nonzero().flatten().tolist()]
        return SelfAudit(
            rank=rank,
            outputs_equal=not bool(differs[0]),
            gradients_equal=not names,
            loss_repeats=torch.equal(one[0], two[0]),
            gradients_repeat=torch.equal(one[1:], two[1:]),
            differing=tuple(names[:SHOWN]),
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
