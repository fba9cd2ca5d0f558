"""What every sink promises, over every sink there is."""

import time

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sdcwatch.core.catalog import BY_NAME
from sdcwatch.core.records import RECORD_TYPES, Hang, Note
from sdcwatch.sinks.base import DROP_REASONS, KNOWN_SINKS, Sink, catalogue_name, public_url
from sdcwatch.sinks.base import without_user_info as clean
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import JsonlSink
from sdcwatch.sinks.otel import Identity, OtelSink
from sdcwatch.sinks.otel_logs import OtelLogSink

IDENTITY = Identity(run="run-7", rank=0, attempt=0, node="node-0", version="0.1.0")


class StillRun:
    """A W&B run that takes everything."""

    url, dir, id, tags = None, "", "x", ()

    class summary:
        update = staticmethod(lambda values: None)

    def __getattr__(self, name):
        return lambda *arguments, **options: None


def wandb_sink():
    module = pytest.importorskip("sdcwatch.sinks.wandb", reason="pip install 'sdcwatch[wandb]'")
    return module.WandbSink(StillRun())


MAKERS = {
    "jsonl": lambda root: JsonlSink(root / "events.jsonl"),
    "otel, of the application": lambda root: OtelSink.of_application(
        MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False), IDENTITY
    ),
    "otel, its own": lambda root: OtelSink.standalone(IDENTITY, listen=("127.0.0.1", 0)),
    "otel_logs": lambda root: OtelLogSink(
        LoggerProvider(shutdown_on_exit=False), IDENTITY.labels, "0"
    ),
    "wandb": lambda root: wandb_sink(),
}


@pytest.fixture(params=MAKERS)
def sink(request, tmp_path):
    made = MAKERS[request.param](tmp_path)
    yield made
    made.close(1.0)


@pytest.fixture
def every_kind(faulty_run):
    return [
        *faulty_run,
        Hang(step=61, time=2e9, reporter=1, operation="all-reduce", absent=(2,)),
        Note(step=61, time=2e9, code="x", message="y"),
    ]


def test_it_is_a_sink_with_a_name_of_the_catalogue(sink):
    assert isinstance(sink, Sink)
    assert sink.name in KNOWN_SINKS


def test_it_takes_every_kind_of_record(sink, every_kind):
    assert {r.kind for r in every_kind} == set(RECORD_TYPES)

    for record in every_kind:
        sink.emit(record)


def test_it_closes_within_its_budget_and_may_be_closed_again(sink, faulty_run):
    for record in faulty_run:
        sink.emit(record)
    began = time.monotonic()
    sink.close(0.5)
    sink.close(0.5)

    assert time.monotonic() - began < 5 * 2 * 0.5


def test_it_loses_nothing_behind_a_dispatcher(sink, every_kind):
    dispatcher = Dispatcher([sink])
    for record in every_kind:
        dispatcher.emit(record)
    dispatcher.close()

    (counts,) = dispatcher.counts
    assert (counts.events, counts.lost) == (len(every_kind), 0)
    assert counts.sink == sink.name


def test_the_words_of_the_dispatcher_are_those_of_the_catalogue():
    attributes = {a.name: a.values for a in BY_NAME["sdcwatch.telemetry.dropped"].attributes}

    assert attributes["reason"] == DROP_REASONS
    assert set(attributes["sink"]) == {*KNOWN_SINKS, catalogue_name("anything else")}


@pytest.mark.parametrize(
    ("url", "cleaned", "public"),
    [
        ("http://u:p@h:1/a?b=c#d", "http://h:1/a?b=c#d", "http://h:1/a"),
        ("https://[::1]:9/x", "https://[::1]:9/x", "https://[::1]:9/x"),
        ("https://u@h", "https://h", "https://h"),
        ("", "", ""),
    ],
)
def test_a_url_loses_what_may_be_secret(url, cleaned, public):
    assert clean(url) == cleaned
    assert public_url(url) == public
