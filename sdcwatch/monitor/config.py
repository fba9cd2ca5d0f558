"""What people change about the generated dashboards and alerts: one value, validated.

Nothing of it is repeated in a query or a panel. A YAML file holds the fields of `MonitorConfig` by
name; flags of ``sdcwatch monitor build`` win over it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from sdcwatch.core.catalog import CATALOG
from sdcwatch.errors import ConfigurationError, expect

SEVERITIES = ("critical", "warning", "info")
_DURATION = re.compile(r"(?:\d+d)?(?:\d+h)?(?:\d+m)?(?:\d+s)?")
_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_UID = re.compile(r"[a-zA-Z0-9_-]{1,28}")
_TAKEN = ("run", "job", "instance", "exporter_rank", "start")
"""Queries join on these already, or make them."""
_OTHERS = frozenset(
    ("alertname", "severity", "le", *(name for metric in CATALOG for name in metric.labels))
)
"""Labels that alerts, histograms or single metrics have by themselves."""
_LONGEST_SECONDS = 100 * 365 * 86400
_LISTS = ("scope_labels",)
_MAPPINGS = ("rule_matchers", "severities", "prometheusrule_labels")


def duration_seconds(text: str) -> int:
    """Seconds in a Prometheus duration such as ``"1h30m"``.

    Raises:
        ConfigurationError: It is no duration, or zero.
    """
    valid = isinstance(text, str) and text != "" and _DURATION.fullmatch(text) is not None
    seconds = (
        sum(int(n) * _UNIT_SECONDS[u] for n, u in re.findall(r"(\d+)([dhms])", text))
        if valid
        else 0
    )
    expect(
        0 < seconds <= _LONGEST_SECONDS,
        "a duration such as 15m or 1h30m",
        text,
        "Write days, hours, minutes, s.",
    )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When an alert fires. Durations are Prometheus durations.

    Attributes:
        event_window: How long after an event its alert goes on firing.
        hold: How long a suspect that nobody closes goes on firing after its process ended; as long
            as Prometheus keeps its samples.
        ended_within: How long a tainted, failed or vanished run goes on firing if nobody resumes
            it. Every evaluation reads the guard's states of this long.
        inhibits_for: How long after a finding its consequences are silenced.
        born_lookback: A series without a sample for this long before the window counts as new.
        skipped_updates: Skipped updates within `event_window` that are too many.
        clean_audit_age: Oldest acceptable clean audit of a live run.
        weight_check_age: Oldest acceptable passing weight check of a live run.
        silent_for: Steps without a single verdict for this long are an alarm.
        stalled_for: No completed step for this long is an alarm.
        blind_for: How long coverage may be off or outputs only.
        overhead_ratio: Budget of the guard as a share of step time.
        overhead_for: How long the budget may be exceeded.
        offender_window: How far back suspects are looked for across runs.
        offender_runs: Runs in which one GPU was suspect that are too many.
    """

    event_window: str = "15m"
    hold: str = "15d"
    ended_within: str = "1d"
    inhibits_for: str = "30m"
    born_lookback: str = "1h"
    skipped_updates: int = 3
    clean_audit_age: str = "1h"
    weight_check_age: str = "1h"
    silent_for: str = "10m"
    stalled_for: str = "15m"
    blind_for: str = "5m"
    overhead_ratio: float = 0.1
    overhead_for: str = "15m"
    offender_window: str = "14d"
    offender_runs: int = 2

    def __post_init__(self) -> None:
        """Check every field."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "str":
                duration_seconds(value)
            else:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                positive = number and 0 < value < math.inf
                expect(positive, f"`{f.name}` > 0", value, "Pass a positive number.")
                whole = f.type != "int" or isinstance(value, int)
                expect(whole, f"`{f.name}` to be a whole number", value, "Pass an integer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Everything the generated files depend on.

    Attributes:
        datasource: UID of the Prometheus data source: preselected on the dashboards, and fixed in
            the Grafana-managed rules, where Grafana allows no variable.
        scope_labels: Labels that, beside `run`, tell runs apart, e.g. ``("cluster", "namespace")``:
            variables of the dashboards, kept on alerts, part of every join.
        rule_matchers: Equality matchers put into every selector of every rule.
        grafana_url: Where the dashboards are; prefix of `dashboard_url`. Empty leaves it out.
        runbook_url: Where docs/runbook.md is; `runbook_url` is this and an anchor.
        uid_prefix: Prefix of dashboard and rule UIDs.
        refresh: Refresh interval of the dashboards.
        severities: Alert name to severity, where it differs from the default.
        prometheusrule_labels: Labels by which the Prometheus operator selects the PrometheusRule.
        thresholds: When alerts fire.
    """

    datasource: str = "prometheus"
    scope_labels: tuple[str, ...] = ()
    rule_matchers: Mapping[str, str] = field(default_factory=dict)
    grafana_url: str = "http://localhost:3000"
    runbook_url: str = "http://localhost:9090/user/runbook.html"
    uid_prefix: str = "sdcwatch"
    refresh: str = "10s"
    severities: Mapping[str, str] = field(default_factory=dict)
    prometheusrule_labels: Mapping[str, str] = field(
        default_factory=lambda: {"release": "kube-prometheus-stack"}
    )
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        """Check every field."""
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name))
        expect(
            bool(self.datasource.strip()),
            "`datasource` to be a UID",
            self.datasource,
            "Pass its UID.",
        )
        expect(
            _UID.fullmatch(self.uid_prefix) is not None,
            "`uid_prefix` of at most 28 characters of a-z, A-Z, 0-9, _ and -",
            self.uid_prefix,
            "Grafana allows 40 for the whole UID.",
        )
        for label in (*self.scope_labels, *self.rule_matchers):
            expect(
                _LABEL.fullmatch(label) is not None
                and not label.startswith("__")
                and label not in _OTHERS.union(_TAKEN),
                f"a Prometheus label name other than {', '.join(f'`{name}`' for name in _TAKEN)} "
                "and those of alerts and of sdcwatch's own metrics",
                label,
                "Correct `scope_labels` or `rule_matchers`.",
            )
        expect(
            len(set(self.scope_labels)) == len(self.scope_labels),
            "`scope_labels` to name each label once",
            self.scope_labels,
            "Leave the second out.",
        )
        for name in ("grafana_url", "runbook_url"):
            url = getattr(self, name)
            expect(
                url == "" or re.fullmatch(r"https?://\S+", url) is not None,
                f"`{name}` to start with http:// or https://",
                url,
                "Pass a full URL, or an empty one to leave the link out.",
            )
        duration_seconds(self.refresh)
        for alert, severity in self.severities.items():
            expect(
                severity in SEVERITIES,
                f"the severity of {alert} to be one of {SEVERITIES}",
                severity,
                "Correct `severities`.",
            )


def _check_type(name: str, value: object) -> None:
    """Refuse a value that is not of the type of its field, at whatever depth.

    Raises:
        ConfigurationError: It is not.
    """
    held: tuple[object, ...] = ()
    if name in _LISTS:
        expect(isinstance(value, list | tuple), f"`{name}` to be a list", value, "Use [a, b].")
        held = tuple(value) if isinstance(value, list | tuple) else ()
    elif name in _MAPPINGS:
        expect(isinstance(value, Mapping), f"`{name}` to be a mapping", value, "Use key: value.")
        held = (*value, *value.values()) if isinstance(value, Mapping) else ()
    elif name == "thresholds":
        known = isinstance(value, Thresholds)
        expect(known, "`thresholds` to be a mapping", value, "Use key: value.")
    else:
        expect(isinstance(value, str), f"`{name}` to be text", value, "Quote it.")
    for part in held:
        expect(isinstance(part, str), f"`{name}` to hold text", part, "Quote it; one value each.")


def _typed(name: str, value: Any) -> Any:
    if name == "thresholds":
        expect(isinstance(value, Mapping), "`thresholds` to be a mapping", value, "Use key: value.")
        _require_known("thresholds", value, Thresholds)
        return Thresholds(**value)
    return tuple(value) if name in _LISTS and isinstance(value, list) else value


def _require_known(what: str, given: Mapping[Any, Any], of: type[Any]) -> None:
    known = sorted(f.name for f in fields(of))
    unknown = [name for name in given if name not in known]
    expect(not unknown, f"{what} among {known}", unknown, "Check the spelling.")


def load_config(path: Path | None, **overrides: Any) -> MonitorConfig:
    """The configuration in a YAML file, or the default one, with `overrides` winning.

    Args:
        path: A YAML file with fields of `MonitorConfig`; None for the defaults.
        **overrides: Fields; None means not given.

    Raises:
        ConfigurationError: The file cannot be read, or a field is unknown or cannot work.
    """
    data: Any = {}
    if path is not None:
        try:
            read = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
            msg = f"Expected {path} to be a readable YAML file, but got: {error}. Correct it."
            raise ConfigurationError(msg) from error
        data = {} if read is None else read
        expect(isinstance(data, dict), f"{path} to hold a mapping", data, "Use field: value.")
    _require_known("fields", data, MonitorConfig)
    config = MonitorConfig(**{name: _typed(name, value) for name, value in data.items()})
    given = {k: v for k, v in overrides.items() if v is not None}
    return replace(config, **given) if given else config
