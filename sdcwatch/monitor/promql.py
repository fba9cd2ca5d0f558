"""PromQL, as functions of the catalogue and of a scope; nothing about layout or thresholds.

Four rules hold everywhere:

- **One fact, one series.** Several exporters of a run, and pull beside push, export the same fact.
  `dedup_exporters` comes before any `sum`, and a join never uses `instance` but to match a process
  with itself.
- **Counter-reset aware.** A counter starts at 0 in every process, and one whose first sample is
  already 1 never has an `increase`. `recent`, `total` and `per_interval` count births and restarts.
- **A run is more than a process.** State and word are those of the process that started last
  (`newest`); counts are sums over the processes, one after the other, of each exporting rank.
- **After the job.** Ranges, not instants: series go stale five minutes after the process ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sdcwatch.core.catalog import START_TIME, Metric
from sdcwatch.monitor.config import MonitorConfig, duration_seconds

TARGET_LABELS = ("job", "instance", "run", "exporter_rank")
"""What tells one exporting process from another; used only to match a process with itself."""

SEGMENT = "start"
"""Label that a query gives to the counts of a process: its start, in which pull and push agree."""

Words = str | Enum | tuple[str | Enum, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """Every value of a label but these; a series without the label matches too."""

    words: Words


@dataclass(frozen=True, slots=True)
class Window:
    """A range, as PromQL writes it and in seconds.

    Attributes:
        text: ``15m`` or ``$__range``.
        seconds: ``900`` or ``$__range_s``.
        at: Modifier of every selector, e.g. `` @ end()``.
    """

    text: str
    seconds: str
    at: str = ""

    @classmethod
    def of(cls, duration: str) -> Window:
        """The window of a fixed duration."""
        return cls(duration, str(duration_seconds(duration)))


RANGE = Window("$__range", "$__range_s")
"""The range of the dashboard."""
WHOLE_RANGE = Window("$__range", "$__range_s", " @ end()")
"""The same at every step of a range query: its whole range."""
INTERVAL = Window("$__interval", "($__interval_ms / 1000)")
"""What one bar stands for."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series a query is about, and what tells their runs apart.

    Attributes:
        matchers: Matchers of every selector, e.g. ``run="a"``.
        by: Labels that tell runs apart, `run` last.
        lookback: A series without a sample for this long before a window was born inside it.
        who: Label and matcher for metrics about a device, e.g.
            ``("suspect_gpu", 'suspect_gpu="GPU-1"')``; metrics without the label are about the run
            and ignore it.
    """

    matchers: tuple[str, ...]
    by: tuple[str, ...]
    lookback: str = "1h"
    who: tuple[str, str] | None = None

    def labels(self, *more: str) -> str:
        """`by` and more labels, as PromQL lists them."""
        return ", ".join((*self.by, *more))

    @property
    def process(self) -> str:
        """The labels of one exporting process."""
        return ", ".join((*self.by[:-1], *TARGET_LABELS))


def rule_scope(config: MonitorConfig) -> Scope:
    """The scope of alert rules."""
    matchers = tuple(f'{k}="{_escape(v)}"' for k, v in sorted(config.rule_matchers.items()))
    return Scope(matchers, (*config.scope_labels, "run"), config.thresholds.born_lookback)


def variable_matcher(name: str, label: str = "") -> str:
    """A matcher of a label, its own name unless given, for a dashboard variable of any text.

    Grafana escapes the value for a regular expression; in backquotes nothing is escaped again.
    """
    return f"{label or name}=~`${{{name}:regex}}`"


def dashboard_scope(config: MonitorConfig) -> Scope:
    """The scope of dashboard queries: every variable is a matcher."""
    names = (*config.scope_labels, "job", "run")
    matchers = tuple(variable_matcher(name) for name in names)
    return Scope(matchers, (*config.scope_labels, "run"), config.thresholds.born_lookback)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _words(value: Words) -> tuple[str, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(str(v.value) if isinstance(v, Enum) else v for v in values)


def select(metric: Metric, scope: Scope, suffix: str = "", **labels: Words | Not) -> str:
    """A selector; every label and value is held against the catalogue.

    Args:
        metric: The metric.
        scope: Adds its matchers.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        **labels: A value, a tuple of values of which any matches, or `Not` such.

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
        words = _words(value.words if isinstance(value, Not) else value)
        for word in words:
            if allowed is not None and word not in allowed:
                msg = f"Expected {name} of {metric.name} among {allowed}, but got {word!r}."
                raise ValueError(msg)
        several = len(words) > 1
        operator = (
            ("!~" if several else "!=") if isinstance(value, Not) else "=~" if several else "="
        )
        parts.append(f'{name}{operator}"{_escape("|".join(words))}"')
    name = metric.prometheus + suffix
    return f"{name}{{{','.join(parts)}}}" if parts else name


def last(selector: str, window: Window = RANGE) -> str:
    """The last sample within a window, also after the process ended."""
    return f"last_over_time({selector}[{window.text}]{window.at})"


def dedup_exporters(expression: str, scope: Scope, *labels: str) -> str:
    """One value per run and `labels`, however many processes export it."""
    return f"max by ({scope.labels(*labels)}) ({expression})"


def newest(selector: str, scope: Scope, window: Window = RANGE) -> str:
    """The last sample of the process of a run that started last: earlier ones are history.

    A process without a start time is not left out.
    """
    started = last(select(START_TIME, scope), window)
    by, process = scope.labels(), scope.process
    earlier = f"{started} < on ({by}) group_left () max by ({by}) ({started})"
    return f"{last(selector, window)} unless on ({process}) ({earlier})"


def recent(selector: str, scope: Scope, window: Window, *labels: str) -> str:
    """Where a counter counted anything within the window; the value is positive, not a count."""
    value = last(selector, window)
    young = f"({last(select(START_TIME, scope), window)} > time() - {window.seconds})"
    before = f"last_over_time({selector}[{scope.lookback}] offset {window.text})"
    # Born inside the window, or counted by a process that was.
    born = f"{value} > 0 unless ({before} unless on ({scope.process}) {young})"
    return dedup_exporters(f"increase({selector}[{window.text}]) > 0 or {born}", scope, *labels)


def _counted(selector: str, scope: Scope, window: Window) -> str:
    """How often each series of a counter counted within the window, over one restart of its target.

    Exact where `increase` extrapolates. With `before` the value at the start of the window, `peak`
    the highest and `now` the last value in it: what grew up to the peak, and all of `now` if the
    counter has been higher.
    """
    now, peak = last(selector, window), f"max_over_time({selector}[{window.text}]{window.at})"
    before = f"({_before(selector, scope, window)} or {peak} * 0)"
    grown = f"clamp_min({peak} - {before}, 0)"
    return f"{grown} + {now} * ({now} < bool ({grown} + {before}))"


def _before(selector: str, scope: Scope, window: Window) -> str:
    """What each process had counted when the window began; nothing where it was born later.

    What the same target counted before another process took its place is no start to count from.
    """
    past = f"[{scope.lookback}]{window.at} offset {window.text}"
    started = select(START_TIME, scope)
    other = f"last_over_time({started}{past}) < min_over_time({started}[{window.text}]{window.at})"
    return f"last_over_time({selector}{past}) unless on ({scope.process}) ({other})"


def _over_segments(
    counted: str, selector: str, scope: Scope, window: Window, labels: tuple[str, ...]
) -> str:
    """Counts of processes, added up over the processes that an exporting rank was in turn."""
    process = scope.process
    any_count = f"max by ({process}) ({last(selector, window)}) * 0"
    started = f"({last(select(START_TIME, scope), window)} or on ({process}) {any_count})"
    segment = f'count_values by ({process}) ("{SEGMENT}", {started})'
    joined = f"({counted}) * on ({process}) group_left ({SEGMENT}) {segment}"
    once = dedup_exporters(joined, scope, "exporter_rank", SEGMENT, *labels)
    rank = f"sum by ({scope.labels('exporter_rank', *labels)}) ({once})"
    return dedup_exporters(rank, scope, *labels)


def total(selector: str, scope: Scope, window: Window, *labels: str) -> str:
    """How often a counter counted within the window, births and restarts included.

    One that is 0 may have no answer.
    """
    restarted = f"resets({selector}[{window.text}]{window.at}) > 0"
    # What a process counted before another took its target over is known to `increase` only.
    many = f"round(increase({selector}[{window.text}]{window.at})) > 0 and {restarted}"
    # Most counters are 0: they are left out before anything is matched.
    now = f"({last(selector, window)} > 0)"
    counted = f"{many} or {now} - ({_before(selector, scope, window)}) >= 0 or {now}"
    return _over_segments(counted, selector, scope, window, labels)


def per_interval(selector: str, scope: Scope, *labels: str) -> str:
    """How often a counter counted in each interval of a panel: bars whose sum is the count."""
    counted = _counted(selector, scope, INTERVAL)
    return f"{_over_segments(counted, selector, scope, INTERVAL, labels)} > 0"


def summed(expression: str, scope: Scope) -> str:
    """The sum per run."""
    return f"sum by ({scope.labels()}) ({expression})"


def rate(selector: str, scope: Scope, window: str, *labels: str) -> str:
    """Rate per second, one per run and `labels`."""
    return dedup_exporters(f"rate({selector}[{window}])", scope, *labels)


def first_of(*expressions: str) -> str:
    """For each label set the first expression that has it."""
    return " or ".join(f"({e})" for e in expressions)


def constant(expression: str, value: int) -> str:
    """`value` wherever the expression has a series."""
    return f"({expression}) * 0 + {int(value)}"


_TOKEN = re.compile(
    r"""
    (?P<string>"(?:\\.|[^"\\])*"|`[^`]*`)
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
