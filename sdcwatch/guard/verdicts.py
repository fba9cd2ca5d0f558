"""Makes verdict records out of judgements: adds who the ranks are, and what was done about it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from sdcwatch.core.fingerprint import FingerprintJudgement
from sdcwatch.core.nonfinite import NonfiniteJudgement
from sdcwatch.core.records import Action, Check, Outcome, Suspect, Verdict
from sdcwatch.core.replay import Named
from sdcwatch.core.text import list_ranks
from sdcwatch.core.topology import Topology
from sdcwatch.guard.replay import SHOWN, AuditResult

NOT_FAILURES = frozenset({Outcome.PASS, Outcome.NONDETERMINISTIC, Outcome.VOID, Outcome.NOT_RUN})
"""Outcomes of check 2 after which the update goes ahead: no evidence that it is wrong."""


class Verdicts:
    """Builds verdicts; remembers since when each suspect has been one.

    Args:
        topology: Who is where.
        observing: The guard reports and skips or stops nothing.
    """

    def __init__(self, topology: Topology, *, observing: bool) -> None:
        self._topology, self._observing = topology, observing
        self._first_step: dict[tuple[int, Check], int] = {}

    def nonfinite(self, step: int, judgement: NonfiniteJudgement) -> Verdict:
        """Check 1 tripped: always a failure, whoever caused it."""
        suspects = tuple(
            self._suspect(step, rank, Check.NONFINITE, bad=1, total=1, partners=())
            for rank in judgement.named
        )
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.NONFINITE,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=True,
            action=self._action(Action.SKIP),
            suspects=suspects,
            origin=judgement.origin,
            cause=judgement.cause,
            ranks=judgement.ranks,
        )

    def replay(self, step: int, result: AuditResult) -> Verdict:
        """An audit that was not clean."""
        judgement = result.judgement
        failed = judgement.outcome not in NOT_FAILURES
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.REPLAY,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=failed,
            action=self._action(Action.SKIP) if failed else Action.NONE,
            suspects=tuple(self._audited(step, n, result) for n in judgement.named),
            ranks=judgement.ranks or tuple(n.rank for n in judgement.strikes),
            comparisons=result.comparisons,
            comparisons_total=result.total,
            notes=result.notes,
        )

    def not_run(self, step: int, reason: str, *, outcome: Outcome = Outcome.NOT_RUN) -> Verdict:
        """An audit was due and could not be made, or its comparisons mean nothing."""
        return Verdict(
            step=step, time=time.time(), check=Check.REPLAY, outcome=outcome, reason=reason
        )

    def without_record(self, step: int, ranks: tuple[int, ...]) -> Verdict:
        """An audit was due, and some ranks computed their loss without the guard."""
        reason = (
            f"the loop did not call guard.forward on {list_ranks(ranks)} in this step; "
            "the next step is audited instead"
        )
        return replace(self.not_run(step, reason), ranks=ranks)

    def fingerprint(self, step: int, judgement: FingerprintJudgement, tensors: int) -> Verdict:
        """Replicas differ: the run is tainted."""
        suspects = tuple(
            self._suspect(
                step,
                rank,
                Check.FINGERPRINT,
                bad=len(names),
                total=tensors,
                partners=(),
                tensors=names[:SHOWN],
            )
            for rank, names in sorted(judgement.named.items())
        )
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.FINGERPRINT,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=True,
            action=self._action(Action.STOP),
            suspects=suspects,
            ranks=judgement.ranks,
            disagreements=judgement.disagreements[:SHOWN],
            tensors_total=tensors,
        )

    def _action(self, enforced: Action) -> Action:
        return Action.OBSERVE if self._observing else enforced

    def _audited(self, step: int, named: Named, result: AuditResult) -> Suspect:
        involved = [c for c in result.comparisons if named.rank in (c.producer, c.replayer)]
        tensors = tuple(dict.fromkeys(t for c in involved for t in c.tensors))[:SHOWN]
        return self._suspect(
            step,
            named.rank,
            Check.REPLAY,
            bad=named.bad,
            total=named.total,
            partners=named.partners,
            arbiters=named.arbiters,
            reproduced=named.reproduced,
            tensors=tensors,
        )

    def _suspect(  # noqa: PLR0913 - one argument per count of evidence, all by name
        self,
        step: int,
        rank: int,
        check: Check,
        *,
        bad: int,
        total: int,
        partners: Iterable[int],
        arbiters: Iterable[int] = (),
        reproduced: bool | None = None,
        tensors: tuple[str, ...] = (),
    ) -> Suspect:
        info = self._topology.ranks[rank]
        first = self._first_step.setdefault((rank, check), step)
        return Suspect(
            rank=rank,
            node=info.node,
            instance_id=info.instance_id,
            gpu=info.gpu,
            gpu_index=info.gpu_index,
            check=check,
            bad=bad,
            total=total,
            partners=tuple(partners),
            arbiters=tuple(arbiters),
            reproduced=reproduced,
            first_step=first,
            last_step=step,
            tensors=tensors,
        )
