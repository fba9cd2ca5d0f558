"""Check 1: what this rank saw, read off the device once per step, and what became of it.

The investigation runs only when a rank saw something, so it may gather: 20 bytes of each rank. What
flagged ranks have to say besides is shared among the few slots that are asked. The flagged rank's
micro-batches travel to a rank on another node with the gradients that arrived at their outputs, so
that a scaled overflow overflows again. What the facts mean is decided in `sdcwatch.core.nonfinite`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sdcwatch.checks.captured import Backward
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import GradientSum, ReplayOptions, ReplayResult
from sdcwatch.core.arbitration import REPEATS
from sdcwatch.core.disputes import conclude_nonfinite, plan_nonfinite_traces
from sdcwatch.core.nonfinite import (
    REPLAYED,
    NonfiniteJudgement,
    RankFinite,
    Repeated,
    RepeatsFinite,
    ReplayFinite,
    asks_everybody,
    judge_nonfinite,
    plan_nonfinite_repeats,
    plan_nonfinite_replays,
    plan_own_replays,
    remember,
)
from sdcwatch.core.text import list_names
from sdcwatch.core.topology import Topology
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.hook import GradientProbes
from sdcwatch.guard.replay import (
    OwnStep,
    Replay,
    SegmentMemory,
    pack_or_nothing,
    problem_of,
    table_of,
    unpack_or_error,
    value_of,
)
from sdcwatch.guard.sharing import share_bytes
from sdcwatch.guard.tracing import Tracing
from sdcwatch.guard.window import StepWindow

SECONDS_PER_REPLAY = 60.0
"""How long others wait for one replay: nobody has timed one yet when a first step trips."""
_NOT_LOCAL = "not replayed: the forward runs a collective, so others would have to wait for it"
_WEIGHTS_CHANGED = (
    "the weights were changed between the call of the module and the end of the backward ({}): "
    "change them after optimizer.step()"
)
MAX_IN_A_ROW = 16
"""Investigations in consecutive steps before only every tenth is replayed."""


class NonfiniteInvestigation:
    """Finds out where a non-finite value comes from.

    Args:
        exchange: Moves facts and payloads.
        topology: Who is where.
        replay: Recomputes a micro-batch.
        device: Where received micro-batches go.
        memory: What the segment remembers; shared with the audits.
        tracing: Traces operations before anybody is named; None to go by the results alone.
    """

    def __init__(
        self,
        exchange: Exchange,
        topology: Topology,
        replay: Replay,
        device: torch.device,
        memory: SegmentMemory | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._exchange, self._topology = exchange, topology
        self._replay, self._device = replay, device
        self._memory = memory or SegmentMemory()
        self._held: dict[int, list[MicroBatch]] = {}
        self._in_a_row = 0
        self._stopping = ReplayOptions(forbid_collectives=True)
        self._last_step = -2

    def run(
        self,
        step: int,
        own: RankFinite,
        micro_batches: Sequence[MicroBatch],
        *,
        trusted: bool = True,
        local: bool | None = True,
    ) -> NonfiniteJudgement:
        """Investigate. Every rank calls it when the agreed word of the step says so.

        Args:
            step: The step.
            own: What this rank saw.
            micro_batches: Everything this rank accumulated in the step, in order; empty if unknown.
            trusted: Preflight did not find that replays differ from steps.
            local: Preflight found that no replay communicates; one on some ranks only would wait
                for the others for ever. A collective that comes later is stopped before it is
                issued; before preflight has looked, None, also in compiled code.
        """
        operation = f"the non-finite check of step {step}"
        rows = self._exchange.gather(pack_facts(own, len(micro_batches)), operation)
        facts, kept = unpack_facts(rows)
        facts = self._with_reasons(facts, own, operation)
        facts = self._with_names(facts, own, operation)
        counts = [0] * len(kept) if local is False else kept
        self._stopping = ReplayOptions(forbid_collectives=True, where_eager=local is not None)
        if not any(f.reduced or f.loss for f in facts):
            # What is not finite makes a reduced value so: here the sum of a probe overflowed.
            facts = [replace(f, local=False, arrived=False) for f in facts]
        if self._limited(step):
            judgement = self._judge(facts, {}, trusted=trusted)
            self._memory.history = remember(
                self._memory.history, judgement, self._topology, step=step
            )
            text = f"{judgement.reason} (not replayed: too many such steps in a row)"
            return replace(judgement, reason=text)
        plan = plan_nonfinite_replays(facts, self._topology)
        plan = {p: r for p, r in plan.items() if counts[p] > 0}
        self._held = {self._exchange.rank: list(micro_batches)}
        repeated = Repeated()
        try:
            if plan:
                replays = self._elsewhere(plan, facts, counts, micro_batches, operation)
                repeats = self._repeat(replays, facts, counts, operation) if trusted else ()
                repeated = Repeated(repeats)
            else:
                replays = self._without_scale(facts, micro_batches, operation)
            judgement = self._judge(facts, replays, repeated, trusted=trusted)
            if asks_everybody(judgement, self._memory.history):
                restless = self._restless(micro_batches, operation)
                repeated = replace(repeated, restless=restless)
                judgement = self._judge(facts, replays, repeated, trusted=trusted)
            judgement = self._traced(judgement, facts, replays, operation)
            if local is False and any(kept):
                judgement = replace(judgement, reason=f"{judgement.reason} ({_NOT_LOCAL})")
        finally:
            self._held = {}
        self._memory.history = remember(self._memory.history, judgement, self._topology, step=step)
        return judgement

    def _with_reasons(
        self, facts: Sequence[RankFinite], own: RankFinite, operation: str
    ) -> list[RankFinite]:
        """Why the first ranks that cannot be replayed cannot. Every rank calls it."""
        said = [f.rank for f in facts if f.not_replayable][:REPLAYED]
        if not said:
            return list(facts)
        texts = {said.index(own.rank): own.not_replayable[:_TEXT]} if own.rank in said else {}
        shared = share_bytes(
            self._exchange, {s: t.encode() for s, t in texts.items()}, len(said), operation
        )
        known = dict(zip(said, shared, strict=True))
        return [
            replace(f, not_replayable=known[f.rank].decode()) if f.rank in known else f
            for f in facts
        ]

    def _with_names(
        self, facts: Sequence[RankFinite], own: RankFinite, operation: str
    ) -> list[RankFinite]:
        """Which parameters the first rank that did not reduce all left out. Every rank calls it."""
        first = next((f.rank for f in facts if f.buckets_reduced < f.buckets_expected), None)
        if first is None:
            return list(facts)
        text = json.dumps((own.not_reduced, own.not_reduced_total)).encode()
        told = {0: text} if own.rank == first else {}
        (shared,) = share_bytes(self._exchange, told, 1, operation)
        names, total = json.loads(shared)
        named = replace(facts[first], not_reduced=tuple(names), not_reduced_total=total)
        return [named if f.rank == first else f for f in facts]

    def _traced(
        self,
        judgement: NonfiniteJudgement,
        facts: Sequence[RankFinite],
        replays: dict[int, ReplayFinite],
        operation: str,
    ) -> NonfiniteJudgement:
        """Before anybody is named: in which operation the value arose."""
        disputes = plan_nonfinite_traces(judgement, replays)
        if self._tracing is None or not disputes:
            return judgement
        me = self._exchange.rank
        # Of several micro-batches the first that is not finite again, which its rank knows.
        own = [
            self._first_nonfinite(facts[me]) if dispute.rank == me else -1 for dispute in disputes
        ]
        chosen = self._exchange.max_int64s(
            own, operation, extra_seconds=SECONDS_PER_REPLAY * len(self._held[me] or (0,))
        )
        held = {
            d.producer: self._held[d.producer][index]
            for d, index in zip(disputes, chosen, strict=True)
            if 0 <= index < len(self._held.get(d.producer, ()))
        }
        return conclude_nonfinite(
            judgement, self._tracing.findings(disputes, held, operation, self._stopping)
        )

    def _first_nonfinite(self, seen: RankFinite) -> int:
        """The number of this rank's first micro-batch that is not finite again; -1 without one."""
        held = enumerate(self._held[self._exchange.rank])
        return next((i for i, m in held if _nonfinite(self._replayed(m), seen)), -1)

    def _judge(
        self,
        facts: Sequence[RankFinite],
        replays: dict[int, ReplayFinite],
        repeated: Repeated | None = None,
        *,
        trusted: bool,
    ) -> NonfiniteJudgement:
        return judge_nonfinite(
            facts,
            replays,
            self._topology,
            trusted=trusted,
            repeated=repeated,
            history=self._memory.history,
        )

    def _repeat(
        self,
        replays: dict[int, ReplayFinite],
        facts: Sequence[RankFinite],
        counts: Sequence[int],
        operation: str,
    ) -> tuple[RepeatsFinite, ...]:
        """Flagged ranks, and those that got a finite value, compute again. Every rank calls it."""
        orders = plan_nonfinite_repeats(replays)
        if not orders:
            return ()
        me = self._exchange.rank
        own = []
        for rank, producer, times in orders:
            if rank != me:
                continue
            held, seen = self._held.get(producer, ()), facts[producer]
            tries = [self._nonfinite_again(held, seen) for _ in range(times)]
            made = [again for again in tries if again is not None]
            own.append(
                RepeatsFinite(producer=producer, rank=me, made=len(made), nonfinite=sum(made))
            )
        slots = {(rank, producer): slot for slot, (rank, producer, _) in enumerate(orders)}
        said = {slots[r.rank, r.producer]: asdict(r) for r in own}
        found = self._shared(said, len(orders), operation, REPEATS * max(counts))
        return tuple(RepeatsFinite(**item) for item in found)

    def _nonfinite_again(
        self, micro_batches: Sequence[MicroBatch], seen: RankFinite
    ) -> bool | None:
        """Whether one more replay of a step is not finite; None if it could not be made."""
        summed = GradientSum()
        results = [self._replayed(m, onto=summed) for m in micro_batches]
        if not results or any(map(problem_of, results)):
            return None
        again = any(_nonfinite(r, seen) for r in results)
        return again or (summed.nonfinite() and not _from_outputs(seen))

    def _restless(self, micro_batches: Sequence[MicroBatch], operation: str) -> tuple[int, ...]:
        """Ranks whose repeats of their own work differ. Every rank calls it."""
        values = set()
        for _ in range(REPEATS):
            results = [self._replayed(m) for m in micro_batches]
            if not any(map(problem_of, results)):
                values.add(tuple(value_of(table_of(r, gradients=True)) for r in results))
        rows = self._exchange.gather(
            b"x" * (len(values) > 1),
            operation,
            extra_seconds=SECONDS_PER_REPLAY * REPEATS * max(1, len(micro_batches)),
        )
        return tuple(rank for rank, row in enumerate(rows) if row)

    def _limited(self, step: int) -> bool:
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 0
        self._last_step = step
        return self._in_a_row > MAX_IN_A_ROW and self._in_a_row % 10 != 0

    def _elsewhere(
        self,
        plan: dict[int, int],
        facts: Sequence[RankFinite],
        counts: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        operation: str,
    ) -> dict[int, ReplayFinite]:
        """Replay every flagged rank's micro-batches, in order, on a rank of another domain."""
        me = self._exchange.rank
        found: dict[int, list[ReplayResult]] = {p: [] for p, r in plan.items() if r == me}
        unscaled: dict[int, list[ReplayResult]] = {p: [] for p in found}
        sums = {p: GradientSum() for p in found}  # a sum may overflow where no part does
        damaged: set[int] = set()
        for index in range(max(counts[p] for p in plan)):
            outgoing = {}
            if me in plan and index < counts[me]:
                outgoing[plan[me]] = pack_or_nothing(micro_batches[index])
            incoming = [p for p in found if index < counts[p]]
            for producer, payload in self._exchange.route(outgoing, incoming, operation).items():
                micro_batch = unpack_or_error(payload, self._device)
                if isinstance(micro_batch, str):
                    damaged.add(producer)
                    continue
                self._held.setdefault(producer, []).append(micro_batch)
                result = self._replayed(micro_batch, onto=sums[producer])
                found[producer].append(result)
                if _nonfinite(result, facts[producer]):
                    unscaled[producer].append(self._replayed(micro_batch, scale_free=True))
        own = [
            _summarise(
                facts[p],
                me,
                results,
                unscaled[p],
                damaged=p in damaged,
                summed=sums[p].nonfinite(),
            )
            for p, results in found.items()
        ]
        return self._share(own, tuple(plan), operation, 2 * sum(counts[p] for p in plan))

    def _without_scale(
        self, facts: Sequence[RankFinite], micro_batches: Sequence[MicroBatch], operation: str
    ) -> dict[int, ReplayFinite]:
        """No other domain can replay, and the flagged ranks scale their loss.

        An overflow of the scale is normal then: the first of them repeat their own micro-batches
        with and without it. Its own word counts only if it explains the value for all of them.
        """
        asked = plan_own_replays(facts)
        if not asked:
            return {}
        me = self._exchange.rank
        own = []
        if me in asked:
            results = [self._replayed(m) for m in micro_batches]
            pairs = zip(micro_batches, results, strict=True)
            free = [
                self._replayed(m, scale_free=True) for m, r in pairs if _nonfinite(r, facts[me])
            ]
            own.append(_summarise(facts[me], me, results, free, damaged=False, summed=False))
        replays = self._share(own, asked, operation, 2 * len(micro_batches))
        explained = all(r.nonfinite and r.nonfinite_unscaled is False for r in replays.values())
        return replays if explained else {}

    def _share(
        self, own: Sequence[ReplayFinite], asked: Sequence[int], operation: str, replays: int
    ) -> dict[int, ReplayFinite]:
        """What replays of the ranks in `asked` came to, on every rank. Every rank calls it."""
        said = {asked.index(r.producer): asdict(r) for r in own}
        found = self._shared(said, len(asked), operation, replays)
        return {r.producer: r for r in (ReplayFinite(**item) for item in found)}

    def _replayed(self, micro_batch: MicroBatch, **options: Any) -> ReplayResult:
        """One replay, with these `ReplayOptions` besides what preflight found of collectives."""
        return self._replay(micro_batch, replace(self._stopping, **options))

    def _shared(
        self, own: Mapping[int, object], slots: int, operation: str, replays: int
    ) -> list[Any]:
        """What a few ranks have to say, by slot, after they made so many replays."""
        messages = share_bytes(
            self._exchange,
            {slot: json.dumps(value).encode() for slot, value in own.items()},
            slots,
            operation,
            extra_seconds=SECONDS_PER_REPLAY * replays,
        )
        return [json.loads(message) for message in messages if message]


_ROW = struct.Struct("<HHQQ")
_MARKS = ("local", "reduced", "loss", "weights", "loss_scaled", "reduced_nan", "arrived", "nan")
_UNSAID = "it was not kept"
_TEXT = 500
"""Characters of a reason that travel."""
_MOST = 2**16 - 1


def pack_facts(own: RankFinite, micro_batches: int) -> bytes:
    """What one rank saw, and of how many micro-batches: 20 bytes, for every rank has to hold all.

    Of `not_replayable` it says only that there is a reason.
    """
    marks = [bool(getattr(own, name)) for name in _MARKS] + [bool(own.not_replayable)]
    bits = sum(mark << bit for bit, mark in enumerate(marks))
    return _ROW.pack(bits, min(micro_batches, _MOST), own.buckets_reduced, own.buckets_expected)


def unpack_facts(rows: Sequence[bytes]) -> tuple[list[RankFinite], list[int]]:
    """What every rank saw, in rank order, and the numbers of their micro-batches."""
    facts, counts = [], []
    for rank, row in enumerate(rows):
        bits, count, reduced, expected = _ROW.unpack(row)
        marks: dict[str, Any] = {n: bool(bits >> bit & 1) for bit, n in enumerate(_MARKS)}
        facts.append(
            RankFinite(
                rank=rank,
                buckets_reduced=reduced,
                buckets_expected=expected,
                not_replayable=_UNSAID if bits >> len(_MARKS) & 1 else "",
                **marks,
            )
        )
        counts.append(count)
    return facts, counts


@dataclass(frozen=True, slots=True)
class NonfiniteCheck:
    """Check 1.

    Attributes:
        probes: What the communication hook saw of each bucket.
        investigation: Finds out where a non-finite value comes from.
    """

    probes: GradientProbes
    investigation: NonfiniteInvestigation


def _from_outputs(seen: RankFinite) -> bool:
    """The value went from the outputs through the loss into the gradients that arrived.

    A replay starts from those gradients, so that its own say nothing.
    """
    return seen.loss and seen.arrived


def _nonfinite(result: ReplayResult, seen: RankFinite) -> bool:
    """Whether a replay has the value too that its producer saw."""
    if _from_outputs(seen) or not seen.local:
        return result.outputs_nonfinite
    return result.gradients_nonfinite  # infinities in outputs may be a mask's


def _summarise(
    seen: RankFinite,
    replayer: int,
    results: Sequence[ReplayResult],
    unscaled: Sequence[ReplayResult],
    *,
    damaged: bool,
    summed: bool,
) -> ReplayFinite:
    errors = [problem for r in results if (problem := problem_of(r))]
    error = errors[0][:_TEXT] if errors else ("the payload arrived damaged" if damaged else "")
    return ReplayFinite(
        producer=seen.rank,
        replayer=replayer,
        nonfinite=(summed and not _from_outputs(seen)) or any(_nonfinite(r, seen) for r in results),
        nonfinite_unscaled=any(_nonfinite(r, seen) for r in unscaled) if unscaled else None,
        error=error,
    )


def own_step(window: StepWindow) -> OwnStep | None:
    """What was captured of the backward that is audited; None if it cannot be replayed."""
    backward = window.audited
    if backward is None or not backward.audited or backward.outputs is None:
        return None
    moved = _moved(backward)
    problem = _WEIGHTS_CHANGED.format(list_names(moved)) if moved else ""
    return OwnStep(
        backward.micro_batch,
        backward.outputs,
        backward.gradients,
        doors=backward.doors,
        problem=problem or backward.micro_batch.problem,
        communicates=backward.communicated,
        of=window.count,
        moved=moved,
    )


def _moved(backward: Backward) -> tuple[str, ...]:
    """Weights that were written meanwhile: a comparison would mean nothing."""
    weights = backward.weights
    if weights is None or not bool((weights != weights[:1]).any()):
        return ()
    return backward.moved()
