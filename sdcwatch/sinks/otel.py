"""Records as OpenTelemetry metrics.

If the application has set a meter provider, that one is used and nothing else is started. Else the
sink makes a provider of its own, never a global one: a Prometheus reader with its own registry
behind an HTTP endpoint, and a push over OTLP if the standard variables name an endpoint.

The exporting process is named by ``run`` and ``exporter_rank`` on every measurement. They are in
the resource too, but a resource becomes labels only where the receiver is told so: as attributes
they are equal over pull, over push and through an application's provider. ``rank``, ``node`` and
``gpu`` are always those the verdict is about.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from prometheus_client import CollectorRegistry

from sdcwatch.core import catalog
from sdcwatch.core.catalog import CATALOG, Metric
from sdcwatch.sinks.base import SCRAPE_SECONDS, SinkCounts, SummarySink
from sdcwatch.sinks.endpoint import MetricsEndpoint
from sdcwatch.sinks.metrics import Measurement, RecordMetrics
from sdcwatch.sinks.otel_internals import between_collections, breaks_every_scrape, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics.export import MetricReader

    from sdcwatch.core.records import Record
    from sdcwatch.core.summary import RunSummary
    from sdcwatch.sinks.endpoint import Scrapes
    from sdcwatch.sinks.otlp import OtlpReader

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The exporting process.

    Attributes:
        run: Name of the run.
        rank: Its rank.
        attempt: How often the launcher restarted the group.
        node: Its node.
        version: Version of sdcwatch.
        run_id: Tells runs of one name apart; "" where it is not known.
    """

    run: str
    rank: int
    attempt: int
    node: str
    version: str
    run_id: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """What every measurement carries."""
        return {"run": self.run, "exporter_rank": str(self.rank)}

    @property
    def file_name(self) -> str:
        """A name for a file of this run and process among those of other runs."""
        key = hashlib.sha256(f"{self.run}/{self.run_id}".encode()).hexdigest()[:8]
        return f"{key}-{self.rank}"

    def resource(self) -> Resource:
        """The resource: ours, then what the standard variables say, then who is who."""
        base: dict[str, str | int] = {
            "service.name": "sdcwatch",
            "service.instance.id": f"{self.run}/{self.rank}/{self.attempt}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
        who: dict[str, str | int] = {
            **self.labels,
            "sdcwatch.run.id": self.run_id or self.run,
            "sdcwatch.rank": self.rank,
            "sdcwatch.node": self.node,
        }
        own = Resource(base).merge(OTELResourceDetector().detect()).merge(Resource(who))
        found = Resource.create().attributes
        return Resource({k: v for k, v in found.items() if k.startswith("telemetry.")}).merge(own)


@dataclass(slots=True)
class _Parts:
    """What a provider of our own consists of."""

    provider: MeterProvider
    pull: PrometheusMetricReader | None = None
    push: OtlpReader | None = None
    endpoint: MetricsEndpoint | None = None
    lines: list[str] = field(default_factory=list)


class OtelSink(SummarySink):
    """Applies records to the instruments of the catalogue.

    Attributes:
        lines: One sentence each about where the metrics go.
        links: ``metrics``: URL of the endpoint, if there is one.
        lingers: There is an endpoint that may stay up for a last scrape.
    """

    name = "otel"

    def __init__(
        self,
        provider: metrics.MeterProvider,
        identity: Identity,
        links: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._provider, self._identity = provider, identity
        meter = provider.get_meter("sdcwatch", identity.version, SCHEMA_URL)
        self._metrics = RecordMetrics(links)
        self._infos: Mapping[str, Sequence[Measurement]] = {}
        self._apply = {m.name: _instrument(meter, m) for m in CATALOG if not m.info}
        self._ended = observe(meter, [m for m in CATALOG if m.info], self._observed)
        self._parts: _Parts | None = None
        self._linger_seconds = 0.0
        self._hurry = threading.Event()
        self._counts: Callable[[], Sequence[SinkCounts]] = tuple
        self._told: dict[tuple[str, str], int] = {}

    @classmethod
    def of_application(
        cls,
        provider: metrics.MeterProvider,
        identity: Identity,
        links: Mapping[str, str] | None = None,
    ) -> OtelSink:
        """A sink on the provider the application has set."""
        sink = cls(provider, identity, links)
        sink.lines = (
            "Metrics go through the meter provider of the application; "
            "sdcwatch starts no endpoint of its own.",
            *_warn_of_views(provider),
        )
        return sink

    @classmethod
    def standalone(
        cls,
        identity: Identity,
        *,
        listen: tuple[str, int] | None,
        file_sd_dir: Path | str | None = None,
        otlp: bool = False,
        linger_seconds: float = 0.0,
        links: Mapping[str, str] | None = None,
    ) -> OtelSink:
        """A sink with a provider of its own.

        Args:
            identity: The exporting process.
            listen: Host and port of the endpoint; None for none.
            file_sd_dir: Where to announce it to Prometheus.
            otlp: Push over OTLP/HTTP as the standard variables say.
            linger_seconds: How long the endpoint stays up in `close`.
            links: URLs for the info metric.
        """
        parts = _own_provider(identity, listen, file_sd_dir, otlp)
        sink = cls(parts.provider, identity, links)
        sink._parts = parts
        sink._linger_seconds = linger_seconds
        sink.lines = tuple(parts.lines)
        if parts.endpoint is not None:
            sink.lingers = True
            sink.links = {"metrics": parts.endpoint.url}
        return sink

    def attach(self, counts: SinkCounts) -> None:
        """Count pushes that fail as lost by this sink."""
        if self._parts is not None and self._parts.push is not None:
            self._parts.push.attach(counts)

    def watch(self, counts: Callable[[], Sequence[SinkCounts]]) -> None:
        """Export the counts of all sinks as well, this one included."""
        self._counts = counts

    def receive(self, record: Record, summary: RunSummary) -> None:
        """Measure one record; no scrape sees half of it."""
        measured = self._metrics.measure(record, summary)
        infos = self._metrics.infos(summary)
        with between_collections(self._provider):
            self._infos = infos
            for measurement in measured:
                self._record(measurement)
        self._count_sinks()

    def close(self, timeout_seconds: float) -> None:
        """Push what is left, keep the endpoint for a last scrape, let go."""
        deadline = time.monotonic() + timeout_seconds
        self._count_sinks()
        self._ended()
        parts, self._parts = self._parts, None
        if parts is None:
            return
        linger = min(self._linger_seconds, timeout_seconds, threading.TIMEOUT_MAX)
        if parts.push is not None:
            kept = linger if parts.endpoint is None else linger + SCRAPE_SECONDS
            parts.push.shutdown(timeout_millis=max(0.05, timeout_seconds - kept) * 1000)
        if parts.endpoint is not None:
            self._await_scrape(parts.endpoint.scrapes, linger, deadline)
            parts.endpoint.close()
        if parts.pull is not None:
            parts.pull.shutdown()

    def _await_scrape(self, scrapes: Scrapes, linger: float, deadline: float) -> None:
        """Stay up for as long as was asked, and until the last state has been fetched.

        Only where somebody has fetched one before, and not for ever.
        """
        now = time.monotonic()
        if self._hurry.wait(min(linger, max(0.0, deadline - now))):
            return
        end = min(deadline, now + scrapes.patience())
        while not scrapes.since(now) and time.monotonic() < end and not self._hurry.wait(0.05):
            pass

    def hurry(self) -> None:
        """Wait for no last scrape: somebody pressed Ctrl-C."""
        self._hurry.set()

    def release_in_child(self) -> None:
        """In a forked child: let go of the endpoint's socket."""
        if self._parts is not None and self._parts.endpoint is not None:
            self._parts.endpoint.release_in_child()

    def _record(self, m: Measurement) -> None:
        self._apply[m.metric.name](m.value, {**m.attributes, **self._identity.labels})

    def _observed(self, name: str) -> list[Observation]:
        return [
            Observation(m.value, {**m.attributes, **self._identity.labels})
            for m in self._infos.get(name, ())
        ]

    def _count_sinks(self) -> None:
        for counts in self._counts():
            sink = {"sink": counts.sink}
            self._grow(catalog.TELEMETRY_EVENTS, counts.events, sink)
            for reason, lost in counts.dropped.items():
                self._grow(catalog.TELEMETRY_DROPPED, lost, {**sink, "reason": reason})
            self._record(Measurement(catalog.TELEMETRY_QUEUE, counts.waiting, sink))

    def _grow(self, metric: Metric, total: int, attributes: dict[str, str]) -> None:
        key = (metric.name, "/".join(attributes.values()))
        known = self._told.get(key)
        self._told[key] = total
        if known is None or total > known:
            self._record(Measurement(metric, total - (known or 0), attributes))


def _instrument(meter: Meter, metric: Metric) -> Callable[[float, dict[str, str]], None]:
    if metric.kind == "counter":
        return meter.create_counter(metric.name, metric.unit, metric.help).add
    if metric.kind == "gauge":
        return meter.create_gauge(metric.name, metric.unit, metric.help).set
    return meter.create_histogram(
        metric.name,
        metric.unit,
        metric.help,
        explicit_bucket_boundaries_advisory=list(metric.buckets),
    ).record


def _own_provider(
    identity: Identity, listen: tuple[str, int] | None, file_sd_dir: Path | str | None, otlp: bool
) -> _Parts:
    lines: list[str] = []
    registry = CollectorRegistry()
    pull = None
    if listen is not None:
        # Scope labels would be on every series and change with each release.
        pull = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    push = _push(lines) if otlp else None
    readers: list[MetricReader] = [reader for reader in (pull, push) if reader is not None]
    provider = MeterProvider(readers, identity.resource(), shutdown_on_exit=False)
    endpoint = None
    if listen is not None:
        endpoint, said = _serve(registry, listen, file_sd_dir, identity.file_name)
        lines[:0] = said
    return _Parts(provider, pull, push, endpoint, lines)


def _push(lines: list[str]) -> OtlpReader | None:
    from sdcwatch.sinks.otlp import OtlpReader  # pulls in an HTTP client

    try:
        reader = OtlpReader()
    except Exception as error:  # a variable nobody can read must not stop a training run
        lines.append(
            "Warning: no OTLP push, the OTEL_* variables cannot be used "
            f"({type(error).__name__}). Check them against the OpenTelemetry specification."
        )
        return None
    lines.append(f"Metrics are pushed over OTLP/HTTP to {reader.where}.")
    return reader


def _serve(
    registry: CollectorRegistry, listen: tuple[str, int], file_sd_dir: Path | str | None, name: str
) -> tuple[MetricsEndpoint | None, list[str]]:
    host, port = listen
    try:
        endpoint = MetricsEndpoint(registry, host, port)
    except OSError as error:
        return None, [f"Warning: no /metrics endpoint, {host} could not be bound: {error}."]
    lines = [f"Metrics are served at {endpoint.url}."]
    if port not in (0, endpoint.port):
        lines[0] = f"Warning: port {port} is taken; metrics are served at {endpoint.url} instead."
    if file_sd_dir is not None:
        try:
            entry = endpoint.announce(Path(file_sd_dir), name)
            lines.append(f"Prometheus finds the endpoint through {entry}.")
        except OSError as error:
            lines.append(f"Warning: no file_sd entry in {file_sd_dir}: {error.strerror}.")
    return endpoint, lines


def _warn_of_views(provider: metrics.MeterProvider) -> tuple[str, ...]:
    """Say so when the application's own views and reader cannot serve a histogram together."""
    if breaks_every_scrape(provider, [m.name for m in CATALOG if m.kind == "histogram"]):
        return (
            "Warning: the application has a view with exponential histograms, which its Prometheus "
            "reader cannot serve: every scrape fails. Give that view an instrument name, or use "
            "OTLP.",
        )
    return ()
