"""One HTML page about a run: self-contained, no network, the verdict first."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sdcwatch.core.advice import what_to_do
from sdcwatch.core.grade import Grade
from sdcwatch.core.outcomes import is_alarm
from sdcwatch.core.records import (
    CheckpointEvent,
    Closing,
    Hang,
    Note,
    PreflightDone,
    Progress,
    Record,
    RunStarted,
    Verdict,
)
from sdcwatch.core.summary import RunSummary, fold
from sdcwatch.core.suspects import SuspectDevice, suspect_devices
from sdcwatch.core.thinning import merged_durations
from sdcwatch.report import words
from sdcwatch.report.charts import Figure, loss_figure, overhead_figure, ranks_figure

try:
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs
except ImportError as error:  # pragma: no cover - exercised in a process without the extra
    msg = "Expected plotly and jinja2 for the report. Do: pip install 'sdcwatch[report]'"
    raise ImportError(msg, name=error.name) from error


@dataclass(frozen=True, slots=True)
class Cost:
    """What one phase of one check took.

    Attributes:
        check: The check.
        phase: The phase.
        runs: How often it ran.
        median: Median seconds on the reporting rank.
        total: Seconds in all.
    """

    check: str
    phase: str
    runs: int
    median: float
    total: float


@dataclass(frozen=True, slots=True)
class View:
    """Everything the template shows."""

    summary: RunSummary
    devices: tuple[SuspectDevice, ...]
    start: RunStarted
    preflight: PreflightDone | None
    verdicts: tuple[Verdict, ...]
    checkpoints: tuple[CheckpointEvent, ...]
    notes: tuple[Note, ...]
    hangs: tuple[Hang, ...]
    costs: tuple[Cost, ...]
    grade: Grade | None


def write_page(
    records: Sequence[Record],
    path: Path,
    grade: Grade | None = None,
    closings: Sequence[Closing] = (),
) -> Path:
    """Write the page of a run.

    Args:
        records: All records of the run, ordered by time; at least one start record.
        path: Where the page goes; replaced as a whole, so that nobody reads half a page.
        grade: The grade against a fault plan, if there is one.
        closings: What persons have closed.

    Raises:
        OSError: The page cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(render(records, grade, closings), encoding="utf-8")
    unfinished.replace(path)
    return path


def render(
    records: Sequence[Record], grade: Grade | None = None, closings: Sequence[Closing] = ()
) -> str:
    """The page as text."""
    view = view_of(records, grade, closings)
    figures = {
        "loss": loss_figure(records),
        "ranks": ranks_figure(records, view.start.ranks),
        "overhead": overhead_figure(view.summary.overhead_seconds, view.summary.step_seconds),
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_resource("page.html.j2"))
    symbol, color = words.head(view.summary)
    return template.render(
        view=view,
        words=words,
        sentences=words.sentences(view.summary, time.time()),
        advice=what_to_do(view.summary),
        symbol=symbol,
        color=color,
        style=_resource("style.css"),
        figures=_as_script(figures),
        plotly=get_plotlyjs(),
    )


def view_of(
    records: Sequence[Record], grade: Grade | None = None, closings: Sequence[Closing] = ()
) -> View:
    """What the page shows, taken from the records."""
    preflights = [r for r in records if isinstance(r, PreflightDone)]
    summary = fold(records, closings)
    return View(
        summary=summary,
        devices=suspect_devices(summary),
        start=[r for r in records if isinstance(r, RunStarted)][-1],
        preflight=preflights[-1] if preflights else None,
        verdicts=tuple(r for r in records if isinstance(r, Verdict) and is_alarm(r)),
        checkpoints=tuple(r for r in records if isinstance(r, CheckpointEvent)),
        notes=tuple(r for r in records if isinstance(r, Note)),
        hangs=tuple(r for r in records if isinstance(r, Hang)),
        costs=tuple(_costs(records)),
        grade=grade,
    )


def _costs(records: Sequence[Record]) -> list[Cost]:
    entries = (d for record in records if isinstance(record, Progress) for d in record.durations)
    return [
        Cost(entry.check.value, entry.phase.value, sum(entry.counts), entry.median, entry.sum)
        for entry in merged_durations(entries)
        if any(entry.counts)
    ]


def _resource(name: str) -> str:
    return files("sdcwatch.report").joinpath(name).read_text(encoding="utf-8")


def _as_script(figures: dict[str, Figure]) -> str:
    """JSON that can stand inside a script element: no tag can be closed from within."""
    return json.dumps(figures, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
