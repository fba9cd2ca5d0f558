"""What went wrong when the product was tried, as streams of records; see the names of the tests."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from sdcwatch.cli import cli
from sdcwatch.config import TelemetryConfig
from sdcwatch.core.outcomes import WORDS
from sdcwatch.core.records import (
    Action,
    Cause,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Count,
    Coverage,
    GateReason,
    GuardState,
    Hang,
    Origin,
    Outcome,
    PreflightDone,
    Progress,
    RunFinished,
    RunWord,
    SkipReason,
    UpdateSkipped,
    Verdict,
)
from sdcwatch.core.summary import SummaryBuilder, fold
from sdcwatch.errors import ConfigurationError
from sdcwatch.report import words
from sdcwatch.report.read import read_run
from sdcwatch.report.suspects import close_suspect, summary_of, suspects_of
from sdcwatch.sinks import jsonl
from sdcwatch.sinks.build import build_sinks
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import JsonlSink, RunSoFar, run_id_of, segments_of, write_summary
from sdcwatch.sinks.metrics import RecordMetrics

NOW = 1_800_000_000.0


def passes(step, audits=1, **more):
    counts = (
        Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=10),
        Count(check=Check.REPLAY, outcome=Outcome.PASS, count=audits),
    )
    facts = {
        "comparisons": 6, "weight_checks": 5, "plain_steps": 9, "plain_seconds": 1.0,
        "audit_steps": 1, "audit_seconds": 0.2, "audited_ranks": 6, **more,
    }  # fmt: skip
    return Progress(
        step=step, time=NOW + step, first_step=step - 9, counts=counts if audits else (), **facts
    )


def preflight(step=0, coverage=Coverage.FULL):
    return PreflightDone(
        step=step, time=NOW + step, coverage=coverage, reason="bits repeat",
        deterministic_kernels=False, repeats=24,
    )  # fmt: skip


def verdict(step, check, outcome, **more):
    facts = {"reason": "it was so", "failed": True, **more}
    return Verdict(step=step, time=NOW + step, check=check, outcome=outcome, **facts)


def finish(step, state=GuardState.FINISHED):
    return RunFinished(step=step, time=NOW + step, state=state, reason="done")


@pytest.fixture
def segment(make, tmp_path, environment):
    """Feeds one segment of a run through the real sinks, W&B excepted, and tells what they say."""

    def run(records, *, run_dir=None, ranks=None, step=0, run="night-1", ends=True, **changes):
        run_dir = run_dir or tmp_path / "run"
        start = make.start(
            step=step, time=NOW + step, run=run, run_id=run_id_of(segments_of(run_dir)),
            ranks=ranks or make.ranks(6), run_dir=str(run_dir), **changes,
        )  # fmt: skip
        telemetry = TelemetryConfig(prometheus=False, wandb=False, logs=False)
        dispatcher, _ = build_sinks(
            telemetry, start, rank=0, local_rank=0, environment=environment(), run_dir=run_dir
        )
        metrics, gauges = RecordMetrics(), {}
        for record in (start, *records, *([finish(records[-1].step)] if ends else [])):
            dispatcher.emit(record)
            for m in metrics.measure(record, dispatcher.summary):
                key = (m.metric.prometheus, *m.attributes.values())
                old = gauges.get(key, 0.0) if m.metric.kind == "counter" else 0.0
                gauges[key] = old + m.value
        summary = dispatcher.summary
        write_summary(run_dir, summary)
        dispatcher.close()
        return SimpleNamespace(
            summary=summary, gauges=gauges, run_dir=run_dir, infos=metrics.infos(summary)
        )

    return run


@pytest.fixture
def suspect(make):
    def named(rank, step, check=Check.REPLAY, ranks=None, **more):
        found = make.suspect(rank, check, step, ranks or make.ranks(6))
        return verdict(step, check, Outcome.SUSPECT, suspects=(found,), **more)

    return named


def state_of(gauges, rank):
    return {
        key[-1]: value
        for key, value in gauges.items()
        if key[0] == "sdcwatch_rank_state" and key[1] == str(rank)
    }


def word_of(gauges):
    hot = [key[1] for key, value in gauges.items() if key[0] == "sdcwatch_run_verdict" and value]
    (word,) = hot
    return word


def test_a_resumed_run_is_told_the_same_everywhere(segment, suspect):
    segment([preflight(), passes(10), suspect(1, 13), passes(20)])
    resumed = segment([preflight(20), passes(30), passes(40)], step=20)

    on_disk = json.loads((resumed.run_dir / "summary.json").read_text())
    report = fold(read_run(resumed.run_dir))
    assert {on_disk["verdict"], report.verdict.value, word_of(resumed.gauges)} == {"suspect"}
    assert on_disk["reason"] == report.reason == "rank 1 named, first at step 13"
    assert [s["rank"] for s in on_disk["suspects"]] == [1]
    assert on_disk["clean_audits"] == 4
    assert report.segments == 2


def test_a_suspect_of_segment_1_stays_a_suspect_while_the_run_goes_on(segment, suspect):
    segment([preflight(), passes(10), suspect(1, 13)])
    resumed = segment([preflight(20), passes(30)], step=20)

    assert state_of(resumed.gauges, 1) == {"suspect": 1}


def test_prometheus_counters_start_at_0_in_every_process_and_totals_do_not(segment):
    def skip(step):
        return UpdateSkipped(step=step, time=NOW + step, reason=SkipReason.NONFINITE, consecutive=1)

    first = segment([preflight(), passes(10), skip(11), skip(12), skip(13)])
    second = segment([preflight(20), passes(30), skip(31), skip(32)], step=20)

    counter = ("sdcwatch_updates_skipped_total", "nonfinite")
    assert (first.gauges[counter], second.gauges[counter]) == (3, 2)
    assert second.summary.skipped == {"nonfinite": 5}


def test_a_healthy_rank_on_another_machine_is_not_accused_after_a_node_was_replaced(
    segment, suspect, make
):
    segment([preflight(), passes(10), suspect(3, 13)])
    replaced = tuple(
        replace(r, instance_id="i-new", gpu_uuid=f"GPU-new-{r.rank}", node="node-9")
        if r.node == "node-1"
        else r
        for r in make.ranks(6)
    )
    resumed = segment([preflight(20), passes(30)], step=20, ranks=replaced)

    (named,) = resumed.summary.suspects
    assert (named.instance_id, named.gpu) == ("i-0001", "cpu-sim-node-1-1")
    assert "cpu-sim-node-1-1 on node-1 (rank 3 then)" in resumed.summary.reason
    labels = {key[3] for key in resumed.gauges if key[0] == "sdcwatch_rank_state"}
    assert labels == {"cpu-sim-node-1-1"}


def test_a_new_finding_at_a_rank_whose_device_was_replaced_is_a_suspect_of_its_own(
    segment, suspect, make
):
    replaced = tuple(
        replace(r, instance_id="i-new", gpu_uuid=f"GPU-new-{r.rank}") for r in make.ranks(6)
    )
    segment([preflight(), passes(10), suspect(3, 13)])
    resumed = segment([suspect(3, 25, ranks=replaced)], step=20, ranks=replaced)

    assert {s.gpu for s in resumed.summary.suspects} == {"GPU-new-3", "cpu-sim-node-1-1"}


def test_a_suspects_own_last_step_stands_beside_it(segment, suspect):
    run = segment([preflight(), suspect(1, 13), suspect(4, 33)])

    last = {k[1]: v for k, v in run.gauges.items() if k[0] == "sdcwatch_rank_last_finding_step"}
    assert last == {"1": 13, "4": 33}


def test_a_person_closes_a_suspect_and_every_place_respects_it(segment, suspect):
    run = segment([preflight(), passes(10), suspect(1, 13), passes(20)])
    gpu = "cpu-sim-node-0-1"

    done = CliRunner().invoke(
        cli, ["close", str(run.run_dir), "--gpu", gpu, "--reason", "replaced", "--by", "ada"]
    )

    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"Closed {gpu}. The run is clean")
    on_disk = json.loads((run.run_dir / "summary.json").read_text())
    assert (on_disk["verdict"], on_disk["suspects"]) == ("clean", [])
    assert [s["gpu"] for s in on_disk["closed_suspects"]] == [gpu]
    (entry,) = suspects_of([run.run_dir])
    assert (entry["state"], entry["closing"]["by"], entry["closing"]["reason"]) == (
        "closed", "ada", "replaced",
    )  # fmt: skip
    resumed = segment([preflight(20), passes(30)], step=20)
    assert state_of(resumed.gauges, 1) == {"suspect": 0, "closed": 1}
    assert word_of(resumed.gauges) == "clean"
    (info,) = resumed.infos["sdcwatch.suspect.info"]
    assert (info.attributes["state"], info.attributes["closed_because"]) == ("closed", "replaced")
    said = words.sentences(resumed.summary, NOW)
    assert f"{gpu} was closed by ada: replaced." in said


def test_a_run_that_lives_sees_that_a_suspect_was_closed(tmp_path, make, suspect, monkeypatch):
    monkeypatch.setattr(jsonl, "LOOK_SECONDS", 0.0)
    log = JsonlSink(tmp_path / "events.jsonl")
    dispatcher = Dispatcher(direct=[log], run=RunSoFar(tmp_path))
    for record in (make.start(), preflight(), passes(10), suspect(1, 13)):
        dispatcher.emit(record)
    assert dispatcher.summary.verdict is RunWord.SUSPECT

    close_suspect(tmp_path, gpu="cpu-sim-node-0-1", instance_id="", reason="swapped", by=None)
    dispatcher.emit(passes(20))

    assert dispatcher.summary.verdict is RunWord.CLEAN
    assert dispatcher.summary.suspects == ()
    dispatcher.close()


def test_evidence_that_comes_after_a_closing_opens_the_suspect_again(segment, suspect):
    run = segment([preflight(), passes(10), suspect(1, 13)])
    close_suspect(run.run_dir, gpu="cpu-sim-node-0-1", instance_id="", reason="reseated", by="me")
    later = replace(suspect(1, 33), time=time.time() + 3600.0 + NOW)
    resumed = segment([preflight(20), passes(30), later], step=20)

    assert resumed.summary.verdict is RunWord.SUSPECT
    assert [s.last_step for s in resumed.summary.suspects] == [33]
    assert state_of(resumed.gauges, 1) == {"suspect": 1, "closed": 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpu", "GPU-x"], "Expected a suspect GPU of this run, but got 'GPU-x'"),
        (["--gpu", "cpu-sim-node-0-1", "--instance-id", "i-9"], "It has: cpu-sim-node-0-1."),
    ],
)
def test_closing_what_is_no_suspect_is_an_error_that_says_who_is(
    segment, suspect, options, expected
):
    run = segment([preflight(), passes(10), suspect(1, 13)])

    done = CliRunner().invoke(cli, ["close", str(run.run_dir), "--reason", "x", *options])

    assert isinstance(done.exception, ConfigurationError)
    assert expected in str(done.exception)
    assert not (run.run_dir / "closed.jsonl").exists()


def test_suspects_are_listed_for_a_launcher(segment, suspect, tmp_path):
    first = segment([preflight(), suspect(1, 13, operator="aten::addmm in blocks.3")])
    clean = segment([preflight(), passes(10)], run_dir=tmp_path / "clean", run="clean")

    done = CliRunner().invoke(
        cli, ["suspects", str(first.run_dir), str(clean.run_dir), "--json"], catch_exceptions=False
    )
    (entry,) = json.loads(done.output)

    assert {k: entry[k] for k in ("run", "state", "node", "instance_id", "gpu", "first_step")} == {
        "run": "night-1", "state": "open", "node": "node-0", "instance_id": "i-0000",
        "gpu": "cpu-sim-node-0-1", "first_step": 13,
    }  # fmt: skip
    assert entry["evidence"] == "wrong in 2 of 2 comparisons"
    assert entry["since"].endswith("UTC")
    text = CliRunner().invoke(cli, ["suspects", str(clean.run_dir)], catch_exceptions=False)
    assert text.output == "No device has been named.\n"


def test_a_run_that_was_killed_stays_vanished_in_words(segment):
    killed = segment([preflight(), passes(10)], ends=False)

    assert not killed.summary.finished
    living = words.sentences(killed.summary, killed.summary.last_time + 60)
    later = words.sentences(killed.summary, killed.summary.last_time + 3 * 86_400)
    assert "It has not said that it ended: it is still running, or it was killed." in living
    assert any(s.startswith("It vanished: its last record is of ") for s in later)
    resumed = segment([preflight(20), passes(30)], step=20)
    assert resumed.summary.vanished_segments == 1
    said = words.sentences(resumed.summary, NOW)
    assert "1 earlier segment vanished without an end." in said


def test_two_runs_with_one_name_are_told_apart(segment, tmp_path):
    first = segment([preflight(), passes(10)])
    other = segment([preflight(), passes(10)], run_dir=tmp_path / "other")
    resumed = segment([preflight(20), passes(30)], step=20)

    def run_id(run):
        (info,) = run.infos["sdcwatch.run.info"]
        return info.attributes["run_id"]

    assert run_id(first) == run_id(resumed)
    assert run_id(first) != run_id(other)
    assert first.summary.run == other.summary.run


def test_runs_that_share_a_folder_for_discovery_do_not_hide_each_other(sinks, make, tmp_path):
    folder = tmp_path / "sd"
    one, _ = sinks(make.start(run="a", run_id="1"), file_sd_dir=str(folder))
    two, _ = sinks(make.start(run="b", run_id="2"), file_sd_dir=str(folder))
    targets = {json.loads(p.read_text())[0]["targets"][0] for p in folder.iterdir()}
    assert len(targets) == 2

    one.close()
    (left,) = folder.iterdir()
    assert json.loads(left.read_text())[0]["targets"][0] in two.links["metrics"]


def test_a_segment_takes_the_place_of_one_that_was_killed_and_only_removes_its_own(
    sinks, make, tmp_path
):
    folder = tmp_path / "sd"
    killed, _ = sinks(make.start(run_id="1"), file_sd_dir=folder)
    again, _ = sinks(make.start(run_id="1"), file_sd_dir=folder)
    (entry,) = folder.iterdir()

    killed.close()
    assert json.loads(entry.read_text())[0]["targets"][0] in again.links["metrics"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("prometheus_host", 5, "`prometheus_host` to be a string"),
        ("wandb", 1, "`wandb` to be True or False"),
        ("prometheus_port", "9464", "`prometheus_port` to be an integer"),
        ("wandb_init", ["project"], "`wandb_init` to be a mapping or None"),
        ("file_sd_dir", 3, "`file_sd_dir` to be a path or a string or None"),
        ("linger_seconds", float("nan"), "`linger_seconds` to be a number"),
        ("otlp", "yes", "`otlp` to be True or False or None"),
        ("dashboard_url", None, "`dashboard_url` to be a string"),
    ],
)
def test_every_field_of_the_telemetry_config_is_type_checked(field, value, expected):
    with pytest.raises(ConfigurationError, match=expected):
        TelemetryConfig(**{field: value})


def test_a_path_may_be_given_as_a_string(tmp_path):
    assert TelemetryConfig(file_sd_dir=str(tmp_path)).file_sd_dir == tmp_path


def test_absent_ranks_are_a_number_until_a_step_completes(segment):
    hang = Hang(step=11, time=NOW + 11, reporter=0, operation="all-reduce", absent=(2, 5))

    assert segment([preflight(), passes(10), hang]).gauges[("sdcwatch_absent_ranks",)] == 2
    again = segment([preflight(), hang, passes(20)], step=10)
    assert again.gauges[("sdcwatch_absent_ranks",)] == 0


def test_the_last_findings_and_the_last_good_checkpoint_are_told_in_words(segment, suspect):
    def saved(step, path):
        return CheckpointEvent(
            step=step, time=NOW + step, result=CheckpointResult.SAVED, reason=GateReason.OK,
            path=path,
        )  # fmt: skip

    findings = [suspect(1, step, reason="x" * 400) for step in range(1, 26)]
    run = segment([preflight(), *findings, saved(10, "/ckpt/10.pt"), saved(20, "/ckpt/20.pt")])

    events = [m.attributes for m in run.infos["sdcwatch.event.info"]]
    assert [e["event"] for e in events] == [str(n) for n in range(6, 26)]
    assert {(e["who"], e["device"]) for e in events} == {("rank 1", "cpu-sim-node-0-1 on node-0")}
    assert max(len(e["reason"]) for e in events) == 160
    (checkpoint,) = run.infos["sdcwatch.checkpoint.info"]
    assert (checkpoint.attributes["step"], checkpoint.attributes["path"]) == ("20", "/ckpt/20.pt")


def test_software_is_told_from_devices_by_the_cause(segment):
    run = segment(
        [preflight(), verdict(13, Check.FINGERPRINT, Outcome.UNATTRIBUTED, cause=Cause.SOFTWARE)]
    )

    counter = ("sdcwatch_verdicts_total", "fingerprint", "unattributed")
    assert run.gauges[(*counter, "software")] == 1
    assert run.gauges[(*counter, "unknown")] == 0


def test_a_slow_backend_of_wandb_is_told_the_word_before_anything_else(make, suspect):
    module = pytest.importorskip("sdcwatch.sinks.wandb", reason="pip install 'sdcwatch[wandb]'")
    told = []

    class Slow:
        """A run whose every call but the summary takes longer than the end of the run allows."""

        url, dir, id, tags = None, "", "x", ()
        let_go = threading.Event()

        class summary:
            update = staticmethod(told.append)

        def log(self, row, commit):
            self.let_go.wait(20)

        def alert(self, **facts):
            self.let_go.wait(20)

        def define_metric(self, name, **options):
            pass

    tainted = suspect(3, 13, check=Check.FINGERPRINT, action=Action.STOP)
    dispatcher = Dispatcher([module.WandbSink(Slow())], close_seconds=0.2)
    for record in (make.start(), preflight(), tainted, finish(13, GuardState.TAINTED)):
        dispatcher.emit(record)
    dispatcher.close()
    Slow.let_go.set()

    word = [values["sdcwatch/verdict"] for values in told if "sdcwatch/verdict" in values]
    ranks = [values["sdcwatch/suspect_ranks"] for values in told if values.get("sdcwatch/suspects")]
    assert (word[-1], ranks[-1]) == ("tainted", "3")


OVERFLOW = {"origin": Origin.LOCAL, "cause": Cause.SCALING}
SEQUENCES = {
    "nothing but passes": ([preflight(), passes(10)], "clean"),
    "no audit yet": ([preflight(), passes(10, audits=0)], "not checked"),
    "the audit is off": ([preflight(coverage=Coverage.OFF), passes(10)], "not checked"),
    "outputs only": ([preflight(coverage=Coverage.OUTPUTS_ONLY), passes(10)], "partly checked"),
    "suspect, then clean": ([preflight(), passes(10), "suspect", passes(20)], "suspect"),
    "tainted, with a suspect": ([preflight(), passes(10), "tainted"], "tainted"),
    "nondeterministic, then clean": (
        [preflight(), verdict(10, Check.REPLAY, Outcome.NONDETERMINISTIC), passes(20)],
        "nondeterministic",
    ),
    "a strike, then a worse thing": (
        [
            preflight(),
            passes(10),
            verdict(11, Check.REPLAY, Outcome.NOT_REPRODUCED, ranks=(2,)),
            verdict(12, Check.REPLAY, Outcome.WIDESPREAD),
        ],
        "unattributed",
    ),
    "an overflow that the loss scale explains": (
        [preflight(), passes(10), verdict(11, Check.NONFINITE, Outcome.REPRODUCIBLE, **OVERFLOW)],
        "clean",
    ),
    **{
        f"{outcome.value}, then clean": (
            [preflight(), passes(10), verdict(11, Check.REPLAY, outcome), passes(20)], word,
        )
        for outcome, word in {
            Outcome.TRANSPORT: "warning", Outcome.NOT_RUN: "warning", Outcome.VOID: "clean",
            Outcome.DIFFERS: "unattributed", Outcome.INCONCLUSIVE: "unattributed",
            Outcome.UNATTRIBUTED: "unattributed", Outcome.REPRODUCIBLE: "warning",
            Outcome.NOT_REDUCED: "warning", Outcome.NOT_REPRODUCED: "warning",
            Outcome.WIDESPREAD: "unattributed", Outcome.SUSPECT: "suspect",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_console_summary_wandb_report_and_gauge_say_one_word(name, segment, suspect):
    from sdcwatch.core.advice import closing_line
    from sdcwatch.sinks.wandb_rows import summary_values

    stream, word = SEQUENCES[name]
    named = {"suspect": suspect(3, 11), "tainted": suspect(3, 11, check=Check.FINGERPRINT)}
    run = segment([named.get(r, r) if isinstance(r, str) else r for r in stream])

    report = fold(read_run(run.run_dir))
    symbol, _ = words.head(report)
    assert {
        "console": closing_line(run.summary, run.run_dir).partition(":")[0].lower(),
        "summary.json": json.loads((run.run_dir / "summary.json").read_text())["verdict"],
        "W&B": summary_values(run.summary)["sdcwatch/verdict"],
        "report": report.verdict.value,
        "symbol": WORDS[RunWord(word)].symbol,
        "gauge": word_of(run.gauges),
        "sdcwatch close": summary_of(run.run_dir).verdict.value,
    } == {
        **dict.fromkeys(
            ("console", "summary.json", "W&B", "report", "gauge", "sdcwatch close"), word
        ),
        "symbol": symbol,
    }


def test_every_outcome_is_in_a_sequence_that_all_places_agree_on():
    covered = {
        record.outcome
        for stream, _ in SEQUENCES.values()
        for record in stream
        if isinstance(record, Verdict)
    }
    assert covered | {Outcome.PASS} == set(Outcome)


def test_the_word_after_each_record_is_that_of_folding_so_far(suspect, make):
    records = [make.start(), preflight(), passes(10), suspect(1, 13), passes(20), finish(20)]
    builder = SummaryBuilder()
    for upto, record in enumerate(records, start=1):
        builder.add(record)
        assert builder.summary() == fold(records[:upto])
