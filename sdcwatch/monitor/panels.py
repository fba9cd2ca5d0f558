"""Panels and their place on the grid: the only module that knows the builders of the SDK.

Every panel has an explicit id, title, description, unit, thresholds and calculation; the SDK's
defaults for these are empty, and its own layout overflows the grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.theme import DOUBT, MUTED, Look

try:
    with warnings.catch_warnings():
        # The SDK prefers its v2 builder; file provisioning takes classic dashboards only.
        warnings.filterwarnings("ignore", message=".*dashboardv2", category=DeprecationWarning)
        from grafana_foundation_sdk.builders import (
            common,
            heatmap,
            prometheus,
            stat,
            statetimeline,
            table,
            timeseries,
        )
        from grafana_foundation_sdk.models import common as cm
        from grafana_foundation_sdk.models import dashboard as dm
        from grafana_foundation_sdk.models import heatmap as hm
        from grafana_foundation_sdk.models import prometheus as pm
except ImportError as error:
    message = (
        "Expected grafana-foundation-sdk 0.0.x (Python 3.11 or later), but it is not installed. "
        "Install it: pip install 'sdcwatch[monitor]'."
    )
    raise ConfigurationError(message) from error

_LINE = "0.0."
if not (_installed := version("grafana-foundation-sdk").lstrip("v")).startswith(_LINE):
    # A line with an epoch sorts above the maintained one and describes Grafana 10.1.
    message = (
        f"Expected grafana-foundation-sdk {_LINE}x, but got {_installed}. "
        "Install it: pip install 'sdcwatch[monitor]'."
    )
    raise ConfigurationError(message)

GRID_WIDTH = 24
VALUE_SIZE = 22
TITLE_SIZE = 13
DATASOURCE = cm.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL.
        legend: Legend or name of the series.
        kind: ``range``; ``instant`` for one value now; ``table`` for labels as columns;
            ``heatmap`` for buckets.
    """

    expr: str
    legend: str = ""
    kind: str = "range"

    def build(self, ref_id: str) -> prometheus.Dataquery:
        """The SDK's builder for it."""
        query = prometheus.Dataquery().ref_id(ref_id).expr(self.expr).datasource(DATASOURCE)
        query = query.legend_format(self.legend or "__auto")
        if self.kind == "table":
            return query.instant().format(pm.PromQueryFormat.TABLE)
        if self.kind == "instant":
            return query.instant()
        if self.kind == "heatmap":
            return query.range().format(pm.PromQueryFormat.HEATMAP)
        return query.range()


Steps = tuple[tuple[float | None, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """How a panel shows its values.

    Attributes:
        unit: Unit id of Grafana.
        steps: Thresholds: lower bound (None for the lowest) and color.
        looks: Word and color by value; beats the thresholds.
        decimals: Digits after the point.
        empty: What an empty result means, in words.
        fields: Regular expression of the fields a stat shows; empty for numbers.
        size: Of the text of a stat, in pixels: one size per line of tiles.
    """

    unit: str = "short"
    steps: Steps = ((None, MUTED),)
    looks: Mapping[str, Look] | None = None
    decimals: float | None = None
    empty: str = "no data"
    fields: str = ""
    size: int = VALUE_SIZE


def thresholds(steps: Steps) -> dm.ThresholdsConfig:
    """Explicit absolute thresholds."""
    return dm.ThresholdsConfig(
        mode=dm.ThresholdsMode.ABSOLUTE,
        steps=[dm.Threshold(value=value, color=color) for value, color in steps],
    )


def mappings(looks: Mapping[str, Look]) -> list[dm.ValueMap]:
    """Value mappings with a word and a color each."""
    options = {
        value: dm.ValueMappingResult(text=look.text, color=look.color, index=index)
        for index, (value, look) in enumerate(looks.items())
    }
    return [dm.ValueMap(options=options)]


class _Built:
    """Wraps a finished model where the SDK asks for a builder."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def build(self) -> Any:
        """The model."""
        return self._model


def _common(
    panel: Any, title: str, description: str, queries: tuple[Query, ...], show: Show
) -> Any:
    panel = panel.title(title).description(description).datasource(DATASOURCE)
    panel = panel.unit(show.unit).no_value(show.empty).thresholds(_Built(thresholds(show.steps)))
    if show.looks is not None:
        panel = panel.mappings(mappings(show.looks))
    if show.decimals is not None:
        panel = panel.decimals(show.decimals)
    for index, query in enumerate(queries):
        panel = panel.with_target(query.build(chr(ord("A") + index)))
    return panel


def override(panel: Any, field: str, **properties: Any) -> Any:
    """Give one field its own properties; ``__`` in a name stands for a dot."""
    values = [
        dm.DynamicConfigValue(id_val=name.replace("__", "."), value=value)
        for name, value in properties.items()
    ]
    return panel.override_by_name(field, values)


NONE = "none"
"""Name of the series that stands for "nothing happened"; a missing run has no series at all."""


def colored(panel: Any, colors: Mapping[str, str], pattern: str = "^{}$") -> Any:
    """Fix the color of series whose name has a word; `pattern` says where."""
    for word, color in {**colors, NONE: MUTED}.items():
        fixed = dm.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
        where = "^none$" if word == NONE else pattern.format(word)
        panel = panel.override_by_regexp(f"/{where}/", [fixed])
    return panel


def stat_panel(title: str, description: str, *queries: Query, show: Show) -> Any:
    """One or a few big values; the background carries the threshold."""
    named = any(query.legend for query in queries)
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(show.fields)
    panel = (
        _common(stat.Panel(), title, description, queries, show)
        .reduce_options(reduce)
        .graph_mode(cm.BigValueGraphMode.NONE)
        .color_mode(cm.BigValueColorMode.BACKGROUND_SOLID)
        .text_mode(cm.BigValueTextMode.VALUE_AND_NAME if named else cm.BigValueTextMode.VALUE)
        .justify_mode(cm.BigValueJustifyMode.CENTER)
        .orientation(cm.VizOrientation.AUTO)
    )
    sizes = common.VizTextDisplayOptions().value_size(show.size).title_size(TITLE_SIZE)
    return panel.text(sizes)


def series_panel(
    title: str, description: str, *queries: Query, show: Show, bars: bool = False
) -> Any:
    """Lines over time, or stacked bars for counts of events."""
    legend = (
        common.VizLegendOptions()
        .display_mode(cm.LegendDisplayMode.LIST)
        .placement(cm.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    tooltip = (
        common.VizTooltipOptions().mode(cm.TooltipDisplayMode.MULTI).sort(cm.SortOrder.DESCENDING)
    )
    panel = (
        _common(timeseries.Panel(), title, description, queries, show)
        .legend(legend)
        .tooltip(tooltip)
        .draw_style(cm.GraphDrawStyle.BARS if bars else cm.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(80 if bars else 10)
        .show_points(cm.VisibilityMode.NEVER if bars else cm.VisibilityMode.AUTO)
        .axis_soft_min(0)
    )
    if bars:
        stacking = common.StackingConfig().mode(cm.StackingMode.NORMAL).group("A")
        # Room for two: the axis of one event has the ticks 0, 1 and 2, and none in between.
        panel = panel.stacking(stacking).axis_soft_max(2)
    return panel


def budget_line(panel: Any) -> Any:
    """Draw the thresholds of a time series as dashed lines."""
    style = common.GraphThresholdsStyleConfig().mode(cm.GraphThresholdsStyleMode.DASHED)
    return panel.thresholds_style(style)


def timeline_panel(title: str, description: str, *queries: Query, show: Show) -> Any:
    """States over time, one lane each."""
    legend = (
        common.VizLegendOptions()
        .display_mode(cm.LegendDisplayMode.LIST)
        .placement(cm.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    return (
        _common(statetimeline.Panel(), title, description, queries, show)
        .show_value(cm.VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .align_value(cm.TimelineValueAlignment.LEFT)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(cm.TooltipDisplayMode.SINGLE))
        .fill_opacity(80)
        .line_width(0)
    )


def heatmap_panel(title: str, description: str, *queries: Query, show: Show) -> Any:
    """Buckets over time."""
    return (
        _common(heatmap.Panel(), title, description, queries, show)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(hm.HeatmapColorMode.SCHEME)
            .scheme("Cividis")
            .scale(hm.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
            .fill("dark-blue")
        )
        .y_axis(heatmap.YAxisConfig().unit(show.unit).axis_placement(cm.AxisPlacement.LEFT))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(cm.HeatmapCellLayout.AUTO))
        .cell_gap(1)
        .exemplars_color(DOUBT)
        .tooltip(
            heatmap.HeatmapTooltip()
            .mode(cm.TooltipDisplayMode.SINGLE)
            .y_histogram(False)
            .show_color_scale(True)
        )
        .show_legend()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        source: A label, or ``Value #A`` for the value of query A.
        name: Heading.
        unit: Unit id of Grafana; empty for text.
        looks: Word and color by value.
        steps: Thresholds that color the cell.
        link: URL behind the cell, and what it opens.
        width: In pixels.
    """

    source: str
    name: str
    unit: str = ""
    looks: Mapping[str, Look] | None = None
    steps: Steps = ()
    link: tuple[str, str] | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a table.

    Attributes:
        empty: What no row at all means, in words.
        newest_first: A label that holds a number, by which rows are sorted, highest first.
        without: Fields that queries have and the table does not show.
    """

    empty: str
    newest_first: str = ""
    without: tuple[str, ...] = ()


def table_panel(
    title: str,
    description: str,
    queries: tuple[Query, ...],
    columns: tuple[Column, ...],
    rows: Rows,
) -> Any:
    """Rows merged from queries over their labels, with named columns in a given order."""
    show = Show(unit="none", empty=rows.empty)
    panel = _common(table.Panel(), title, description, queries, show)
    hidden = dict.fromkeys(("Time", *rows.without), True)
    organize: dict[str, object] = {
        "excludeByName": hidden,
        "includeByName": {},
        "indexByName": {c.source: i for i, c in enumerate(columns)},
        "renameByName": {c.source: c.name for c in columns if c.source != c.name},
    }
    steps: list[tuple[str, dict[str, object]]] = [("merge", {}), ("organize", organize)]
    if rows.newest_first:
        number = {"targetField": rows.newest_first, "destinationType": "number"}
        steps.insert(1, ("convertFieldType", {"fields": {}, "conversions": [number]}))
        name = next(c.name for c in columns if c.source == rows.newest_first)
        steps.append(("sortBy", {"fields": {}, "sort": [{"field": name, "desc": True}]}))
    panel = panel.transformations(
        [dm.DataTransformerConfig(id_val=kind, options=options) for kind, options in steps]
    )
    for column in columns:
        properties = _column_properties(column)
        if properties:
            panel = override(panel, column.name, **properties)
    return panel.show_header(True).cell_height(cm.TableCellHeight.SM)


def _column_properties(column: Column) -> dict[str, object]:
    properties: dict[str, object] = {}
    if column.unit:
        properties["unit"] = column.unit
    if column.looks is not None:
        properties["mappings"] = mappings(column.looks)
    if column.steps:
        properties["thresholds"] = thresholds(column.steps)
    if column.looks is not None or column.steps:
        properties["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
    if column.link is not None:
        url, text_ = column.link
        properties["links"] = [{"title": text_, "url": url, "targetBlank": False}]
    if column.width is not None:
        properties["custom__width"] = column.width
    return properties


class Grid:
    """Places panels in lines of at most 24 columns, under row headings."""

    def __init__(self) -> None:
        self.items: list[dm.Panel | dm.RowPanel] = []
        self._y = 0
        self._ids: set[int] = set()

    def row(self, panel_id: int, title: str) -> None:
        """A row heading; rows are never collapsed, so that nothing is hidden from a printout."""
        row = dm.RowPanel(
            id_val=self._new(panel_id),
            title=title,
            collapsed=False,
            panels=[],
            grid_pos=dm.GridPos(h=1, w=GRID_WIDTH, x=0, y=self._y),
        )
        self.items.append(row)
        self._y += 1

    def line(self, height: int, *panels: tuple[int, int, Any]) -> None:
        """Panels side by side: id, width and builder of each."""
        x = 0
        for panel_id, width, builder in panels:
            position = dm.GridPos(h=height, w=width, x=x, y=self._y)
            self.items.append(builder.id(self._new(panel_id)).grid_pos(position).build())
            x += width
        if x != GRID_WIDTH:
            msg = f"Expected a line of {GRID_WIDTH} columns, but got {x}. Correct the widths."
            raise ValueError(msg)
        self._y += height

    def _new(self, panel_id: int) -> int:
        if panel_id in self._ids:
            msg = f"Expected panel ids to be unique, but got {panel_id} twice. Take a free one."
            raise ValueError(msg)
        self._ids.add(panel_id)
        return panel_id
