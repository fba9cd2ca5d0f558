"""The dashboards as Grafana loads them: grid, ids, words, units, thresholds, variables, links."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from sdcwatch.core.enums import Cause, RunWord
from sdcwatch.core.outcomes import COLORS, MEANINGS, WORDS
from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor import theme
from sdcwatch.monitor.build import dashboard_files
from sdcwatch.monitor.config import MonitorConfig

Dashboards = dict[str, dict[str, Any]]
SELECTOR = re.compile(r"sdcwatch_\w+\{(?:[^{}`]|`[^`]*`)*\}")
ALLOWED = {"stat", "timeseries", "state-timeline", "table", "text", "barchart", "heatmap", "row"}


def _panels(dashboards: Dashboards) -> Iterator[tuple[str, dict[str, Any]]]:
    for slug, dashboard in dashboards.items():
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                yield f"{slug}: {panel['title']}", panel


def _colors(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("color", "fixedColor", "iconColor") and isinstance(inner, str):
                yield inner
            else:
                yield from _colors(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _colors(inner)


def test_there_are_three_with_readable_uids_of_at_most_40_characters(
    dashboards: Dashboards,
) -> None:
    assert sorted(dashboards) == ["fleet", "run", "suspect"]
    for slug, dashboard in dashboards.items():
        assert dashboard["uid"] == f"sdcwatch-{slug}"
        assert dashboard["timezone"] == "utc"
        assert "sdcwatch" in dashboard["tags"]
        assert len(f"{'x' * 28}-{slug}") <= 40


def test_case_21_no_panel_leaves_the_grid_or_lies_on_another(dashboards: Dashboards) -> None:
    for slug, dashboard in dashboards.items():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            assert at["x"] >= 0
            assert at["w"] > 0
            assert at["x"] + at["w"] <= 24
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, f"{slug}: {panel['title']}"
            taken |= cells
        height = max(y for _, y in taken) + 1
        assert len(taken) == 24 * height, f"{slug} has holes"


def test_panel_ids_are_unique_and_positive(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        assert min(ids) > 0


def test_case_23_the_sdk_is_of_the_maintained_line(dashboards: Dashboards) -> None:
    assert version("grafana-foundation-sdk").lstrip("v").startswith("0.0.")
    for dashboard in dashboards.values():
        assert dashboard["schemaVersion"] >= 41


def test_case_23_the_other_line_of_the_sdk_is_refused_at_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1769699998!10.1.0")
    spec = importlib.util.find_spec("sdcwatch.monitor.panels")
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", again)
    with pytest.raises(ConfigurationError, match=r"Expected grafana-foundation-sdk 0\.0\.x"):
        spec.loader.exec_module(again)


def test_case_24_file_provisioning_takes_them(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        assert {"panels", "schemaVersion", "uid", "title"} <= set(dashboard)
        assert not {"apiVersion", "spec", "kind", "__inputs", "__requires"} & set(dashboard)
        assert "${DS_" not in json.dumps(dashboard)


def test_case_28_no_panel_type_that_grafana_has_removed(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        assert {panel["type"] for panel in dashboard["panels"]} <= ALLOWED


def test_every_panel_says_what_it_shows_and_what_to_do(dashboards: Dashboards) -> None:
    for name, panel in _panels(dashboards):
        assert panel["title"], name
        assert len(panel["description"]) > 30, name
        assert panel["description"].endswith("."), name
    for dashboard in dashboards.values():
        titles = [p["title"] for p in dashboard["panels"]]
        assert len(set(titles)) == len(titles)


def test_every_panel_has_unit_thresholds_and_words_for_nothing(dashboards: Dashboards) -> None:
    for name, panel in _panels(dashboards):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], name
        assert defaults["noValue"], name
        steps = defaults["thresholds"]["steps"]
        assert defaults["thresholds"]["mode"] == "absolute", name
        assert steps[0]["value"] is None, name
        rest = [s["value"] for s in steps[1:]]
        assert rest == sorted(rest), name
        if panel["type"] == "stat":
            assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"], name


def test_colours_are_the_palette_and_every_state_has_a_word(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        assert set(_colors(dashboard)) <= set(theme.PALETTE)
    for table in (
        theme.WORD_LOOKS,
        theme.GUARD_LOOKS,
        theme.RANK_LOOKS,
        theme.COVERAGE_LOOKS,
        theme.MODE_LOOKS,
    ):
        texts = [look.text for look in table.values()]
        assert len(set(texts)) == len(texts)
        for text in texts:
            symbol, _, word = text.partition(" ")
            assert not symbol.isalnum()
            assert word


def test_every_state_of_the_records_has_a_look() -> None:
    assert set(theme.GUARD_LOOKS) == {s.value for s in theme.GuardState} | {theme.VANISHED}
    assert set(theme.RANK_LOOKS) == set(theme.RankState)
    assert set(theme.COVERAGE_LOOKS) == {c.value for c in theme.Coverage}
    assert set(theme.WORD_LOOKS) == {w.value for w in RunWord}
    assert set(theme.OUTCOME_COLORS) == {o.value for o in theme.Outcome}
    assert set(theme.RESULT_COLORS) == {r.value for r in theme.CheckpointResult}
    assert set(theme.SKIP_COLORS) == {s.value for s in theme.SkipReason}
    assert set(theme.CAUSE_COLORS) == {c.value for c in Cause}


def test_words_symbols_and_colors_of_outcomes_are_those_of_core() -> None:
    for word, look in WORDS.items():
        shown = theme.WORD_LOOKS[word.value]
        assert shown.text == f"{look.symbol} {word.value.upper()}"
        assert shown.color == COLORS[look.role]
    for outcome, meaning in MEANINGS.items():
        assert theme.OUTCOME_COLORS[outcome.value] == COLORS[meaning.role]


def test_variables_come_in_order_and_offer_all(dashboards: Dashboards) -> None:
    expected = {
        "fleet": ["datasource", "job", "run"],
        "run": ["datasource", "job", "run"],
        "suspect": ["datasource", "job", "run", "gpu"],
    }
    for slug, dashboard in dashboards.items():
        variables = dashboard["templating"]["list"]
        assert [v["name"] for v in variables] == expected[slug]
        assert variables[0]["type"] == "datasource"
        assert variables[0]["current"]["value"] == "prometheus"
        for variable in variables[1:]:
            assert variable["refresh"] == 2
            assert variable["sort"] == 1
            one = {"run": "run", "suspect": "gpu"}.get(slug)
            if variable["name"] == one:
                assert variable["multi"] is False
            else:
                assert (variable["multi"], variable["allValue"]) == (True, ".+")


def test_scope_labels_become_variables_matchers_and_groups() -> None:
    config = MonitorConfig(scope_labels=("cluster", "namespace"))
    files = dashboard_files(config)
    for text in files.values():
        dashboard = json.loads(text)
        names = [v["name"] for v in dashboard["templating"]["list"]]
        assert names[:5] == ["datasource", "cluster", "namespace", "job", "run"]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                for selector in SELECTOR.findall(target["expr"]):
                    wanted = "cluster=~`${cluster:regex}`,namespace=~`${namespace:regex}`,"
                    assert wanted in selector


def test_every_query_filters_on_job_and_run_through_the_data_source_variable(
    dashboards: Dashboards,
) -> None:
    for name, panel in _panels(dashboards):
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, name
        refs = [t["refId"] for t in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", name
            assert not re.search(r"\bsdcwatch_\w+(?![\w{])", target["expr"]), name
            for selector in SELECTOR.findall(target["expr"]):
                assert "job=~`${job:regex}`,run=~`${run:regex}`" in selector, name


def test_the_first_lines_of_the_run_page_stand_above_the_fold(dashboards: Dashboards) -> None:
    run = dashboards["run"]["panels"]
    rows = [p for p in run if p["type"] == "row"]
    first = [p for p in run if p["type"] != "row" and p["gridPos"]["y"] < rows[1]["gridPos"]["y"]]

    assert max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in first) <= 14
    assert {
        "Verdict", "Guard", "Mode", "Coverage", "Audited", "At risk", "Last clean audit",
        "Overhead", "Suspects", "Skipped updates", "Withheld", "UNATTRIBUTED", "Absent ranks",
        "Since last step", "Last good checkpoint", "Resume from",
    } == {p["title"] for p in first}  # fmt: skip


def test_links_lead_from_fleet_to_run_to_suspect_and_to_the_runbook(
    dashboards: Dashboards,
) -> None:
    for dashboard in dashboards.values():
        links = {link["title"]: link for link in dashboard["links"]}
        assert links["Fleet"]["url"].startswith("/d/sdcwatch-fleet?")
        assert links["Fleet"]["keepTime"] is True
        assert links["Runbook"]["url"].endswith("runbook.html")
    assert "/d/sdcwatch-run?var-run=${__data.fields.Run:percentencode}" in json.dumps(
        dashboards["fleet"]
    )
    assert "/d/sdcwatch-suspect?var-run=" in json.dumps(dashboards["run"])
    assert '"options": "wandb url"' in json.dumps(dashboards["run"])


def test_the_way_back_to_the_fleet_leaves_the_run_behind(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        for link in dashboard["links"]:
            assert link["includeVars"] is False
            assert "fleet" not in link["url"] or "run" not in link["url"].partition("?")[2]


def test_names_go_into_urls_encoded(dashboards: Dashboards) -> None:
    for dashboard in dashboards.values():
        for field in re.findall(
            r"var-\w+=(\$\{__data[^}]*\}|\$\{run[^}]*\})", json.dumps(dashboard)
        ):
            assert field.endswith(":percentencode}"), field


def test_every_stat_is_grey_when_there_is_no_answer(dashboards: Dashboards) -> None:
    grey = theme.MUTED
    for name, panel in _panels(dashboards):
        if panel["type"] == "stat":
            defaults = panel["fieldConfig"]["defaults"]
            assert defaults["thresholds"]["steps"][0]["color"] == grey, name
            assert not re.match(r"[0-9✓✔]", defaults["noValue"]), name


def test_tiles_of_a_line_have_one_size_and_titles_that_fit(dashboards: Dashboards) -> None:
    pixels = 1280 / 24
    for name, panel in _panels(dashboards):
        if panel["type"] == "stat":
            text = panel["options"]["text"]
            assert text["valueSize"] == (13 if panel["title"] == "Resume from" else 22), name
            assert 7.5 * len(panel["title"]) + 24 < panel["gridPos"]["w"] * pixels, name


def test_the_evidence_is_visible_at_1280_pixels(dashboards: Dashboards) -> None:
    for name, panel in _panels(dashboards):
        if panel["type"] == "table":
            fixed = [
                p["value"]
                for o in panel["fieldConfig"]["overrides"]
                for p in o["properties"]
                if p["id"] == "custom.width"
            ]
            assert panel["gridPos"]["w"] == 24, name
            assert sum(fixed) <= 1280 - 150, name


def test_annotations_keep_grafanas_own_entry_and_mark_findings_at_their_time(
    dashboards: Dashboards,
) -> None:
    """Grafana up to 9.4 at least reads `expr` and `step`, later ones read `target`."""
    for dashboard in dashboards.values():
        builtin, findings = dashboard["annotations"]["list"]
        assert builtin["builtIn"] == 1
        assert findings["useValueForTime"] is True
        assert findings["target"]["expr"].endswith("* 1000")
        assert findings["expr"] == findings["target"]["expr"]
        assert findings["step"] == findings["target"]["interval"] == "15s"


def test_bars_are_never_made_of_rates(dashboards: Dashboards) -> None:
    for name, panel in _panels(dashboards):
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        if custom.get("drawStyle") == "bars":
            for target in panel["targets"]:
                if target["legendFormat"] != "none":
                    assert "$__rate_interval" not in target["expr"], name
                    assert "[$__interval]" in target["expr"], name
            assert custom["axisSoftMax"] == 2, name
            assert panel["targets"][-1]["legendFormat"] == "none", name


def test_axes_of_counts_have_whole_numbers_only(dashboards: Dashboards) -> None:
    """Half ticks of an axis without decimals would carry the text for "no value"."""
    seen = 0
    for name, panel in _panels(dashboards):
        defaults = panel["fieldConfig"]["defaults"]
        if defaults.get("custom", {}).get("drawStyle") == "bars":
            seen += 1
            assert (defaults["decimals"], defaults["custom"]["axisSoftMax"]) == (0, 2), name
    assert seen > 6


def test_what_was_saved_confirmed_and_withheld_is_colored_by_meaning(
    dashboards: Dashboards,
) -> None:
    (panel,) = (p for p in dashboards["run"]["panels"] if p["title"] == "Checkpoints")
    colors = {
        o["matcher"]["options"]: p["value"]["fixedColor"]
        for o in panel["fieldConfig"]["overrides"]
        for p in o["properties"]
        if p["id"] == "color"
    }

    def color(name: str) -> str:
        (found,) = {c for regex, c in colors.items() if re.search(regex.strip("/"), name)}
        return found

    assert color("saved: ok") == color("confirmed: ok") == theme.GOOD
    assert color("withheld: replay") == theme.RESULT_COLORS["withheld"] != theme.GOOD


def test_the_sdk_reads_back_what_it_wrote(dashboards: Dashboards) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models.dashboard import Dashboard
    register_default_plugins()
    for dashboard in dashboards.values():
        again = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
        lost = _missing(dashboard, again)
        assert lost == []


def _missing(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Paths of values that did not survive; defaults that the SDK adds are no loss."""
    if isinstance(expected, dict):
        return [
            lost
            for key, value in expected.items()
            for lost in (
                _missing(value, actual[key], f"{path}.{key}")
                if isinstance(actual, dict) and key in actual
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return [path]
        return [
            lost
            for i, (e, a) in enumerate(zip(expected, actual, strict=True))
            for lost in _missing(e, a, f"{path}[{i}]")
        ]
    return [] if expected == actual else [path]


def test_two_builds_are_equal_and_hold_no_clock_or_version(config: MonitorConfig) -> None:
    assert dashboard_files(config) == dashboard_files(config)


@pytest.mark.parametrize("wrong", [23, 25])
def test_a_line_that_does_not_fill_the_grid_is_refused(wrong: int) -> None:
    from sdcwatch.monitor.panels import Grid, Query, Show, stat_panel

    panel = stat_panel("t", "d", Query("vector(1)"), show=Show())
    with pytest.raises(ValueError, match="Expected a line of 24 columns"):
        Grid().line(4, (1, wrong, panel))


def test_a_panel_id_used_twice_is_refused() -> None:
    from sdcwatch.monitor.panels import Grid, Query, Show, stat_panel

    panel = stat_panel("t", "d", Query("vector(1)"), show=Show())
    grid = Grid()
    grid.row(1, "row")
    with pytest.raises(ValueError, match="unique"):
        grid.line(4, (1, 24, panel))
