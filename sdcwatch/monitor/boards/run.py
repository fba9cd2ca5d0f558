"""The Run dashboard: the page a person keeps open while one run trains, and after it ended.

Its first lines answer everything without scrolling, from ranges, so that they still do when the
series have gone stale. What follows explains them.
"""

from __future__ import annotations

from sdcwatch.core.catalog import (
    ABSENT_RANKS,
    AUDITED_RANKS,
    CHECK_DURATION,
    CHECKPOINTS,
    COMPARISONS,
    COVERAGE,
    DISAGREEMENTS,
    FINGERPRINT_CHECKS,
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
    WORLD_SIZE,
)
from sdcwatch.core.records import CheckpointResult
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.boards.board import (
    COSTS,
    COUNTS,
    ENDED_BY_VALUE,
    EVENTS,
    FINDINGS,
    NEUTRAL,
    NO_RUN,
    RATE,
    Board,
    Events,
    ages,
    event_bars,
    scope_variables,
    shares,
    step_and_age,
    suspects_table,
)
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import (
    NONE,
    Column,
    Grid,
    Query,
    Rows,
    Show,
    budget_line,
    colored,
    heatmap_panel,
    override,
    series_panel,
    stat_panel,
    table_panel,
    timeline_panel,
)
from sdcwatch.monitor.promql import Scope, dashboard_scope, dedup_exporters, rate, select, summed
from sdcwatch.monitor.theme import (
    BROKEN,
    CAUSE_COLORS,
    CAUTION,
    COVERAGE_LOOKS,
    GOOD,
    GUARD_LOOKS,
    KIND_COLORS,
    LINE,
    MODE_LOOKS,
    OUTCOME_LOOKS,
    RESULT_COLORS,
    SKIP_COLORS,
    STATES_BY_CODE,
    WORD_LOOKS,
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
            "The run in one word, the gravest that holds. SUSPECT names a device in the table "
            "below: take its machine out of the job. TAINTED: replicas hold different weights, "
            "resume from the last good checkpoint. NOT CHECKED does not mean clean.",
            Query(run_queries.verdict(scope), kind="table"),
            show=Show(unit="none", looks=WORD_LOOKS, fields="/^verdict$/", empty=NO_RUN),
        )),
        (2, 3, stat_panel(
            "Guard",
            "State of the guard. Degraded: some checks are off. Tainted: every later checkpoint is "
            "withheld. Vanished: it never said how it ended, and nothing exports it any more.",
            Query(run_queries.guard(scope), kind="table"),
            show=Show(unit="none", looks=GUARD_LOOKS, fields="/^state$/", empty=NO_RUN),
        )),
        (3, 3, stat_panel(
            "Mode",
            "enforce: a failed check skips the update or stops the run. observe: it only reports.",
            Query(run_queries.word(RUN_INFO, "mode", scope), kind="table"),
            show=Show(unit="none", looks=MODE_LOOKS, fields="/^mode$/", empty=NO_RUN),
        )),
        (4, 3, stat_panel(
            "Coverage",
            "What the replay audit compares. Outputs only, or off: a wrong gradient can pass; the "
            "preflight record says why.",
            Query(run_queries.word(COVERAGE, "coverage", scope), kind="table"),
            show=Show(unit="none", looks=COVERAGE_LOOKS, fields="/^coverage$/", empty=NO_RUN),
        )),
        (5, 2, stat_panel(
            "Audited",
            "Share of the ranks compared in the last audit. Below 100 % the others were not seen.",
            Query(audited, kind="instant"),
            show=Show(
                unit="percentunit", decimals=0, empty=NO_RUN,
                steps=((None, NEUTRAL[0][1]), (0, CAUTION), (1, GOOD)),
            ),
        )),
        (6, 2, stat_panel(
            "At risk",
            "Updates since the last clean audit: what a late finding would cost. Grows until the "
            "next audit passes.",
            Query(run_queries.current(STEPS_AT_RISK, scope), kind="instant"),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty=NO_RUN),
        )),
        (7, 4, step_and_age(
            "Last clean audit",
            "Step and age of the last audit in which every comparison matched. Older than "
            f"{limits.clean_audit_age} in a live run is an alert. After the end: its age then.",
            run_queries.current(LAST_CLEAN_AUDIT_STEP, scope),
            run_queries.age(LAST_CLEAN_AUDIT_TIME, scope),
            ages(limits.clean_audit_age),
        )),
        (8, 2, stat_panel(
            "Overhead",
            "Seconds in the guard per second of training step, in the newest process. The budget "
            f"is {limits.overhead_ratio:.0%}. Above it: audit less often, or see Cost below.",
            Query(run_queries.overhead_so_far(scope), kind="instant"),
            show=Show(
                unit="percentunit", decimals=1, steps=shares(limits.overhead_ratio), empty=NO_RUN
            ),
        )),
    )  # fmt: skip


def _consequences_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    path = run_queries.checkpoint(scope)

    def count(expression: str) -> Query:
        return Query(run_queries.or_none(expression, scope), kind="instant")

    def costs(kind: str) -> Show:
        return Show(unit="none", decimals=0, steps=COSTS if kind == "cost" else EVENTS,
                    empty=NO_RUN)  # fmt: skip

    grid.line(
        4,
        (11, 3, stat_panel(
            "Skipped updates",
            "Optimizer updates in the range that did not happen because a check failed, or that "
            "the loop left out. The loss scaler's own skips are not counted.",
            count(run_queries.skipped_updates(scope)),
            show=costs("cost"),
        )),
        (12, 3, stat_panel(
            "Withheld",
            "Checkpoints in the range that were not written because a check had not passed. See "
            "Checkpoints below for the reasons.",
            count(run_queries.checkpoints(scope, CheckpointResult.WITHHELD)),
            show=costs("cost"),
        )),
        (13, 3, stat_panel(
            "UNATTRIBUTED",
            "Verdicts in the range that say something is wrong and cannot name a device: "
            "unattributed, inconclusive, widespread, differs. Any of them needs a person.",
            count(run_queries.unnamed_findings(scope)),
            show=costs("event"),
        )),
        (14, 3, stat_panel(
            "Absent ranks",
            "Ranks that were absent in the last liveness check; the event log names them.",
            Query(run_queries.current(ABSENT_RANKS, scope), kind="instant"),
            show=costs("event"),
        )),
        (15, 3, stat_panel(
            "Since last step",
            "Seconds since the last completed step of a live run. Large: it hangs, and the "
            "liveness check in the event log names absent ranks.",
            Query(run_queries.live_age(LAST_PROGRESS_TIME, scope), kind="instant"),
            show=Show(unit="s", decimals=0, steps=ages(config.thresholds.stalled_for),
                      looks=ENDED_BY_VALUE, empty=NO_RUN),
        )),
        (16, 4, step_and_age(
            "Last good checkpoint",
            "Step and age of the last checkpoint that passed every check: where to resume from. "
            "Provisional ones do not count before the next clean audit.",
            run_queries.highest(LAST_GOOD_CHECKPOINT_STEP, scope),
            run_queries.since(run_queries.highest(LAST_GOOD_CHECKPOINT_TIME, scope), scope),
            ages("24h"),
        )),
        (17, 5, stat_panel(
            "Resume from",
            "Where that checkpoint is, if the script passed `path` to save_checkpoint.",
            Query(path, kind="table"),
            show=Show(unit="none", fields="/^path$/", empty="no path known", size=13),
        )),
    )  # fmt: skip


def run_board(config: MonitorConfig) -> Board:
    """The Run dashboard."""
    scope = dashboard_scope(config)
    grid = Grid()
    grid.row(100, "Is this run clean? (UTC; also after the run ended)")
    _verdict_line(grid, scope, config)
    grid.line(5, (10, 24, suspects_table(
        "Suspects", scope, config, with_run=False, to_suspect=True,
    )))  # fmt: skip
    _consequences_line(grid, scope, config)
    timelines(grid, scope)
    findings(grid, scope)
    cost(grid, scope, config)
    telemetry(grid, scope)
    return Board(
        slug="run",
        title="sdcwatch / Run",
        description="Is one guarded run clean, suspect or not checked, and on what evidence?",
        variables=scope_variables(config, one_run=True),
        grid=grid,
        scope=scope,
        time_from="now-6h",
    )


def timelines(grid: Grid, scope: Scope) -> None:
    """What happened, in words and over time, and the loss beside it."""
    grid.row(101, "What happened when")
    columns = (
        Column(source="step", name="Step", unit="none", width=80),
        Column(source="check", name="Check", width=95),
        Column(source="outcome", name="Outcome", looks=OUTCOME_LOOKS, width=150),
        Column(source="who", name="Who", width=170),
        Column(source="operator", name="Operation", width=180),
        Column(source="reason", name="Why"),
    )
    labels = ("event", *(c.source for c in columns))
    grid.line(
        7,
        (22, 24, table_panel(
            "Events",
            "The last findings of this run, newest first. events.jsonl in the run directory has "
            "all of them with every detail.",
            (Query(run_queries.events(scope, *labels), kind="table"),),
            columns,
            Rows(
                empty="no finding in this range",
                newest_first="step",
                without=("event", "run", "Value"),
            ),
        )),
    )  # fmt: skip
    grid.line(
        6,
        (20, 24, timeline_panel(
            "State timeline",
            "The guard, and every device that has a state; healthy ones have none. A lane that "
            "turns red names the device.",
            Query(run_queries.guard_over_time(scope), "guard"),
            Query(
                run_queries.ranks_over_time(scope, *run_queries.WHO),
                "rank {{suspect_rank}} · {{suspect_node}} · {{suspect_gpu}}",
            ),
            show=Show(unit="none", looks=STATES_BY_CODE, empty=NO_RUN),
        )),
    )  # fmt: skip
    loss = series_panel(
        "Loss and step",
        "Loss of the reporting rank (left) and step (right) with a mark at each finding. A normal "
        "loss proves nothing: silent corruption looks like this.",
        Query(dedup_exporters(select(LOSS, scope), scope), "loss"),
        Query(dedup_exporters(select(STEP, scope), scope), "step"),
        show=Show(unit="none", steps=NEUTRAL, empty="no loss in this range"),
    )
    for name, side in (("loss", "left"), ("step", "right")):
        loss = override(
            loss, name, custom__axisPlacement=side, custom__axisLabel=name, custom__fillOpacity=0
        )
    grid.line(8, (21, 24, colored(loss, {"loss": GOOD, "step": LINE})))


def findings(grid: Grid, scope: Scope) -> None:
    """Counts of events, by check and reason."""
    grid.row(102, "Findings (a bar is what was counted since the bar before)")
    grid.line(
        8,
        (30, 12, event_bars(
            "Verdicts that are not a pass",
            "Findings by check and outcome. suspect names a device; reproducible is data or "
            "model; not_run means the check was due and could not run.",
            scope, FINDINGS,
        )),
        (31, 12, colored(series_panel(
            "Comparisons and mismatches",
            "Comparisons of a rank's step with its recomputation elsewhere, and those that did not "
            "match. Any mismatch is followed by a verdict.",
            Query(run_queries.bars(COMPARISONS, scope), "comparisons"),
            Query(run_queries.bars(MISMATCHES, scope, "kind"), "{{kind}} mismatch"),
            Query(run_queries.nothing_happened(COMPARISONS, scope), NONE),
            show=COUNTS,
            bars=True,
        ), KIND_COLORS)),
    )  # fmt: skip
    grid.line(
        8,
        (32, 8, colored(series_panel(
            "Weight checks",
            "Comparisons of all weights between replicas, and tensors that differed. One "
            "disagreement taints the run.",
            Query(run_queries.bars(FINGERPRINT_CHECKS, scope), "checks"),
            Query(run_queries.bars(DISAGREEMENTS, scope), "disagreeing tensors"),
            Query(run_queries.nothing_happened(FINGERPRINT_CHECKS, scope), NONE),
            show=COUNTS,
            bars=True,
        ), KIND_COLORS)),
        (33, 8, event_bars(
            "Skips by reason",
            "Updates that happened on no rank. scaler is normal under fp16; anything else costs "
            "training.",
            scope, Events(
                metric=SKIPPED, labels=("reason",), legend="{{reason}}", colors=SKIP_COLORS
            ),
        )),
        (34, 8, event_bars(
            "Non-finite steps",
            "Steps with NaN or Inf, by where it was seen and why. scaling is the loss scaler's "
            "business; data is yours; device is a GPU.",
            scope, Events(
                metric=NONFINITE, labels=("origin", "cause"), legend="{{origin}}: {{cause}}",
                colors=CAUSE_COLORS, pattern=": {}$",
            ),
        )),
    )  # fmt: skip
    grid.line(
        8,
        (35, 16, event_bars(
            "Checkpoints",
            "What became of each checkpoint and why. withheld: not written; provisional: written, "
            "waits for a clean audit; confirmed: that audit passed.",
            scope, Events(
                metric=CHECKPOINTS, labels=("result", "reason"), legend="{{result}}: {{reason}}",
                colors=RESULT_COLORS, pattern="^{}: ",
            ),
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
    guard = rate(select(OVERHEAD_TIME, scope), scope, RATE, "check")
    steps = summed(rate(select(STEP_TIME, scope), scope, RATE, "kind"), scope)
    seconds = rate(select(STEP_TIME, scope), scope, RATE, "kind")
    count = rate(select(STEPS, scope), scope, RATE, "kind")
    buckets = rate(select(CHECK_DURATION, scope, "_bucket"), scope, RATE, "check", "phase", "le")
    grid.line(
        8,
        (40, 8, colored(budget_line(series_panel(
            "Overhead by check",
            f"Share of step time spent in each check. The dashed line is the budget, {budget:.0%}; "
            "audits show as peaks.",
            Query(f"{guard} / on ({by}) group_left () ({steps} > 0)", "{{check}}"),
            show=Show(unit="percentunit", steps=((None, GOOD), (budget, BROKEN))),
        )), KIND_COLORS)),
        (41, 8, heatmap_panel(
            "Check duration",
            "How long the phases of all checks take. A band that rises is a check that slows down: "
            "look at the network and at stragglers.",
            Query(f"sum by (le) ({buckets})", "{{le}}", kind="heatmap"),
            show=Show(unit="s", steps=NEUTRAL),
        )),
        (42, 8, colored(series_panel(
            "Step time",
            "Seconds per step, plain and with an audit. The distance between the two is the price "
            "of an audit.",
            Query(f"{seconds} / ({count} > 0)", "{{kind}}"),
            show=Show(unit="s", steps=NEUTRAL),
        ), KIND_COLORS)),
    )  # fmt: skip


def telemetry(grid: Grid, scope: Scope) -> None:
    """Whether what this page shows is complete, and how the run is configured."""
    grid.row(104, "Telemetry health and configuration")
    sinks = ("exporter_rank", "sink")
    waiting = dedup_exporters(select(TELEMETRY_QUEUE, scope), scope, *sinks)
    grid.line(
        7,
        (50, 12, event_bars(
            "Records lost",
            "Records a sink lost, by why. events.jsonl in the run directory has them all; this "
            "page may lack some.",
            scope, Events(
                metric=TELEMETRY_DROPPED, labels=("sink", "reason"), legend="{{sink}}: {{reason}}",
                colors={},
            ),
        )),
        (51, 12, series_panel(
            "Queue and throughput",
            "Records that wait for a sink, and records per second. A queue that grows ends in "
            "records lost.",
            Query(waiting, "{{sink}} waiting"),
            Query(rate(select(TELEMETRY_EVENTS, scope), scope, RATE, *sinks), "{{sink}} /s"),
            show=Show(unit="none", steps=NEUTRAL),
        )),
    )  # fmt: skip
    grid.line(
        4,
        (53, 24, table_panel(
            "Configuration and links",
            "How this run is guarded, where its event log is, and its page in W&B if there is one. "
            "Two rows: two runs of one name, which the run id tells apart.",
            (Query(run_queries.run_labels(scope, *_CONFIGURATION), kind="table"),),
            tuple(
                Column(
                    source=label,
                    name=label.replace("_", " "),
                    link=("${__value.raw}", "Open") if label.endswith("_url") else None,
                    width=width,
                )
                for label, width in _CONFIGURATION.items()
            ),
            Rows(empty=NO_RUN, without=("run", "Value")),
        )),
    )  # fmt: skip


_CONFIGURATION = {
    "run_id": 120,
    "run_dir": None,
    "version": 75,
    "on_failure": 85,
    "audit_every": 90,
    "fingerprint_every": 125,
    "fault_domain": 100,
    "wandb_url": None,
    "dashboard_url": None,
}
