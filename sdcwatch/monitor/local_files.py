"""The files of sdcwatch that the local stack loads, with links that lead to its own ports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.build import generated_files, write
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import rule_files
from sdcwatch.monitor.runbook import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """Generated files on disk.

    Attributes:
        rules: The Prometheus rule file.
        alertmanager: The Alertmanager configuration.
        dashboards: The directory of dashboards, or None if they could not be generated.
        problem: Why not; empty if they were.
    """

    rules: Path
    alertmanager: Path
    dashboards: Path | None
    problem: str


def with_local_links(
    config: MonitorConfig, *, prometheus_port: int, grafana_port: int
) -> MonitorConfig:
    """`config` with the links that it leaves at their defaults leading to these ports."""
    default = MonitorConfig()
    grafana, runbook = config.grafana_url, config.runbook_url
    if grafana == default.grafana_url:
        grafana = f"http://localhost:{grafana_port}"
    if runbook == default.runbook_url:
        runbook = f"http://localhost:{prometheus_port}/user/{PAGE}"
    return replace(config, grafana_url=grafana, runbook_url=runbook)


def write_local_files(config: MonitorConfig, directory: Path) -> LocalFiles:
    """Generate rules, Alertmanager configuration and dashboards below `directory`.

    Rules need nothing but PyYAML; without the SDK of the dashboards they are written alone.
    """
    problem = ""
    try:
        files = generated_files(config)
    except ConfigurationError as error:
        files, problem = rule_files(config), str(error)
    write(files, directory)
    return LocalFiles(
        rules=directory / "alerts" / "sdcwatch.rules.yml",
        alertmanager=directory / "alerts" / "alertmanager.example.yml",
        dashboards=None if problem else directory / "dashboards",
        problem=problem,
    )
