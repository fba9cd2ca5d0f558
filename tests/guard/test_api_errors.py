"""Arguments that cannot work: the message says what to do, and nothing was touched."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer loads it: seconds that would count against one test
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sdcwatch
from sdcwatch.config import GuardConfig
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    Note,
    Outcome,
    RunStarted,
    Verdict,
)
from sdcwatch.errors import ConfigurationError, SdcwatchError
from sdcwatch.guard.files import run_dir_of
from sdcwatch.guard.guarded import is_compiled, unguarded_parameters
from sdcwatch.guard.places import apart
from sdcwatch.sinks.jsonl import read_records

QUIET: dict[str, Any] = {"telemetry": "off", "console": False}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward(model: nn.Module) -> None:
    """What a training loop does with its model."""
    model(torch.ones(2, 3)).square().mean().backward()


def expected_got_do(error: Exception) -> str:
    """The message of an error, after checking its form."""
    text = str(error)
    assert re.fullmatch(r"Expected .+, but got .+\. .+[.?]", text, re.DOTALL), text
    return text


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a failed init could have left behind."""
    parameters = list(model.parameters())
    return {
        "communication hooks": list(getattr(model, "_comm_hooks", [])),
        "optimizer hooks": len(optimizer._optimizer_step_pre_hooks)
        + len(optimizer._optimizer_step_post_hooks),
        "forward hooks": sum(
            len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()
        ),
        "tensor hooks": [len(p._backward_hooks or {}) for p in parameters],
        "threads": sorted(t.name for t in threading.enumerate()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng": torch.get_rng_state().tolist(),
    }


class Bench:
    """A model and an optimizer, and a call of init that must fail without a trace."""

    def __init__(self, tmp_path: Path) -> None:
        self.net = nn.Linear(3, 2)
        self.model: Any = DistributedDataParallel(self.net)
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.more: tuple[object, ...] = ()
        self.options: dict[str, Any] = {"run_dir": tmp_path / "run", **QUIET}

    def refused(self) -> str:
        before = traces(self.net, torch.optim.SGD(self.net.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError) as caught:
            sdcwatch.init(self.model, self.optimizer, *self.more, **self.options)
        assert traces(self.net, torch.optim.SGD(self.net.parameters(), lr=0.1)) == before
        assert not (Path(self.options["run_dir"]) / "events.jsonl").exists()
        return expected_got_do(caught.value)


@pytest.fixture
def bench(alone: None, tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_no_process_group(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError) as caught:
        sdcwatch.init(model, optimizer, audit_every=None, run_dir=tmp_path / "run", **QUIET)
    assert "init_process_group() before sdcwatch.init()" in expected_got_do(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_ddp_while_audits_are_on(bench: Bench) -> None:
    bench.model = bench.net
    message = bench.refused()
    assert "because audits are on, but got Linear" in message
    assert "Call init after DistributedDataParallel(model)" in message


def test_a_second_guard_on_a_model_whose_guard_is_open(bench: Bench) -> None:
    with sdcwatch.init(bench.model, bench.optimizer, **bench.options):
        with pytest.raises(ConfigurationError) as caught:
            sdcwatch.init(bench.model, bench.optimizer, **bench.options)
        message = expected_got_do(caught.value)
    assert "whose guard is open" in message
    assert "close() it before" in message


def test_an_option_without_its_name(bench: Bench) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sdcwatch.init(bench.model, bench.optimizer, 50, **bench.options)
    assert "got 50 as a third argument" in expected_got_do(caught.value)


def test_a_sink_that_lacks_what_every_sink_has(bench: Bench) -> None:
    class Printer:
        def emit(self, record: object) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        sdcwatch.init(bench.model, bench.optimizer, sinks=[Printer()], **bench.options)
    assert "got a Printer without name and close" in expected_got_do(caught.value)


def test_a_variable_that_sets_no_option_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SDCWATCH_AUDIT_EVRY", "20")
    with sdcwatch.init(bench.model, bench.optimizer, **bench.options):
        pass
    (said,) = [r.getMessage() for r in caplog.records if "EVRY" in r.getMessage()]
    assert "sets no option" in said
    assert "SDCWATCH_AUDIT_EVERY" in said


def test_a_model_that_is_no_module(bench: Bench) -> None:
    bench.model = lambda x: x
    assert "`model` to be a torch.nn.Module" in bench.refused()


def test_a_ddp_model_with_a_communication_hook_of_its_own(bench: Bench) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    bench.model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    message = bench.refused()
    assert "comm_hook=(state, hook)" in message
    assert [hook for hook, _ in bench.model._comm_hooks] == [allreduce_hook]


def test_a_ddp_model_with_mixed_precision_of_its_own(bench: Bench) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    bf16 = torch.bfloat16
    bench.model = DistributedDataParallel(bench.net, mixed_precision=_MixedPrecision(bf16, bf16))
    message = bench.refused()
    assert "but got one with mixed_precision, whose own communication hook" in message
    assert "call the model under torch.autocast" in message


@pytest.mark.parametrize("by_name", [False, True], ids=["third argument", "by name"])
def test_a_loss_function_as_in_earlier_versions_is_told_how_to_move(
    bench: Bench, by_name: bool
) -> None:
    if by_name:
        bench.options["loss_fn"] = backward
    else:
        bench.more = (backward,)
    message = bench.refused()
    assert "but got a loss_fn as well. Leave it out and keep the training loop as it is" in message
    assert "CHANGELOG.md" in message


def test_a_list_of_optimizers_that_is_empty(bench: Bench) -> None:
    bench.optimizer = []
    assert "one optimizer or more, but got none" in bench.refused()


def test_a_list_with_an_optimizer_of_another_model(bench: Bench) -> None:
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    bench.optimizer = [bench.optimizer, other]
    assert "but got one that holds none of them" in bench.refused()


def test_an_optimizer_without_the_models_parameters(bench: Bench) -> None:
    bench.optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert "Build it from model.parameters()" in bench.refused()


def test_an_optimizer_that_is_none(bench: Bench) -> None:
    bench.optimizer = object()
    assert "`optimizer` to be a torch.optim.Optimizer, but got <class 'object'>" in bench.refused()


def test_lbfgs_by_name_also_inside_a_wrapper(bench: Bench) -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    bench.optimizer = torch.optim.LBFGS(bench.net.parameters())
    message = bench.refused()
    assert "but got LBFGS" in message
    assert "a different number of times on each rank" in message
    bench.optimizer = Wrapper(bench.optimizer)
    assert bench.refused() == message


class FullyShardedDataParallel(nn.Module):
    """Known by its name: importing the real one would load what most runs never use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DTensor(nn.Parameter):
    """Known by its name."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Known by its name."""


class MyZero(ZeroRedundancyOptimizer):
    """A subclass is one too."""


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential])
@pytest.mark.parametrize("audit_every", [100, None])
def test_a_fully_sharded_model(bench: Bench, wrap: Any, audit_every: int | None) -> None:
    bench.model = wrap(FullyShardedDataParallel(bench.net))
    bench.options["audit_every"] = audit_every
    message = bench.refused()
    assert "whole model, but got FullyShardedDataParallel. Train with Distr" in message


def test_parameters_that_are_sharded(bench: Bench) -> None:
    bench.net.bias = DTensor(torch.zeros(2))
    bench.optimizer = torch.optim.SGD(bench.net.parameters(), lr=0.1)
    bench.model = bench.net
    message = bench.refused()
    assert "but got DTensor parameters, the first of 1 is bias." in message
    assert "without fully_shard or tensor parallelism" in message


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, MyZero])
def test_an_optimizer_that_shards_its_state(bench: Bench, kind: Any) -> None:
    bench.optimizer = kind(bench.net.parameters(), lr=0.1)
    message = bench.refused()
    assert "but got ZeroRedundancyOptimizer. Pass the optimizer that it shards" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on import
def test_the_names_by_which_sharding_is_known_are_those_of_torch(bench: Bench) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero
    from torch.distributed.tensor import DTensor as Tensor

    for stand_in, real in (
        (FullyShardedDataParallel, Sharded),
        (ZeroRedundancyOptimizer, Zero),
        (DTensor, Tensor),
    ):
        assert stand_in.__name__ == real.__name__
    bench.optimizer = Zero(bench.net.parameters(), torch.optim.SGD, lr=0.1)
    assert "but got ZeroRedundancyOptimizer" in bench.refused()


def test_trainable_parameters_without_an_optimizer_are_named() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*net[0].parameters(), net[1].weight], lr=0.1)
    assert unguarded_parameters(net, [optimizer]) == ["1.bias", "2.weight"]
    optimizer.add_param_group({"params": [net[1].bias, net[2].weight]})
    assert unguarded_parameters(net, [optimizer]) == []


def test_a_model_is_compiled_around_ddp_within_it_or_in_place(bench: Bench) -> None:
    ddp = bench.model
    assert not is_compiled(ddp, bench.net)
    assert is_compiled(torch.compile(ddp, backend="eager"), bench.net)
    inner = nn.Sequential(torch.compile(bench.net, backend="eager"))
    assert is_compiled(inner, inner)
    bench.net.compile(backend="eager")
    assert is_compiled(ddp, bench.net)


@pytest.mark.parametrize("name", ["audit_every", "fingerprint_every", "checkpoint_every"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "10"])
def test_an_interval_that_is_not_positive(bench: Bench, name: str, value: object) -> None:
    bench.options[name] = value
    message = bench.refused()
    assert f"`{name}` to be a positive integer or None, but got {value!r}" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "watch"),
        ("on_failure", "ignore"),
        ("on_hang", "kill"),
        ("fault_domain", "rack"),
        ("quorum", 1),
        ("deadline_seconds", 0),
        ("start_step", -1),
        ("telemetry", "on"),
    ],
)
def test_an_option_with_a_value_that_does_not_exist(bench: Bench, name: str, value: object) -> None:
    bench.options[name] = value
    assert f"`{name}`" in bench.refused()


def test_an_option_that_does_not_exist(bench: Bench) -> None:
    bench.options["audit_evry"] = 10
    message = bench.refused()
    assert "but got ['audit_evry']. Did you mean 'audit_every'?" in message
    assert "'audit_every'" in message


def test_an_environment_variable_that_cannot_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDCWATCH_AUDIT_EVERY", "often")
    assert "SDCWATCH_AUDIT_EVERY" in bench.refused()


def test_a_run_dir_that_cannot_be_written(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench.options["run_dir"] = tmp_path / "file" / "run"
    message = bench.refused()
    assert "`run_dir` to be writable, but got Not a directory" in message
    assert str(tmp_path / "file" / "run") in message


@pytest.mark.parametrize("run", ["night-1", "a/b", "../x", "/etc", "..", "ö \n{x}", "a\0b"])
def test_a_run_of_any_name_has_one_folder_below_sdcwatch_runs(run: str) -> None:
    folder = run_dir_of(GuardConfig(), run)

    assert folder.parent == Path("sdcwatch-runs")
    assert folder.name not in (".", "..", "")
    assert "\0" not in folder.name


def test_fault_domain_and_audits_are_not_asked_of_one_rank(bench: Bench) -> None:
    with sdcwatch.init(bench.model, bench.optimizer, **bench.options) as guard:
        backward(bench.model)
        bench.optimizer.step()
    assert guard.step == 1
    assert guard.last_verdict is None


def test_a_step_that_is_captured_into_a_cuda_graph(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sdcwatch.init(bench.model, bench.optimizer, **bench.options) as guard:
        backward(bench.model)
        bench.optimizer.step()
        # What torch says during `with torch.cuda.graph(...)`; a capture itself needs a GPU.
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ConfigurationError) as caught:
            backward(bench.model)
        with torch.no_grad():  # a graph of the evaluation is nobody's business
            bench.model(torch.ones(2, 3))
        monkeypatch.undo()
        backward(bench.model)
        bench.optimizer.step()
    message = expected_got_do(caught.value)
    assert "but got one that is captured into a CUDA graph" in message
    assert "Train without the capture" in message
    assert guard.step == 2


def test_a_join_that_divides_by_another_number(bench: Bench) -> None:
    with sdcwatch.init(bench.model, bench.optimizer, **bench.options) as guard:
        with pytest.raises(ConfigurationError) as caught:
            Join([bench.model, guard], divide_by_initial_world_size=False)
        backward(bench.model)
        bench.optimizer.step()
    assert "but got False. Leave it True with a guard" in expected_got_do(caught.value)
    assert guard.step == 1


@pytest.fixture
def guard(bench: Bench) -> Iterator[sdcwatch.Guard]:
    guard = sdcwatch.init(bench.model, bench.optimizer, **bench.options)
    yield guard
    guard.close()


@pytest.mark.parametrize("loss", [torch.ones(4, 2), torch.ones(0)], ids=["many", "none"])
def test_a_recorded_loss_that_is_not_one_number(guard: sdcwatch.Guard, loss: torch.Tensor) -> None:
    with pytest.raises(
        ConfigurationError, match=r"one number, but got a tensor of shape"
    ) as caught:
        guard.record_loss(loss)
    expected_got_do(caught.value)


@pytest.mark.parametrize("loss", [0.5, torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True)])
def test_a_recorded_loss_may_be_a_number_or_a_tensor_of_one_element(
    bench: Bench, guard: sdcwatch.Guard, loss: Any
) -> None:
    guard.record_loss(loss)
    backward(bench.model)


def test_a_place_for_a_checkpoint_that_does_not_exist(guard: sdcwatch.Guard) -> None:
    saved: list[int] = []
    with pytest.raises(ConfigurationError) as caught:
        guard.save_checkpoint(lambda: saved.append(1), on="rank1")  # type: ignore[arg-type]
    expected_got_do(caught.value)
    assert saved == []


def test_a_path_in_the_place_of_a_function_that_saves(guard: sdcwatch.Guard) -> None:
    with pytest.raises(ConfigurationError) as caught:
        guard.save_checkpoint("a.pt")  # type: ignore[arg-type]
    assert "got 'a.pt'. Pass one, as lambda: torch.save(" in expected_got_do(caught.value)


def test_a_closed_guard_says_so_and_closing_it_again_does_nothing(
    bench: Bench, guard: sdcwatch.Guard
) -> None:
    backward(bench.model)
    guard.close()
    log = Path(bench.options["run_dir"]) / "events.jsonl"
    written = log.read_text()
    guard.close()
    assert log.read_text() == written
    for use in (guard.may_save, lambda: guard.save_checkpoint(lambda: None)):
        with pytest.raises(SdcwatchError) as caught:
            use()
        assert "Call sdcwatch.init() again" in expected_got_do(caught.value)
    backward(bench.model)  # the loop does not need it


def test_a_guard_that_another_thread_closes_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the main thread can give a signal back: none is taken.
    guard = sdcwatch.init(bench.model, bench.optimizer, handle_sigterm=False, **bench.options)
    entered, scraped = threading.Event(), threading.Event()
    close = guard._reporter.close

    def slow() -> None:
        entered.set()
        assert scraped.wait(20)
        close()

    monkeypatch.setattr(guard._reporter, "close", slow)
    ender = threading.Thread(target=guard.close)
    ender.start()
    assert entered.wait(20)
    second = threading.Thread(target=guard.close)
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the process would end before somebody was told"
    scraped.set()
    ender.join(20)
    second.join(20)
    assert not second.is_alive()


def test_a_closed_guard_leaves_the_training_loop_as_it_was(bench: Bench) -> None:
    before = traces(bench.net, bench.optimizer)
    guard = sdcwatch.init(bench.model, bench.optimizer, **bench.options)
    backward(bench.model)
    bench.optimizer.step()
    guard.close()
    assert traces(bench.net, bench.optimizer) == before
    backward(bench.model)
    bench.optimizer.step()
    assert guard.step == 1


def test_a_new_guard_can_follow_a_closed_one_on_the_same_model(bench: Bench) -> None:
    sdcwatch.init(bench.model, bench.optimizer, **bench.options).close()
    with sdcwatch.init(bench.model, bench.optimizer, start_step=7, **bench.options) as guard:
        backward(bench.model)
        bench.optimizer.step()
        assert guard.step == 8
        assert len(bench.model._comm_hooks) == 1


def test_a_restart_that_finds_an_empty_run_directory_says_that_the_history_starts_anew(
    bench: Bench,
) -> None:
    for _ in range(2):
        sdcwatch.init(bench.model, bench.optimizer, start_step=7, **bench.options).close()
    notes = [r for r in read_records(bench.options["run_dir"]) if isinstance(r, Note)]
    (note,) = [n for n in notes if n.code == "history_anew"]  # the second has found the first
    assert "goes on from step 7" in note.message
    assert "pass the same run= or run_dir=" in note.message
    assert "on storage" in note.message


def test_a_run_that_goes_on_from_a_condemned_checkpoint_says_so(bench: Bench) -> None:
    guard = sdcwatch.init(bench.model, bench.optimizer, **bench.options)
    saved, found = CheckpointResult.PROVISIONAL, Outcome.SUSPECT
    for record in (
        CheckpointEvent(step=7, time=1.0, result=saved, reason=GateReason.OK),
        Verdict(step=9, time=2.0, check=Check.REPLAY, outcome=found, reason="a rank differs"),
    ):
        guard._reporter.emit(record)
    guard.close()
    for step in (5, 7):
        sdcwatch.init(bench.model, bench.optimizer, start_step=step, **bench.options).close()
    notes = [r for r in read_records(bench.options["run_dir"]) if isinstance(r, Note)]
    (note,) = [n for n in notes if n.code == "resumed_from_condemned"]
    assert "goes on from step 7" in note.message


def test_a_run_directory_that_does_not_answer_is_refused_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdcwatch.sinks.patience.READ_SECONDS", 0.3)
    place = Path(bench.options["run_dir"])
    place.mkdir()
    os.mkfifo(place / "events.jsonl")
    with pytest.raises(ConfigurationError) as caught:
        sdcwatch.init(bench.model, bench.optimizer, **bench.options)
    assert f"nothing from {place} for 0.3 s" in expected_got_do(caught.value)
    with (place / "events.jsonl").open("wb"):  # lets the thread go that reads there
        pass


def test_two_guards_of_a_script_have_a_run_and_a_directory_each(bench: Bench) -> None:
    def guard() -> sdcwatch.Guard:
        model = DistributedDataParallel(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sdcwatch.init(model, optimizer, run="gan", **bench.options)

    def runs(folder: Path) -> list[str]:
        return [r.run for r in read_records(folder) if isinstance(r, RunStarted)]

    place = Path(bench.options["run_dir"])
    second = place.with_name(f"{place.name}-2")
    for segments in (1, 2):  # a restart finds them where they were
        guards = [guard(), guard()]
        for one in guards:
            one.close()
        assert runs(place) == ["gan"] * segments
        assert runs(second) == ["gan-2"] * segments
    notes = [note for r in read_records(second) if isinstance(r, RunStarted) for note in r.notes]
    assert any("this one's run is gan-2" in note for note in notes)


@pytest.mark.parametrize(
    ("first_rank", "number", "name"),
    [(0, 1, ""), (0, 2, "-2"), (4, 1, "-from-rank-4"), (4, 3, "-from-rank-4-3")],
)
def test_guards_of_other_groups_of_ranks_are_told_apart_by_name(
    first_rank: int, number: int, name: str
) -> None:
    assert apart(first_rank, number) == name


def test_a_second_guard_on_a_guarded_model_is_refused(bench: Bench, guard: sdcwatch.Guard) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sdcwatch.init(bench.model, bench.optimizer, **bench.options)
    expected_got_do(caught.value)
