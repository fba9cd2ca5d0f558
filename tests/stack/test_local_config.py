"""Configuration of the local stack, checked by the servers' own tools."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import alertmanager_example, alertmanager_settings
from sdcwatch.stack.cli import stack
from sdcwatch.stack.config import (
    Scrape,
    alertmanager_config,
    datasource_config,
    prometheus_config,
    read_yaml,
    with_local_links,
    with_short_waits,
    write_grafana,
    write_local_files,
    write_yaml,
)
from sdcwatch.stack.servers import choose_port, find_binary
from sdcwatch.stack.stack import Ports

ROOT = Path(__file__).parents[2]
SCRAPE = Scrape(targets=("127.0.0.1:9464",), file_sd=(), interval_seconds=5)


def test_the_generated_prometheus_configuration_passes_promtool(tmp_path: Path) -> None:
    files = write_local_files(MonitorConfig(), tmp_path)
    scrape = Scrape(targets=("[::1]:9464",), file_sd=(tmp_path,), interval_seconds=1)
    content = prometheus_config(scrape, (files.rules,), "127.0.0.1:9093")
    path = write_yaml(tmp_path / "prometheus.yml", content)

    run = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_generated_alertmanager_configuration_passes_amtool(tmp_path: Path) -> None:
    example = yaml.safe_load(alertmanager_example(MonitorConfig()))
    path = write_yaml(tmp_path / "am.yml", alertmanager_config(example, "http://127.0.0.1:9095"))

    run = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_example_keeps_its_routes_and_gets_our_webhook() -> None:
    example = yaml.safe_load(alertmanager_example(MonitorConfig()))

    wanted = alertmanager_settings(MonitorConfig(), "http://127.0.0.1:1234")
    assert alertmanager_config(example, "http://127.0.0.1:1234") == wanted


def test_the_local_stack_waits_for_seconds_and_leaves_the_watchdog_alone() -> None:
    example = yaml.safe_load(alertmanager_example(MonitorConfig()))
    before = alertmanager_config(example, "http://127.0.0.1:9095")
    after = with_short_waits(before)

    assert (before["route"]["group_wait"], before["route"]["group_interval"]) == ("30s", "5m")
    assert (after["route"]["group_wait"], after["route"]["group_interval"]) == ("5s", "10s")
    assert after["route"]["routes"] == before["route"]["routes"]
    page = next(r for r in after["route"]["routes"] if r["receiver"] == "page")
    assert not {"group_wait", "group_interval"} & set(page)
    assert {k: v for k, v in after.items() if k != "route"} == {
        k: v for k, v in before.items() if k != "route"
    }


def test_a_receiver_that_swallows_alerts_stays_so_and_secrets_are_left_out() -> None:
    example = {
        "global": {"slack_api_url": "https://hooks.slack.invalid/secret"},
        "route": {"receiver": "team"},
        "receivers": [
            {"name": "nobody"},
            {"name": "team", "slack_configs": [{"channel": "#a", "send_resolved": False}]},
        ],
    }
    config = alertmanager_config(example, "http://h:1")

    hook = {"url": "http://h:1/team", "send_resolved": False}
    assert config["receivers"] == [{"name": "nobody"}, {"name": "team", "webhook_configs": [hook]}]
    assert "secret" not in str(config)


def test_with_default_ports_the_rules_are_the_committed_ones(tmp_path: Path) -> None:
    config = with_local_links(MonitorConfig(), prometheus_port=9090, grafana_port=3000)
    files = write_local_files(config, tmp_path)

    assert files.problem == ""
    for path in (files.rules, files.alertmanager):
        assert path.read_bytes() == (ROOT / "alerts" / path.name).read_bytes()
    assert files.dashboards is not None
    ours = {p.name: p.read_bytes() for p in files.dashboards.iterdir()}
    assert ours == {p.name: p.read_bytes() for p in (ROOT / "dashboards").glob("*.json")}


def test_the_folders_that_grafana_looks_for_are_there(tmp_path: Path) -> None:
    """It logs an error at start for each that is missing under provisioning."""
    source = datasource_config("prometheus", "http://127.0.0.1:9090", 15)
    write_grafana(tmp_path, 3000, source, tmp_path / "boards")

    found = {path.name for path in (tmp_path / "provisioning").iterdir()}
    assert found >= {"plugins", "notifiers", "alerting", "datasources", "dashboards"}


def test_links_follow_the_ports_unless_somebody_chose_them() -> None:
    moved = with_local_links(MonitorConfig(), prometheus_port=1, grafana_port=2)
    assert moved.runbook_url == "http://localhost:1/user/runbook.html"
    assert moved.grafana_url == "http://localhost:2"

    chosen = MonitorConfig(grafana_url="https://g.example", runbook_url="")
    assert with_local_links(chosen, prometheus_port=1, grafana_port=2) == chosen


def test_without_the_sdk_rules_are_written_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: MonitorConfig) -> dict[str, str]:
        msg = "Expected grafana-foundation-sdk, but got none. Install it."
        raise ConfigurationError(msg)

    monkeypatch.setattr("sdcwatch.stack.config.generated_files", fail)
    files = write_local_files(MonitorConfig(), tmp_path)

    assert files.rules.is_file()
    assert files.dashboards is None
    assert "grafana-foundation-sdk" in files.problem


@pytest.mark.parametrize("content", ["- a list\n", "a: [", "\x00"])
def test_a_file_that_is_no_yaml_mapping_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"Expected a .*x\.yml, but got"):
        read_yaml(path)


def test_a_missing_program_names_every_name_it_goes_by() -> None:
    with pytest.raises(ConfigurationError, match="`no-such-a` or `no-such-b`, but got none"):
        find_binary("Thing", ("no-such-a", "no-such-b"), "thing")


def test_port_zero_becomes_a_free_one_and_a_port_not_needed_stays() -> None:
    ports = Ports(prometheus=0, alertmanager=0, receiver=0, grafana=3000).chosen(grafana=False)

    assert ports.grafana == 3000
    assert len({ports.prometheus, ports.alertmanager, ports.receiver} - {0}) == 3
    assert choose_port("Thing", ports.prometheus, "--x") == ports.prometheus


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Expected --local, but got no way to run"),
        (("--local", "--target", "http://h:1/metrics"), "Expected host:port, but got"),
        (("--local", "--prometheus-port", "70000"), "70000"),
        (("--local", "--interval", "0"), "0"),
    ],
)
def test_options_that_cannot_work_are_usage_errors(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(stack, ["up", *arguments])

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("option", ["--rules", "--alertmanager-config", "--dashboards"])
def test_a_file_that_is_not_there_is_named(option: str, tmp_path: Path) -> None:
    ports = [f"--{name}-port=0" for name in ("prometheus", "alertmanager", "receiver", "grafana")]
    gone = tmp_path / "gone"
    arguments = ["up", "--local", *ports, f"--data-dir={tmp_path / 'd'}", option, str(gone)]
    result = CliRunner().invoke(stack, arguments)

    assert result.exit_code == 1
    assert f"at {gone}, but got none" in result.output
