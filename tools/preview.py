"""Draw each dashboard from the recorded runs, so that a reviewer sees what the person on call sees.

    python tools/preview.py --out DIRECTORY

No Grafana is involved: grid, titles, units, thresholds, value mappings and table columns come from
the generated JSON, the numbers from a real Prometheus that holds the recordings, and Chromium takes
the picture. Fonts, spacing and much of what Grafana
decides differ: a look at a board, no proof of it, and no picture for the docs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import preview_draw as draw
from recorded import Recorded, recorded_prometheus, substitute

from sdcwatch.core.catalog import RANK_EVIDENCE
from sdcwatch.monitor.promql import Scope, select

ROOT = Path(__file__).parents[1]
WIDTH = 1560
UNIT = 38
GAP = 8
POINTS = 160
STYLE = """
body{margin:0;background:#111217;color:#d8d9da;font:13px/1.35 Inter,'DejaVu Sans',sans-serif}
.head{padding:12px 16px;font-size:17px}
.head small{color:#9a9da3;font-size:12px;margin-left:14px}
.grid{position:relative;margin:0 8px}
.panel{position:absolute;background:#181b1f;border:1px solid #2a2d33;border-radius:3px;
  overflow:hidden;box-sizing:border-box}
.row{position:absolute;font-size:14px; padding:9px 6px;box-sizing:border-box;color:#e6e7e8}
.title{padding:4px 8px;font-weight:600; font-size:12px;height:22px;box-sizing:border-box;
  white-space:nowrap;overflow:hidden}
.stat{display:flex;position:absolute;inset:22px 0 0 0}
.value{flex:1;display:flex;flex-direction:column; align-items:center;justify-content:center;
  color:#0b0c0e;font-weight:600}
.value span{font-size:11px;font-weight:400}
table{border-collapse:collapse;width:100%;font-size:12px}
th{text-align:left;color:#6e9fff;font-weight:600}
td,th{padding:4px 8px;border-bottom:1px solid #26292e;white-space:nowrap}
.empty{position:absolute;inset:22px 0 0 0;display:flex;align-items:center;
  justify-content:center;color:#9a9da3}
.legend{position:absolute;left:8px;right:8px;bottom:3px; font-size:11px;white-space:nowrap;
  overflow:hidden}
.legend i{display:inline-block;width:10px;height:3px; margin:0 4px 3px 10px}
svg text{fill:#9a9da3;font-size:10.5px}
"""


@dataclass(frozen=True, slots=True)
class Span:
    """What a dashboard is drawn for.

    Attributes:
        run: Value of the run variable.
        start: Start of the range, unix time.
        end: End of the range.
        gpu: Value of the GPU variable.
    """

    run: str
    start: float
    end: float
    gpu: str = ".+"

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def results(
    panel: dict[str, Any], server: Recorded, span: Span
) -> list[tuple[dict[str, Any], Any]]:
    """Each target of a panel with its result."""
    step = max(2, round(span.seconds / POINTS))
    found = []
    for target in panel["targets"]:
        expression = substitute(
            target["expr"],
            run=span.run,
            range_seconds=span.seconds,
            interval_seconds=step,
            gpu=span.gpu,
        )
        if target.get("instant"):
            found.append((target, server.instant(expression, span.end)))
        else:
            found.append((target, server.range(expression, span.start, span.end, step)))
    return found


def events(dashboard: dict[str, Any], server: Recorded, span: Span) -> list[float]:
    """The times that the annotations mark."""
    found = set()
    for annotation in dashboard["annotations"]["list"]:
        if "target" in annotation:
            expression = substitute(
                annotation["target"]["expr"], run=span.run, range_seconds=span.seconds
            )
            for series in server.range(expression, span.start, span.end, 2.0):
                found |= {float(value) / 1000 for _, value in series["values"]}
    return sorted(t for t in found if span.start <= t <= span.end)


def page(dashboard: dict[str, Any], server: Recorded, span: Span) -> tuple[str, int]:
    """The HTML of a dashboard, and its height in pixels."""
    column = (WIDTH - 16) / 24
    parts = []
    bottom = 0.0
    marks = events(dashboard, server, span)
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        box = draw.Box(at["w"] * column - GAP, at["h"] * UNIT - GAP)
        place = (
            f"left:{at['x'] * column:.0f}px;top:{at['y'] * UNIT}px;"
            f"width:{box.width:.0f}px;height:{box.height:.0f}px"
        )
        bottom = max(bottom, (at["y"] + at["h"]) * UNIT)
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{place}">▾ {escape(panel["title"])}</div>')
            continue
        body = draw.body(panel, results(panel, server, span), box, (span.start, span.end), marks)
        title = f'<div class="title">{escape(panel["title"])}</div>'
        parts.append(f'<div class="panel" style="{place}">{title}{body}</div>')
    when = f"{draw.clock(span.start)} to {draw.clock(span.end)} UTC"
    head = f'<div class="head">{escape(dashboard["title"])}<small>run {escape(span.run)}, {when}'
    head += ", drawn from recorded scrapes, not by Grafana</small></div>"
    html = f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{head}'
    html += f'<div class="grid">{"".join(parts)}</div>'
    return html, int(bottom) + 56


def photograph(html: str, height: int, out: Path, folder: Path) -> None:
    """Let Chromium draw the page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "chromium is not on the PATH"
    source = folder / f"{out.stem}.html"
    source.write_text(html, encoding="utf-8")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={WIDTH},{height}", f"--screenshot={out}", source.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def spans(server: Recorded) -> dict[str, Span]:
    """What each dashboard is drawn for."""
    faulty = server.runs["default_faults"]
    start = min(r.start for r in server.runs.values()) - 30
    wrong = select(RANK_EVIDENCE, Scope((), ("run",)), check="replay", result="mismatches")
    (worst,) = server.instant(f"topk(1, max by (suspect_gpu) ({wrong}))", faulty.end)
    # Just before the end, so that the faulty run is seen alive among those that have ended.
    live = faulty.end - 10
    return {
        "fleet": Span(".+", min(start, live), live),
        "run": Span(faulty.run, faulty.start - 10, faulty.end),
        "suspect": Span(".+", faulty.start - 10, faulty.end, worst["metric"]["suspect_gpu"]),
    }


def main() -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with recorded_prometheus(folder) as server:
            for slug, span in spans(server).items():
                path = ROOT / "dashboards" / f"sdcwatch-{slug}.json"
                html, height = page(json.loads(path.read_text(encoding="utf-8")), server, span)
                out = options.out.resolve() / f"dashboard-{slug}.png"
                photograph(html, height, out, folder)
                print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
