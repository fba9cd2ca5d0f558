"""Panels that more than one dashboard shows."""

from __future__ import annotations

from typing import Any

from sdcwatch.monitor import run_queries
from sdcwatch.monitor.boards.board import dashboard_link
from sdcwatch.monitor.config import MonitorConfig, duration_seconds
from sdcwatch.monitor.panels import (
    Column,
    Query,
    Show,
    Steps,
    override,
    stat_panel,
    table_panel,
    thresholds,
)
from sdcwatch.monitor.promql import OVERHEAD_TIME, STEP_TIME, Scope, fact, last, select, summed
from sdcwatch.monitor.theme import (
    COVERAGE_LOOKS,
    GREEN,
    GREY,
    GUARD_CODES,
    GUARD_LOOKS,
    RANK_CODES,
    RANK_LOOKS,
    VERDICT_LOOKS,
    VERMILLION,
    YELLOW,
    coded,
)

INTERVAL = "$__rate_interval"
NEUTRAL: Steps = ((None, GREY),)
EVENTS: Steps = ((None, GREEN), (1, VERMILLION))
VERDICTS_BY_CODE = {str(code.value): look for code, look in VERDICT_LOOKS.items()}
STATES_BY_CODE = {**coded(GUARD_LOOKS, GUARD_CODES), **coded(RANK_LOOKS, RANK_CODES)}
COVERAGE_BY_WORD = {c.value: look for c, look in COVERAGE_LOOKS.items()}
STATE_BY_WORD = {s.value: look for s, look in GUARD_LOOKS.items()}


def ages(limit: str) -> Steps:
    """Good up to half of the limit, bad from it on."""
    seconds = duration_seconds(limit)
    return ((None, GREEN), (seconds / 2, YELLOW), (seconds, VERMILLION))


def shares(budget: float) -> Steps:
    """Good up to half of the budget, bad from it on."""
    return ((None, GREEN), (budget / 2, YELLOW), (budget, VERMILLION))


def overhead_so_far(scope: Scope) -> str:
    """The guard's share of step time over the whole life of the process; short runs have one."""
    guard = summed(fact(last(select(OVERHEAD_TIME, scope)), scope, "check"), scope)
    steps = summed(fact(last(select(STEP_TIME, scope)), scope, "kind"), scope)
    return f"{guard} / ({steps} > 0)"


def step_and_age(title: str, description: str, step: str, age: str, steps: Steps) -> Any:
    """Two values: a step, and how long ago it was; the age carries the colour."""
    panel = stat_panel(
        title,
        description,
        Query(step, "step", kind="instant"),
        Query(age, "age", kind="instant"),
        show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="never"),
    )
    return override(panel, "age", unit="s", decimals=0, thresholds=thresholds(steps))


def suspects_table(
    title: str, scope: Scope, config: MonitorConfig, *, with_run: bool, to_suspect: bool
) -> Any:
    """Who is suspect, by which check, on what evidence."""
    who = (*run_queries.WHO, "instance_id")
    on = ", ".join((*scope.by, *who))
    strikes = run_queries.strikes(scope, *who)
    queries: tuple[str, ...] = (
        run_queries.beside_evidence(scope, run_queries.rank_code(scope, *who, held=True), on, *who),
        run_queries.evidence(scope, "bad", *who),
        run_queries.evidence(scope, "total", *who),
        run_queries.beside_evidence(
            scope, run_queries.last_step_of_check(scope), ", ".join((*scope.by, "check")), *who
        ),
        run_queries.beside_evidence(scope, f"({strikes})", on, *who),
    )
    suspect = dashboard_link(
        config,
        "suspect",
        "var-run=${__data.fields.run}&var-gpu=${__data.fields.GPU}",
    )
    run = dashboard_link(config, "run", "var-run=${__data.fields.run}")
    columns: tuple[Column, ...] = (
        Column(source="Value #A", name="State", looks=STATES_BY_CODE, width=120),
        Column(source="run", name="run", link=(run, "Open the run")),
        Column(source="rank", name="Rank", width=60),
        Column(source="node", name="Node"),
        Column(source="instance_id", name="Instance"),
        Column(
            source="gpu",
            name="GPU",
            link=(suspect, "Evidence and history of this GPU") if to_suspect else None,
        ),
        Column(source="check", name="Check", width=100),
        Column(source="Value #B", name="Wrong in", unit="none", width=80),
        Column(source="Value #C", name="of", unit="none", width=60),
        Column(source="Value #D", name="Check last fired", unit="none", width=130),
        Column(source="Value #E", name="Strikes", unit="none", width=75),
    )
    if not with_run:  # half the width: what is wrong now; strikes are history
        queries = queries[:-1]
        columns = tuple(c for c in columns if c.name not in ("run", "Strikes"))
    return table_panel(
        title,
        "Ranks named by a check: wrong in n of m comparisons (tensors, for the fingerprint check). "
        "A row means: take this rank out of the job and follow the runbook. Check last fired is "
        "the step at which the check last found anything in this run, on any rank.",
        tuple(Query(q, kind="table") for q in queries),
        columns,
        empty="✔ nobody is suspect",
    )
