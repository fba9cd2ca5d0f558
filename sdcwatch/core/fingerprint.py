"""Check 3's judgement: which replica dissents, tensor by tensor; software is asked for first.

| what is known | says |
|---|---|
| replicas differ before the first update of the segment | `UNATTRIBUTED`, cause software |
| what the optimizers did differs (`OptimizerFacts`) | as above |
| ranks that dissent wrote into the tensors, or gradients, another number of times | as above |
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
NUMBERS_ASKED = 4
"""Ranks that tell the numbers of their optimizers where these differ."""
NUMBERS_SHOWN = 3
"""Numbers in which optimizers differ that a reason tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What one rank's software did: where that differs, weights differ because of it.

    All counts are since the replicas were last found equal.

    Attributes:
        updates: Updates made by all guarded optimizers.
        skips: Updates skipped by the guard; evidence only where `updates` differ too.
        scale: Loss scale of its GradScaler; None if there is none.
        rates: Learning rates of these updates, added up; None if they are tensors.
        groups: Digest of `param_groups`: who is in them, learning rates, betas, weight decay.
        steps: Digest of the steps that the optimizers' state counts, and of what is in it.
        loaded: Digest of the optimizers' state when the guard was made and at each load since.
        writes: In-place writes into the tensors that differ, as torch counts them: a rank's own
            code writes so, a broken memory cell does not.
        gradient_writes: The same of their gradients, between backward and update.
        untouched: No update has been made in this segment.
    """

    updates: int = 0
    skips: int = 0
    scale: float | None = None
    rates: float | None = None
    groups: str = ""
    steps: str = ""
    loaded: str = ""
    writes: int = 0
    gradient_writes: int = 0
    untouched: bool = False


_FACT_IN_WORDS = {
    "updates": "updates made",
    "skips": "updates skipped",
    "scale": "loss scales of the GradScalers",
    "rates": "learning rates of the updates, added up",
    "groups": "numbers in param_groups (learning rate, betas, weight decay)",
    "steps": "steps counted by the optimizers",
    "loaded": "optimizer state as it was loaded",
}
_WRITES_IN_WORDS = {
    "writes": "in-place writes into these weights",
    "gradient_writes": "in-place writes into their gradients after the backward",
}
_DIGESTS = ("groups", "steps", "loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """What check 3 asks before it names anybody.

    Attributes:
        optimizers: One per rank; empty if not asked.
        numbers: Clauses about single numbers in which the optimizers differ; see
            `differing_numbers`.
        first: No update has been made in this segment: no device has computed anything yet.
        since: Step at which the replicas were last equal; None if not known.
        tensors_total: Tensors compared; None if all of them are in the tables.
        differing_total: Tensors that differ; None if all of them are in the tables.
        trained: For each optimizer the names of the tensors that it updates; empty if not known.
    """

    optimizers: Sequence[OptimizerFacts] = ()
    numbers: Sequence[str] = ()
    first: bool = False
    since: int | None = None
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


def _sides(values: Iterable[str]) -> list[tuple[str, list[int]]]:
    """The largest sides, and which ranks are on each."""
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    return sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))[:SIDES_SHOWN]


def _clause(words: str, facts: Sequence[OptimizerFacts], name: str) -> str:
    """Which ranks have which value, or "" if all have the same."""
    values = [getattr(fact, name) for fact in facts]
    ordered = _sides(map(repr, values))
    # A scaler that lives on some ranks only may be one that has ended, or another model's.
    if len(ordered) < 2 or (name == "scale" and None in values):
        return ""
    # A script that itself leaves out what the guard skips has made the same updates.
    if name == "skips" and len({fact.updates for fact in facts}) == 1:
        return ""
    if name in _DIGESTS:
        return f"{words}: {' against '.join(list_ranks(ranks) for _, ranks in ordered)}"
    return f"{words}: {', '.join(f'{value} on {list_ranks(ranks)}' for value, ranks in ordered)}"


def differing_facts(facts: Sequence[OptimizerFacts]) -> tuple[str, ...]:
    """What the optimizers did differently, as clauses that say which ranks did what."""
    clauses = (_clause(words, facts, name) for name, words in _FACT_IN_WORDS.items())
    return tuple(clause for clause in clauses if clause)


def asked_numbers(facts: Sequence[OptimizerFacts]) -> tuple[int, ...]:
    """One rank of each of the largest sides whose optimizers hold other numbers; empty if none."""
    sides = _sides(f"{fact.groups} {fact.steps}" for fact in facts)
    return tuple(ranks[0] for _, ranks in sides[:NUMBERS_ASKED]) if len(sides) > 1 else ()


def differing_numbers(
    rows: Mapping[int, Mapping[str, str]], facts: Sequence[OptimizerFacts]
) -> tuple[str, ...]:
    """The first numbers in which optimizers differ, and on which ranks.

    Args:
        rows: Of each of `asked_numbers` what its optimizers hold, by name.
        facts: Of all ranks: those with equal digests hold what the one that was asked holds.
    """
    like: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        like.setdefault((fact.groups, fact.steps), []).append(rank)
    said = []
    for name in dict.fromkeys(n for row in rows.values() for n in row):
        sides: dict[str, list[int]] = {}
        for rank, row in rows.items():
            ranks = like[facts[rank].groups, facts[rank].steps]
            sides.setdefault(row.get(name, "missing"), []).extend(ranks)
        if len(sides) > 1:
            parts = (f"{value} on {list_ranks(ranks)}" for value, ranks in sides.items())
            said.append(f"{name}: {', '.join(parts)}")
    return tuple(said[:NUMBERS_SHOWN])


def _software(facts: SoftwareFacts, columns: Sequence[_Column], differing: int) -> str | None:
    """Why it is software that made the replicas differ, or None."""
    if facts.first:
        return (
            f"replicas differ on {count(differing, 'tensor')} before any device has computed an "
            "update in this segment: they were not loaded or initialized alike; software, so no "
            "device is named"
        )
    since = "" if facts.since is None else f" since step {facts.since}, when they were equal"
    said = differing_facts(facts.optimizers)
    if said:
        exactly = f"; {'; '.join(facts.numbers)}" if facts.numbers else ""
        return (
            f"replicas differ on {count(differing, 'tensor')}, and so does what their optimizers "
            f"did{since} ({'; '.join(said)}{exactly}): software, so no device is named"
        )
    for name, words in _WRITES_IN_WORDS.items():
        if _sides_differ_in(name, facts.optimizers, columns):
            return (
                f"replicas differ on {count(differing, 'tensor')} "
                f"({list_names([c.tensor for c in columns])}), and the code of the ranks wrote "
                f"there another number of times{since} ({_clause(words, facts.optimizers, name)}; "
                "a device that computes wrongly writes as often): software, so no device is named"
            )
    return None


def _sides_differ_in(
    name: str, facts: Sequence[OptimizerFacts], columns: Sequence[_Column]
) -> bool:
    """Whether no two ranks that differ on a tensor have the same number."""
    if not facts:
        return False
    for column in columns:
        side_of: dict[int, int] = {}
        for side, (_, ranks) in enumerate(column.sides):
            if any(side_of.setdefault(getattr(facts[r], name), side) != side for r in ranks):
                return False
    return True


def _wrote_otherwise(facts: Sequence[OptimizerFacts]) -> frozenset[int]:
    """Ranks whose code wrote another number of times than that of the others."""
    found: set[int] = set()
    for name in _WRITES_IN_WORDS if facts else ():
        numbers = [getattr(fact, name) for fact in facts]
        (usual, _), *_ = Counter(numbers).most_common(1)
        found |= {rank for rank, number in enumerate(numbers) if number != usual}
    return frozenset(found)


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


def written_by_forwards(judgement: FingerprintJudgement) -> FingerprintJudgement:
    """The judgement where the forward of a rank writes weights: nobody's device is named.

    What a forward writes of each rank's own data, such as the rows of an embedding with `max_norm`
    or a codebook in a parameter, makes replicas differ under plain DDP too.
    """
    reason = (
        f"{judgement.reason}; the forward writes weights, so each rank may have written its own: "
        "reduce what is written over the ranks, or write it after optimizer.step(); no device is "
        "named"
    )
    ranks = judgement.ranks or tuple(sorted(judgement.named))[:RANKS_SHOWN]
    return replace(
        judgement,
        outcome=Outcome.UNATTRIBUTED,
        reason=reason,
        named={},
        ranks=ranks,
        cause=Cause.SOFTWARE,
    )


def judge_fingerprints(
    names: Sequence[str],
    tables: Sequence[Sequence[Fingerprint]],
    *,
    software: SoftwareFacts | None = None,
) -> FingerprintJudgement:
    """Compare the weight fingerprints of all replicas.

    Args:
        names: Names of the tensors in the tables: all, or up to `TENSORS_GATHERED` that differ.
        tables: ``tables[rank][tensor]``, both checksums of that tensor on that rank.
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
    because = _software(facts, columns, differing)
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
    wrote = tuple(sorted(_wrote_otherwise(facts.optimizers) & dissent.keys() - {*missed}))
    also = [_both_readings(missed, differing, total)] if missed else []
    if wrote:
        also.append(f"the code of {list_ranks(wrote)} wrote there another number of times")
    named = {r: tuple(t) for r, t in sorted(dissent.items()) if r not in (*missed, *wrote)}
    if named:
        reason = "; ".join((_reason(named, world, total, len(undecided)), *also))
        named = dict(list(named.items())[:RANKS_SHOWN])
        involved = {r for c in columns for _, ranks in c.sides[1:] for r in ranks}
        return FingerprintJudgement(
            Outcome.SUSPECT, reason, disagreements, named, tuple(sorted(involved))[:RANKS_SHOWN]
        )
    if dissent:
        return FingerprintJudgement(
            Outcome.UNATTRIBUTED,
            "; ".join(also),
            disagreements,
            ranks=tuple(sorted(dissent))[:RANKS_SHOWN],
            cause=Cause.UNKNOWN if missed else Cause.SOFTWARE,
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
