"""What boards show is what happened: exact bars, any run name, one word, on a real Prometheus."""

from __future__ import annotations

from typing import Any

import pytest

Dashboards = dict[str, dict[str, Any]]


def _panel(dashboards: Dashboards, slug: str, title: str) -> dict[str, Any]:
    (panel,) = (p for p in dashboards[slug]["panels"] if p["title"] == title)
    return panel


def _logged(synthetic: Any) -> list[Any]:
    return list(synthetic.LOGGED)


@pytest.mark.promtool
@pytest.mark.parametrize("index", range(7))
def test_the_bars_add_up_to_the_events_of_the_log(
    index: int, dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    """At scrapes of 5, 15 and 60 s over 15 minutes and 6 hours, and of 60 s over 7 days."""
    logged = _logged(synthetic)[index]
    target = _panel(dashboards, "run", "Verdicts that are not a pass")["targets"][0]
    expression = substitute(
        target["expr"],
        run=logged.run,
        range_seconds=logged.seconds,
        interval_seconds=logged.interval,
    )
    # Grafana aligns steps; the last one reaches past the end.
    end = synthetic.END + logged.interval

    series = recorded.range(expression, end - logged.seconds, end, logged.interval)

    bars = {s["metric"]["outcome"]: [float(v) for _, v in s["values"]] for s in series}
    events = logged.events()
    assert {outcome: sum(values) for outcome, values in bars.items()} == {
        outcome: len(times) for outcome, times in events.items()
    }
    assert all(value == int(value) and value >= 1 for v in bars.values() for value in v)


@pytest.mark.promtool
def test_one_event_is_one_bar_of_height_one(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    logged = next(x for x in synthetic.LOGGED if (x.every, x.seconds) == (15, 900))
    target = _panel(dashboards, "run", "Verdicts that are not a pass")["targets"][0]
    expression = substitute(
        target["expr"], run=logged.run, range_seconds=900, interval_seconds=logged.interval
    )
    series = recorded.range(expression, synthetic.END - 900, synthetic.END + 15, 15)

    (suspect,) = (s for s in series if s["metric"]["outcome"] == "suspect")
    assert [v for _, v in suspect["values"]] == ["1", "1"]


@pytest.mark.promtool
def test_an_empty_panel_says_none_and_a_missing_run_has_no_series(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    target = _panel(dashboards, "run", "Verdicts that are not a pass")["targets"][-1]
    assert target["legendFormat"] == "none"

    def asked(run: str) -> list[Any]:
        expression = substitute(target["expr"], run=run, range_seconds=900)
        return list(recorded.range(expression, synthetic.END - 900, synthetic.END, 15))

    assert len(asked("clean")) == 1
    assert asked("transport") == []
    assert asked("no such run") == []


@pytest.mark.promtool
@pytest.mark.parametrize("index", range(10))
def test_every_panel_answers_for_any_run_name_and_for_no_other(
    index: int, dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    name = synthetic.HOSTILE_NAMES[index]
    at = synthetic.END
    for slug, dashboard in dashboards.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expression = substitute(target["expr"], run=name, range_seconds=900, gpu="GPU-1")
                for answer in recorded.instant(expression, at):
                    run = answer["metric"].get("run", name)
                    assert run == name, f"{slug}: {panel['title']}"
    run = dashboards["run"]
    for title in ("Verdict", "Guard", "Mode", "Coverage", "Suspects", "Skipped updates", "Withheld",
                  "UNATTRIBUTED", "Events", "Configuration and links"):  # fmt: skip
        expression = _panel({"run": run}, "run", title)["targets"][0]["expr"]
        assert recorded.instant(substitute(expression, run=name, range_seconds=900), at), title


@pytest.mark.promtool
def test_a_run_that_does_not_exist_gives_every_tile_no_answer(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    for panel in dashboards["run"]["panels"]:
        if panel["type"] in ("stat", "table"):
            for target in panel["targets"]:
                expression = substitute(target["expr"], run="no such run", range_seconds=900)
                assert recorded.instant(expression, synthetic.END) == [], panel["title"]


@pytest.mark.promtool
def test_a_run_in_which_nothing_was_found_is_told_apart_from_no_run(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    def asked(title: str) -> list[Any]:
        expression = _panel(dashboards, "run", title)["targets"][0]["expr"]
        filled = substitute(expression, run="clean", range_seconds=900)
        return list(recorded.instant(filled, synthetic.END))

    for title in ("Skipped updates", "Withheld", "UNATTRIBUTED"):
        assert [a["value"][1] for a in asked(title)] == ["0"], title
    assert [a["value"][1] for a in asked("Suspects")] == ["0"]


@pytest.mark.promtool
def test_board_and_core_have_one_word_for_every_trial(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    run = _panel(dashboards, "run", "Verdict")["targets"][0]["expr"]
    fleet = _panel(dashboards, "fleet", "Runs")["targets"][0]["expr"]
    for name in synthetic.TRIALS:
        word = synthetic.trial(name).word.value
        for expression in (run, fleet):
            filled = substitute(expression, run=name, range_seconds=900)
            answers = recorded.instant(filled, synthetic.END)
            assert [a["metric"]["verdict"] for a in answers] == [word], name


@pytest.mark.promtool
def test_a_killed_run_reads_vanished_and_since_last_step_reads_ended(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    at = synthetic.END + 600

    def asked(title: str) -> Any:
        expression = _panel(dashboards, "run", title)["targets"][0]["expr"]
        (answer,) = recorded.instant(substitute(expression, run="clean", range_seconds=3600), at)
        return answer

    assert asked("Guard")["metric"]["state"] == "vanished"
    assert asked("Since last step")["value"][1] == "-1"
    assert asked("Verdict")["metric"]["verdict"] == "clean"


@pytest.mark.promtool
def test_fleet_after_every_run_has_ended_has_no_overhead_and_nothing_live(
    dashboards: Dashboards, recorded: Any, synthetic: Any, substitute: Any
) -> None:
    def asked(title: str) -> list[Any]:
        expression = _panel(dashboards, "fleet", title)["targets"][0]["expr"]
        filled = substitute(expression, run="clean", range_seconds=7200)
        return list(recorded.instant(filled, synthetic.END + 3600))

    assert [a["value"][1] for a in asked("Live now")] == ["0"]
    for title in ("Highest overhead", "Oldest audit", "Passes / s"):
        assert asked(title) == [], title
    assert [a["metric"]["run"] for a in asked("Runs")] == ["clean"]
