"""``sdcwatch stack``: the monitoring stack on this machine, and a drill through its alerts."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from sdcwatch.errors import SdcwatchError
from sdcwatch.monitor.cli import config_from, config_options, monitor
from sdcwatch.monitor.config import load_config
from sdcwatch.stack.config import Scrape, with_local_links, write_local_files
from sdcwatch.stack.drill import send_drill
from sdcwatch.stack.runbook import find_runbook, write_runbook
from sdcwatch.stack.servers import Interrupted
from sdcwatch.stack.stack import Binaries, LocalStack, Ports, StackConfig, locked

DEFAULT_TARGET = "127.0.0.1:9464"
WATCH_SECONDS = 0.5
WIDE = 1000
"""Columns: the terminal wraps a long path, which can still be copied; a table would cut it."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_TARGET = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_PORT = click.IntRange(0, 65535)
_FILE = click.Path(path_type=Path, dir_okay=False)
_DIRECTORY = click.Path(path_type=Path, file_okay=False)


def _targets(
    context: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    wrong = [target for target in value if not _TARGET.fullmatch(target)]
    if wrong:
        msg = f"Expected host:port, but got {wrong[0]!r}. Pass the address of a /metrics endpoint."
        raise click.BadParameter(msg)
    return value


@click.group()
def stack() -> None:
    """Prometheus, Alertmanager and a visible receiver, with the rules of sdcwatch."""


@stack.command()
@click.option("--local", is_flag=True, help="Start the binaries found on the PATH.")
@click.option("--target", "targets", multiple=True, callback=_targets, metavar="HOST:PORT",
              help=f"A /metrics endpoint; repeatable. Default {DEFAULT_TARGET} unless --file-sd "
                   "is given.")  # fmt: skip
@click.option("--file-sd", "file_sd", multiple=True, type=_DIRECTORY,
              help="Directory with file_sd entries of guarded runs; repeatable.")  # fmt: skip
@click.option("--data-dir", type=_DIRECTORY, default=Path("sdcwatch-stack"), show_default=True,
              help="Where configuration, data and logs go.")  # fmt: skip
@click.option("--config", "monitor_config", type=_FILE,
              help="YAML file as for `sdcwatch monitor build`: thresholds, links.")  # fmt: skip
@click.option("--rules", multiple=True, type=_FILE,
              help="Prometheus rule file in place of those of sdcwatch; repeatable.")  # fmt: skip
@click.option("--alertmanager-config", "alertmanager", type=_FILE,
              help="Configuration with route and inhibition in place of ours.")  # fmt: skip
@click.option("--dashboards", type=_DIRECTORY, help="Dashboards for Grafana in place of ours.")
@click.option("--runbook", type=_FILE, help="Runbook in Markdown in place of ours.")
@click.option("--prometheus-port", "prometheus", type=_PORT, default=9090, show_default=True,
              help="0: any free one.")  # fmt: skip
@click.option("--alertmanager-port", "alertmanager_port", type=_PORT, default=9093,
              show_default=True, help="0: any free one.")  # fmt: skip
@click.option("--receiver-port", "receiver", type=_PORT, default=9095, show_default=True,
              help="0: any free one.")  # fmt: skip
@click.option("--grafana-port", "grafana", type=_PORT, default=3000, show_default=True,
              help="0: any free one.")  # fmt: skip
@click.option("--interval", type=click.IntRange(1, 300), default=5, show_default=True,
              help="Seconds between scrapes and between evaluations of the rules.")  # fmt: skip
def up(local: bool, **options: Any) -> None:
    """Start the stack, say where everything is, and run until interrupted.

    Grafana is started too where a `grafana` or `grafana-server` binary is on the PATH. Everything
    listens on 127.0.0.1. Ctrl-C, SIGTERM and SIGHUP stop all servers.
    """
    if not local:
        msg = (
            "Expected --local, but got no way to run. Pass --local for the binaries on the PATH, "
            "or use `docker-compose up` beside docker-compose.yml for the containers."
        )
        raise click.UsageError(msg)
    stop = threading.Event()
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in STOP_SIGNALS}
    console = Console(highlight=False, width=WIDE)
    try:
        _run(_Options(**options), console, stop)
    except Interrupted:
        console.print("Interrupted before the stack was up. Everything is stopped.")
    except SdcwatchError as error:
        raise click.ClickException(str(error)) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@stack.command("runbook")
@click.option("--source", type=_FILE, help="Runbook in Markdown; default the one of sdcwatch.")
@click.option("--out", type=_DIRECTORY, required=True, help="Directory to write the page into.")
def write_page(source: Path | None, out: Path) -> None:
    """Write the runbook as the page that the links in the alerts lead to."""
    found = source or find_runbook()
    if found is None:
        msg = "Expected a runbook, but got none with this installation. Pass --source."
        raise click.UsageError(msg)
    try:
        page = write_runbook(found, out)
    except SdcwatchError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"wrote {page}")


@monitor.command("test-alert")
@click.option("--alertmanager", default="http://127.0.0.1:9093", show_default=True,
              help="Base URL of Alertmanager.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=5.0,
              show_default=True, help="After how long the drill ends by itself.")  # fmt: skip
@config_options
def test_alert(alertmanager: str, minutes: float, path: Path | None, **options: Any) -> None:
    """Send a drill through Alertmanager, labelled as one, on the route of a page."""
    try:
        alert = send_drill(alertmanager, config_from(path, options), minutes=minutes)
    except SdcwatchError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Sent {alert['labels']['alertname']} to {alertmanager}.")
    click.echo(
        "Delivery takes up to the group_wait of its route: about 30 s with "
        "alerts/alertmanager.example.yml."
    )
    click.echo("It must arrive where pages arrive. If it does not, no other alert would.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of `up`, by their names."""

    targets: tuple[str, ...]
    file_sd: tuple[Path, ...]
    data_dir: Path
    monitor_config: Path | None
    rules: tuple[Path, ...]
    alertmanager: Path | None
    dashboards: Path | None
    runbook: Path | None
    prometheus: int
    alertmanager_port: int
    receiver: int
    grafana: int
    interval: int

    def resolve(self) -> tuple[StackConfig, str]:
        """What to run, and a sentence about what is missing, if anything is."""
        binaries = Binaries.find()
        ports = Ports(
            prometheus=self.prometheus,
            alertmanager=self.alertmanager_port,
            receiver=self.receiver,
            grafana=self.grafana,
        ).chosen(grafana=binaries.grafana_home is not None)
        monitor = with_local_links(
            load_config(self.monitor_config),
            prometheus_port=ports.prometheus,
            grafana_port=ports.grafana,
        )
        ours = write_local_files(monitor, self.data_dir / "generated")
        file_sd = tuple(self.file_sd)
        targets = tuple(self.targets) or (() if file_sd else (DEFAULT_TARGET,))
        config = StackConfig(
            binaries=binaries,
            ports=ports,
            data_dir=self.data_dir,
            scrape=Scrape(targets=targets, file_sd=file_sd, interval_seconds=self.interval),
            rules=tuple(self.rules) or (ours.rules,),
            alertmanager=self.alertmanager or ours.alertmanager,
            short_waits=self.alertmanager is None,
            dashboards=self.dashboards or ours.dashboards,
            runbook=self.runbook or find_runbook(),
            datasource=monitor.datasource,
        )
        return config, "" if self.dashboards else ours.problem


def _run(options: _Options, console: Console, stop: threading.Event) -> None:
    def show(text: str) -> None:
        console.print(text, markup=False)

    with locked(options.data_dir), contextlib.ExitStack() as started:
        config, problem = options.resolve()
        running = started.enter_context(LocalStack(config, write=show, stopping=stop.is_set))
        console.print(_table(running))
        for note in (*running.notes, *((f"Dashboards: {problem}",) if problem else ())):
            show(note)
        show("Ctrl-C stops everything. Alerts that are sent appear below.")
        while not stop.wait(WATCH_SECONDS):
            running.check_alive()
        show("Stopping.")
    show("Everything is stopped.")


def _table(running: LocalStack) -> Table:
    """Where everything is; addresses stand last and whole, so that they can be copied."""
    table = Table(title="sdcwatch stack", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("what", "shows", "where"):
        table.add_column(heading, no_wrap=True)
    for place in running.places:
        table.add_row(place.what, place.shows, place.where)
    return table
