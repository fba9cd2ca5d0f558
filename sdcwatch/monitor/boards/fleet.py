"""The Fleet dashboard: all guarded runs, which are suspect, and how much of that is proven."""

from __future__ import annotations

from sdcwatch.core.records import CheckpointResult, GuardState
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.alerts import ACTIVE
from sdcwatch.monitor.boards.board import (
    EVENTS,
    INTERVAL,
    NEUTRAL,
    VERDICTS_BY_CODE,
    Board,
    ages,
    dashboard_link,
    overhead_so_far,
    scope_variables,
    shares,
    suspects_table,
)
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import (
    Column,
    Grid,
    Query,
    Show,
    stat_panel,
    table_panel,
    timeline_panel,
)
from sdcwatch.monitor.promql import (
    GUARD_STATE,
    LAST_CLEAN_AUDIT_TIME,
    LAST_PROGRESS_TIME,
    STEP,
    STEPS_AT_RISK,
    VERDICTS,
    Scope,
    dashboard_scope,
    fact,
    newest,
    overhead_ratio,
    rate,
    select,
)
from sdcwatch.monitor.theme import (
    BLUE,
    GREEN,
    GREY,
    GUARD_CODES,
    GUARD_LOOKS,
    ORANGE,
    VERMILLION,
    VerdictCode,
    coded,
)


def _first_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    limits = config.thresholds
    live = f"{fact(select(GUARD_STATE, scope, state=ACTIVE), scope)} == 1"
    code = run_queries.verdict_code(scope)
    unproven = f"({code}) >= {VerdictCode.OUTPUTS_ONLY.value} <= {VerdictCode.NOT_CHECKED.value}"
    tainted = newest(select(GUARD_STATE, scope, state=GuardState.TAINTED), scope)
    checks = rate(select(VERDICTS, scope), scope, INTERVAL, "check", "outcome")
    oldest = f"max(time() - ({run_queries.current(LAST_CLEAN_AUDIT_TIME, scope)} > 0 and {live}))"

    def count(expression: str) -> Query:
        return Query(f"count({expression})", kind="instant")

    grid.line(
        4,
        (1, 3, stat_panel(
            "Runs guarded",
            "Runs that train now and export a guard.",
            count(live),
            show=Show(unit="none", decimals=0, steps=((None, GREY), (1, BLUE)), empty="0"),
        )),
        (2, 3, stat_panel(
            "Runs suspect",
            "Runs in which a rank is suspect, in the range, also after they ended. Open the run in "
            "the table.",
            count(f"({code}) == {VerdictCode.SUSPECT.value}"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty="0"),
        )),
        (3, 3, stat_panel(
            "Ranks suspect",
            "Ranks somebody must act on, over all runs.",
            Query(f"sum({run_queries.ranks_suspect(scope)})", kind="instant"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty="0"),
        )),
        (4, 3, stat_panel(
            "Runs tainted",
            "Runs whose replicas hold different weights. Resume from the last good checkpoint.",
            count(f"{fact(tainted, scope)} == 1"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty="0"),
        )),
        (5, 3, stat_panel(
            "Runs not proven",
            "Runs without a clean audit, or with coverage off or loss only. They are not clean, "
            "only unseen.",
            count(unproven),
            show=Show(unit="none", decimals=0, steps=((None, GREEN), (1, ORANGE)), empty="0"),
        )),
        (6, 3, stat_panel(
            "Oldest clean audit",
            "The stalest last clean audit of all live runs. What came after it is unproven there.",
            Query(oldest, kind="instant"),
            show=Show(
                unit="s", decimals=0, steps=ages(limits.clean_audit_age), empty="no live run"
            ),
        )),
        (7, 3, stat_panel(
            "Checks per second",
            "Verdicts of all checks of all runs. 0 while runs are guarded: nobody looks.",
            Query(f"sum({checks})", kind="instant"),
            show=Show(unit="none", decimals=1, steps=NEUTRAL, empty="0"),
        )),
        (8, 3, stat_panel(
            "Highest overhead",
            "The largest share of step time that any live run spends in its guard.",
            Query(f"max({overhead_ratio(scope, INTERVAL)})", kind="instant"),
            show=Show(
                unit="percentunit", decimals=1, steps=shares(limits.overhead_ratio),
                empty="no live run",
            ),
        )),
    )  # fmt: skip


def _runs_table(config: MonitorConfig, scope: Scope) -> object:
    run = dashboard_link(config, "run", "var-run=${__data.fields.Run}")
    queries = (
        run_queries.verdict_code(scope),
        run_queries.guard_code(scope, held=True),
        run_queries.ranks_suspect(scope),
        run_queries.skipped_updates(scope),
        run_queries.checkpoints(scope, CheckpointResult.WITHHELD),
        run_queries.age(LAST_CLEAN_AUDIT_TIME, scope),
        run_queries.current(STEPS_AT_RISK, scope),
        run_queries.current(STEP, scope),
        run_queries.age(LAST_PROGRESS_TIME, scope),
        overhead_so_far(scope),
    )
    limits = config.thresholds
    columns = (
        *(Column(source=label, name=label) for label in config.scope_labels),
        Column(source="run", name="Run", link=(run, "Open this run")),
        Column(source="Value #A", name="Verdict", looks=VERDICTS_BY_CODE, width=190),
        Column(source="Value #B", name="Guard", looks=coded(GUARD_LOOKS, GUARD_CODES), width=130),
        Column(source="Value #C", name="Suspect ranks", unit="none", width=115),
        Column(source="Value #D", name="Skipped", unit="none", width=85),
        Column(source="Value #E", name="Withheld", unit="none", width=85),
        Column(source="Value #F", name="Last clean audit", unit="s",
               steps=ages(limits.clean_audit_age), width=130),
        Column(source="Value #G", name="Steps at risk", unit="none", width=110),
        Column(source="Value #H", name="Step", unit="none", width=85),
        Column(source="Value #I", name="Last step", unit="s", width=95),
        Column(source="Value #J", name="Overhead", unit="percentunit",
               steps=shares(limits.overhead_ratio), width=95),
    )  # fmt: skip
    return table_panel(
        "Runs",
        "Every guarded run in the range, live or ended. NOT CHECKED is not CLEAN. A name opens the "
        "run.",
        tuple(Query(q, kind="table") for q in queries),
        columns,
        empty="no guarded run in this range",
    )


def fleet_board(config: MonitorConfig) -> Board:
    """The Fleet dashboard."""
    scope = dashboard_scope(config)
    grid = Grid()
    grid.row(100, "All guarded runs (UTC)")
    _first_line(grid, scope, config)
    grid.line(9, (10, 24, _runs_table(config, scope)))
    grid.line(
        7,
        (11, 24, timeline_panel(
            "Guards over time",
            "State of each run's guard. A lane that ends without finished or failed vanished.",
            Query(run_queries.guard_code(scope), "{{run}}"),
            show=Show(
                unit="none", looks=coded(GUARD_LOOKS, GUARD_CODES), empty="no guard in this range"
            ),
        )),
    )  # fmt: skip
    grid.row(101, "Devices")
    suspect = dashboard_link(config, "suspect", "var-run=$__all&var-gpu=${__data.fields.GPU}")
    grid.line(
        8,
        (20, 16, suspects_table(
            "Suspect ranks of all runs", scope, config, with_run=True, to_suspect=True,
        )),
        (21, 8, table_panel(
            "The same GPU in several runs",
            "In how many runs of the range each GPU was suspect. Two independent runs that name "
            "the same GPU leave little doubt.",
            (Query(run_queries.gpus_by_runs(scope), kind="table"),),
            (
                Column(source="suspect_gpu", name="GPU", link=(suspect, "History of this GPU")),
                Column(source="suspect_node", name="Node"),
                Column(source="Value", name="Runs", unit="none", width=70,
                       steps=((None, GREY), (config.thresholds.offender_runs, VERMILLION))),
            ),
            empty="✔ no GPU was suspect",
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
