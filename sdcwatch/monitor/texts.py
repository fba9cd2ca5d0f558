"""An alert and what it says; and what its text looks up, for whoever is woken by it.

Prometheus asks while it writes the text; Grafana's templates cannot ask, so that a Grafana-managed
rule gets each lookup as a query of its own and the text reads its labels. Both say the same words,
and neither fails where there is nothing to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sdcwatch.core.catalog import (
    END_INFO,
    GUARD_STATE,
    LAST_EVENT_STEP,
    RUN_INFO,
    SUSPECT_INFO,
    Metric,
)
from sdcwatch.monitor import run_queries
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.promql import Scope, Window, dedup_exporters, last, newest, rule_scope, select

DAY = Window.of("1d")


@dataclass(frozen=True, slots=True)
class Lookup:
    """One thing that a text looks up.

    Attributes:
        name: What ``{name}`` in a text stands for.
        on: Labels that it shares with the alert, besides those of the run.
        keep: Labels that it brings along.
        say: Template of one answer; ``.Labels`` and ``.Value`` are those of the answer.
        ask: PromQL, as a function of the scope.
    """

    name: str
    on: tuple[str, ...]
    keep: tuple[str, ...]
    say: str
    ask: Callable[[Scope], str]

    def prometheus(self, scope: Scope) -> str:
        """The template of Prometheus: asks about the labels of the alert."""
        labels = (*scope.by, *self.on)
        matchers = tuple(f"{label}=%[{i}]q" for i, label in enumerate(labels, start=1))
        asked = self.ask(replace(scope, matchers=(*scope.matchers, *matchers)))
        values = " ".join(f"$labels.{label}" for label in labels)
        by = f' | sortByLabel "{self.keep[0]}"' if self.keep else ""
        return f"{{{{ range printf `{asked}` {values} | query{by} }}}}{self.say}{{{{ end }}}}"

    def grafana(self, ref: str) -> str:
        """The template of Grafana: reads the query `ref`, if it had an answer."""
        return f"{{{{ with $values.{ref} }}}}{self.say}{{{{ end }}}}"

    def grafana_query(self, expr: str, scope: Scope) -> str:
        """A query whose answers have the labels of the alert and those of the lookup.

        Args:
            expr: PromQL of the alert.
            scope: Of the rules.
        """
        on, keep = scope.labels(*self.on), ", ".join(self.keep)
        return f"({expr}) * 0 + on ({on}) group_left ({keep}) ({self.ask(scope)})"


def _evidence(scope: Scope) -> str:
    return run_queries.told_at(
        last(select(SUSPECT_INFO, scope), DAY),
        run_queries.last_finding(scope, *run_queries.DEVICE),
        scope,
        run_queries.Told(by=run_queries.DEVICE, step="last_step", text="evidence"),
    )


def _checkpoint(scope: Scope) -> str:
    return run_queries.checkpoint(scope, DAY)


def _newest_text(metric: Metric, label: str) -> Callable[[Scope], str]:
    """The text that an info metric of the run had last, as that label."""

    def ask(scope: Scope) -> str:
        known = dedup_exporters(newest(select(metric, scope), scope, DAY), scope, label)
        return f"topk by ({scope.labels()}) (1, {known})"

    return ask


def _going_on(scope: Scope) -> str:
    lives = run_queries.active(scope)
    known = dedup_exporters(last(select(GUARD_STATE, scope), DAY), scope)
    ended = f"{known} unless on ({scope.labels()}) ({lives})"
    return " or ".join(
        f'label_replace({expression}, "now", "{word}", "", "")'
        for expression, word in ((lives, "goes on"), (ended, "has stopped"))
    )


def _counts(scope: Scope) -> str:
    device = run_queries.DEVICE
    counted = run_queries.wrong_in(scope, *device, "check")
    return f"{counted} unless on ({scope.labels(*device)}) ({_evidence(scope)})"


EVIDENCE = Lookup(
    "evidence",
    run_queries.DEVICE,
    ("evidence",),
    "Evidence: {{ .Labels.evidence }}. ",
    _evidence,
)
"""How sure it is: n of m, reproduced or not, the operation."""

COUNTS = Lookup(
    "counts",
    run_queries.DEVICE,
    ("check", "wrong_in"),
    "{{ .Labels.check }} check: wrong in {{ .Labels.wrong_in }}. ",
    _counts,
)
"""The same in numbers, where no words are exported."""

DEVICE_STEP = Lookup(
    "device_step",
    run_queries.DEVICE,
    (),
    ', last at step {{ printf "%.0f" .Value }}',
    lambda scope: run_queries.last_finding(scope, *run_queries.DEVICE),
)
CHECK_STEP = Lookup(
    "check_step",
    ("check",),
    (),
    ', last at step {{ printf "%.0f" .Value }}',
    lambda scope: (
        f"{dedup_exporters(last(select(LAST_EVENT_STEP, scope), DAY), scope, 'check')} > 0"
    ),
)
GOING_ON = Lookup("going_on", (), ("now",), "The run {{ .Labels.now }}. ", _going_on)
CHECKPOINT = Lookup(
    "checkpoint",
    (),
    ("step", "path"),
    "Last good checkpoint: step {{ .Labels.step }}{{ with .Labels.path }}, {{ . }}{{ end }}. ",
    _checkpoint,
)
HOW = Lookup("how", (), ("how",), ": {{ .Labels.how }}", _newest_text(END_INFO, "how"))
RUN_DIR = Lookup(
    "run_dir",
    (),
    ("run_dir",),
    "{{ with .Labels.run_dir }}"
    "Run directory: {{ . }} (first: sdcwatch suspects {{ . }}). {{ end }}",
    _newest_text(RUN_INFO, "run_dir"),
)
REPORT = Lookup(
    "report",
    (),
    ("run_dir",),
    "{{ with .Labels.run_dir }}Run directory: {{ . }} (first: sdcwatch report {{ . }}). {{ end }}",
    _newest_text(RUN_INFO, "run_dir"),
)
"""Where the event log is, and the first command to type."""

LOOKUPS = {
    lookup.name: lookup
    for lookup in (
        EVIDENCE,
        COUNTS,
        DEVICE_STEP,
        CHECK_STEP,
        GOING_ON,
        CHECKPOINT,
        HOW,
        RUN_DIR,
        REPORT,
    )
}

_PLACE = re.compile(r"\{(\w+(?::\w+)?)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: CamelCase, prefixed.
        expr: PromQL; positive where it fires.
        severity: critical, warning or info.
        summary: One constant sentence.
        text: Who, on what evidence, and what to do first. ``{name}`` is a lookup, ``{run}`` the run
            with its scope labels, ``{instance}`` that of the device, ``{label:x}`` a label of the
            alert, ``{value}`` its value, ``{duration}`` and ``{share}`` the value in these forms.
        wait_for: How long the expression must hold before it fires.
        dashboard: The dashboard that shows it: fleet, run or suspect.
        variables: Labels passed on to the dashboard.
    """

    name: str
    expr: str
    severity: str
    summary: str
    text: str
    wait_for: str = "0s"
    dashboard: str = "run"
    variables: tuple[str, ...] = ("run",)

    @property
    def anchor(self) -> str:
        """Its heading in the runbook."""
        return self.name.lower()

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """What its text looks up, in order."""
        return tuple(LOOKUPS[name] for name in _PLACE.findall(self.text) if name in LOOKUPS)


def dashboard_url(alert: Alert, config: MonitorConfig) -> str:
    """Template of the link to the dashboard that shows the alert; empty without a base URL."""
    if not config.grafana_url:
        return ""
    url = f"{config.grafana_url.rstrip('/')}/d/{config.uid_prefix}-{alert.dashboard}"
    names = (*config.scope_labels, *alert.variables) if alert.variables else ()
    query = "&".join(
        f"var-{name.removeprefix('suspect_')}={{{{ $labels.{name} | urlquery }}}}" for name in names
    )
    return f"{url}?{query}" if query else url


def description(alert: Alert, config: MonitorConfig, lookups: Mapping[str, str], value: str) -> str:
    """The text of an alert as a template.

    Args:
        alert: The alert.
        config: Scope labels are said beside the run.
        lookups: Template of each lookup by its name.
        value: How the language of the template calls the value, e.g. ``$value``.
    """
    scope = ", ".join(f"{name} {{{{ $labels.{name} }}}}" for name in config.scope_labels)
    known = {
        "run": "Run {{ $labels.run }}" + (f" ({scope})" if scope else ""),
        "instance": "{{ with $labels.suspect_instance_id }} of instance {{ . }}{{ end }}",
        "value": f"{{{{ with {value} }}}}{{{{ . }}}}{{{{ end }}}}",
        "duration": f"{{{{ with {value} }}}}{{{{ . | humanizeDuration }}}}{{{{ end }}}}",
        "share": f"{{{{ with {value} }}}}{{{{ . | humanizePercentage }}}}{{{{ end }}}}",
        **lookups,
    }

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name.startswith("label:"):
            return f"{{{{ $labels.{name.removeprefix('label:')} }}}}"
        return known[name]

    return _PLACE.sub(fill, alert.text).strip()


def annotations_of(alert: Alert, config: MonitorConfig, text: str | None = None) -> dict[str, str]:
    """Summary, description and, where a base URL is configured, the two links.

    Args:
        alert: The alert.
        config: Where dashboards and runbook are.
        text: The description, if not that of Prometheus.
    """
    if text is None:
        scope = rule_scope(config)
        lookups = {lookup.name: lookup.prometheus(scope) for lookup in alert.lookups}
        text = description(alert, config, lookups, "$value")
    links = {
        "runbook_url": f"{config.runbook_url}#{alert.anchor}" if config.runbook_url else "",
        "dashboard_url": dashboard_url(alert, config),
    }
    return {
        "summary": alert.summary,
        "description": text,
        **{name: url for name, url in links.items() if url},
    }
