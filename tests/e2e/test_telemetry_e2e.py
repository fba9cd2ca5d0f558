"""The demo's default faults as a real Prometheus, an OTLP receiver and W&B's own file see them."""

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from sdcwatch.core.catalog import CATALOG
from sdcwatch.core.records import Outcome
from sdcwatch.testing import load_file

SELF = "sdcwatch_telemetry_"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.promtool,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed; Debian has it in the package prometheus",
    ),
]


FIXTURES = load_file(Path(__file__).parents[1] / "sinks" / "conftest.py", "sink_fixtures")


def totals_of(windows):
    """Series that add up over windows."""

    def total(name):
        return sum(getattr(window, name) for window in windows)

    wanted = {
        ("sdcwatch_audit_comparisons_total",): total("comparisons"),
        ("sdcwatch_fingerprint_checks_total",): total("weight_checks"),
        ("sdcwatch_fingerprint_disagreements_total",): total("disagreements"),
        ("sdcwatch_audit_mismatches_total", "kind=output"): total("output_mismatches"),
        ("sdcwatch_audit_mismatches_total", "kind=gradient"): total("gradient_mismatches"),
        ("sdcwatch_steps_total", "kind=audit"): total("audit_steps"),
        ("sdcwatch_steps_total", "kind=plain"): total("plain_steps"),
        ("sdcwatch_step",): windows[-1].step,
    }
    passes = Counter()
    for count in (count for window in windows for count in window.counts):
        if count.outcome is Outcome.PASS:
            passes[count.check.value] += count.count
    for check, n in passes.items():
        wanted[("sdcwatch_verdicts_total", "cause=none", f"check={check}", "outcome=pass")] = n
    return wanted


def findings_of(verdicts):
    """Series that verdicts which are no pass leave."""
    wanted = {}
    came = Counter((v.cause.value, v.check.value, v.outcome.value) for v in verdicts)
    for (cause, check, outcome), n in came.items():
        labels = (f"cause={cause}", f"check={check}", f"outcome={outcome}")
        wanted[("sdcwatch_verdicts_total", *labels)] = n
    for verdict in verdicts:
        wanted[("sdcwatch_last_event_step", f"check={verdict.check.value}")] = verdict.step
        for s in verdict.suspects if verdict.outcome is Outcome.SUSPECT else ():
            who = (
                f"suspect_gpu={s.gpu}",
                f"suspect_instance_id={s.instance_id}",
                f"suspect_node={s.node}",
                f"suspect_rank={s.rank}",
            )
            wanted[("sdcwatch_rank_state", "state=suspect", *who)] = 1
    return wanted


def expected_series(records):
    """What one segment must show, counted from its event log without the sink's own code."""
    kinds = defaultdict(list)
    for record in records:
        kinds[record.kind].append(record)
    wanted = {
        **totals_of(kinds["progress"]),
        **findings_of(kinds["verdict"]),
        ("sdcwatch_world_size",): 6,
        ("sdcwatch_start_time_seconds",): records[0].time,
        ("sdcwatch_guard_state", f"state={kinds['finish'][0].state.value}"): 1,
        ("sdcwatch_coverage", f"coverage={kinds['preflight'][0].coverage.value}"): 1,
    }
    for reason, n in Counter(s.reason.value for s in kinds["skip"]).items():
        wanted[("sdcwatch_updates_skipped_total", f"reason={reason}")] = n
    came = Counter((c.reason.value, c.result.value) for c in kinds["checkpoint"])
    for (reason, result), n in came.items():
        wanted[("sdcwatch_checkpoints_total", f"reason={reason}", f"result={result}")] = n
    return wanted


def as_series(result):
    found = {}
    for entry in result:
        labels = dict(entry["metric"])
        name = labels.pop("__name__")
        for label in ("job", "instance", "run", "exporter_rank"):
            labels.pop(label, None)
        key = (name, *(f"{k}={v}" for k, v in sorted(labels.items())))
        found[key] = float(entry["value"][1])
    return found


def difference(wanted, found):
    return {k: (v, found.get(k)) for k, v in wanted.items() if found.get(k) != pytest.approx(v)}


def test_the_demo_says_where_metrics_and_wandb_are(default_run):
    assert default_run.url in default_run.output
    assert str(default_run.run_dir / "wandb") in default_run.output.replace("\n", "")


def test_the_faults_were_found_and_the_run_restarted(default_run):
    assert default_run.code == 0, default_run.output
    assert len(default_run.segments) == 2
    named = {
        s.rank
        for seg in default_run.segments
        for r in seg
        if r.kind == "verdict"
        for s in r.suspects
    }
    assert named


@pytest.mark.parametrize("number", [0, 1])
def test_prometheus_has_the_right_values_at_the_end_of_each_segment(default_run, number):
    segment = default_run.segments[number]

    found = as_series(default_run.prometheus.at(default_run.end_of(segment)))

    assert difference(expected_series(segment), found) == {}


def test_prometheus_has_every_metric_of_the_catalogue(default_run):
    names = {
        entry["metric"]["__name__"]
        for segment in default_run.segments
        for entry in default_run.prometheus.at(default_run.end_of(segment))
    }
    wanted = {m.prometheus + ("_bucket" if m.kind == "histogram" else "") for m in CATALOG}

    assert wanted - names == set()


def test_every_series_names_the_run_and_the_exporting_rank_and_suspects_apart(default_run):
    result = [
        e["metric"] for e in default_run.prometheus.at(default_run.end_of(default_run.segments[0]))
    ]
    ours = [m for m in result if m["__name__"].startswith("sdcwatch_")]
    suspects = {m["suspect_rank"] for m in ours if m["__name__"] == "sdcwatch_rank_state"}
    verdicts = [r for r in default_run.segments[0] if r.kind == "verdict"]
    named = {str(s.rank) for v in verdicts if v.outcome is Outcome.SUSPECT for s in v.suspects}

    assert {m["run"] for m in ours} == {default_run.segments[0][0].run}
    assert {m["exporter_rank"] for m in ours} == {"0"}
    assert suspects == named
    assert not [label for m in ours for label in m if label.startswith(("otel_", "exported_"))]


def test_promtool_finds_nothing_to_say_about_the_last_scrape(default_run):
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=default_run.texts[-1],
        capture_output=True,
        text=True,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_the_push_has_the_names_labels_and_values_of_the_last_scrape(default_run):
    pulled = FIXTURES.parse_series(default_run.texts[-1], drop=())
    pulled = {k: v for k, v in pulled.items() if not k[0].startswith(("target_info", SELF))}
    pulled = {k: v for k, v in pulled.items() if not k[0].endswith("_bucket")}
    pushed = {k: v for k, v in default_run.collector.last().items() if not k[0].startswith(SELF)}

    assert set(pushed) == set(pulled)
    assert difference(pulled, pushed) == {}


def test_every_verdict_arrives_as_a_log_record(default_run):
    bodies = [
        log.body.string_value
        for request in default_run.collector.logs
        for rl in request.resource_logs
        for sl in rl.scope_logs
        for log in sl.log_records
    ]
    verdicts = [r.reason for seg in default_run.segments for r in seg if r.kind == "verdict"]

    assert bodies == verdicts


def test_the_offline_wandb_runs_say_what_the_event_log_says(default_run):
    pytest.importorskip("wandb", reason="pip install 'sdcwatch[wandb]'")
    paths = sorted(default_run.run_dir.glob("wandb/offline-run-*"))
    assert len(paths) == len(default_run.segments)
    suspects, steps = set(), 0  # of the whole run: a person has closed none of them
    for path, segment in zip(paths, default_run.segments, strict=True):
        (file,) = path.glob("*.wandb")
        summary, alerts = {}, []
        for record in FIXTURES.read_wandb_file(file):
            kind = record.WhichOneof("record_type")
            if kind == "summary":
                for item in record.summary.update:
                    key = item.key or "/".join(item.nested_key)
                    summary[key] = json.loads(item.value_json)
            elif kind == "alert":
                alerts.append(record.alert.title)
        verdicts = [r for r in segment if r.kind == "verdict"]
        tables = path.glob("files/media/table/**/*.json")
        rows = [row for table in tables for row in json.loads(table.read_text())["data"]]
        suspects |= {
            str(s.rank) for v in verdicts if v.outcome is Outcome.SUSPECT for s in v.suspects
        }
        steps += sum(r.plain_steps + r.audit_steps for r in segment if r.kind == "progress")

        assert sorted(row[1] for row in rows) == sorted(v.step for v in verdicts)
        assert len(alerts) == len(set(alerts)) == len(verdicts)
        assert set(summary["sdcwatch/suspect_ranks"].split(", ")) - {""} == suspects
        assert summary["sdcwatch/verdict"] == ("tainted" if verdicts else "suspect")
        assert summary["sdcwatch/steps"] == steps


def test_ten_scrapes_return_while_the_training_thread_sleeps_ten_seconds_in_a_hook(tmp_path):
    import torch

    from sdcwatch.config import TelemetryConfig, launcher_environment
    from sdcwatch.sinks.build import build_sinks

    records = FIXTURES.make_faulty_run()
    dispatcher, _ = build_sinks(
        TelemetryConfig(prometheus_port=0, wandb=False, otlp=False), records[0], rank=0,
        local_rank=0, environment=launcher_environment(), run_dir=tmp_path,
    )  # fmt: skip
    for record in records:
        dispatcher.emit(record)
    assert dispatcher.drain(30.0)
    inside, texts = threading.Event(), []

    def scrape():
        inside.wait(30)
        for _ in range(10):
            with urllib.request.urlopen(dispatcher.links["metrics"], timeout=5) as response:
                texts.append((time.monotonic(), response.read()))
            time.sleep(0.5)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    weight = torch.ones(3, requires_grad=True)

    def hook(gradient):
        inside.set()
        time.sleep(10.0)

    weight.register_hook(hook)
    weight.sum().backward()
    woke = time.monotonic()
    scraping.join()
    dispatcher.close()

    assert len(texts) == 10
    assert all(b"sdcwatch_verdicts_total" in text for _, text in texts)
    assert all(moment < woke for moment, _ in texts)
