"""Check 3: weight fingerprints of all replicas, compared by one MAX of two words.

The fast path folds the fingerprints of all tensors into one 63-bit digest d and takes the MAX of
(d, ~d), which gives maximum and minimum at once. Only if they differ are the per-tensor
fingerprints gathered, and `sdcwatch.core.fingerprint` says who dissents.

A failed check taints the run for good: the wrong weight is in the replica.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sdcwatch.checks.fingerprint import (
    combine,
    describe_difference,
    digest_tensors,
    salt,
    to_pairs,
)
from sdcwatch.core.checkpoint import fingerprint_due
from sdcwatch.core.fingerprint import FingerprintJudgement, judge_fingerprints
from sdcwatch.core.outcomes import finding
from sdcwatch.core.records import Check, Disagreement, GateReason, GuardState, Phase, Verdict
from sdcwatch.errors import SchemaMismatch
from sdcwatch.guard.exchange import Exchange, Operation, agree

if TYPE_CHECKING:
    from sdcwatch.guard.setup import Parts


Named = Sequence[tuple[str, torch.Tensor]]
LOG = logging.getLogger("sdcwatch")
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
    """

    exchange: Exchange
    named: Callable[[], Named]


class WeightCheck:
    """Compares the replicas of one `ReplicaSet`."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._table: torch.Tensor | None = None

    def equal(self, operation: str) -> bool:
        """Whether all replicas hold the same bits. One MAX of two words; every rank calls it."""
        named = self._replicas.named()
        tensors = [t.detach() for _, t in named]
        self._table = digest_tensors(tensors)
        first, _ = combine(self._table, tuple(salt(name, t) for name, t in named)).tolist()
        digest = first & (2**63 - 1)
        top, bottom = self._replicas.exchange.max_int64s((digest, ~digest), operation)
        return top == ~bottom

    def dissent(self, operation: str, loss_gradient: float | None) -> FingerprintJudgement:
        """Gather the fingerprints of the last `equal` and judge them. Every rank calls it.

        Args:
            operation: For errors.
            loss_gradient: The gradient that arrived at the loss: differs between ranks if their
                GradScalers do.
        """
        if self._table is None:  # pragma: no cover - equal() comes first
            msg = "Expected equal() before dissent()."
            raise RuntimeError(msg)
        message = {"scale": loss_gradient, "pairs": to_pairs(self._table)}
        rows = [
            json.loads(r)
            for r in self._replicas.exchange.gather(json.dumps(message).encode(), operation)
        ]
        names = [name for name, _ in self._replicas.named()]
        tables = [[(int(a), int(b)) for a, b in row["pairs"]] for row in rows]
        judgement = judge_fingerprints(names, tables, loss_scales([row["scale"] for row in rows]))
        notes = self._describe(judgement.disagreements[:DESCRIBED], operation)
        noted = [replace(d, note=notes.get(d.tensor, "")) for d in judgement.disagreements]
        return replace(judgement, disagreements=tuple(noted))

    def _describe(self, disagreements: Sequence[Disagreement], operation: str) -> dict[str, str]:
        """In which bits the two largest sides of each tensor differ. Every rank calls it."""
        exchange, tensors = self._replicas.exchange, dict(self._replicas.named())
        own: dict[str, str] = {}
        for disagreement in disagreements:
            here, there = (group[0] for group in disagreement.groups[:2])
            tensor = tensors[disagreement.tensor].detach()
            if tensor.numel() * tensor.element_size() > DESCRIBED_BYTES:
                continue
            outgoing = {here: _as_bytes(tensor)} if exchange.rank == there else {}
            incoming = [there] if exchange.rank == here else []
            for data in exchange.route(outgoing, incoming, operation).values():
                theirs = data.view(tensor.dtype).reshape(tensor.shape)
                own[disagreement.tensor] = describe_difference(tensor, theirs)
        rows = exchange.gather(json.dumps(own).encode(), operation)
        return {name: note for row in rows for name, note in json.loads(row).items()}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def loss_scales(gradients: Sequence[float | None]) -> Sequence[float | None]:
    """The loss scales, if that is what the gradients of the loss differ by; empty if not.

    Scales move by powers of two. A loss weighted by each rank's number of tokens differs too, by
    other factors, and explains nothing.
    """
    finite = [g for g in gradients if g is not None and math.isfinite(g) and g != 0]
    if len(finite) != len(gradients):
        return ()
    mantissas = {math.frexp(g)[0] for g in finite}
    return finite if len(mantissas) == 1 and len(set(finite)) > 1 else ()


def require_same_schema(exchange: Exchange, named: Named) -> None:
    """Check that every rank has the same parameters. Every rank calls it.

    Raises:
        SchemaMismatch: Names, shapes or dtypes differ; says which and on which ranks.
    """
    schema = [(name, str(tuple(t.shape)), str(t.dtype)) for name, t in named]
    encoded = json.dumps(schema).encode()
    word = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") >> 1
    top, bottom = exchange.max_int64s((word, ~word), "the comparison of model schemas")
    if top == ~bottom:
        return
    rows = [json.loads(r) for r in exchange.gather(encoded, "the comparison of model schemas")]
    error = SchemaMismatch(schema_differences(rows))
    LOG.critical(error)  # uncaught it ends the process without a word, as SystemExit does
    raise error


def schema_differences(rows: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """One sentence per parameter that is not the same on every rank, at most ten."""
    tables = [{name: f"{shape} {dtype}" for name, shape, dtype in row} for row in rows]
    said = []
    for name in dict.fromkeys(n for table in tables for n in table):
        sides: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            sides.setdefault(table.get(name, "missing"), []).append(rank)
        if len(sides) > 1:
            said.append(
                f"{name}: " + ", ".join(f"{what} on ranks {who}" for what, who in sides.items())
            )
    if not said:
        said.append("the parameters come in a different order")
    return said[:10]


class ReplicaCheck:
    """Check 3 in the course of a run.

    Attributes:
        tainted: The verdict that tainted the run, or None.
        passed_at: Step of the latest check that passed.
        loss_gradient: The gradient that arrived at the latest loss: tells apart loss scales.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.tainted: Verdict | None = None
        self.passed_at: int | None = None
        self.loss_gradient: torch.Tensor | None = None

    def after_update(self, step: int) -> None:
        """Compare if it is due. Every rank calls it after the same update."""
        config = self._parts.config
        due = fingerprint_due(
            step,
            fingerprint_every=config.fingerprint_every,
            checkpoint_every=config.checkpoint_every,
        )
        if due and self.tainted is None and not self._parts.exchange.anyone_joined():
            agree(self._parts.exchange, Operation.WEIGHTS, step)
            self.check(step)

    def check(self, step: int, *, saving: bool = False) -> None:
        """Compare now. Every rank calls it at the same step.

        Args:
            step: The step.
            saving: A checkpoint waits for the answer; it is withheld if replicas differ.

        Raises:
            CorruptionDetected: Replicas differ, unless the guard only observes.
        """
        reporter = self._parts.reporter
        with reporter.timed(Check.FINGERPRINT, Phase.DIGEST):
            equal = self._parts.weights.equal(f"the weight check of step {step}")
        reporter.window.weight_checks += 1
        if not equal:
            self.differ(step, saving=saving)
            return
        reporter.passed(Check.FINGERPRINT)
        reporter.last_weight_check = (step, time.time())
        self.passed_at = step

    def differ(self, step: int, *, saving: bool = False) -> None:
        """Replicas differ: say who dissents, once, and stop unless the guard only observes.

        The checkpoint of this step is withheld if one waits for the answer or is due.

        Raises:
            CorruptionDetected: Unless the guard only observes.
        """
        if self.tainted is not None:
            return
        parts, config = self._parts, self._parts.config
        gradient = self.loss_gradient
        judgement = parts.weights.dissent(
            f"the weight check of step {step}", None if gradient is None else float(gradient)
        )
        tensors = len(parts.guarded.replicated(buffers=config.buffers))
        verdict = self.tainted = parts.verdicts.fingerprint(step, judgement, tensors)
        parts.reporter.emit(verdict)
        parts.reporter.enter(GuardState.TAINTED, "the replicas hold different weights")
        if config.mode == "observe":
            return
        every = config.checkpoint_every
        if saving or (every is not None and step % every == 0 < step):
            parts.checkpoints.withhold(step, GateReason.FINGERPRINT, verdict.reason, None)
        raise finding(verdict)
