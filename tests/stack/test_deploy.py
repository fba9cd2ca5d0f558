"""deploy/: what a cluster is given. No cluster is at hand, so each file meets what it names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcwatch.config import GuardConfig, TelemetryConfig
from sdcwatch.errors import EXIT_CODES
from sdcwatch.monitor.config import MonitorConfig

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SLURM = ROOT / "deploy" / "slurm"
TRAIN = KUBERNETES / "train.py"
GUARD_FIELDS = {f.name for f in fields(GuardConfig)}
TELEMETRY_FIELDS = {f.name for f in fields(TelemetryConfig)}


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((KUBERNETES / name).read_text()))


def pod_template() -> dict[str, Any]:
    return dict(load("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]["Master"]["template"])


def container() -> dict[str, Any]:
    (only,) = pod_template()["spec"]["containers"]
    return dict(only)


def environment() -> dict[str, dict[str, Any]]:
    return {entry.pop("name"): entry for entry in container()["env"]}


def options_of_train() -> set[str]:
    return set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', TRAIN.read_text()))


def keywords(callee: str) -> set[str]:
    """Keyword arguments with which the training script calls `callee`."""
    for node in ast.walk(ast.parse(TRAIN.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == callee:
            return {keyword.arg for keyword in node.keywords if keyword.arg}
    raise AssertionError(callee)


def test_every_option_that_the_training_script_passes_exists() -> None:
    assert keywords("sdcwatch.TelemetryConfig") <= TELEMETRY_FIELDS
    assert keywords("sdcwatch.init") <= GUARD_FIELDS
    assert {"export", "file_sd_dir"} <= keywords("sdcwatch.TelemetryConfig")


@pytest.mark.parametrize("path", sorted(p for p in (ROOT / "deploy").rglob("*") if p.is_file()))
def test_every_sdcwatch_variable_in_a_deployment_is_an_option(path: Path) -> None:
    named = set(re.findall(r"\bSDCWATCH_[A-Z_]+", path.read_text()))
    own = {"SDCWATCH_SHARED"} if path.parent == SLURM else set()

    assert {name for name in named - own if name[9:].lower() not in GUARD_FIELDS} == set()


def test_every_pod_says_which_machine_it_is_on() -> None:
    downward = {name: entry.get("valueFrom") for name, entry in environment().items()}

    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert downward["SDCWATCH_NODE"] == node
    assert downward["SDCWATCH_INSTANCE_ID"] == node


def test_master_and_workers_run_the_same_pod_on_different_nodes_and_can_name_a_rank() -> None:
    job = load("pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    spec = pod_template()["spec"]
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["kind"] == "PyTorchJob"
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] >= 3
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert set(rule["labelSelector"]["matchLabels"].values()) == {job["metadata"]["name"]}
    gpus = container()["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["nprocPerNode"] == str(gpus)
    assert container()["name"] == "pytorch"


def test_a_run_that_stopped_for_a_finding_is_not_started_again() -> None:
    job = load("pytorchjob.yaml")["spec"]
    manifest = (KUBERNETES / "pytorchjob.yaml").read_text()

    assert job["runPolicy"]["backoffLimit"] == 0
    assert {r["restartPolicy"] for r in job["pytorchReplicaSpecs"].values()} == {"Never"}
    assert f"exit codes {min(EXIT_CODES)} to {max(EXIT_CODES)}" in manifest


def test_the_pod_monitor_scrapes_the_port_that_the_pod_serves() -> None:
    monitor = load("podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}

    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert ports[endpoint["port"]] == TelemetryConfig().prometheus_port
    assert endpoint["honorLabels"] is True
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert selected <= pod_template()["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"] == dict(MonitorConfig().prometheusrule_labels)


def test_what_the_kustomization_lists_is_there_and_the_script_is_mounted() -> None:
    kustomization = load("kustomization.yaml")
    (script,) = kustomization["configMapGenerator"]
    volumes = {v["name"]: v for v in pod_template()["spec"]["volumes"]}
    mounts = {m["name"]: m["mountPath"] for m in container()["volumeMounts"]}

    for name in (*kustomization["resources"], *script["files"]):
        assert (KUBERNETES / name).is_file()
    assert volumes["script"]["configMap"]["name"] == script["name"]
    assert kustomization["generatorOptions"]["disableNameSuffixHash"] is True
    assert container()["args"][0] == f"{mounts['script']}/train.py"
    assert set(mounts) == set(volumes)


def test_the_pod_starts_the_script_with_options_it_has() -> None:
    options = {arg.partition("=")[0] for arg in container()["args"] if arg.startswith("--")}

    assert options <= options_of_train()
    expanded = set(re.findall(r"\$\((\w+)\)", str(container()["args"])))
    assert expanded <= set(environment())


def test_torchrun_takes_the_name_of_the_run_from_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.run import parse_args

    assert environment()["PET_RDZV_ID"] == {"value": "$(SDCWATCH_RUN)"}
    monkeypatch.setenv("PET_RDZV_ID", "job-7")
    assert parse_args(["train.py"]).rdzv_id == "job-7"


STUBS = {
    "scontrol": 'printf "%s\\n" gpu-a gpu-b gpu-c',
    # Every node runs the same command, with its own name in the environment; SIGTERM is passed on.
    "srun": (
        "shift\n"
        "trap 'kill $child; exit 143' TERM\n"
        "for node in gpu-a gpu-b gpu-c; do\n"
        '  SLURMD_NODENAME=$node "$@" & child=$!\n'
        "  wait $child || exit $?\n"
        "done\n"
    ),
    "torchrun": (
        'echo "$SDCWATCH_NODE $SDCWATCH_INSTANCE_ID $*" >>"$CALLS"\n'
        'for host in "$SDCWATCH_NODE" "$SDCWATCH_NODE.cluster" other "$SDCWATCH_NODE-b"; do\n'
        '  echo "[]" >"$SDCWATCH_SHARED/targets/$host-12.json"\n'
        "done\n"
        '[[ -z "${RUN_FOR:-}" ]] || exec sleep "$RUN_FOR"\n'
        "exit ${FAIL_WITH:-0}\n"
    ),
}


def start_batch(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Run the batch script as Slurm's first node would, with stand-ins for its programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "gpu-[a-c]",
        "SLURM_GPUS_ON_NODE": "4",
        **variables,
    }
    command = ["bash", str(SLURM / "train.sbatch"), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def run_batch(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and standard error of the batch script."""
    process = start_batch(tmp_path, *arguments, **variables)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


def test_the_batch_script_starts_one_launcher_per_node_and_forgets_its_targets(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    code, said = run_batch(tmp_path, "train.py", "--steps=5", SDCWATCH_SHARED=str(shared))

    assert code == 0, said
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[:2] for call in calls] == [[n, n] for n in ("gpu-a", "gpu-b", "gpu-c")]
    for call in calls:
        assert call[2:7] == [
            "--nnodes=3",
            "--nproc-per-node=4",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=gpu-a:29500",
            "--rdzv-id=4711",
        ]
        assert call[7] == "train.py"
        assert call[-1] == "--steps=5"
        assert {word.partition("=")[0] for word in call[8:]} <= options_of_train()
        assert f"--file-sd-dir={shared}/targets" in call
    others = ("gpu-a-b-12.json", "gpu-b-b-12.json", "gpu-c-b-12.json", "other-12.json")
    assert sorted(path.name for path in (shared / "targets").iterdir()) == list(others)


def test_the_exit_code_of_a_finding_is_the_exit_code_of_the_job(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    code, _ = run_batch(tmp_path, "train.py", SDCWATCH_SHARED=shared, FAIL_WITH="80")

    assert code == 80


def test_a_job_that_slurm_ends_stops_its_launcher_and_forgets_its_targets(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    process = start_batch(tmp_path, "train.py", SDCWATCH_SHARED=str(shared), RUN_FOR="30")
    deadline = time.monotonic() + 20
    while not list(shared.glob("targets/gpu-a-b-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=20)

    assert process.returncode == 143
    names = sorted(path.name for path in (shared / "targets").iterdir())
    assert names == ["gpu-a-b-12.json", "other-12.json"]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("train.py",), {}, "Expected SDCWATCH_SHARED"),
        ((), {"SDCWATCH_SHARED": "shared"}, "Expected the training script"),
    ],
)
def test_the_batch_script_says_what_is_missing(
    arguments: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    code, error = run_batch(tmp_path, *arguments, **variables)

    assert code != 0
    assert said in error


def test_the_slurm_prometheus_configuration_passes_promtool(tmp_path: Path) -> None:
    config = yaml.safe_load((SLURM / "prometheus.yml").read_text())
    config["rule_files"] = [str(ROOT / "alerts" / Path(p).name) for p in config["rule_files"]]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))

    run = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (job,) = config["scrape_configs"]
    assert job["honor_labels"] is True
    assert job["file_sd_configs"][0]["files"] == ["/shared/sdcwatch/targets/*.json"]


@pytest.mark.dist
@pytest.mark.timeout(180)  # five processes that load torch, on as little as two cores
def test_the_training_script_runs_under_torchrun_and_saves_a_checkpoint(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"),
        *("--rdzv-id=job-7", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(TRAIN)),
        *("--steps=4", "--checkpoint-every=4", "--linger=0", "--metrics-port=0"),
        *(f"--file-sd-dir={tmp_path / 'targets'}", f"--checkpoint-dir={tmp_path / 'ckpt'}"),
        f"--run-dir={tmp_path / 'run'}",
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SDCWATCH_")}
    settings = {"SDCWATCH_FAULT_DOMAIN": "gpu", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, env={**kept, **settings}, cwd=tmp_path, timeout=150
    )

    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "ckpt" / "step-0000004.pt").is_file()
    assert '"job-7"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert list((tmp_path / "targets").iterdir()) == []
