"""The metric catalogue: every metric of sdcwatch, once.

Instruments, docs/metrics.md, dashboard queries and alert rules derive from it, and a test holds it
against a live scrape in both directions. Names follow OpenTelemetry (dotted, no unit, no
``_total``); `Metric.prometheus` is the name Prometheus sees over pull and over OTLP. Units are
``s``, ``By`` or ``{thing}``; never "1" or "%", which the two paths name differently. Attribute
values come from closed sets; step numbers, tensor names and hashes never become attributes. The
exception are info metrics, which exist to carry text to a board: few series, replaced as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from sdcwatch.core.records import (
    DURATION_BUCKETS,
    Action,
    Cause,
    Check,
    CheckpointResult,
    Coverage,
    GateReason,
    GuardState,
    Origin,
    Outcome,
    Phase,
    RankState,
    RunWord,
    SkipReason,
)

Kind = Literal["counter", "gauge", "histogram"]

RESOURCE_LABELS = ("run", "exporter_rank")
"""Labels that every series carries: which run, and which of its ranks exports. They are in the
resource and on each measurement, so that they are equal over pull and push."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of a metric.

    Attributes:
        name: Its key.
        values: The closed set of values, or None where the topology bounds it.
        bound: What bounds it if `values` is None.
    """

    name: str
    values: tuple[str, ...] | None
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: OpenTelemetry instrument name.
        kind: counter, gauge or histogram.
        unit: UCUM unit or annotation.
        help: One sentence; becomes the HELP line.
        attributes: Every measurement carries all of them.
        buckets: Upper bounds in `unit` for histograms, floats.
        info: Its labels are what it says: the value is 1, and series that no longer hold are gone
            from the next scrape.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    attributes: tuple[Attribute, ...] = ()
    buckets: tuple[float, ...] = ()
    info: bool = False

    @property
    def prometheus(self) -> str:
        """The name Prometheus sees."""
        base = self.name.replace(".", "_")
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return base + suffix + ("_total" if self.kind == "counter" else "")

    @property
    def labels(self) -> tuple[str, ...]:
        """Attribute names in order."""
        return tuple(a.name for a in self.attributes)


def _enum(name: str, values: type[Enum]) -> Attribute:
    return Attribute(name, tuple(str(v.value) for v in values))


def _free(name: str, bound: str) -> Attribute:
    return Attribute(name, None, bound)


def _text(name: str) -> Attribute:
    return _free(name, "text, one per series")


_CHECK = _enum("check", Check)
_SINK = Attribute("sink", ("jsonl", "otel", "otel_logs", "wandb", "other"))
_STEP_KIND = Attribute("kind", ("plain", "audit"))
_WHO = (
    _free("suspect_rank", "ranks that have a state"),
    _free("suspect_node", "nodes of those ranks"),
    _free("suspect_gpu", "GPU UUIDs of those ranks"),
    # not "instance": Prometheus puts that label on every series itself
    _free("suspect_instance_id", "instance ids of those ranks"),
)

# fmt: off
VERDICTS = Metric(
    "sdcwatch.verdicts", "counter", "{verdict}", "Verdicts by check, outcome and cause.",
    (_CHECK, _enum("outcome", Outcome), _enum("cause", Cause)))
COMPARISONS = Metric(
    "sdcwatch.audit.comparisons", "counter", "{comparison}",
    "Comparisons of a rank's step with its recomputation on another rank.")
MISMATCHES = Metric(
    "sdcwatch.audit.mismatches", "counter", "{mismatch}",
    "Audit comparisons that did not match, by what differed.",
    (Attribute("kind", ("output", "gradient")),))
FINGERPRINT_CHECKS = Metric(
    "sdcwatch.fingerprint.checks", "counter", "{check}",
    "Comparisons of the weight fingerprints of all replicas.")
DISAGREEMENTS = Metric(
    "sdcwatch.fingerprint.disagreements", "counter", "{disagreement}",
    "Tensors on which replicas held different bits.")
NONFINITE = Metric(
    "sdcwatch.nonfinite", "counter", "{step}",
    "Steps with a non-finite output or gradient, by where it was seen and why it was there.",
    (_enum("origin", Origin), _enum("cause", Cause)))
SKIPPED = Metric(
    "sdcwatch.updates.skipped", "counter", "{update}",
    "Optimizer updates that did not happen on any rank.", (_enum("reason", SkipReason),))
CHECKPOINTS = Metric(
    "sdcwatch.checkpoints", "counter", "{checkpoint}",
    "Checkpoints by what became of them and why.",
    (_enum("result", CheckpointResult), _enum("reason", GateReason)))
STEPS = Metric("sdcwatch.steps", "counter", "{step}", "Guarded training steps.", (_STEP_KIND,))
STEP_TIME = Metric(
    "sdcwatch.step.time", "counter", "s", "Wall time of guarded training steps.", (_STEP_KIND,))
OVERHEAD_TIME = Metric(
    "sdcwatch.overhead.time", "counter", "s", "Wall time spent in the guard.", (_CHECK,))
CHECK_DURATION = Metric(
    "sdcwatch.check.duration", "histogram", "s", "Duration of a phase of a check.",
    (_CHECK, _enum("phase", Phase)), DURATION_BUCKETS)
RUN_VERDICT = Metric(
    "sdcwatch.run.verdict", "gauge", "{run}",
    "1 for the run in one word: the gravest that holds.", (_enum("verdict", RunWord),))
RANK_STATE = Metric(
    "sdcwatch.rank.state", "gauge", "{state}",
    "1 for the state a device is in, under the rank it had; only devices that have one.",
    (*_WHO, _enum("state", RankState)))
RANK_EVIDENCE = Metric(
    "sdcwatch.rank.evidence", "gauge", "{comparison}",
    "Comparisons in which a suspect rank was wrong, and all it took part in.",
    (*_WHO, _CHECK, Attribute("result", ("mismatches", "comparisons"))))
RANK_STRIKES = Metric(
    "sdcwatch.rank.strikes", "gauge", "{strike}",
    "One-off mismatches of a device that did not repeat.", _WHO)
RANK_LAST_FINDING_STEP = Metric(
    "sdcwatch.rank.last_finding.step", "gauge", "{step}",
    "Step at which a check last named this suspect.", _WHO)
GUARD_STATE = Metric(
    "sdcwatch.guard.state", "gauge", "{state}", "1 for the state the guard is in.",
    (_enum("state", GuardState),))
COVERAGE = Metric(
    "sdcwatch.coverage", "gauge", "{coverage}", "1 for the coverage of the replay audit.",
    (_enum("coverage", Coverage),))
AUDITED_RANKS = Metric(
    "sdcwatch.audited.ranks", "gauge", "{rank}", "Ranks compared in the last audit.")
ABSENT_RANKS = Metric(
    "sdcwatch.absent.ranks", "gauge", "{rank}",
    "Ranks that were absent in the last liveness check; 0 again once a step completes.")
WORLD_SIZE = Metric(
    "sdcwatch.world.size", "gauge", "{rank}", "Ranks in the guarded replica group.")
RUN_INFO = Metric(
    "sdcwatch.run.info", "gauge", "{run}",
    "1; configuration and links of the guarded run as labels.", info=True, attributes=(
     _free("run_id", "one per run directory"),
     _free("run_dir", "one per process"),
     _free("version", "one per process"),
     Attribute("mode", ("enforce", "observe")),
     Attribute("on_failure", ("skip", "stop")),
     _free("audit_every", "one per process"),
     _free("fingerprint_every", "one per process"),
     Attribute("fault_domain", ("node", "gpu")),
     _free("dashboard_url", "one per process"),
     _free("wandb_url", "one per process")))
EVENT_INFO = Metric(
    "sdcwatch.event.info", "gauge", "{event}",
    "1; one of the last 20 findings of the run, in words.", info=True, attributes=(
     _text("event"), _text("time"), _text("step"), _CHECK, _enum("outcome", Outcome),
     _enum("cause", Cause), _enum("action", Action), _text("who"), _text("device"),
     _text("operator"), _text("reason")))
SUSPECT_INFO = Metric(
    "sdcwatch.suspect.info", "gauge", "{suspect}",
    "1; what is known of a suspect, in words.", info=True, attributes=(
     *_WHO, _enum("state", RankState), _text("checks"), _text("first_step"), _text("last_step"),
     _text("last_time"), _text("evidence"), _text("operator"), _text("closed_because")))
CHECKPOINT_INFO = Metric(
    "sdcwatch.checkpoint.info", "gauge", "{checkpoint}",
    "1; the last checkpoint that passed every check.", info=True, attributes=(
     _text("step"), _text("path"), _text("time")))
END_INFO = Metric(
    "sdcwatch.end.info", "gauge", "{run}",
    "1; how the run ended, in words.", info=True, attributes=(_text("how"),))
STEP = Metric("sdcwatch.step", "gauge", "{step}", "Current training step.")
LOSS = Metric("sdcwatch.loss", "gauge", "", "Last loss of the reporting rank.")
STEPS_AT_RISK = Metric(
    "sdcwatch.steps.at_risk", "gauge", "{step}",
    "Updates since the last clean audit: what a late finding would cost.")
START_TIME = Metric(
    "sdcwatch.start.time", "gauge", "s", "Unix time at which the guarded run started.")
LAST_PROGRESS_TIME = Metric(
    "sdcwatch.last_progress.time", "gauge", "s", "Unix time of the last completed step.")
LAST_CLEAN_AUDIT_TIME = Metric(
    "sdcwatch.last_clean_audit.time", "gauge", "s",
    "Unix time of the last clean audit, 0 before the first.")
LAST_CLEAN_AUDIT_STEP = Metric(
    "sdcwatch.last_clean_audit.step", "gauge", "{step}", "Step of the last clean audit.")
LAST_WEIGHT_CHECK_TIME = Metric(
    "sdcwatch.last_weight_check.time", "gauge", "s",
    "Unix time of the last passing weight check, 0 before the first.")
LAST_WEIGHT_CHECK_STEP = Metric(
    "sdcwatch.last_weight_check.step", "gauge", "{step}",
    "Step of the last passing weight check.")
LAST_GOOD_CHECKPOINT_TIME = Metric(
    "sdcwatch.last_good_checkpoint.time", "gauge", "s",
    "Unix time of the last checkpoint that passed every check, 0 before the first.")
LAST_GOOD_CHECKPOINT_STEP = Metric(
    "sdcwatch.last_good_checkpoint.step", "gauge", "{step}",
    "Step of the last checkpoint that passed every check.")
LAST_EVENT_TIME = Metric(
    "sdcwatch.last_event.time", "gauge", "s",
    "Unix time of the last verdict of this check that was not a pass, 0 before the first.",
    (_CHECK,))
LAST_EVENT_STEP = Metric(
    "sdcwatch.last_event.step", "gauge", "{step}",
    "Step of the last verdict of this check that was not a pass.", (_CHECK,))
TELEMETRY_EVENTS = Metric(
    "sdcwatch.telemetry.events", "counter", "{event}", "Records given to a sink.", (_SINK,))
TELEMETRY_DROPPED = Metric(
    "sdcwatch.telemetry.dropped", "counter", "{event}", "Records a sink lost, by why.",
    (_SINK, Attribute("reason", ("queue_full", "error", "timeout", "closed"))))
TELEMETRY_QUEUE = Metric(
    "sdcwatch.telemetry.queue.length", "gauge", "{event}", "Records that wait for a sink.",
    (_SINK,))

CATALOG: tuple[Metric, ...] = (
    VERDICTS, COMPARISONS, MISMATCHES, FINGERPRINT_CHECKS, DISAGREEMENTS, NONFINITE, SKIPPED,
    CHECKPOINTS, STEPS, STEP_TIME, OVERHEAD_TIME, CHECK_DURATION, RUN_VERDICT, RANK_STATE,
    RANK_EVIDENCE, RANK_STRIKES, RANK_LAST_FINDING_STEP, GUARD_STATE, COVERAGE, AUDITED_RANKS,
    ABSENT_RANKS, WORLD_SIZE, RUN_INFO, EVENT_INFO, SUSPECT_INFO, CHECKPOINT_INFO, END_INFO,
    STEP, LOSS, STEPS_AT_RISK, START_TIME, LAST_PROGRESS_TIME, LAST_CLEAN_AUDIT_TIME,
    LAST_CLEAN_AUDIT_STEP,
    LAST_WEIGHT_CHECK_TIME, LAST_WEIGHT_CHECK_STEP, LAST_GOOD_CHECKPOINT_TIME,
    LAST_GOOD_CHECKPOINT_STEP, LAST_EVENT_TIME, LAST_EVENT_STEP, TELEMETRY_EVENTS,
    TELEMETRY_DROPPED, TELEMETRY_QUEUE,
)
# fmt: on

BY_NAME: dict[str, Metric] = {m.name: m for m in CATALOG}
BY_PROMETHEUS: dict[str, Metric] = {m.prometheus: m for m in CATALOG}
