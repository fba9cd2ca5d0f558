"""What the dashboards share: variables, links, annotations, common panels, and their JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm

from sdcwatch.core.catalog import Metric
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.config import MonitorConfig, duration_seconds
from sdcwatch.monitor.panels import (
    DATASOURCE,
    Column,
    Grid,
    Query,
    Show,
    Steps,
    override,
    stat_panel,
    table_panel,
    thresholds,
)
from sdcwatch.monitor.promql import (
    GUARD_STATE,
    LAST_EVENT_TIME,
    OVERHEAD_TIME,
    STEP_TIME,
    Scope,
    fact,
    last,
    select,
    summed,
)
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

TAG = "sdcwatch"
ALL = ".+"
_DROPPED_OF_VARIABLES = ("allowCustomValue",)
_DROPPED_OF_PANELS = {
    "stat": ("percentChangeColorMode",),
    "table": ("footer",),
    "state-timeline": ("perPage",),
    "heatmap": ("selectionMode",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable filled from the values of a label.

    Attributes:
        name: Its name, and the label.
        label: What people read.
        metric: Where its values come from.
        matchers: Of the metric, e.g. earlier variables.
        multi: Several values and "All"; else exactly one.
    """

    name: str
    label: str
    metric: Metric
    matchers: tuple[str, ...] = ()
    multi: bool = True

    def build(self) -> Any:
        """The SDK's builder for it."""
        chosen = select(self.metric, Scope(self.matchers, ("run",)))
        query = f"label_values({chosen}, {self.name})"
        builder = (
            dashboard.QueryVariable(self.name)
            .label(self.label)
            .datasource(DATASOURCE)
            .query({"query": query, "refId": f"{self.name}-values"})
            .refresh(dm.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dm.VariableSort.ALPHABETICAL_ASC)
            .multi(self.multi)
            .include_all(self.multi)
        )
        return builder.all_value(ALL).current(_everything()) if self.multi else builder


def _everything() -> dm.VariableOption:
    return dm.VariableOption(text="All", value="$__all", selected=True)


def datasource_variable(config: MonitorConfig) -> Any:
    """The data source, with the configured one preselected."""
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .current(dm.VariableOption(text=config.datasource, value=config.datasource, selected=True))
    )


def scope_variables(config: MonitorConfig, *, one_run: bool) -> tuple[Variable, ...]:
    """Scope labels, job and run, each narrowed by the ones before it."""
    names = (*config.scope_labels, "job", "run")
    return tuple(
        Variable(
            name=name,
            label=name.capitalize(),
            metric=GUARD_STATE,
            matchers=tuple(f'{n}=~"${n}"' for n in names[:index]),
            multi=name != "run" or not one_run,
        )
        for index, name in enumerate(names)
    )


def dashboard_link(config: MonitorConfig, slug: str, query: str = "") -> str:
    """URL of another of our dashboards, on the same Grafana, with the time range."""
    variables = "&".join(("var-datasource=${datasource}", "${__url_time_range}"))
    return f"/d/{config.uid_prefix}-{slug}?{f'{query}&' if query else ''}{variables}"


def _links(config: MonitorConfig) -> list[Any]:
    links = [
        dashboard.DashboardLink("sdcwatch")
        .type(dm.DashboardLinkType.DASHBOARDS)
        .icon("external link")
        .tooltip("Fleet, Run and Suspect, with the same run and time")
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    ]
    fleet = f"/d/{config.uid_prefix}-fleet"
    targets = [("Back to fleet", fleet, "All guarded runs", "dashboard", False)]
    if config.runbook_url:
        targets.append(("Runbook", config.runbook_url, "What to do, per alert", "doc", True))
    for title, url, tooltip, icon, blank in targets:
        links.append(
            dashboard.DashboardLink(title)
            .type(dm.DashboardLinkType.LINK)
            .icon(icon)
            .tooltip(tooltip)
            .url(url)
            .keep_time(not blank)
            .target_blank(blank)
        )
    return links


def _annotations(scope: Scope) -> list[Any]:
    events = fact(f"{select(LAST_EVENT_TIME, scope)} > 0", scope, "check")
    builtin = (
        dashboard.AnnotationQuery()
        .name("Annotations & Alerts")
        .datasource(cm.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
        .enable(True)
        .hide(True)
        .icon_color(GREY)
        .type("dashboard")
        .built_in(1)
    )
    findings = (
        dashboard.AnnotationQuery()
        .name("Findings")
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(VERMILLION)
        # The value is the time of the event: the mark stands there, whenever it was scraped.
        .target(Query(f"{events} * 1000").build("Anno"))
        .use_value_for_time(True)
        .title_format("{{check}} check found something")
        .text_format("run {{run}}")
        .tag_keys("run,check")
    )
    return [builtin, findings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard before it becomes JSON.

    Attributes:
        slug: End of its UID and file name.
        title: Its title.
        description: What it answers.
        variables: In order, after the data source.
        grid: Its panels.
        scope: For the annotations.
        time_from: Start of the default range.
    """

    slug: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    grid: Grid
    scope: Scope
    time_from: str


def to_json(board: Board, config: MonitorConfig) -> str:
    """The dashboard as file provisioning and the import dialogue take it."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(f"{config.uid_prefix}-{board.slug}")
        .description(board.description)
        .tags([TAG, "generated"])
        .timezone("utc")
        .tooltip(dm.DashboardCursorSync.CROSSHAIR)
        .time(board.time_from, "now")
        .refresh(config.refresh)
        .editable()
        .annotations(_annotations(board.scope))
        .links(_links(config))
        .variables([datasource_variable(config), *(v.build() for v in board.variables)])
    )
    model = builder.build()
    model.panels = board.grid.items  # placed by us: the SDK's own layout overflows the grid
    data = json.loads(json.dumps(model, cls=JSONEncoder))
    return json.dumps(_portable(data), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Drop what Grafana 10 to 13 do not all know: the SDK emits fields of the newest line."""
    for variable in data["templating"]["list"]:
        for key in [k for k in variable if k.startswith("auto") or k in _DROPPED_OF_VARIABLES]:
            del variable[key]
    for link in data["links"]:
        link.pop("placement", None)  # would hide the links in a menu
    for annotation in data["annotations"]["list"]:
        annotation.pop("placement", None)
    for panel in data["panels"]:
        for option in _DROPPED_OF_PANELS.get(panel["type"], ()):
            panel["options"].pop(option, None)
    return data


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
    who = (*run_queries.WHO, "suspect_instance_id")
    on = ", ".join((*scope.by, *who))
    strikes = run_queries.strikes(scope, *who)
    queries: tuple[str, ...] = (
        run_queries.beside_evidence(scope, run_queries.rank_code(scope, *who, held=True), on, *who),
        run_queries.evidence(scope, "mismatches", *who),
        run_queries.evidence(scope, "comparisons", *who),
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
        Column(source="suspect_rank", name="Rank", width=60),
        Column(source="suspect_node", name="Node"),
        Column(source="suspect_instance_id", name="Instance"),
        Column(
            source="suspect_gpu",
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
