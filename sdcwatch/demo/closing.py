"""The end of a demo: faults against verdicts, checkpoints, overhead, and what to do next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcwatch.core.grade import Grade, GradedFault, grade, named_ranks
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Record,
    RunStarted,
    Verdict,
)
from sdcwatch.core.summary import RunSummary, fold
from sdcwatch.core.text import CHECK_NAMES, list_ranks
from sdcwatch.demo.display import outcome_words
from sdcwatch.demo.settings import PLAN_NAME, DemoSettings, planted_of
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import FaultPlan
from sdcwatch.report import can_write_pages
from sdcwatch.report.read import read_run

_SCRAPED_PORT = 9464
"""Where the local stack looks for a run unless told otherwise."""


def close_guarded(
    settings: DemoSettings, plan: FaultPlan, console: Console, *, partial: bool
) -> int:
    """Print the end of a guarded run; returns its grade."""
    try:
        records = read_run(settings.run_dir)
    except ConfigurationError as error:
        _say(console, f"Nothing to show yet: {error}")
        return 1
    graded = grade(records, planted_of(plan, settings.world_size))
    console.print()
    print_grade(graded, console, partial=partial)
    summary = fold(records)
    for line in (checkpoint_line(records, summary), *_cost(summary)):
        _say(console, line)
    for line in _places(settings, graded, records):
        _say(console, line)
    if not partial:
        _next_commands(settings, console)
    return graded.exit_code


def close_unguarded(
    settings: DemoSettings, plan: FaultPlan, console: Console, *, partial: bool
) -> int:
    """Print the end of an unguarded run; there is nothing to grade."""
    # Here, because it takes torch: the process in front of a guarded demo starts without.
    from sdcwatch.demo.unguarded import read_drift, tell_drift

    tell_drift(read_drift(settings.run_dir), console)
    if not partial:
        _say(console, "\nThe same faults under guard:", style="bold")
        _say(console, f"  {command()} demo")
    return 0


def print_grade(graded: Grade, console: Console, *, partial: bool = False) -> None:
    """Print planted faults against verdicts, and everything that is wrong."""
    if graded.faults:
        console.print(_table(graded.faults, partial=partial))
    for verdict in graded.unexpected:
        found = f"✗ nobody planted this, step {verdict.step}: {_found(verdict)}: {verdict.reason}"
        _say(console, found, style="bold red")
    if partial:
        _say(console, "The run did not reach its end; the table shows what there is.")
        return
    for breach in graded.breaches:
        _say(console, f"✗ {breach}", style="bold red")
    if graded.passed:
        _say(console, f"✓ PASSED: {_passed(graded.faults)}, no other alarm", style="bold green")
    else:
        _say(console, "✗ FAILED: the verdicts are not those expected", style="bold red")


def _passed(faults: Sequence[GradedFault]) -> str:
    right = sum(fault.ok is True for fault in faults)
    if not faults:
        return "nothing planted"
    if right == len(faults):
        return f"all {right} planted faults as expected"
    return f"{right} of {len(faults)} planted faults as expected, {len(faults) - right} open"


def _say(console: Console, line: str | Text, style: str | None = None) -> None:
    """Print one line as it is: names from a run are no markup, and a terminal wraps it, not we."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _table(faults: Sequence[GradedFault], *, partial: bool) -> Table:
    title = "Planted faults against verdicts" + (" (so far)" if partial else "")
    table = Table(title=title, title_justify="left", show_lines=True)
    for heading in ("planted", "expected", "found"):
        table.add_column(heading, overflow="fold")
    table.add_column("grade", no_wrap=True, min_width=len("✓ right"))
    for fault in faults:
        planted = fault.planted
        ranks = ", ".join(map(str, planted.ranks))
        when = f"step {planted.first_step}"
        if planted.last_step != planted.first_step:
            when = f"steps {planted.first_step} to {planted.last_step}"
        lines = [f"{_found(v)} (step {v.step}){_operation(v)}" for v in fault.verdicts]
        found = Text("\n".join([*lines, *filter(None, (fault.remark,))]) or "–")
        where = f"\n{planted.where}, rank {ranks}, {when}"
        what = Text.assemble(planted.name, (where, "dim"))
        table.add_row(what, Text(planted.expectation), found, _mark(fault, partial=partial))
    return table


def _found(verdict: Verdict) -> str:
    named = named_ranks(verdict)
    who = list_ranks(named) if named else "nobody named"
    word = outcome_words(verdict.outcome)[1]
    return f"{CHECK_NAMES[verdict.check]}: {word}, {who}"


def _operation(verdict: Verdict) -> str:
    """In which operation a device went wrong, where a trace has told, as a line of its own."""
    return f"\nin {verdict.operator}" if verdict.operator else ""


def _mark(fault: GradedFault, *, partial: bool) -> Text:
    if fault.ok:
        return Text("✓ right", style="green")
    if fault.ok is None or (partial and not fault.verdicts):
        return Text("– open", style="dim")
    return Text("✗ wrong", style="bold red")


def checkpoint_line(records: Sequence[Record], summary: RunSummary) -> Text:
    """What became of each checkpoint, told by segment: a step repeats after a restart."""
    parts = []
    for number, (step, events) in enumerate(_segments(records)):
        told = _kept(events)
        parts.append(told if number == 0 else f"after the restart from step {step}: {told}")
    last = summary.last_good_checkpoint_step
    parts.append("last good: none" if last is None else f"last good: step {last}")
    return Text.assemble(("Checkpoints: ", "bold"), "; ".join(parts))


def _segments(records: Sequence[Record]) -> list[tuple[int, list[CheckpointEvent]]]:
    """The step that each start of the run went on from, and its checkpoints until the next."""
    segments: list[tuple[int, list[CheckpointEvent]]] = [(0, [])]
    started = False
    for record in records:
        if isinstance(record, RunStarted):
            if started or record.step:
                segments.append((record.step, []))
            started = True
        elif isinstance(record, CheckpointEvent):
            segments[-1][1].append(record)
    return segments


def _kept(events: Sequence[CheckpointEvent]) -> str:
    results = (CheckpointResult.SAVED, CheckpointResult.PROVISIONAL)
    saved = sorted({r.step for r in events if r.result in results})
    withheld = [
        f"{r.step} ({r.reason.value})" for r in events if r.result is CheckpointResult.WITHHELD
    ]
    told = f"saved {', '.join(map(str, saved))}" if saved else "none saved"
    return f"{told}, withheld {', '.join(withheld)}" if withheld else told


def _cost(summary: RunSummary) -> list[Text]:
    if not summary.step_seconds:
        return []
    parts = [
        f"{CHECK_NAMES[Check(check)]} {seconds:.1f} s"
        for check, seconds in summary.overhead_seconds.items()
    ]
    ratio = summary.overhead_ratio or 0.0
    return [
        Text.assemble(
            ("Guard: ", "bold"),
            f"{ratio:.0%} of {summary.step_seconds:.0f} s of steps (",
            ", ".join(parts),
            "). The demo audits far more often than the default of every 100 steps.",
        )
    ]


def _places(settings: DemoSettings, graded: Grade, records: Sequence[Record]) -> list[Text]:
    lines = []
    if (report := _write_report(settings, graded, records)) is not None:
        lines.append(Text.assemble(("Report: ", "bold"), str(report)))
    offline = sorted(settings.run_dir.glob("wandb/offline-run-*"))
    if offline:
        lines.append(Text.assemble(("W&B, offline: ", "bold"), str(offline[-1])))
    lines.append(Text.assemble(("Events: ", "bold"), str(settings.run_dir / "events.jsonl")))
    return lines


def _write_report(settings: DemoSettings, graded: Grade, records: Sequence[Record]) -> Path | None:
    if not can_write_pages():
        return None
    from sdcwatch.report.page import write_page

    return write_page(records, settings.run_dir / "report.html", graded)


def _next_commands(settings: DemoSettings, console: Console) -> None:
    run_dir = shlex.quote(str(settings.run_dir))
    check = f" --check {run_dir}/{PLAN_NAME}" if settings.plan is not None else ""
    _say(console, "\nNext:", style="bold")
    _say(console, f"  {command()} report {run_dir}{check}")
    _say(console, f"  {command()} demo --unguarded")
    _say(console, "Alerts, in two terminals beside each other:", style="bold")
    _say(console, f"  {command()} stack up --local")
    _say(console, f"  {command()} demo --serve --metrics-port {_SCRAPED_PORT}")


def command() -> str:
    """How to call this program from the shell the user is in."""
    script = shutil.which("sdcwatch")
    if script is not None and Path(script).parent == Path(sys.executable).parent:
        return "sdcwatch"
    python = Path(sys.executable)
    here = Path(os.path.relpath(python))
    shorter = here if len(str(here)) < len(str(python)) else python
    return f"{shlex.quote(str(shorter))} -m sdcwatch"
