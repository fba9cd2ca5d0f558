import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdcwatch.core.records import (
    Cause,
    Check,
    GuardState,
    Origin,
    Outcome,
    RunFinished,
    Verdict,
)
from sdcwatch.sinks import wandb_rows
from sdcwatch.sinks.dispatch import Dispatcher

wandb = pytest.importorskip("wandb", reason="pip install 'sdcwatch[wandb]'")

from sdcwatch.sinks.wandb import WandbSink, publish_report  # noqa: E402

pytestmark = [
    pytest.mark.timeout(180),  # the real client starts a service of its own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # wandb leaves sockets to the exit
]


class FakeRun:
    """Records every call; `fail` or `block` names the calls that misbehave."""

    def __init__(self, fail=(), block=None, url=None):
        self.calls, self.tags, self.url, self.dir, self.id = [], (), url, "/runs/1", "abc"
        self.summary = SimpleNamespace(update=lambda v: self._call("summary", v))
        self._fail, self._block = fail, block

    def _call(self, name, *details):
        if self._block is not None:
            self._block.wait(60)
        if name in self._fail:
            message = "the server said no, key=canary"
            raise RuntimeError(message)
        self.calls.append((name, *details))

    def log(self, data, **options):
        self._call("log", dict(data), options)

    def define_metric(self, name, **options):
        self._call("define_metric", name, options)

    def alert(self, **facts):
        self._call("alert", facts)

    def log_artifact(self, artifact):
        self._call("log_artifact", artifact)

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def give(sink, records):
    for record in records:
        sink.emit(record)
    sink.close(1.0)


def test_in_a_run_of_the_script_no_row_is_committed_and_no_step_is_given(faulty_run):
    run = FakeRun()
    give(WandbSink(run), faulty_run)

    assert run.of("log")
    assert {tuple(options.items()) for _, options in run.of("log")} == {(("commit", False),)}


def test_history_carries_running_totals_and_overhead_per_check(faulty_run):
    run = FakeRun()
    give(WandbSink(run), faulty_run)

    (last,) = [row for row, *_ in run.of("log") if "sdcwatch/comparisons" in row][-1:]
    expected = {
        "sdcwatch/step": 60,
        "sdcwatch/comparisons": 36,
        "sdcwatch/output_mismatches": 1,
        "sdcwatch/gradient_mismatches": 3,
        "sdcwatch/weight_checks": 12,
        "sdcwatch/disagreements": 1,
        "sdcwatch/nonfinite_steps": 2,
        "sdcwatch/updates_skipped": 4,
        "sdcwatch/checkpoints_saved": 1,
        "sdcwatch/checkpoints_provisional": 1,
        "sdcwatch/checkpoints_withheld": 2,
        "sdcwatch/findings": 5,
        "sdcwatch/suspect_count": 1,
        "sdcwatch/steps_at_risk": 50,
    }
    assert {key: last[key] for key in expected} == expected
    assert last["sdcwatch/overhead_seconds_replay"] == pytest.approx(0.6)
    assert last["sdcwatch/overhead_seconds"] == pytest.approx(0.78)


def test_case_17_each_key_has_its_axis_by_its_exact_name(faulty_run):
    run = FakeRun()
    give(WandbSink(run), faulty_run)

    defined = dict(run.of("define_metric"))
    logged = {key for row, _ in run.of("log") for key in row} - {"sdcwatch/events"}
    assert set(defined) == logged == {"sdcwatch/step", *wandb_rows.HISTORY_KEYS}
    assert all(key.count("/") == 1 and "*" not in key for key in defined)
    assert {o.get("step_metric") for k, o in defined.items() if k != "sdcwatch/step"} == {
        "sdcwatch/step"
    }


def summary_of(run):
    values = {}
    for (update,) in run.of("summary"):
        values.update(update)
    return values


def test_the_summary_answers_what_people_ask(faulty_run):
    run = FakeRun()
    give(WandbSink(run, links={"dashboard": "https://g/d/run?var-run=run-7"}), faulty_run)

    expected = {
        "sdcwatch/verdict": "tainted",
        "sdcwatch/mode": "enforce",
        "sdcwatch/coverage": "full",
        "sdcwatch/weight_checks": 12,
        "sdcwatch/suspect_ranks": "3",
        "sdcwatch/suspect_gpus": "cpu-sim-node-1-1",
        "sdcwatch/suspect_instances": "i-0001",
        "sdcwatch/updates_skipped": 4,
        "sdcwatch/checkpoints_withheld": 2,
        "sdcwatch/last_good_checkpoint_step": 10,
        "sdcwatch/steps_at_risk": 50,
        "sdcwatch/dashboard": "https://g/d/run?var-run=run-7",
    }
    found = summary_of(run)
    assert {key: found[key] for key in expected} == expected
    assert found["sdcwatch/overhead_ratio"] == pytest.approx(0.78 / 6.6)


def test_a_run_that_was_not_checked_is_not_called_clean(start):
    run = FakeRun()
    give(WandbSink(run), [start])

    assert summary_of(run)["sdcwatch/verdict"] == "not checked"
    assert summary_of(run)["sdcwatch/coverage"] == "off"


def test_the_summary_is_current_before_the_run_ends(faulty_run):
    run = FakeRun()
    sink = WandbSink(run)
    for record in faulty_run[:8]:  # up to the first verdict
        sink.emit(record)

    assert summary_of(run)["sdcwatch/verdict"] == "suspect"


def test_an_incident_alerts_once_with_a_title_of_its_own_under_64_characters(faulty_run):
    run = FakeRun()
    sink = WandbSink(run, links={"dashboard": "https://grafana/d/x"})
    give(sink, [*faulty_run[:-1], *[r for r in faulty_run if isinstance(r, Verdict)]])

    alerts = [facts for (facts,) in run.of("alert")]
    titles = [facts["title"] for facts in alerts]
    assert len(set(titles)) == len(titles) == 5
    assert all(len(title) < 64 for title in titles)
    assert titles[0] == "SDC replay suspect, rank 3, step 20"
    assert "cpu-sim-node-1-1" in alerts[0]["text"]
    assert "https://grafana/d/x" in alerts[0]["text"]
    assert alerts[0]["level"] == "ERROR"
    assert all(facts["wait_duration"] > 0 for facts in alerts)  # 0 reads as unset: a minute


def test_an_alert_of_many_ranks_still_has_a_short_title(make):
    start = make.start(64)
    verdict = Verdict(
        step=1_234_567, time=0.0, check=Check.FINGERPRINT, outcome=Outcome.SUSPECT, reason="r",
        suspects=tuple(make.suspect(r, Check.FINGERPRINT, 1, start.ranks) for r in range(30)),
    )  # fmt: skip

    assert wandb_rows.alert_title(verdict) == "SDC fingerprint suspect, 30 ranks, step 1234567"


def test_an_overflow_that_a_loss_scale_explains_alerts_nobody(start):
    verdict = Verdict(
        step=2, time=0.0, check=Check.NONFINITE, outcome=Outcome.REPRODUCIBLE, reason="scaling",
        origin=Origin.LOCAL, cause=Cause.SCALING,
    )  # fmt: skip
    run = FakeRun()
    give(WandbSink(run), [start, verdict])

    assert run.of("alert") == []


def test_a_run_with_a_suspect_is_tagged_once(faulty_run):
    run = FakeRun()
    run.tags = ("mine",)
    give(WandbSink(run), [*faulty_run, *faulty_run])

    assert run.tags == ("mine", "sdc-suspect")


def test_the_report_becomes_an_artifact_if_it_is_there(faulty_run, tmp_path):
    report = tmp_path / "report.html"
    without, with_it = FakeRun(), FakeRun()
    give(WandbSink(without, report=report), faulty_run)
    report.write_text("<html>")
    give(WandbSink(with_it, report=report), faulty_run)

    assert without.of("log_artifact") == []
    ((artifact,),) = with_it.of("log_artifact")
    assert artifact.type == "sdcwatch-report"
    assert "report.html" in artifact.manifest.entries


def test_a_report_written_later_is_published_through_a_run_of_its_own(tmp_path, monkeypatch):
    report, run, made = tmp_path / "report.html", FakeRun(), []
    report.write_text("<html>")
    run.finish = lambda **how: run._call("finish")
    monkeypatch.setattr(wandb, "init", lambda **arguments: made.append(arguments) or run)

    assert publish_report(report, {"project": "p", "group": "run-7"})

    assert made[0]["group"] == "run-7"
    assert made[0]["settings"].init_timeout == 10.0
    assert [call[0] for call in run.calls] == ["log_artifact", "finish"]


def test_a_run_of_our_own_ends_with_the_code_of_the_process(start):
    run = FakeRun()
    run.finish = lambda **how: run._call("finish", how)
    failed = RunFinished(
        step=4,
        time=4.0,
        state=GuardState.FAILED,
        reason="the run ended with RankGone",
        exit_code=83,
    )

    give(WandbSink(lambda: run), [start, failed])

    assert run.of("finish") == [({"exit_code": 83},)]


def test_a_report_that_cannot_be_published_raises_nothing(tmp_path, monkeypatch):
    def init(**arguments):
        message = "no server"
        raise RuntimeError(message)

    monkeypatch.setattr(wandb, "init", init)

    assert not publish_report(tmp_path / "report.html", {})


@pytest.mark.parametrize("broken", ["log", "alert", "summary", "define_metric"])
def test_a_failing_call_is_counted_and_the_others_are_still_made(broken, faulty_run, feed):
    run = FakeRun(fail=(broken,))
    dispatcher = Dispatcher([WandbSink(run)])
    feed(dispatcher, faulty_run)
    dispatcher.close()

    (counts,) = dispatcher.counts
    assert counts.dropped["error"] > 0
    assert "canary" not in repr(counts)
    if broken != "define_metric":
        assert {"log", "alert", "summary"} - {broken} <= {call[0] for call in run.calls}


def test_case_19_a_log_that_blocks_for_a_minute_delays_nobody(faulty_run, doubles):
    let_go = threading.Event()
    other = doubles.recording()
    dispatcher = Dispatcher(
        [WandbSink(FakeRun(block=let_go)), other], queue_size=64, close_seconds=0.3
    )
    longest = 0.0
    for record in faulty_run:
        began = time.perf_counter()
        dispatcher.emit(record)
        longest = max(longest, time.perf_counter() - began)
    began = time.monotonic()
    dispatcher.close()

    assert time.monotonic() - began < 5 * 0.3
    assert longest < 5 * 0.3
    assert other.records == faulty_run
    counts = dispatcher.counts[0]
    assert counts.dropped["timeout"] == counts.lost == len(faulty_run)
    let_go.set()


def test_init_is_called_only_when_asked_and_once(sinks, feed, faulty_run, monkeypatch):
    made = []

    def init(**arguments):
        made.append(arguments)
        return FakeRun()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "run", None)
    for telemetry in ({"wandb": True}, {"wandb": False}):
        dispatcher, _ = sinks(faulty_run[0], prometheus=False, **telemetry)
        feed(dispatcher, faulty_run)
        assert made == []
    dispatcher, _ = sinks(faulty_run[0], prometheus=False, wandb=True, wandb_init={"project": "p"})
    feed(dispatcher, faulty_run)

    assert [arguments["project"] for arguments in made] == ["p"]
    assert made[0]["settings"].finish_timeout == 2.0


def test_an_init_that_fails_is_tried_once_and_counted(feed, faulty_run, monkeypatch):
    attempts = []

    def init(**arguments):
        attempts.append(arguments)
        message = "no server, key=canary"
        raise RuntimeError(message)

    monkeypatch.setattr(wandb, "init", init)
    dispatcher = Dispatcher([WandbSink.created({}, close_seconds=1.0)])
    feed(dispatcher, faulty_run)
    dispatcher.close()

    assert len(attempts) == 1
    assert dispatcher.counts[0].dropped["error"] == len(faulty_run)


def test_the_run_of_the_script_is_used_and_its_url_linked(sinks, feed, faulty_run, monkeypatch):
    run = FakeRun(url="https://user:canary@wandb.example/p/runs/1")
    monkeypatch.setattr(wandb, "run", run)
    dispatcher, lines = sinks(faulty_run[0], wandb=True)
    feed(dispatcher, faulty_run)

    assert dispatcher.links["wandb"] == "https://wandb.example/p/runs/1"
    assert "Events and summary go to W&B: https://wandb.example/p/runs/1." in lines
    assert run.of("log")


def test_the_run_of_the_script_is_found_without_importing_wandb(monkeypatch):
    from sdcwatch.sinks.wandb import active_run, active_run_id

    monkeypatch.setattr(wandb, "run", FakeRun())
    assert active_run_id() == "abc"
    monkeypatch.setattr(wandb, "run", None)
    assert (active_run(), active_run_id()) == (None, None)
    monkeypatch.delitem(sys.modules, "wandb")
    assert (active_run(), active_run_id()) == (None, None)
    assert "wandb" not in sys.modules


def test_a_rank_that_is_not_the_leader_logs_nothing_to_wandb(sinks, start, monkeypatch):
    run = FakeRun()
    monkeypatch.setattr(wandb, "run", run)
    dispatcher, _ = sinks(start, rank=3, wandb=True, export="all")

    assert "wandb" not in {counts.sink for counts in dispatcher.counts}


# -- the real client ------------------------------------------------------------------------------

HOSTS = ("never", "third", "step", "commit", "axis")

PLANNED_ROWS = {"never": 0, "third": 8, "step": 25, "commit": 25, "axis": 25}


def run_hosts(hosts, root, **environment):
    """Train once per way of logging, in one process; where each run went."""
    for host in hosts:
        (root / host).mkdir()
    script = Path(__file__).parent / "wandb_hosts.py"
    done = subprocess.run(
        [sys.executable, script, str(root), *hosts],
        env={**os.environ, "WANDB_SILENT": "true", **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def key_of(item):
    return item.key or "/".join(item.nested_key)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """One offline run per way in which a script may log."""
    root = tmp_path_factory.mktemp("offline")
    said = run_hosts(HOSTS, root, WANDB_MODE="offline")
    return said, root


@pytest.fixture(params=HOSTS)
def read_back(request, offline, wandb_file):
    """What the .wandb file of one host has."""
    said, base = offline
    root = base / request.param
    (path,) = root.glob("wandb/offline-run-*/*.wandb")
    found = SimpleNamespace(
        lost=said[request.param]["lost"],
        rows=PLANNED_ROWS[request.param],
        history=[],
        summary={},
        alerts=[],
        metrics={},
        table=[],
        tags=(),
    )
    for record in wandb_file(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found.history.append({key_of(i): json.loads(i.value_json) for i in record.history.item})
        elif kind == "summary":
            found.summary.update(
                {key_of(i): json.loads(i.value_json) for i in record.summary.update}
            )
        elif kind == "alert":
            found.alerts.append(record.alert)
        elif kind == "metric":
            found.metrics[record.metric.name] = record.metric.step_metric
        elif kind == "run":
            found.tags = tuple(record.run.tags)
    for table in sorted(root.glob("wandb/offline-run-*/files/media/table/**/*.json")):
        found.table += json.loads(table.read_text())["data"]
    return found


def test_case_16_every_planted_event_is_in_the_table_whatever_the_host_does(read_back, faulty_run):
    verdicts = [r for r in faulty_run if isinstance(r, Verdict)]
    expected = sorted((v.step, v.check.value, v.outcome.value) for v in verdicts)

    assert sorted((row[1], row[2], row[3]) for row in read_back.table) == expected
    assert read_back.lost == 0


def test_case_16_the_last_totals_are_right_and_no_row_of_the_host_is_lost(read_back):
    last = {}
    for row in read_back.history:
        last.update(row)
    host_rows = [row for row in read_back.history if "loss" in row]

    assert len(host_rows) == read_back.rows
    assert last["sdcwatch/comparisons"] == 36
    assert last["sdcwatch/findings"] == 5
    assert last["sdcwatch/overhead_seconds_replay"] == pytest.approx(0.6)
    assert last["sdcwatch/step"] == 60


def test_case_17_the_axis_of_each_key_is_in_the_file_by_its_exact_name(read_back):
    for key in wandb_rows.HISTORY_KEYS:
        assert read_back.metrics[key] == "sdcwatch/step"


def test_no_axis_of_anything_else_is_touched_neither_of_the_host_nor_of_the_system(read_back):
    """Of the hosts only one defines an axis: "my/step", for all of its keys."""
    ours = {"sdcwatch/step", *wandb_rows.HISTORY_KEYS}
    others = {name: axis for name, axis in read_back.metrics.items() if name not in ours}

    assert ours <= set(read_back.metrics)
    assert set(others.values()) <= {"", "my/step"}
    assert not any(name.startswith("system") for name in others)


def test_the_charts_of_the_documented_workspace_are_logged(faulty_run):
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    table = page.partition("A workspace with the key charts")[2].partition("System metrics")[0]
    charts = set(re.findall(r"`(sdcwatch/\w+)`", table))
    run = FakeRun()
    give(WandbSink(run), faulty_run)

    logged = {key for row, _ in run.of("log") for key in row} | set(summary_of(run))
    assert len(charts) > 15
    assert charts <= logged


def test_summary_alerts_and_tag_reach_the_file(read_back):
    assert read_back.summary["sdcwatch/verdict"] == "tainted"
    assert read_back.summary["sdcwatch/suspect_ranks"] == "3"
    assert read_back.summary["sdcwatch/dashboard"] == "https://g/d/run"
    assert len({a.title for a in read_back.alerts}) == len(read_back.alerts) == 5
    assert read_back.tags == ("sdc-suspect",)


def test_case_20_a_file_of_an_unknown_version_is_refused_aloud(tmp_path, wandb_file):
    other = tmp_path / "x.wandb"
    other.write_bytes(b":W&B\xe1\xbe\x01")
    with pytest.raises(ValueError, match=r"Expected a \.wandb file of version 0"):
        wandb_file(other)

    other.write_bytes(b":W&B\xe1\xbe\x00" + b"\x00\x00\x00\x00\x01\x00\x09x")
    with pytest.raises(ValueError, match="Expected a record type of 1 to 4"):
        wandb_file(other)
