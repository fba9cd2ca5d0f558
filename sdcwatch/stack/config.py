"""Configuration of the servers of the local stack, as plain values and as files.

The containers under docker/ are configured by files of the same content (a test compares them), so
that a rule fires, is routed and is inhibited alike in both. The generated files of sdcwatch are
written beside them, with links that lead to the stack's own ports.
"""

from __future__ import annotations

import configparser
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.build import generated_files, write
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import FOLDER, rule_files
from sdcwatch.stack.runbook import PAGE

JOB = "sdcwatch"
GRAFANA_LOOKS_FOR = ("plugins", "notifiers", "alerting")
"""Folders of provisioning that Grafana reads beside those with our files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What Prometheus scrapes, and how often.

    Attributes:
        targets: ``host:port`` of /metrics endpoints.
        file_sd: Directories with file_sd entries (``*.json``), watched for changes.
        interval_seconds: Time between scrapes, and between evaluations of the rules.
    """

    targets: tuple[str, ...]
    file_sd: tuple[Path, ...]
    interval_seconds: int


def scrape_config(scrape: Scrape) -> dict[str, Any]:
    """The scrape job of guarded runs; their labels are none that a scrape puts on itself."""
    config: dict[str, Any] = {"job_name": JOB}
    if scrape.targets:
        config["static_configs"] = [{"targets": list(scrape.targets)}]
    if scrape.file_sd:
        files = [str(directory.resolve() / "*.json") for directory in scrape.file_sd]
        config["file_sd_configs"] = [{"files": files, "refresh_interval": "10s"}]
    return config


def prometheus_config(scrape: Scrape, rules: Sequence[Path], alertmanager: str) -> dict[str, Any]:
    """Configuration of Prometheus.

    Args:
        scrape: What to scrape.
        rules: Rule files.
        alertmanager: ``host:port`` of Alertmanager.
    """
    every = f"{scrape.interval_seconds}s"
    return {
        "global": {
            "scrape_interval": every,
            "scrape_timeout": every,
            "evaluation_interval": every,
        },
        "rule_files": [str(path.resolve()) for path in rules],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [scrape_config(scrape)],
    }


def alertmanager_config(example: Mapping[str, Any], webhook: str) -> dict[str, Any]:
    """`example` with its route and inhibition unchanged, and every receiver a webhook here.

    Args:
        example: An Alertmanager configuration. A receiver without any integration swallows alerts
            on purpose and stays so.
        webhook: URL that gets all notifications; the receiver's name is appended as a path.
    """
    names = ("route", "inhibit_rules", "mute_time_intervals", "time_intervals")
    kept = {key: example[key] for key in names if key in example}
    return {**kept, "receivers": [_visible(r, webhook) for r in example.get("receivers", ())]}


def with_short_waits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with a first route that waits for seconds: one person watches one run here.

    Routes below it that set no times of their own follow it.
    """
    waits = {"group_wait": "5s", "group_interval": "10s"}
    return {**settings, "route": {**settings["route"], **waits}}


def _visible(receiver: Mapping[str, Any], webhook: str) -> dict[str, Any]:
    name = receiver["name"]
    integrations = [hook for key, hooks in receiver.items() if key != "name" for hook in hooks]
    if not integrations:
        return {"name": name}
    resolved = any(hook.get("send_resolved", True) for hook in integrations)
    return {
        "name": name,
        "webhook_configs": [{"url": f"{webhook}/{name}", "send_resolved": resolved}],
    }


def datasource_config(uid: str, prometheus_url: str, interval_seconds: int) -> dict[str, Any]:
    """Grafana's provisioning of the data source that the dashboards preselect."""
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "uid": uid,
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus_url,
                "isDefault": True,
                "editable": False,
                "jsonData": {"httpMethod": "POST", "timeInterval": f"{interval_seconds}s"},
            }
        ],
    }


def dashboards_config(directory: str) -> dict[str, Any]:
    """Grafana's provisioning of the dashboards in `directory`, in the folder of the rules."""
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": FOLDER,
                "orgId": 1,
                "folder": FOLDER,
                "type": "file",
                "disableDeletion": True,
                "allowUiUpdates": False,
                "updateIntervalSeconds": 30,
                "options": {"path": directory, "foldersFromFilesStructure": False},
            }
        ],
    }


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in `path`.

    Raises:
        ConfigurationError: It cannot be read, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        msg = f"Expected a YAML file at {path}, but got: {error}. Pass another path."
        raise ConfigurationError(msg) from error
    if not isinstance(content, dict):
        msg = f"Expected a mapping in {path}, but got {type(content).__name__}. Correct the file."
        raise ConfigurationError(msg)
    return content


def write_yaml(path: Path, content: Mapping[str, Any]) -> Path:
    """Write `content` to `path` and return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaFiles:
    """Files that one Grafana server starts from.

    Attributes:
        ini: Its configuration.
        password: File with the admin password, readable by its owner only.
    """

    ini: Path
    password: Path


def write_grafana(
    directory: Path, port: int, prometheus: Mapping[str, Any], dashboards: Path
) -> GrafanaFiles:
    """Write Grafana's configuration and provisioning under `directory`.

    Args:
        directory: Where configuration, data and logs go.
        port: Port on loopback.
        prometheus: The data source, from `datasource_config`.
        dashboards: Directory of dashboards.
    """
    provisioning = directory / "provisioning"
    write_yaml(provisioning / "datasources" / "sdcwatch.yaml", prometheus)
    write_yaml(
        provisioning / "dashboards" / "sdcwatch.yaml", dashboards_config(str(dashboards.resolve()))
    )
    for name in GRAFANA_LOOKS_FOR:  # it logs an error for each that is missing
        (provisioning / name).mkdir(parents=True, exist_ok=True)
    password = directory / "admin-password"
    if not password.exists():
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(24) + "\n", encoding="utf-8")
    ini = configparser.RawConfigParser()
    ini.read_dict(
        {
            "paths": {
                "data": str(directory / "data"),
                "logs": str(directory / "logs"),
                "plugins": str(directory / "plugins"),
                "provisioning": str(provisioning),
            },
            "server": {"http_addr": "127.0.0.1", "http_port": str(port)},
            "security": {"admin_password": password.read_text(encoding="utf-8").strip()},
            "auth.anonymous": {"enabled": "true", "org_role": "Viewer"},
            "analytics": {"reporting_enabled": "false", "check_for_updates": "false"},
            "news": {"news_feed_enabled": "false"},
            "plugins": {"preinstall_disabled": "true"},
        }
    )
    path = directory / "grafana.ini"
    path.touch(mode=0o600)
    with path.open("w", encoding="utf-8") as stream:
        ini.write(stream)
    return GrafanaFiles(ini=path, password=password)


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
