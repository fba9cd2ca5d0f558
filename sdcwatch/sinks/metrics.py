"""Turns records into measurements of the metric catalogue: the one place that does.

Standard library only. `otel` applies what comes out of here to instruments; the rule for each kind
of record can be read and tested without an SDK.

Totals come from `Progress`, which counts everything in its window, non-pass verdicts included. A
`Verdict` adds what `Progress` cannot carry: who, where and why. Verdicts are counted by whichever
of the two has seen more of them, so none counts twice and none is lost when a crash follows it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import singledispatchmethod
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Coverage,
    GateReason,
    GuardState,
    Origin,
    Outcome,
    PreflightDone,
    Progress,
    RankState,
    Record,
    RunFinished,
    RunStarted,
    SkipReason,
    StateChanged,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.summary import SummaryBuilder
from sdcwatch.sinks.base import without_user_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sdcwatch.core.records import Suspect
    from sdcwatch.core.topology import RankInfo

_Came: TypeAlias = tuple[Check, Outcome]

NONFINITE_SETS = tuple(product((Origin.LOCAL, Origin.REDUCED, Origin.OUTPUT), list(Cause)[1:]))
"""Where a non-finite value is seen and why, as far as both are known."""

CHECKPOINT_SETS = (
    (CheckpointResult.SAVED, GateReason.OK),
    (CheckpointResult.PROVISIONAL, GateReason.OK),
    (CheckpointResult.CONFIRMED, GateReason.OK),
    *(
        (CheckpointResult.WITHHELD, reason)
        for reason in GateReason
        if reason not in (GateReason.OK, GateReason.SAVE_ERROR)
    ),
    (CheckpointResult.FAILED, GateReason.SAVE_ERROR),
)
"""What becomes of a checkpoint, with the reasons there are for it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: added to a counter, set on a gauge, recorded by a histogram.

    Attributes:
        metric: Its name in the catalogue.
        value: An increment for counters.
        attributes: Every attribute of the metric.
    """

    metric: str
    value: float
    attributes: Mapping[str, str]


def _m(metric: str, value: float, **attributes: object) -> Measurement:
    words = {k: str(v.value if isinstance(v, Enum) else v) for k, v in attributes.items()}
    return Measurement(f"sdcwatch.{metric}", value, words)


class RecordMetrics:
    """Measures the records of one run, in order.

    Args:
        links: ``dashboard`` and ``wandb`` URLs for the info metric, besides those of the record.
    """

    def __init__(self, links: Mapping[str, str] | None = None) -> None:
        self._links = dict(links or {})
        self._ranks: tuple[RankInfo, ...] = ()
        self._fold = SummaryBuilder()
        self._strikes: Counter[int] = Counter()
        self._counted: Counter[_Came] = Counter()
        self._recorded: Counter[_Came] = Counter()
        self._exported: Counter[_Came] = Counter()

    def measure(self, record: Record) -> list[Measurement]:
        """The measurements of one record; none for kinds that the catalogue does not count."""
        self._fold.add(record)
        return list(self._measure(record))

    @singledispatchmethod
    def _measure(self, record: Record) -> Iterable[Measurement]:
        return ()

    @_measure.register(RunStarted)
    def _(self, record: RunStarted) -> Iterable[Measurement]:
        self._ranks = record.ranks
        links = {k: without_user_info(v) for k, v in {**record.links, **self._links}.items()}
        yield from _seeds()
        yield from _one_hot("guard.state", "state", GuardState, GuardState.PREFLIGHT)
        yield from _one_hot("coverage", "coverage", Coverage, Coverage.OFF)
        yield _m("world.size", len(record.ranks))
        yield _m("start.time", record.time)
        yield _m("last_progress.time", record.time)
        yield _m("step", record.step)
        yield _m(
            "run.info",
            1,
            version=record.version,
            mode=record.mode,
            on_failure=record.on_failure,
            audit_every=record.audit_every,
            fingerprint_every=record.fingerprint_every,
            fault_domain=record.fault_domain,
            dashboard_url=links.get("dashboard", ""),
            wandb_url=links.get("wandb", ""),
        )

    @_measure.register(PreflightDone)
    def _(self, record: PreflightDone) -> Iterable[Measurement]:
        return _one_hot("coverage", "coverage", Coverage, record.coverage)

    @_measure.register(StateChanged)
    def _(self, record: StateChanged) -> Iterable[Measurement]:
        return _one_hot("guard.state", "state", GuardState, record.state)

    @_measure.register(RunFinished)
    def _(self, record: RunFinished) -> Iterable[Measurement]:
        return _one_hot("guard.state", "state", GuardState, record.state)

    @_measure.register(UpdateSkipped)
    def _(self, record: UpdateSkipped) -> Iterable[Measurement]:
        yield _m("updates.skipped", 1, reason=record.reason)

    @_measure.register(CheckpointEvent)
    def _(self, record: CheckpointEvent) -> Iterable[Measurement]:
        yield _m("checkpoints", 1, result=record.result, reason=record.reason)
        summary = self._fold.summary()
        yield _m("last_good_checkpoint.time", summary.last_good_checkpoint_time)
        yield _m("last_good_checkpoint.step", summary.last_good_checkpoint_step or 0)

    @_measure.register(Progress)
    def _(self, record: Progress) -> Iterable[Measurement]:
        for count in record.counts:
            came = (count.check, count.outcome)
            self._counted[came] += count.count
            yield from self._verdicts(came)
        yield _m("audit.comparisons", record.comparisons)
        yield _m("audit.mismatches", record.output_mismatches, kind="output")
        yield _m("audit.mismatches", record.gradient_mismatches, kind="gradient")
        yield _m("fingerprint.checks", record.weight_checks)
        yield _m("fingerprint.disagreements", record.disagreements)
        yield _m("steps", record.plain_steps, kind="plain")
        yield _m("steps", record.audit_steps, kind="audit")
        yield _m("step.time", record.plain_seconds, kind="plain")
        yield _m("step.time", record.audit_seconds, kind="audit")
        for check, seconds in record.overhead_seconds.items():
            yield _m("overhead.time", seconds, check=Check(check))
        for window in record.durations:
            for seconds in window.samples():
                yield _m("check.duration", seconds, check=window.check, phase=window.phase)
        yield from _progress_gauges(record)

    @_measure.register(Verdict)
    def _(self, record: Verdict) -> Iterable[Measurement]:
        if record.outcome is Outcome.PASS:
            return
        came = (record.check, record.outcome)
        self._recorded[came] += 1
        yield from self._verdicts(came)
        yield _m("last_event.time", record.time, check=record.check)
        yield _m("last_event.step", record.step, check=record.check)
        if record.check is Check.NONFINITE and record.origin is not Origin.NONE:
            yield _m("nonfinite", 1, origin=record.origin, cause=record.cause)
        if record.outcome is Outcome.SUSPECT:
            for suspect in record.suspects:
                yield from self._suspect(suspect)
        elif record.outcome is Outcome.NOT_REPRODUCED:
            yield from self._strike(record)

    def _verdicts(self, came: _Came) -> Iterable[Measurement]:
        new = max(self._counted[came], self._recorded[came]) - self._exported[came]
        if new:
            self._exported[came] += new
            yield _m("verdicts", new, check=came[0], outcome=came[1])

    def _suspect(self, named: Suspect) -> Iterable[Measurement]:
        # Counts of all verdicts so far: a gauge of the last one would forget the first.
        known = ((s.rank, s.check, s) for s in self._fold.summary().suspects)
        suspect = next(s for rank, check, s in known if (rank, check) == (named.rank, named.check))
        who = _who_of(suspect.rank, suspect.node, suspect.gpu, suspect.instance_id)
        yield _m("rank.state", 1, **who, state=RankState.SUSPECT)
        for result, value in (
            ("mismatches", suspect.mismatches),
            ("comparisons", suspect.comparisons),
        ):
            yield _m("rank.evidence", value, **who, check=suspect.check, result=result)

    def _strike(self, record: Verdict) -> Iterable[Measurement]:
        ranks = tuple(s.rank for s in record.suspects) or record.ranks
        known = {info.rank: info for info in self._ranks}
        for rank in ranks:
            self._strikes[rank] += 1
            info = known.get(rank)
            who = (
                _who_of(rank, info.node, info.gpu, info.instance_id)
                if info is not None
                else _who_of(rank, "", "", "")
            )
            yield _m("rank.strikes", self._strikes[rank], **who)


def _who_of(rank: int, node: str, gpu: str, instance: str) -> dict[str, object]:
    return {
        "suspect_rank": rank,
        "suspect_node": node,
        "suspect_gpu": gpu,
        "suspect_instance_id": instance,
    }


def _one_hot(
    metric: str, attribute: str, states: type[Enum], current: Enum
) -> Iterable[Measurement]:
    for state in states:
        yield _m(metric, float(state is current), **{attribute: state})


def _progress_gauges(record: Progress) -> Iterable[Measurement]:
    yield _m("step", record.step)
    yield _m("last_progress.time", record.time)
    yield _m("steps.at_risk", record.steps_at_risk)
    yield _m("audited.ranks", record.audited_ranks)
    yield _m("last_clean_audit.time", record.last_clean_audit_time)
    yield _m("last_clean_audit.step", record.last_clean_audit_step)
    yield _m("last_weight_check.time", record.last_weight_check_time)
    yield _m("last_weight_check.step", record.last_weight_check_step)
    # The SDK drops NaN and infinity without a word; check 1 counts them in sdcwatch.nonfinite.
    if record.loss is not None and math.isfinite(record.loss):
        yield _m("loss", record.loss)


def _seeds() -> Iterable[Measurement]:
    """Zeros: a counter that is born at 1 never shows an increase."""
    for check, outcome in product(Check, Outcome):
        yield _m("verdicts", 0, check=check, outcome=outcome)
    for origin, cause in NONFINITE_SETS:
        yield _m("nonfinite", 0, origin=origin, cause=cause)
    for result, why in CHECKPOINT_SETS:
        yield _m("checkpoints", 0, result=result, reason=why)
    for skip in SkipReason:
        yield _m("updates.skipped", 0, reason=skip)
    for kind in ("output", "gradient"):
        yield _m("audit.mismatches", 0, kind=kind)
    for metric, kind in product(("steps", "step.time"), ("plain", "audit")):
        yield _m(metric, 0, kind=kind)
    for metric, checked in product(("overhead.time", "last_event.time", "last_event.step"), Check):
        yield _m(metric, 0, check=checked)
    for metric in _SINGLE:
        yield _m(metric, 0)


_SINGLE = (
    "audit.comparisons",
    "fingerprint.checks",
    "fingerprint.disagreements",
    "steps.at_risk",
    "audited.ranks",
    "last_clean_audit.time",
    "last_clean_audit.step",
    "last_weight_check.time",
    "last_weight_check.step",
    "last_good_checkpoint.time",
    "last_good_checkpoint.step",
)
