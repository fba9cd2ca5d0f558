"""The Suspect dashboard: one GPU, its evidence over time and across runs, and its own sensors."""

from __future__ import annotations

from dataclasses import replace

from sdcwatch.core.catalog import RANK_EVIDENCE, RANK_STATE, RANK_STRIKES
from sdcwatch.monitor import dcgm, run_queries
from sdcwatch.monitor.boards.board import (
    COUNTS,
    EVENTS,
    FINDINGS,
    NEUTRAL,
    Board,
    Variable,
    event_bars,
    scope_variables,
    suspects_table,
)
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import Grid, Query, Show, series_panel, stat_panel, timeline_panel
from sdcwatch.monitor.promql import (
    Scope,
    dashboard_scope,
    dedup_exporters,
    select,
    variable_matcher,
)
from sdcwatch.monitor.theme import BROKEN, CAUTION, GOOD, MUTED, STATES_BY_CODE

NO_GPU = "no GPU chosen"
"""What a tile says where no run of the range has a state for the GPU."""


def _device_scope(config: MonitorConfig) -> Scope:
    scope = dashboard_scope(config)
    return replace(scope, who=("suspect_gpu", variable_matcher("gpu", label="suspect_gpu")))


def _first_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    device = run_queries.WHO
    mismatches, comparisons = (
        f"sum by (check) ({run_queries.evidence(scope, result, *device, 'check')})"
        for result in ("mismatches", "comparisons")
    )
    states = run_queries.rank_state(scope, *run_queries.DEVICE)
    named = f"max({run_queries.last_finding(scope, *device)})"
    grid.line(
        4,
        (1, 5, stat_panel(
            "State",
            "suspect: named by a check, and nobody has closed it. closed: a person did, with "
            "`sdcwatch close`.",
            Query(f"min({states})", kind="instant"),
            show=Show(unit="none", looks=STATES_BY_CODE, empty=NO_GPU),
        )),
        (2, 4, stat_panel(
            "Suspect in runs",
            "Runs of the range that named this GPU. Two leave little doubt.",
            Query(f"max({run_queries.gpus_by_runs(scope)})", kind="instant"),
            show=Show(
                unit="none", decimals=0, empty=NO_GPU,
                steps=((None, MUTED), (1, CAUTION), (config.thresholds.offender_runs, BROKEN)),
            ),
        )),
        (3, 4, stat_panel(
            "Mismatches",
            "Comparisons (tensors, for the fingerprint check) in which it was wrong, by check, "
            "over all runs chosen.",
            Query(mismatches, "{{check}}", kind="instant"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty=NO_GPU),
        )),
        (4, 4, stat_panel(
            "Comparisons",
            "Comparisons it took part in when it was named, by check. All of them wrong: a broken "
            "device.",
            Query(comparisons, "{{check}}", kind="instant"),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty=NO_GPU),
        )),
        (5, 3, stat_panel(
            "Last at step",
            "The step at which a check last named it.",
            Query(named, kind="instant"),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty=NO_GPU),
        )),
        (6, 4, stat_panel(
            "Strikes",
            "One-off mismatches that did not repeat. One is a note, several are a pattern.",
            Query(f"sum({run_queries.strikes(scope, *device)})", kind="instant"),
            show=Show(unit="none", decimals=0, empty="none",
                      steps=((None, MUTED), (0, GOOD), (1, CAUTION), (3, BROKEN))),
        )),
    )  # fmt: skip


def _evidence(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    grid.row(101, "Evidence")
    grid.line(5, (10, 24, suspects_table(
        "Evidence by run and check", scope, config, with_run=True, to_suspect=False,
    )))  # fmt: skip
    legend = "{{run}} · rank {{suspect_rank}} · {{suspect_gpu}}"
    who = run_queries.WHO
    grid.line(
        5,
        (11, 24, timeline_panel(
            "States over time",
            "When it became suspect in each run, and what a person decided.",
            Query(run_queries.ranks_over_time(scope, *who), legend),
            show=Show(unit="none", looks=STATES_BY_CODE, empty="no state in this range"),
        )),
    )  # fmt: skip
    evidence = dedup_exporters(select(RANK_EVIDENCE, scope), scope, *who, "check", "result")
    strikes = dedup_exporters(select(RANK_STRIKES, scope), scope, *who)
    grid.line(
        8,
        (12, 8, series_panel(
            "Mismatches among comparisons",
            "Counts that grow together: wrong every time. A gap that widens: wrong now and then.",
            Query(f"{evidence} > 0", "{{check}}: {{result}} ({{run}})"),
            show=replace(COUNTS, empty="no evidence in this range"),
        )),
        (13, 8, series_panel(
            "Strikes over time",
            "One-off mismatches; a staircase is an intermittent fault.",
            Query(strikes, legend),
            show=replace(COUNTS, empty="no strike in this range"),
        )),
        (14, 8, event_bars(
            "Findings of the runs chosen",
            "Everything the checks of these runs found, whoever it was about; shows whether this "
            "GPU was alone.",
            dashboard_scope(config), FINDINGS,
        )),
    )  # fmt: skip


def _sensors(grid: Grid) -> None:
    grid.row(102, "Sensors of this GPU (where dcgm-exporter is scraped)")
    empty = "no dcgm-exporter series for this GPU"

    def panel(title: str, description: str, *metrics: dcgm.DeviceMetric) -> object:
        return series_panel(
            title,
            description,
            *(Query(m.query(), f"{m.title} {{{{Hostname}}}}/{{{{gpu}}}}") for m in metrics),
            show=Show(unit=metrics[0].unit, steps=NEUTRAL, empty=empty),
        )

    grid.line(
        7,
        (30, 8, panel(
            "Temperature",
            "Faults that come and go with heat point at the device or its cooling.",
            dcgm.TEMPERATURE, dcgm.MEMORY_TEMPERATURE,
        )),
        (31, 8, panel(
            "Power",
            "A drop while the job trains: throttling or a power fault.",
            dcgm.POWER,
        )),
        (32, 8, panel(
            "Clocks",
            "Lower than on its neighbours: throttling.",
            dcgm.SM_CLOCK, dcgm.MEMORY_CLOCK,
        )),
    )  # fmt: skip
    grid.line(
        7,
        (33, 12, panel(
            "XID",
            "Number of the last XID error; 0 is none. Silent corruption usually shows none: its "
            "absence proves nothing.",
            dcgm.XID,
        )),
        (34, 12, panel(
            "Memory errors",
            "Rows remapped because of ECC errors, and failures to remap. Any uncorrectable one: "
            "tell the vendor.",
            dcgm.REMAPPED_BAD, dcgm.REMAPPED_GOOD, dcgm.REMAP_FAILED,
        )),
    )  # fmt: skip


def suspect_board(config: MonitorConfig) -> Board:
    """The Suspect dashboard."""
    scope = _device_scope(config)
    grid = Grid()
    grid.row(100, "One GPU, over all runs chosen (UTC)")
    _first_line(grid, scope, config)
    _evidence(grid, scope, config)
    _sensors(grid)
    runs = scope_variables(config, one_run=False)
    matchers = tuple(variable_matcher(v.name) for v in runs)
    # One GPU at a time: several would be folded into one tile. It starts at one that has a state.
    gpu = Variable(
        name="gpu", label="GPU", metric=RANK_STATE, of="suspect_gpu", matchers=matchers, multi=False
    )
    return Board(
        slug="suspect",
        title="sdcwatch / Suspect",
        description="One GPU: its evidence over time, across runs, beside its sensors.",
        variables=(*runs, gpu),
        grid=grid,
        scope=dashboard_scope(config),
        time_from="now-7d",
    )
