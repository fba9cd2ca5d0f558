"""One run in one value: everything that summary.json, W&B's summary and the report's head say.

`SummaryBuilder` adds records one at a time and can be asked at any moment; `fold` takes them all.
Counts cover every segment of a run directory, and so do suspects, which are devices and not ranks,
until a person closes them. State, taint and alarms are those of the newest segment, because a
resumed run left the tainted replicas behind.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sdcwatch.core.outcomes import MEANINGS, alarm_word, ends_confirmation, gravest
from sdcwatch.core.records import (
    SHOWN,
    Action,
    Cause,
    Check,
    CheckpointEvent,
    Closing,
    Count,
    Coverage,
    Device,
    GuardState,
    Hang,
    Origin,
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
from sdcwatch.core.saved import SavedCheckpoints
from sdcwatch.core.text import count, list_ranks
from sdcwatch.core.topology import RankInfo

FINDINGS_KEPT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One-off mismatches of one device: wrong, and right when asked again.

    Attributes:
        rank: Where it ran at the last of them.
        node: Its node.
        instance_id: What a replacement request names.
        gpu: Label of the device.
        count: How many.
        last_step: Step of the last.
    """

    rank: int
    node: str
    instance_id: str
    gpu: str
    count: int
    last_step: int

    @property
    def device(self) -> Device:
        """What struck."""
        return self.instance_id, self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An alarm in short, for lists of what happened last.

    Attributes:
        number: Which alarm of the run it is, counted from 1.
        step: Its step.
        time: Its unix time.
        check: The check.
        outcome: What it came to.
        cause: Why.
        action: What the guard did.
        suspects: Who is named, as devices; `named_ranks` where they run.
        ranks: Whom it concerns, without blame: who saw it, was compared, or holds other weights.
            Only after `not_reproduced` is it the rank that was wrong once.
        operator: The operation in which a device computed wrongly, if known.
        reason: One sentence.
    """

    number: int
    step: int
    time: float
    check: Check
    outcome: Outcome
    cause: Cause
    action: Action
    suspects: tuple[Suspect, ...]
    named_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    operator: str
    reason: str


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
        ended: How it ended, as a sentence; empty while it runs.
        mode: "enforce" or "observe".
        on_failure: "skip" or "stop".
        coverage: Coverage of the replay audit; None before preflight.
        fault_domain: "node" or "gpu".
        world_size: Ranks in the replica group.
        nodes: Names of the nodes.
        run_id: Made with the run directory; tells runs of one name apart. Empty in old logs.
        run_dir: Where the event log is.
        segments: Starts seen in the run directory.
        vanished_segments: Earlier segments that never said how they ended.
        started_time: Unix time of the first start.
        last_time: Unix time of the latest record.
        last_step: Latest step.
        steps: Steps guarded in all segments; `plain_steps` without an audit, `audit_steps` with.
        loss: Last loss of the reporting rank.
        audits: Audits that compared something.
        clean_audits: Those that passed.
        comparisons: Comparisons of check 2 over all ranks.
        mismatches: Comparisons that did not match.
        output_mismatches: Those in which the bits of an output differed.
        gradient_mismatches: Those in which a gradient differed.
        weight_checks: Runs of check 3.
        disagreements: Tensors on which replicas differed.
        audited_ranks: Ranks compared in the last audit.
        nonfinite_steps: Steps at which check 1 saw a non-finite value.
        suspects: Named devices that nobody has closed, one per device and check, counts added up.
        closed_suspects: Those that a person has closed, in the same way.
        closings: What the person said, in the order of time.
        strikes: One-off mismatches that did not repeat, by device.
        findings: The last 20 alarms, oldest first.
        alarms: Verdicts that a person should hear of.
        first_alarm_step: Step of the first of them; None if there is none.
        verdicts: How often each check came to each outcome.
        skipped: Updates that did not happen, by reason.
        checkpoints: Checkpoints by what became of them.
        last_good_checkpoint_step: Last checkpoint saved or confirmed; None if none.
        last_good_checkpoint_time: Its unix time, 0.0 if none.
        last_good_checkpoint_path: Where it is, if the script said so.
        condemned_checkpoint_steps: Checkpoints saved before an audit that was not clean, or before
            weights differed, and confirmed by none: nobody should resume from them. At most 100.
        provisional_checkpoint_steps: Those saved that no audit has confirmed so far. At most 100.
        last_clean_audit_step: 0 if none yet.
        last_clean_audit_time: Its unix time, 0.0 if none.
        last_weight_check_step: Last passing run of check 3; 0 if none yet.
        last_weight_check_time: Its unix time, 0.0 if none.
        steps_at_risk: Updates since the last clean audit.
        hangs: Liveness checks in which somebody was absent.
        absent_ranks: Ranks absent in the last of them; 0 again once a step completes.
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
    ended: str = ""
    mode: str = ""
    on_failure: str = ""
    coverage: Coverage | None = None
    fault_domain: str = ""
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    run_id: str = ""
    run_dir: str = ""
    segments: int = 0
    vanished_segments: int = 0
    started_time: float = 0.0
    last_time: float = 0.0
    last_step: int = 0
    steps: int = 0
    plain_steps: int = 0
    audit_steps: int = 0
    loss: float | None = None
    audits: int = 0
    clean_audits: int = 0
    comparisons: int = 0
    mismatches: int = 0
    output_mismatches: int = 0
    gradient_mismatches: int = 0
    weight_checks: int = 0
    disagreements: int = 0
    audited_ranks: int = 0
    nonfinite_steps: int = 0
    suspects: tuple[Suspect, ...] = ()
    closed_suspects: tuple[Suspect, ...] = ()
    closings: tuple[Closing, ...] = ()
    strikes: tuple[Strike, ...] = ()
    findings: tuple[Finding, ...] = ()
    alarms: int = 0
    first_alarm_step: int | None = None
    verdicts: tuple[Count, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    last_good_checkpoint_step: int | None = None
    last_good_checkpoint_time: float = 0.0
    last_good_checkpoint_path: str = ""
    condemned_checkpoint_steps: tuple[int, ...] = ()
    provisional_checkpoint_steps: tuple[int, ...] = ()
    last_clean_audit_step: int = 0
    last_clean_audit_time: float = 0.0
    last_weight_check_step: int = 0
    last_weight_check_time: float = 0.0
    steps_at_risk: int = 0
    hangs: int = 0
    absent_ranks: int = 0
    step_seconds: float = 0.0
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    overhead_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}


def _merged(known: Suspect | None, new: Suspect, record: Verdict) -> Suspect:
    """Evidence of one device and check added up; identity as last seen."""
    step = new.last_step or record.step
    if known is None:
        return replace(
            new,
            first_step=new.first_step or record.step,
            last_step=step,
            first_time=record.time,
            last_time=record.time,
        )
    return replace(
        new,
        mismatches=known.mismatches + new.mismatches,
        comparisons=known.comparisons + new.comparisons,
        partners=tuple(sorted({*known.partners, *new.partners})),
        arbiters=tuple(sorted({*known.arbiters, *new.arbiters})),
        reproduced=new.reproduced if known.reproduced is None else known.reproduced,
        first_step=known.first_step,
        first_time=known.first_time,
        last_step=max(known.last_step, step),
        last_time=max(known.last_time, record.time),
        tensors=tuple(dict.fromkeys((*known.tensors, *new.tensors)))[:SHOWN],
        operator=new.operator or known.operator,
    )


@dataclass(slots=True)
class _Segment:
    """What is said of the newest segment only."""

    first_step: int = 0
    tainted: bool = False
    audited: bool = False
    alarms: int = 0
    first_alarm_step: int | None = None
    words: set[RunWord] = field(default_factory=set)


class SummaryBuilder:
    """A run summary that grows record by record."""

    def __init__(self) -> None:
        self._so_far = RunSummary()
        self._verdicts: Counter[tuple[Check, Outcome]] = Counter()
        self._skipped: Counter[str] = Counter()
        self._checkpoints: Counter[str] = Counter()
        self._overhead: Counter[str] = Counter()
        self._ranks: dict[int, RankInfo] = {}
        self._suspects: dict[tuple[Device, Check], Suspect] = {}
        self._closings: list[Closing] = []
        self._strikes: dict[Device, tuple[Strike, float]] = {}
        self._findings: deque[Finding] = deque(maxlen=FINDINGS_KEPT)
        self._saved = SavedCheckpoints()
        self._newest = _Segment()

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
            self._set(hangs=self._so_far.hangs + 1, absent_ranks=len(record.absent))

    def close(self, closing: Closing) -> None:
        """Take into account what a person decided about a device."""
        self._closings.append(closing)
        self._closings.sort(key=lambda c: c.time)

    def _set(self, **changes: Any) -> None:
        self._so_far = replace(self._so_far, **changes)

    def _add_start(self, record: RunStarted) -> None:
        before = self._so_far
        vanished = bool(before.segments) and not before.finished
        self._newest = _Segment(first_step=record.step)
        self._ranks = {info.rank: info for info in record.ranks}
        self._set(
            run=record.run,
            run_id=record.run_id,
            run_dir=record.run_dir,
            state=None,
            finished=False,
            exit_code=0,
            ended="",
            mode=record.mode,
            on_failure=record.on_failure,
            coverage=None,
            fault_domain=record.fault_domain,
            world_size=len(record.ranks),
            nodes=tuple(dict.fromkeys(r.node for r in record.ranks)),
            segments=before.segments + 1,
            vanished_segments=before.vanished_segments + vanished,
            started_time=before.started_time or record.time,
            absent_ranks=0,
        )

    def _add_state(self, record: StateChanged | RunFinished) -> None:
        self._newest.tainted |= record.state is GuardState.TAINTED
        self._set(state=record.state)
        if isinstance(record, RunFinished):
            self._set(finished=True, exit_code=record.exit_code, ended=record.reason)

    def _add_progress(self, record: Progress) -> None:
        before = self._so_far
        for entry in record.counts:
            self._verdicts[entry.check, entry.outcome] += entry.count
            if entry.check is Check.REPLAY and entry.outcome is Outcome.PASS and entry.count:
                self._newest.audited = True
        self._overhead.update(record.overhead_seconds)
        steps = record.plain_steps + record.audit_steps
        self._set(
            steps=before.steps + steps,
            plain_steps=before.plain_steps + record.plain_steps,
            audit_steps=before.audit_steps + record.audit_steps,
            step_seconds=before.step_seconds + record.plain_seconds + record.audit_seconds,
            loss=before.loss if record.loss is None else record.loss,
            comparisons=before.comparisons + record.comparisons,
            output_mismatches=before.output_mismatches + record.output_mismatches,
            gradient_mismatches=before.gradient_mismatches + record.gradient_mismatches,
            weight_checks=before.weight_checks + record.weight_checks,
            disagreements=before.disagreements + record.disagreements,
            audited_ranks=record.audited_ranks,
            last_clean_audit_step=record.last_clean_audit_step or before.last_clean_audit_step,
            last_clean_audit_time=record.last_clean_audit_time or before.last_clean_audit_time,
            last_weight_check_step=record.last_weight_check_step or before.last_weight_check_step,
            last_weight_check_time=record.last_weight_check_time or before.last_weight_check_time,
            steps_at_risk=record.steps_at_risk,
            absent_ranks=0 if steps else before.absent_ranks,
        )

    def _add_verdict(self, record: Verdict) -> None:
        before, newest = self._so_far, self._newest
        self._verdicts[record.check, record.outcome] += 1
        newest.audited |= record.check is Check.REPLAY and record.outcome is Outcome.PASS
        differ = record.check is Check.FINGERPRINT and record.failed
        newest.tainted |= differ
        if differ or ends_confirmation(record):
            self._saved.condemn()
        if record.outcome is Outcome.SUSPECT:
            for suspect in record.suspects:
                key = (suspect.device, suspect.check)
                self._suspects[key] = _merged(self._suspects.get(key), suspect, record)
        elif record.outcome is Outcome.NOT_REPRODUCED:
            self._add_strikes(record)
        nonfinite = record.check is Check.NONFINITE and record.origin is not Origin.NONE
        self._set(
            mismatches=before.mismatches + sum(not c.note for c in record.comparisons),
            nonfinite_steps=before.nonfinite_steps + nonfinite,
        )
        if (word := alarm_word(record)) is not None:
            self._add_alarm(record, word)

    def _add_alarm(self, record: Verdict, word: RunWord) -> None:
        before, newest = self._so_far, self._newest
        newest.alarms += 1
        newest.first_alarm_step = newest.first_alarm_step or record.step
        # A named suspect stays one until a person closes it, whatever the segment.
        if word is not RunWord.SUSPECT or not record.suspects:
            newest.words.add(word)
        first = before.first_alarm_step
        suspects = tuple(self._timed(s, record) for s in record.suspects)
        self._set(
            alarms=before.alarms + 1,
            first_alarm_step=record.step if first is None else first,
        )
        self._findings.append(
            Finding(
                number=before.alarms + 1,
                step=record.step,
                time=record.time,
                check=record.check,
                outcome=record.outcome,
                cause=record.cause,
                action=record.action,
                suspects=suspects,
                named_ranks=tuple(sorted({s.rank for s in suspects})),
                ranks=record.ranks,
                operator=record.operator,
                reason=record.reason,
            )
        )

    def _timed(self, suspect: Suspect, record: Verdict) -> Suspect:
        """A suspect as its verdict names it, and since when: a record leaves that to its time."""
        known = self._suspects.get((suspect.device, suspect.check))
        first_time = record.time if known is None else known.first_time
        return replace(suspect, first_time=first_time, last_time=record.time)

    def _add_strikes(self, record: Verdict) -> None:
        named = [(s.rank, s.node, s.instance_id, s.gpu) for s in record.suspects]
        for rank in () if named else record.ranks:
            info = self._ranks.get(rank)
            where = ("", "", "") if info is None else (info.node, info.instance_id, info.gpu)
            named.append((rank, *where))
        for rank, node, instance_id, gpu in named:
            # Of a rank that no start record knows only its number can tell it from others.
            device = (instance_id, gpu or f"rank {rank}")
            known = self._strikes.get(device)
            strike = Strike(
                rank=rank,
                node=node,
                instance_id=instance_id,
                gpu=gpu,
                count=1 + (known[0].count if known else 0),
                last_step=record.step,
            )
            self._strikes[device] = (strike, record.time)

    def _add_checkpoint(self, record: CheckpointEvent) -> None:
        self._checkpoints[record.result.value] += 1
        self._saved.add(record)
        if (good := self._saved.good) is not None:
            self._set(
                last_good_checkpoint_step=good.step,
                last_good_checkpoint_time=good.time,
                last_good_checkpoint_path=good.path,
            )

    def _is_closed(self, device: Device, last_time: float) -> bool:
        return any(c.covers(device) and c.time >= last_time for c in self._closings)

    def _named(self, suspects: Sequence[Suspect]) -> str:
        """Who is suspect: by rank, but a device that runs elsewhere now by its own name."""
        here = {info.rank: (info.instance_id, info.gpu) for info in self._ranks.values()}
        ranks = {s.rank for s in suspects if here.get(s.rank) == s.device}
        gone = {
            s.device: f"{s.gpu} on {s.node} (rank {s.rank} then)"
            for s in suspects
            if here.get(s.rank) != s.device
        }
        return " and ".join([list_ranks(ranks)] * bool(ranks) + list(gone.values()))

    def _word(self, suspects: Sequence[Suspect]) -> tuple[RunWord, str]:
        """The run in one word, the gravest that holds, and why."""
        so_far, newest = self._so_far, self._newest
        if newest.tainted:
            return (
                RunWord.TAINTED,
                "the replicas held different weights: later checkpoints are withheld",
            )
        if suspects:
            first = min(s.first_step for s in suspects)
            return RunWord.SUSPECT, f"{self._named(suspects)} named, first at step {first}"
        worst = gravest(newest.words)
        alarms = count(newest.alarms, "alarm")
        if worst is RunWord.SUSPECT:  # a record that kept no evidence
            return worst, f"a rank was named, first at step {newest.first_alarm_step}"
        if worst in (RunWord.UNATTRIBUTED, RunWord.NONDETERMINISTIC):
            return worst, f"{alarms}, and no rank can be named"
        if worst is not None:
            return worst, f"{alarms}, none of which points to a device"
        if so_far.coverage is Coverage.OFF:
            return RunWord.NOT_CHECKED, "the replay audit is off on this model and machine"
        if not newest.audited:
            since = f" since step {newest.first_step}" if newest.first_step else ""
            checks = count(so_far.weight_checks, "weight check")
            return RunWord.NOT_CHECKED, f"no audit has been clean{since}; {checks}"
        audits = count(self._verdicts[Check.REPLAY, Outcome.PASS], "clean audit")
        quiet = "no alarm" if not newest.alarms else "every suspect closed"
        checks = f"{count(so_far.weight_checks, 'weight check')}, {quiet}"
        if so_far.coverage is Coverage.OUTPUTS_ONLY:
            return RunWord.PARTLY_CHECKED, f"{audits} of outputs only and {checks}"
        return RunWord.CLEAN, f"{audits} and {checks}"

    def summary(self) -> RunSummary:
        """The run so far."""
        named = sorted(self._suspects.values(), key=lambda s: (s.rank, s.check, s.device))
        closed = [s for s in named if self._is_closed(s.device, s.last_time)]
        suspects = tuple(s for s in named if s not in closed)
        word, reason = self._word(suspects)
        totals = self._verdicts
        replays = {outcome: n for (check, outcome), n in totals.items() if check is Check.REPLAY}
        so_far, overhead = self._so_far, sum(self._overhead.values())
        return replace(
            so_far,
            verdict=word,
            reason=reason,
            audits=sum(n for outcome, n in replays.items() if MEANINGS[outcome].compared),
            clean_audits=replays.get(Outcome.PASS, 0),
            mismatches=max(so_far.mismatches, so_far.output_mismatches, so_far.gradient_mismatches),
            suspects=suspects,
            closed_suspects=tuple(closed),
            closings=tuple(self._closings),
            strikes=tuple(
                strike
                for strike, last_time in sorted(self._strikes.values(), key=lambda s: s[0].rank)
                if not self._is_closed(strike.device, last_time)
            ),
            findings=tuple(self._findings),
            verdicts=tuple(
                Count(check=check, outcome=outcome, count=totals[check, outcome])
                for check in Check
                for outcome in Outcome
                if totals[check, outcome]
            ),
            skipped=dict(self._skipped),
            checkpoints=dict(self._checkpoints),
            condemned_checkpoint_steps=self._saved.condemned,
            provisional_checkpoint_steps=self._saved.provisional,
            overhead_seconds=dict(self._overhead),
            overhead_ratio=overhead / so_far.step_seconds if so_far.step_seconds else None,
        )


def fold(records: Iterable[Record], closings: Iterable[Closing] = ()) -> RunSummary:
    """The summary of some records, in the order in which they were written, and of closings."""
    running = SummaryBuilder()
    for closing in closings:
        running.close(closing)
    for record in records:
        running.add(record)
    return running.summary()
