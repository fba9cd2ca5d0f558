"""The alerts: what fires, for how long, and what it says; no file format.

Each stands in one piece, as in kubernetes-mixin: expression, duration, labels and texts. An
expression returns a positive number where the alert fires, and nothing elsewhere, so that the same
one serves Prometheus and Grafana. Every outcome a check can come to that is not a pass belongs to
one alert: see `ALERT_OF_OUTCOME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sdcwatch.core.catalog import (
    ABSENT_RANKS,
    CHECKPOINTS,
    COVERAGE,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_TIME,
    LAST_EVENT_TIME,
    LAST_PROGRESS_TIME,
    LAST_WEIGHT_CHECK_TIME,
    NONFINITE,
    RANK_STATE,
    RANK_STRIKES,
    RUN_INFO,
    SKIPPED,
    START_TIME,
    STEPS,
    TELEMETRY_DROPPED,
    VERDICTS,
)
from sdcwatch.core.records import (
    Cause,
    Check,
    CheckpointResult,
    Coverage,
    GuardState,
    Outcome,
    RankState,
)
from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.config import MonitorConfig, Thresholds, duration_seconds
from sdcwatch.monitor.promql import (
    Not,
    Scope,
    Window,
    dedup_exporters,
    last,
    newest,
    recent,
    rule_scope,
    select,
    summed,
    total,
)
from sdcwatch.monitor.run_queries import WHO
from sdcwatch.monitor.texts import Alert

DRILL = "SdcwatchDrill"
WATCHDOG = "SdcwatchWatchdog"
SUSPECT = "SdcwatchSuspectRank"
RECENT = "SdcwatchRecentFinding"
UNNAMED = "SdcwatchUnattributedMismatch"

ALERT_OF_OUTCOME: Mapping[Outcome, str] = {
    Outcome.SUSPECT: SUSPECT,
    Outcome.REPRODUCIBLE: "SdcwatchNonFiniteReproducible",
    Outcome.UNATTRIBUTED: UNNAMED,
    Outcome.INCONCLUSIVE: UNNAMED,
    Outcome.WIDESPREAD: UNNAMED,
    Outcome.TRANSPORT: UNNAMED,
    Outcome.DIFFERS: UNNAMED,
    Outcome.NOT_REPRODUCED: "SdcwatchOneOffMismatch",
    Outcome.NONDETERMINISTIC: "SdcwatchNondeterministicModel",
    Outcome.NOT_REDUCED: "SdcwatchSoftwareDivergence",
    Outcome.VOID: "SdcwatchFingerprintDisagreement",
    Outcome.NOT_RUN: "SdcwatchCheckNotRun",
}
"""The alert of each outcome; `VOID` means that check 3 has the verdict."""

SILENT_CAUSES: Mapping[Cause, str] = {
    Cause.NONE: "nothing non-finite was seen",
    Cause.SCALING: "the loss scaler's normal business under fp16; never an alarm",
    Cause.DEVICE: f"{SUSPECT}: the verdict names the device",
    Cause.REDUCTION: f"{UNNAMED}, or a suspect if one rank alone saw it",
    Cause.OUTSIDE: f"{UNNAMED}: it was made outside the module",
    Cause.WEIGHTS: f"{UNNAMED}: widespread",
    Cause.UNKNOWN: f"{UNNAMED}: no replay was possible",
}
"""Causes that have no alert of their own, and why; data and software have one."""


_NEXT = "{going_on}{checkpoint}{report}"
"""What every text about a wrong number ends with."""


def _findings(scope: Scope, limits: Thresholds) -> tuple[Alert, ...]:
    """What a check found."""
    events = Window.of(limits.event_window)
    by = scope.labels()
    strikes = dedup_exporters(last(select(RANK_STRIKES, scope), events), scope, *WHO)
    struck = select(VERDICTS, scope, outcome=Outcome.NOT_REPRODUCED)
    data = select(NONFINITE, scope, cause=Cause.DATA)
    return (
        Alert(
            name=SUSPECT,
            # A level: true from the verdict until a person closes it, wherever the run goes on.
            # A window instead of keep_firing_for, which would go on after the closing.
            expr=run_queries.open_suspects(scope, Window.of(limits.hold), *WHO),
            severity="critical",
            summary="A GPU returned wrong numbers: a device is suspect.",
            text=(
                "{run}: GPU {label:suspect_gpu}{instance}, node "
                "{label:suspect_node} (rank {label:suspect_rank}), returned wrong numbers"
                "{device_step}. {evidence}{counts}{going_on}{checkpoint}{run_dir}"
                "Take this machine out of the job and keep it for diagnosis. Fires until somebody "
                "closes it: sdcwatch close RUN_DIR --gpu {label:suspect_gpu} --reason ..."
            ),
            dashboard="suspect",
            variables=("run", "suspect_gpu"),
        ),
        Alert(
            name=UNNAMED,
            expr=verdict(
                scope,
                limits,
                *(o for o, name in ALERT_OF_OUTCOME.items() if name == UNNAMED),
                causes=run_queries.NO_SOFTWARE,
            ),
            severity="critical",
            summary="Results differ between ranks and no device can be named.",
            text=(
                "{run}: the {label:check} check came to {label:outcome}{check_step}. Something is "
                "wrong, and the facts name nobody. If it is differs, compare the software of the "
                "ranks in the verdict first, then take their devices for broken. " + _NEXT
            ),
        ),
        Alert(
            name="SdcwatchFingerprintDisagreement",
            expr=tainted(scope, limits),
            severity="critical",
            summary="Replicas hold different weights: the run is tainted.",
            text=(
                "{run}: replicas hold different bits, and every later checkpoint is withheld. "
                "Resume from the last good checkpoint. " + _NEXT
            ),
        ),
        Alert(
            name="SdcwatchOneOffMismatch",
            expr=f"{strikes} > 0 and on ({by}) {recent(struck, scope, events)}",
            severity="warning",
            summary="A rank was wrong once and right when asked again.",
            text=(
                "{run}: GPU {label:suspect_gpu}{instance}, node "
                "{label:suspect_node} (rank {label:suspect_rank}), has {value} strike(s). "
                "One is a note for its history, several are a pattern."
            ),
            dashboard="suspect",
            variables=("run", "suspect_gpu"),
        ),
        Alert(
            name="SdcwatchNonFiniteReproducible",
            expr=recent(data, scope, events, "origin"),
            severity="warning",
            summary="A non-finite value repeats on another node: data or model, no GPU.",
            text=(
                "{run}: another node computes the same NaN or Inf ({label:origin}). "
                "No GPU is blamed; look at the batch and the model."
            ),
        ),
        Alert(
            name="SdcwatchSoftwareDivergence",
            expr=software(scope, limits),
            severity="warning",
            summary="Ranks are made to differ by software, not by a GPU.",
            text=(
                "{run}: the {label:check} check came to {label:outcome}{check_step}, because of "
                "software: a bug in the training loop or, if it is differs, other software on the "
                "ranks in the verdict. It names no GPU. " + _NEXT
            ),
        ),
        Alert(
            name="SdcwatchNondeterministicModel",
            expr=verdict(scope, limits, Outcome.NONDETERMINISTIC),
            severity="warning",
            summary="The computation does not repeat, so that a replay proves nothing.",
            text=(
                "{run}: a rank that agreed differs from itself. "
                "Until the next preflight the {label:check} check blames nobody."
            ),
        ),
        Alert(
            name="SdcwatchRepeatOffender",
            expr=repeat_offender(scope, limits),
            severity="critical",
            summary="The same GPU is suspect again, in another run.",
            text=(
                "GPU {label:suspect_gpu} on node {label:suspect_node} was suspect in {value} "
                f"runs within {limits.offender_window}. Replace it."
            ),
            dashboard="suspect",
            variables=("suspect_gpu",),
        ),
        Alert(
            name=RECENT,
            # Only a recent finding silences its consequences, whether or not its page is silenced.
            expr=recent_finding(scope, limits),
            severity="info",
            summary="A check found something lately; its consequences are no news.",
            text="{run}: wait for the page about the finding itself.",
        ),
    )


def _consequences(scope: Scope, limits: Thresholds) -> tuple[Alert, ...]:
    """What the guard did, and what it costs."""
    events = Window.of(limits.event_window)
    skips = select(SKIPPED, scope, reason=run_queries.SKIPS)
    withheld = select(CHECKPOINTS, scope, result=CheckpointResult.WITHHELD)
    return (
        Alert(
            name="SdcwatchUpdatesSkipped",
            expr=f"{summed(total(skips, scope, events, 'reason'), scope)} "
            f">= {limits.skipped_updates}",
            severity="warning",
            summary="Optimizer updates are skipped repeatedly.",
            text=(
                "{run}: {value} updates did not happen within "
                f"{limits.event_window}, not counting those of the loss scaler. "
                "The model does not learn from these steps."
            ),
        ),
        Alert(
            name="SdcwatchCheckpointWithheld",
            expr=recent(withheld, scope, events, "reason"),
            severity="warning",
            summary="A checkpoint was withheld.",
            text=(
                "{run}: a checkpoint was not written, because of {label:reason}. "
                "The last good one gets older. {checkpoint}"
            ),
        ),
        Alert(
            name="SdcwatchOverheadHigh",
            expr=f"{run_queries.overhead_ratio(scope, limits.event_window)} "
            f"> {limits.overhead_ratio}",
            severity="warning",
            summary="The guard costs more than its budget.",
            text=(
                "{run}: the guard takes {share} of step time; the budget is "
                f"{limits.overhead_ratio:.0%}. Audit less often, or look at the slowest phase."
            ),
            wait_for=limits.overhead_for,
        ),
    )


def _blindness(scope: Scope, limits: Thresholds) -> tuple[Alert, ...]:
    """When no news is not good news."""
    by, active = scope.labels(), run_queries.active(scope)
    partly = select(COVERAGE, scope, coverage=(Coverage.OFF, Coverage.OUTPUTS_ONLY))
    lost, absent = select(TELEMETRY_DROPPED, scope), select(ABSENT_RANKS, scope)
    return (
        Alert(
            name="SdcwatchNoCleanAudit",
            expr=no_clean_audit(scope, limits),
            severity="warning",
            summary="No audit has passed for too long.",
            text=(
                "{run}: {duration} without a clean audit, more than "
                f"{limits.clean_audit_age}. Everything since the last one is unproven."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchGuardSilent",
            expr=silent(scope, limits),
            severity="warning",
            summary="Steps go on, and a check says nothing.",
            text=(
                "{run}: training goes on and the {label:check} check has given no verdict. "
                "The run looks clean because nobody looks."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchCheckNotRun",
            expr=verdict(scope, limits, Outcome.NOT_RUN),
            severity="warning",
            summary="A check was due and could not run.",
            text=(
                "{run}: the {label:check} check was due and did not run{check_step}. "
                "The verdict in the event log says why. {report}"
            ),
        ),
        Alert(
            name="SdcwatchBlind",
            expr=f"{dedup_exporters(partly, scope, 'coverage')} == 1 and on ({by}) {active}",
            severity="warning",
            summary="The replay audit sees nothing, or the outputs only.",
            text=(
                "{run}: coverage is {label:coverage}. A wrong gradient can pass. "
                "The preflight record says why, and what to change."
            ),
            wait_for=limits.blind_for,
        ),
        Alert(
            name="SdcwatchAbsentRanks",
            expr=f"{dedup_exporters(absent, scope)} > 0 and on ({by}) {active}",
            severity="critical",
            summary="Ranks are gone or late, and the others wait for them.",
            text=(
                "{run}: {value} rank(s) were absent in the last liveness check. The event log "
                "names them and the operation that the others wait in. " + _NEXT
            ),
        ),
        Alert(
            name="SdcwatchRunStalled",
            expr=stalled(scope, limits),
            severity="warning",
            summary="A guarded run lives and makes no step.",
            text=(
                "{run}: no completed step for {duration}. "
                "The liveness check in its event log names absent ranks."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchRunFailed",
            expr=failed(scope, limits),
            severity="warning",
            summary="A guarded run ended with an error and was not resumed.",
            text="{run}: it ended with an error{how}. {checkpoint}{report}",
        ),
        Alert(
            name="SdcwatchRunVanished",
            expr=vanished(scope, limits),
            severity="warning",
            summary="A guarded run disappeared without finishing.",
            text=(
                "{run}: its metrics ended while it was training. It crashed, was killed, or can no "
                "longer be scraped. {checkpoint}{report}"
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchRunNameTwice",
            expr=(
                f"count by ({by}) ({dedup_exporters(select(RUN_INFO, scope), scope, 'run_id')}) > 1"
            ),
            severity="warning",
            summary="Two runs with one name: their metrics are mixed.",
            text=(
                "{run}: {value} run directories export under this name at once, and one can hide "
                "behind the other. Give them different names."
            ),
            wait_for="10m",
        ),
        Alert(
            name="SdcwatchTelemetryDropped",
            expr=recent(
                lost, scope, Window.of(limits.event_window), "exporter_rank", "sink", "reason"
            ),
            severity="warning",
            summary="Records were lost on their way out.",
            text=(
                "{run}: the {label:sink} sink of rank {label:exporter_rank} lost records "
                "({label:reason}). events.jsonl in the run directory has them all."
            ),
        ),
        Alert(
            name=WATCHDOG,
            expr="vector(1)",
            severity="info",
            summary="The path from rules to receivers works.",
            text="Always fires. If it stops arriving, no other alert would arrive either.",
            dashboard="fleet",
            variables=(),
        ),
    )


def alerts(config: MonitorConfig) -> tuple[Alert, ...]:
    """Every alert, in the order in which a person meets them.

    Raises:
        ConfigurationError: `severities` names an alert that does not exist.
    """
    scope, limits = rule_scope(config), config.thresholds
    every = (*_findings(scope, limits), *_consequences(scope, limits), *_blindness(scope, limits))
    unknown = sorted(set(config.severities) - {a.name for a in every})
    if unknown:
        names = sorted(a.name for a in every)
        msg = f"Expected `severities` to name alerts among {names}, but got {unknown}. Correct it."
        raise ConfigurationError(msg)
    return tuple(replace(a, severity=config.severities.get(a.name, a.severity)) for a in every)


def verdict(scope: Scope, limits: Thresholds, *outcomes: Outcome, causes: Not | None = None) -> str:
    """A check came to one of these outcomes lately, for one of these causes if any are given."""
    counted = (
        select(VERDICTS, scope, outcome=outcomes, cause=causes)
        if causes
        else select(VERDICTS, scope, outcome=outcomes)
    )
    return recent(counted, scope, Window.of(limits.event_window), "check", "outcome")


def software(scope: Scope, limits: Thresholds) -> str:
    """Replicas differ because of the training program."""
    caused = select(VERDICTS, scope, cause=Cause.SOFTWARE)
    by_cause = recent(caused, scope, Window.of(limits.event_window), "check", "outcome")
    return f"{by_cause} or {verdict(scope, limits, Outcome.NOT_REDUCED)}"


def recent_finding(scope: Scope, limits: Thresholds) -> str:
    """A check named a device, or weights differed, so lately that its consequences are no news."""
    window = Window.of(limits.inhibits_for)
    named = select(VERDICTS, scope, outcome=Outcome.SUSPECT)
    unnamed = tuple(outcome for outcome in TAINTING if outcome is not Outcome.SUSPECT)
    differ = select(VERDICTS, scope, check=Check.FINGERPRINT, outcome=unnamed)
    return f"{recent(named, scope, window)} or {recent(differ, scope, window)}"


TAINTING = (Outcome.SUSPECT, Outcome.UNATTRIBUTED, Outcome.WIDESPREAD)
"""What check 3 comes to if replicas hold different weights."""


def tainted(scope: Scope, limits: Thresholds) -> str:
    """The newest process of the run is tainted, or ended so and was not resumed."""
    by, window = scope.labels(), Window.of(limits.ended_within)

    def state(*states: GuardState) -> str:
        return select(GUARD_STATE, scope, state=states)

    differ = select(VERDICTS, scope, check=Check.FINGERPRINT, outcome=TAINTING)
    said = f"{dedup_exporters(newest(state(GuardState.TAINTED), scope, window), scope)} == 1"
    found = f"{dedup_exporters(newest(differ, scope, window), scope)} > 0"
    resumed = f"{dedup_exporters(state(*run_queries.UNTAINTED), scope)} == 1"
    over = f"{dedup_exporters(newest(state(*run_queries.OVER), scope, window), scope)} == 1"
    return f"({said} unless on ({by}) {resumed} unless on ({by}) {over}) or {found}"


def repeat_offender(scope: Scope, limits: Thresholds) -> str:
    """GPUs that were suspect in several runs, while one of these findings is open."""
    by = ", ".join((*scope.by[:-1], "suspect_node", "suspect_gpu"))
    past = Window.of(limits.offender_window)
    state = select(RANK_STATE, scope, state=RankState.SUSPECT)
    closed = dedup_exporters(
        last(select(RANK_STATE, scope, state=RankState.CLOSED), past), scope, "suspect_gpu"
    )
    ever = dedup_exporters(
        f"max_over_time({state}[{past.text}])", scope, "suspect_node", "suspect_gpu"
    )
    named = f"{ever} == 1 unless on ({scope.labels('suspect_gpu')}) {closed} == 1"
    now = run_queries.open_suspects(scope, Window.of(limits.hold), *WHO)
    return f"count by ({by}) ({named}) >= {limits.offender_runs} and on ({by}) ({now})"


def no_clean_audit(scope: Scope, limits: Thresholds) -> str:
    """Seconds since the last clean audit, or since the start, of a live run that audits."""
    audited = f"{dedup_exporters(select(LAST_CLEAN_AUDIT_TIME, scope), scope)} > 0"
    started = dedup_exporters(select(START_TIME, scope), scope)
    off = f"{dedup_exporters(select(COVERAGE, scope, coverage=Coverage.OFF), scope)} == 1"
    by = scope.labels()
    return (
        f"time() - ({audited} or {started}) > {duration_seconds(limits.clean_audit_age)} "
        f"and on ({by}) {run_queries.active(scope)} unless on ({by}) {off}"
    )


def silent(scope: Scope, limits: Thresholds) -> str:
    """Steps go on: check 1 gives no verdict, or weights have not been checked for too long."""
    by = scope.labels()
    window = limits.silent_for
    steps = f"increase({select(STEPS, scope)}[{window}])"
    steps = summed(dedup_exporters(steps, scope, "kind"), scope)
    passes = select(VERDICTS, scope, check=Check.NONFINITE, outcome=Outcome.PASS)
    passed = f"{dedup_exporters(f'increase({passes}[{window}])', scope)} > 0"
    found = dedup_exporters(select(LAST_EVENT_TIME, scope, check=Check.NONFINITE), scope)
    verdicts = f"({passed} or {found} > time() - {duration_seconds(window)})"
    started = dedup_exporters(select(START_TIME, scope), scope)
    # A run younger than the window has not had the time to be silent.
    old = f"{started} < time() - {duration_seconds(window)}"
    one = f"{steps} > 0 unless on ({by}) {verdicts} and on ({by}) {old}"
    checked = f"{dedup_exporters(select(LAST_WEIGHT_CHECK_TIME, scope), scope)} > 0"
    age = f"time() - ({checked}) > {duration_seconds(limits.weight_check_age)}"
    three = f"{age} and on ({by}) {steps} > 0"
    return " or ".join(
        f'label_replace({part}, "check", "{check.value}", "", "")'
        for part, check in ((one, Check.NONFINITE), (three, Check.FINGERPRINT))
    )


def stalled(scope: Scope, limits: Thresholds) -> str:
    """Seconds since the last completed step of a live run."""
    progress = f"{dedup_exporters(select(LAST_PROGRESS_TIME, scope), scope)} > 0"
    age = f"time() - ({progress}) > {duration_seconds(limits.stalled_for)}"
    return f"{age} and on ({scope.labels()}) {run_queries.active(scope)}"


def _ended(scope: Scope, window: Window, *states: GuardState) -> str:
    """The newest process of a run ended in one of these states, and nothing exports the run."""
    last_states = newest(select(GUARD_STATE, scope, state=states), scope, window)
    gone = f"unless on ({scope.labels()}) {run_queries.alive(scope)}"
    return f"{dedup_exporters(last_states, scope)} == 1 {gone}"


def vanished(scope: Scope, limits: Thresholds) -> str:
    """The last state of a run was an active one, and nothing exports the run any more."""
    window = Window.of(limits.ended_within)
    # A run that ended tainted said so: that is another alert's.
    gone = _ended(scope, window, *run_queries.UNTAINTED)
    over = newest(select(GUARD_STATE, scope, state=run_queries.OVER), scope, window)
    return f"{gone} unless on ({scope.labels()}) {dedup_exporters(over, scope)} == 1"


def failed(scope: Scope, limits: Thresholds) -> str:
    """The run ended with an error, and no other process took it up."""
    resumed = select(GUARD_STATE, scope, state=run_queries.ACTIVE)
    over = newest(
        select(GUARD_STATE, scope, state=GuardState.FAILED), scope, Window.of(limits.ended_within)
    )
    live = f"{dedup_exporters(resumed, scope)} == 1"
    return f"{dedup_exporters(over, scope)} == 1 unless on ({scope.labels()}) {live}"
