"""``sdcwatch monitor``: build the generated files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.build import differences, generated_files, write
from sdcwatch.monitor.config import MonitorConfig, load_config

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)


def _pairs(
    context: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> dict[str, str] | None:
    pairs = {}
    for text in value:
        name, equals, word = text.partition("=")
        if not (name and equals and word):
            msg = f"Expected NAME=VALUE, but got {text!r}. Pass both."
            raise click.BadParameter(msg)
        pairs[name] = word
    return pairs or None


def config_options(command: _Command) -> _Command:
    """The options that every command about generated files takes."""
    options = (
        click.option("--config", "path", type=_FILE, help="YAML file with fields of the config."),
        click.option("--datasource", help="UID of the Prometheus data source in Grafana."),
        click.option("--scope-label", "scope_labels", multiple=True,
                     help="Label that tells runs apart beside `run`, e.g. cluster; repeatable."),
        click.option("--rule-matcher", "rule_matchers", multiple=True, callback=_pairs,
                     metavar="NAME=VALUE", help="Matcher in every selector of every rule."),
        click.option("--grafana-url", help="Where the dashboards are; empty leaves the link out."),
        click.option("--runbook-url", help="Where the runbook is; empty leaves the link out."),
        click.option("--severity", "severities", multiple=True, callback=_pairs,
                     metavar="ALERT=SEVERITY", help="Another severity for an alert."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def config_from(path: Path | None, options: dict[str, Any]) -> MonitorConfig:
    """The config that these options describe."""
    try:
        return load_config(path, **{k: None if v == () else v for k, v in options.items()})
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


@click.group()
def monitor() -> None:
    """Dashboards and alert rules, generated from the metric catalogue."""


@monitor.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path(),
              show_default="the current directory", help="Directory to write below.")  # fmt: skip
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would change.")
@config_options
def build(out: Path, check: bool, path: Path | None, **options: Any) -> None:
    """Write dashboards/*.json and alerts/*."""
    try:
        files = generated_files(config_from(path, options))
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    if not check:
        changed = write(files, out)
        for file in changed:
            click.echo(f"wrote {file}")
        click.echo(f"{len(files)} files, {len(changed)} changed.")
        return
    found = differences(files, out)
    for sentence in found:
        click.echo(sentence)
    if found:
        click.echo("Expected the generated files to be up to date. Run: sdcwatch monitor build")
        raise click.exceptions.Exit(1)
    click.echo(f"{len(files)} files are up to date.")
