"""Check 3's judgement: which replica dissents, tensor by tensor.

A rank is named only if it differs from a strict majority, more than half of the replicas holding
the same bits. Replicas that differ because their loss scales took different paths are a software
fault of the training loop, and name nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdcwatch.core.records import Cause, Disagreement, Outcome
from sdcwatch.core.text import count, list_names, list_ranks

Fingerprint = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FingerprintJudgement:
    """What the fingerprints of all replicas came to.

    Attributes:
        outcome: `PASS`, `SUSPECT` or `UNATTRIBUTED`.
        reason: One sentence for a person.
        disagreements: Every tensor on which replicas differ, in the order of the names.
        named: For each named rank, the tensors in which it dissents.
        ranks: Ranks it concerns without blaming them.
        cause: `SOFTWARE` where numbers of the optimizers explain it.
    """

    outcome: Outcome
    reason: str
    disagreements: tuple[Disagreement, ...] = ()
    named: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    cause: Cause = Cause.NONE


def _disagreement(tensor: str, column: Sequence[Fingerprint]) -> Disagreement | None:
    """The sides that replicas take on one tensor, or None if there is one side only."""
    sides: dict[Fingerprint, list[int]] = {}
    for rank, fingerprint in enumerate(column):
        sides.setdefault(fingerprint, []).append(rank)
    if len(sides) == 1:
        return None
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    groups = tuple(tuple(ranks) for _, ranks in ordered)
    strict = 2 * len(groups[0]) > len(column)
    return Disagreement(
        tensor=tensor,
        dissenters=tuple(sorted(r for group in groups[1:] for r in group)) if strict else (),
        groups=groups,
        fingerprints=tuple(f"{plain:016x}:{weighted:016x}" for (plain, weighted), _ in ordered),
    )


def _scale_reason(scales: Sequence[float | None], differing: int) -> str | None:
    sides: dict[str, list[int]] = {}
    for rank, scale in enumerate(scales):
        sides.setdefault(repr(scale), []).append(rank)
    if len(sides) < 2:
        return None
    said = ", ".join(f"{scale} on {list_ranks(ranks)}" for scale, ranks in sides.items())
    return (
        f"the loss scales of the GradScalers differ ({said}), so the updates did too: replicas "
        f"differ on {count(differing, 'tensor')}; a software fault that names no rank"
    )


def _reason(named: dict[int, tuple[str, ...]], world: int, total: int, undecided: int) -> str:
    parts = [
        f"rank {rank} dissents from the majority of {world} on {len(tensors)} of "
        f"{count(total, 'tensor')} ({list_names(tensors)})"
        for rank, tensors in sorted(named.items())[:4]
    ]
    if len(named) > 4:
        parts.append(f"so do {len(named) - 4} more ranks")
    if undecided:
        parts.append(f"no strict majority on {count(undecided, 'more tensor')}")
    return "; ".join(parts)


def judge_fingerprints(
    names: Sequence[str],
    tables: Sequence[Sequence[Fingerprint]],
    scales: Sequence[float | None] = (),
) -> FingerprintJudgement:
    """Compare the weight fingerprints of all replicas.

    Args:
        names: Tensor names.
        tables: ``tables[rank][tensor]``, both checksums of that tensor on that rank.
        scales: Loss scale of each rank's GradScaler, if there is one.
    """
    found = [
        disagreement
        for index, name in enumerate(names)
        if (disagreement := _disagreement(name, [table[index] for table in tables]))
    ]
    if not found:
        return FingerprintJudgement(Outcome.PASS, "all replicas hold the same bits")
    disagreements = tuple(found)
    involved = tuple(sorted({r for d in found for group in d.groups[1:] for r in group}))
    everybody = tuple(range(len(tables)))
    scale_reason = _scale_reason(scales, len(found))
    if scale_reason is not None:
        return FingerprintJudgement(
            Outcome.UNATTRIBUTED,
            scale_reason,
            disagreements,
            ranks=everybody,
            cause=Cause.SOFTWARE,
        )
    named: dict[int, tuple[str, ...]] = {}
    for disagreement in found:
        for rank in disagreement.dissenters:
            named[rank] = (*named.get(rank, ()), disagreement.tensor)
    undecided = [d for d in found if not d.dissenters]
    if named:
        reason = _reason(named, len(tables), len(names), len(undecided))
        return FingerprintJudgement(Outcome.SUSPECT, reason, disagreements, named, involved)
    sides = " against ".join(list_ranks(group) for group in undecided[0].groups[:4])
    reason = (
        f"replicas differ on {len(found)} of {count(len(names), 'tensor')} "
        f"({list_names([d.tensor for d in found])}) and no strict majority holds the same bits: "
        f"{sides}"
    )
    return FingerprintJudgement(Outcome.UNATTRIBUTED, reason, disagreements, ranks=everybody)
