import dataclasses
from pathlib import Path

import pytest

from sdcwatch.config import GuardConfig, GuardOptions, TelemetryConfig, launcher_environment
from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor.config import MonitorConfig, Thresholds

FORM = r"(?s)^Expected .+, but got .+\. [A-Z].+\.$"


@pytest.mark.parametrize(
    "bad",
    [
        {"audit_every": 0},
        {"audit_every": -1},
        {"audit_every": 2.0},
        {"audit_every": True},
        {"fingerprint_every": 0},
        {"checkpoint_every": 0},
        {"max_consecutive_skips": 0},
        {"max_consecutive_skips": None},
        {"preflight_micro_batches": 0},
        {"mode": "watch"},
        {"on_failure": "ignore"},
        {"on_hang": "kill"},
        {"fault_domain": "rack"},
        {"quorum": 1},
        {"quorum": 4},
        {"start_step": -1},
        {"max_audit_age": -1},
        {"deadline_seconds": 0},
        {"hang_seconds": -1.0},
        {"telemetry": "on"},
        {"telemetry": None},
        {"comm_hook": (1, 2)},
        {"comm_hook": ()},
        {"scaler": 5},
        {"local": (1,)},
        {"run_dir": ""},
        {"run_dir": "a\0b"},
        {"seed": 2**80},
        {"start_step": 2**63},
    ],
    ids=str,
)
def test_what_cannot_work_is_said_as_expected_got_and_do(bad):
    with pytest.raises(ConfigurationError, match=FORM) as raised:
        GuardConfig(**bad)
    assert next(iter(bad)) in str(raised.value)
    assert repr(next(iter(bad.values()))) in str(raised.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"export": "some"},
        {"queue_size": 0},
        {"prometheus_port": -1},
        {"prometheus_port": 65536},
        {"close_seconds": -1.0},
        {"linger_seconds": -0.1},
        {"wandb_init": {1: 2}},
        {"dashboard_url": "javascript:alert(1)"},
        {"dashboard_url": "http://a b"},
        {"file_sd_dir": ""},
    ],
    ids=str,
)
def test_telemetry_that_cannot_work_is_said_in_the_same_form(bad):
    with pytest.raises(ConfigurationError, match=FORM) as raised:
        TelemetryConfig(**bad)
    assert next(iter(bad)) in str(raised.value)


@pytest.mark.parametrize("cls", [GuardConfig, TelemetryConfig, MonitorConfig, Thresholds])
def test_every_field_refuses_what_is_not_of_its_type_by_name(cls):
    class Anything:
        """Of no type that an option has; its name is no excuse for a word of a Literal."""

        def __str__(self):
            return "off"

    for field in dataclasses.fields(cls):
        with pytest.raises(ConfigurationError, match=FORM) as raised:
            cls(**{field.name: Anything()})
        assert "Anything object" in str(raised.value)
        known_by_name = cls is not Thresholds or field.type != "str"  # durations say an example
        assert field.name in str(raised.value) or not known_by_name


def test_every_path_may_be_a_string(tmp_path):
    paths = {
        (cls, field.name)
        for cls in (GuardConfig, TelemetryConfig)
        for field in dataclasses.fields(cls)
        if "Path" in str(field.type)
    }
    assert paths == {(GuardConfig, "run_dir"), (TelemetryConfig, "file_sd_dir")}
    for cls, name in paths:
        assert Path(getattr(cls(**{name: str(tmp_path)}), name)) == tmp_path


@pytest.mark.parametrize("text", ["abc", "-1", "1.0", "٣", "9" * 40])
@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "TORCHELASTIC_RESTART_COUNT"])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(name, text, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match=FORM) as raised:
        launcher_environment()
    assert name in str(raised.value)


def test_the_defaults_are_those_of_the_documentation():
    config = GuardConfig()
    assert (config.audit_every, config.fingerprint_every, config.quorum) == (100, 10, 2)
    assert (config.mode, config.on_failure, config.fault_domain) == ("enforce", "skip", "auto")
    assert config.telemetry == TelemetryConfig()
    assert config.telemetry.prometheus_host == "127.0.0.1"


@pytest.mark.parametrize("cls", [GuardConfig, TelemetryConfig])
def test_configuration_is_frozen_and_by_keyword_only(cls):
    with pytest.raises(TypeError):
        cls(5)
    config = cls()
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


def test_checks_can_be_turned_off():
    config = GuardConfig(audit_every=None, fingerprint_every=None, telemetry="off")
    assert config.audit_age_limit is None


def test_the_age_limit_is_the_audit_interval_unless_told():
    assert GuardConfig(audit_every=50).audit_age_limit == 50
    assert GuardConfig(audit_every=50, max_audit_age=0).audit_age_limit == 0


def test_arguments_beat_the_environment(monkeypatch):
    monkeypatch.setenv("SDCWATCH_AUDIT_EVERY", "25")
    monkeypatch.setenv("SDCWATCH_QUORUM", "3")
    assert GuardConfig.from_env().audit_every == 25
    config = GuardConfig.from_env(audit_every=7)
    assert (config.audit_every, config.quorum) == (7, 3)
    assert GuardConfig().audit_every == 100


def test_the_environment_is_read_as_the_type_of_each_field(monkeypatch):
    for name, text in {
        "AUDIT_EVERY": "none",
        "DEADLINE_SECONDS": "1.5",
        "CONSOLE": "no",
        "BUFFERS": "TRUE",
        "NODE": "node-7",
        "MODE": "observe",
    }.items():
        monkeypatch.setenv(f"SDCWATCH_{name}", text)
    config = GuardConfig.from_env()
    assert config.audit_every is None
    assert config.deadline_seconds == 1.5
    assert (config.console, config.buffers) == (False, True)
    assert (config.node, config.mode) == ("node-7", "observe")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SDCWATCH_AUDIT_EVERY", "often"),
        ("SDCWATCH_DEADLINE_SECONDS", "soon"),
        ("SDCWATCH_CONSOLE", "perhaps"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError, match=FORM) as raised:
        GuardConfig.from_env()
    assert variable in str(raised.value)
    assert text in str(raised.value)


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(ConfigurationError, match=r"audit_evry.*Did you mean 'audit_every'"):
        GuardConfig.from_env(audit_evry=3)


def test_the_launcher_environment_is_read_only_when_asked(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert launcher_environment().run is None
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (launcher_environment().run, launcher_environment().local_rank) == ("123", 3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher_environment().run == "123"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert launcher_environment().run == "job-1"


def test_variables_that_decide_about_kernels_are_read_if_they_are_set(monkeypatch):
    for name in launcher_environment().kernel_variables:
        monkeypatch.delenv(name)
    assert launcher_environment().kernel_variables == {}
    found = {
        "TORCH_COMPILE_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "0",
        "NVIDIA_TF32_OVERRIDE": "0",
        "MKL_CBWR": "AVX2",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", "never read")
    assert launcher_environment().kernel_variables == found


def test_every_option_can_be_completed_and_type_checked():
    """`GuardOptions` is what an editor and a type checker see of ``**options``."""
    declared, offered = GuardConfig.__annotations__, dict(GuardOptions.__annotations__)
    del offered["sinks"]
    assert {name: hint.__forward_arg__ for name, hint in offered.items()} == declared
