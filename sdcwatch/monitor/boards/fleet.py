"""The Fleet dashboard: all guarded runs, which are suspect, and how much of that is proven."""

from __future__ import annotations

from sdcwatch.core.catalog import (
    LAST_CLEAN_AUDIT_TIME,
    LAST_PROGRESS_TIME,
    STEP,
    STEPS_AT_RISK,
    VERDICTS,
)
from sdcwatch.core.records import CheckpointResult, Outcome, RunWord
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.boards.board import (
    COSTS,
    ENDED_BY_VALUE,
    EVENTS,
    NEUTRAL,
    RATE,
    Board,
    ages,
    dashboard_link,
    scope_variables,
    shares,
    suspects_table,
)
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import (
    Column,
    Grid,
    Query,
    Rows,
    Show,
    stat_panel,
    table_panel,
    timeline_panel,
)
from sdcwatch.monitor.promql import Scope, dashboard_scope, select
from sdcwatch.monitor.theme import BROKEN, GUARD_LOOKS, MUTED, SOFTWARE, STATES_BY_CODE, WORD_LOOKS

NO_RUNS = "no run"
"""What a tile says when the range has no guarded run at all."""


def _first_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    limits = config.thresholds
    live = run_queries.active(scope)
    unproven = run_queries.runs_with(scope, RunWord.NOT_CHECKED, RunWord.PARTLY_CHECKED)
    tainted = run_queries.runs_with(scope, RunWord.TAINTED)
    checks = f"sum(rate({select(VERDICTS, scope, outcome=Outcome.PASS)}[{RATE}]))"
    audited = run_queries.current(LAST_CLEAN_AUDIT_TIME, scope)
    oldest = f"max(time() - ({audited} > 0 and on ({scope.labels()}) {live}))"
    none = f"count({run_queries.present(scope)}) * 0"

    def count(expression: str) -> Query:
        return Query(f"count({expression}) or {none}", kind="instant")

    def events(empty: str = NO_RUNS) -> Show:
        return Show(unit="none", decimals=0, steps=EVENTS, empty=empty)

    grid.line(
        4,
        (1, 3, stat_panel(
            "Live now",
            "Runs that train now and export a guard.",
            count(live),
            show=Show(unit="none", decimals=0, steps=((None, MUTED), (1, SOFTWARE)), empty=NO_RUNS),
        )),
        (2, 3, stat_panel(
            "Suspect runs",
            "Runs in which a device is suspect and nobody has closed it, also after they ended. "
            "Open the run in the table.",
            count(run_queries.ranks_suspect(scope)),
            show=events(),
        )),
        (3, 3, stat_panel(
            "Suspect devices",
            "Devices somebody must act on, over all runs.",
            Query(f"sum({run_queries.ranks_suspect(scope)}) or {none}", kind="instant"),
            show=events(),
        )),
        (4, 3, stat_panel(
            "Tainted runs",
            "Runs whose newest process holds different weights on its replicas. Resume from the "
            "last good checkpoint.",
            count(tainted),
            show=events(),
        )),
        (5, 3, stat_panel(
            "Not proven",
            "Runs without a clean audit, or with coverage off or outputs only. They are not clean, "
            "only unseen.",
            count(unproven),
            show=Show(unit="none", decimals=0, steps=COSTS, empty=NO_RUNS),
        )),
        (6, 3, stat_panel(
            "Oldest audit",
            "The stalest last clean audit of all live runs. What came after it is unproven there.",
            Query(oldest, kind="instant"),
            show=Show(
                unit="s", decimals=0, steps=ages(limits.clean_audit_age), empty="no live run"
            ),
        )),
        (7, 3, stat_panel(
            "Passes / s",
            "Checks of all live runs that passed, per second. 0 while runs are guarded: nobody "
            "looks, or nothing passes.",
            Query(checks, kind="instant"),
            show=Show(unit="none", decimals=1, steps=NEUTRAL, empty="no live run"),
        )),
        (8, 3, stat_panel(
            "Highest overhead",
            "The largest share of step time that any live run spends in its guard now; the table "
            "says it since the start.",
            Query(f"max({run_queries.overhead_ratio(scope, RATE)})", kind="instant"),
            show=Show(
                unit="percentunit", decimals=1, steps=shares(limits.overhead_ratio),
                empty="no live run",
            ),
        )),
    )  # fmt: skip


def _runs_table(config: MonitorConfig, scope: Scope) -> object:
    run = dashboard_link(config, "run", run="Run")
    queries = (
        run_queries.verdict(scope),
        run_queries.guard(scope),
        run_queries.ranks_suspect(scope),
        run_queries.or_none(run_queries.skipped_updates(scope), scope),
        run_queries.or_none(run_queries.checkpoints(scope, CheckpointResult.WITHHELD), scope),
        run_queries.age(LAST_CLEAN_AUDIT_TIME, scope),
        run_queries.current(STEPS_AT_RISK, scope),
        run_queries.current(STEP, scope),
        run_queries.live_age(LAST_PROGRESS_TIME, scope),
        run_queries.overhead_so_far(scope),
    )
    limits = config.thresholds
    columns = (
        *(Column(source=label, name=label) for label in config.scope_labels),
        Column(source="run", name="Run", link=(run, "Open this run")),
        Column(source="verdict", name="Verdict", looks=WORD_LOOKS, width=170),
        Column(source="state", name="Guard", looks=GUARD_LOOKS, width=115),
        Column(source="Value #C", name="Suspects", unit="none", width=85),
        Column(source="Value #D", name="Skipped", unit="none", width=80),
        Column(source="Value #E", name="Withheld", unit="none", width=80),
        Column(source="Value #F", name="Last clean audit", unit="s",
               steps=ages(limits.clean_audit_age), width=125),
        Column(source="Value #G", name="At risk", unit="none", width=75),
        Column(source="Value #H", name="Step", unit="none", width=80),
        Column(source="Value #I", name="Last step", unit="s", looks=ENDED_BY_VALUE, width=95),
        Column(source="Value #J", name="Overhead", unit="percentunit",
               steps=shares(limits.overhead_ratio), width=85),
    )  # fmt: skip
    return table_panel(
        "Runs",
        "Every guarded run in the range, live or ended. NOT CHECKED is not CLEAN. A name opens the "
        "run.",
        tuple(Query(q, kind="table") for q in queries),
        columns,
        Rows(empty="no guarded run in this range", without=("Value #A", "Value #B")),
    )


def fleet_board(config: MonitorConfig) -> Board:
    """The Fleet dashboard."""
    scope = dashboard_scope(config)
    grid = Grid()
    grid.row(100, "All guarded runs (UTC)")
    _first_line(grid, scope, config)
    grid.line(9, (10, 24, _runs_table(config, scope)))
    names = " · ".join(f"{{{{{label}}}}}" for label in scope.by)
    grid.line(
        7,
        (11, 24, timeline_panel(
            "Guards over time",
            "State of each run's guard. A lane that ends without finished or failed vanished.",
            Query(run_queries.guard_over_time(scope), names),
            show=Show(unit="none", looks=STATES_BY_CODE, empty="no guard in this range"),
        )),
    )  # fmt: skip
    grid.row(101, "Devices")
    suspect = dashboard_link(config, "suspect", row=False, run="$__all", gpu="GPU")
    grid.line(
        8,
        (20, 24, suspects_table(
            "Suspects of all runs", scope, config, with_run=True, to_suspect=True,
        )),
    )  # fmt: skip
    grid.line(
        6,
        (21, 24, table_panel(
            "The same GPU in several runs",
            "In how many runs of the range each GPU was suspect. Two independent runs that name "
            "the same GPU leave little doubt.",
            (Query(run_queries.gpus_by_runs(scope), kind="table"),),
            (
                Column(source="suspect_gpu", name="GPU", link=(suspect, "History of this GPU")),
                Column(source="suspect_node", name="Node"),
                Column(source="Value", name="Runs", unit="none", width=70,
                       steps=((None, MUTED), (config.thresholds.offender_runs, BROKEN))),
            ),
            Rows(empty="no suspect in this range"),
        )),
    )  # fmt: skip
    return Board(
        slug="fleet",
        title="sdcwatch / Fleet",
        description="All guarded runs: which are suspect, and how stale the last clean audit is.",
        variables=scope_variables(config, one_run=False),
        grid=grid,
        scope=scope,
        time_from="now-24h",
    )
