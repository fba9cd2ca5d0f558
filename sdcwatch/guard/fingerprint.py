"""Check 3: weight fingerprints of all replicas, compared by one MAX of two words.

The fast path folds the fingerprints of all tensors into one 63-bit digest d and takes the MAX of
(d, ~d), which gives maximum and minimum at once. Only if they differ does a second MAX, of the same
two words for each tensor, tell which tensors differ; the fingerprints of these, and of a few of
them, are gathered, and `sdcwatch.core.fingerprint` says who dissents.

A failed check taints the run for good: the wrong weight is in the replica.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sdcwatch.checks.fingerprint import (
    combine,
    describe_difference,
    digest_tensors,
    salt,
    to_pairs,
)
from sdcwatch.config import GuardConfig
from sdcwatch.core.checkpoint import fingerprint_due
from sdcwatch.core.fingerprint import (
    TENSORS_GATHERED,
    FingerprintJudgement,
    OptimizerFacts,
    SoftwareFacts,
    asked_numbers,
    differing_numbers,
    judge_fingerprints,
    written_by_forwards,
)
from sdcwatch.core.outcomes import finding
from sdcwatch.core.records import Check, Disagreement, GateReason, GuardState, Phase, Verdict
from sdcwatch.guard.checkpoint import CheckpointGate
from sdcwatch.guard.exchange import Exchange, Operation, agree
from sdcwatch.guard.reporter import Reporter
from sdcwatch.guard.saved_state import SavedState
from sdcwatch.guard.sharing import share_bytes
from sdcwatch.guard.updates import UpdateLog

Named = Sequence[tuple[str, torch.Tensor]]
TENSORS_AT_ONCE = 2**19
"""Tensors asked for in one MAX: 8 MiB."""
GATHERED_BYTES = 2**22
"""What the fingerprints of a disagreement come to on each rank at most."""
NUMBERS_BYTES = 2**16
"""What one rank tells of its optimizers at most."""
_HEAD = struct.Struct("<qq?d?d8s8s8sqq?")
_PAIR = struct.Struct("<QQ")
_FOLD = 0x9E3779B97F4A7C15
DESCRIBED = 10
"""Tensors that differ of which the bits are looked at."""
DESCRIBED_BYTES = 2**28
"""Larger tensors are not sent for that."""


@dataclass(frozen=True)
class ReplicaSet:
    """Tensors that must hold the same bits on every rank of a group.

    Attributes:
        exchange: The group.
        named: Called for the local tensors, by name, in the same order on every rank.
        spoken: A name as a person is told it.
    """

    exchange: Exchange
    named: Callable[[], Named]
    spoken: Callable[[str], str] = str


class WeightCheck:
    """Compares the replicas of one `ReplicaSet`."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._table: torch.Tensor | None = None

    @property
    def exchange(self) -> Exchange:
        """The group of the replicas."""
        return self._replicas.exchange

    @property
    def tensors(self) -> int:
        """How many tensors are compared."""
        return len(self._replicas.named())

    def equal(self, operation: str) -> bool:
        """Whether all replicas hold the same bits. One MAX of two words; every rank calls it."""
        return self.compare(operation, ())[0]

    def compare(self, operation: str, flags: Sequence[bool]) -> tuple[bool, tuple[bool, ...]]:
        """Whether all replicas hold the same bits, and which flags are set on any rank.

        One MAX of two words and one for each flag; every rank calls it with as many flags.
        """
        named = self._replicas.named()
        tensors = [t.detach() for _, t in named]
        self._table = digest_tensors(tensors)
        first, _ = combine(self._table, tuple(salt(name, t) for name, t in named)).tolist()
        digest = first & (2**63 - 1)
        words = (digest, ~digest, *map(int, flags))
        top, bottom, *seen = self._replicas.exchange.max_int64s(words, operation)
        return top == ~bottom, tuple(map(bool, seen))

    def dissent(self, operation: str, software: UpdateLog | None) -> FingerprintJudgement:
        """Gather the fingerprints of the last `equal` and judge them. Every rank calls it.

        Args:
            operation: For errors.
            software: What this rank's software did to the weights; None where that is not known.
        """
        if self._table is None:  # pragma: no cover - equal() comes first
            msg = "Expected equal() before dissent()."
            raise RuntimeError(msg)
        pairs = [(int(a), int(b)) for a, b in to_pairs(self._table)]
        every = [name for name, _ in self._replicas.named()]
        differing = self._differing(pairs, operation)
        exchange = self._replicas.exchange
        kept = differing[: tensors_gathered(exchange.world_size)]
        names = [every[i] for i in kept]
        spoken = {name: self._replicas.spoken(name) for name in every}
        own = OptimizerFacts() if software is None else software.facts(names)
        message = pack_fingerprints([pairs[i] for i in kept], own)
        rows = exchange.gather(message, operation)
        tables, optimizers = zip(*map(unpack_fingerprints, rows), strict=True)
        facts = SoftwareFacts(
            optimizers=optimizers,
            numbers=self._numbers(optimizers, software, operation),
            first=all(one.untouched for one in optimizers),
            since=None if software is None else software.since,
            tensors_total=len(every),
            differing_total=len(differing),
            trained=() if software is None else _spoken_sets(software.trained(), spoken),
        )
        judgement = judge_fingerprints([spoken[n] for n in names], tables, software=facts)
        raw = {spoken[name]: name for name in names}
        found = [replace(d, tensor=raw[d.tensor]) for d in judgement.disagreements[:DESCRIBED]]
        notes = self._describe(found, operation)
        noted = [replace(d, note=notes.get(raw[d.tensor], "")) for d in judgement.disagreements]
        return replace(judgement, disagreements=tuple(noted))

    def _numbers(
        self, facts: Sequence[OptimizerFacts], software: UpdateLog | None, operation: str
    ) -> tuple[str, ...]:
        """In which numbers the optimizers differ, if they do. Every rank calls it."""
        asked, exchange = asked_numbers(facts), self._replicas.exchange
        if not asked:
            return ()
        own = {}
        if exchange.rank in asked and software is not None:
            rows = list(software.numbers().items())
            while len(text := json.dumps(dict(rows)).encode()) > NUMBERS_BYTES:
                rows = rows[: len(rows) // 2]
            own[asked.index(exchange.rank)] = text
        told = share_bytes(exchange, own, len(asked), operation)
        rows_of = {rank: json.loads(text or "{}") for rank, text in zip(asked, told, strict=True)}
        return differing_numbers(rows_of, facts)

    def _differing(self, pairs: Sequence[tuple[int, int]], operation: str) -> list[int]:
        """Places of the tensors that differ, the same on every rank. Every rank calls it."""
        found = []
        for begin in range(0, len(pairs), TENSORS_AT_ONCE):
            part = [_word(pair) for pair in pairs[begin : begin + TENSORS_AT_ONCE]]
            words = [word for d in part for word in (d, ~d)]
            largest = self._replicas.exchange.max_int64s(words, operation)
            both = zip(largest[::2], largest[1::2], strict=True)
            found += [begin + at for at, (top, bottom) in enumerate(both) if top != ~bottom]
        return found

    def _describe(self, disagreements: Sequence[Disagreement], operation: str) -> dict[str, str]:
        """In which bits the two largest sides of each tensor differ. Every rank calls it."""
        exchange, tensors = self._replicas.exchange, dict(self._replicas.named())
        own: dict[int, bytes] = {}
        for slot, disagreement in enumerate(disagreements):
            here, there = (group[0] for group in disagreement.groups[:2])
            tensor = tensors[disagreement.tensor].detach()
            if tensor.numel() * tensor.element_size() > DESCRIBED_BYTES:
                continue
            outgoing = {here: _as_bytes(tensor)} if exchange.rank == there else {}
            incoming = [there] if exchange.rank == here else []
            for data in exchange.route(outgoing, incoming, operation).values():
                theirs = data.view(tensor.dtype).reshape(tensor.shape)
                own[slot] = describe_difference(tensor, theirs).encode()
        said = share_bytes(exchange, own, len(disagreements), operation) if disagreements else ()
        return {d.tensor: text.decode() for d, text in zip(disagreements, said, strict=True)}


def tensors_gathered(world_size: int) -> int:
    """Tensors that differ of which fingerprints are gathered: one message of `GATHERED_BYTES`."""
    return max(1, min(TENSORS_GATHERED, GATHERED_BYTES // (_PAIR.size * world_size)))


def pack_fingerprints(pairs: Sequence[tuple[int, int]], facts: OptimizerFacts) -> bytes:
    """One rank's part of the gather of a disagreement: 75 bytes and 16 for each tensor."""
    head = _HEAD.pack(
        facts.updates,
        facts.skips,
        *(facts.scale is not None, facts.scale or 0.0),
        *(facts.rates is not None, facts.rates or 0.0),
        *map(bytes.fromhex, (facts.groups, facts.steps, facts.loaded)),
        facts.writes,
        facts.gradient_writes,
        facts.untouched,
    )
    return head + b"".join(_PAIR.pack(*pair) for pair in pairs)


def unpack_fingerprints(message: bytes) -> tuple[list[tuple[int, int]], OptimizerFacts]:
    """What `pack_fingerprints` packed."""
    updates, skips, scaled, scale, rated, rates, *digests, writes, into_gradients, untouched = (
        _HEAD.unpack_from(message)
    )
    groups, steps, loaded = (d.hex() if any(d) else "" for d in digests)
    facts = OptimizerFacts(
        updates=updates,
        skips=skips,
        scale=scale if scaled else None,
        rates=rates if rated else None,
        groups=groups,
        steps=steps,
        loaded=loaded,
        writes=writes,
        gradient_writes=into_gradients,
        untouched=untouched,
    )
    return list(_PAIR.iter_unpack(message[_HEAD.size :])), facts


def _spoken_sets(
    trained: Sequence[Collection[str]], spoken: Mapping[str, str]
) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(spoken.get(n, n) for n in names) for names in trained)


def _word(pair: tuple[int, int]) -> int:
    """Both checksums of a tensor in one word of 63 bits."""
    plain, mixed = pair
    return (mixed ^ (plain * _FOLD)) & (2**63 - 1)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class ReplicaCheck:
    """Check 3 in the course of a run.

    Args:
        weights: Compares them.
        config: When it is due, and whether a failure stops the run.
        reporter: Takes the results.
        gate: Told of a checkpoint that is withheld.
        software: What this rank's software does to the weights.
        saved: What else a checkpoint would hold.

    Attributes:
        weights: As given.
        software: As given.
        saved: As given.
        finite: At the latest check for a checkpoint, weights and buffers were on all ranks.
        left_behind: At the latest check for a checkpoint, a rank held what a skipped step left.
        tainted: The verdict that tainted the run, or None.
        passed_at: Step of the latest check that passed.
        disputed: An audit saw different weights in the backward: compare after the next update.
        forward_writes: Preflight saw weights change on this rank during the call or the backward.
    """

    def __init__(
        self,
        weights: WeightCheck,
        config: GuardConfig,
        reporter: Reporter,
        gate: CheckpointGate,
        software: UpdateLog,
        saved: SavedState,
    ) -> None:
        self.weights = weights
        self.saved = saved
        self.finite, self.left_behind = True, False
        self._config, self._reporter, self._gate = config, reporter, gate
        self.software = software
        self.tainted: Verdict | None = None
        self.passed_at: int | None = None
        self.disputed = self.forward_writes = False

    def after_update(self, step: int) -> None:
        """Compare if it is due. Every rank calls it after the same update."""
        config, exchange = self._config, self.weights.exchange
        due = fingerprint_due(
            step,
            fingerprint_every=config.fingerprint_every,
            checkpoint_every=config.checkpoint_every,
        )
        if (due or self.disputed) and self.tainted is None and not exchange.anyone_joined():
            self.disputed = False
            agree(exchange, Operation.WEIGHTS, step)
            self.check(step)

    def check(self, step: int, *, saving: bool = False) -> None:
        """Compare now. Every rank calls it at the same step.

        Args:
            step: The step.
            saving: A checkpoint waits for the answer; it is withheld if replicas differ.

        Raises:
            CorruptionDetected: Replicas differ, unless the guard only observes.
        """
        reporter = self._reporter
        with reporter.timed(Check.FINGERPRINT, Phase.DIGEST):
            flags = self.saved.flags() if saving else ()
            operation = f"the weight check of step {step}"
            equal, seen = self.weights.compare(operation, flags)
        if saving:
            self.finite, self.left_behind = not seen[0], seen[1]
        reporter.window.weight_checks += 1
        if not equal:
            self.differ(step, saving=saving)
            return
        reporter.passed(Check.FINGERPRINT)
        reporter.last_weight_check = (step, time.time())
        self.passed_at = step
        self.software.replicas_equal(step)

    def at_once(self, step: int) -> None:
        """Check 1 found weights that are not finite on some ranks: compare before the update.

        Every rank calls it at the same step. Updates are skipped from now on, and no check would
        be due after one.

        Raises:
            CorruptionDetected: Replicas differ, unless the guard only observes.
        """
        if self.tainted is None:
            self.software.found_apart()
            self.check(step)

    def apart(self) -> None:
        """An audit saw different weights in a backward: compare after its update."""
        self.disputed = True
        self.software.found_apart()

    def differ(self, step: int, *, saving: bool = False) -> None:
        """Replicas differ: say who dissents, once, and stop unless the guard only observes.

        The checkpoint of this step is withheld if one waits for the answer or is due.

        Raises:
            CorruptionDetected: Unless the guard only observes.
        """
        if self.tainted is not None:
            return
        config = self._config
        operation = f"the weight check of step {step}"
        judgement = self.weights.dissent(operation, self.software)
        if self.weights.exchange.max_int64s((int(self.forward_writes),), operation)[0]:
            judgement = written_by_forwards(judgement)
        verdict = self.tainted = self._reporter.verdicts.fingerprint(
            step, judgement, self.weights.tensors
        )
        self._reporter.emit(verdict)
        self._reporter.enter(GuardState.TAINTED, "the replicas hold different weights")
        if config.mode == "observe":
            return
        every = config.checkpoint_every
        if saving or (every is not None and step % every == 0 < step):
            self._gate.withhold(step, GateReason.FINGERPRINT, verdict.reason, None)
        raise finding(verdict)
