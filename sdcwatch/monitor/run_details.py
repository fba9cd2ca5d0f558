"""The Run dashboard below its first lines: what explains the answer."""

from __future__ import annotations

from sdcwatch.monitor import run_queries
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import (
    Column,
    Grid,
    Query,
    Show,
    budget_line,
    color_by_suffix,
    heatmap_panel,
    override,
    series_panel,
    stat_panel,
    table_panel,
    timeline_panel,
)
from sdcwatch.monitor.promql import (
    CHECK_DURATION,
    CHECKPOINTS,
    COMPARISONS,
    DISAGREEMENTS,
    FINGERPRINT_CHECKS,
    LAST_PROGRESS_TIME,
    LAST_WEIGHT_CHECK_STEP,
    LAST_WEIGHT_CHECK_TIME,
    LOSS,
    MISMATCHES,
    NONFINITE,
    OVERHEAD_TIME,
    SKIPPED,
    STEP,
    STEP_TIME,
    STEPS,
    TELEMETRY_DROPPED,
    TELEMETRY_EVENTS,
    TELEMETRY_QUEUE,
    VERDICTS,
    Scope,
    fact,
    grown,
    rate,
    select,
    summed,
)
from sdcwatch.monitor.theme import GREEN, OUTCOME_COLORS, SKY, VERMILLION
from sdcwatch.monitor.tiles import INTERVAL, NEUTRAL, STATES_BY_CODE, ages, step_and_age

COUNTS = Show(unit="none", decimals=0, steps=NEUTRAL)


def timelines(grid: Grid, scope: Scope) -> None:
    """States over time, and the loss with what happened to it."""
    grid.row(101, "What happened when")
    grid.line(
        6,
        (20, 24, timeline_panel(
            "State timeline",
            "The guard, and every rank that has a state; healthy ranks have none. A lane that "
            "turns red names the rank.",
            Query(run_queries.guard_code(scope), "guard"),
            Query(
                run_queries.rank_code(scope, *run_queries.WHO),
                "rank {{rank}} · {{node}} · {{gpu}}",
            ),
            show=Show(unit="none", looks=STATES_BY_CODE, empty="no guard in this range"),
        )),
    )  # fmt: skip
    loss = series_panel(
        "Loss",
        "Loss of the reporting rank with a mark at each finding. A normal loss proves nothing: "
        "silent corruption looks like this.",
        Query(fact(select(LOSS, scope), scope), "loss"),
        Query(fact(select(STEP, scope), scope), "step"),
        show=Show(unit="none", steps=NEUTRAL, empty="no loss yet"),
    )
    loss = override(loss, "step", custom__axisPlacement="right", custom__fillOpacity=0)
    grid.line(8, (21, 24, loss))


def findings(grid: Grid, scope: Scope) -> None:
    """Counts of events, by check and reason."""
    grid.row(102, "Findings")
    bad = select(VERDICTS, scope, outcome=run_queries.FINDINGS)
    verdicts = series_panel(
        "Verdicts that are not a pass",
        "Findings by check and outcome. suspect names a rank; reproducible is data or model; "
        "not_run means the check was due and could not run.",
        Query(grown(bad, scope, INTERVAL, "check", "outcome"), "{{check}}: {{outcome}}"),
        show=COUNTS,
        bars=True,
    )
    grid.line(
        8,
        (30, 12, color_by_suffix(verdicts, {o.value: c for o, c in OUTCOME_COLORS.items()})),
        (31, 12, series_panel(
            "Audit comparisons and mismatches",
            "Comparisons of a rank's step with its recomputation elsewhere, and those that did not "
            "match. Any mismatch is followed by a verdict.",
            Query(grown(select(COMPARISONS, scope), scope, INTERVAL), "comparisons"),
            Query(grown(select(MISMATCHES, scope), scope, INTERVAL, "kind"), "{{kind}} mismatch"),
            show=COUNTS,
            bars=True,
        )),
    )  # fmt: skip
    grid.line(
        8,
        (32, 8, series_panel(
            "Fingerprint checks and disagreements",
            "Comparisons of all weights between replicas, and tensors that differed. One "
            "disagreement taints the run.",
            Query(grown(select(FINGERPRINT_CHECKS, scope), scope, INTERVAL), "checks"),
            Query(grown(select(DISAGREEMENTS, scope), scope, INTERVAL), "disagreeing tensors"),
            show=COUNTS,
            bars=True,
        )),
        (33, 8, series_panel(
            "Skipped updates",
            "Updates that happened on no rank, by reason. scaler is normal under fp16; anything "
            "else costs training.",
            Query(grown(select(SKIPPED, scope), scope, INTERVAL, "reason"), "{{reason}}"),
            show=COUNTS,
            bars=True,
        )),
        (34, 8, series_panel(
            "Non-finite steps",
            "Steps with NaN or Inf, by where it was seen and why. scaling is the loss scaler's "
            "business; data is yours; device is a GPU.",
            Query(
                grown(select(NONFINITE, scope), scope, INTERVAL, "origin", "cause"),
                "{{origin}}: {{cause}}",
            ),
            show=COUNTS,
            bars=True,
        )),
    )  # fmt: skip
    grid.line(
        8,
        (35, 16, series_panel(
            "Checkpoints",
            "What became of each checkpoint and why. withheld: not written; provisional: written, "
            "waits for a clean audit; confirmed: that audit passed.",
            Query(
                grown(select(CHECKPOINTS, scope), scope, INTERVAL, "result", "reason"),
                "{{result}}: {{reason}}",
            ),
            show=COUNTS,
            bars=True,
        )),
        (36, 8, step_and_age(
            "Last weight check",
            "Step and age of the last comparison in which all replicas held the same weights.",
            run_queries.current(LAST_WEIGHT_CHECK_STEP, scope),
            run_queries.age(LAST_WEIGHT_CHECK_TIME, scope),
            ages("1h"),
        )),
    )  # fmt: skip


def cost(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    """What the guard takes, by check."""
    budget = config.thresholds.overhead_ratio
    grid.row(103, "Cost")
    by = scope.labels()
    guard = rate(select(OVERHEAD_TIME, scope), scope, INTERVAL, "check")
    steps = summed(rate(select(STEP_TIME, scope), scope, INTERVAL, "kind"), scope)
    seconds = rate(select(STEP_TIME, scope), scope, INTERVAL, "kind")
    count = rate(select(STEPS, scope), scope, INTERVAL, "kind")
    buckets = rate(
        select(CHECK_DURATION, scope, "_bucket"), scope, INTERVAL, "check", "phase", "le"
    )
    grid.line(
        8,
        (40, 8, budget_line(series_panel(
            "Overhead by check",
            f"Share of step time spent in each check. The dashed line is the budget, {budget:.0%}; "
            "audits show as peaks.",
            Query(f"{guard} / on ({by}) group_left () ({steps} > 0)", "{{check}}"),
            show=Show(unit="percentunit", steps=((None, GREEN), (budget, VERMILLION))),
        ))),
        (41, 8, heatmap_panel(
            "Check duration",
            "How long the phases of all checks take. A band that rises is a check that slows down: "
            "look at the network and at stragglers.",
            Query(f"sum by (le) ({buckets})", "{{le}}", kind="heatmap"),
            show=Show(unit="s", steps=NEUTRAL),
        )),
        (42, 8, series_panel(
            "Step time, plain and audit",
            "Seconds per step. The distance between the two is the price of an audit.",
            Query(f"{seconds} / ({count} > 0)", "{{kind}}"),
            show=Show(unit="s", steps=((None, SKY),)),
        )),
    )  # fmt: skip


def telemetry(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    """Whether what this page shows is complete, and how the run is configured."""
    grid.row(104, "Telemetry health and configuration")
    sinks = ("exporter_rank", "sink")
    grid.line(
        7,
        (50, 6, series_panel(
            "Records lost",
            "Records a sink lost, by why. events.jsonl in the run directory has them all; this "
            "page may lack some.",
            Query(
                grown(select(TELEMETRY_DROPPED, scope), scope, INTERVAL, *sinks, "reason"),
                "{{sink}}: {{reason}}",
            ),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="✔ nothing lost"),
            bars=True,
        )),
        (51, 6, series_panel(
            "Queue and throughput",
            "Records that wait for a sink, and records per second. A queue that grows ends in "
            "records lost.",
            Query(fact(select(TELEMETRY_QUEUE, scope), scope, *sinks), "{{sink}} waiting"),
            Query(rate(select(TELEMETRY_EVENTS, scope), scope, INTERVAL, *sinks), "{{sink}} /s"),
            show=Show(unit="none", steps=NEUTRAL),
        )),
        (52, 3, stat_panel(
            "Since last step",
            "Seconds since the last completed step. Large in a live run: it hangs; the roll-call "
            "in the event log names absent ranks.",
            Query(run_queries.age(LAST_PROGRESS_TIME, scope), kind="instant"),
            show=Show(unit="s", decimals=0, steps=ages(config.thresholds.stalled_for)),
        )),
        (53, 9, table_panel(
            "Configuration and links",
            "How this run is guarded, and its page in W&B if there is one.",
            (Query(run_queries.run_links(scope, *_CONFIGURATION), kind="table"),),
            tuple(
                Column(
                    source=label,
                    name=label.replace("_", " "),
                    link=("${__value.raw}", "Open") if label.endswith("_url") else None,
                )
                for label in _CONFIGURATION
            ),
            empty="no guard in this range",
        )),
    )  # fmt: skip


_CONFIGURATION = (
    "wandb_url",
    "version",
    "on_failure",
    "audit_every",
    "fingerprint_every",
    "fault_domain",
    "dashboard_url",
)
