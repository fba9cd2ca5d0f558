"""Turns records into measurements of the metric catalogue: the one place that does.

Standard library only. `otel` applies what comes out of here to instruments; the rule for each kind
of record can be read and tested without an SDK.

Counters count what this process saw: passes from `Progress`, every other outcome once, from its
record. Levels are fields of the run's summary, which knows the earlier segments of the run too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import singledispatchmethod
from itertools import product
from typing import TYPE_CHECKING

from sdcwatch.core import catalog
from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Coverage,
    GateReason,
    GuardState,
    Hang,
    Origin,
    Outcome,
    PreflightDone,
    Progress,
    RankState,
    Record,
    RunFinished,
    RunStarted,
    RunWord,
    SkipReason,
    StateChanged,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.suspects import SuspectDevice, suspect_devices
from sdcwatch.core.text import clock, list_ranks, shortened
from sdcwatch.sinks.base import without_user_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sdcwatch.core.catalog import Metric
    from sdcwatch.core.records import Device, Suspect
    from sdcwatch.core.summary import Finding, RunSummary, Strike

REASON_LENGTH = 160
"""Characters of a reason that an info metric carries; the event log has all of it."""
END_LENGTH = 240
"""The same of how a run ended: who was missing, and the note that it left."""

VERDICT_SETS: tuple[tuple[Check, Outcome, Cause], ...] = (
    *(
        (Check.NONFINITE, outcome, cause)
        for outcome, causes in (
            (Outcome.PASS, (Cause.NONE,)),
            (Outcome.SUSPECT, (Cause.DEVICE, Cause.REDUCTION, Cause.UNKNOWN)),
            (Outcome.REPRODUCIBLE, (Cause.DATA, Cause.SCALING)),
            (
                Outcome.UNATTRIBUTED,
                (Cause.UNKNOWN, Cause.REDUCTION, Cause.OUTSIDE, Cause.SOFTWARE),
            ),
            (Outcome.NOT_REPRODUCED, (Cause.DEVICE, Cause.REDUCTION, Cause.UNKNOWN)),
            (Outcome.NONDETERMINISTIC, (Cause.UNKNOWN, Cause.REDUCTION)),
            (Outcome.INCONCLUSIVE, (Cause.UNKNOWN,)),
            (Outcome.WIDESPREAD, (Cause.UNKNOWN, Cause.WEIGHTS)),
            (Outcome.NOT_REDUCED, (Cause.NONE, Cause.SOFTWARE)),
        )
        for cause in causes
    ),
    *(
        (Check.REPLAY, outcome, cause)
        for outcome, causes in (
            (Outcome.PASS, (Cause.NONE,)),
            (Outcome.SUSPECT, (Cause.NONE, Cause.DEVICE)),
            (Outcome.UNATTRIBUTED, (Cause.NONE, Cause.UNKNOWN, Cause.SOFTWARE)),
            (Outcome.INCONCLUSIVE, (Cause.NONE,)),
            (Outcome.NOT_REPRODUCED, (Cause.NONE,)),
            (Outcome.NONDETERMINISTIC, (Cause.NONE,)),
            (Outcome.WIDESPREAD, (Cause.NONE,)),
            (Outcome.TRANSPORT, (Cause.NONE,)),
            (Outcome.DIFFERS, (Cause.NONE, Cause.UNKNOWN, Cause.DEVICE, Cause.SOFTWARE)),
            (Outcome.VOID, (Cause.NONE,)),
            (Outcome.NOT_RUN, (Cause.NONE,)),
        )
        for cause in causes
    ),
    *(
        (Check.FINGERPRINT, outcome, cause)
        for outcome, causes in (
            (Outcome.PASS, (Cause.NONE,)),
            (Outcome.SUSPECT, (Cause.NONE, Cause.DEVICE)),
            (Outcome.UNATTRIBUTED, (Cause.NONE, Cause.UNKNOWN, Cause.SOFTWARE)),
        )
        for cause in causes
    ),
)
"""What checks come to, and why: exported as 0 from the start."""

NONFINITE_SETS: tuple[tuple[Origin, Cause], ...] = (
    *product(
        (Origin.LOCAL, Origin.OUTPUT),
        (Cause.DEVICE, Cause.DATA, Cause.SCALING, Cause.OUTSIDE, Cause.WEIGHTS, Cause.UNKNOWN),
    ),
    *product((Origin.REDUCED,), (Cause.REDUCTION, Cause.SCALING, Cause.WEIGHTS, Cause.UNKNOWN)),
)
"""Where a non-finite value is seen and why, as far as both are known."""

CHECKPOINT_SETS = (
    (CheckpointResult.SAVED, GateReason.OK),
    (CheckpointResult.SAVED, GateReason.FRAMEWORK),
    (CheckpointResult.PROVISIONAL, GateReason.OK),
    (CheckpointResult.PROVISIONAL, GateReason.FRAMEWORK),
    (CheckpointResult.PROVISIONAL, GateReason.NO_AUDIT),
    (CheckpointResult.PROVISIONAL, GateReason.DIFFERS),
    (CheckpointResult.CONFIRMED, GateReason.OK),
    *(
        (CheckpointResult.WITHHELD, reason)
        for reason in GateReason
        if reason not in (GateReason.OK, GateReason.SAVE_ERROR, GateReason.FRAMEWORK)
    ),
    (CheckpointResult.FAILED, GateReason.SAVE_ERROR),
)
"""What becomes of a checkpoint, with the reasons there are for it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: added to a counter, set on a gauge, recorded by a histogram.

    Attributes:
        metric: The metric.
        value: An increment for counters.
        attributes: Every attribute of the metric.
    """

    metric: Metric
    value: float
    attributes: Mapping[str, str]


def _m(metric: Metric, value: float, **attributes: object) -> Measurement:
    words = {k: str(v.value if isinstance(v, Enum) else v) for k, v in attributes.items()}
    return Measurement(metric, value, words)


class RecordMetrics:
    """Measures the records of one run, in order.

    Args:
        links: ``dashboard`` and ``wandb`` URLs for the info metric, besides those of the record.
    """

    def __init__(self, links: Mapping[str, str] | None = None) -> None:
        self._links = dict(links or {})
        self._run: tuple[Measurement, ...] = ()
        self._struck: dict[Device, Strike] = {}

    def measure(self, record: Record, summary: RunSummary) -> list[Measurement]:
        """The measurements of one record, info metrics left out.

        Args:
            record: The record.
            summary: The run so far, this record included.
        """
        return [
            *self._measure(record),
            *_levels(record, summary),
            *_suspects(summary),
            *self._strikes(summary),
        ]

    def infos(self, summary: RunSummary) -> dict[str, tuple[Measurement, ...]]:
        """All series of every info metric, by its name: others that it had hold no longer."""
        return {
            catalog.RUN_INFO.name: self._run,
            catalog.EVENT_INFO.name: tuple(map(_event_info, summary.findings)),
            catalog.SUSPECT_INFO.name: tuple(map(_suspect_info, suspect_devices(summary))),
            catalog.CHECKPOINT_INFO.name: tuple(_checkpoint_info(summary)),
            catalog.END_INFO.name: tuple(_end_info(summary)),
        }

    def _strikes(self, summary: RunSummary) -> Iterable[Measurement]:
        standing = {strike.device: strike for strike in summary.strikes}
        for device in self._struck.keys() - standing.keys():  # a person has closed it
            yield _m(catalog.RANK_STRIKES, 0, **_who_of(self._struck[device]))
        for strike in standing.values():
            yield _m(catalog.RANK_STRIKES, strike.count, **_who_of(strike))
        self._struck = standing

    @singledispatchmethod
    def _measure(self, record: Record) -> Iterable[Measurement]:
        return ()

    @_measure.register(RunStarted)
    def _(self, record: RunStarted) -> Iterable[Measurement]:
        links = {k: without_user_info(v) for k, v in {**record.links, **self._links}.items()}
        self._run = (
            _m(
                catalog.RUN_INFO,
                1,
                run_id=record.run_id,
                run_dir=record.run_dir,
                version=record.version,
                mode=record.mode,
                on_failure=record.on_failure,
                audit_every=record.audit_every,
                fingerprint_every=record.fingerprint_every,
                fault_domain=record.fault_domain,
                dashboard_url=links.get("dashboard", ""),
                wandb_url=links.get("wandb", ""),
            ),
        )
        yield from _seeds()
        yield from _one_hot(catalog.GUARD_STATE, "state", GuardState, GuardState.PREFLIGHT)
        yield from _one_hot(catalog.COVERAGE, "coverage", Coverage, Coverage.OFF)
        yield _m(catalog.WORLD_SIZE, len(record.ranks))
        yield _m(catalog.START_TIME, record.time)
        yield _m(catalog.LAST_PROGRESS_TIME, record.time)
        yield _m(catalog.STEP, record.step)

    @_measure.register(PreflightDone)
    def _(self, record: PreflightDone) -> Iterable[Measurement]:
        return _one_hot(catalog.COVERAGE, "coverage", Coverage, record.coverage)

    @_measure.register(StateChanged)
    def _(self, record: StateChanged) -> Iterable[Measurement]:
        return _one_hot(catalog.GUARD_STATE, "state", GuardState, record.state)

    @_measure.register(RunFinished)
    def _(self, record: RunFinished) -> Iterable[Measurement]:
        return _one_hot(catalog.GUARD_STATE, "state", GuardState, record.state)

    @_measure.register(UpdateSkipped)
    def _(self, record: UpdateSkipped) -> Iterable[Measurement]:
        yield _m(catalog.SKIPPED, 1, reason=record.reason)

    @_measure.register(CheckpointEvent)
    def _(self, record: CheckpointEvent) -> Iterable[Measurement]:
        yield _m(catalog.CHECKPOINTS, 1, result=record.result, reason=record.reason)

    @_measure.register(Progress)
    def _(self, record: Progress) -> Iterable[Measurement]:
        for entry in record.counts:
            yield _m(
                catalog.VERDICTS,
                entry.count,
                check=entry.check,
                outcome=entry.outcome,
                cause=entry.cause,
            )
        yield _m(catalog.COMPARISONS, record.comparisons)
        yield _m(catalog.MISMATCHES, record.output_mismatches, kind="output")
        yield _m(catalog.MISMATCHES, record.gradient_mismatches, kind="gradient")
        yield _m(catalog.FINGERPRINT_CHECKS, record.weight_checks)
        yield _m(catalog.DISAGREEMENTS, record.disagreements)
        yield _m(catalog.STEPS, record.plain_steps, kind="plain")
        yield _m(catalog.STEPS, record.audit_steps, kind="audit")
        yield _m(catalog.STEP_TIME, record.plain_seconds, kind="plain")
        yield _m(catalog.STEP_TIME, record.audit_seconds, kind="audit")
        for check, seconds in record.overhead_seconds.items():
            yield _m(catalog.OVERHEAD_TIME, seconds, check=Check(check))
        for window in record.durations:
            for seconds in window.samples():
                yield _m(catalog.CHECK_DURATION, seconds, check=window.check, phase=window.phase)
        yield _m(catalog.STEP, record.step)
        yield _m(catalog.LAST_PROGRESS_TIME, record.time)
        # The SDK drops NaN and infinity without a word; check 1 counts them as non-finite.
        if record.loss is not None and math.isfinite(record.loss):
            yield _m(catalog.LOSS, record.loss)

    @_measure.register(Verdict)
    def _(self, record: Verdict) -> Iterable[Measurement]:
        yield _m(
            catalog.VERDICTS, 1, check=record.check, outcome=record.outcome, cause=record.cause
        )
        if record.outcome is Outcome.PASS:
            return
        yield _m(catalog.LAST_EVENT_TIME, record.time, check=record.check)
        yield _m(catalog.LAST_EVENT_STEP, record.step, check=record.check)
        if record.check is Check.NONFINITE and record.origin is not Origin.NONE:
            yield _m(catalog.NONFINITE, 1, origin=record.origin, cause=record.cause)


def _levels(record: Record, summary: RunSummary) -> Iterable[Measurement]:
    """Gauges of the run so far: those that this kind of record can have moved."""
    yield from _one_hot(catalog.RUN_VERDICT, "verdict", RunWord, summary.verdict)
    if isinstance(record, (RunStarted, Progress)):
        yield _m(catalog.STEPS_AT_RISK, summary.steps_at_risk)
        yield _m(catalog.AUDITED_RANKS, summary.audited_ranks)
        yield _m(catalog.LAST_CLEAN_AUDIT_TIME, summary.last_clean_audit_time)
        yield _m(catalog.LAST_CLEAN_AUDIT_STEP, summary.last_clean_audit_step)
        yield _m(catalog.LAST_WEIGHT_CHECK_TIME, summary.last_weight_check_time)
        yield _m(catalog.LAST_WEIGHT_CHECK_STEP, summary.last_weight_check_step)
    if isinstance(record, (RunStarted, CheckpointEvent)):
        yield _m(catalog.LAST_GOOD_CHECKPOINT_TIME, summary.last_good_checkpoint_time)
        yield _m(catalog.LAST_GOOD_CHECKPOINT_STEP, summary.last_good_checkpoint_step or 0)
    if isinstance(record, (RunStarted, Progress, Hang)):
        yield _m(catalog.ABSENT_RANKS, summary.absent_ranks)


def _suspects(summary: RunSummary) -> Iterable[Measurement]:
    """Evidence and state of every device that has one."""
    for device in suspect_devices(summary):
        for found in device.findings:
            who = _who_of(found)
            for result in ("mismatches", "comparisons"):
                value = getattr(found, result)
                yield _m(catalog.RANK_EVIDENCE, value, **who, check=found.check, result=result)
        who = _who_of(device.newest)
        closed = device.state is RankState.CLOSED
        yield _m(catalog.RANK_LAST_FINDING_STEP, device.newest.last_step, **who)
        yield _m(catalog.RANK_STATE, float(not closed), **who, state=RankState.SUSPECT)
        if summary.closings:  # a reopened one must lose the state, too
            yield _m(catalog.RANK_STATE, float(closed), **who, state=RankState.CLOSED)


def _who_of(found: Suspect | Strike) -> dict[str, object]:
    return {
        "suspect_rank": found.rank,
        "suspect_node": found.node,
        "suspect_gpu": found.gpu,
        "suspect_instance_id": found.instance_id,
    }


def _event_info(found: Finding) -> Measurement:
    named = found.suspects
    ranks = [s.rank for s in named]
    return _m(
        catalog.EVENT_INFO,
        1,
        event=found.number,
        time=clock(found.time),
        step=found.step,
        check=found.check,
        outcome=found.outcome,
        cause=found.cause,
        action=found.action,
        who=list_ranks(ranks) if ranks else "nobody named",
        device=", ".join(f"{s.gpu} on {s.node}" for s in named),
        operator=found.operator,
        reason=shortened(found.reason, REASON_LENGTH),
    )


def _suspect_info(device: SuspectDevice) -> Measurement:
    newest = device.newest
    return _m(
        catalog.SUSPECT_INFO,
        1,
        **_who_of(newest),
        state=device.state,
        checks=", ".join(found.check.value for found in device.findings),
        first_step=device.first_step,
        last_step=newest.last_step,
        last_time=clock(newest.last_time),
        evidence=shortened(device.evidence, REASON_LENGTH),
        operator=device.operator,
        closed_because="" if device.closing is None else device.closing.reason,
    )


def _checkpoint_info(summary: RunSummary) -> Iterable[Measurement]:
    if summary.last_good_checkpoint_step is not None:
        yield _m(
            catalog.CHECKPOINT_INFO,
            1,
            step=summary.last_good_checkpoint_step,
            path=summary.last_good_checkpoint_path,
            time=clock(summary.last_good_checkpoint_time),
        )


def _end_info(summary: RunSummary) -> Iterable[Measurement]:
    if summary.ended:
        yield _m(catalog.END_INFO, 1, how=shortened(summary.ended, END_LENGTH))


def _one_hot(
    metric: Metric, attribute: str, states: type[Enum], current: Enum
) -> Iterable[Measurement]:
    for state in states:
        yield _m(metric, float(state is current), **{attribute: state})


def _seeds() -> Iterable[Measurement]:
    """Zeros: a counter that is born at 1 never shows an increase."""
    for check, outcome, cause in VERDICT_SETS:
        yield _m(catalog.VERDICTS, 0, check=check, outcome=outcome, cause=cause)
    for origin, cause in NONFINITE_SETS:
        yield _m(catalog.NONFINITE, 0, origin=origin, cause=cause)
    for result, why in CHECKPOINT_SETS:
        yield _m(catalog.CHECKPOINTS, 0, result=result, reason=why)
    for skip in SkipReason:
        yield _m(catalog.SKIPPED, 0, reason=skip)
    for kind in ("output", "gradient"):
        yield _m(catalog.MISMATCHES, 0, kind=kind)
    for metric, kind in product((catalog.STEPS, catalog.STEP_TIME), ("plain", "audit")):
        yield _m(metric, 0, kind=kind)
    for checked in Check:
        yield _m(catalog.OVERHEAD_TIME, 0, check=checked)
        yield _m(catalog.LAST_EVENT_TIME, 0, check=checked)
        yield _m(catalog.LAST_EVENT_STEP, 0, check=checked)
    for metric in (catalog.COMPARISONS, catalog.FINGERPRINT_CHECKS, catalog.DISAGREEMENTS):
        yield _m(metric, 0)
