"""Turns what the guard learns into records, and hands them on.

Passes are counted and go out about once a second as one `Progress` record; everything else goes out
at once. `events.jsonl` is waited for on the training thread, because it must hold the truth if the
process dies in the next collective; but not for a file system that has stalled.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sdcwatch.core.advice import closing_line
from sdcwatch.core.fingerprint import FingerprintJudgement
from sdcwatch.core.nonfinite import NonfiniteJudgement
from sdcwatch.core.outcomes import MEANINGS, is_alarm
from sdcwatch.core.preflight import CommonJudgement
from sdcwatch.core.records import (
    SHOWN,
    Action,
    Cause,
    Check,
    Comparison,
    Count,
    Coverage,
    Durations,
    GuardState,
    Hang,
    Note,
    Outcome,
    Phase,
    PreflightDone,
    Progress,
    Record,
    RunFinished,
    RunStarted,
    StateChanged,
    Suspect,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.replay import Named
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import line_of, list_ranks
from sdcwatch.core.topology import Topology
from sdcwatch.sinks.jsonl import SummaryFile

if TYPE_CHECKING:
    from sdcwatch.guard.replay import AuditResult
    from sdcwatch.sinks.base import SinkCounts


LOG = logging.getLogger("sdcwatch")
PROGRESS_SECONDS = 1.0


class Emitter(Protocol):
    """Takes records; never raises and never blocks on anything but the event log."""

    @property
    def summary(self) -> RunSummary:
        """The run so far, earlier segments included."""
        ...

    @property
    def counts(self) -> Sequence[SinkCounts]:
        """What each sink was given, and what it lost."""
        ...

    def emit(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self, timeout_seconds: float | None = None) -> None:
        """Drain and let go within the budget."""
        ...


class Answer(Protocol):
    """What preflight came to."""

    coverage: Coverage | None
    reason: str
    deterministic: bool
    repeats: int
    notes: tuple[str, ...]
    micro_batches: int

    @property
    def differing(self) -> tuple[int, ...]:
        """Ranks that the audits leave out."""
        ...


class Window:
    """What happened since the last `Progress` record."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.counts: Counter[tuple[Check, Outcome, Cause]] = Counter()
        self.durations: dict[tuple[Check, Phase], list[float]] = defaultdict(list)
        self.overhead: dict[str, float] = defaultdict(float)
        self.comparisons = 0
        self.output_mismatches = 0
        self.gradient_mismatches = 0
        self.weight_checks = 0
        self.disagreements = 0
        self.plain_steps = 0
        self.plain_seconds = 0.0
        self.audit_steps = 0
        self.audit_seconds = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing happened."""
        counted = self.comparisons or self.weight_checks or self.disagreements
        steps = self.plain_steps or self.audit_steps
        return not (self.counts or counted or steps or self.durations)


class Reporter:
    """Builds records and gives them to the event log and to the sinks.

    Args:
        sink: Where records go; never raises. Writes the event log before `emit` returns.
        verdicts: Builds verdicts; the attribute of that name.
        summary_path: Where summary.json goes, or None.
        leader: Log a line per event.
        start_step: Step before the first.
    """

    def __init__(
        self,
        sink: Emitter,
        verdicts: VerdictBuilder,
        *,
        summary_path: Path | None,
        leader: bool,
        start_step: int,
    ) -> None:
        self._sink, self.verdicts = sink, verdicts
        self._leader = leader
        self._run_dir = None if summary_path is None else summary_path.parent
        self._summary = None if self._run_dir is None else SummaryFile(self._run_dir)
        self._last = time.monotonic()
        self._said: set[str] = set()
        self.window = Window(start_step + 1)
        self.step = start_step
        self.loss: float | None = None
        self.last_clean_audit: tuple[int, float] = (0, 0.0)
        self.last_weight_check: tuple[int, float] = (0, 0.0)
        self.audited_ranks = 0
        self.steps_at_risk = 0

    def updated(self) -> None:
        """The step has updated the weights: at risk, unless it was audited and found clean."""
        if self.step != self.last_clean_audit[0]:
            self.steps_at_risk += 1

    @contextlib.contextmanager
    def timed(self, check: Check, phase: Phase) -> Iterator[None]:
        """Time a phase of a check on this rank."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent(check, phase, time.perf_counter() - started)

    def spent(self, check: Check, phase: Phase, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        self.window.durations[(check, phase)].append(round(seconds, 7))
        self.window.overhead[check.value] += seconds

    def passed(self, check: Check) -> None:
        """Count a pass."""
        self.counted(check, Outcome.PASS)

    def counted(self, check: Check, outcome: Outcome, cause: Cause = Cause.NONE) -> None:
        """Count what needs no record of its own: a pass, or what a verdict has said before."""
        self.window.counts[(check, outcome, cause)] += 1

    def stepped(self, seconds: float, *, audit: bool) -> None:
        """Count a finished step and its wall time; emit progress when it is due."""
        if audit:
            self.window.audit_steps += 1
            self.window.audit_seconds += seconds
        else:
            self.window.plain_steps += 1
            self.window.plain_seconds += seconds
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self.flush()

    def emit(self, record: Record) -> None:
        """Give out a record that is no progress; progress so far goes first."""
        if isinstance(record, Verdict):
            self.window.disagreements += len(record.disagreements)
        self.flush()
        self._out(record)
        failed = isinstance(record, RunFinished) and record.exit_code != 0  # each has its last word
        if failed or (self._leader and not isinstance(record, (RunStarted, Progress))):
            _log(record)
        if not isinstance(record, (Note, StateChanged)):
            self._write_summary()

    def urgent(self, record: Record) -> None:
        """Give out a record from another thread, past the window and the summary."""
        self._sink.emit(record)
        _log(record)

    def note_once(self, code: str, message: str, *, level: str = "warning") -> None:
        """Say something once per run."""
        if code not in self._said:
            self._said.add(code)
            self.emit(
                Note(step=self.step, time=time.time(), code=code, message=message, level=level)
            )

    def enter(self, state: GuardState, reason: str) -> None:
        """The guard goes into another state."""
        self.emit(StateChanged(step=self.step, time=time.time(), state=state, reason=reason))

    def arm(self, preflight: Answer, step: int, *, observing: bool) -> None:
        """Preflight has an answer: say it, and go into the state that follows from it."""
        coverage = preflight.coverage
        assert coverage is not None
        self.emit(
            PreflightDone(
                step=step,
                time=time.time(),
                coverage=coverage,
                reason=preflight.reason,
                deterministic_kernels=preflight.deterministic,
                repeats=preflight.repeats,
                notes=preflight.notes,
                micro_batches=preflight.micro_batches,
                left_out=preflight.differing,
            )
        )
        if coverage is not Coverage.FULL:
            self.enter(GuardState.DEGRADED, f"audit coverage is {coverage.value}")
        elif preflight.differing:
            left_out = list_ranks(preflight.differing)
            self.enter(GuardState.DEGRADED, f"the audits leave out {left_out}")
        elif observing:
            self.enter(GuardState.OBSERVING, "reporting only")
        else:
            self.enter(GuardState.ARMED, "every check is on")

    def audited(
        self, comparisons: int, mismatches: Sequence[Comparison], seconds: Mapping[Phase, float]
    ) -> None:
        """Count an audit."""
        self.window.comparisons += comparisons
        self.window.output_mismatches += sum(not c.outputs_equal for c in mismatches)
        self.window.gradient_mismatches += sum(c.tensors_differing > 0 for c in mismatches)
        for phase, spent in seconds.items():
            self.spent(Check.REPLAY, phase, spent)

    def flush(self) -> None:
        """Emit the progress so far, if there is any."""
        window = self.window
        self._last = time.monotonic()
        if window.empty:
            return
        self.window = Window(self.step + 1)
        self._out(self._progress(window))

    def close(self, timeout_seconds: float | None = None) -> None:
        """Flush, write the summary, and close the sinks within their budget."""
        self.flush()
        self._write_summary()
        if self._leader and self._run_dir is not None:
            LOG.info(closing_line(self._sink.summary, self._run_dir, self._unwritten()))
        self._sink.close(timeout_seconds)

    def _progress(self, window: Window) -> Progress:
        return Progress(
            step=self.step,
            time=time.time(),
            first_step=min(window.first_step, self.step),
            counts=tuple(
                Count(check=c, outcome=o, count=n, cause=why)
                for (c, o, why), n in sorted(window.counts.items())
            ),
            comparisons=window.comparisons,
            output_mismatches=window.output_mismatches,
            gradient_mismatches=window.gradient_mismatches,
            weight_checks=window.weight_checks,
            disagreements=window.disagreements,
            loss=self.loss,
            durations=tuple(
                Durations.of(c, p, seconds) for (c, p), seconds in sorted(window.durations.items())
            ),
            plain_steps=window.plain_steps,
            plain_seconds=window.plain_seconds,
            audit_steps=window.audit_steps,
            audit_seconds=window.audit_seconds,
            overhead_seconds={k: round(v, 7) for k, v in sorted(window.overhead.items())},
            last_clean_audit_step=self.last_clean_audit[0],
            last_clean_audit_time=self.last_clean_audit[1],
            last_weight_check_step=self.last_weight_check[0],
            last_weight_check_time=self.last_weight_check[1],
            audited_ranks=self.audited_ranks,
            steps_at_risk=self.steps_at_risk,
        )

    def _out(self, record: Record) -> None:
        self._sink.emit(record)

    def _unwritten(self) -> list[str]:
        """Files of the run directory that lack something."""
        logs = [c for c in self._sink.counts if c.sink == "jsonl"]
        behind = any(log.lost or log.stalled for log in logs)
        written = self._summary is None or self._summary.complete
        return ["events.jsonl"] * behind + ["summary.json"] * (not written)

    def _write_summary(self) -> None:
        # Neither a full disk nor one that stalls stops the run; the event log counts for itself.
        if self._summary is None or self._summary.problem:
            return
        self._summary.write(self._sink.summary)
        if self._summary.problem:
            LOG.error("cannot write the summary any more (%s)", self._summary.problem)


class ConsoleHandler(logging.Handler):
    """One line on stderr per log record, unless a handler of the user's writes it there anyway.

    Findings are logged as CRITICAL: a handler at that level stays also with ``console=False``, so
    that no choice of handlers keeps them from stderr.

    Attributes:
        levels: What each open guard wants to be shown; the lowest counts.
        log_level: Of the logger, before the first of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.log_level = LOG.level

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line as a whole, so that ranks do not mix; where it can be written."""
        # Closed, none at all, or a pipe that nobody reads any more: that ends no training.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if not _reaches_stderr(record, besides=self):
                sys.stderr.write(f"sdcwatch: {record.getMessage()}\n")
                sys.stderr.flush()


def _reaches_stderr(record: logging.LogRecord, *, besides: logging.Handler) -> bool:
    logger: logging.Logger | None = LOG
    while logger is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            if handler is not besides and stream is sys.stderr and record.levelno >= handler.level:
                return True
        logger = logger.parent if logger.propagate else None
    return False


def open_console(*, console: bool) -> Callable[[], None]:
    """Let the log reach stderr: every line, or only findings. Returns what takes it back.

    Two guards in one process share one handler.
    """
    level = logging.INFO if console else logging.CRITICAL
    found = [h for h in LOG.handlers if isinstance(h, ConsoleHandler)]
    handler = found[0] if found else ConsoleHandler()
    if not found:
        LOG.addHandler(handler)
    handler.levels.append(level)
    handler.setLevel(min(handler.levels))
    if console and not LOG.isEnabledFor(logging.INFO):
        LOG.setLevel(logging.INFO)

    def close() -> None:
        handler.levels.remove(level)
        if handler.levels:
            handler.setLevel(min(handler.levels))
        else:  # the last guard in this process
            LOG.removeHandler(handler)
            LOG.setLevel(handler.log_level)

    return close


def _log(record: Record) -> None:
    """Log what a person should read of a record; a finding as CRITICAL."""
    if (line := line_of(record)) is not None:
        LOG.log(level_of(record), str(line))


def level_of(record: Record) -> int:
    """How loudly a record is logged."""
    if isinstance(record, Verdict) and is_alarm(record):
        return logging.CRITICAL
    if isinstance(record, Hang) or (isinstance(record, RunFinished) and record.exit_code):
        return logging.CRITICAL
    if isinstance(record, UpdateSkipped):
        return logging.WARNING
    return logging.INFO


class VerdictBuilder:
    """Builds verdicts; remembers since when each suspect has been one.

    Args:
        topology: Who is where.
        observing: The guard reports and skips or stops nothing.
    """

    def __init__(self, topology: Topology, *, observing: bool) -> None:
        self._topology, self._observing = topology, observing
        self._first_step: dict[tuple[int, Check], int] = {}

    def nonfinite(self, step: int, judgement: NonfiniteJudgement) -> Verdict:
        """Check 1 tripped: always a failure, whoever caused it."""
        suspects = tuple(
            self._suspect(
                step,
                rank,
                Check.NONFINITE,
                mismatches=1,
                comparisons=1,
                partners=(),
                reproduced=judgement.reproduced(rank),
                operator=judgement.operators.get(rank, ""),
            )
            for rank in judgement.named
        )
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.NONFINITE,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=True,
            action=self._action(Action.SKIP),
            suspects=suspects,
            origin=judgement.origin,
            cause=judgement.cause,
            ranks=judgement.ranks,
            operator=judgement.operator,
        )

    def replay(self, step: int, result: AuditResult) -> Verdict:
        """An audit that was not clean."""
        judgement = result.judgement
        # Software that computes something else on a rank is no wrong number of that rank's.
        failed = MEANINGS[judgement.outcome].failed and judgement.cause is not Cause.SOFTWARE
        cause = judgement.cause
        if judgement.outcome is Outcome.DIFFERS and cause is Cause.NONE:
            cause = Cause.SOFTWARE if result.separating else result.why_differing
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.REPLAY,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=failed,
            action=self._action(Action.SKIP) if failed else Action.NONE,
            suspects=tuple(self._audited(step, n, result) for n in judgement.named),
            ranks=judgement.ranks or tuple(n.rank for n in judgement.strikes),
            comparisons=result.comparisons,
            comparisons_total=result.total,
            notes=result.notes,
            cause=cause,
            operator=judgement.operator,
        )

    def differs(self, step: int, common: CommonJudgement, ranks: Sequence[int]) -> Verdict:
        """Preflight: ranks make something else of the same micro-batch.

        Args:
            step: The step.
            common: What all ranks made of it.
            ranks: Those that are left out, or every side where there is no majority.
        """
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.REPLAY,
            outcome=Outcome.DIFFERS,
            reason=common.reason,
            cause=common.cause,
            ranks=tuple(ranks),
            operator=common.operator,
        )

    def not_run(self, step: int, reason: str, *, outcome: Outcome = Outcome.NOT_RUN) -> Verdict:
        """An audit was due and could not be made, or its comparisons mean nothing."""
        return Verdict(
            step=step, time=time.time(), check=Check.REPLAY, outcome=outcome, reason=reason
        )

    def without_record(self, step: int, reasons: Mapping[int, str]) -> Verdict:
        """An audit was due, and the step of some ranks cannot be replayed."""
        first = next(iter(reasons.values()), "")
        reason = f"{first} on {list_ranks(reasons)}; the next step is audited instead"
        return replace(self.not_run(step, reason), ranks=tuple(reasons))

    def fingerprint(self, step: int, judgement: FingerprintJudgement, tensors: int) -> Verdict:
        """Replicas differ: the run is tainted."""
        suspects = tuple(
            self._suspect(
                step,
                rank,
                Check.FINGERPRINT,
                mismatches=len(names),
                comparisons=tensors,
                partners=(),
                tensors=names[:SHOWN],
            )
            for rank, names in sorted(judgement.named.items())
        )
        return Verdict(
            step=step,
            time=time.time(),
            check=Check.FINGERPRINT,
            outcome=judgement.outcome,
            reason=judgement.reason,
            failed=True,
            cause=judgement.cause,
            action=self._action(Action.STOP),
            suspects=suspects,
            ranks=judgement.ranks,
            disagreements=judgement.disagreements[:SHOWN],
            tensors_total=tensors,
        )

    def _action(self, enforced: Action) -> Action:
        return Action.OBSERVE if self._observing else enforced

    def _audited(self, step: int, named: Named, result: AuditResult) -> Suspect:
        involved = [c for c in result.comparisons if named.rank in (c.producer, c.replayer)]
        tensors = tuple(dict.fromkeys(t for c in involved for t in c.tensors))[:SHOWN]
        return self._suspect(
            step,
            named.rank,
            Check.REPLAY,
            mismatches=named.mismatches,
            comparisons=named.comparisons,
            partners=named.partners,
            arbiters=named.arbiters,
            reproduced=named.reproduced,
            tensors=tensors,
            operator=named.operator,
        )

    def _suspect(  # noqa: PLR0913 - one argument per count of evidence, all by name
        self,
        step: int,
        rank: int,
        check: Check,
        *,
        mismatches: int,
        comparisons: int,
        partners: Iterable[int],
        arbiters: Iterable[int] = (),
        reproduced: bool | None = None,
        tensors: tuple[str, ...] = (),
        operator: str = "",
    ) -> Suspect:
        info = self._topology.ranks[rank]
        first = self._first_step.setdefault((rank, check), step)
        return Suspect(
            rank=rank,
            node=info.node,
            instance_id=info.instance_id,
            gpu=info.gpu,
            gpu_index=info.gpu_index,
            check=check,
            mismatches=mismatches,
            comparisons=comparisons,
            partners=tuple(partners),
            arbiters=tuple(arbiters),
            reproduced=reproduced,
            first_step=first,
            last_step=step,
            tensors=tensors,
            operator=operator,
        )
