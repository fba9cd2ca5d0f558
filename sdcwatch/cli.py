"""The command line. Commands import what they need when they run, so that help comes at once."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sdcwatch import __version__
from sdcwatch.errors import SdcwatchError

INTERRUPTED_EXIT = 130

_ELSEWHERE = {
    "doctor": (
        "sdcwatch.doctor.cli",
        "doctor",
        "What here would stop bitwise replay, silence the guard or kill it.",
    ),
    "monitor": (
        "sdcwatch.stack.cli",  # which adds the drill to the group of sdcwatch.monitor
        "monitor",
        "Dashboards, alert rules, and a drill through them.",
    ),
    "stack": (
        "sdcwatch.stack.cli",
        "stack",
        "Prometheus, Alertmanager and Grafana on this machine.",
    ),
}
"""Commands that live beside what they are about: module, attribute, and help for the listing."""

_EXTRAS = {
    "yaml": "monitor",
    "grafana_foundation_sdk": "monitor",
    "markdown_it": "monitor",
    "plotly": "report",
    "jinja2": "report",
    "wandb": "wandb",
}


class _LazyGroup(click.Group):
    """A group that loads some of its commands only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = _ELSEWHERE[cmd_name]
        try:
            command = getattr(import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(_missing(error)) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in _ELSEWHERE:
                rows.append((name, _ELSEWHERE[name][2]))
            elif (command := super().get_command(ctx, name)) is not None:
                rows.append((name, command.get_short_help_str(limit=60)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _missing(error: ImportError) -> str:
    """What to install for a module that is not there."""
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return str(error)
    return (
        f"Expected the package of {name!r}, but it is not installed. "
        f"Do: pip install 'sdcwatch[{_EXTRAS[name]}]'"
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sdcwatch")
def cli() -> None:
    """A guard against silent data corruption in PyTorch DDP training."""


@cli.command()
@click.option("--nodes", type=click.IntRange(1, 64), default=3, show_default=True,
              help="Simulated nodes; all ranks run on this machine.")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: 180]")
@click.option("--faults", default="default", show_default=True, metavar="default|none|FILE",
              help="What to plant: a plan as in docs/faults.md.")  # fmt: skip
@click.option("--unguarded", is_flag=True, help="The same faults without the guard.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False),
              help="A new directory for this run.  [default: sdcwatch-runs/demo-…]")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--serve", is_flag=True, help="Keep /metrics up after the run, until Ctrl-C.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=0, show_default=True,
              help="Port of /metrics; 0 takes a free one.")  # fmt: skip
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--linger", "linger_seconds", type=click.FloatRange(0),
              help="Seconds that /metrics stays up at the end of a segment, for a last scrape.  "
                   "[default: 0, with --serve 15]")  # fmt: skip
@click.option("--wandb", type=click.Choice(["offline", "online", "off"]), default="offline",
              show_default=True, help="Where the W&B run goes.")  # fmt: skip
def demo(faults: str, run_dir: Path | None, **options: Any) -> int:
    """Train a small GPT over simulated nodes, with planted faults.

    Exits 0 if every planted fault led to the verdict expected of it and nothing else was
    reported, 1 if not, 130 if interrupted before the end.
    """
    from rich.console import Console

    from sdcwatch.demo.run import announce, run_demo
    from sdcwatch.demo.settings import RUNS_DIR, DemoSettings, choose_plan, new_run, prepare

    run = run_dir.name if run_dir is not None else new_run("demo")
    given = {name: value for name, value in options.items() if value is not None}
    settings = DemoSettings(run=run, run_dir=run_dir or RUNS_DIR / run, **given)
    plan = choose_plan(faults, settings.world_size)
    settings = prepare(settings, plan)
    console = Console()
    announce(settings, plan, console)
    return run_demo(settings, plan, console)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--check", "plan_path", type=click.Path(path_type=Path, dir_okay=False),
              help="Grade the run against this fault plan; exit 1 if it fails.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Where the page goes.  [default: RUN_DIR/report.html]")  # fmt: skip
def report(run_dir: Path, plan_path: Path | None, out: Path | None) -> int:
    """Write one HTML page about a run, and grade it.

    With --check it exits 1 unless every fault of the plan led to the verdict expected of it and
    nothing else was reported; events.jsonl alone decides.
    """
    from rich.console import Console

    from sdcwatch.demo.closing import print_grade
    from sdcwatch.demo.settings import planted_of
    from sdcwatch.report.page import write_page
    from sdcwatch.report.read import read_run, world_size_of
    from sdcwatch.sinks.jsonl import read_closings

    records = read_run(run_dir)
    graded = None
    if plan_path is not None:
        from sdcwatch.core.grade import grade
        from sdcwatch.faults.plan import load_plan

        graded = grade(records, planted_of(load_plan(plan_path), world_size_of(records)))
    console = Console()
    path = write_page(records, out or run_dir / "report.html", graded, read_closings(run_dir))
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)
    if graded is None:
        return 0
    print_grade(graded, console)
    return graded.exit_code


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...",
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for scripts.")
def suspects(run_dirs: tuple[Path, ...], as_json: bool) -> None:
    """List the devices that checks have named: what a launcher may leave out.

    Nothing is drained by itself: docs/telemetry.md has examples for Slurm and Kubernetes.
    """
    from sdcwatch.report.suspects import lines_of, suspects_of

    entries = suspects_of(run_dirs)
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    else:
        click.echo("\n".join(lines_of(entries)))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--gpu", required=True, help="The GPU, as the verdict names it.")
@click.option("--instance-id", default="", help="Its instance id, where the GPU alone is not one.")
@click.option("--reason", required=True, help="What was done or found out.")
@click.option("--by", help="Who says so.  [default: the user who runs this]")
def close(run_dir: Path, gpu: str, instance_id: str, reason: str, by: str | None) -> None:
    """Close a suspect: a person has dealt with that device.

    Written to RUN_DIR/closed.jsonl. Summary, gauges, alert and later segments respect it, also
    while the run lives. Evidence that comes later opens the suspect again.
    """
    from sdcwatch.report.suspects import close_suspect

    after = close_suspect(run_dir, gpu=gpu, instance_id=instance_id, reason=reason, by=by)
    click.echo(f"Closed {gpu}. The run is {after.verdict}: {after.reason}.")


def main() -> None:
    """Entry point of the ``sdcwatch`` command."""
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED_EXIT)
    except SdcwatchError as error:
        click.secho(f"Error: {error}", err=True, fg="red")
        sys.exit(error.exit_code)
    except ImportError as error:
        click.secho(f"Error: {_missing(error)}", err=True, fg="red")
        sys.exit(1)
