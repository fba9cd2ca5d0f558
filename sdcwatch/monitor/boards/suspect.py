"""The Suspect dashboard: one GPU, its evidence over time and across runs, and its own sensors."""

from __future__ import annotations

from dataclasses import replace

from sdcwatch.monitor import dcgm, run_queries
from sdcwatch.monitor.boards.board import (
    EVENTS,
    INTERVAL,
    NEUTRAL,
    Board,
    Variable,
    scope_variables,
    suspects_table,
)
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import (
    Grid,
    Query,
    Show,
    color_by_suffix,
    series_panel,
    stat_panel,
    timeline_panel,
)
from sdcwatch.monitor.promql import (
    RANK_EVIDENCE,
    RANK_STATE,
    RANK_STRIKES,
    VERDICTS,
    Scope,
    dashboard_scope,
    fact,
    grown,
    last,
    select,
)
from sdcwatch.monitor.theme import (
    GREEN,
    GREY,
    OUTCOME_COLORS,
    RANK_CODES,
    RANK_LOOKS,
    SKY,
    VERMILLION,
    coded,
)

RANK_BY_CODE = coded(RANK_LOOKS, RANK_CODES)


def _device_scope(config: MonitorConfig) -> Scope:
    scope = dashboard_scope(config)
    return replace(scope, who=("suspect_gpu", 'suspect_gpu=~"$gpu"'))


def _first_line(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    counts = {
        r: fact(
            last(select(RANK_EVIDENCE, scope, result=r)),
            scope,
            "suspect_gpu",
            "suspect_rank",
            "check",
        )
        for r in ("mismatches", "comparisons")
    }
    mismatches, comparisons = (f"sum by (check) ({count})" for count in counts.values())
    strikes = fact(last(select(RANK_STRIKES, scope)), scope, "suspect_gpu", "suspect_rank")
    code = run_queries.rank_code(scope, "suspect_gpu", held=True)
    grid.line(
        4,
        (1, 5, stat_panel(
            "State",
            "suspect: named by a check. confirmed or dismissed: decided by a person in the ledger.",
            Query(f"min({code})", kind="instant"),
            show=Show(unit="none", looks=RANK_BY_CODE, empty="✔ no state"),
        )),
        (2, 4, stat_panel(
            "Runs in which suspect",
            "Runs of the range that named this GPU. Two leave little doubt.",
            Query(f"max({run_queries.gpus_by_runs(scope)})", kind="instant"),
            show=Show(
                unit="none", decimals=0, empty="0",
                steps=((None, GREEN), (1, GREY), (config.thresholds.offender_runs, VERMILLION)),
            ),
        )),
        (3, 5, stat_panel(
            "Wrong in",
            "Comparisons (tensors, for the fingerprint check) in which it was wrong, by check, "
            "over all runs chosen.",
            Query(mismatches, "{{check}}", kind="instant"),
            show=Show(unit="none", decimals=0, steps=EVENTS, empty="0"),
        )),
        (4, 5, stat_panel(
            "of",
            "Comparisons it took part in when it was named, by check. All of them wrong: a broken "
            "device.",
            Query(comparisons, "{{check}}", kind="instant"),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="0"),
        )),
        (5, 5, stat_panel(
            "Strikes",
            "One-off mismatches that did not repeat. One is a note, several are a pattern.",
            Query(f"sum({strikes})", kind="instant"),
            show=Show(unit="none", decimals=0, steps=((None, GREEN), (1, SKY), (3, VERMILLION)),
                      empty="0"),
        )),
    )  # fmt: skip


def _evidence(grid: Grid, scope: Scope, config: MonitorConfig) -> None:
    grid.row(101, "Evidence")
    grid.line(5, (10, 24, suspects_table(
        "Evidence by run and check", scope, config, with_run=True, to_suspect=False,
    )))  # fmt: skip
    who = ("suspect_rank", "suspect_node", "suspect_gpu")
    legend = "{{run}} · rank {{suspect_rank}} · {{suspect_gpu}}"
    grid.line(
        5,
        (11, 24, timeline_panel(
            "States over time",
            "When it became suspect in each run, and what a person decided.",
            Query(run_queries.rank_code(scope, *who), legend),
            show=Show(unit="none", looks=RANK_BY_CODE, empty="✔ never suspect in this range"),
        )),
    )  # fmt: skip
    evidence = select(RANK_EVIDENCE, scope)
    run_scope = dashboard_scope(config)
    found = select(VERDICTS, run_scope, outcome=run_queries.FINDINGS)
    verdicts = series_panel(
        "Findings of the runs chosen",
        "Everything the checks of these runs found, whoever it was about; shows whether this GPU "
        "was alone.",
        Query(grown(found, run_scope, INTERVAL, "check", "outcome"), "{{check}}: {{outcome}}"),
        show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="✔ nothing found"),
        bars=True,
    )
    grid.line(
        8,
        (12, 8, series_panel(
            "Wrong, of all comparisons",
            "Counts that grow together: wrong every time. A gap that widens: wrong now and then.",
            Query(
                fact(evidence, scope, *who, "check", "result"), "{{check}}: {{result}} ({{run}})"
            ),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="✔ no evidence"),
        )),
        (13, 8, series_panel(
            "Strikes over time",
            "One-off mismatches; a staircase is an intermittent fault.",
            Query(fact(select(RANK_STRIKES, scope), scope, *who), legend),
            show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="✔ no strikes"),
        )),
        (14, 8, color_by_suffix(verdicts, {o.value: c for o, c in OUTCOME_COLORS.items()})),
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
    matchers = tuple(f'{v.name}=~"${v.name}"' for v in runs)
    gpu = Variable(name="gpu", label="GPU", metric=RANK_STATE, matchers=matchers)
    return Board(
        slug="suspect",
        title="sdcwatch / Suspect",
        description="One rank or GPU: its evidence over time, across runs, beside its sensors.",
        variables=(*runs, gpu),
        grid=grid,
        scope=dashboard_scope(config),
        time_from="now-7d",
    )
