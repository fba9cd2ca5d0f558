"""Check 3's judgement: which replica dissents, tensor by tensor; software is asked for first.

| what is known | says |
|---|---|
| replicas differ before the first update of the segment | `UNATTRIBUTED`, cause software |
| the optimizers' numbers differ (`OptimizerFacts`), or the loss scales | as above |
| a rank dissents on every tensor of an optimizer | `UNATTRIBUTED`, cause unknown, both readings |
| a rank dissents from a strict majority on some tensors | `SUSPECT` |
| no strict majority holds the same bits | `UNATTRIBUTED` |

A strict majority is more than half of the replicas. A rank that dissents on *every* tensor of an
optimizer, with equal numbers, may have missed or scaled an update by software, or its device may
have computed a norm or a scale wrongly: fingerprints cannot tell, so nobody is named.

Only the tensors that differ are looked at, so the work is linear in ranks times these tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase

from sdcwatch.core.records import Cause, Disagreement, Outcome
from sdcwatch.core.text import count, list_names, list_ranks

Fingerprint = tuple[int, int]
TENSORS_GATHERED = 64
"""Tensors that differ of which the fingerprints of all ranks are gathered."""
SIDES_SHOWN = 8
"""Sides of a disagreement that a record lists, the largest first."""
RANKS_SHOWN = 64
"""Ranks of each side that a record lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Numbers of one rank's optimizers: where they differ, weights differ because of software.

    Attributes:
        updates: Updates made since the start of the run, by all guarded optimizers.
        skips: Updates skipped.
        scale: Loss scale of its GradScaler; None if there is none.
        groups: Digest of the numbers in `param_groups`: learning rates, betas, weight decay.
        steps: Digest of the steps that the optimizers' state counts.
    """

    updates: int = 0
    skips: int = 0
    scale: float | None = None
    groups: str = ""
    steps: str = ""


_FACT_IN_WORDS = {
    "updates": "updates made",
    "skips": "updates skipped",
    "scale": "loss scale",
    "groups": "numbers in param_groups (learning rate, betas, weight decay)",
    "steps": "steps counted by the optimizers",
}
_DIGESTS = ("groups", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """What check 3 asks before it names anybody.

    Attributes:
        optimizers: One per rank; empty if not asked.
        first: No update has been made in this segment: no device has computed anything yet.
        tensors_total: Tensors compared; None if all of them are in the tables.
        differing_total: Tensors that differ; None if all of them are in the tables.
        trained: For each optimizer the names of the tensors that it updates; empty if not known.
    """

    optimizers: Sequence[OptimizerFacts] = ()
    first: bool = False
    tensors_total: int | None = None
    differing_total: int | None = None
    trained: Sequence[Collection[str]] = ()


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


@dataclass(frozen=True, slots=True)
class _Column:
    """One tensor on which replicas differ.

    Attributes:
        tensor: Its name.
        sides: The largest sides, up to `SIDES_SHOWN`, the largest first: value and ranks.
        dissenters: Ranks that differ from a strict majority.
        strict: More than half hold the same bits.
    """

    tensor: str
    sides: tuple[tuple[Fingerprint, tuple[int, ...]], ...]
    dissenters: tuple[int, ...]
    strict: bool

    def record(self) -> Disagreement:
        return Disagreement(
            tensor=self.tensor,
            dissenters=self.dissenters[:RANKS_SHOWN],
            groups=tuple(ranks[:RANKS_SHOWN] for _, ranks in self.sides),
            fingerprints=tuple(
                f"{plain:016x}:{weighted:016x}" for (plain, weighted), _ in self.sides
            ),
        )


def _column(tensor: str, column: Sequence[Fingerprint]) -> _Column | None:
    """The sides that replicas take on one tensor, or None if there is one side only."""
    sizes = Counter(column)
    if len(sizes) == 1:
        return None
    shown = sizes.most_common(SIDES_SHOWN)  # equal ones in order of their first rank
    sides: dict[Fingerprint, list[int]] = {value: [] for value, _ in shown}
    for rank, value in enumerate(column):
        if value in sides:
            sides[value].append(rank)
    most, size = shown[0]
    strict = 2 * size > len(column)
    dissenters = tuple(r for r, value in enumerate(column) if value != most) if strict else ()
    listed = tuple((value, tuple(ranks)) for value, ranks in sides.items())
    return _Column(tensor, listed, dissenters, strict)


def differing_facts(facts: Sequence[OptimizerFacts]) -> tuple[str, ...]:
    """The numbers in which ranks differ, as clauses that say which ranks have which."""
    said = []
    for name in (f.name for f in fields(OptimizerFacts)):
        sides: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            sides.setdefault(repr(getattr(fact, name)), []).append(rank)
        if len(sides) < 2:
            continue
        ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))[:SIDES_SHOWN]
        if name in _DIGESTS:
            parts = " against ".join(list_ranks(ranks) for _, ranks in ordered)
        else:
            parts = ", ".join(f"{value} on {list_ranks(ranks)}" for value, ranks in ordered)
        said.append(f"{_FACT_IN_WORDS[name]}: {parts}")
    return tuple(said)


def _software(facts: SoftwareFacts, differing: int) -> str | None:
    """Why it is software that made the replicas differ, or None."""
    if facts.first:
        return (
            f"replicas differ on {count(differing, 'tensor')} before any device has computed an "
            "update in this segment: they were not loaded or initialized alike; software, so no "
            "device is named"
        )
    said = differing_facts(facts.optimizers)
    if not said:
        return None
    return (
        f"replicas differ on {count(differing, 'tensor')}, and so do the numbers of their "
        f"optimizers ({'; '.join(said)}): software, so no device is named"
    )


def _missed_an_update(
    named: Mapping[int, Sequence[str]], columns: Sequence[_Column], facts: SoftwareFacts
) -> tuple[int, ...]:
    """Ranks that dissent on every tensor of an optimizer, as far as they were gathered."""
    gathered = {column.tensor for column in columns}
    differing = facts.differing_total or len(columns)
    found = []
    for rank, tensors in named.items():
        own = set(tensors)
        for trained in facts.trained:
            known = gathered.intersection(trained)
            # Not all that differ are gathered: then all that are stand for the rest.
            complete = len(known) == len(trained) or differing > len(columns)
            if known and complete and known <= own:
                found.append(rank)
                break
    return tuple(sorted(found))


def split_local(
    names: Sequence[str], *, local: Sequence[str] = (), ignored: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Which tensors are replicas, and which belong to each rank alone.

    Args:
        names: All tensors.
        local: Patterns of the option `local`, as in a shell: ``"experts.*"``.
        ignored: Names in DDP's ignore list.

    Returns:
        The names to compare, those left out, and the patterns that match nothing.
    """
    left_out = tuple(
        name
        for name in names
        if name in ignored or any(fnmatchcase(name, pattern) for pattern in local)
    )
    apart = frozenset(left_out)
    unused = tuple(p for p in local if not any(fnmatchcase(name, p) for name in names))
    return tuple(name for name in names if name not in apart), left_out, unused


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
    *,
    software: SoftwareFacts | None = None,
) -> FingerprintJudgement:
    """Compare the weight fingerprints of all replicas.

    Args:
        names: Names of the tensors in the tables: all, or up to `TENSORS_GATHERED` that differ.
        tables: ``tables[rank][tensor]``, both checksums of that tensor on that rank.
        scales: Loss scale of each rank's GradScaler, if there is one.
        software: What else tells software from a device.
    """
    facts = software or SoftwareFacts()
    columns = [
        column
        for index, name in enumerate(names)
        if (column := _column(name, [table[index] for table in tables]))
    ]
    if not columns:
        return FingerprintJudgement(Outcome.PASS, "all replicas hold the same bits")
    disagreements = tuple(column.record() for column in columns[:TENSORS_GATHERED])
    world, everybody = len(tables), tuple(range(len(tables)))[:RANKS_SHOWN]
    differing = facts.differing_total or len(columns)
    because = _software(facts, differing) or _scale_reason(scales, differing)
    if because is not None:
        return FingerprintJudgement(
            Outcome.UNATTRIBUTED, because, disagreements, ranks=everybody, cause=Cause.SOFTWARE
        )
    dissent: dict[int, list[str]] = {}
    for column in columns:
        for rank in column.dissenters:
            dissent.setdefault(rank, []).append(column.tensor)
    total = facts.tensors_total or len(names)
    undecided = [column for column in columns if not column.strict]
    missed = _missed_an_update(dissent, columns, facts)
    if missed and len(missed) == len(dissent):
        return FingerprintJudgement(
            Outcome.UNATTRIBUTED,
            _both_readings(missed, differing, total),
            disagreements,
            ranks=missed[:RANKS_SHOWN],
            cause=Cause.UNKNOWN,
        )
    if dissent:
        apart = frozenset(missed)
        accused = [(r, tuple(t)) for r, t in sorted(dissent.items()) if r not in apart]
        reason = _reason(dict(accused), world, total, len(undecided))
        named = dict(accused[:RANKS_SHOWN])
        if missed:
            reason += f"; {_both_readings(missed, differing, total)}"
        involved = {r for c in columns for _, ranks in c.sides[1:] for r in ranks}
        return FingerprintJudgement(
            Outcome.SUSPECT, reason, disagreements, named, tuple(sorted(involved))[:RANKS_SHOWN]
        )
    sides = " against ".join(list_ranks(ranks) for _, ranks in undecided[0].sides[:4])
    reason = (
        f"replicas differ on {differing} of {count(total, 'tensor')} "
        f"({list_names([c.tensor for c in columns])}) and no strict majority holds the same bits: "
        f"{sides}"
    )
    return FingerprintJudgement(Outcome.UNATTRIBUTED, reason, disagreements, ranks=everybody)


def _both_readings(ranks: tuple[int, ...], differing: int, total: int) -> str:
    return (
        f"{list_ranks(ranks)} dissents on every tensor that an optimizer updates ({differing} of "
        f"{count(total, 'tensor')} differ), while update counts and the numbers of the optimizers "
        "are equal. Either software missed or scaled an update there, or the device computed a "
        "norm or a scale wrongly; weights cannot tell which, so nobody is named"
    )
