"""Every expression against the catalogue, the parser, and real scrapes in a real Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from sdcwatch.core.catalog import BY_PROMETHEUS, CATALOG, RESOURCE_LABELS, VERDICTS
from sdcwatch.core.records import Outcome
from sdcwatch.monitor import dcgm
from sdcwatch.monitor.promql import RANGE, TARGET_LABELS, Not, Scope, Window, select

SELECTOR = re.compile(r"\b((?:sdcwatch|DCGM)_\w+)(\{[^}]*\})?")
TARGET = ("job", "instance")
DEVICE = ("UUID", "Hostname", "gpu")
QUIET = re.compile(
    r'state="closed"|sdcwatch_absent_ranks|cause="software"|"not_reduced"|"failed"|"nothing"'
)
"""Selectors that no recorded run answers, because nobody closed, failed or was absent in one."""
WORDS = {"mismatches", "comparisons", "wrong_in", "now", "start"}
"""Labels that queries make."""


def _runbook(root: Path) -> Iterator[str]:
    text = (root / "docs" / "runbook.md").read_text(encoding="utf-8")
    for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        yield block.strip()


@pytest.fixture(scope="session")
def expressions(
    root: Path, rules: list[dict[str, Any]], dashboards: dict[str, dict[str, Any]]
) -> list[str]:
    """Every expression of rules, annotations, dashboards, variables and the runbook."""
    found = [rule["expr"] for rule in rules]
    for rule in rules:
        template = rule["annotations"]["description"]
        found += [
            re.sub(r"=%\[\d\]q", '=~".+"', text)
            for text in re.findall(r"printf `([^`]*)`", template)
        ]
    for dashboard in dashboards.values():
        found += [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
        for annotation in dashboard["annotations"]["list"]:
            if "target" in annotation:
                found += [annotation["target"]["expr"], annotation["expr"]]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                values = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert values is not None
                found.append(values[1])
    return [*found, *_runbook(root)]


def _filled(expression: str, substitute: Any) -> str:
    return substitute(expression, run=".+", range_seconds=21600.0)


def test_every_expression_parses(expressions: list[str], substitute: Any) -> None:
    assert len(expressions) > 120
    for expression in expressions:
        promql_parser.parse(_filled(expression, substitute))


def test_every_metric_label_and_value_is_in_the_catalogue(
    expressions: list[str], substitute: Any
) -> None:
    for expression in expressions:
        for name, matchers in SELECTOR.findall(_filled(expression, substitute)):
            if name.startswith("DCGM_"):
                assert name in {m.name for m in dcgm.DEVICE_METRICS}
                continue
            metric = BY_PROMETHEUS[re.sub(r"_bucket$", "", name)]
            attributes = {a.name: a for a in metric.attributes}
            for label, operator, value in re.findall(
                r'(\w+)(=~|=|!=|!~)["`]([^"`]*)["`]', matchers
            ):
                assert label in (*attributes, *RESOURCE_LABELS, *TARGET), f"{name}: {label}"
                allowed = attributes[label].values if label in attributes else None
                if allowed is not None and value != ".+":
                    words = value.split("|") if "~" in operator else [value]
                    assert set(words) <= set(allowed), f"{name}: {label}"


def test_groups_and_joins_use_labels_that_exist(expressions: list[str], substitute: Any) -> None:
    known = {a.name for m in CATALOG for a in m.attributes}
    known |= {*RESOURCE_LABELS, *TARGET, *WORDS, "le"}
    for expression in expressions:
        filled = _filled(expression, substitute)
        for labels in re.findall(r"\b(?:by|on|group_left|without)\s*\(([^)]*)\)", filled):
            names = {n for n in re.split(r",\s*", labels) if n}
            device = "DCGM_" in filled
            assert names <= known | (set(DEVICE) if device else set()), filled
            assert not {n for n in names if n.startswith("otel_")}


def test_instance_only_ever_matches_a_process_with_itself(
    expressions: list[str], substitute: Any
) -> None:
    for expression in expressions:
        for labels in re.findall(r"\bby\s*\(([^)]*)\)", _filled(expression, substitute)):
            names = re.split(r",\s*", labels)
            assert "instance" not in names or tuple(names) == TARGET_LABELS, expression


def test_every_metric_of_the_catalogue_is_asked_for(expressions: list[str]) -> None:
    asked = {re.sub(r"_bucket$", "", n) for e in expressions for n, _ in SELECTOR.findall(e)}

    assert asked >= set(BY_PROMETHEUS)


def test_each_name_is_a_constant_of_the_catalogue(root: Path) -> None:
    """Nobody else spells a metric, so that a rename cannot be half done."""
    for path in sorted((root / "sdcwatch" / "monitor").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bsdcwatch_(?!\w*\.)[a-z_]+(_total|_seconds)\b", text), path.name
        assert "BY_NAME" not in text, path.name


def test_a_label_or_value_that_does_not_exist_is_refused() -> None:
    scope = Scope((), ("run",))
    with pytest.raises(KeyError):
        select(VERDICTS, scope, colour="red")
    with pytest.raises(ValueError, match="but got 'fine'"):
        select(VERDICTS, scope, outcome="fine")
    assert select(VERDICTS, scope, outcome=Outcome.PASS) == (
        'sdcwatch_verdicts_total{outcome="pass"}'
    )
    assert select(VERDICTS, scope, outcome=Not(Outcome.PASS)) == (
        'sdcwatch_verdicts_total{outcome!="pass"}'
    )


def test_windows_know_their_seconds() -> None:
    assert Window.of("1h30m") == Window("1h30m", "5400")
    assert Window("$__range", "$__range_s") == RANGE


@pytest.mark.promtool
def test_each_selector_alone_returns_series_from_a_recorded_run(
    expressions: list[str], substitute: Any, recorded: Any
) -> None:
    selectors = set()
    for expression in expressions:
        filled = _filled(expression, substitute)
        for name, matchers in SELECTOR.findall(filled):
            bare = re.sub(r'(job|run|suspect_\w+|check|instance)=~["`]\.\+["`],?', "", matchers)
            selectors.add(name + (bare if bare != "{}" else ""))
    assert len(selectors) > 60
    end = max(r.end for r in recorded.runs.values())
    empty = {
        selector
        for selector in sorted(selectors)
        if not recorded.instant(f"count(last_over_time({selector}[30d]))", end + 1)
    }

    assert {s for s in empty if not QUIET.search(s)} == set()


@pytest.mark.promtool
def test_every_expression_evaluates_on_every_recorded_run(
    expressions: list[str], substitute: Any, recorded: Any
) -> None:
    """No expression fails for duplicate labels or a join of many to many."""
    for recording in recorded.runs.values():
        seconds = recording.end - recording.start + 60
        for expression in expressions:
            filled = substitute(expression, run=recording.run, range_seconds=seconds)
            recorded.instant(filled, recording.end)


@pytest.mark.promtool
def test_the_first_lines_of_the_run_page_still_answer_ten_minutes_after_the_end(
    dashboards: dict[str, dict[str, Any]], substitute: Any, recorded: Any
) -> None:
    recording = recorded.runs["default_faults"]
    seconds = recording.end - recording.start + 1800
    panels = {p["title"]: p for p in dashboards["run"]["panels"]}

    def ask(title: str, at: float, query: int = 0) -> list[dict[str, Any]]:
        expression = panels[title]["targets"][query]["expr"]
        filled = substitute(expression, run=recording.run, range_seconds=seconds)
        return recorded.instant(filled, at)

    for at in (recording.end, recording.end + 600):
        assert [r["metric"]["verdict"] for r in ask("Verdict", at)] == ["suspect"]
        assert {r["metric"]["wrong_in"] for r in ask("Suspects", at)} >= {"1 of 1", "2 of 2"}
        assert float(ask("Skipped updates", at)[0]["value"][1]) >= 2
        assert float(ask("Withheld", at)[0]["value"][1]) >= 1
        for title in ("Guard", "Mode", "Coverage", "At risk", "Last clean audit", "Overhead"):
            assert ask(title, at), title
        assert ask("Last good checkpoint", at)


@pytest.mark.promtool
def test_the_path_to_resume_from_is_that_of_the_last_good_checkpoint_however_young(
    dashboards: dict[str, dict[str, Any]], substitute: Any, recorded: Any
) -> None:
    """The recorded run ends 43 seconds after its last checkpoint; earlier ones are in the range."""
    recording = recorded.runs["default_faults"]
    panels = {p["title"]: p for p in dashboards["run"]["panels"]}
    expression = panels["Resume from"]["targets"][0]["expr"]
    seconds = recording.end - recording.start + 1800
    for at in (recording.end - 30, recording.end, recording.end + 600):
        filled = substitute(expression, run=recording.run, range_seconds=seconds)
        (answer,) = recorded.instant(filled, at)
        assert answer["metric"]["path"].endswith("/step-160"), at


def _firing(rules: list[dict[str, Any]], name: str, server: Any, at: float) -> list[dict[str, str]]:
    (rule,) = (r for r in rules if r["alert"] == name)
    return [result["metric"] for result in server.instant(rule["expr"], at)]


@pytest.mark.promtool
def test_each_recording_shows_what_it_is_named_for(
    rules: list[dict[str, Any]], recorded: Any
) -> None:
    """The committed rules, asked at the end of each recorded run about that run."""
    runs = recorded.runs
    assert sorted(runs) == [
        "default_faults",
        "nondeterministic",
        "rank_killed",
        "sinks_dead",
        "two_nodes",
    ]

    def firing(name: str, of: str, later: float = 0.0) -> list[dict[str, str]]:
        found = _firing(rules, name, recorded, runs[of].end + later)
        return [labels for labels in found if labels["run"] == runs[of].run]

    suspects = firing("SdcwatchSuspectRank", "default_faults")
    assert sorted(labels["suspect_rank"] for labels in suspects) == ["1", "3", "5"]
    for name in ("SdcwatchUpdatesSkipped", "SdcwatchCheckpointWithheld",
                 "SdcwatchNonFiniteReproducible", "SdcwatchOneOffMismatch"):  # fmt: skip
        assert firing(name, "default_faults"), name
    # The demo resumes from the last good checkpoint: the newest segment speaks for the run.
    assert not firing("SdcwatchFingerprintDisagreement", "default_faults")
    assert firing("SdcwatchNondeterministicModel", "nondeterministic")
    assert not firing("SdcwatchSuspectRank", "nondeterministic")
    assert firing("SdcwatchUnattributedMismatch", "two_nodes")
    assert not firing("SdcwatchSuspectRank", "two_nodes")
    assert firing("SdcwatchRunFailed", "rank_killed", later=60)
    assert not firing("SdcwatchRunVanished", "rank_killed", later=400)
    assert not firing("SdcwatchRunVanished", "default_faults", later=400)
    assert firing("SdcwatchTelemetryDropped", "sinks_dead")
    assert not firing("SdcwatchTelemetryDropped", "default_faults")
    for name in ("SdcwatchSuspectRank", "SdcwatchUnattributedMismatch", "SdcwatchUpdatesSkipped"):
        assert not firing(name, "sinks_dead")
