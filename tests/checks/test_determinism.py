"""Switches go on together, come off together, and leave no trace."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch._dynamo  # seconds that would count against one test

from sdcwatch.checks import determinism
from sdcwatch.checks.determinism import DeterministicSwitches, environment_facts

CPU = torch.device("cpu")


def state():
    backends = torch.backends
    return {
        "mode": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (backends.cudnn.deterministic, backends.cudnn.benchmark),
        "attention": (
            backends.cuda.math_sdp_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "filters": list(warnings.filters),
    }


@pytest.fixture(autouse=True)
def unchanged():
    before = state()
    yield
    assert state() == before


def test_the_switches_are_on_in_between():
    with DeterministicSwitches(CPU) as switches:
        assert switches.applied
        inside = state()
    assert inside["mode"] == 1
    assert inside["fill"] is False
    assert inside["cudnn"] == (True, False)
    assert not switches.applied


def test_attention_is_switched_on_a_gpu_only():
    before = state()["attention"]
    with DeterministicSwitches(CPU):
        assert state()["attention"] == before
    with DeterministicSwitches(torch.device("cuda")):
        assert state()["attention"] == (True, False, False, False)


def test_applying_and_restoring_twice_is_harmless():
    before = state()
    switches = DeterministicSwitches(CPU)
    switches.restore()
    switches.apply()
    switches.apply()
    switches.restore()
    assert state() == before
    switches.restore()


def test_an_inner_context_does_not_end_the_outer_one():
    switches = DeterministicSwitches(CPU)
    with switches:
        with switches:
            pass
        assert switches.applied
    assert not switches.applied


def test_an_exception_restores():
    before = state()
    with pytest.raises(KeyError), DeterministicSwitches(CPU):
        raise KeyError
    assert state() == before


def test_an_exception_half_way_through_applying_restores(monkeypatch):
    before = state()

    def broken(stack):
        raise NotADirectoryError

    monkeypatch.setattr(determinism, "_only_math_attention", broken)
    switches = DeterministicSwitches(torch.device("cuda"))
    with pytest.raises(NotADirectoryError):
        switches.apply()
    assert not switches.applied
    assert state() == before


def test_what_the_user_had_switched_on_stays_on():
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.deterministic = True
    try:
        before = state()
        with DeterministicSwitches(torch.device("cuda")):
            assert torch.get_deterministic_debug_mode() == 2
            assert state()["attention"] == before["attention"]
        assert state() == before
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.deterministic = False


def _warn():
    warnings.warn(
        "put_ does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True, warn_only=True)'.",
        UserWarning,
        stacklevel=2,
    )


def test_torchs_warnings_about_determinism_are_silent_inside_and_heard_outside():
    with DeterministicSwitches(CPU):
        _warn()
    with pytest.warns(UserWarning, match="deterministic implementation"):
        _warn()


def test_other_warnings_are_heard_inside():
    with DeterministicSwitches(CPU), pytest.warns(UserWarning, match="of the user"):
        warnings.warn("something of the user", UserWarning, stacklevel=1)


def test_a_filter_that_user_code_adds_meanwhile_survives():
    with warnings.catch_warnings():
        with DeterministicSwitches(CPU):
            warnings.filterwarnings("ignore", message="added inside")
        assert any(
            isinstance(f[1], re.Pattern) and f[1].pattern == "added inside"
            for f in warnings.filters
        )
        assert determinism._WARNINGS not in [f[1] for f in warnings.filters]


def test_filters_reset_by_user_code_are_no_error():
    with warnings.catch_warnings(), DeterministicSwitches(CPU):
        warnings.resetwarnings()


def test_the_facts_are_flat_text_and_show_what_changes_bits():
    facts = environment_facts(CPU)
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in facts.items())
    assert facts["torch"] == torch.__version__
    assert facts["compiled"] == "False"
    assert environment_facts(CPU, compiled=True, cublas_workspace=":4096:8") == {
        **facts,
        "compiled": "True",
        "cublas_workspace": ":4096:8",
    }


def test_a_variable_of_one_process_only_is_another_environment():
    facts = environment_facts(CPU)
    variables = {"TORCH_COMPILE_DISABLE": "1", "MKL_CBWR": "AVX2"}
    assert environment_facts(CPU, variables=variables) == {
        **facts,
        "torch_compile_disable": "1",
        "mkl_cbwr": "AVX2",
    }


def test_another_number_of_threads_is_another_environment():
    threads = torch.get_num_threads()
    facts = environment_facts(CPU)
    try:
        torch.set_num_threads(threads + 1)
        assert environment_facts(CPU)["threads"] != facts["threads"]
    finally:
        torch.set_num_threads(threads)


def test_the_facts_are_read_without_changing_a_switch():
    with DeterministicSwitches(CPU):
        before = state()
        environment_facts(CPU)
        assert state() == before


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Feb 20\n",
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n",
            "550.54.15",
        ),
        ("something else\n", "unknown"),
    ],
)
def test_the_driver_is_read_where_it_says_its_version(tmp_path, monkeypatch, text, version):
    file = tmp_path / "version"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(determinism, "_DRIVER", file)
    assert determinism.driver_version() == version


def test_a_machine_without_the_driver_file_says_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(determinism, "_DRIVER", tmp_path / "missing")
    assert determinism.driver_version() == "unknown"
