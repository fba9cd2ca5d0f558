"""Panels as HTML and SVG, after the options in the generated JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from itertools import pairwise
from typing import Any

SERIES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2", "#8C8C8C")
Results = list[tuple[dict[str, Any], Any]]


@dataclass(frozen=True, slots=True)
class Box:
    """Size of a panel in pixels."""

    width: float
    height: float


def clock(seconds: float) -> str:
    """A time of day, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M:%S")


def text(value: float, unit: str, decimals: float | None) -> str:
    """A number with its unit, as Grafana writes it."""
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else int(decimals)}f}%"
    if unit == "s":
        return duration(value, decimals)
    digits = int(decimals) if decimals is not None else (0 if value == round(value) else 2)
    return f"{value:.{digits}f}"


def duration(value: float, decimals: float | None) -> str:
    """Seconds in the largest unit below them."""
    for limit, size, name in ((1e-3, 1e-6, "µs"), (1, 1e-3, "ms"), (60, 1, "s"), (3600, 60, "min"),
                              (86400, 3600, "h"), (math.inf, 86400, "d")):  # fmt: skip
        if abs(value) < limit:
            digits = 1 if decimals is None or size > 1 else int(decimals)
            return f"{value / size:.{digits}f} {name}" if value else f"0 {name}"
    return "∞"


def look(value: str, defaults: dict[str, Any]) -> tuple[str, str] | None:
    """Word and colour of a mapped value."""
    for mapping in defaults.get("mappings", ()):
        if value in mapping["options"]:
            found = mapping["options"][value]
            return found["text"], found["color"]
    return None


def color(value: float, defaults: dict[str, Any]) -> str:
    """Colour of a value by threshold."""
    chosen = "#8C8C8C"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            chosen = step["color"]
    return chosen


def legend(target: dict[str, Any], metric: dict[str, str]) -> str:
    """Name of a series."""
    form = target.get("legendFormat", "__auto")
    if form == "__auto":
        return ", ".join(v for k, v in metric.items() if k != "__name__") or "value"
    return re.sub(r"\{\{(\w+)\}\}", lambda m: metric.get(m[1], ""), form)


def overridden(panel: dict[str, Any], name: str) -> dict[str, Any]:
    """The field configuration of one field."""
    config = dict(panel["fieldConfig"]["defaults"])
    for override in panel["fieldConfig"].get("overrides", ()):
        matcher = override["matcher"]
        hit = matcher["options"] == name if matcher["id"] == "byName" else False
        if matcher["id"] == "byRegexp":
            hit = re.search(matcher["options"].strip("/"), name) is not None
        if hit:
            config.update({p["id"]: p["value"] for p in override["properties"]})
    return config


def body(
    panel: dict[str, Any],
    results: Results,
    box: Box,
    span: tuple[float, float],
    marks: list[float],
) -> str:
    """The inside of a panel below its title."""
    if not any(result for _, result in results):
        empty = panel["fieldConfig"]["defaults"]["noValue"]
        if panel["type"] == "stat":
            return _tiles([("", empty, color(0, panel["fieldConfig"]["defaults"]))], box)
        return f'<div class="empty">{escape(empty)}</div>'
    kind = panel["type"]
    if kind == "stat":
        return _stat(panel, results, box)
    if kind == "table":
        return _table(panel, results)
    if kind == "state-timeline":
        return _timeline(panel, results, box, span)
    if kind == "heatmap":
        return _heatmap(results, box, span)
    return _series(panel, results, box, span, marks)


def _tiles(values: list[tuple[str, str, str]], box: Box) -> str:
    parts = []
    for name, word, shade in values:
        size = min(34, 1.25 * box.width / len(values) / max(4, len(word)))
        label = f"<span>{escape(name)}</span>" if name else ""
        parts.append(
            f'<div class="value" style="background:{shade};font-size:{size:.0f}px">'
            f"{label}{escape(word)}</div>"
        )
    return f'<div class="stat">{"".join(parts)}</div>'


def _stat(panel: dict[str, Any], results: Results, box: Box) -> str:
    field = panel["options"]["reduceOptions"].get("fields", "").strip("/^$")
    values = []
    named = panel["options"]["textMode"] == "value_and_name"
    for target, result in results:
        if not result:
            name = legend(target, {}) if named else ""
            config = overridden(panel, name)
            values.append((name, config["noValue"], color(0, config)))
        for series in result:
            name = legend(target, series["metric"]) if named else ""
            raw = series["metric"][field] if field else series["value"][1]
            values.append((name, *_big(raw, overridden(panel, name))))
    return _tiles(values, box)


def _big(raw: str, config: dict[str, Any]) -> tuple[str, str]:
    """Word and colour of a value of a stat."""
    if (found := look(raw, config)) is not None:
        return found
    if not _number(raw):  # the value of a label
        return raw, color(0, config)
    number = float(raw)
    return text(number, config["unit"], config.get("decimals")), color(number, config)


def _table(panel: dict[str, Any], results: Results) -> str:
    organize = next(t for t in panel["transformations"] if t["id"] == "organize")["options"]
    rows: dict[tuple[tuple[str, str | None], ...], dict[str, str]] = {}
    names_of = [{k for s in result for k in s["metric"]} for _, result in results if result]
    shared = set.intersection(*names_of) - {"__name__"} if names_of else set()
    for target, result in results:
        value = f"Value #{target['refId']}" if len(results) > 1 else "Value"
        for series in result:
            labels = {k: v for k, v in series["metric"].items() if k != "__name__"}
            # As Grafana's merge does it: rows are one where the labels agree that all queries have.
            row = rows.setdefault(tuple(sorted((k, labels.get(k)) for k in shared)), {})
            row |= labels
            row[value] = series["value"][1]
    order = sorted(organize["indexByName"], key=organize["indexByName"].get)
    names = {source: organize["renameByName"].get(source, source) for source in order}
    head = "".join(f"<th>{escape(names[s])}</th>" for s in order)
    shown = list(rows.values())
    for sorting in (t["options"]["sort"] for t in panel["transformations"] if t["id"] == "sortBy"):
        source = next(key for key, name in names.items() if name == sorting[0]["field"])
        shown.sort(key=lambda row: float(row.get(source) or 0), reverse=sorting[0]["desc"])
    lines = []
    for row in shown:
        cells = "".join(_cell(panel, names[s], row.get(s, "")) for s in order)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _cell(panel: dict[str, Any], name: str, raw: str) -> str:
    config = overridden(panel, name)
    found = look(raw, config)
    style = ""
    shown = raw
    if found is not None:
        shown, shade = found
        style = f"background:{shade};color:#0b0c0e"
    elif raw and _number(raw):
        value = float(raw)
        if config["unit"] != "none" or name not in ("Rank",):
            shown = text(value, config["unit"], config.get("decimals"))
        if "custom.cellOptions" in config:
            style = f"background:{color(value, config)};color:#0b0c0e"
    if config.get("links"):
        style += ";text-decoration:underline"
    return f'<td style="{style}">{escape(shown)}</td>'


def _number(raw: str) -> bool:
    try:
        float(raw)
    except ValueError:
        return False
    return True


def _names(results: Results) -> list[tuple[str, list[tuple[float, float]]]]:
    return [
        (legend(t, s["metric"]), [(float(at), float(v)) for at, v in s["values"]])
        for t, result in results
        for s in result
    ]


def _axis(
    box: Box, span: tuple[float, float], left: float, bottom: float, edge: float = 12.0
) -> str:
    ticks = max(2, int(box.width // 190))
    parts = []
    for i in range(ticks + 1):
        at = span[0] + (span[1] - span[0]) * i / ticks
        x = left + (box.width - left - edge) * i / ticks
        anchor = "start" if i == 0 else ("end" if i == ticks else "middle")
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="{anchor}">{clock(at)}</text>'
        )
    return "".join(parts)


def _series(
    panel: dict[str, Any],
    results: Results,
    box: Box,
    span: tuple[float, float],
    marks: list[float],
) -> str:
    series = _names(results)
    series = [(n, p) for n, p in series if any(v for _, v in p)] or series[:1]
    right = {n for n, _ in series if overridden(panel, n).get("custom.axisPlacement") == "right"}
    bars = panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] == "bars"
    left, top, bottom = 52.0, 4.0, box.height - 22 - 38
    defaults = panel["fieldConfig"]["defaults"]
    highs = {
        side: _top([p for n, p in series if (n in right) == side], bars) for side in (False, True)
    }
    whole = defaults.get("decimals") == 0
    ticks = {side: _ticks(high, whole) for side, high in highs.items()}
    tops = {side: at[-1] * 1.04 for side, at in ticks.items()}
    edge = 48.0 if right else 12.0
    shades = {
        n: overridden(panel, n).get("color", {}).get("fixedColor") or SERIES[i % len(SERIES)]
        for i, (n, _) in enumerate(series)
    }
    base: dict[float, float] = {}
    parts = []
    for value in ticks[False]:
        y = bottom - (bottom - top) * value / tops[False]
        shown = text(value, defaults["unit"], defaults.get("decimals"))
        parts.append(f'<line x1="{left}" x2="{box.width - edge}" y1="{y:.0f}" y2="{y:.0f}" '
                     f'stroke="#26292e"/><text x="{left - 6}" y="{y + 4:.0f}" '
                     f'text-anchor="end">{shown}</text>')  # fmt: skip
    for value in ticks[True] if right else ():
        y = bottom - (bottom - top) * value / tops[True]
        parts.append(f'<text x="{box.width - edge + 6}" y="{y + 4:.0f}">{value:.0f}</text>')
    scale = (box.width - left - edge) / (span[1] - span[0])
    for mark in marks:
        x = left + (mark - span[0]) * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" '
                     'stroke="#D55E00" stroke-dasharray="3 3"/>')  # fmt: skip
    for name, points in series:
        high = tops[name in right]
        if bars:
            parts += _bars(points, base, shades[name], (left, scale, span[0]), (bottom, top, high))
            continue
        path = " ".join(
            f"{left + (at - span[0]) * scale:.1f},{bottom - (bottom - top) * min(1, v / high):.1f}"
            for at, v in points
            if math.isfinite(v)
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{shades[name]}" '
                     'stroke-width="1.4"/>')  # fmt: skip
    if defaults["custom"].get("thresholdsStyle", {}).get("mode") == "dashed":
        for step in defaults["thresholds"]["steps"][1:]:
            y = bottom - (bottom - top) * min(1, step["value"] / tops[False])
            parts.append(f'<line x1="{left}" x2="{box.width - edge}" y1="{y:.0f}" y2="{y:.0f}" '
                         f'stroke="{step["color"]}" stroke-dasharray="6 4"/>')  # fmt: skip
    parts.append(_axis(box, span, left, bottom, edge))
    return _svg(parts, box) + _legend(shades, box)


def _bars(
    points: list[tuple[float, float]],
    base: dict[float, float],
    shade: str,
    x_axis: tuple[float, float, float],
    y_axis: tuple[float, float, float],
) -> list[str]:
    left, scale, start = x_axis
    bottom, top, high = y_axis
    parts = []
    for at, value in points:
        if value > 0:
            low = base.get(at, 0.0)
            base[at] = low + value
            y = bottom - (bottom - top) * min(1, (low + value) / high)
            height = (bottom - top) * value / high
            x = left + (at - start) * scale
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="3" height="{height:.1f}" '
                         f'fill="{shade}"/>')  # fmt: skip
    return parts


def _top(series: list[list[tuple[float, float]]], bars: bool) -> float:
    totals: dict[float, float] = {}
    for points in series:
        for at, value in points:
            if math.isfinite(value):
                totals[at] = totals.get(at, 0) + value if bars else max(totals.get(at, 0), value)
    return max(totals.values(), default=0) or 1.0


def _ticks(high: float, whole: bool) -> list[float]:
    """Values that an axis names, from 0 to at least `high`; whole numbers for what is counted."""
    if not whole:
        return [high * 1.04 * i / 3 for i in range(4)]
    step = math.ceil(high / 3)
    return [float(step * i) for i in range(math.ceil(high / step) + 1)]


def _legend(shades: dict[str, str], box: Box) -> str:
    items = "".join(f'<i style="background:{c}"></i>{escape(n)}' for n, c in shades.items())
    wide = sum(24 + 6.2 * len(name) for name in shades)
    size = min(11.0, 11.0 * (box.width - 16) / max(1.0, wide))  # as small as it takes to be whole
    return f'<div class="legend" style="font-size:{size:.1f}px">{items}</div>'


def _svg(parts: list[str], box: Box) -> str:
    return f'<svg width="{box.width:.0f}" height="{box.height - 40:.0f}">{"".join(parts)}</svg>'


def _timeline(panel: dict[str, Any], results: Results, box: Box, span: tuple[float, float]) -> str:
    series = _names(results)
    left, bottom = 290.0, box.height - 22 - 38
    lane = min(34.0, bottom / max(1, len(series)))
    scale = (box.width - left - 12) / (span[1] - span[0])
    parts = []
    for index, (name, points) in enumerate(series):
        y = index * lane
        parts.append(f'<text x="{left - 8}" y="{y + lane / 2 + 4:.0f}" text-anchor="end">'
                     f"{escape(name)}</text>")  # fmt: skip
        for start, end, value in _stretches(points):
            word, shade = look(f"{value:.0f}", panel["fieldConfig"]["defaults"]) or ("?", "#8C8C8C")
            x, width = left + (start - span[0]) * scale, max(2.0, (end - start) * scale)
            parts.append(f'<rect x="{x:.1f}" y="{y + 3:.0f}" width="{width:.1f}" '
                         f'height="{lane - 6:.0f}" fill="{shade}"/>')  # fmt: skip
            if width > 7 * len(word):
                parts.append(f'<text x="{x + 6:.1f}" y="{y + lane / 2 + 4:.0f}" '
                             f'style="fill:#0b0c0e">{escape(word)}</text>')  # fmt: skip
    parts.append(_axis(box, span, left, bottom))
    return _svg(parts, box)


def _stretches(points: list[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Start, end and value of equal neighbours; a gap of several steps ends one."""
    step = min((b[0] - a[0] for a, b in pairwise(points)), default=1.0)
    found: list[list[float]] = []
    for at, value in points:
        if found and found[-1][2] == value and at - found[-1][1] <= 2 * step:
            found[-1][1] = at
        else:
            if found and at - found[-1][1] <= 2 * step:
                found[-1][1] = at
            found.append([at, at + step, value])
    return [(a, b, v) for a, b, v in found]


def _heatmap(results: Results, box: Box, span: tuple[float, float]) -> str:
    (_, result), *_ = results
    ordered = sorted(result, key=lambda s: float(s["metric"]["le"]))
    left, bottom = 62.0, box.height - 22 - 38
    lane = bottom / len(ordered)
    scale = (box.width - left - 12) / (span[1] - span[0])
    below: dict[float, float] = {}
    cells = []
    for index, series in enumerate(ordered):
        for at, raw in series["values"]:
            value = float(raw)
            cells.append((index, float(at), max(0.0, value - below.get(float(at), 0.0))))
            below[float(at)] = value
    high = max((c[2] for c in cells), default=1.0) or 1.0
    times = sorted(below)
    width = (times[1] - times[0]) * scale if len(times) > 1 else 4.0
    parts = []
    for index, at, value in cells:
        if value > 0:
            share = math.sqrt(value / high)
            shade = f"rgb({int(40 + 200 * share)},{int(60 + 160 * share)},{int(110 - 60 * share)})"
            y = bottom - (index + 1) * lane
            parts.append(f'<rect x="{left + (at - span[0]) * scale:.1f}" y="{y:.1f}" '
                         f'width="{max(1.0, width - 0.5):.1f}" height="{lane - 0.5:.1f}" '
                         f'fill="{shade}"/>')  # fmt: skip
    for index in range(0, len(ordered), 3):
        bound = float(ordered[index]["metric"]["le"])
        y = bottom - (index + 0.3) * lane
        parts.append(f'<text x="{left - 6}" y="{y:.0f}" text-anchor="end">'
                     f"{duration(bound, 0) if math.isfinite(bound) else '∞'}</text>")  # fmt: skip
    parts.append(_axis(box, span, left, bottom))
    return _svg(parts, box)
