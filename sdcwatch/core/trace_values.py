"""A trace of operations as a value, and the little of it that crosses to other ranks.

Fixed sizes whatever the model: `Outline.pack` is at most `OUTLINE_BYTES`, `Section.pack` at most
`SECTION_BYTES`. How they are compared is in `sdcwatch.core.trace`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

MAX_OPERATIONS = 1 << 17
"""Operations that a trace holds at most; a longer one is blind."""
OUTLINE_BYTES = 12 << 10
"""An `Outline` never packs to more."""
SECTION_BYTES = 64 << 10
"""A `Section` never packs to more."""
MAX_VALUES = 16
"""Inputs, and outputs, that an operation shows at most; the rest is one value."""

_CHECKPOINTS = 1024
_SHORTEST = 32
_DIGEST = 8
_TEXT = 240
_NAME = 160
_UNPACKED = 64 << 20


class TraceOutcome(str, Enum):
    """What traces came to."""

    DEVICE = "device"
    DAMAGED = "damaged"
    SOFTWARE = "software"
    NONDETERMINISTIC = "nondeterministic"
    EQUAL = "equal"
    BLIND = "blind"


class Born(str, Enum):
    """Where a value came from.

    `UNSET` memory was made by an operation such as `empty` and no operation has written it;
    `PARTLY`, operations have written parts of it. `GIVEN` values travel with the micro-batch or are
    parameters. `CODE` stands for constants and settings of the program.
    """

    OPERATION = "operation"
    UNSET = "unset"
    PARTLY = "partly"
    GIVEN = "given"
    OUTSIDE = "outside"
    CODE = "code"
    GENERATOR = "generator"
    SEVERAL = "several"


class Change(str, Enum):
    """Whether a value is as the same rank logged it last."""

    NONE = ""
    CHANGED = "changed"
    EXPOSED = "exposed"


@dataclass(frozen=True, slots=True)
class Place:
    """Which operation, and where in the model.

    Attributes:
        operator: As torch calls it: "aten::addmm".
        module: Path of the innermost module it ran in; "" for the guarded module itself.
        backward: It ran in the backward.
    """

    operator: str
    module: str = ""
    backward: bool = False

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operator}{where}{', in the backward' if self.backward else ''}"


@dataclass(frozen=True, slots=True)
class Value:
    """One input or output of an operation.

    Attributes:
        kind: Dtype, shape and strides of a tensor, or the type of something else.
        bits: Fingerprint of a tensor as hex, or the value itself; "" where it does not matter.
        born: Where its memory came from.
        origin: Of a `GIVEN` value its name: "parameter a.weight", "argument 0".
        writer: Position of the operation that wrote it last; -1 if none did.
        change: Whether it changed since then, and whether other code had hold of its memory.
        by: Of a changed value, the operation that wrote it last.
    """

    kind: str
    bits: str = ""
    born: Born = Born.OPERATION
    origin: str = ""
    writer: int = -1
    change: Change = Change.NONE
    by: Place | None = None

    def to_json(self) -> list[Any]:
        """As plain JSON values."""
        row: list[Any] = [self.kind, self.bits, self.born.value, self.origin, self.writer]
        if self.change is not Change.NONE:
            row.append(self.change.value)
            if self.by is not None:
                row += [self.by.operator, self.by.module, self.by.backward]
        return row

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Value:
        """The inverse of `to_json`."""
        kind, bits, born, origin, writer, *rest = row
        change = Change(rest[0]) if rest else Change.NONE
        by = Place(*rest[1:4]) if len(rest) > 1 else None
        return cls(kind, bits, Born(born), origin, writer, change, by)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a trace; make it by `of`.

    Attributes:
        place: Which, and where.
        inputs: What it read, `MAX_VALUES` at most and one for the rest.
        outputs: What it wrote, likewise.
        line: The user's line of code that ran it and where it stands, or "". No part of what is
            compared: nodes may keep the code in other folders.
    """

    place: Place
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    line: str = field(default="", compare=False)

    @classmethod
    def of(
        cls, place: Place, inputs: Sequence[Value], outputs: Sequence[Value], line: str = ""
    ) -> Operation:
        """An operation with any number of inputs and outputs and names of any length."""
        short = replace(place, operator=place.operator[:_NAME], module=place.module[:_NAME])
        return cls(short, _folded(inputs), _folded(outputs), line[:_TEXT])

    def to_json(self) -> list[Any]:
        """What is compared, as plain JSON values."""
        place = self.place
        return [
            place.operator,
            place.module,
            int(place.backward),
            [v.to_json() for v in self.inputs],
            [v.to_json() for v in self.outputs],
        ]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Operation:
        """The inverse of `to_json`, with or without the line behind it."""
        operator, module, backward, inputs, outputs, *line = row
        return cls(
            Place(operator, module, bool(backward)),
            tuple(map(Value.from_json, inputs)),
            tuple(map(Value.from_json, outputs)),
            *line,
        )


def _folded(values: Sequence[Value]) -> tuple[Value, ...]:
    if len(values) <= MAX_VALUES:
        return tuple(values)
    rest = values[MAX_VALUES - 1 :]
    changed = next((v for v in rest if v.change is not Change.NONE), None)
    return (
        *values[: MAX_VALUES - 1],
        Value(
            kind=f"{len(rest)} more",
            bits=_digest(_text([v.to_json() for v in rest])).hex(),
            born=Born.SEVERAL,
            change=Change.NONE if changed is None else changed.change,
            by=None if changed is None else changed.by,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """What traces came to, for a verdict.

    Attributes:
        outcome: `DEVICE` and `DAMAGED` speak of a device, all others name nobody.
        operator: The operation: which computed wrongly, which produced what was damaged, which
            differs or got other inputs, which does not repeat; "" without one.
        module: Path of the module it ran in.
        backward: It ran in the backward.
        position: Its number in the trace; -1 without one.
        rank: Whose device; of `NONDETERMINISTIC` the only rank that does not repeat; None if that
            cannot be told.
        detail: What differs, in words.
        advice: What to set or to write instead, or "".
        line: The user's line of code that ran the operation and where it stands, or "".
    """

    outcome: TraceOutcome
    operator: str = ""
    module: str = ""
    backward: bool = False
    position: int = -1
    rank: int | None = None
    detail: str = ""
    advice: str = ""
    line: str = ""

    @property
    def names_device(self) -> bool:
        """Whether what was found can only be a device's doing."""
        return self.outcome in (TraceOutcome.DEVICE, TraceOutcome.DAMAGED)

    @property
    def where(self) -> str:
        """The operation and its module: "aten::index_add_ in blocks.3.attn"."""
        return str(Place(self.operator, self.module)) if self.operator else ""

    @property
    def said(self) -> str:
        """The operation, what is the matter with it and what to set, as a clause."""
        return f"{self.where}{self._ran}: {self.detail}. {self.advice}".strip(" .:")

    @property
    def _ran(self) -> str:
        """In which pass, and by which line: of a device, no line of code has to be looked at."""
        backward = ", in the backward" if self.backward else ""
        return backward + (f" ({self.line})" if self.line and not self.names_device else "")

    def __str__(self) -> str:
        head = f"{self.outcome.value}: {self.where}" if self.where else self.outcome.value
        if self.where:
            head += self._ran
        text = "; ".join(part for part in (head, self.detail) if part)
        return f"{text}. {self.advice}" if self.advice else text

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, under 2 KiB."""
        return {
            "outcome": self.outcome.value,
            "operator": self.operator[:_NAME],
            "module": self.module[:_NAME],
            "backward": self.backward,
            "position": self.position,
            "rank": self.rank,
            "detail": self.detail[:_TEXT],
            "advice": self.advice[:_TEXT],
            "line": self.line[:_TEXT],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TraceFinding:
        """The inverse of `to_json`."""
        return cls(**{**data, "outcome": TraceOutcome(data["outcome"])})


@dataclass(frozen=True, slots=True)
class Outline:
    """A trace in few bytes.

    Attributes:
        count: How many operations it has.
        stride: Operations between two checkpoints, a power of two.
        checkpoints: Running digest after every `stride` operations.
        total: Running digest after the last operation.
        blind: Why the trace says nothing, or "".
        faithful: The replay under the trace came to the same bits as a plain one.
        unrepeated: What differed between this rank's own traces; None if nothing did.
    """

    count: int
    stride: int
    checkpoints: tuple[bytes, ...]
    total: bytes
    blind: str = ""
    faithful: bool = True
    unrepeated: TraceFinding | None = None

    def at(self, operations: int) -> bytes:
        """The running digest after so many operations, a multiple of `stride`."""
        return self.checkpoints[operations // self.stride - 1]

    def pack(self) -> bytes:
        """As bytes, at most `OUTLINE_BYTES`."""
        head = {
            "count": self.count,
            "stride": self.stride,
            "blind": self.blind[:_TEXT],
            "faithful": self.faithful,
            "unrepeated": None if self.unrepeated is None else self.unrepeated.to_json(),
        }
        return b"\n".join((_text(head), b"".join((*self.checkpoints, self.total))))

    @classmethod
    def unpack(cls, data: bytes) -> Outline:
        """The inverse of `pack`.

        Raises:
            ValueError: These are not the bytes of an outline.
        """
        try:
            text, digests = data.split(b"\n", 1)
            head = json.loads(text)
            own = head.pop("unrepeated")
            parts = [digests[i : i + _DIGEST] for i in range(0, len(digests), _DIGEST)]
            if len(parts) != head["count"] // head["stride"] + 1 or len(parts[-1]) != _DIGEST:
                raise ValueError(len(parts))
            found = None if own is None else TraceFinding.from_json(own)
            return cls(checkpoints=tuple(parts[:-1]), total=parts[-1], unrepeated=found, **head)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"Expected the bytes of a trace's outline, but got others: {error}."
            raise ValueError(msg) from error


@dataclass(frozen=True, slots=True)
class Section:
    """Some operations of a trace.

    Attributes:
        start: Position of the first.
        operations: In order; fewer than asked for where the trace ends.
        complete: They are all there; False where they had no room.
    """

    start: int
    operations: tuple[Operation, ...]
    complete: bool = True

    def pack(self) -> bytes:
        """As compressed bytes, at most `SECTION_BYTES`."""
        rows = [[*operation.to_json(), operation.line] for operation in self.operations]
        packed = zlib.compress(_text([self.start, self.complete, rows]))
        if len(packed) <= SECTION_BYTES:
            return packed
        return Section(self.start, (), complete=False).pack()

    @classmethod
    def unpack(cls, data: bytes) -> Section:
        """The inverse of `pack`.

        Raises:
            ValueError: These are not the bytes of a section.
        """
        try:
            text = zlib.decompressobj().decompress(data, _UNPACKED)
            start, complete, rows = json.loads(text)
            return cls(start, tuple(map(Operation.from_json, rows)), complete)
        except (ValueError, TypeError, IndexError, zlib.error) as error:
            msg = f"Expected the bytes of a trace's section, but got others: {error}."
            raise ValueError(msg) from error


@dataclass(frozen=True, slots=True)
class Trace:
    """All operations of one replay.

    Attributes:
        operations: In order.
        blind: Why they say nothing, or "".
        faithful: The replay under the trace came to the same bits as a plain one.
        unrepeated: What differed between this rank's own traces; None if nothing did.
    """

    operations: tuple[Operation, ...] = ()
    blind: str = ""
    faithful: bool = True
    unrepeated: TraceFinding | None = None

    def outline(self) -> Outline:
        """The trace in few bytes."""
        count, stride = len(self.operations), _SHORTEST
        while stride * _CHECKPOINTS < count:
            stride *= 2
        running, checkpoints = bytes(_DIGEST), []
        for number, operation in enumerate(self.operations, 1):
            running = _digest(running + _text(operation.to_json()))
            if number % stride == 0:
                checkpoints.append(running)
        return Outline(
            count, stride, tuple(checkpoints), running, self.blind, self.faithful, self.unrepeated
        )

    def section(self, positions: range) -> Section:
        """The operations at some positions."""
        return Section(positions.start, self.operations[positions.start : positions.stop])


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
