"""What the dashboards share: variables, links, annotations, common panels, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm

from sdcwatch.core.catalog import GUARD_STATE, LAST_EVENT_TIME, VERDICTS, Metric
from sdcwatch.core.records import Outcome
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.config import MonitorConfig, duration_seconds
from sdcwatch.monitor.panels import (
    DATASOURCE,
    NONE,
    Column,
    Grid,
    Query,
    Rows,
    Show,
    Steps,
    colored,
    override,
    series_panel,
    stat_panel,
    table_panel,
    thresholds,
)
from sdcwatch.monitor.promql import Scope, dedup_exporters, select, variable_matcher
from sdcwatch.monitor.theme import (
    BROKEN,
    CAUTION,
    ENDED,
    ENDED_LOOK,
    GOOD,
    MUTED,
    OUTCOME_COLORS,
    STATES_BY_CODE,
)

TAG = "sdcwatch"
ALL = ".+"
ANNOTATION_STEP = "15s"
"""Findings of one check nearer than this become one mark."""
_DROPPED_OF_VARIABLES = ("allowCustomValue",)
_DROPPED_OF_PANELS = {
    "stat": ("percentChangeColorMode", "showPercentChange"),
    "table": ("footer",),
    "state-timeline": ("perPage",),
    "heatmap": ("selectionMode", "tooltip"),
}
"""What the SDK writes and Grafana 10.2 does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable filled from the values of a label.

    Attributes:
        name: Its name.
        label: What people read.
        metric: Where its values come from.
        of: The label; empty if it is the name.
        matchers: Of the metric, e.g. earlier variables.
        multi: Several values and "All"; else exactly one.
    """

    name: str
    label: str
    metric: Metric
    of: str = ""
    matchers: tuple[str, ...] = ()
    multi: bool = True

    def build(self) -> Any:
        """The SDK's builder for it."""
        chosen = select(self.metric, Scope(self.matchers, ("run",)))
        query = f"label_values({chosen}, {self.of or self.name})"
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
            matchers=tuple(variable_matcher(n) for n in names[:index]),
            multi=name != "run" or not one_run,
        )
        for index, name in enumerate(names)
    )


def dashboard_link(config: MonitorConfig, slug: str, row: bool = True, **variables: str) -> str:
    """URL of another of our dashboards, on the same Grafana, with the time range.

    Args:
        config: Scope labels are passed on.
        slug: Of the dashboard.
        row: The link is in a row of a table, whose scope labels are passed on.
        **variables: Variable to a field of the row, or to a text if it starts with a dollar.
    """
    scope = {name: name for name in config.scope_labels} if row else {}
    values = {
        name: value if value.startswith("$") else f"${{__data.fields.{value}:percentencode}}"
        for name, value in {**scope, **variables}.items()
    }
    query = [f"var-{name}={value}" for name, value in values.items()]
    query += ["var-datasource=${datasource}", "${__url_time_range}"]
    return f"/d/{config.uid_prefix}-{slug}?{'&'.join(query)}"


def _links(board: Board, config: MonitorConfig) -> list[Any]:
    kept = [v.name for v in board.variables if v.name not in ("run", "gpu", "job")]
    scope = "".join(f"&${{{name}:queryparam}}" for name in kept)
    start = "var-datasource=${datasource}" + scope
    targets = [("Fleet", f"/d/{config.uid_prefix}-fleet?{start}", "All guarded runs", "dashboard")]
    if board.slug == "run":
        run = f"{start}&${{run:queryparam}}"
        url = f"/d/{config.uid_prefix}-suspect?{run}"
        targets.append(("Suspect", url, "The suspect devices of this run", "dashboard"))
    if config.runbook_url:
        targets.append(("Runbook", config.runbook_url, "What to do, per alert", "doc"))
    return [
        dashboard.DashboardLink(title)
        .type(dm.DashboardLinkType.LINK)
        .icon(icon)
        .tooltip(tooltip)
        .url(url)
        .keep_time(icon == "dashboard")
        .target_blank(icon == "doc")
        for title, url, tooltip, icon in targets
    ]


def _findings_annotation(scope: Scope) -> Any:
    events = dedup_exporters(f"{select(LAST_EVENT_TIME, scope)} > 0", scope, "check")
    return (
        dashboard.AnnotationQuery()
        .name("Findings")
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(BROKEN)
        # The value is the time of the event: the mark stands there, whenever it was scraped.
        .target(Query(f"{events} * 1000").build("Anno").interval(ANNOTATION_STEP))
        .use_value_for_time(True)
        .title_format("{{check}} check found something")
        .text_format("run {{run}}")
        .tag_keys("run,check")
    )


def _annotations(scope: Scope) -> list[Any]:
    builtin = (
        dashboard.AnnotationQuery()
        .name("Annotations & Alerts")
        .datasource(cm.DataSourceRef(type_val="grafana", uid="-- Grafana --"))
        .enable(True)
        .hide(True)
        .icon_color(MUTED)
        .type("dashboard")
        .built_in(1)
    )
    return [builtin, _findings_annotation(scope)]


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
        .links(_links(board, config))
        .variables([datasource_variable(config), *(v.build() for v in board.variables)])
    )
    model = builder.build()
    model.panels = board.grid.items  # placed by us: the SDK's own layout overflows the grid
    data = json.loads(json.dumps(model, cls=JSONEncoder))
    return json.dumps(_portable(data), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Drop what Grafana 10.2 to 13 do not all know, and write annotations in both known forms."""
    for variable in data["templating"]["list"]:
        for key in [k for k in variable if k.startswith("auto") or k in _DROPPED_OF_VARIABLES]:
            del variable[key]
    for link in data["links"]:
        link.pop("placement", None)  # would hide the links in a menu
    for annotation in data["annotations"]["list"]:
        annotation.pop("placement", None)
        if target := annotation.get("target"):
            # Grafana's Prometheus data source read these of the annotation itself, and later ones
            # fall back on them where a target lacks them.
            annotation["expr"], annotation["step"] = target["expr"], ANNOTATION_STEP
    for panel in data["panels"]:
        for option in _DROPPED_OF_PANELS.get(panel["type"], ()):
            panel["options"].pop(option, None)
    return data


RATE = "$__rate_interval"
NEUTRAL: Steps = ((None, MUTED),)
EVENTS: Steps = ((None, MUTED), (0, GOOD), (1, BROKEN))
COSTS: Steps = ((None, MUTED), (0, GOOD), (1, CAUTION))
COUNTS = Show(unit="none", decimals=0, steps=NEUTRAL)
NO_RUN = "no such run"


def ages(limit: str) -> Steps:
    """Good up to half of the limit, bad from it on; grey where there is no age."""
    return shares(duration_seconds(limit))


def shares(budget: float) -> Steps:
    """Good up to half of the budget, bad from it on; grey where there is no value."""
    return ((None, MUTED), (0, GOOD), (budget / 2, CAUTION), (budget, BROKEN))


ENDED_BY_VALUE = {str(ENDED): ENDED_LOOK}


def step_and_age(title: str, description: str, step: str, age: str, steps: Steps) -> Any:
    """Two values: a step, and how long ago it was; the age carries the color."""
    panel = stat_panel(
        title,
        description,
        Query(step, "step", kind="instant"),
        Query(age, "age", kind="instant"),
        show=Show(unit="none", decimals=0, steps=NEUTRAL, empty="never"),
    )
    return override(panel, "age", unit="s", decimals=0, thresholds=thresholds(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What a panel of bars counts.

    Attributes:
        metric: The counter.
        labels: What tells its bars apart.
        legend: Their name.
        colors: Color by the word in the name.
        pattern: Where in the name the word stands.
        outcomes: Of verdicts: only these.
    """

    metric: Metric
    labels: tuple[str, ...]
    legend: str
    colors: Mapping[str, str]
    pattern: str = "^{}$"
    outcomes: tuple[Outcome, ...] = ()


def event_bars(title: str, description: str, scope: Scope, events: Events) -> Any:
    """Bars of height one per event; a run without one shows "none", a missing run no data."""
    counted = run_queries.bars(events.metric, scope, *events.labels, outcomes=events.outcomes)
    nothing = run_queries.nothing_happened(events.metric, scope, events.outcomes)
    panel = series_panel(
        title,
        description,
        Query(counted, events.legend),
        Query(nothing, NONE),
        show=COUNTS,
        bars=True,
    )
    return colored(panel, events.colors, events.pattern)


FINDINGS = Events(
    metric=VERDICTS,
    labels=("check", "outcome"),
    legend="{{check}}: {{outcome}}",
    colors=OUTCOME_COLORS,
    pattern=": {}$",
    outcomes=run_queries.FINDINGS,
)
"""Verdicts that are not a pass, by check and outcome."""


def suspects_table(
    title: str, scope: Scope, config: MonitorConfig, *, with_run: bool, to_suspect: bool
) -> Any:
    """Who is suspect, by which check, on what evidence."""
    who = run_queries.WHO
    on, rows = scope.labels(*who), (*who, "check")
    wrong_in = run_queries.wrong_in(scope, *rows)
    states = run_queries.rank_state(scope, *who)
    device = scope.labels(*run_queries.DEVICE)
    operators = run_queries.operators(scope)
    known = f"({wrong_in}) * on ({device}) group_left (operator) ({operators})"
    named = f"({known} or on ({scope.labels(*rows)}) ({wrong_in})) * on ({on}) group_left ()"
    beside = f"{run_queries.evidence(scope, 'mismatches', *rows)} * 0 + on ({on}) group_left ()"
    queries = (
        run_queries.or_nobody(f"{named} ({states})", scope),
        f"{beside} ({run_queries.last_finding(scope, *who)})",
        f"{beside} ({run_queries.strikes(scope, *who)})",
    )
    suspect = dashboard_link(
        config, "suspect", run="Run" if with_run else "${run:percentencode}", gpu="GPU"
    )
    run = dashboard_link(config, "run", run="Run")
    gpu_link = (suspect, "Evidence and history of this GPU") if to_suspect else None
    shown = Column(source="run", name="Run", link=(run, "Open the run"))
    columns: tuple[Column, ...] = (
        Column(source="Value #A", name="State", looks=STATES_BY_CODE, width=100),
        *(Column(source=label, name=label) for label in config.scope_labels),
        *((shown,) if with_run else ()),
        Column(source="suspect_rank", name="Rank", width=60),
        Column(source="suspect_node", name="Node"),
        Column(source="suspect_instance_id", name="Instance"),
        Column(source="suspect_gpu", name="GPU", link=gpu_link),
        Column(source="check", name="Check", width=95),
        Column(source="wrong_in", name="Wrong in", width=85),
        Column(source="Value #B", name="Last at step", unit="none", width=95),
        Column(source="operator", name="Operation", width=150),
        Column(source="Value #C", name="Strikes", unit="none", width=70),
    )
    return table_panel(
        title,
        "Devices named by a check, wrong in n of m comparisons (tensors, for the fingerprint "
        "check). A row means: take this machine out of the job and follow the runbook. It stays "
        "until somebody closes it with `sdcwatch close`, wherever the run goes on.",
        tuple(Query(q, kind="table") for q in queries),
        columns,
        Rows(empty=NO_RUN, without=() if with_run else ("run",)),
    )
