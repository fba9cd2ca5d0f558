"""The Run dashboard: the page a person keeps open while one run trains, and after it ended.

Its first two lines answer everything without scrolling, from ranges, so that they still do when the
series have gone stale. What follows explains them.
"""

from __future__ import annotations

from sdcwatch.core.records import CheckpointResult
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.boards.board import (
    COVERAGE_BY_WORD,
    EVENTS,
    INTERVAL,
    NEUTRAL,
    STATE_BY_WORD,
    STATES_BY_CODE,
    VERDICTS_BY_CODE,
    Board,
    ages,
    overhead_so_far,
    scope_variables,
    shares,
    step_and_age,
    suspects_table,
)
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
    AUDITED_RANKS,
    CHECK_DURATION,
    CHECKPOINTS,
    COMPARISONS,
    COVERAGE,
    DISAGREEMENTS,
    FINGERPRINT_CHECKS,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_STEP,
    LAST_CLEAN_AUDIT_TIME,
    LAST_GOOD_CHECKPOINT_STEP,
    LAST_GOOD_CHECKPOINT_TIME,
    LAST_PROGRESS_TIME,
    LAST_WEIGHT_CHECK_STEP,
    LAST_WEIGHT_CHECK_TIME,
    LOSS,
    MISMATCHES,
    NONFINITE,
    OVERHEAD_TIME,
    RUN_INFO,
    SKIPPED,
    STEP,
    STEP_TIME,
    STEPS,
    STEPS_AT_RISK,
    TELEMETRY_DROPPED,
    TELEMETRY_EVENTS,
    TELEMETRY_QUEUE,
    VERDICTS,
    WORLD_SIZE,
    Scope,
    dashboard_scope,
    fact,
    grown,
    rate,
    select,
    summed,
)
from sdcwatch.monitor.theme import (
    GREEN,
    MODE_LOOKS,
    ORANGE,
    OUTCOME_COLORS,
    SKY,
    VERMILLION,
    YELLOW,
)


def _verdict_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    limits = config.thresholds
    audited = (
        f"{run_queries.current(AUDITED_RANKS, scope)} / {run_queries.current(WORLD_SIZE, scope)}"
    )
    grid.line(
        4,
        (1, 5, stat_panel(
            "Verdict",
            "Is this run clean? SUSPECT names a rank in the table below: take it out of the job. "
            "TAINTED: weights differ between replicas, resume from the last good checkpoint. "
            "NOT CHECKED: no audit has passed yet, or audits are off; it does not mean clean.",
            Query(run_queries.verdict_code(scope), kind="instant"),
            show=Show(looks=VERDICTS_BY_CODE, empty="? NOT CHECKED"),
        )),
        (2, 3, stat_panel(
            "Guard",
            "State of the guard. Degraded: some checks are off. Tainted: every later checkpoint is "
            "withheld. Failed: the run ended with an error.",
            Query(run_queries.word(GUARD_STATE, "state", scope), kind="table"),
            show=Show(unit="none", looks=STATE_BY_WORD, fields="/^state$/", empty="no guard"),
        )),
        (3, 3, stat_panel(
            "Mode",
            "enforce: a failed check skips the update or stops the run. observe: it only reports.",
            Query(run_queries.word(RUN_INFO, "mode", scope), kind="table"),
            show=Show(unit="none", looks=MODE_LOOKS, fields="/^mode$/", empty="unknown"),
        )),
        (4, 3, stat_panel(
            "Coverage",
            "What the replay audit compares. Loss only, or off: a wrong gradient can pass; the "
            "preflight record says why.",
            Query(run_queries.word(COVERAGE, "coverage", scope), kind="table"),
            show=Show(unit="none", looks=COVERAGE_BY_WORD, fields="/^coverage$/", empty="? off"),
        )),
        (5, 2, stat_panel(
            "Audited",
            "Share of the ranks compared in the last audit. Below 100 % the others were not seen.",
            Query(audited, kind="instant"),
            show=Show(
                unit="percentunit", decimals=0, empty="? none",
                steps=((None, ORANGE), (0.5, YELLOW), (1, GREEN)),
            ),
        )),
        (6, 2, stat_panel(
            "At risk",
            "Updates since the last clean audit: what a late finding would cost. Grows until the "
            "next audit passes.",
            Query(run_queries.current(STEPS_AT_RISK, scope), kind="instant"),
            show=Show(unit="none", decimals=0, steps=NEUTRAL),
        )),
        (7, 3, step_and_age(
            "Last clean audit",
            "Step and age of the last audit in which every comparison matched. Older than "
            f"{limits.clean_audit_age} in a live run is an alert.",
            run_queries.current(LAST_CLEAN_AUDIT_STEP, scope),
            run_queries.age(LAST_CLEAN_AUDIT_TIME, scope),
            ages(limits.clean_audit_age),
        )),
        (8, 3, stat_panel(
            "Overhead",
            "Seconds in the guard per second of training step. The budget is "
            f"{limits.overhead_ratio:.0%}. Above it: audit less often, or see Cost below.",
            Query(overhead_so_far(scope), kind="instant"),
            show=Show(unit="percentunit", decimals=1, steps=shares(limits.overhead_ratio)),
        )),
    )  # fmt: skip


def _suspects_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    grid.line(
        6,
        (10, 12, suspects_table(
            "Suspects", scope, config, with_run=False, to_suspect=True,
        )),
        (11, 3, stat_panel(
            "Updates skipped",
            "Optimizer updates that did not happen because a check failed, or that the loop left "
            "out. The loss scaler's own skips are not counted. See Skipped updates below.",
            Query(run_queries.skipped_updates(scope), kind="instant"),
            show=Show(unit="none", decimals=0, steps=((None, GREEN), (1, ORANGE)), empty="0"),
        )),
        (12, 3, stat_panel(
            "Checkpoints withheld",
            "Checkpoints that were not written because a check had not passed. See Checkpoints "
            "below for the reasons.",
            Query(run_queries.checkpoints(scope, CheckpointResult.WITHHELD), kind="instant"),
            show=Show(unit="none", decimals=0, steps=((None, GREEN), (1, ORANGE)), empty="0"),
        )),
        (13, 3, step_and_age(
            "Last good checkpoint",
            "Step and age of the last checkpoint that passed every check: where to resume from. "
            "Provisional ones do not count before the next clean audit.",
            run_queries.highest(LAST_GOOD_CHECKPOINT_STEP, scope),
            run_queries.since(run_queries.highest(LAST_GOOD_CHECKPOINT_TIME, scope)),
            ((None, GREEN), (6 * 3600, YELLOW), (24 * 3600, VERMILLION)),
        )),
        (14, 3, stat_panel(
            "Wrong, no name",
            "Verdicts that say something is wrong and cannot name a rank: unattributed, "
            "inconclusive, widespread, transport. Any of them needs a person.",
            Query(run_queries.unnamed_findings(scope), kind="instant"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty="0"),
        )),
    )  # fmt: skip


def run_board(config: MonitorConfig) -> Board:
    """The Run dashboard."""
    scope = dashboard_scope(config)
    grid = Grid()
    grid.row(100, "Is this run clean? (UTC; also after the run ended)")
    _verdict_line(grid, scope, config)
    _suspects_line(grid, scope, config)
    timelines(grid, scope)
    findings(grid, scope)
    cost(grid, scope, config)
    telemetry(grid, scope, config)
    return Board(
        slug="run",
        title="sdcwatch / Run",
        description="Is one guarded run clean, suspect or not checked, and on what evidence?",
        variables=scope_variables(config, one_run=True),
        grid=grid,
        scope=scope,
        time_from="now-6h",
    )


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
                "rank {{suspect_rank}} · {{suspect_node}} · {{suspect_gpu}}",
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
            "Seconds since the last completed step. Large in a live run: it hangs; the liveness "
            "check in the event log names absent ranks.",
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
