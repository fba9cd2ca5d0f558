"""PromQL, as functions of the catalogue and of a scope; nothing about layout or thresholds.

Three rules hold everywhere:

- **One fact, one series.** Several exporters of a run, and pull beside push, export the same fact.
  `max by` over the labels that matter comes before any `sum`, and a join never uses `instance`.
- **Birth-aware.** A counter whose first sample is already 1 never has an `increase`. `recent` and
  `total` count what a series was born with, and what a process did before its first scrape.
- **After the job.** Ranges, not instants: series go stale five minutes after the process ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sdcwatch.core.catalog import BY_NAME, Metric
from sdcwatch.monitor.config import MonitorConfig, duration_seconds

VERDICTS = BY_NAME["sdcwatch.verdicts"]
COMPARISONS = BY_NAME["sdcwatch.audit.comparisons"]
MISMATCHES = BY_NAME["sdcwatch.audit.mismatches"]
FINGERPRINT_CHECKS = BY_NAME["sdcwatch.fingerprint.checks"]
DISAGREEMENTS = BY_NAME["sdcwatch.fingerprint.disagreements"]
NONFINITE = BY_NAME["sdcwatch.nonfinite"]
SKIPPED = BY_NAME["sdcwatch.updates.skipped"]
CHECKPOINTS = BY_NAME["sdcwatch.checkpoints"]
STEPS = BY_NAME["sdcwatch.steps"]
STEP_TIME = BY_NAME["sdcwatch.step.time"]
OVERHEAD_TIME = BY_NAME["sdcwatch.overhead.time"]
CHECK_DURATION = BY_NAME["sdcwatch.check.duration"]
RANK_STATE = BY_NAME["sdcwatch.rank.state"]
RANK_EVIDENCE = BY_NAME["sdcwatch.rank.evidence"]
RANK_STRIKES = BY_NAME["sdcwatch.rank.strikes"]
GUARD_STATE = BY_NAME["sdcwatch.guard.state"]
COVERAGE = BY_NAME["sdcwatch.coverage"]
AUDITED_RANKS = BY_NAME["sdcwatch.audited.ranks"]
WORLD_SIZE = BY_NAME["sdcwatch.world.size"]
RUN_INFO = BY_NAME["sdcwatch.run.info"]
STEP = BY_NAME["sdcwatch.step"]
LOSS = BY_NAME["sdcwatch.loss"]
STEPS_AT_RISK = BY_NAME["sdcwatch.steps.at_risk"]
START_TIME = BY_NAME["sdcwatch.start.time"]
LAST_PROGRESS_TIME = BY_NAME["sdcwatch.last_progress.time"]
LAST_CLEAN_AUDIT_TIME = BY_NAME["sdcwatch.last_clean_audit.time"]
LAST_CLEAN_AUDIT_STEP = BY_NAME["sdcwatch.last_clean_audit.step"]
LAST_WEIGHT_CHECK_TIME = BY_NAME["sdcwatch.last_weight_check.time"]
LAST_WEIGHT_CHECK_STEP = BY_NAME["sdcwatch.last_weight_check.step"]
LAST_GOOD_CHECKPOINT_TIME = BY_NAME["sdcwatch.last_good_checkpoint.time"]
LAST_GOOD_CHECKPOINT_STEP = BY_NAME["sdcwatch.last_good_checkpoint.step"]
LAST_EVENT_TIME = BY_NAME["sdcwatch.last_event.time"]
LAST_EVENT_STEP = BY_NAME["sdcwatch.last_event.step"]
TELEMETRY_EVENTS = BY_NAME["sdcwatch.telemetry.events"]
TELEMETRY_DROPPED = BY_NAME["sdcwatch.telemetry.dropped"]
TELEMETRY_QUEUE = BY_NAME["sdcwatch.telemetry.queue.length"]

TARGET_LABELS = ("job", "instance", "run", "exporter_rank")
"""What tells one exporting process from another; used only to match a process with itself."""

Words = str | Enum | tuple[str | Enum, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A range, as PromQL writes it and in seconds.

    Attributes:
        text: ``15m`` or ``$__range``.
        seconds: ``900`` or ``$__range_s``.
    """

    text: str
    seconds: str

    @classmethod
    def of(cls, duration: str) -> Window:
        """The window of a fixed duration."""
        return cls(duration, str(duration_seconds(duration)))


RANGE = Window("$__range", "$__range_s")
"""The range of the dashboard."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series a query is about, and what tells their runs apart.

    Attributes:
        matchers: Matchers of every selector, e.g. ``run=~"$run"``.
        by: Labels that tell runs apart, `run` last.
        lookback: A series without a sample for this long before a window was born inside it.
        who: Label and matcher for metrics about a device, e.g.
            ``("suspect_gpu", 'suspect_gpu=~"$gpu"')``; metrics without the label are about the run
            and ignore it.
    """

    matchers: tuple[str, ...]
    by: tuple[str, ...]
    lookback: str = "6h"
    who: tuple[str, str] | None = None

    def labels(self, *more: str) -> str:
        """`by` and more labels, as PromQL lists them."""
        return ", ".join((*self.by, *more))


def rule_scope(config: MonitorConfig) -> Scope:
    """The scope of alert rules."""
    matchers = tuple(f'{k}="{_escape(v)}"' for k, v in sorted(config.rule_matchers.items()))
    return Scope(matchers, (*config.scope_labels, "run"), config.thresholds.born_lookback)


def dashboard_scope(config: MonitorConfig) -> Scope:
    """The scope of dashboard queries: every variable is a matcher."""
    names = (*config.scope_labels, "job", "run")
    matchers = tuple(f'{name}=~"${name}"' for name in names)
    return Scope(matchers, (*config.scope_labels, "run"), config.thresholds.born_lookback)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _words(value: Words) -> tuple[str, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(str(v.value) if isinstance(v, Enum) else v for v in values)


def select(metric: Metric, scope: Scope, suffix: str = "", **labels: Words) -> str:
    """A selector; every label and value is held against the catalogue.

    Args:
        metric: The metric.
        scope: Adds its matchers.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        **labels: A value, or a tuple of values of which any matches. A value with a ``$`` is a
            dashboard variable and matches as a regular expression.

    Raises:
        KeyError: The metric has no such label.
        ValueError: The label never has that value.
    """
    attributes = {a.name: a for a in metric.attributes}
    parts = list(scope.matchers)
    if scope.who is not None and scope.who[0] in attributes:
        parts.append(scope.who[1])
    for name, value in labels.items():
        allowed = attributes[name].values
        words = _words(value)
        for word in words:
            if allowed is not None and word not in allowed and not word.startswith("$"):
                msg = f"Expected {name} of {metric.name} among {allowed}, but got {word!r}."
                raise ValueError(msg)
        exact = len(words) == 1 and not words[0].startswith("$")
        parts.append(f'{name}{"=" if exact else "=~"}"{_escape("|".join(words))}"')
    name = metric.prometheus + suffix
    return f"{name}{{{','.join(parts)}}}" if parts else name


def last(selector: str, window: Window = RANGE) -> str:
    """The last sample within a window, also after the process ended."""
    return f"last_over_time({selector}[{window.text}])"


def fact(expression: str, scope: Scope, *labels: str) -> str:
    """One value per run and `labels`, however many processes export it."""
    return f"max by ({scope.labels(*labels)}) ({expression})"


def _since_birth(selector: str, scope: Scope, window: Window) -> str:
    """The value of counters whose whole life lies inside the window."""
    value = last(selector, window)
    started = last(select(START_TIME, scope), window)
    targets = ", ".join((*scope.by[:-1], *TARGET_LABELS))
    young = f"{value} and on ({targets}) ({started} > time() - {window.seconds})"
    born = f"{value} unless last_over_time({selector}[{scope.lookback}] offset {window.text})"
    return f"({young} or {born})"


def recent(selector: str, scope: Scope, window: Window, *labels: str) -> str:
    """Where a counter counted anything within the window; the value is positive, not a count."""
    born = _since_birth(selector, scope, window)
    return fact(f"increase({selector}[{window.text}]) > 0 or {born} > 0", scope, *labels)


def total(selector: str, scope: Scope, window: Window, *labels: str) -> str:
    """How often a counter counted within the window, births and restarts included."""
    born = _since_birth(selector, scope, window)
    grown = f"round(increase({selector}[{window.text}]))"
    return fact(f"{born} >= {grown} or {grown} or {born}", scope, *labels)


def newest(selector: str, scope: Scope, window: Window = RANGE) -> str:
    """The last sample of the process of a run that started last: earlier ones are history."""
    started = last(select(START_TIME, scope), window)
    targets = ", ".join((*scope.by[:-1], *TARGET_LABELS))
    by = scope.labels()
    mine = f"({started} == on ({by}) group_left () max by ({by}) ({started}))"
    return f"{last(selector, window)} and on ({targets}) {mine}"


def summed(expression: str, scope: Scope) -> str:
    """The sum per run."""
    return f"sum by ({scope.labels()}) ({expression})"


def rate(selector: str, scope: Scope, window: str, *labels: str) -> str:
    """Rate per second, one per run and `labels`."""
    return fact(f"rate({selector}[{window}])", scope, *labels)


def grown(selector: str, scope: Scope, window: str, *labels: str) -> str:
    """How much a counter grew, one per run and `labels`; for bars, where a birth shows anyway."""
    return fact(f"increase({selector}[{window}])", scope, *labels)


def overhead_ratio(scope: Scope, window: str) -> str:
    """Seconds in the guard per second of training step."""
    guard = summed(rate(select(OVERHEAD_TIME, scope), scope, window, "check"), scope)
    steps = summed(rate(select(STEP_TIME, scope), scope, window, "kind"), scope)
    return f"{guard} / {steps}"


def first_of(*expressions: str) -> str:
    """For each label set the first expression that has it."""
    return " or ".join(f"({e})" for e in expressions)


def constant(expression: str, value: int) -> str:
    """`value` wherever the expression has a series."""
    return f"({expression}) * 0 + {int(value)}"


_TOKEN = re.compile(
    r"""
    (?P<string>"(?:\\.|[^"\\])*")
  | (?P<open>\()
  | (?P<close>\))
  | (?P<set>\ (?:or|and|unless)\ )
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
SHORT = 100


def pretty(expression: str) -> str:
    """The same expression with line breaks; short ones stay on one line."""
    if len(expression) <= SHORT:
        return expression
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(expression):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth -= 1
        if token["set"]:
            parts.append(f"\n{'  ' * depth}{token['set'].lstrip()}")
        else:
            parts.append(token[0])
    return "".join(parts)
