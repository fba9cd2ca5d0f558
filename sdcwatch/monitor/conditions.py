"""The condition of each alert: when it is true, as PromQL over the catalogue."""

from __future__ import annotations

from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointResult,
    Coverage,
    GuardState,
    Outcome,
    RankState,
    SkipReason,
)
from sdcwatch.monitor.config import Thresholds, duration_seconds
from sdcwatch.monitor.promql import (
    CHECKPOINTS,
    COVERAGE,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_TIME,
    LAST_PROGRESS_TIME,
    LAST_WEIGHT_CHECK_TIME,
    NONFINITE,
    RANK_STATE,
    RANK_STRIKES,
    SKIPPED,
    START_TIME,
    STEPS,
    TELEMETRY_DROPPED,
    VERDICTS,
    Scope,
    Window,
    fact,
    last,
    overhead_ratio,
    recent,
    select,
    summed,
    total,
)

ACTIVE = (
    GuardState.PREFLIGHT,
    GuardState.ARMED,
    GuardState.OBSERVING,
    GuardState.DEGRADED,
    GuardState.TAINTED,
)
"""States of a run that has not ended."""
OPEN = (RankState.SUSPECT, RankState.CONFIRMED)
"""States of a rank somebody must act on."""
UNNAMED = (
    Outcome.UNATTRIBUTED,
    Outcome.INCONCLUSIVE,
    Outcome.WIDESPREAD,
    Outcome.TRANSPORT,
)
SKIPS = (SkipReason.NONFINITE, SkipReason.REPLAY, SkipReason.NOT_STEPPED)
"""Skips that count; those of the loss scaler are normal under fp16."""


def _events(limits: Thresholds) -> Window:
    return Window.of(limits.event_window)


def _active(scope: Scope) -> str:
    """1 for each live run that has not ended."""
    return f"{fact(select(GUARD_STATE, scope, state=ACTIVE), scope)} == 1"


def open_suspects(scope: Scope, window: Window, *labels: str) -> str:
    """1 for each rank that is suspect or confirmed and was not dismissed."""
    who = ("rank", "gpu")
    held = fact(last(select(RANK_STATE, scope, state=OPEN), window), scope, *labels)
    dismissed = select(RANK_STATE, scope, state=RankState.DISMISSED)
    closed = fact(last(dismissed, window), scope, *who)
    return f"{held} == 1 unless on ({scope.labels(*who)}) {closed} == 1"


def suspect_rank(scope: Scope, limits: Thresholds) -> str:
    """A level: true from the verdict until a human dismisses it, also after the process ended.

    The window takes the place of `keep_firing_for`: that one would go on after a dismissal, and
    forgets when Prometheus restarts.
    """
    return open_suspects(scope, Window.of(limits.hold), "rank", "node", "gpu")


def unattributed(scope: Scope, limits: Thresholds) -> str:
    """Wrong, and nobody can be named."""
    return verdict(scope, limits, *UNNAMED)


def verdict(scope: Scope, limits: Thresholds, *outcomes: Outcome) -> str:
    """A check came to one of these outcomes lately."""
    chosen = select(VERDICTS, scope, outcome=outcomes)
    return recent(chosen, scope, _events(limits), "check", "outcome")


def software(scope: Scope, limits: Thresholds) -> str:
    """Replicas differ because of the training loop."""
    return verdict(scope, limits, Outcome.NOT_REDUCED, Outcome.SCALE_DIFFERS)


def tainted(scope: Scope, limits: Thresholds) -> str:
    """The run is tainted now, or ended so and was not resumed; or check 3 failed lately."""
    by = scope.labels()
    state = select(GUARD_STATE, scope, state=GuardState.TAINTED)
    now = f"{fact(state, scope)} == 1"
    ended = f"{fact(last(state, Window.of(limits.hold)), scope)} == 1"
    alive = fact(select(GUARD_STATE, scope), scope)
    failed = select(
        VERDICTS,
        scope,
        check=Check.FINGERPRINT,
        outcome=(Outcome.SUSPECT, Outcome.UNATTRIBUTED, Outcome.WIDESPREAD),
    )
    event = recent(failed, scope, _events(limits))
    return f"{now} or ({ended} unless on ({by}) {alive}) or {event}"


def one_off(scope: Scope, limits: Thresholds) -> str:
    """Ranks with strikes, while a verdict that gave one is recent."""
    strikes = fact(last(select(RANK_STRIKES, scope), _events(limits)), scope, "rank", "node", "gpu")
    chosen = select(VERDICTS, scope, outcome=Outcome.NOT_REPRODUCED)
    return f"{strikes} > 0 and on ({scope.labels()}) {recent(chosen, scope, _events(limits))}"


def nonfinite_data(scope: Scope, limits: Thresholds) -> str:
    """Non-finite on another node too, and not because of the loss scale."""
    return recent(select(NONFINITE, scope, cause=Cause.DATA), scope, _events(limits), "origin")


def repeat_offender(scope: Scope, limits: Thresholds) -> str:
    """GPUs that were suspect in several runs, while one of these incidents is open."""
    by = ", ".join((*scope.by[:-1], "node", "gpu"))
    past = Window.of(limits.offender_window)
    ever = f"max_over_time({select(RANK_STATE, scope, state=OPEN)}[{past.text}])"
    dismissed = last(select(RANK_STATE, scope, state=RankState.DISMISSED), past)
    named = (
        f"{fact(ever, scope, 'node', 'gpu')} == 1 "
        f"unless on ({scope.labels('gpu')}) {fact(dismissed, scope, 'gpu')} == 1"
    )
    runs = f"count by ({by}) ({named})"
    now = open_suspects(scope, Window.of(limits.hold), "rank", "node", "gpu")
    return f"{runs} >= {limits.offender_runs} and on ({by}) ({now})"


def skipped(scope: Scope, limits: Thresholds) -> str:
    """More updates skipped than the model should miss."""
    count = total(select(SKIPPED, scope, reason=SKIPS), scope, _events(limits), "reason")
    return f"{summed(count, scope)} >= {limits.skipped_updates}"


def checkpoints(scope: Scope, limits: Thresholds, result: CheckpointResult) -> str:
    """A checkpoint lately came to this result."""
    return recent(select(CHECKPOINTS, scope, result=result), scope, _events(limits), "reason")


def overhead(scope: Scope, limits: Thresholds) -> str:
    """The guard's share of step time is above its budget."""
    return f"{overhead_ratio(scope, limits.event_window)} > {limits.overhead_ratio}"


def no_clean_audit(scope: Scope, limits: Thresholds) -> str:
    """Seconds since the last clean audit, or since the start, of a live run that audits."""
    audited = f"{fact(select(LAST_CLEAN_AUDIT_TIME, scope), scope)} > 0"
    started = fact(select(START_TIME, scope), scope)
    off = f"{fact(select(COVERAGE, scope, coverage=Coverage.OFF), scope)} == 1"
    by = scope.labels()
    return (
        f"time() - ({audited} or {started}) > {duration_seconds(limits.clean_audit_age)} "
        f"and on ({by}) {_active(scope)} unless on ({by}) {off}"
    )


def silent(scope: Scope, limits: Thresholds) -> str:
    """Steps go on: check 1 gives no verdict, or weights have not been checked for too long."""
    by = scope.labels()
    window = limits.silent_for
    steps = summed(fact(f"increase({select(STEPS, scope)}[{window}])", scope, "kind"), scope)
    screened = select(VERDICTS, scope, check=Check.NONFINITE)
    verdicts = summed(fact(f"increase({screened}[{window}])", scope, "outcome"), scope)
    # A run younger than the window has not had the time to be silent.
    old = f"{fact(select(START_TIME, scope), scope)} < time() - {duration_seconds(window)}"
    one = f"{steps} > 0 unless on ({by}) {verdicts} > 0 and on ({by}) {old}"
    checked = f"{fact(select(LAST_WEIGHT_CHECK_TIME, scope), scope)} > 0"
    age = f"time() - ({checked}) > {duration_seconds(limits.weight_check_age)}"
    three = f"{age} and on ({by}) {steps} > 0"
    return " or ".join(
        f'label_replace({part}, "check", "{check.value}", "", "")'
        for part, check in ((one, Check.NONFINITE), (three, Check.FINGERPRINT))
    )


def blind(scope: Scope) -> str:
    """Coverage of the replay audit is off or loss only, in a live run."""
    seen = select(COVERAGE, scope, coverage=(Coverage.OFF, Coverage.LOSS_ONLY))
    return f"{fact(seen, scope, 'coverage')} == 1 and on ({scope.labels()}) {_active(scope)}"


def stalled(scope: Scope, limits: Thresholds) -> str:
    """Seconds since the last completed step of a live run."""
    progress = f"{fact(select(LAST_PROGRESS_TIME, scope), scope)} > 0"
    age = f"time() - ({progress}) > {duration_seconds(limits.stalled_for)}"
    return f"{age} and on ({scope.labels()}) {_active(scope)}"


def vanished(scope: Scope, limits: Thresholds) -> str:
    """The last state of a run was an active one, and nothing exports the run any more."""
    window = Window.of(limits.vanished_within)
    before = fact(last(select(GUARD_STATE, scope, state=ACTIVE), window), scope)
    alive = fact(select(GUARD_STATE, scope), scope)
    return f"{before} == 1 unless on ({scope.labels()}) {alive}"


def dropped(scope: Scope, limits: Thresholds) -> str:
    """A sink lost records; processes lose them independently of each other."""
    chosen = select(TELEMETRY_DROPPED, scope)
    return recent(chosen, scope, _events(limits), "exporter_rank", "sink", "reason")
