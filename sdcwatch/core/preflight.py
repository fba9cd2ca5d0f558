"""What the audits can promise on this model and machine: decided before they are armed.

What is audited is the call of the module that DDP wraps. Its contract has four clauses, and
preflight proves each on every rank; one that does not hold is named with what to write instead,
lowers the coverage, and never names a device.

| clause | proven by | otherwise |
|---|---|---|
| local | no collective runs in a replay | coverage off |
| no trace | nothing is moved that cannot be put back, no generator is disturbed | coverage off |
| one way in | gradients enter by the outputs only | coverage off |
| the same bits again | the step and two replays of it are equal | outputs only, or off |
| the same on every rank | one common micro-batch, `judge_common` | the ranks differ |

A domain that deviates alone while all others agree is left to the audits, which have arbiters; a
computation that deviates on several domains does not repeat, and comparing it would only name
healthy devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sdcwatch.core.arbitration import ERROR_PREFIX, is_error
from sdcwatch.core.enums import Cause, Coverage, Outcome
from sdcwatch.core.text import list_names, list_ranks, shortened
from sdcwatch.core.topology import DOMAINS_TO_NAME, Topology

ATTEMPTS = 3
"""Preflight steps in a row that may run out of memory before the audits are given up."""
RINGS_TO_ARM = 2
"""First audits in a row without any mismatch before coverage is full."""
COMPARED_NOTHING = frozenset((Outcome.NOT_RUN, Outcome.VOID, Outcome.TRANSPORT))
"""What a first audit comes to that says neither that ranks agree nor that they do not."""
LONGEST_WAIT = 64
"""Due audits that are left out at most after errors in a row."""
FACTS_SHOWN = 6
"""Facts about software and environment that a text lists."""
SIDES_SHOWN = 4
OR_BROKEN = ", or the device is broken"
"""Of a rank that differs, until a trace of operations has said that it is software."""
VALUE_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAudit:
    """What one rank found about itself in one preflight step.

    Attributes:
        rank: The rank.
        outputs_equal: The outputs of the step equal those of its replay, bit for bit.
        gradients_equal: So do the gradients.
        loss_repeats: Two replays have the same outputs.
        gradients_repeat: Two replays have the same gradients.
        differing: Parameters whose gradient differs between step and replay, at most ten.
        error: What a replay ended with.
        out_of_memory: It was that memory ran out, which may not happen again.
        collectives: Where the call runs a collective: operation, group, file and line.
        left_behind: What the call changes and no replay can put back: parameters, what cannot be
            copied.
        hidden: What the call moves outside of the module; a replay puts it back.
        doors: Ways by which gradients enter other than by the outputs.
        disturbed: Generators that something outside of the call drew from.
        not_run: Why nothing could be compared, or "".
        unrepeated: Which operation does not repeat, and what to set, as a trace found; "" without.
    """

    rank: int
    outputs_equal: bool = True
    gradients_equal: bool = True
    loss_repeats: bool = True
    gradients_repeat: bool = True
    differing: tuple[str, ...] = ()
    error: str = ""
    out_of_memory: bool = False
    collectives: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    doors: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    not_run: str = ""
    unrepeated: str = ""


@dataclass(frozen=True, slots=True)
class PreflightJudgement:
    """What one preflight step says.

    Attributes:
        coverage: What can be compared; None asks for another try.
        reason: One sentence for a person, with what to mend.
        notes: Ranks that deviate alone.
        out_of_memory: The other try is for want of memory, not for deterministic kernels.
    """

    coverage: Coverage | None
    reason: str
    notes: tuple[str, ...] = ()
    out_of_memory: bool = False


def _tolerated(ranks: Sequence[int], world: int, topology: Topology | None) -> bool:
    """One fault domain of at least three: a device, or a node, rather than the computation."""
    if topology is None:
        return world >= DOMAINS_TO_NAME and len(ranks) <= 1
    domains = topology.domains
    enough = len(topology.domain_sizes) >= DOMAINS_TO_NAME
    return enough and len({domains[rank] for rank in ranks}) <= 1


_CLAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "collectives",
        "the forward runs a collective",
        "it cannot be replayed on some ranks only. Return what it gathers from the module, and "
        "gather in the training loop",
    ),
    (
        "left_behind",
        "the forward changes what no replay can put back",
        "change it after the call instead, where it is updated from the outputs or the weights",
    ),
    (
        "doors",
        "gradients enter the module by another way than its outputs",
        "let the module return what that term is computed from, or the term itself",
    ),
    (
        "disturbed",
        "something else draws random numbers while the module computes",
        "give what runs beside it, such as a loading thread, a torch.Generator of its own",
    ),
)
"""Field of `SelfAudit`, the clause that does not hold, and what to write instead."""


def _broken_clause(rows: Sequence[SelfAudit]) -> str | None:
    for name, what, instead in _CLAUSES:
        found = {row.rank: getattr(row, name) for row in rows if getattr(row, name)}
        if found:
            first = next(iter(found.values()))
            return f"{what} on {list_ranks(found)} ({list_names(first)}): {instead}"
    return None


def judge_preflight(
    rows: Sequence[SelfAudit],
    *,
    deterministic: bool,
    topology: Topology | None = None,
    attempt: int = ATTEMPTS,
) -> PreflightJudgement:
    """Judge one preflight step from every rank's audit of itself.

    Args:
        rows: One per rank.
        deterministic: Deterministic kernels were on.
        topology: Where the ranks are; each is a fault domain of its own if not given.
        attempt: Which step in a row this is that ran out of memory, counted from 1.
    """
    world = len(rows)
    failed = [r for r in rows if r.error]
    if failed and attempt < ATTEMPTS and all(r.out_of_memory for r in failed):
        who = list_ranks(r.rank for r in failed)
        reason = f"a replay on {who} ran out of memory; preflight tries the next step"
        return PreflightJudgement(None, reason, out_of_memory=True)
    problem = _broken_clause(rows) or _could_not_run(rows)
    if problem is not None:
        return PreflightJudgement(Coverage.OFF, problem)
    restless = [r.rank for r in rows if not (r.loss_repeats and r.gradients_repeat)]
    if restless and not _tolerated(restless, world, topology):
        return _does_not_repeat(rows, restless, deterministic=deterministic)
    settled = [r for r in rows if r.rank not in frozenset(restless)]
    outputs = [r.rank for r in settled if not r.outputs_equal]
    if outputs and not _tolerated(outputs, world, topology):
        return PreflightJudgement(
            Coverage.OFF,
            f"the outputs of the step differ from their replay's on {list_ranks(outputs)}: the "
            "forward depends on something besides its inputs, weights, buffers and torch's default "
            f"generators, or changes it{_kept_outside(settled, outputs)}",
        )
    differs = [r for r in settled if not r.gradients_equal]
    ranks = [r.rank for r in differs]
    if differs and not _tolerated(ranks, world, topology):
        return PreflightJudgement(
            Coverage.OUTPUTS_ONLY,
            f"the gradients of the step differ from their replay's on {list_ranks(ranks)} "
            f"({list_names(differs[0].differing)}): a term reaches them by another way than the "
            "outputs, or the backward does more than backward(); only outputs are compared",
        )
    alone = list(dict.fromkeys((*restless, *outputs, *ranks)))
    notes = []
    if alone:
        who = list_ranks(alone)
        notes.append(f"{who} alone deviates from its own replay; the audits will tell why")
    return PreflightJudgement(Coverage.FULL, "step and replay are equal bit for bit", tuple(notes))


def _kept_outside(rows: Sequence[SelfAudit], ranks: Sequence[int]) -> str:
    """What the forward was seen to move outside of the module, and what to write instead."""
    found = next((row.hidden for row in rows if row.rank in ranks and row.hidden), ())
    keep = "keep it in a buffer or an attribute of the module"
    if not found:
        return f": {keep}, and draw from the default generators"
    return f" ({list_names(found)}): {keep}"


def _could_not_run(rows: Sequence[SelfAudit]) -> str | None:
    failed = [r for r in rows if r.error]
    if failed:
        return (
            f"a replay on {list_ranks(r.rank for r in failed)} ended with {failed[0].error}; the "
            "forward must be callable again with the same inputs"
        )
    idle = [r for r in rows if r.not_run]
    if idle:
        return f"{list_ranks(r.rank for r in idle)} cannot be replayed: {idle[0].not_run}"
    return None


def _does_not_repeat(
    rows: Sequence[SelfAudit], restless: Sequence[int], *, deterministic: bool
) -> PreflightJudgement:
    traced = next((r.unrepeated for r in rows if r.unrepeated), "")
    if not deterministic:
        reason = f"replays do not repeat on {list_ranks(restless)}"
        note = f"with your own kernels {reason}: {traced}"
        return PreflightJudgement(None, reason, (note,) if traced else ())
    if all(r.loss_repeats and r.outputs_equal for r in rows):
        return PreflightJudgement(
            Coverage.OUTPUTS_ONLY,
            f"gradients do not repeat on {list_ranks(restless)}, with deterministic kernels "
            f"either; only outputs are compared{traced and f'; {traced}'}",
        )
    return PreflightJudgement(
        Coverage.OFF,
        f"outputs do not repeat on {list_ranks(restless)}, with deterministic kernels either: "
        + (
            traced
            or "seed every generator that the forward uses, or replace the operation that does not "
            "repeat"
        ),
    )


# --- the same on every rank ---


@dataclass(frozen=True, slots=True)
class CommonJudgement:
    """What all ranks made of one common micro-batch.

    Attributes:
        matched: Ranks that hold the value of the majority.
        differing: Ranks that hold another; software or an environment until a person has looked.
        coverage: `OFF` if no side is a majority; else None, and the audits leave `differing` out.
        reason: One sentence for a person.
        separating: Facts about software and environment that separate `differing` from the rest.
        sides: The first rank of each side, the largest first, where none is a majority.
        cause: `SOFTWARE` or `DEVICE` where something tells; `UNKNOWN` without.
        operator: The operation in which they begin to differ, as a trace found; "" without.
        audited: Ranks that hold another value and are audited all the same: their devices matched
            in an earlier segment.
    """

    matched: tuple[int, ...]
    differing: tuple[int, ...]
    coverage: Coverage | None
    reason: str
    separating: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()
    cause: Cause = Cause.UNKNOWN
    operator: str = ""
    audited: tuple[int, ...] = ()


def judge_common(
    values: Sequence[str | None],
    environments: Sequence[Mapping[str, str]],
    topology: Topology,
    *,
    deciding: Collection[str] = (),
    known: Collection[int] = (),
) -> CommonJudgement:
    """Judge what every rank computed from one common micro-batch, with the same weights.

    A rank that raised where the majority did not differs too. One that could make no replay, for
    a reason of the guard's, is on neither side.

    Args:
        values: One per rank, compared for equality only; of one that raised see `error_value`, and
            None of one that could not be asked.
        environments: Facts about software and environment of each rank.
        topology: Where the ranks are.
        deciding: Facts that choose kernels: a rank in which one is not that of the majority is left
            out even if this micro-batch came to the same bits.
        known: Ranks on devices that matched in an earlier segment of the run: where no fact about
            software separates those that differ, the audits judge these as any other.
    """
    decide = sorted(deciding)
    sides: dict[tuple[str, ...], list[int]] = {}
    failed: dict[int, str] = {}
    for rank, value in enumerate(values):
        if value is not None and is_error(value):
            failed[rank] = value.removeprefix(ERROR_PREFIX).strip()
        elif value is not None:
            kernels = (environments[rank].get(key, "not set") for key in decide)
            sides.setdefault((value, *kernels), []).append(rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    if not ordered:
        why = f": {next(iter(failed.values()))}" if failed else ""
        return CommonJudgement(
            (), (), Coverage.OFF, f"no rank could replay the common micro-batch{why}"
        )
    most = ordered[0]
    rest = tuple(sorted({r for ranks in ordered[1:] for r in ranks} | failed.keys()))
    if not rest:
        return CommonJudgement(tuple(most), (), None, "all ranks compute the same bits")
    bits = {value for value in values if value is not None}
    domains = {topology.domains[rank] for rank in most}
    if 2 * len(most) <= len(values) or len(domains) < min(2, len(topology.domain_sizes)):
        shown = " against ".join(list_ranks(ranks) for ranks in ordered[:SIDES_SHOWN])
        facts = environment_differences(environments)
        how = "compute other bits" if len(bits) > 1 else "run in other environments"
        reason = f"the forward is not the same function on every rank: {shown} {how}"
        if failed:
            reason += f"; {_raised(failed)}"
        said = f"{_with_facts(reason, facts)}; {_what_to_write(facts, bits)}"
        first = tuple(ranks[0] for ranks in ordered)
        return CommonJudgement((), (), Coverage.OFF, said, tuple(facts), first, _cause(facts))
    separating = separating_facts(environments, rest)
    how = (
        f"computes other bits than {list_ranks(most)} from the same micro-batch and weights"
        if len(bits) > 1
        else f"runs in another environment than {list_ranks(most)}"
    )
    if failed:
        how += f" ({_raised(failed)})"
    apart = rest if separating else tuple(rank for rank in rest if rank not in known)
    again = tuple(rank for rank in rest if rank not in apart)
    said = _with_facts(f"{list_ranks(rest)} {how}{_left_out(apart, again)}", separating)
    cause = _cause(separating)
    return CommonJudgement(tuple(most), apart, None, said, separating, cause=cause, audited=again)


def _what_to_write(facts: Sequence[str], bits: Collection[str]) -> str:
    """What makes a forward the same function, as far as bits and facts tell."""
    if len(bits) < 2:
        return "run every rank in the same environment"
    do = "make it the same, or give the module what differs between ranks as an argument"
    hashed = any(fact.startswith("string_hash ") for fact in facts)
    return f"set PYTHONHASHSEED if it iterates over a set of strings, {do}" if hashed else do


def _left_out(apart: Sequence[int], again: Sequence[int]) -> str:
    """What becomes of ranks that differ, as clauses."""
    parts = [""]
    if apart:
        who = list_ranks(apart) if again else "and"
        parts.append(
            f"{who} is left out of the audits: the forward is not the same function "
            f"there{OR_BROKEN}"
        )
    if again:
        parts.append(f"the device of {list_ranks(again)} matched in an earlier segment: audited")
    return ", ".join(parts)


def _cause(separating: Sequence[str]) -> Cause:
    """Software, as soon as a fact separates the ranks."""
    return Cause.SOFTWARE if separating else Cause.UNKNOWN


def _raised(failed: Mapping[int, str]) -> str:
    return f"the replay on {list_ranks(failed)} ended with {next(iter(failed.values()))}"


def _with_facts(reason: str, facts: Sequence[str]) -> str:
    if facts:
        return f"{reason}; {'; '.join(facts)}"
    return f"{reason}; no fact about software or environment separates them"


def _said(key: str, environments: Sequence[Mapping[str, str]]) -> str | None:
    """One fact in which ranks differ, with the ranks on each side; None if all have the same."""
    values = [environment.get(key, "not set") for environment in environments]
    if len(set(values)) < 2:
        return None
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1][0]))
    parts = [f"{shortened(v, VALUE_SHOWN)!r} on {list_ranks(r)}" for v, r in ordered[:SIDES_SHOWN]]
    if len(ordered) > SIDES_SHOWN:
        parts.append(f"{len(ordered) - SIDES_SHOWN} more values")
    return f"{key} differs: " + ", ".join(parts)


def _keys(environments: Sequence[Mapping[str, str]]) -> list[str]:
    return sorted({key for environment in environments for key in environment})


def environment_differences(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence per fact in which ranks differ, naming the ranks on each side.

    Args:
        environments: Facts about software and environment, by rank.
    """
    said = [text for key in _keys(environments) if (text := _said(key, environments))]
    more = len(said) - FACTS_SHOWN
    return [*said[:FACTS_SHOWN], f"{more} more facts differ"] if more > 0 else said


def separating_facts(
    environments: Sequence[Mapping[str, str]], inside: Collection[int]
) -> tuple[str, ...]:
    """The facts that no rank of one side shares with a rank of the other.

    One in which the others do not agree among themselves, although they compute the same, explains
    nothing: hash seeds differ in every process unless PYTHONHASHSEED is set.

    Args:
        environments: Facts about software and environment, by rank.
        inside: The ranks of one side.
    """
    ranks = frozenset(inside)
    found = []
    for key in _keys(environments):
        values = [environment.get(key, "not set") for environment in environments]
        if len(set(values)) < 2:
            continue
        here = {values[rank] for rank in ranks}
        there = {value for rank, value in enumerate(values) if rank not in ranks}
        if here and len(there) == 1 and here.isdisjoint(there):
            found.append(_said(key, environments) or "")
    return tuple(found[:FACTS_SHOWN])


# --- schedules ---


@dataclass(frozen=True, slots=True)
class FirstRings:
    """The first audits over the ring: coverage is full when several in a row had no mismatch.

    Attributes:
        clean: Audits without any mismatch so far, in a row.
    """

    clean: int = 0

    @property
    def enough(self) -> bool:
        """The audits can be armed."""
        return self.clean >= RINGS_TO_ARM

    def after(self, outcome: Outcome) -> FirstRings:
        """One more audit. One that compared nothing does not count, and ends no streak."""
        if outcome in COMPARED_NOTHING:
            return self
        clean = outcome in (Outcome.PASS, Outcome.DIFFERS)
        return FirstRings(self.clean + 1 if clean else 0)


@dataclass(frozen=True, slots=True)
class Backoff:
    """When to try again after replays that ended with an error: at due steps, ever more rarely.

    Attributes:
        errors: Errors in a row.
        waits: Due steps still to be left out.
    """

    errors: int = 0
    waits: int = 0

    @property
    def alarms(self) -> bool:
        """Only the first error in a row is told as one; the others are counted."""
        return self.errors <= 1

    def failed(self) -> Backoff:
        """An audit ended with an error: the next due step tries again, then ever fewer do."""
        return Backoff(self.errors + 1, min(2**self.errors, LONGEST_WAIT) - 1)

    def succeeded(self) -> Backoff:
        """An audit ended without one."""
        return Backoff() if self.errors else self

    def due(self) -> tuple[bool, Backoff]:
        """Whether to try at this due step, and what is left after it."""
        return (False, replace(self, waits=self.waits - 1)) if self.waits else (True, self)


@dataclass(frozen=True, slots=True)
class Owed:
    """When an audit that was due and could not be made is made up for.

    At the next step, and whenever that fails again after twice as many: what stands in the way may
    stay, and a step that is captured for an audit costs more.

    Attributes:
        misses: How many in a row could not be made.
        at: Step from which on one is due; None if none is owed.
    """

    misses: int = 0
    at: int | None = None

    def missed(self, step: int, most: int) -> Owed:
        """The audit of `step` could not be made; the next try comes `most` steps later at most."""
        return Owed(self.misses + 1, step + min(2**self.misses, most))

    def due(self, step: int) -> bool:
        """Whether it is to be made up for now."""
        return self.at is not None and step >= self.at


def audited_micro_batch(seed: int, step: int, last_count: int | None) -> int | None:
    """Which micro-batch of an accumulated step is audited, counted from 0; None for the last one.

    The same on every rank, and another one from step to step, so that a device that is wrong in
    some of them only is found too.

    Args:
        seed: Of the configuration.
        step: The step to be audited.
        last_count: Micro-batches of the step before; None if there was none, or if it is not known.
    """
    if last_count is None or last_count <= 1:
        return None
    digest = hashlib.sha256(f"micro-batch {seed} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % last_count


def audited_share(count: int) -> str:
    """How much of an accumulated step is audited, as a clause; "" if all of it."""
    return f"1 of {count} micro-batches of each audited step" if count > 1 else ""
