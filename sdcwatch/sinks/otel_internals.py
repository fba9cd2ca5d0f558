"""What sdcwatch relies on in OpenTelemetry beyond its documented surface: each once, and why.

Everything here was found in version 1.45 of the API and SDK and is held by one test each. The logs
API is private as a whole, which is why all of its names come from here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import _logs
from opentelemetry._logs import SeverityNumber as SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as OTLPLogExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import (
    CallbackOptions,
    Meter,
    MeterProvider,
    Observation,
    get_meter_provider,
)
from opentelemetry.sdk._logs import LoggerProvider as LoggerProvider
from opentelemetry.sdk._logs import ReadableLogRecord as ReadableLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor as BatchLogRecordProcessor
from opentelemetry.sdk._logs.export import LogRecordExportResult as LogRecordExportResult
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation

from sdcwatch.core.catalog import Metric

ApiLoggerProvider = _logs.LoggerProvider

COLLECT_SECONDS = 2.0
"""How long a collection is waited for: callbacks of an application's own may take any time."""
_PROXIES = ("_ProxyMeterProvider", "ProxyLoggerProvider")
Infos = Callable[[str], Iterable[Observation]]
"""The series of an info metric, by its name, as they are now."""


def application_provider() -> MeterProvider | None:
    """The meter provider that the application has set, or None.

    Until one is set, the API returns its proxy, which has no public name.
    """
    provider = get_meter_provider()
    return None if type(provider).__name__ in _PROXIES else provider


def application_logger_provider() -> ApiLoggerProvider | None:
    """The logger provider that the application has set, or None; as above."""
    provider = _logs.get_logger_provider()
    return None if type(provider).__name__ in _PROXIES else provider


def endpoint_of(exporter: Any) -> str:
    """Where an OTLP exporter pushes: it reads that from the environment and has no accessor."""
    return str(exporter._endpoint)


def breaks_every_scrape(provider: MeterProvider, histograms: Sequence[str]) -> bool:
    """Whether a provider has a Prometheus reader, and a view that it cannot serve.

    The reader raises at an exponential histogram, and the scrape fails as a whole. Views and
    readers of a provider have no accessors.
    """
    views = getattr(getattr(provider, "_sdk_config", None), "views", ())
    exponential = any(
        isinstance(getattr(view, "_aggregation", None), ExponentialBucketHistogramAggregation)
        and fnmatch.filter(histograms, getattr(view, "_instrument_name", None) or "*")
        for view in views
    )
    readers = getattr(provider, "_metric_readers", ())
    return exponential and any(isinstance(r, PrometheusMetricReader) for r in readers)


@contextmanager
def between_collections(provider: MeterProvider) -> Iterator[None]:
    """Let readers of a provider collect before or after what is recorded in here, not meanwhile.

    Else one scrape has the new state of a run and not yet its reason, and an alert keeps the text
    that it fired with. A collection takes a lock, and a measurement does not; it has no accessor.
    """
    lock: Any = getattr(getattr(provider, "_measurement_consumer", None), "_lock", None)
    taken = lock is not None and lock.acquire(timeout=COLLECT_SECONDS)
    try:
        yield
    finally:
        if taken:
            lock.release()


class StaysDeadInChild(PeriodicExportingMetricReader):
    """A periodic reader that a forked child does not start again.

    The SDK starts a new thread there, which pushes the parent's counters once more, or blocks for
    ever on a lock that an export held during the fork.
    """

    def _at_fork_reinit(self) -> None:
        """Start nothing."""


class InfoSources:
    """Who observes info metrics on one meter.

    An observable instrument that is made twice on one meter, by a second guard in the process, is
    the first one again, and the callback of the second is dropped without a word. So the callbacks
    are made once per meter, and ask whoever is there.
    """

    def __init__(self, meter: Meter, metrics: Iterable[Metric]) -> None:
        self._sources: list[tuple[Infos, list[bool]]] = []
        for metric in metrics:
            meter.create_observable_gauge(
                metric.name, [self._observer(metric.name)], metric.unit, metric.help
            )

    def add(self, infos: Infos) -> Callable[[], None]:
        """Observe these too; call what it returns when they will not change any more."""
        self._sources[:] = [source for source in self._sources if not source[1]]
        ended: list[bool] = []
        self._sources.append((infos, ended))
        return lambda: ended.append(True)

    def _observer(self, name: str) -> Callable[[CallbackOptions], list[Observation]]:
        # It only copies: recording inside a callback can deadlock.
        return lambda options: [o for infos, _ in tuple(self._sources) for o in infos(name)]


_ON_METER: WeakKeyDictionary[Meter, InfoSources] = WeakKeyDictionary()


def observe(meter: Meter, metrics: Iterable[Metric], infos: Infos) -> Callable[[], None]:
    """Export info metrics through a meter: a series that is not observed any more is gone.

    Returns:
        What to call when they will not change any more; they stay until somebody else observes.
    """
    if meter not in _ON_METER:
        _ON_METER[meter] = InfoSources(meter, metrics)
    return _ON_METER[meter].add(infos)
