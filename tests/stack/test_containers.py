"""docker-compose.yml and what its containers are configured with."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.cli import cli
from sdcwatch.monitor.config import MonitorConfig
from sdcwatch.monitor.rulefiles import FOLDER, alertmanager_example, grafana_rules
from sdcwatch.stack.config import (
    Scrape,
    dashboards_config,
    datasource_config,
    prometheus_config,
)

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def load(path: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / path).read_text()))


def mounts(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    parts = [volume.split(":") for volume in service.get("volumes", ())]
    return [(p[0], p[1], p[2] if len(p) > 2 else "rw") for p in parts]


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose on the PATH; its `config` needs no engine")
    kept = {k: v for k, v in os.environ.items() if k != "GRAFANA_ADMIN_PASSWORD"}
    return subprocess.run(
        ["docker-compose", "--file", str(ROOT / "docker-compose.yml"), *arguments],
        capture_output=True,
        text=True,
        env={**kept, **variables},
    )


def test_docker_compose_accepts_the_file() -> None:
    result = compose("config", GRAFANA_ADMIN_PASSWORD="a-secret")

    assert result.returncode == 0, result.stderr
    resolved = yaml.safe_load(result.stdout)
    assert set(resolved["services"]) == set(SERVICES)
    grafana = resolved["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"] == "a-secret"


def test_without_an_admin_password_it_refuses_and_says_which_variable() -> None:
    result = compose("config", "--quiet")

    assert result.returncode == 1
    assert "Expected GRAFANA_ADMIN_PASSWORD to be set" in result.stderr


def test_the_file_has_no_top_level_name_and_no_password() -> None:
    assert set(COMPOSE) == {"x-sdcwatch", "services", "volumes"}
    secrets = re.findall(r"(?i)password\S*:\s*(.+)", (ROOT / "docker-compose.yml").read_text())
    assert [s for s in secrets if not s.startswith('"${GRAFANA_ADMIN_PASSWORD:?')] == []


@pytest.mark.parametrize("name", SERVICES)
def test_every_path_mounted_exists_and_is_read_only(name: str) -> None:
    for source, _, mode in mounts(SERVICES[name]):
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == "ro", source
        else:
            assert source in COMPOSE["volumes"]


def test_every_volume_is_used() -> None:
    used = {source for service in SERVICES.values() for source, _, _ in mounts(service)}
    assert set(COMPOSE["volumes"]) <= used


@pytest.mark.parametrize("name", SERVICES)
def test_every_published_port_is_on_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        address, outside, inside = port.split(":")
        assert ipaddress.ip_address(address).is_loopback
        assert outside == inside


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_to_a_version(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*", SERVICES[name]["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_keeps_capabilities_or_gains_privileges(name: str) -> None:
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"runbook"}))
def test_every_server_has_a_health_check(name: str) -> None:
    check = SERVICES[name]["healthcheck"]

    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)


def test_what_is_depended_on_is_healthy_or_has_ended_well_first() -> None:
    for name, service in SERVICES.items():
        for other, rule in service.get("depends_on", {}).items():
            ends = "healthcheck" not in SERVICES[other]
            wanted = "service_completed_successfully" if ends else "service_healthy"
            assert rule == {"condition": wanted}, f"{name} on {other}"


@pytest.mark.parametrize(
    ("path", "context"),
    [(DOCKER / "Dockerfile", ROOT), (DOCKER / "collector" / "Dockerfile", DOCKER / "collector")],
)
def test_a_dockerfile_copies_what_is_there_from_pinned_images(path: Path, context: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    stages: set[str] = set()
    for line in lines:
        word, *rest = shlex.split(line)
        if word == "FROM":
            assert re.search(r":\d+\.\d+\.\d+", rest[0]), line
            stages.update(rest[2:3])
        if word == "COPY" and rest[0].startswith("--from="):
            assert rest[0].removeprefix("--from=") in stages, line
        elif word == "COPY":
            assert [source for source in rest[:-1] if not (context / source).exists()] == []


def test_what_the_dockerfile_copies_is_not_ignored() -> None:
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = re.findall(r"^COPY (.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)

    assert {source for sources in copied for source in sources.split()} == kept


def test_the_trainer_runs_as_a_user_and_serves_beyond_its_loopback() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    options = SERVICES["trainer"]["command"]
    assert options[options.index("--metrics-host") + 1] == "0.0.0.0"
    assert options[options.index("--metrics-port") + 1] == "9464"


@pytest.mark.parametrize("name", ["trainer", "runbook"])
def test_the_command_line_takes_the_options_of_the_container(name: str) -> None:
    command: Any = cli
    words = list(SERVICES[name]["command"])
    with cli.make_context("sdcwatch", words[:1], resilient_parsing=True) as context:
        while hasattr(command, "get_command"):
            command = command.get_command(context, words.pop(0))
        known = {option for parameter in command.params for option in parameter.opts}

    assert {word for word in words if word.startswith("--")} <= known


def in_container(path: str) -> str:
    """Where a path of the Prometheus container is here."""
    for source, target, _ in mounts(SERVICES["prometheus"]):
        if source.startswith(".") and path.startswith(target):
            return str(ROOT / source) + path.removeprefix(target)
    raise AssertionError(path)


def test_the_prometheus_configuration_passes_promtool(tmp_path: Path) -> None:
    config = load("prometheus/prometheus.yml")
    config["rule_files"] = [in_container(path) for path in config["rule_files"]]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))

    run = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rules found" in run.stdout


def test_prometheus_scrapes_and_alerts_as_the_local_stack_does() -> None:
    config = load("prometheus/prometheus.yml")
    scrape = Scrape(targets=("trainer:9464",), file_sd=(), interval_seconds=5)
    local = prometheus_config(scrape, (), "alertmanager:9093")
    pulled, pushed = config["scrape_configs"]

    assert config["global"] == local["global"]
    assert config["alerting"] == local["alerting"]
    assert [pulled] == local["scrape_configs"]
    pushed.pop("job_name")
    assert pushed == {"honor_labels": True, "static_configs": [{"targets": ["collector:8889"]}]}


def test_scraped_targets_are_services_and_ports_of_the_stack() -> None:
    collector = load("collector/config.yaml")["exporters"]["prometheus"]["endpoint"]
    open_at = {"trainer": "9464", "collector": collector.rpartition(":")[2], "alertmanager": "9093"}
    config = load("prometheus/prometheus.yml")
    sections = [*config["scrape_configs"], *config["alerting"]["alertmanagers"]]
    targets = [t for s in sections for group in s["static_configs"] for t in group["targets"]]

    assert dict(target.split(":") for target in targets) == open_at
    assert set(open_at) <= set(SERVICES)


def test_alertmanager_runs_the_example_as_it_is_and_reaches_the_receiver() -> None:
    sources = [source for source, _, _ in mounts(SERVICES["alertmanager"])]
    assert "./alerts/alertmanager.example.yml" in sources
    path = ROOT / "alerts" / "alertmanager.example.yml"
    run = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

    hooks = re.findall(r"url: http://(\S+?):(\d+)/", alertmanager_example(MonitorConfig()))
    options = SERVICES["receiver"]["command"]
    assert set(hooks) == {("127.0.0.1", options[options.index("--port") + 1])}
    assert SERVICES["receiver"]["network_mode"] == "service:alertmanager"


def test_the_runbook_page_is_written_where_prometheus_serves_it() -> None:
    (page,) = (m for m in mounts(SERVICES["runbook"]) if m[0] == "runbook")
    command = SERVICES["runbook"]["command"]
    assert command[command.index("--out") + 1] == page[1]
    (served,) = (m for m in mounts(SERVICES["prometheus"]) if m[0] == "runbook")
    assert f"--web.user-assets={served[1]}" in SERVICES["prometheus"]["command"]
    assert MonitorConfig().runbook_url.startswith("http://localhost:9090/user/")


# What Grafana 12 reads from these files, with the type of each value; anything else it ignores
# silently, so that a misspelt key would go unnoticed.
DATASOURCE = {
    "name": str, "uid": str, "type": str, "access": str, "url": str, "isDefault": bool,
    "editable": bool, "jsonData": {"httpMethod": str, "timeInterval": str},
}  # fmt: skip
PROVIDER = {
    "name": str, "orgId": int, "folder": str, "type": str, "disableDeletion": bool,
    "allowUiUpdates": bool, "updateIntervalSeconds": int,
    "options": {"path": str, "foldersFromFilesStructure": bool},
}  # fmt: skip


def conforms(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    return set(value) == set(schema) and all(
        conforms(value[key], kind) if isinstance(kind, dict) else type(value[key]) is kind
        for key, kind in schema.items()
    )


def test_grafana_is_provisioned_with_known_keys_only() -> None:
    base = "grafana/provisioning"
    sources = load(f"{base}/datasources/sdcwatch.yaml")
    providers = load(f"{base}/dashboards/sdcwatch.yaml")

    assert sources["apiVersion"] == providers["apiVersion"] == 1
    assert [conforms(source, DATASOURCE) for source in sources["datasources"]] == [True]
    assert [conforms(provider, PROVIDER) for provider in providers["providers"]] == [True]
    misspelt = {**providers["providers"][0], "allowUIUpdates": False}
    assert not conforms(misspelt, PROVIDER)


def test_grafana_gets_the_data_source_and_dashboards_of_the_local_stack() -> None:
    base = "grafana/provisioning"
    uid = MonitorConfig().datasource
    wanted = datasource_config(uid, "http://prometheus:9090", 5)
    assert load(f"{base}/datasources/sdcwatch.yaml") == wanted
    (where,) = (m[1] for m in mounts(SERVICES["grafana"]) if m[0] == "./dashboards")
    assert load(f"{base}/dashboards/sdcwatch.yaml") == dashboards_config(where)


def test_dashboards_and_grafana_managed_rules_share_one_folder() -> None:
    folders = {
        group["folder"] for group in yaml.safe_load(grafana_rules(MonitorConfig()))["groups"]
    }
    providers = load("grafana/provisioning/dashboards/sdcwatch.yaml")["providers"]

    assert {provider["folder"] for provider in providers} == folders == {FOLDER}
    assert not (DOCKER / "grafana" / "provisioning" / "alerting").exists()


def test_the_collector_uses_what_it_defines_and_defines_what_it_uses() -> None:
    config = load("collector/config.yaml")
    kinds = {
        "receivers": {"otlp"},
        "processors": {"memory_limiter", "transform", "batch"},
        "exporters": {"prometheus", "debug"},
        "extensions": {"health_check"},
    }
    pipelines = config["service"]["pipelines"].values()
    for section, known in kinds.items():
        assert {name.partition("/")[0] for name in config[section]} == known
        used = (
            set(config["service"]["extensions"])
            if section == "extensions"
            else {name for pipeline in pipelines for name in pipeline[section]}
        )
        assert set(config[section]) == used
    assert set(config) == {*kinds, "service"}
    for pipeline in pipelines:
        assert pipeline["processors"][0] == "memory_limiter"
        assert pipeline["processors"][-1] == "batch"


def test_the_collector_labels_series_as_a_rank_does_itself() -> None:
    transform = load("collector/config.yaml")["processors"]["transform/labels"]
    contexts = [entry["context"] for entry in transform["metric_statements"]]
    statements = [line for entry in transform["metric_statements"] for line in entry["statements"]]

    for label in ("run", "exporter_rank"):
        wanted = f'set(attributes["{label}"], resource.attributes["{label}"])'
        assert any(line.startswith(wanted) for line in statements)
    # The resource is read before the key that would clash with the label `instance` goes.
    assert contexts == ["datapoint", "resource"]
    assert statements[-1] == 'delete_key(attributes, "service.instance.id")'


def test_the_collector_listens_where_the_trainer_pushes_and_the_health_check_asks() -> None:
    config = load("collector/config.yaml")
    endpoint = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    pushed = SERVICES["trainer"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    asked = SERVICES["collector"]["healthcheck"]["test"][-1]

    assert pushed == f"http://collector:{endpoint.rpartition(':')[2]}"
    assert asked == f"http://{config['extensions']['health_check']['endpoint']}/"
