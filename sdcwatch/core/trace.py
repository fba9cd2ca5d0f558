"""Judges traces of operations: in which operation a device went wrong, or what the software did.

A trace is the list of all operations of one replay, forward and backward, in order, each with
fingerprints of what it read and wrote. Two ranks that trace the same micro-batch differ first
somewhere, and that place tells:

| first difference | outcome |
|---|---|
| same operation, same inputs, other output | `DEVICE`: it computed wrongly in this operation |
| one rank finds a value other than it was left by the operation that wrote it | `DAMAGED`: the |
| | device too, in memory or on the way, with the operation that produced the value |
| another operation, another module, another constant, or inputs from outside | `SOFTWARE` |
| one rank's own traces differ | `NONDETERMINISTIC`: the operation, and what to set |
| none | `EQUAL` |
| a value that code wrote which a trace cannot see | `BLIND` |

**What crosses.** Never a whole trace. `Trace.outline` has running digests of every so many
operations (at most `OUTLINE_BYTES`); `first_difference` of all outlines gives the same few
positions on every rank; `Trace.section` of those (at most `SECTION_BYTES`) is enough for `judge`.

**What does not repeat on one rank only.** A broken device may give other wrong bits each time.
Where all ranks that are right repeat themselves, and the first operation in which the disputed one
differs from them has the same inputs, it is the device.

**Why two ranks that are right.** Some operations return memory that nothing wrote, and so differ
on healthy devices. Where the ranks that are right differ from each other first, nobody is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdcwatch.core.text import list_ranks
from sdcwatch.core.trace_values import (
    Born,
    Change,
    Operation,
    Outline,
    Place,
    Section,
    Trace,
    TraceFinding,
    TraceOutcome,
    Value,
)


@dataclass(frozen=True, slots=True)
class Side:
    """What one rank's trace of a micro-batch told the others.

    Attributes:
        rank: The rank.
        outline: Its trace in few bytes.
        section: The operations at `first_difference`; None where there is no difference.
    """

    rank: int
    outline: Outline
    section: Section | None = None


def first_difference(outlines: Sequence[Outline]) -> range | None:
    """Positions among which some traces differ first; None if they are all equal.

    The same on every rank that has the same outlines, in any order. Blind ones do not count.
    """
    outlines = [outline for outline in outlines if not outline.blind]
    if not outlines:
        return None
    stride = max(outline.stride for outline in outlines)
    shortest = min(outline.count for outline in outlines)
    for end in range(stride, shortest + 1, stride):
        if len({outline.at(end) for outline in outlines}) > 1:
            return range(end - stride, end)
    if len({(outline.count, outline.total) for outline in outlines}) == 1:
        return None
    start = shortest // stride * stride
    return range(start, start + stride)


def window_of(outlines: Sequence[Outline]) -> range | None:
    """Positions whose operations `judge` needs; None for none.

    Args:
        outlines: Of the disputed rank, then of those that are right.
    """
    return first_difference([outlines[0], *(o for o in outlines[1:] if o.faithful)])


def judge(disputed: Side, right: Sequence[Side]) -> TraceFinding:
    """Say what the traces of one micro-batch by several ranks come to.

    Pure, and the same on every rank that has the same sides.

    Args:
        disputed: The rank whose result the others do not share.
        right: One or more ranks whose results are equal; with two or more, an operation in which
            healthy ranks differ too names nobody.
    """
    usable = [side for side in right if not side.outline.blind and side.outline.faithful]
    if reason := _why_blind(disputed, right, usable):
        return TraceFinding(outcome=TraceOutcome.BLIND, detail=reason)
    unrepeated = _unrepeated((disputed, *usable))
    if any(side.outline.unrepeated is not None for side in usable):
        assert unrepeated is not None
        return unrepeated
    found = _against(disputed, usable)
    if unrepeated is None or (found.names_device and found.rank == disputed.rank):
        return found
    return unrepeated


def _against(disputed: Side, usable: Sequence[Side]) -> TraceFinding:
    sides = (disputed, *usable)
    if first_difference([side.outline for side in sides]) is None:
        return TraceFinding(outcome=TraceOutcome.EQUAL, detail="every operation is the same")
    if any(side.section is None or not side.section.complete for side in sides):
        detail = "the operations that differ were not exchanged"
        return TraceFinding(outcome=TraceOutcome.BLIND, detail=detail)
    reference = usable[0]
    own = _first(disputed, reference)
    among = [(at, side) for side in usable[1:] if (at := _first(side, reference)) is not None]
    if among and (own is None or min(at for at, _ in among) <= own):
        return _among_right(reference, *min(among, key=lambda pair: pair[0]))
    if own is not None:
        return _classify(disputed, reference, own)
    if first_difference([disputed.outline, reference.outline]) is None:
        return TraceFinding(outcome=TraceOutcome.EQUAL, detail="every operation is the same")
    detail = "the operations that differ were not exchanged"
    return TraceFinding(outcome=TraceOutcome.BLIND, detail=detail)


def _why_blind(disputed: Side, right: Sequence[Side], usable: Sequence[Side]) -> str:
    if disputed.outline.blind:
        return disputed.outline.blind
    if usable:
        return ""
    reasons = [side.outline.blind for side in right if side.outline.blind]
    if reasons:
        return reasons[0]
    if right:
        return "under the trace the call came to other numbers than without it"
    return "no rank whose result is right was traced"


def _unrepeated(sides: Sequence[Side]) -> TraceFinding | None:
    found = [(s.rank, own) for s in sides if (own := s.outline.unrepeated) is not None]
    if not found:
        return None
    rank, first = found[0]
    only = rank if len(found) == 1 else None
    ranks = list_ranks(rank for rank, _ in found)
    return replace(first, rank=only, detail=f"{first.detail} ({ranks} of {len(sides)})")


def _first(one: Side, other: Side) -> int | None:
    """The first position in the sections at which two ranks differ."""
    assert one.section is not None
    assert other.section is not None
    return _first_operation(one.section, other.section)


def _first_operation(one: Section, other: Section) -> int | None:
    longest = max(len(one.operations), len(other.operations))
    for offset in range(longest):
        if one.operations[offset : offset + 1] != other.operations[offset : offset + 1]:
            return one.start + offset
    return None


def _among_right(reference: Side, position: int, other: Side) -> TraceFinding:
    found = _classify(other, reference, position)
    if found.outcome is TraceOutcome.SOFTWARE:
        return found
    detail = f"{list_ranks((reference.rank, other.rank))}, both right, differ here too"
    return replace(found, outcome=TraceOutcome.BLIND, rank=None, detail=detail)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The operations of two ranks at one position."""

    ranks: tuple[int, int]
    position: int
    here: Operation
    there: Operation

    def found(
        self,
        outcome: TraceOutcome,
        detail: str,
        place: Place | None = None,
        rank: int | None = None,
    ) -> TraceFinding:
        place = place or self.here.place
        return TraceFinding(
            outcome=outcome,
            operator=place.operator,
            module=place.module,
            backward=place.backward,
            position=self.position,
            rank=rank,
            detail=detail,
            line=self.here.line if place is self.here.place else "",
        )


def _classify(disputed: Side, reference: Side, position: int) -> TraceFinding:
    assert disputed.section is not None
    assert reference.section is not None
    here = disputed.section.operations[position - disputed.section.start :]
    there = reference.section.operations[position - reference.section.start :]
    ranks = (disputed.rank, reference.rank)
    if not here or not there:
        one, rank = (here or there)[0], ranks[0] if here else ranks[1]
        pair = _Pair(ranks, position, one, one)
        return pair.found(TraceOutcome.SOFTWARE, f"only rank {rank} runs it")
    return _compare(_Pair(ranks, position, here[0], there[0]))


def _compare(pair: _Pair) -> TraceFinding:
    here, there = pair.here, pair.there
    if here.place != there.place or len(here.inputs) != len(there.inputs):
        detail = f"rank {pair.ranks[1]} runs {there.place} instead"
        if here.place == there.place:
            detail = f"with another number of arguments on rank {pair.ranks[1]}"
        return pair.found(TraceOutcome.SOFTWARE, detail)
    values = [(a, b) for a, b in zip(here.inputs, there.inputs, strict=True) if a != b]
    for own, other in values:
        if own.change is not other.change:
            return _one_sided(pair, own, other)
    if values:
        return _other_input(pair, *values[0])
    return _other_output(pair)


def _one_sided(pair: _Pair, own: Value, other: Value) -> TraceFinding:
    """A value changed behind the operations of one rank only."""
    changed, rank = (
        (own, pair.ranks[0]) if own.change is not Change.NONE else (other, pair.ranks[1])
    )
    if Change.EXPOSED in (own.change, other.change):
        detail = "its input changed in memory that other code holds, by numpy() or a pointer"
        return pair.found(TraceOutcome.BLIND, detail)
    reader = pair.here.place
    read = f"before {replace(reader, backward=False)} read it{' in the backward' * reader.backward}"
    if reader.operator.startswith("("):  # where the replay takes a result
        read = f"before it was taken as the {reader.operator.strip('()')}"
    if changed.by is None:
        detail = f"{changed.origin or 'its input'} changed before it was read"
        return pair.found(TraceOutcome.DAMAGED, detail, rank=rank)
    detail = f"its result changed {read}"
    return pair.found(TraceOutcome.DAMAGED, detail, changed.by, rank)


def _other_input(pair: _Pair, own: Value, other: Value) -> TraceFinding:
    if own.kind != other.kind:
        return pair.found(
            TraceOutcome.SOFTWARE, f"its input is {own.kind}, on rank {pair.ranks[1]} {other.kind}"
        )
    if (own.born, own.origin, own.writer) != (other.born, other.origin, other.writer):
        return pair.found(TraceOutcome.SOFTWARE, "it reads another tensor")
    if own.born is Born.CODE:
        return pair.found(
            TraceOutcome.SOFTWARE,
            f"`{own.kind}` is {own.bits}, and {other.bits} on rank {pair.ranks[1]}",
        )
    if own.born is Born.GENERATOR:
        return pair.found(TraceOutcome.SOFTWARE, f"its {own.kind} stands elsewhere")
    if own.change is not Change.NONE:
        detail = "code that a trace cannot see wrote its input, on both ranks"
        return pair.found(TraceOutcome.BLIND, detail)
    if own.born is Born.GIVEN:
        detail = f"{own.origin} is the same in the message, and was read as another value"
        return pair.found(TraceOutcome.DAMAGED, detail)
    if own.born is Born.OUTSIDE:
        detail = "a tensor that it reads comes from outside the call, and differs"
        return pair.found(TraceOutcome.SOFTWARE, detail)
    if own.born is Born.UNSET:
        detail = "it reads memory that no operation has written"
        return pair.found(TraceOutcome.BLIND, detail)
    if own.born is Born.PARTLY:
        detail = "it reads memory of which operations have written a part only"
        return pair.found(TraceOutcome.SOFTWARE, detail)
    return pair.found(TraceOutcome.BLIND, "where its input differs cannot be seen")


def _other_output(pair: _Pair) -> TraceFinding:
    here, there = pair.here.outputs, pair.there.outputs
    if [v.kind for v in here] != [v.kind for v in there]:
        detail = "from the same inputs it gives another shape, layout or type"
        return pair.found(TraceOutcome.SOFTWARE, detail)
    detail = "from the same inputs it gives other bits"
    return pair.found(TraceOutcome.DEVICE, detail, rank=pair.ranks[0])


# --- one rank's own traces ---


def compare_repeats(first: Trace, again: Trace) -> TraceFinding | None:
    """What differs between two traces of one micro-batch by one rank; None if nothing does.

    Returns:
        `NONDETERMINISTIC` with the operation that does not repeat and what to set, or `BLIND`.
    """
    if first.blind or again.blind:
        return TraceFinding(outcome=TraceOutcome.BLIND, detail=first.blind or again.blind)
    one, other = Section(0, first.operations), Section(0, again.operations)
    position = _first_operation(one, other)
    if position is None:
        return None
    window = range(position, position + 1)
    sides = [Side(-1, _NO_OUTLINE, trace.section(window)) for trace in (first, again)]
    found = _classify(sides[0], sides[1], position)
    detail, advice = _in_repeats(found, sides[0].section)
    return replace(
        found, outcome=TraceOutcome.NONDETERMINISTIC, rank=None, detail=detail, advice=advice
    )


_NO_OUTLINE = Trace().outline()


def _in_repeats(found: TraceFinding, section: Section | None) -> tuple[str, str]:
    if found.outcome is TraceOutcome.DEVICE:
        return "it does not repeat: the same inputs give other bits", what_to_set(found.operator)
    if found.outcome is TraceOutcome.DAMAGED:
        return (
            "its result changed before it was read, in one of two repeats",
            "Look for another stream or thread that writes it; if there is none, it is the device.",
        )
    if "generator" in found.detail:
        return (
            "it draws other random numbers in each repeat",
            "Draw from the global generators of torch, Python or NumPy, which a replay puts back.",
        )
    if "operation has written" in found.detail or "operations have written" in found.detail:
        return found.detail, "Fill the tensor before it is read."
    return (
        "each repeat gets there in another way or with other inputs",
        "Let the forward depend on its arguments, parameters, buffers and attributes only.",
    )


_ALGORITHMS = "torch.use_deterministic_algorithms(True)"
_MATMUL = frozenset(
    ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot")
)


def what_to_set(operator: str) -> str:
    """What makes an operation repeat bit for bit, as a sentence.

    Args:
        operator: As torch calls it, "aten::index_add_".

    Example:
        >>> what_to_set("aten::index_add_")
        'Set torch.use_deterministic_algorithms(True).'
    """
    namespace, _, name = operator.partition("::")
    if namespace != "aten":
        return f"Ask the authors of {operator} for a deterministic one: torch has no switch for it."
    if name.rstrip("_") in _MATMUL:
        return f"Set {_ALGORITHMS}, and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment."
    if "attention" in name:
        return f"Set {_ALGORITHMS}, or call attention under sdpa_kernel(SDPBackend.MATH)."
    if "conv" in name or "cudnn" in name or "miopen" in name:
        cudnn = "torch.backends.cudnn"
        return f"Set {cudnn}.deterministic = True and {cudnn}.benchmark = False."
    return f"Set {_ALGORITHMS}."
