"""Each thing that sdcwatch relies on inside OpenTelemetry still is as it was found."""

import inspect
import threading

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry

from sdcwatch.core.catalog import EVENT_INFO
from sdcwatch.sinks import otel_internals


def found(reader):
    data = reader.get_metrics_data()
    if data is None:
        return []
    return [
        point.attributes["event"]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]


def test_until_an_application_sets_a_provider_there_is_none():
    assert otel_internals.application_provider() is None
    assert otel_internals.application_logger_provider() is None


@pytest.mark.parametrize("make", [OTLPMetricExporter, otel_internals.OTLPLogExporter])
def test_an_exporter_can_be_asked_where_it_pushes(make, otlp_environment):
    otlp_environment(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    exporter = make()

    assert otel_internals.endpoint_of(exporter).startswith("http://127.0.0.1:9/v1/")
    exporter.shutdown()


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("sdcwatch.*", True),
        ("other.*", False),
    ],
)
def test_a_view_that_breaks_every_scrape_is_seen(name, breaks):
    view = View(instrument_name=name, aggregation=ExponentialBucketHistogramAggregation())
    reader = PrometheusMetricReader(registry=CollectorRegistry())
    provider = MeterProvider([reader], views=[view], shutdown_on_exit=False)

    assert otel_internals.breaks_every_scrape(provider, ["sdcwatch.check.duration"]) is breaks
    provider.shutdown()


def test_the_reader_that_a_fork_would_start_again_has_the_hook_that_is_emptied():
    assert "_at_fork_reinit" in inspect.getsource(PeriodicExportingMetricReader.__init__)


def test_a_series_that_is_not_observed_any_more_is_gone():
    reader, events = InMemoryMetricReader(), ["1", "2"]
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("x")
    otel_internals.observe(
        meter, [EVENT_INFO], lambda name: [Observation(1, {"event": e}) for e in events]
    )

    assert found(reader) == ["1", "2"]
    del events[0]
    assert found(reader) == ["2"]


def test_a_second_guard_on_one_meter_is_observed_and_one_that_ended_stays_until_then():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)

    def observe(event):
        meter = provider.get_meter("sdcwatch", "1")
        return otel_internals.observe(
            meter, [EVENT_INFO], lambda name: [Observation(1, {"event": event})]
        )

    ended = observe("of the first")
    ended()
    assert found(reader) == ["of the first"]
    observe("of the second")
    assert found(reader) == ["of the second"]
    observe("of the third, beside it")
    assert sorted(found(reader)) == ["of the second", "of the third, beside it"]


def test_a_collection_waits_for_what_is_recorded_together():
    reader, other = InMemoryMetricReader(), threading.Event()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    gauge = provider.get_meter("x").create_gauge("g")
    seen = []

    def collect():
        other.set()
        data = reader.get_metrics_data()
        points = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
        seen.append(len(points))

    with otel_internals.between_collections(provider):
        gauge.set(1, {"part": "first"})
        thread = threading.Thread(target=collect)
        thread.start()
        other.wait(10)
        thread.join(0.1)
        gauge.set(1, {"part": "second"})
    thread.join(10)
    assert seen == [2]


def test_a_provider_of_another_making_is_recorded_to_all_the_same():
    with otel_internals.between_collections(object()):
        pass


def test_a_collection_that_does_not_end_keeps_nobody_from_recording(monkeypatch):
    monkeypatch.setattr(otel_internals, "COLLECT_SECONDS", 0.01)
    provider, recorded = MeterProvider(shutdown_on_exit=False), []
    with (
        otel_internals.between_collections(provider),
        otel_internals.between_collections(provider),
    ):
        recorded.append(True)
    assert recorded
