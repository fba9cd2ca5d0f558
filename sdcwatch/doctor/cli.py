"""``sdcwatch doctor``: the findings as a table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdcwatch.doctor.checks import Finding, Level, examine, worst
from sdcwatch.doctor.facts import Facts
from sdcwatch.doctor.machine import read_facts

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_SIGNS = {Level.OK: "✓", Level.WARNING: "!", Level.PROBLEM: "✗"}


@click.command()
@click.option("--ranks", type=click.IntRange(1),
              help="Ranks of the planned training.  "
                   "[default: WORLD_SIZE or SLURM_NTASKS]")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1),
              help="Ranks on this machine.  [default: LOCAL_WORLD_SIZE, or GPUs]")  # fmt: skip
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Where events.jsonl would go.  [default: sdcwatch-runs]")  # fmt: skip
@click.option("--metrics-host", "host", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", "port", type=click.IntRange(0, 65535), default=9464,
              show_default=True, help="Port of /metrics; 0 does not look.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Facts and findings as JSON.")
def doctor(
    ranks: int | None,
    ranks_per_node: int | None,
    run_dir: Path | None,
    host: str,
    port: int,
    as_json: bool,
) -> int:
    """Say what here would stop bitwise replay, silence the guard or kill it.

    Run it in the environment of a rank, on each kind of node. Exits 1 if there is a problem, 0 if
    there are warnings at most.
    """
    facts = read_facts(
        ranks=ranks, ranks_per_node=ranks_per_node, run_dir=run_dir, port=port, host=host
    )
    findings = examine(facts)
    if as_json:
        click.echo(as_text(facts, findings))
    else:
        show(findings, Console())
    return int(worst(findings) is Level.PROBLEM)


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Facts and findings as one JSON object."""
    data = {"findings": [asdict(f) for f in findings], "facts": asdict(facts)}
    return json.dumps(data, indent=2, default=dict)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the table, and a line that counts."""
    table = Table(title="sdcwatch doctor", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and → what to do", overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            table.add_section()
            topic = finding.topic
        style = _STYLES[finding.level]
        sign = Text(f"{_SIGNS[finding.level]} {finding.level.value}", style)
        do = (f"\n→ {finding.do}", "bold") if finding.do else ""
        table.add_row(sign, Text(finding.name), Text.assemble(finding.found, do))
    console.print(table)
    counts = {level: sum(f.level is level for f in findings) for level in reversed(Level)}
    line = ", ".join(f"{n} {_word(level, n)}" for level, n in counts.items() if n)
    console.print(line, style=_STYLES[worst(findings)], highlight=False)


def _word(level: Level, count: int) -> str:
    return level.value if level is Level.OK or count == 1 else f"{level.value}s"
