"""The pictures of the report, as plain values that plotly.js draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdcwatch.core.grade import named_ranks
from sdcwatch.core.outcomes import CHECKPOINTS, COLORS, Role, is_alarm
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Progress,
    Record,
    RunStarted,
    Verdict,
)
from sdcwatch.core.text import CHECK_NAMES
from sdcwatch.core.topology import RankInfo
from sdcwatch.report.words import TEXT_COLOR, mark

Figure = dict[str, Any]

_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": TEXT_COLOR}
_GRID = "#e5e7eb"


def _layout(height: int, **axes: Any) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 10, "b": 48},
        "font": _FONT,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **axes,
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": _GRID, "zeroline": False, **more}


def segments_of(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each segment: a run that was resumed has several."""
    segments: list[list[Record]] = []
    for record in records:
        if isinstance(record, RunStarted) or not segments:
            segments.append([])
        segments[-1].append(record)
    return segments


def loss_figure(records: Sequence[Record]) -> Figure:
    """Loss against step, one line per segment, with verdicts and checkpoints on it."""
    traces: list[dict[str, Any]] = []
    for number, segment in enumerate(segments_of(records), start=1):
        points = [(r.step, r.loss) for r in segment if isinstance(r, Progress)]
        finite = [(s, v) for s, v in points if v is not None and abs(v) < float("inf")]
        if not finite:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "loss" if number == 1 else f"loss, segment {number}",
                "x": [s for s, _ in finite],
                "y": [v for _, v in finite],
                "line": {
                    "color": COLORS[Role.SOFTWARE],
                    "width": 2,
                    "dash": "solid" if number == 1 else "dot",
                },
                "hovertemplate": "step %{x}<br>loss %{y:.4f}<extra></extra>",
            }
        )
        traces += _on_the_line(segment, finite)
    axes = {"xaxis": _axis("step", rangemode="tozero"), "yaxis": _axis("loss of rank 0")}
    return {"data": _named_once(traces), "layout": _layout(380, **axes)}


def _on_the_line(
    segment: Sequence[Record], points: Sequence[tuple[int, float]]
) -> list[dict[str, Any]]:
    """Markers for what happened, at the height of the loss."""
    traces = []
    for record in segment:
        if isinstance(record, Verdict) and is_alarm(record):
            look = mark(record.outcome)
            text = f"step {record.step} · {CHECK_NAMES[record.check]}: {look.word}"
            style = {"symbol": look.shape, "color": look.color, "size": 12}
            traces.append(_marker(record.step, points, f"{look.symbol} {look.word}", style, text))
        elif isinstance(record, CheckpointEvent):
            kept_back = record.result is CheckpointResult.WITHHELD
            word = f"checkpoint {record.result.value}"
            color = COLORS[CHECKPOINTS[record.result].role]
            shape = "square-x-open" if kept_back else "square-open"
            style = {"symbol": shape, "color": color, "size": 10, "line": {"width": 2}}
            text = f"step {record.step} · {word} ({record.reason.value})"
            traces.append(_marker(record.step, points, word, style, text))
    return traces


def _marker(
    step: int,
    points: Sequence[tuple[int, float]],
    name: str,
    style: Mapping[str, Any],
    text: str,
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step],
        "y": [_height_at(step, points)],
        "marker": {"line": {"width": 2, "color": style["color"]}, **style},
        "hovertext": [text],
        "hoverinfo": "text",
    }


def _height_at(step: int, points: Sequence[tuple[int, float]]) -> float:
    """The loss at a step, interpolated between the reports around it."""
    before, after = points[0], points[-1]
    for point in points:
        if point[0] <= step:
            before = point
        elif point[0] < after[0] or after[0] <= step:
            after = point
            break
    if after[0] <= before[0]:
        return before[1]
    share = (step - before[0]) / (after[0] - before[0])
    return before[1] + min(1.0, max(0.0, share)) * (after[1] - before[1])


def _named_once(traces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let each name stand in the legend once, and switch all its markers together."""
    seen: set[str] = set()
    for trace in traces:
        trace["legendgroup"] = trace["name"]
        trace.setdefault("showlegend", trace["name"] not in seen)
        seen.add(trace["name"])
    return traces


def ranks_figure(records: Sequence[Record], ranks: Sequence[RankInfo]) -> Figure:
    """Ranks against steps: who was named when, by which check, and who only saw it."""
    labels = [f"rank {r.rank} · {r.node}" for r in ranks]
    traces: list[dict[str, Any]] = []
    for verdict in (r for r in records if isinstance(r, Verdict) and is_alarm(r)):
        named = set(named_ranks(verdict))
        traces += [_cell(verdict, rank, labels[rank], named=True) for rank in sorted(named)]
        others = sorted(set(verdict.ranks) - named)
        traces += [_cell(verdict, rank, labels[rank], named=False) for rank in others]
    resumed = [r.step for r in records if isinstance(r, RunStarted) and r.step]
    shapes = [_line_at(step, COLORS[Role.MUTED], "dash") for step in resumed]
    last = max((r.step for r in records), default=1)
    axes = {
        "xaxis": _axis("step", range=[0, last * 1.02]),
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": labels[::-1],
            "range": [-0.5, len(labels) - 0.5],
            "gridcolor": _GRID,
            "automargin": True,
        },
    }
    # An invisible point per rank keeps every row, also of those that nothing happened to.
    traces.append(_rows(labels))
    layout = _layout(110 + 30 * min(len(labels), 40), shapes=shapes, **axes)
    return {"data": _named_once(traces), "layout": layout}


def _rows(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "rows",
        "x": [0] * len(labels),
        "y": list(labels),
        "marker": {"opacity": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _cell(verdict: Verdict, rank: int, label: str, *, named: bool) -> dict[str, Any]:
    look = mark(verdict.outcome)
    color = look.color if named else COLORS[Role.MUTED]
    shape = look.shape if named else "circle-open"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{look.symbol} {look.word}" if named else "○ saw it, not blamed",
        "x": [verdict.step],
        "y": [label],
        "marker": {
            "symbol": shape,
            "color": color,
            "size": 14,
            "line": {"width": 2, "color": color},
        },
        "hovertext": [
            f"rank {rank}, step {verdict.step}<br>{CHECK_NAMES[verdict.check]}: {look.word}"
        ],
        "hoverinfo": "text",
    }


def _line_at(step: int, color: str, dash: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "line": {"color": color, "width": 1, "dash": dash},
    }


def overhead_figure(seconds: Mapping[str, float], total: float) -> Figure:
    """Wall time of the guard by check, beside the rest of the steps."""
    # Shades of one neutral hue: what a check costs is neither good nor bad.
    shades = dict(
        zip((check.value for check in Check), ("#9ca3af", "#6b7280", "#374151"), strict=True)
    )
    names = {check.value: name for check, name in CHECK_NAMES.items()}
    rest = max(0.0, total - sum(seconds.values()))
    parts = [(names.get(c, c), s, shades.get(c, TEXT_COLOR)) for c, s in seconds.items()]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [value],
            "y": ["steps"],
            "marker": {"color": color},
            "text": [f"{value / total:.1%}" if total else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": f"{name}: %{{x:.2f}} s<extra></extra>",
        }
        for name, value, color in [("training itself", rest, "#d1d5db"), *parts]
    ]
    layout = _layout(150, xaxis=_axis("seconds"), yaxis={"showticklabels": False})
    layout["barmode"] = "stack"
    layout["margin"]["l"] = 20
    return {"data": traces, "layout": layout}
