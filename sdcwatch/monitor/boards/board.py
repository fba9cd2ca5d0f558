"""What the dashboards share: variables, links, annotations, and their JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm

from sdcwatch.core.catalog import Metric
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.panels import DATASOURCE, Grid, Query
from sdcwatch.monitor.promql import GUARD_STATE, LAST_EVENT_TIME, Scope, fact, select
from sdcwatch.monitor.theme import GREY, VERMILLION

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
