"""What the doctor says about facts: pure functions, without a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdcwatch.doctor.checks import Finding, Level, examine, files_needed, worst
from sdcwatch.doctor.facts import Facts, Folder, Job, Network, Options, Software

OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM
GIB = 2**30
GPU = Software(
    python="3.11.7",
    packages={"sdcwatch": "0.1.0"},
    torch="2.13.0+cu130",
    cuda="13.0",
    nccl="2.28.3",
    driver="580.95.05",
    gpus=("H200", "H200"),
)
SOUND = Facts(
    software=GPU,
    job=Job(ranks=16, ranks_per_node=8),
    variables={
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0",
    },
    cores=64,
    open_files=(1024, 1048576),
    ports={9464: ""},
    shared_memory=Folder(path="/dev/shm", free_bytes=8 * GIB, total_bytes=8 * GIB),
    run_dir=Folder(path="runs", free_bytes=100 * GIB, total_bytes=200 * GIB, file_system="ext4"),
    network=Network(host="node-0", addresses=("10.0.0.1",), interfaces=("lo", "eth0")),
    time=1.8e9,
    clock_synchronised=True,
)
CPU = replace(SOUND, software=replace(GPU, gpus=(), driver=None))


def with_variables(facts: Facts = SOUND, **variables: str) -> Facts:
    return replace(facts, variables={**facts.variables, **variables})


def about(facts: Facts, name: str) -> Finding:
    (found,) = [f for f in examine(facts) if f.name == name]
    return found


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    findings = examine(SOUND)

    assert {f.level for f in findings} == {OK}
    assert {f.do for f in findings} == {""}
    assert worst(findings) is OK


@pytest.mark.parametrize("name", ["packages", "torch", "GPU", "host name", "SDCWATCH_*",
                                  "run directory", "port 9464", "open files", "/dev/shm",
                                  "clock"])  # fmt: skip
def test_a_sound_machine_is_told_in_rows(name: str) -> None:
    assert about(SOUND, name).found


CASES: list[tuple[str, Facts, Level, str]] = [
    ("torch", replace(SOUND, software=replace(GPU, torch="2.7.1")), PROBLEM, "older than 2.8"),
    (
        "torch",
        replace(SOUND, software=replace(GPU, torch=None, torch_error="libcudart.so.13")),
        PROBLEM,
        "cannot be imported: libcudart.so.13",
    ),
    ("gloo", replace(SOUND, software=replace(GPU, gloo=False)), PROBLEM, "has no gloo"),
    (
        "GPU",
        replace(SOUND, software=replace(GPU, gpus=())),
        WARNING,
        "there is a driver (580.95.05)",
    ),
    (
        "GPU",
        replace(SOUND, software=replace(GPU, gpus=("H200", "H100"))),
        WARNING,
        "H100 and H200: other kernels",
    ),
    ("GPU", CPU, OK, "training on the CPU"),
    (
        "CUBLAS_WORKSPACE_CONFIG",
        replace(SOUND, variables={}),
        WARNING,
        "not set: cuBLAS may not repeat itself",
    ),
    (
        "CUBLAS_WORKSPACE_CONFIG",
        with_variables(CUBLAS_WORKSPACE_CONFIG=":0:0"),
        WARNING,
        ":0:0: cuBLAS may not repeat itself",
    ),
    ("threads", CPU, WARNING, "as many as there are cores (64 here)"),
    ("threads", with_variables(CPU, OMP_NUM_THREADS="4"), OK, "OMP_NUM_THREADS=4"),
    (
        "NVIDIA_TF32_OVERRIDE",
        replace(SOUND, kernel_variables={"NVIDIA_TF32_OVERRIDE": "0"}),
        WARNING,
        "0: ranks without it run other kernels",
    ),
    ("PYTHONHASHSEED", replace(SOUND, variables={}), OK, "random"),
    ("TORCH_NCCL_NAN_CHECK", with_variables(TORCH_NCCL_NAN_CHECK="1"), PROBLEM, "before check 1"),
    ("TORCH_DIST_NAN_CHECK", with_variables(TORCH_DIST_NAN_CHECK="true"), PROBLEM, "on: a NaN"),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        with_variables(TORCH_NCCL_BLOCKING_WAIT="1"),
        WARNING,
        "before the guard has named it",
    ),
    (
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        with_variables(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="60"),
        PROBLEM,
        "60 s: torch ends a stuck process before the guard, which needs 360 s",
    ),
    (
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        replace(SOUND, options=Options(patience_seconds=660.0)),
        PROBLEM,
        "480 s: torch ends a stuck process before the guard, which needs 660 s",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        with_variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"),
        WARNING,
        "preceded by two others",
    ),
    ("TORCH_GLOO_LAZY_INIT", with_variables(TORCH_GLOO_LAZY_INIT="1"), WARNING, "gloo#520"),
    (
        "GLOO_SOCKET_IFNAME",
        with_variables(GLOO_SOCKET_IFNAME="eth0,ib7"),
        PROBLEM,
        "ib7: no such interface here",
    ),
    (
        "host name",
        replace(SOUND, network=Network(host="n", error="Name or service not known")),
        PROBLEM,
        "n does not resolve (Name or service not known)",
    ),
    (
        "host name",
        replace(SOUND, network=Network(host="n", addresses=("127.0.1.1", "::1"))),
        PROBLEM,
        "n resolves to 127.0.1.1, ::1: other machines cannot connect",
    ),
    (
        "host name",
        replace(SOUND, network=Network(host="n", addresses=("fe80::1%eth0",))),
        PROBLEM,
        "IPv6 only (fe80::1)",
    ),
    (
        "host name",
        replace(SOUND, job=Job(), network=Network(host="n", addresses=("127.0.1.1",))),
        WARNING,
        "other machines cannot connect",
    ),
    (
        "host name",
        replace(
            with_variables(GLOO_SOCKET_IFNAME="eth0"),
            network=Network(host="n", error="gone", interfaces=("eth0",)),
        ),
        OK,
        "gloo binds to eth0",
    ),
    (
        "SDCWATCH_*",
        replace(SOUND, options=Options(error="Expected SDCWATCH_QUORUM to be …, but got '9'.")),
        PROBLEM,
        "but got '9'",
    ),
    (
        "SDCWATCH_AUDITS",
        replace(SOUND, options=Options(unknown={"SDCWATCH_AUDITS": "Did you mean …?"})),
        WARNING,
        "sets no option: ignored",
    ),
    (
        "SDCWATCH_AUDIT_EVERY",
        replace(SOUND, options=Options(audit_every=None)),
        WARNING,
        "check 2 is off",
    ),
    (
        "SDCWATCH_FINGERPRINT_EVERY",
        replace(SOUND, options=Options(fingerprint_every=None)),
        WARNING,
        "at step 0",
    ),
    ("SDCWATCH_MODE", replace(SOUND, options=Options(observe=True)), WARNING, "no update is"),
    ("SDCWATCH_TELEMETRY", replace(SOUND, options=Options(telemetry=False)), WARNING, "stderr"),
    (
        "run directory",
        replace(SOUND, run_dir=Folder(path="/runs", error="Permission denied")),
        PROBLEM,
        "/runs: Permission denied",
    ),
    (
        "run directory",
        replace(SOUND, run_dir=Folder(path="/runs", free_bytes=5 * 2**20, file_system="ext4")),
        WARNING,
        "/runs: 5 MiB free on ext4",
    ),
    (
        "run directory",
        replace(SOUND, run_dir=Folder(path="/runs", free_bytes=9 * GIB, file_system="nfs4")),
        OK,
        "on nfs4, over the network",
    ),
    ("OTEL_SDK_DISABLED", with_variables(OTEL_SDK_DISABLED="true"), WARNING, "sends nothing"),
    (
        "OTEL_METRICS_EXPORTER",
        with_variables(OTEL_METRICS_EXPORTER="none", OTEL_EXPORTER_OTLP_ENDPOINT="http://c:4318"),
        WARNING,
        "not pushed to http://c:4318",
    ),
    (
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        with_variables(OTEL_EXPORTER_OTLP_PROTOCOL="grpc"),
        WARNING,
        "http/protobuf only",
    ),
    ("WANDB_MODE", with_variables(WANDB_MODE="disabled"), WARNING, "W&B gets nothing"),
    ("WANDB_MODE", with_variables(WANDB_MODE="offline"), OK, "until `wandb sync`"),
    (
        "port 9464",
        replace(SOUND, ports={9464: "in use"}),
        WARNING,
        "in use: /metrics moves to the next free port",
    ),
    (
        "open files",
        replace(CPU, open_files=(1024, 4096), job=Job(ranks=4096)),
        PROBLEM,
        "1,024, at most 4,096; 4,096 ranks may need 4,720",
    ),
    (
        "open files",
        replace(CPU, open_files=(1024, -1), job=Job(ranks=4096)),
        WARNING,
        "1,024, at most no limit",
    ),
    (
        "open files",
        replace(SOUND, open_files=(256, 1024), job=Job(ranks=16384)),
        OK,
        "256, at most 1,024; 16,384 ranks may need 633",
    ),
    ("open files", replace(SOUND, open_files=(256, 512)), PROBLEM, "16 ranks may need"),
    ("open files", replace(SOUND, open_files=(256, 512), job=Job()), OK, "see --ranks"),
    (
        "processes",
        replace(SOUND, processes=1024),
        WARNING,
        "1,024 for this user: 8 ranks may have 2,048 threads",
    ),
    ("locked memory", replace(SOUND, locked_memory_bytes=2**16), WARNING, "64 KiB: over Infini"),
    (
        "torch.compile",
        replace(SOUND, variables={}),
        WARNING,
        "torch 2.13.0+cu130: inductor may leave a part of a gradient unwritten",
    ),
    (
        "/dev/shm",
        replace(SOUND, shared_memory=Folder(path="/dev/shm", total_bytes=64 * 2**20)),
        PROBLEM,
        "64 MiB: NCCL and data loaders die of a bus error",
    ),
    (
        "/dev/shm",
        replace(SOUND, shared_memory=Folder(path="/dev/shm", total_bytes=512 * 2**20)),
        WARNING,
        "512 MiB",
    ),
    ("clock", replace(SOUND, time=86400.0), PROBLEM, "it was never set"),
    ("clock", replace(SOUND, clock_synchronised=False), WARNING, "cannot be compared"),
    ("clock", replace(SOUND, clock_synchronised=None), OK, "set"),
]


@pytest.mark.parametrize(("name", "facts", "level", "said"), CASES,
                         ids=[f"{c[0]}-{c[2].value}-{i}" for i, c in enumerate(CASES)])  # fmt: skip
def test_each_row_has_its_level_and_says_what_to_do(
    name: str, facts: Facts, level: Level, said: str
) -> None:
    finding = about(facts, name)

    assert (finding.level, said in finding.found) == (level, True), finding
    assert bool(finding.do) == (level is not OK)


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_NCCL_NAN_CHECK": "0"},
        {"TORCH_NCCL_BLOCKING_WAIT": "false"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        {"TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"TORCH_GLOO_LAZY_INIT": "0"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {"OTEL_METRICS_EXPORTER": "none"},
        {"WANDB_MODE": "online"},
        {"OMP_NUM_THREADS": "8"},
    ],
    ids=str,
)
def test_a_variable_that_does_no_harm_is_no_warning(variables: dict[str, Any]) -> None:
    assert {f.level for f in examine(with_variables(**variables))} == {OK}


def test_the_gravest_finding_counts() -> None:
    assert worst(examine(replace(SOUND, clock_synchronised=False))) is WARNING
    assert worst(examine(replace(SOUND, clock_synchronised=False, time=0.0))) is PROBLEM
    assert worst([]) is OK


def test_training_over_gloo_needs_a_socket_for_each_other_rank_and_the_guard_does_not() -> None:
    assert files_needed(16384, mesh=True) - files_needed(16383, mesh=True) == 1
    assert files_needed(16384, mesh=False) == files_needed(16383, mesh=False) < 1024


@pytest.mark.parametrize("software", [replace(GPU, torch="2.9.1"), CPU.software])
def test_a_fault_of_torch_is_told_only_where_it_can_strike(software: Software) -> None:
    told = examine(replace(SOUND, software=software, variables={}))

    assert "torch.compile" not in [f.name for f in told]
