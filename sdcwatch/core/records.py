"""What leaves the guard: typed, frozen, versioned records, and the words they are made of.

A record is built once and goes unchanged to every sink. `encode` gives one JSON object without
newlines; `decode` is its inverse. Floats that JSON has no number for travel as "NaN", "Infinity"
and "-Infinity". Fields may be added in schema 2; removing or renaming one raises `SCHEMA`. Schema 1
is read too: `decode` gives its fields the names and values that they have now.
"""

from __future__ import annotations

import json
import math
import types
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias, Union, get_args, get_origin, get_type_hints

from sdcwatch.core.enums import Action as Action
from sdcwatch.core.enums import Cause as Cause
from sdcwatch.core.enums import Check as Check
from sdcwatch.core.enums import CheckpointResult as CheckpointResult
from sdcwatch.core.enums import Coverage as Coverage
from sdcwatch.core.enums import GateReason as GateReason
from sdcwatch.core.enums import GuardState as GuardState
from sdcwatch.core.enums import Origin as Origin
from sdcwatch.core.enums import Outcome as Outcome
from sdcwatch.core.enums import Phase as Phase
from sdcwatch.core.enums import RankState as RankState
from sdcwatch.core.enums import RunWord as RunWord
from sdcwatch.core.enums import SkipReason as SkipReason
from sdcwatch.core.topology import RankInfo

SCHEMA = 2
SHOWN = 10
"""Tensor names that a record carries at most."""
DURATION_BUCKETS = (
    0.00001, 0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds in seconds of the buckets of `Durations`; longer ones have a bucket of their own."""


Device: TypeAlias = tuple[str, str]
"""Instance id and GPU: what a suspect is. Ranks are only where it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank named by a check, with the counts that support it.

    Attributes:
        rank: The rank the verdict is about.
        node: Its node.
        instance_id: What a replacement request names.
        gpu: Label of its device: UUID, or node and index.
        gpu_index: Index on its host, None on CPU.
        check: The check that named it.
        mismatches: Comparisons (or tensors, for check 3) in which it was wrong.
        comparisons: Comparisons (or tensors) it took part in.
        partners: Ranks it was compared with.
        arbiters: Ranks that recomputed and settled it.
        reproduced: It was wrong again when asked again; None if not asked.
        first_step: First step of this run at which it was named.
        last_step: Last step at which it was named.
        first_time: Unix time at which it was first named; 0.0 in a record, whose own time it is.
        last_time: Unix time at which it was last named; the same.
        tensors: Names of tensors in which it differed, at most ten.
        operator: The operation in which it computed wrongly, with the module it ran in; empty if
            the trace could not tell.
    """

    rank: int
    node: str
    instance_id: str
    gpu: str
    gpu_index: int | None
    check: Check
    mismatches: int
    comparisons: int
    partners: tuple[int, ...] = ()
    arbiters: tuple[int, ...] = ()
    reproduced: bool | None = None
    first_step: int = 0
    last_step: int = 0
    first_time: float = 0.0
    last_time: float = 0.0
    tensors: tuple[str, ...] = ()
    operator: str = ""

    @property
    def device(self) -> Device:
        """What the finding is about, wherever its rank runs later."""
        return self.instance_id, self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison of check 2 that did not match: a producer's result against its replayer's.

    Attributes:
        producer: Rank whose micro-batch it was.
        replayer: Rank that recomputed it.
        outputs_equal: The output bits were equal.
        tensors: Names of parameters whose gradient fingerprints differ, at most ten.
        tensors_differing: How many differ in all.
        arbiters: Ranks that recomputed it too.
        wrong: Of producer and replayer, those that differ from the quorum's result.
        note: Anything else: ``"transport"``, or the exception a replay ended with.
    """

    producer: int
    replayer: int
    outputs_equal: bool = True
    tensors: tuple[str, ...] = ()
    tensors_differing: int = 0
    arbiters: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One tensor on which replicas differ.

    Attributes:
        tensor: Its name.
        dissenters: Ranks that differ from a strict majority; empty if there is none.
        groups: All sides: ranks that hold the same bits, largest first.
        fingerprints: The two checksums of each side as hex, in the order of `groups`.
        note: e.g. ``"sign of zero"`` where only that differs.
    """

    tensor: str
    dissenters: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    fingerprints: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of everything that leaves the guard.

    Attributes:
        step: Training step, counted from 1, skipped ones included; 0 before the first.
        time: Unix time in seconds.
    """

    kind: ClassVar[str] = ""
    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Record):
    """A guarded run, or a later segment of it, begins."""

    kind: ClassVar[str] = "start"
    run: str
    version: str
    ranks: tuple[RankInfo, ...]
    fault_domain: str
    mode: str
    on_failure: str
    audit_every: int
    fingerprint_every: int
    checkpoint_every: int | None
    max_audit_age: int
    quorum: int
    parameters: int
    parameter_bytes: int
    environment: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What is off and why, and what the user should know: fault domain fallback, one rank, …"""
    run_id: str = ""
    """Made with the run directory: the same in every segment, another in a run of equal name."""
    run_dir: str = ""
    """Where the event log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightDone(Record):
    """Preflight finished: what the audits can promise on this model and machine."""

    kind: ClassVar[str] = "preflight"
    coverage: Coverage
    reason: str
    deterministic_kernels: bool
    repeats: int
    """Recomputations without a mismatch over all ranks; the mismatch rate is below 3/repeats."""
    notes: tuple[str, ...] = ()
    micro_batches: int = 1
    """Micro-batches of a step, of which an audit looks at one."""
    left_out: tuple[int, ...] = ()
    """Ranks that differ, and that the audits leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Record):
    """What a check came to, agreed on by all ranks. Passes are aggregated in `Progress`."""

    kind: ClassVar[str] = "verdict"
    check: Check
    outcome: Outcome
    reason: str
    """One sentence for a person."""
    failed: bool = False
    """The check failed: the update is skipped (checks 1, 2) or the run is tainted (check 3)."""
    action: Action = Action.NONE
    suspects: tuple[Suspect, ...] = ()
    origin: Origin = Origin.NONE
    cause: Cause = Cause.NONE
    ranks: tuple[int, ...] = ()
    """Ranks it concerns without blaming them: those that saw it, all sides of a disagreement."""
    comparisons: tuple[Comparison, ...] = ()
    comparisons_total: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    tensors_total: int = 0
    notes: tuple[str, ...] = ()
    operator: str = ""
    """The operation in which results began to differ, with its module; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How often a check came to an outcome in the window of a `Progress` record."""

    check: Check
    outcome: Outcome
    count: int
    cause: Cause = Cause.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of one phase of one check in the window, as a histogram.

    Attributes:
        check: The check.
        phase: Its phase.
        buckets: Upper bounds in seconds.
        counts: How many fell into each bucket; one more than `buckets`, the last for longer ones.
        sum: All of them together, in seconds.
    """

    check: Check
    phase: Phase
    buckets: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @classmethod
    def of(cls, check: Check, phase: Phase, seconds: Iterable[float]) -> Durations:
        """The histogram of some durations in seconds."""
        measured = tuple(seconds)
        counts = [0] * (len(DURATION_BUCKETS) + 1)
        for one in measured:
            counts[bisect_left(DURATION_BUCKETS, one)] += 1
        return cls(
            check=check,
            phase=phase,
            buckets=DURATION_BUCKETS,
            counts=tuple(counts),
            sum=round(math.fsum(measured), 7),
        )

    def merged(self, later: Durations) -> Durations:
        """Both windows together; their buckets must be the same."""
        return replace(
            self,
            counts=tuple(a + b for a, b in zip(self.counts, later.counts, strict=True)),
            sum=round(self.sum + later.sum, 7),
        )

    @property
    def median(self) -> float:
        """The median of `samples`, in seconds; 0.0 of none."""
        total, values = sum(self.counts), self._values()
        middle = [(total - 1) // 2, total // 2]
        ends = tuple(accumulate(self.counts))
        return sum(values[bisect_right(ends, at)] for at in middle) / 2 if total else 0.0

    def samples(self) -> tuple[float, ...]:
        """Durations in seconds that have these counts and this sum.

        For instruments that take one measurement at a time. Each lies in its bucket, at the same
        share of its width as all others.
        """
        both = zip(self._values(), self.counts, strict=True)
        return tuple(value for value, n in both for _ in range(n))

    def _values(self) -> tuple[float, ...]:
        """The value in each bucket that stands for all of it."""
        lower = (0.0, *self.buckets)
        floor = math.fsum(n * low for n, low in zip(self.counts, lower, strict=True))
        rest = max(0.0, self.sum - floor)
        upper = (*self.buckets, lower[-1] + rest)
        room = math.fsum(
            n * (up - low) for n, low, up in zip(self.counts, lower, upper, strict=True)
        )
        share = min(1.0, max(1e-9, rest / room)) if room else 0.0
        return tuple(low + share * (up - low) for low, up in zip(lower, upper, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Record):
    """A window of steps: everything that passed, the loss, and what it cost.

    Emitted about once a second, and before any other record so that totals are in order.

    Attributes:
        first_step: First step of the window; `step` is the last.
        counts: Outcomes in the window that have no record of their own: passes, and what was said
            before: ranks that still differ, replays that end with an error again.
        comparisons: Comparisons of check 2 over all ranks.
        output_mismatches: Comparisons in which the bits of an output differed.
        gradient_mismatches: Comparisons in which some gradient fingerprint differed.
        weight_checks: Runs of check 3.
        disagreements: Tensors on which replicas differed.
        loss: Last loss of the reporting rank; None before the first.
        durations: Per check and phase.
        plain_steps: Steps without an audit; `plain_seconds` their wall time.
        audit_steps: Steps with an audit; `audit_seconds` their wall time.
        overhead_seconds: Wall time spent in the guard, by check.
        last_clean_audit_step: 0 if none yet; `last_clean_audit_time` its unix time, 0.0 if none.
        last_weight_check_step: As above, for check 3 passing.
        audited_ranks: Ranks whose micro-batch was audited in the last audit.
        steps_at_risk: Updates since the last clean audit: what a late finding would cost.
    """

    kind: ClassVar[str] = "progress"
    first_step: int
    counts: tuple[Count, ...] = ()
    comparisons: int = 0
    output_mismatches: int = 0
    gradient_mismatches: int = 0
    weight_checks: int = 0
    disagreements: int = 0
    loss: float | None = None
    durations: tuple[Durations, ...] = ()
    plain_steps: int = 0
    plain_seconds: float = 0.0
    audit_steps: int = 0
    audit_seconds: float = 0.0
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    last_clean_audit_step: int = 0
    last_clean_audit_time: float = 0.0
    last_weight_check_step: int = 0
    last_weight_check_time: float = 0.0
    audited_ranks: int = 0
    steps_at_risk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSkipped(Record):
    """One update did not happen, on any rank."""

    kind: ClassVar[str] = "skip"
    reason: SkipReason
    consecutive: int
    """Skips in a row, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Record):
    """A checkpoint was saved, withheld, confirmed, or failed to save."""

    kind: ClassVar[str] = "checkpoint"
    result: CheckpointResult
    reason: GateReason
    detail: str = ""
    path: str = ""
    """Where it was written, if the caller of `save_checkpoint` said so."""
    audit_age: int | None = None
    """Steps since the last clean audit; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(Record):
    """The guard went into another state."""

    kind: ClassVar[str] = "state"
    state: GuardState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Record):
    """A liveness check: who did not answer, and at which operation the others waited."""

    kind: ClassVar[str] = "hang"
    reporter: int
    operation: str
    absent: tuple[int, ...]
    left: dict[str, str] = field(default_factory=dict)
    """Notes that leavers left, by rank."""
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Record):
    """Something worth saying once that is no verdict."""

    kind: ClassVar[str] = "note"
    code: str
    message: str
    level: str = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Record):
    """The run, or this segment of it, ended."""

    kind: ClassVar[str] = "finish"
    state: GuardState
    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What a person decided about a device: one line of ``closed.jsonl``.

    Attributes:
        instance_id: Instance id of the device; "" for any.
        gpu: Its GPU.
        reason: Why, in words.
        by: Who.
        time: Unix time; evidence that comes later opens the suspect again.
    """

    instance_id: str
    gpu: str
    reason: str
    by: str = ""
    time: float

    def covers(self, device: Device) -> bool:
        """Whether it is about this device."""
        return self.gpu == device[1] and self.instance_id in ("", device[0])


AnyRecord = (
    RunStarted
    | PreflightDone
    | Verdict
    | Progress
    | UpdateSkipped
    | CheckpointEvent
    | StateChanged
    | Hang
    | Note
    | RunFinished
)
RECORD_TYPES: dict[str, type[Record]] = {t.kind: t for t in get_args(AnyRecord)}


def to_dict(record: Record) -> dict[str, Any]:
    """A record as plain JSON values, with ``schema`` and ``kind``."""
    return {"schema": SCHEMA, "kind": record.kind, **plain(record)}


def encode(record: Record) -> str:
    """A record as one line of JSON, without a newline."""
    return json.dumps(to_dict(record), separators=(",", ":"), allow_nan=False)


def decode(line: str) -> Record:
    """The record in one line of JSON.

    Raises:
        ValueError: The line is no JSON object, its schema is newer than this package, or its kind
            or one of its words is unknown.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        msg = f"Expected a record with a `kind`, but got {line[:80]!r}. Is this an events.jsonl?"
        raise ValueError(msg)
    schema = data.get("schema", 0)
    if not isinstance(schema, int) or schema > SCHEMA:
        msg = f"Expected schema <= {SCHEMA}, but got {schema!r}. Update sdcwatch to read it."
        raise ValueError(msg)
    cls = RECORD_TYPES.get(data["kind"])
    if cls is None:
        msg = f"Expected one of {sorted(RECORD_TYPES)}, but got kind {data['kind']!r}."
        raise ValueError(msg)
    if schema < 2:
        data = _from_schema_1(data)
    try:
        record: Record = build(cls, data)
    except (TypeError, AttributeError) as error:
        msg = f"Expected the fields of a {data['kind']!r} record, but got: {error}."
        raise ValueError(msg) from error
    return record


def plain(value: Any) -> Any:
    """A value made of frozen dataclasses and enums as plain JSON values."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _typed(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _typed(value, next(a for a in args if a is not type(None)))
    if origin is tuple:
        return tuple(_typed(v, args[0]) for v in value)
    if origin is dict:
        return {k: _typed(v, args[1]) for k, v in value.items()}
    if hint is float:
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    return value


def build(cls: type, data: dict[str, Any]) -> Any:
    """A frozen dataclass from plain JSON values; fields it does not know are left out.

    Raises:
        TypeError, AttributeError, ValueError: The values do not fit its fields.
    """
    hints = _hints(cls)
    known = {f.name for f in fields(cls)}
    return cls(**{k: _typed(v, hints[k]) for k, v in data.items() if k in known})


_RENAMED_IN_2: dict[str, dict[str, str]] = {
    "progress": {"loss_mismatches": "output_mismatches"},
    "hang": {"where": "operation"},
    "suspects": {"bad": "mismatches", "total": "comparisons"},
    "comparisons": {"loss_equal": "outputs_equal", "tensors_bad": "tensors_differing"},
}
"""Fields by the kind of record, or by the field that holds a list of them."""
_WORDS_OF_1: dict[str, dict[str, str]] = {
    "coverage": {"loss_only": Coverage.OUTPUTS_ONLY.value},
    "origin": {"loss": Origin.OUTPUT.value},
    "phase": {"screen": Phase.PROBE.value},
    "outcome": {"scale_differs": Outcome.UNATTRIBUTED.value},
}
"""Values by the field that holds them."""


def _from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record of schema 1, under the names and with the values of schema 2."""
    if data.get("outcome") == "scale_differs":
        data = {**data, "cause": Cause.SOFTWARE.value}
    upgraded: dict[str, Any] = _renamed(data, _RENAMED_IN_2.get(str(data.get("kind")), {}))
    # Schema 1 counted verdicts that have records of their own once more.
    if "counts" in upgraded:
        passes = Outcome.PASS.value
        upgraded["counts"] = [c for c in upgraded["counts"] if c.get("outcome") == passes]
    for entry in upgraded.get("durations", ()):
        if "seconds" in entry:
            check, phase = Check(entry["check"]), Phase(entry["phase"])
            entry.update(plain(Durations.of(check, phase, entry["seconds"])))
    return upgraded


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    new = {}
    for name, value in data.items():
        if isinstance(value, list):
            inner = _RENAMED_IN_2.get(name, {})
            value = [_renamed(v, inner) if isinstance(v, dict) else v for v in value]
        elif isinstance(value, str):
            value = _WORDS_OF_1.get(name, {}).get(value, value)
        new[names.get(name, name)] = value
    return new
