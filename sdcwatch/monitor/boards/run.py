"""The Run dashboard: the page a person keeps open while one run trains, and after it ended.

Its first two lines answer everything without scrolling, from ranges, so that they still do when the
series have gone stale. What follows explains them.
"""

from __future__ import annotations

from sdcwatch.core.records import CheckpointResult
from sdcwatch.monitor import run_details, run_queries
from sdcwatch.monitor.boards.board import Board, scope_variables
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import Grid, Query, Show, stat_panel
from sdcwatch.monitor.promql import (
    AUDITED_RANKS,
    COVERAGE,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_STEP,
    LAST_CLEAN_AUDIT_TIME,
    LAST_GOOD_CHECKPOINT_STEP,
    LAST_GOOD_CHECKPOINT_TIME,
    RUN_INFO,
    STEPS_AT_RISK,
    WORLD_SIZE,
    Scope,
    dashboard_scope,
)
from sdcwatch.monitor.theme import GREEN, MODE_LOOKS, ORANGE, VERMILLION, YELLOW
from sdcwatch.monitor.tiles import (
    COVERAGE_BY_WORD,
    EVENTS,
    NEUTRAL,
    STATE_BY_WORD,
    VERDICTS_BY_CODE,
    ages,
    overhead_so_far,
    shares,
    step_and_age,
    suspects_table,
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
    run_details.timelines(grid, scope)
    run_details.findings(grid, scope)
    run_details.cost(grid, scope, config)
    run_details.telemetry(grid, scope, config)
    return Board(
        slug="run",
        title="sdcwatch / Run",
        description="Is one guarded run clean, suspect or not checked, and on what evidence?",
        variables=scope_variables(config, one_run=True),
        grid=grid,
        scope=scope,
        time_from="now-6h",
    )
