"""The alerts: what fires, for how long, and what it says; no file format.

Each expression returns a positive number where the alert fires, and nothing elsewhere, so that the
same expression serves Prometheus and Grafana. Every outcome a check can come to that is not a pass
belongs to exactly one alert: see `ALERT_OF_OUTCOME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.config import MonitorConfig, Thresholds, duration_seconds
from sdcwatch.monitor.promql import (
    CHECKPOINTS,
    COVERAGE,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_TIME,
    LAST_PROGRESS_TIME,
    LAST_WEIGHT_CHECK_TIME,
    NONFINITE,
    RANK_EVIDENCE,
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
    rule_scope,
    select,
    summed,
    total,
)

DRILL = "SdcwatchDrill"
WATCHDOG = "SdcwatchWatchdog"
SUSPECT = "SdcwatchSuspectRank"

ALERT_OF_OUTCOME: Mapping[Outcome, str] = {
    Outcome.SUSPECT: SUSPECT,
    Outcome.REPRODUCIBLE: "SdcwatchNonFiniteReproducible",
    Outcome.UNATTRIBUTED: "SdcwatchUnattributedMismatch",
    Outcome.INCONCLUSIVE: "SdcwatchUnattributedMismatch",
    Outcome.WIDESPREAD: "SdcwatchUnattributedMismatch",
    Outcome.TRANSPORT: "SdcwatchUnattributedMismatch",
    Outcome.NOT_REPRODUCED: "SdcwatchOneOffMismatch",
    Outcome.NONDETERMINISTIC: "SdcwatchNondeterministicModel",
    Outcome.NOT_REDUCED: "SdcwatchSoftwareDivergence",
    Outcome.DIFFERS: "SdcwatchUnattributedMismatch",
    Outcome.VOID: "SdcwatchFingerprintDisagreement",
    Outcome.NOT_RUN: "SdcwatchCheckNotRun",
}
"""The alert of each outcome; `VOID` means that check 3 has the verdict."""

SILENT_CAUSES: Mapping[Cause, str] = {
    Cause.NONE: "nothing non-finite was seen",
    Cause.SCALING: "the loss scaler's normal business under fp16; never an alarm",
    Cause.DEVICE: f"{SUSPECT}: the verdict names the rank",
    Cause.OUTSIDE: "SdcwatchUnattributedMismatch: made outside of the module",
    Cause.SOFTWARE: "SdcwatchSoftwareDivergence, or SdcwatchUnattributedMismatch for check 3",
    Cause.REDUCTION: "SdcwatchUnattributedMismatch, or a suspect if one rank alone saw it",
    Cause.WEIGHTS: "SdcwatchUnattributedMismatch: widespread",
    Cause.UNKNOWN: "SdcwatchUnattributedMismatch: no replay was possible",
}
"""Causes of non-finite values that have no alert of their own, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: CamelCase, prefixed.
        expr: PromQL; positive where it fires.
        severity: critical, warning or info.
        summary: One constant sentence.
        description: Template: who, with evidence, and what to do first.
        wait_for: How long the expression must hold before it fires.
        keep_firing_for: How long it goes on firing; empty for not at all.
        dashboard: The dashboard that shows it: fleet, run or suspect.
        variables: Labels passed on to the dashboard.
    """

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    wait_for: str = "0s"
    keep_firing_for: str = ""
    dashboard: str = "run"
    variables: tuple[str, ...] = ("run",)

    @property
    def anchor(self) -> str:
        """Its heading in the runbook."""
        return self.name.lower()


def evidence_template(scope: Scope, hold: str) -> str:
    """A template that lists, per check, in how many of how many comparisons a rank was wrong."""
    # Prometheus evaluates this query whenever it sends the alert, so the counts are current.
    fixed = "".join(f"{m}," for m in scope.matchers)
    chosen = f"{RANK_EVIDENCE.prometheus}{{{fixed}"

    def asked(result: str, check: str = "") -> str:
        return (
            f"max by (check) (last_over_time({chosen}run=%q,suspect_rank=%q,suspect_gpu=%q,"
            f'{check}result="{result}"}}[{hold}]))'
        )

    labels = "$labels.run $labels.suspect_rank $labels.suspect_gpu"
    return (
        f"{{{{ range printf `{asked('mismatches')}` {labels} | query }}}}"
        "{{ .Labels.check }} check: wrong in {{ .Value }} of "
        f"{{{{ range printf `{asked('comparisons', 'check=%q,')}` {labels} .Labels.check"
        " | query }}"
        "{{ .Value }}{{ end }}. {{ end }}"
    )


def _findings(scope: Scope, config: MonitorConfig) -> tuple[Alert, ...]:
    """What a check found."""
    limits = config.thresholds
    return (
        Alert(
            name=SUSPECT,
            expr=suspect_rank(scope, limits),
            severity="critical",
            summary="A GPU returned wrong numbers: a rank is suspect.",
            description=(
                "Run {{ $labels.run }}: rank {{ $labels.suspect_rank }} "
                "on node {{ $labels.suspect_node }}, "
                "GPU {{ $labels.suspect_gpu }}, is suspect. "
                + evidence_template(scope, limits.hold)
                + "Take it out of the job and keep it for diagnosis. "
                "Fires until somebody dismisses or closes the incident."
            ),
            dashboard="suspect",
            variables=("run", "suspect_rank", "suspect_gpu"),
        ),
        Alert(
            name="SdcwatchUnattributedMismatch",
            expr=unattributed(scope, limits),
            severity="critical",
            summary="Results differ between ranks and no rank can be named.",
            description=(
                "Run {{ $labels.run }}: the {{ $labels.check }} check came to "
                "{{ $labels.outcome }}. Something is wrong, and the facts name nobody. "
                "The event log lists every rank concerned."
            ),
        ),
        Alert(
            name="SdcwatchFingerprintDisagreement",
            expr=tainted(scope, limits),
            severity="critical",
            summary="Replicas hold different weights: the run is tainted.",
            description=(
                "Run {{ $labels.run }}: replicas hold different bits, and every later checkpoint "
                "is withheld. Resume from the last good checkpoint; the dashboard shows its step."
            ),
        ),
        Alert(
            name="SdcwatchOneOffMismatch",
            expr=one_off(scope, limits),
            severity="warning",
            summary="A rank was wrong once and right when asked again.",
            description=(
                "Run {{ $labels.run }}: rank {{ $labels.suspect_rank }} "
                "on node {{ $labels.suspect_node }}, "
                "GPU {{ $labels.suspect_gpu }}, has {{ $value }} strike(s). "
                "One is a note for its history, several are a pattern."
            ),
            dashboard="suspect",
            variables=("run", "suspect_rank", "suspect_gpu"),
        ),
        Alert(
            name="SdcwatchNonFiniteReproducible",
            expr=nonfinite_data(scope, limits),
            severity="warning",
            summary="A non-finite value repeats on another node: data or model, no GPU.",
            description=(
                "Run {{ $labels.run }}: another node computes the same NaN or Inf "
                "({{ $labels.origin }}). No GPU is blamed; look at the batch and the model."
            ),
        ),
        Alert(
            name="SdcwatchSoftwareDivergence",
            expr=software(scope, limits),
            severity="warning",
            summary="Replicas are made to differ by software, not by a GPU.",
            description=(
                "Run {{ $labels.run }}: the {{ $labels.check }} check came to "
                "{{ $labels.outcome }}. This is a bug in the training loop and names no GPU."
            ),
        ),
        Alert(
            name="SdcwatchNondeterministicModel",
            expr=verdict(scope, limits, Outcome.NONDETERMINISTIC),
            severity="warning",
            summary="The computation does not repeat, so that a replay proves nothing.",
            description=(
                "Run {{ $labels.run }}: a rank that agreed differs from itself. "
                "Until the next preflight the {{ $labels.check }} check blames nobody."
            ),
        ),
        Alert(
            name="SdcwatchRepeatOffender",
            expr=repeat_offender(scope, limits),
            severity="critical",
            summary="The same GPU is suspect again, in another run.",
            description=(
                "GPU {{ $labels.suspect_gpu }} on node {{ $labels.suspect_node }} "
                "was suspect in {{ $value }} "
                f"runs within {limits.offender_window}. Replace it."
            ),
            dashboard="suspect",
            variables=("suspect_gpu",),
        ),
    )


def _consequences(scope: Scope, config: MonitorConfig) -> tuple[Alert, ...]:
    """What the guard did, and what it costs."""
    limits = config.thresholds
    return (
        Alert(
            name="SdcwatchUpdatesSkipped",
            expr=skipped(scope, limits),
            severity="warning",
            summary="Optimizer updates are skipped repeatedly.",
            description=(
                "Run {{ $labels.run }}: {{ $value }} updates did not happen within "
                f"{limits.event_window}, not counting those of the loss scaler. "
                "The model does not learn from these steps."
            ),
        ),
        Alert(
            name="SdcwatchCheckpointWithheld",
            expr=checkpoints(scope, limits, CheckpointResult.WITHHELD),
            severity="warning",
            summary="A checkpoint was withheld.",
            description=(
                "Run {{ $labels.run }}: a checkpoint was not written, because of "
                "{{ $labels.reason }}. The last good one gets older."
            ),
        ),
        Alert(
            name="SdcwatchOverheadHigh",
            expr=overhead(scope, limits),
            severity="warning",
            summary="The guard costs more than its budget.",
            description=(
                "Run {{ $labels.run }}: the guard takes {{ $value | humanizePercentage }} of step "
                f"time; the budget is {limits.overhead_ratio:.0%}. "
                "Audit less often, or look at the slowest phase."
            ),
            wait_for=limits.overhead_for,
        ),
    )


def _blindness(scope: Scope, config: MonitorConfig) -> tuple[Alert, ...]:
    """When no news is not good news."""
    limits = config.thresholds
    return (
        Alert(
            name="SdcwatchNoCleanAudit",
            expr=no_clean_audit(scope, limits),
            severity="warning",
            summary="No audit has passed for too long.",
            description=(
                "Run {{ $labels.run }}: {{ $value | humanizeDuration }} without a clean audit, "
                f"more than {limits.clean_audit_age}. "
                "Everything since the last one is unproven."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchGuardSilent",
            expr=silent(scope, limits),
            severity="warning",
            summary="Steps go on, and a check says nothing.",
            description=(
                "Run {{ $labels.run }}: training goes on and the {{ $labels.check }} check has "
                "given no verdict. The run looks clean because nobody looks."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchCheckNotRun",
            expr=verdict(scope, limits, Outcome.NOT_RUN),
            severity="warning",
            summary="A check was due and could not run.",
            description=(
                "Run {{ $labels.run }}: the {{ $labels.check }} check was due and did not run. "
                "Most often the loop did not call guard.forward on an audit step."
            ),
        ),
        Alert(
            name="SdcwatchBlind",
            expr=blind(scope),
            severity="warning",
            summary="The replay audit sees nothing, or the loss only.",
            description=(
                "Run {{ $labels.run }}: coverage is {{ $labels.coverage }}. A wrong gradient can "
                "pass. The preflight record says why, and what to change."
            ),
            wait_for=limits.blind_for,
        ),
        Alert(
            name="SdcwatchRunStalled",
            expr=stalled(scope, limits),
            severity="warning",
            summary="A guarded run lives and makes no step.",
            description=(
                "Run {{ $labels.run }}: no completed step for {{ $value | humanizeDuration }}. "
                "The liveness check in its event log names absent ranks."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchRunVanished",
            expr=vanished(scope, limits),
            severity="warning",
            summary="A guarded run disappeared without finishing.",
            description=(
                "Run {{ $labels.run }}: its metrics ended while it was training. "
                "It crashed, was killed, or can no longer be scraped."
            ),
            wait_for="1m",
        ),
        Alert(
            name="SdcwatchTelemetryDropped",
            expr=dropped(scope, limits),
            severity="warning",
            summary="Records were lost on their way out.",
            description=(
                "Run {{ $labels.run }}: the {{ $labels.sink }} sink lost records "
                "({{ $labels.reason }}). events.jsonl in the run directory has them all."
            ),
        ),
        Alert(
            name=WATCHDOG,
            expr="vector(1)",
            severity="info",
            summary="The path from rules to receivers works.",
            description="Always fires. If it stops arriving, no other alert would arrive either.",
            dashboard="fleet",
            variables=(),
        ),
    )


def alerts(config: MonitorConfig) -> tuple[Alert, ...]:
    """Every alert, in the order in which a person meets them.

    Raises:
        ConfigurationError: `severities` names an alert that does not exist.
    """
    scope = rule_scope(config)
    every = (*_findings(scope, config), *_consequences(scope, config), *_blindness(scope, config))
    unknown = sorted(set(config.severities) - {a.name for a in every})
    if unknown:
        names = sorted(a.name for a in every)
        msg = f"Expected `severities` to name alerts among {names}, but got {unknown}. Correct it."
        raise ConfigurationError(msg)
    return tuple(replace(a, severity=config.severities.get(a.name, a.severity)) for a in every)


def dashboard_url(alert: Alert, config: MonitorConfig) -> str:
    """Template of the link to the dashboard that shows the alert; empty without a base URL."""
    if not config.grafana_url:
        return ""
    url = f"{config.grafana_url.rstrip('/')}/d/{config.uid_prefix}-{alert.dashboard}"
    names = (*config.scope_labels, *alert.variables) if alert.variables else ()
    query = "&".join(
        f"var-{name.removeprefix('suspect_')}={{{{ $labels.{name} | urlquery }}}}" for name in names
    )
    return f"{url}?{query}" if query else url


def annotations_of(alert: Alert, config: MonitorConfig) -> dict[str, str]:
    """Summary, description and, where a base URL is configured, the two links."""
    links = {
        "runbook_url": f"{config.runbook_url}#{alert.anchor}" if config.runbook_url else "",
        "dashboard_url": dashboard_url(alert, config),
    }
    return {
        "summary": alert.summary,
        "description": alert.description,
        **{name: url for name, url in links.items() if url},
    }


ACTIVE = (
    GuardState.PREFLIGHT,
    GuardState.ARMED,
    GuardState.OBSERVING,
    GuardState.DEGRADED,
    GuardState.TAINTED,
)
"""States of a run that has not ended."""
OPEN = (RankState.SUSPECT,)
WHO = ("suspect_rank", "suspect_node", "suspect_gpu")
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
    """1 for each rank that is suspect or confirmed and was not closed."""
    who = ("suspect_rank", "suspect_gpu")
    held = fact(last(select(RANK_STATE, scope, state=OPEN), window), scope, *labels)
    closed = select(RANK_STATE, scope, state=RankState.CLOSED)
    closed = fact(last(closed, window), scope, *who)
    return f"{held} == 1 unless on ({scope.labels(*who)}) {closed} == 1"


def suspect_rank(scope: Scope, limits: Thresholds) -> str:
    """A level: true from the verdict until a human dismisses it, also after the process ended.

    The window takes the place of `keep_firing_for`: that one would go on after a dismissal, and
    forgets when Prometheus restarts.
    """
    return open_suspects(scope, Window.of(limits.hold), *WHO)


def unattributed(scope: Scope, limits: Thresholds) -> str:
    """Wrong, and nobody can be named."""
    return verdict(scope, limits, *UNNAMED)


def verdict(scope: Scope, limits: Thresholds, *outcomes: Outcome) -> str:
    """A check came to one of these outcomes lately."""
    chosen = select(VERDICTS, scope, outcome=outcomes)
    return recent(chosen, scope, _events(limits), "check", "outcome")


def software(scope: Scope, limits: Thresholds) -> str:
    """Replicas differ because of the training loop."""
    return verdict(scope, limits, Outcome.NOT_REDUCED)


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
    strikes = fact(
        last(select(RANK_STRIKES, scope), _events(limits)),
        scope,
        "suspect_rank",
        "suspect_node",
        "suspect_gpu",
    )
    chosen = select(VERDICTS, scope, outcome=Outcome.NOT_REPRODUCED)
    return f"{strikes} > 0 and on ({scope.labels()}) {recent(chosen, scope, _events(limits))}"


def nonfinite_data(scope: Scope, limits: Thresholds) -> str:
    """Non-finite on another node too, and not because of the loss scale."""
    return recent(select(NONFINITE, scope, cause=Cause.DATA), scope, _events(limits), "origin")


def repeat_offender(scope: Scope, limits: Thresholds) -> str:
    """GPUs that were suspect in several runs, while one of these incidents is open."""
    by = ", ".join((*scope.by[:-1], "suspect_node", "suspect_gpu"))
    past = Window.of(limits.offender_window)
    ever = f"max_over_time({select(RANK_STATE, scope, state=OPEN)}[{past.text}])"
    closed = last(select(RANK_STATE, scope, state=RankState.CLOSED), past)
    named = (
        f"{fact(ever, scope, 'suspect_node', 'suspect_gpu')} == 1 "
        f"unless on ({scope.labels('suspect_gpu')}) {fact(closed, scope, 'suspect_gpu')} == 1"
    )
    runs = f"count by ({by}) ({named})"
    now = open_suspects(scope, Window.of(limits.hold), *WHO)
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
    seen = select(COVERAGE, scope, coverage=(Coverage.OFF, Coverage.OUTPUTS_ONLY))
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
