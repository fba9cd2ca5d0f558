"""The metric catalogue: every metric of sdcwatch, once.

Instruments, docs/metrics.md, dashboard queries and alert rules derive from it, and a test holds it
against a live scrape in both directions. Names follow OpenTelemetry (dotted, no unit, no
``_total``); `Metric.prometheus` is the name Prometheus sees over pull and over OTLP. Units are
``s``, ``By`` or ``{thing}``; never "1" or "%", which the two paths name differently. Attribute
values come from closed sets; step numbers, tensor names and hashes never become attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from sdcwatch.core.records import (
    DURATION_BUCKETS,
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
    """

    name: str
    kind: Kind
    unit: str
    help: str
    attributes: tuple[Attribute, ...] = ()
    buckets: tuple[float, ...] = field(default=())

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

CATALOG: tuple[Metric, ...] = (
    Metric("sdcwatch.verdicts", "counter", "{verdict}", "Verdicts by check and outcome.",
           (_CHECK, _enum("outcome", Outcome))),
    Metric("sdcwatch.audit.comparisons", "counter", "{comparison}",
           "Comparisons of a rank's step with its recomputation on another rank."),
    Metric("sdcwatch.audit.mismatches", "counter", "{mismatch}",
           "Audit comparisons that did not match, by what differed.",
           (Attribute("kind", ("output", "gradient")),)),
    Metric("sdcwatch.fingerprint.checks", "counter", "{check}",
           "Comparisons of the weight fingerprints of all replicas."),
    Metric("sdcwatch.fingerprint.disagreements", "counter", "{disagreement}",
           "Tensors on which replicas held different bits."),
    Metric("sdcwatch.nonfinite", "counter", "{step}",
           "Steps with a non-finite loss or gradient, by where it was seen and why it was there.",
           (_enum("origin", Origin), _enum("cause", Cause))),
    Metric("sdcwatch.updates.skipped", "counter", "{update}",
           "Optimizer updates that did not happen on any rank.", (_enum("reason", SkipReason),)),
    Metric("sdcwatch.checkpoints", "counter", "{checkpoint}",
           "Checkpoints by what became of them and why.",
           (_enum("result", CheckpointResult), _enum("reason", GateReason))),
    Metric("sdcwatch.steps", "counter", "{step}", "Guarded training steps.", (_STEP_KIND,)),
    Metric("sdcwatch.step.time", "counter", "s", "Wall time of guarded training steps.",
           (_STEP_KIND,)),
    Metric("sdcwatch.overhead.time", "counter", "s", "Wall time spent in the guard.", (_CHECK,)),
    Metric("sdcwatch.check.duration", "histogram", "s", "Duration of a phase of a check.",
           (_CHECK, _enum("phase", Phase)), DURATION_BUCKETS),
    Metric("sdcwatch.rank.state", "gauge", "{state}",
           "1 for the state a rank is in; only ranks that have one.",
           (*_WHO, _enum("state", RankState))),
    Metric("sdcwatch.rank.evidence", "gauge", "{comparison}",
           "Comparisons in which a suspect rank was wrong, and all it took part in.",
           (*_WHO, _CHECK, Attribute("result", ("mismatches", "comparisons")))),
    Metric("sdcwatch.rank.strikes", "gauge", "{strike}",
           "One-off mismatches of a rank that did not repeat.", _WHO),
    Metric("sdcwatch.guard.state", "gauge", "{state}", "1 for the state the guard is in.",
           (_enum("state", GuardState),)),
    Metric("sdcwatch.coverage", "gauge", "{coverage}",
           "1 for the coverage of the replay audit.", (_enum("coverage", Coverage),)),
    Metric("sdcwatch.audited.ranks", "gauge", "{rank}", "Ranks compared in the last audit."),
    Metric("sdcwatch.world.size", "gauge", "{rank}", "Ranks in the guarded replica group."),
    Metric("sdcwatch.run.info", "gauge", "{run}",
           "1; configuration and links of the guarded run as labels.",
           (_free("version", "one per process"),
            Attribute("mode", ("enforce", "observe")),
            Attribute("on_failure", ("skip", "stop")),
            _free("audit_every", "one per process"),
            _free("fingerprint_every", "one per process"),
            Attribute("fault_domain", ("node", "gpu")),
            _free("dashboard_url", "one per process"),
            _free("wandb_url", "one per process"))),
    Metric("sdcwatch.step", "gauge", "{step}", "Current training step."),
    Metric("sdcwatch.loss", "gauge", "", "Last loss of the reporting rank."),
    Metric("sdcwatch.steps.at_risk", "gauge", "{step}",
           "Updates since the last clean audit: what a late finding would cost."),
    Metric("sdcwatch.start.time", "gauge", "s", "Unix time at which the guarded run started."),
    Metric("sdcwatch.last_progress.time", "gauge", "s", "Unix time of the last completed step."),
    Metric("sdcwatch.last_clean_audit.time", "gauge", "s",
           "Unix time of the last clean audit, 0 before the first."),
    Metric("sdcwatch.last_clean_audit.step", "gauge", "{step}", "Step of the last clean audit."),
    Metric("sdcwatch.last_weight_check.time", "gauge", "s",
           "Unix time of the last passing weight check, 0 before the first."),
    Metric("sdcwatch.last_weight_check.step", "gauge", "{step}",
           "Step of the last passing weight check."),
    Metric("sdcwatch.last_good_checkpoint.time", "gauge", "s",
           "Unix time of the last checkpoint that passed every check, 0 before the first."),
    Metric("sdcwatch.last_good_checkpoint.step", "gauge", "{step}",
           "Step of the last checkpoint that passed every check."),
    Metric("sdcwatch.last_event.time", "gauge", "s",
           "Unix time of the last verdict of this check that was not a pass, 0 before the first.",
           (_CHECK,)),
    Metric("sdcwatch.last_event.step", "gauge", "{step}",
           "Step of the last verdict of this check that was not a pass.", (_CHECK,)),
    Metric("sdcwatch.telemetry.events", "counter", "{event}", "Records given to a sink.", (_SINK,)),
    Metric("sdcwatch.telemetry.dropped", "counter", "{event}", "Records a sink lost, by why.",
           (_SINK, Attribute("reason", ("queue_full", "error", "timeout", "closed")))),
    Metric("sdcwatch.telemetry.queue.length", "gauge", "{event}", "Records that wait for a sink.",
           (_SINK,)),
)  # fmt: skip

BY_NAME: dict[str, Metric] = {m.name: m for m in CATALOG}
BY_PROMETHEUS: dict[str, Metric] = {m.prometheus: m for m in CATALOG}
