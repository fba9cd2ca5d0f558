import logging
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from sdcwatch.core.catalog import BY_NAME, BY_PROMETHEUS, CATALOG, RESOURCE_LABELS
from sdcwatch.core.records import Check, GuardState, Note, Outcome, RunFinished, Verdict
from sdcwatch.sinks import otel_internals
from sdcwatch.sinks.otel import Identity, OtelSink

IDENTITY = Identity(run="run-7", rank=0, attempt=0, node="node-0", version="0.1.0")
SUFFIXES = ("_bucket", "_count", "_sum")


@pytest.fixture
def application(monkeypatch):
    """Makes a provider that stands for one the application has set."""

    def use(provider):
        monkeypatch.setattr(otel_internals, "application_provider", lambda: provider)
        return provider

    return use


@pytest.fixture
def scraped(sinks, feed, faulty_run, scrape):
    """The text of a scrape at the end of the faulty run."""
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)
    dispatcher.emit(Note(step=60, time=0.0, code="last", message="counts up to here"))
    feed(dispatcher, [])
    return scrape(dispatcher.links["metrics"])


def families(text):
    """Metric name to its labels, over all samples."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        name, labels = re.match(r"([a-z_]+)(?:\{(.*)\})? ", line).groups()
        names = set(re.findall(r"(\w+)=\"", labels or ""))
        base = next((name[: -len(s)] for s in SUFFIXES if name.endswith(s)), name)
        base = base if base in BY_PROMETHEUS else name
        found.setdefault(base, set()).update(names - {"le"})
    return found


def test_a_live_scrape_of_a_faulty_run_equals_the_catalogue_both_ways(scraped):
    found = families(scraped)
    found.pop("target_info")

    assert {m.prometheus: {*m.labels, *RESOURCE_LABELS} for m in CATALOG} == found


def test_kinds_and_help_texts_are_those_of_the_catalogue(scraped):
    for metric in CATALOG:
        assert f"# HELP {metric.prometheus} {metric.help}" in scraped
        assert f"# TYPE {metric.prometheus} {metric.kind}" in scraped


def test_a_scrape_at_the_end_of_a_faulty_run_has_the_right_values(scraped, series, faulty_totals):
    found = series(scraped)

    wrong = {
        key: (expected, found.get(key))
        for key, expected in faulty_totals.items()
        if found.get(key) != pytest.approx(expected)
    }
    assert wrong == {}


def test_only_suspects_and_strikes_have_series_of_their_own(scraped, series):
    ranks = {
        label
        for key in series(scraped)
        for label in key[1:]
        if key[0].startswith("sdcwatch_rank") and label.startswith("suspect_rank=")
    }
    assert ranks == {"suspect_rank=1", "suspect_rank=3"}
    states = [key for key in series(scraped) if key[0] == "sdcwatch_rank_state"]
    assert len(states) == 1


def test_a_suspect_rank_and_the_exporting_rank_are_never_confused(scraped):
    lines = [line for line in scraped.splitlines() if re.search(r'[{,]suspect_rank="', line)]

    assert lines
    for line in lines:
        assert re.search(r'exporter_rank="0"', line)
        assert re.search(r'[{,]suspect_rank="(3|1)"', line)
    named = [line for line in lines if line.startswith("sdcwatch_rank_state")]
    assert all(re.search(r'[{,]suspect_rank="3"', line) for line in named)


def test_no_series_carries_a_scope_label_a_tensor_name_or_a_step(scraped):
    """Info metrics carry steps, which is what they are for."""
    lines = [line for line in scraped.splitlines() if "_info{" not in line]

    assert "otel_scope" not in scraped
    assert "layer1" not in scraped
    assert not [line for line in lines if 'step="' in line]


@pytest.mark.promtool
def test_promtool_finds_nothing_to_say_about_a_scrape(scraped):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped, capture_output=True, text=True
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_case_1_counters_exist_as_zero_before_the_first_event(sinks, feed, scrape, series, start):
    dispatcher, _ = sinks(start)
    feed(dispatcher, [start])

    found = series(scrape(dispatcher.links["metrics"]))

    assert found[("sdcwatch_verdicts_total", "cause=none", "check=replay", "outcome=suspect")] == 0
    assert found[("sdcwatch_checkpoints_total", "reason=tainted", "result=withheld")] == 0


def test_whatever_moment_a_scrape_comes_at_a_failed_run_has_its_reason(
    sinks, feed, scrape, series, start, monkeypatch
):
    dispatcher, _ = sinks(start)
    feed(dispatcher, [start])
    record, scrapes, fetches = OtelSink._record, [], []

    def record_and_be_scraped(sink, measurement):
        record(sink, measurement)
        if measurement.attributes.get("state") == "failed":
            fetch = threading.Thread(
                target=lambda: scrapes.append(scrape(dispatcher.links["metrics"]))
            )
            fetch.start()
            fetch.join(0.3)
            fetches.append(fetch)

    monkeypatch.setattr(OtelSink, "_record", record_and_be_scraped)
    reason = "the run ended with ValueError"
    end = RunFinished(step=3, time=1.0, state=GuardState.FAILED, reason=reason, exit_code=1)
    feed(dispatcher, [end])
    for fetch in fetches:
        fetch.join(10)

    (found,) = map(series, scrapes)
    assert found[("sdcwatch_guard_state", "state=failed")] == 1
    assert found[("sdcwatch_end_info", f"how={reason}")] == 1


def test_scrapes_return_while_the_training_thread_sleeps_in_a_hook(sinks, feed, scrape, faulty_run):
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)
    wake = threading.Event()
    hook = threading.Thread(target=wake.wait, args=(60.0,))
    hook.start()

    texts = [scrape(dispatcher.links["metrics"], timeout=5) for _ in range(10)]

    assert hook.is_alive()
    assert all("sdcwatch_verdicts_total" in text for text in texts)
    wake.set()
    hook.join()


def test_the_end_of_the_run_stays_on_the_endpoint_for_a_last_scrape(
    sinks, feed, scrape, series, faulty_run
):
    dispatcher, _ = sinks(faulty_run[0], linger_seconds=30.0)
    feed(dispatcher, faulty_run)
    url = dispatcher.links["metrics"]
    closing = threading.Thread(target=dispatcher.close)
    closing.start()

    found = series(scrape(url))

    assert found[("sdcwatch_guard_state", "state=finished")] == 1
    assert closing.is_alive()
    for worker in dispatcher.workers:
        worker.hurry()
    closing.join(10)
    assert not closing.is_alive()


def test_the_end_waits_for_one_more_scrape_where_there_was_one(
    sinks, feed, scrape, series, faulty_run
):
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run[:-1])
    url = dispatcher.links["metrics"]
    scrape(url)
    (endpoint,) = [w.sink._parts.endpoint for w in dispatcher.workers if w.sink.lingers]
    endpoint.scrapes.patience = lambda: 30.0  # as after two scrapes 15 s apart
    feed(dispatcher, faulty_run[-1:])
    closing = threading.Thread(target=dispatcher.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()

    found = series(scrape(url))

    assert found[("sdcwatch_guard_state", "state=finished")] == 1
    closing.join(10)
    assert not closing.is_alive()


def test_the_end_waits_for_nobody_where_nobody_ever_came(sinks, feed, faulty_run):
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)
    (endpoint,) = [w.sink._parts.endpoint for w in dispatcher.workers if w.sink.lingers]
    assert endpoint.scrapes.patience() == 0.0


def test_a_scrape_at_16384_ranks_with_40_suspects_has_at_most_720_lines(
    sinks, feed, make, scrape, faulty_run
):
    start = make.start(16_384)
    suspects = tuple(
        make.suspect(rank, Check.REPLAY, 20, start.ranks) for rank in range(0, 16_000, 400)
    )
    named = Verdict(
        step=70, time=0.0, check=Check.REPLAY, outcome=Outcome.SUSPECT, reason="forty",
        failed=True, suspects=suspects,
    )  # fmt: skip
    dispatcher, _ = sinks(start)
    feed(dispatcher, [start, *faulty_run[1:], named])

    text = scrape(dispatcher.links["metrics"])

    assert len(suspects) == 40
    assert len(text.splitlines()) <= 720
    assert text.count("\nsdcwatch_rank_state{") == 41  # rank 3 of the faulty run is another


def test_which_ranks_export_is_a_function_of_the_topology(make):
    from sdcwatch.sinks.build import exporting_ranks

    ranks = make.ranks(6)

    assert exporting_ranks(ranks, "leader") == (0,)
    assert exporting_ranks(ranks, "node") == (0, 2, 4)
    assert exporting_ranks(ranks[::-1], "node") == (0, 2, 4)
    assert exporting_ranks(ranks, "all") == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(("rank", "serves"), [(0, True), (1, False), (2, True)])
def test_a_rank_that_does_not_export_starts_no_endpoint(sinks, start, rank, serves):
    dispatcher, _ = sinks(start, rank=rank, export="node")

    assert ("metrics" in dispatcher.links) == serves


def test_a_taken_port_is_a_warning_and_the_local_rank_is_added(sinks, start, free_port):
    port = free_port()
    first, _ = sinks(start, prometheus_port=port)
    _second, lines = sinks(start, prometheus_port=port)
    third, _ = sinks(start, rank=1, local_rank=1, prometheus_port=port + 40, export="all")

    assert first.links["metrics"] == f"http://127.0.0.1:{port}/metrics"
    assert any(line.startswith(f"Warning: port {port} is taken") for line in lines)
    assert third.links["metrics"] == f"http://127.0.0.1:{port + 41}/metrics"


def test_an_address_that_cannot_be_bound_is_a_warning_and_the_run_goes_on(sinks, feed, faulty_run):
    dispatcher, lines = sinks(faulty_run[0], prometheus_host="192.0.2.1")
    feed(dispatcher, faulty_run)

    assert any("Warning: no /metrics endpoint" in line for line in lines)
    assert dispatcher.links == {}
    assert all(counts.lost == 0 for counts in dispatcher.counts)


def test_file_sd_entry_is_written_and_removed(sinks, start, tmp_path):
    dispatcher, lines = sinks(start, file_sd_dir=tmp_path / "sd")

    (entry,) = (tmp_path / "sd").iterdir()
    assert any(str(entry) in line for line in lines)
    dispatcher.close()
    assert not entry.exists()


def test_metrics_off_by_the_standard_variable_is_said(sinks, start):
    dispatcher, lines = sinks(start, disabled=True)

    assert "OTEL_SDK_DISABLED is true: no metrics." in lines
    assert dispatcher.links == {}


def test_telemetry_off_leaves_the_event_log_alone(start, tmp_path, environment):
    from sdcwatch.sinks.build import build_sinks

    dispatcher, lines = build_sinks(
        "off", start, rank=0, local_rank=0, environment=environment(), run_dir=tmp_path
    )
    dispatcher.emit(start)
    dispatcher.close()

    assert lines == (f"Events are written to {tmp_path / 'events.jsonl'}.",)
    assert [counts.sink for counts in dispatcher.counts] == ["jsonl"]


def points(reader):
    """What the application's reader has: instrument name to attributes to value."""
    found = {}
    for rm in reader.get_metrics_data().resource_metrics:
        for metric in (m for sm in rm.scope_metrics for m in sm.metrics):
            for point in metric.data.data_points:
                value = getattr(point, "value", getattr(point, "count", None))
                key = frozenset(point.attributes.items())
                found.setdefault(metric.name, {})[key] = value
    return found


def test_the_providers_of_the_application_is_used_and_nothing_else_is_started(
    application, sinks, feed, faulty_run
):
    reader = InMemoryMetricReader()
    application(MeterProvider([reader]))
    dispatcher, lines = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)

    found = points(reader)

    assert set(found) == set(BY_NAME)
    assert any("meter provider of the application" in line for line in lines)
    assert dispatcher.links == {}
    suspect = next(iter(found["sdcwatch.rank.state"]))
    assert {("run", "run-7"), ("exporter_rank", "0"), ("suspect_rank", "3")} <= suspect


def test_no_provider_is_ever_set_globally(sinks, feed, faulty_run):
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)

    assert otel_internals.application_provider() is None
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"
    assert b"sdcwatch" not in generate_latest(REGISTRY)


def test_a_provider_that_the_application_has_set_is_found():
    code = (
        "from opentelemetry import metrics\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "from sdcwatch.sinks.otel_internals import application_provider\n"
        "assert application_provider() is None\n"
        "mine = MeterProvider()\n"
        "metrics.set_meter_provider(mine)\n"
        "assert application_provider() is mine\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_case_3_callbacks_record_nothing(sinks, feed, faulty_run):
    """Recording inside an observable callback can deadlock: those of info metrics only copy."""
    callbacks = []

    class Watched(MeterProvider):
        def get_meter(self, *arguments, **options):
            meter = super().get_meter(*arguments, **options)
            meter.create_observable_gauge = lambda *a, **k: callbacks.append(a)
            return meter

    sink = OtelSink.of_application(Watched([InMemoryMetricReader()]), IDENTITY)
    for record in faulty_run:
        sink.emit(record)

    assert [name for name, *_ in callbacks] == [m.name for m in CATALOG if m.info]
    sink._apply.clear()
    observed = {name: sources[0](None) for name, sources, *_ in callbacks}
    assert {name: len(found) for name, found in observed.items()} == {
        "sdcwatch.run.info": 1,
        "sdcwatch.event.info": 5,
        "sdcwatch.suspect.info": 1,
        "sdcwatch.checkpoint.info": 1,
        "sdcwatch.end.info": 1,
    }


def test_case_3_a_collection_during_an_emit_returns(sinks, feed, scrape, faulty_run):
    dispatcher, _ = sinks(faulty_run[0])
    stop = threading.Event()

    def keep_emitting():
        while not stop.is_set():
            for record in faulty_run:
                dispatcher.emit(record)
            time.sleep(0.01)

    emitting = threading.Thread(target=keep_emitting)
    emitting.start()
    began = time.monotonic()
    for _ in range(10):
        scrape(dispatcher.links["metrics"], timeout=5)
    stop.set()
    emitting.join()
    assert time.monotonic() - began < 50


def test_case_9_an_instrument_of_the_same_name_in_another_scope_shifts_no_label(
    sinks, feed, scrape, series, start, application, faulty_run
):
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(scope_info_enabled=False, registry=registry)])
    other = provider.get_meter("other").create_counter("sdcwatch.audit.comparisons")
    other.add(1, {"zzz": "theirs"})
    dispatcher, _ = sinks(start)  # with a provider of its own
    feed(dispatcher, faulty_run)

    found = series(scrape(dispatcher.links["metrics"]))

    assert found[("sdcwatch_audit_comparisons_total",)] == 36
    assert not [key for key in found if "zzz" in "".join(key)]


def test_case_11_two_runs_in_one_process_share_no_registry(sinks, feed, scrape, make, faulty_run):
    first, _ = sinks(make.start(run="first"))
    second, _ = sinks(make.start(run="second"))
    feed(first, [make.start(run="first")])
    feed(second, [make.start(run="second"), *faulty_run[1:]])

    texts = [scrape(d.links["metrics"]) for d in (first, second)]

    assert 'run="second"' not in texts[0]
    assert 'run="first"' not in texts[1]
    assert 'sdcwatch_audit_comparisons_total{exporter_rank="0",run="first"} 0.0' in texts[0]
    assert 'sdcwatch_audit_comparisons_total{exporter_rank="0",run="second"} 36.0' in texts[1]
    assert texts[1].count("# TYPE sdcwatch_steps_total") == 1


def test_two_guards_on_the_providers_of_the_application_count_each_for_itself(
    application, sinks, feed, make, caplog
):
    reader = InMemoryMetricReader()
    application(MeterProvider([reader]))
    with caplog.at_level(logging.WARNING):
        for run in ("first", "second"):
            dispatcher, _ = sinks(make.start(run=run))
            feed(dispatcher, [make.start(run=run), *make.faulty_run()[1:]])

    comparisons = points(reader)["sdcwatch.audit.comparisons"]

    assert {dict(key)["run"]: n for key, n in comparisons.items()} == {"first": 36, "second": 36}
    assert caplog.records == []


def exponential_provider(registry, name="*"):
    view = View(instrument_name=name, aggregation=ExponentialBucketHistogramAggregation())
    return MeterProvider([PrometheusMetricReader(registry=registry)], views=[view])


def test_case_13_exponential_views_of_the_application_do_not_touch_our_endpoint(
    sinks, feed, scrape, faulty_run, monkeypatch
):
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        "base2_exponential_bucket_histogram",
    )
    exponential_provider(CollectorRegistry())
    dispatcher, _ = sinks(faulty_run[0], otlp=True)
    feed(dispatcher, faulty_run)

    text = scrape(dispatcher.links["metrics"])

    assert 'sdcwatch_check_duration_seconds_bucket{check="replay"' in text


def test_case_13_an_exponential_view_that_breaks_the_applications_scrape_is_reported(
    application, sinks, feed, faulty_run
):
    registry = CollectorRegistry()
    application(exponential_provider(registry, "sdcwatch.*"))
    dispatcher, lines = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)

    with pytest.raises(AttributeError):  # what the exporter does with it today
        generate_latest(registry)
    assert any("exponential histograms" in line for line in lines)


def test_case_13_an_exponential_view_of_other_instruments_is_no_news(application, sinks, start):
    application(exponential_provider(CollectorRegistry(), "http.*"))
    _, lines = sinks(start)

    assert not any("exponential histograms" in line for line in lines)


def test_a_scrape_compresses_when_asked(sinks, feed, faulty_run):
    dispatcher, _ = sinks(faulty_run[0])
    feed(dispatcher, faulty_run)
    request = urllib.request.Request(
        dispatcher.links["metrics"], headers={"Accept-Encoding": "gzip"}
    )
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.headers["Content-Encoding"] == "gzip"


def test_buckets_are_those_of_the_catalogue(scraped):
    bounds = re.findall(
        r'sdcwatch_check_duration_seconds_bucket\{check="replay".*?le="([^"]+)"', scraped
    )
    expected = [f"{b}" for b in BY_NAME["sdcwatch.check.duration"].buckets]

    assert bounds == [*expected, "+Inf"]


def test_drops_of_another_sink_show_on_the_endpoint(
    sinks, feed, doubles, scrape, series, faulty_run
):
    dispatcher, _ = sinks(faulty_run[0], extra=[doubles.raising()])
    feed(dispatcher, faulty_run)
    feed(dispatcher, faulty_run[-1:])

    found = series(scrape(dispatcher.links["metrics"]))

    dropped = found[("sdcwatch_telemetry_dropped_total", "reason=error", "sink=other")]
    assert dropped >= len(faulty_run)
    assert found[("sdcwatch_telemetry_events_total", "sink=otel")] == len(faulty_run) + 1
