"""One run in one value: everything that summary.json, W&B's summary and the report's head say.

`Fold` adds records one at a time and can be asked at any moment; `fold` takes them all. Counts
cover every segment of a run directory; whether the run was checked, and whether it is tainted, is
said of the latest segment, because a resumed run left the tainted replicas behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sdcwatch.core.outcomes import MEANINGS, alarm_word, gravest
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Count,
    Coverage,
    GuardState,
    Hang,
    Outcome,
    PreflightDone,
    Progress,
    Record,
    RunFinished,
    RunStarted,
    RunWord,
    StateChanged,
    Suspect,
    UpdateSkipped,
    Verdict,
    plain,
)
from sdcwatch.core.text import count, list_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run so far.

    Attributes:
        verdict: The run in one word; see `sdcwatch.core.outcomes`.
        reason: Why that word, as a sentence.
        run: Name of the run.
        state: State of the guard; None before it said one.
        finished: The latest segment said that it ended.
        exit_code: What it ended with.
        mode: "enforce" or "observe".
        on_failure: "skip" or "stop".
        coverage: Coverage of the replay audit; None before preflight.
        fault_domain: "node" or "gpu".
        world_size: Ranks in the replica group.
        nodes: Names of the nodes.
        segments: Starts seen in the run directory.
        started_time: Unix time of the first start.
        last_time: Unix time of the latest record.
        last_step: Latest step.
        steps: Steps guarded in all segments.
        loss: Last loss of the reporting rank.
        audits: Audits that compared something.
        clean_audits: Those that passed.
        comparisons: Comparisons of check 2 over all ranks.
        mismatches: Comparisons that did not match.
        output_mismatches: Those whose outputs differed.
        gradient_mismatches: Those in which a gradient differed.
        weight_checks: Runs of check 3.
        disagreements: Tensors on which replicas differed.
        suspects: Named ranks, one per rank and check, counts added up.
        strikes: One-off mismatches that did not repeat, by rank.
        alarms: Verdicts that a person should hear of.
        first_alarm_step: Step of the first of them; None if there is none.
        verdicts: How often each check came to each outcome.
        skipped: Updates that did not happen, by reason.
        checkpoints: Checkpoints by what became of them.
        last_good_checkpoint_step: Last checkpoint saved or confirmed; None if none.
        last_good_checkpoint_time: Its unix time, 0.0 if none.
        last_clean_audit_step: 0 if none yet.
        last_clean_audit_time: Its unix time, 0.0 if none.
        last_weight_check_step: Last passing run of check 3; 0 if none yet.
        last_weight_check_time: Its unix time, 0.0 if none.
        steps_at_risk: Updates since the last clean audit.
        hangs: Liveness checks in which somebody was absent.
        step_seconds: Wall time of all steps.
        overhead_seconds: Wall time spent in the guard, by check.
        overhead_ratio: Its share of the wall time of all steps; None before the first step.
    """

    verdict: RunWord = RunWord.NOT_CHECKED
    reason: str = ""
    run: str = ""
    state: GuardState | None = None
    finished: bool = False
    exit_code: int = 0
    mode: str = ""
    on_failure: str = ""
    coverage: Coverage | None = None
    fault_domain: str = ""
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    segments: int = 0
    started_time: float = 0.0
    last_time: float = 0.0
    last_step: int = 0
    steps: int = 0
    loss: float | None = None
    audits: int = 0
    clean_audits: int = 0
    comparisons: int = 0
    mismatches: int = 0
    output_mismatches: int = 0
    gradient_mismatches: int = 0
    weight_checks: int = 0
    disagreements: int = 0
    suspects: tuple[Suspect, ...] = ()
    strikes: dict[int, int] = field(default_factory=dict)
    alarms: int = 0
    first_alarm_step: int | None = None
    verdicts: tuple[Count, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    last_good_checkpoint_step: int | None = None
    last_good_checkpoint_time: float = 0.0
    last_clean_audit_step: int = 0
    last_clean_audit_time: float = 0.0
    last_weight_check_step: int = 0
    last_weight_check_time: float = 0.0
    steps_at_risk: int = 0
    hangs: int = 0
    step_seconds: float = 0.0
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    overhead_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}


def _merged(known: Suspect | None, new: Suspect, step: int) -> Suspect:
    """Evidence of one rank and check added up; identity as last seen."""
    if known is None:
        return replace(new, first_step=new.first_step or step, last_step=new.last_step or step)
    return replace(
        new,
        mismatches=known.mismatches + new.mismatches,
        comparisons=known.comparisons + new.comparisons,
        partners=tuple(sorted({*known.partners, *new.partners})),
        arbiters=tuple(sorted({*known.arbiters, *new.arbiters})),
        reproduced=new.reproduced if known.reproduced is None else known.reproduced,
        first_step=known.first_step,
        last_step=max(known.last_step, new.last_step or step),
        tensors=tuple(dict.fromkeys((*known.tensors, *new.tensors)))[:10],
    )


class SummaryBuilder:
    """A run summary that grows record by record."""

    def __init__(self) -> None:
        self._so_far = RunSummary()
        self._counted: Counter[tuple[Check, Outcome]] = Counter()
        self._recorded: Counter[tuple[Check, Outcome]] = Counter()
        self._skipped: Counter[str] = Counter()
        self._checkpoints: Counter[str] = Counter()
        self._overhead: Counter[str] = Counter()
        self._suspects: dict[tuple[int, Check], Suspect] = {}
        self._strikes: Counter[int] = Counter()
        self._provisional: dict[int, float] = {}
        self._words: set[RunWord] = set()
        self._tainted = False
        self._audited = False
        self._segment_step = 0

    def add(self, record: Record) -> None:
        """Take one record into account; kinds that say nothing about the whole are passed over."""
        self._set(last_time=max(self._so_far.last_time, record.time), last_step=record.step)
        if isinstance(record, Progress):
            self._add_progress(record)
        elif isinstance(record, Verdict):
            self._add_verdict(record)
        elif isinstance(record, CheckpointEvent):
            self._add_checkpoint(record)
        elif isinstance(record, UpdateSkipped):
            self._skipped[record.reason.value] += 1
        elif isinstance(record, RunStarted):
            self._add_start(record)
        elif isinstance(record, PreflightDone):
            self._set(coverage=record.coverage)
        elif isinstance(record, (StateChanged, RunFinished)):
            self._add_state(record)
        elif isinstance(record, Hang):
            self._set(hangs=self._so_far.hangs + 1)

    def _set(self, **changes: Any) -> None:
        self._so_far = replace(self._so_far, **changes)

    def _add_start(self, record: RunStarted) -> None:
        before = self._so_far
        self._tainted = self._audited = False
        self._words.clear()
        self._segment_step = record.step
        self._set(
            run=record.run,
            state=None,
            finished=False,
            exit_code=0,
            mode=record.mode,
            on_failure=record.on_failure,
            coverage=None,
            fault_domain=record.fault_domain,
            world_size=len(record.ranks),
            nodes=tuple(dict.fromkeys(r.node for r in record.ranks)),
            segments=before.segments + 1,
            started_time=before.started_time or record.time,
        )

    def _add_state(self, record: StateChanged | RunFinished) -> None:
        self._tainted = self._tainted or record.state is GuardState.TAINTED
        self._set(state=record.state)
        if isinstance(record, RunFinished):
            self._set(finished=True, exit_code=record.exit_code)

    def _add_progress(self, record: Progress) -> None:
        before = self._so_far
        for entry in record.counts:
            self._counted[entry.check, entry.outcome] += entry.count
            if entry.check is Check.REPLAY and entry.outcome is Outcome.PASS and entry.count:
                self._audited = True
        self._overhead.update(record.overhead_seconds)
        self._set(
            steps=before.steps + record.plain_steps + record.audit_steps,
            step_seconds=before.step_seconds + record.plain_seconds + record.audit_seconds,
            loss=before.loss if record.loss is None else record.loss,
            comparisons=before.comparisons + record.comparisons,
            output_mismatches=before.output_mismatches + record.output_mismatches,
            gradient_mismatches=before.gradient_mismatches + record.gradient_mismatches,
            weight_checks=before.weight_checks + record.weight_checks,
            disagreements=before.disagreements + record.disagreements,
            last_clean_audit_step=record.last_clean_audit_step or before.last_clean_audit_step,
            last_clean_audit_time=record.last_clean_audit_time or before.last_clean_audit_time,
            last_weight_check_step=record.last_weight_check_step or before.last_weight_check_step,
            last_weight_check_time=record.last_weight_check_time or before.last_weight_check_time,
            steps_at_risk=record.steps_at_risk,
        )

    def _add_verdict(self, record: Verdict) -> None:
        before = self._so_far
        self._recorded[record.check, record.outcome] += 1
        if record.check is Check.REPLAY and record.outcome is Outcome.PASS:
            self._audited = True
        self._tainted = self._tainted or (record.check is Check.FINGERPRINT and record.failed)
        if record.outcome is Outcome.SUSPECT:
            for suspect in record.suspects:
                key = (suspect.rank, suspect.check)
                self._suspects[key] = _merged(self._suspects.get(key), suspect, record.step)
        elif record.outcome is Outcome.NOT_REPRODUCED:
            self._strikes.update([s.rank for s in record.suspects] or record.ranks)
        self._set(mismatches=before.mismatches + sum(not c.note for c in record.comparisons))
        if (word := alarm_word(record)) is not None:
            self._words.add(word)
            first = before.first_alarm_step
            self._set(
                alarms=before.alarms + 1,
                first_alarm_step=record.step if first is None else first,
            )

    def _add_checkpoint(self, record: CheckpointEvent) -> None:
        self._checkpoints[record.result.value] += 1
        if record.result is CheckpointResult.PROVISIONAL:
            self._provisional[record.step] = record.time
        elif record.result is CheckpointResult.SAVED:
            self._good(record.step, record.time)
        elif record.result is CheckpointResult.CONFIRMED:
            # The record may carry the step of the checkpoint or of the audit that confirmed it.
            at = max((s for s in self._provisional if s <= record.step), default=record.step)
            self._good(at, self._provisional.get(at, record.time))

    def _good(self, step: int, time: float) -> None:
        self._set(last_good_checkpoint_step=step, last_good_checkpoint_time=time)

    def _word(self) -> tuple[RunWord, str]:
        """The run in one word, the gravest that holds, and why.

        State, taint and alarms are those of the newest segment; suspects are those of all.
        """
        so_far = self._so_far
        if self._tainted:
            return (
                RunWord.TAINTED,
                "the replicas held different weights: later checkpoints are withheld",
            )
        if self._suspects:
            named = list_ranks(rank for rank, _ in self._suspects)
            first = min(s.first_step for s in self._suspects.values())
            return RunWord.SUSPECT, f"{named} named, first at step {first}"
        worst = gravest(self._words)
        if worst is RunWord.SUSPECT:  # a record that kept no evidence
            return worst, f"a rank was named, first at step {so_far.first_alarm_step}"
        if worst in (RunWord.UNATTRIBUTED, RunWord.NONDETERMINISTIC):
            return worst, f"{count(so_far.alarms, 'alarm')}, and no rank can be named"
        if worst is not None:
            return worst, f"{count(so_far.alarms, 'alarm')}, none of which points to a device"
        if so_far.coverage is Coverage.OFF:
            return RunWord.NOT_CHECKED, "the replay audit is off on this model and machine"
        if not self._audited:
            since = f" since step {self._segment_step}" if self._segment_step else ""
            checks = count(so_far.weight_checks, "weight check")
            return RunWord.NOT_CHECKED, f"no audit has been clean{since}; {checks}"
        audits = count(self._totals()[Check.REPLAY, Outcome.PASS], "clean audit")
        checks = f"{count(so_far.weight_checks, 'weight check')}, no alarm"
        if so_far.coverage is Coverage.OUTPUTS_ONLY:
            return RunWord.PARTLY_CHECKED, f"{audits} of outputs only and {checks}"
        return RunWord.CLEAN, f"{audits} and {checks}"

    def _totals(self) -> Counter[tuple[Check, Outcome]]:
        # A crash can lose the count of a verdict whose record was written, and passes have no
        # record of their own: the larger of the two is right in either case.
        return self._counted | self._recorded

    def summary(self) -> RunSummary:
        """The run so far."""
        word, reason = self._word()
        totals = self._totals()
        replays = {outcome: n for (check, outcome), n in totals.items() if check is Check.REPLAY}
        so_far, overhead = self._so_far, sum(self._overhead.values())
        return replace(
            so_far,
            verdict=word,
            reason=reason,
            audits=sum(n for outcome, n in replays.items() if MEANINGS[outcome].compared),
            clean_audits=replays.get(Outcome.PASS, 0),
            mismatches=max(so_far.mismatches, so_far.output_mismatches, so_far.gradient_mismatches),
            suspects=tuple(self._suspects[key] for key in sorted(self._suspects)),
            strikes=dict(sorted(self._strikes.items())),
            verdicts=tuple(
                Count(check=check, outcome=outcome, count=totals[check, outcome])
                for check in Check
                for outcome in Outcome
                if totals[check, outcome]
            ),
            skipped=dict(self._skipped),
            checkpoints=dict(self._checkpoints),
            overhead_seconds=dict(self._overhead),
            overhead_ratio=overhead / so_far.step_seconds if so_far.step_seconds else None,
        )


def fold(records: Iterable[Record]) -> RunSummary:
    """The summary of some records, in the order in which they were written."""
    running = SummaryBuilder()
    for record in records:
        running.add(record)
    return running.summary()
