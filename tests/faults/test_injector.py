"""Every site, kind, persistence and role, on one process with a real DDP model of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.replay import Replayer
from sdcwatch.checks.replaying import replay_in_progress
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults import Fault, FaultPlan, Injector, Planted, read_log
from sdcwatch.faults.plan import KINDS

HOW: dict[str, dict[str, Any]] = {
    "bit_flip": {"bit": 22},
    "scale": {"factor": 1.5},
    "set": {"value": 3.0},
    "nan": {},
    "inf": {},
    "stuck_lane": {"bit": 22, "stuck": 1, "every": 1},
    "zero": {},
}
BATCHES = 6


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.barrier()
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu_(self.norm(self.first(x)))))


Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Loop:
    """A training loop with a replay at the end of each backward, as a guard makes it."""

    def __init__(self, *faults: Fault, rank: int = 0, seed: int = 0, dtype: Any = torch.float32,
                 replays: int = 1, make: Callable[[], nn.Module] = Net, planted: bool = True,
                 log_dir: Path | None = None) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.net = make().to(dtype)
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.injector = Injector(FaultPlan(faults=faults, seed=seed), rank=rank, log_dir=log_dir)
        self.planted = planted
        if planted:
            self.injector.attach(self.model, self.optimizer)
            if (pair := self.injector.comm_hook()) is not None:
                self.model.register_comm_hook(*pair)
        self.replays, self.dtype = replays, dtype
        self.losses: list[float] = []
        self.replayed: list[list[Tensor]] = []
        self.own: list[list[Tensor]] = []

    def replay(self, batch: Batch) -> None:
        state = torch.get_rng_state()
        torch.set_rng_state(self.rng)
        buffers = [b.clone() for b in self.net.buffers()]
        with replay_in_progress(), torch.enable_grad():  # the engine runs its callbacks without
            loss = loss_of(self.net, batch)
            found = torch.autograd.grad(loss, list(self.net.parameters()))
        self.replayed.append([loss.detach(), *found])
        torch.set_rng_state(state)
        for buffer, kept in zip(self.net.buffers(), buffers, strict=True):
            buffer.copy_(kept)

    def step(self, step: int) -> None:
        torch.manual_seed(100 + step)
        x, y = torch.randn(5, 6), torch.randn(5, 3)
        batch = x.to(self.dtype), y.to(self.dtype)
        if self.planted:
            self.injector.begin_step(step)
            batch = self.injector.batch(batch)
        self.optimizer.zero_grad()
        self.rng = torch.get_rng_state()
        loss = loss_of(self.model, batch)
        if self.planted:
            loss = self.injector.loss(loss)
        engine = torch.autograd.Variable._execution_engine

        def at_the_end() -> None:
            for _ in range(self.replays):
                self.replay(batch)

        loss.register_hook(
            lambda g: engine.queue_callback(lambda: engine.queue_callback(at_the_end))
        )
        loss.backward()
        self.losses.append(loss.item())
        self.own.append([p.grad.clone() for p in self.net.parameters() if p.grad is not None])
        self.optimizer.step()

    def run(self, steps: int = BATCHES) -> Loop:
        for step in range(1, steps + 1):
            self.step(step)
        return self

    @property
    def log(self) -> tuple[Planted, ...]:
        return self.injector.log

    @property
    def weights(self) -> list[bytes]:
        return [p.detach().float().numpy().tobytes() for p in self.net.state_dict().values()]


def fault(site: str, kind: str = "nan", target: str | None = None, **more: Any) -> Fault:
    given: dict[str, Any] = {"ranks": (0,), "step": 3, "target": target}
    if "steps" in more:
        given.pop("step")
    return Fault(site=site, kind=kind, **{**given, **HOW[kind], **more})  # type: ignore[arg-type]


SITES = [
    ("activation", "first"),
    ("gradient", "last.weight"),
    ("loss", None),
    ("all_reduce", None),
    ("all_reduce", "last.weight"),
    ("weight", "first.weight"),
    ("optimizer_state", "first.weight"),
    ("replay", None),
    ("replay", "last"),
    ("batch", None),
    ("batch", "1"),
    ("buffer", "norm.running_mean"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("site", "target"), SITES)
def test_each_kind_happens_at_each_site_in_its_step_only(
    site: str, target: str | None, kind: str, dtype: torch.dtype
) -> None:
    more = {"bit": 5} if dtype is torch.bfloat16 and "bit" in HOW[kind] else {}
    loop = Loop(fault(site, kind, target, step=2, **more), dtype=dtype).run(2)
    (planted,) = loop.log
    assert (planted.step, planted.rank, planted.fault) == (2, 0, 0)
    assert (planted.site, planted.kind, planted.target) == (site, kind, target or "")
    assert planted.role == ("replay" if site == "replay" else "own")
    assert planted.changed > 0 or (kind == "stuck_lane" and site == "loss")
    finite = kind not in ("nan", "inf")
    assert math.isfinite(planted.after) == finite


def test_rng_is_seeded_anew_and_the_run_goes_another_way() -> None:
    plain = Loop().run(1)
    flipped = Loop(fault("rng", "bit_flip", step=1, bit=4)).run(1)
    assert flipped.log[0].after == int(flipped.log[0].before) ^ 16 == 101 ^ 16
    assert flipped.losses != plain.losses
    for kind, seed in (("set", 3), ("zero", 0)):
        injector = Injector(FaultPlan(faults=(fault("rng", kind, step=1),)), rank=0)
        injector.begin_step(1)
        got = torch.rand(3)
        assert torch.equal(got, torch.rand(3, generator=torch.Generator().manual_seed(seed)))
        assert injector.log[0].after == seed


ROLES = [
    ("transient", "own", ["own"]),
    ("transient", "replay", ["replay"]),
    ("transient", "both", ["own"]),
    ("sticky", "own", ["own"]),
    ("sticky", "replay", ["replay", "replay"]),
    ("sticky", "both", ["own", "replay", "replay"]),
]


@pytest.mark.parametrize(("persistence", "role", "expected"), ROLES)
@pytest.mark.parametrize(
    ("site", "target"), [("activation", "first"), ("gradient", "first.weight")]
)
def test_role_and_persistence_choose_the_computations(
    site: str, target: str | None, persistence: str, role: str, expected: list[str]
) -> None:
    planted = fault(site, "scale", target, persistence=persistence, role=role, steps=(2, 3))
    loop = Loop(planted, replays=2).run(4)
    assert [(p.step, p.role) for p in loop.log] == [(s, r) for s in (2, 3) for r in expected]


@pytest.mark.parametrize(("site", "target"), SITES[:2])
@pytest.mark.parametrize("role", ["own", "replay", "both"])
def test_damage_is_in_the_pass_that_was_asked_for_and_in_no_other(
    site: str, target: str | None, role: str
) -> None:
    plain = Loop().run(1)
    loop = Loop(fault(site, "scale", target, role=role, step=1, persistence="sticky")).run(1)
    mean = [loop.losses[0], loop.replayed[0][0].item()]
    clean = [plain.losses[0], plain.replayed[0][0].item()]
    assert clean[0] == clean[1]
    if site != "gradient":
        assert (mean[0] != clean[0]) == (role in ("own", "both"))
        assert (mean[1] != clean[1]) == (role in ("replay", "both"))
    equal_own = all(map(torch.equal, loop.own[0], plain.own[0]))
    equal_replay = all(map(torch.equal, loop.replayed[0][1:], plain.replayed[0][1:]))
    assert equal_own == (role == "replay")
    assert equal_replay == (role == "own")
    if role == "both":
        assert all(map(torch.equal, loop.own[0], loop.replayed[0][1:]))


def test_a_loss_is_damaged_in_the_script_and_its_gradient_is_not_touched() -> None:
    plain = Loop().run(1)
    loop = Loop(fault("loss", "scale", step=1, persistence="sticky")).run(1)
    assert loop.losses[0] == pytest.approx(1.5 * plain.losses[0])
    assert all(map(torch.equal, loop.own[0], plain.own[0]))
    assert [p.role for p in loop.log] == ["own"]
    assert loop.injector.loss("no tensor") == "no tensor"


def test_a_call_without_gradients_trains_nothing_and_is_left_alone() -> None:
    net = Net()
    planted = [fault("activation", "nan", "first"), fault("buffer", "zero", "norm.running_mean")]
    injector = Injector(FaultPlan(faults=tuple(planted)), rank=0)
    injector.attach(net)
    injector.begin_step(3)
    with torch.no_grad():
        assert net(torch.randn(5, 6)).isfinite().all()
    assert injector.log == ()
    net(torch.randn(5, 6))
    assert {p.site for p in injector.log} == {"activation", "buffer"}


class Engine:
    """The guard's own capture and replay of one call, with an injector attached before."""

    def __init__(self, *faults: Fault, reentrant: bool = False) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> Tensor:
                if not reentrant:
                    return self.net(x)
                return checkpoint(self.net, x.requires_grad_(), use_reentrant=True)

        self.module = Whole()
        self.injector = Injector(FaultPlan(faults=faults), rank=0)
        self.injector.attach(self.module)
        self.capture = CallCapture(
            self.module,
            list(self.module.named_parameters()),
            torch.device("cpu"),
            on_gradient=lambda: internals.at_end_of_backward(self._ended),
            audit=lambda: True,
        )
        self.capture.attach()
        self.injector.begin_step(3)
        self.backward: Any = None
        self.module(torch.randn(5, 6)).square().sum().backward()

    def _ended(self) -> None:
        self.backward = self.capture.end_backward()

    def differing(self) -> list[str]:
        """Where a replay differs from the call: "outputs", and parameters by their gradient."""
        result = Replayer(self.capture).self_audit(self.backward.micro_batch)
        assert (result.error, result.not_run) == ("", "")
        table = (result.gradients != self.backward.gradients).any(dim=1)
        outputs = [] if torch.equal(result.outputs, self.backward.outputs) else ["outputs"]
        return outputs + [n for (n, _), bad in zip(self.capture.named, table, strict=True) if bad]


ENGINE_SITES = [("activation", "net.1"), ("gradient", "net.0.weight")]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("site", "target"), ENGINE_SITES)
def test_a_sticky_fault_is_in_the_call_and_alike_in_every_replay_of_the_guard(
    site: str, target: str, reentrant: bool
) -> None:
    sticky = fault(site, "scale", target, persistence="sticky")
    engine = Engine(sticky, reentrant=reentrant)
    own = len(engine.injector.log)
    assert own >= 1
    assert {p.role for p in engine.injector.log} == {"own"}
    assert engine.differing() == engine.differing() == []
    assert {p.role for p in engine.injector.log[own:]} == {"replay"}
    assert len(engine.injector.log) == 3 * own


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("role", ["own", "replay"])
def test_a_fault_in_one_role_alone_is_seen_by_the_replay_of_the_guard(
    role: str, reentrant: bool
) -> None:
    once = fault("gradient", "bit_flip", "net.0.weight", role=role)
    engine = Engine(once, reentrant=reentrant)
    assert engine.differing() == ["net.0.weight"]
    assert engine.differing() == (["net.0.weight"] if role == "own" else [])
    wrong = fault("activation", "bit_flip", "net.1", role=role, element=0)
    assert "outputs" in Engine(wrong, reentrant=reentrant).differing()


@pytest.mark.parametrize(("site", "target"), ENGINE_SITES)
def test_a_log_of_all_operations_sees_the_same_operations_and_the_damage_in_their_results(
    site: str, target: str
) -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.results: list[tuple[str, Tensor, Tensor]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            self.names.append(str(func))
            self.results += [
                (str(func), t, t.clone()) for t in tree_leaves(out) if isinstance(t, Tensor)
            ]
            return out

    def logged(*faults: Fault) -> Operations:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        whole = nn.ModuleDict({"net": net})
        injector = Injector(FaultPlan(faults=faults), rank=0)
        injector.attach(whole)
        injector.begin_step(3)
        with replay_in_progress(), Operations() as mode:
            loss = net(torch.ones(5, 6)).sum()
            torch.autograd.grad(loss, list(net.parameters()))
        assert len(injector.log) == len(faults)
        return mode

    clean = logged()
    damaged = logged(fault(site, "scale", target, role="replay", persistence="sticky"))
    changed = {n for n, now, then in damaged.results if not torch.equal(now, then)}
    assert damaged.names == clean.names
    assert all(torch.equal(now, then) for _, now, then in clean.results)
    assert changed >= {"aten.addmm.default" if site == "activation" else "aten.mm.default"}


def test_a_module_that_returns_what_it_was_given_damages_nothing_of_its_caller() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(6, 3))
    injector = Injector(FaultPlan(faults=(fault("activation", "zero", "0"),)), rank=0)
    injector.attach(net)
    injector.begin_step(3)
    x = torch.ones(2, 6)
    assert torch.equal(net(x), net[1].bias.expand(2, 3))
    assert x.tolist() == [[1.0] * 6] * 2


def test_a_gradient_whose_elements_share_their_place_is_damaged_in_one_of_them() -> None:
    net = nn.ParameterDict({"w": nn.Parameter(torch.ones(4))})
    injector = Injector(FaultPlan(faults=(fault("gradient", "set", "w", element=2),)), rank=0)
    injector.attach(net)
    injector.begin_step(3)
    net["w"].sum().backward()
    assert net["w"].grad is not None
    assert net["w"].grad.tolist() == [1.0, 1.0, 3.0, 1.0]


def test_gradient_hook_of_others_sees_the_damage_even_if_it_was_there_first() -> None:
    net = Net()
    seen: list[float] = []
    net.last.bias.register_hook(lambda g: seen.append(g[1].item()))
    injector = Injector(
        FaultPlan(faults=(fault("gradient", "set", "last.bias", step=1, element=1),)), rank=0
    )
    injector.attach(net)
    injector.begin_step(1)
    loss_of(net, (torch.randn(5, 6), torch.randn(5, 3))).backward()
    assert seen == [3.0]


@pytest.mark.parametrize("site", ["weight", "optimizer_state"])
def test_update_faults_come_after_the_update_and_before_other_hooks(site: str) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    seen: list[bool] = []
    weight = net.first.weight

    def look(*_: Any) -> None:
        tensor = weight if site == "weight" else optimizer.state[weight]["exp_avg_sq"]
        seen.append(tensor.flatten()[4].item() == 3.0)

    optimizer.register_step_post_hook(look)
    key = {"key": "exp_avg_sq"} if site == "optimizer_state" else {}
    injector = Injector(
        FaultPlan(faults=(fault(site, "set", "first.weight", step=2, element=4, **key),)), rank=0
    )
    injector.attach(net, optimizer)
    for step in (1, 2):
        injector.begin_step(step)
        net(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    assert seen == [False, True]


def test_optimizer_that_wraps_another_is_hooked_inside() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters())
    injector = Injector(FaultPlan(faults=(fault("weight", "zero", "weight", step=1),)), rank=0)
    wrapper = Wrapper(inner)
    injector.attach(net, wrapper)
    injector.begin_step(1)
    net(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    assert net.weight.tolist() == [[0.0, 0.0]]


def test_batch_that_was_passed_in_stays_as_it_is_and_a_key_names_its_entry() -> None:
    injector = Injector(FaultPlan(faults=(fault("batch", "zero", "inputs", step=1),)), rank=0)
    batch = {"ids": torch.arange(3), "inputs": torch.ones(3), "name": "x"}
    injector.begin_step(1)
    seen = injector.batch(batch)
    assert batch["inputs"].tolist() == [1.0] * 3  # type: ignore[union-attr]
    assert seen["inputs"].tolist() == [0.0] * 3
    assert seen["ids"] is batch["ids"]
    injector.begin_step(2)
    assert injector.batch(batch) is batch


def test_batch_without_a_target_takes_the_first_tensor_that_the_kind_fits() -> None:
    for kind, hit in (("nan", 1), ("bit_flip", 0)):
        injector = Injector(FaultPlan(faults=(fault("batch", kind, step=1),)), rank=0)
        injector.begin_step(1)
        batch = [torch.arange(4), torch.ones(4)]
        seen = injector.batch(batch)
        assert [not torch.equal(a, b) for a, b in zip(batch, seen, strict=True)] == [
            i == hit for i in range(2)
        ]


def test_several_outputs_are_damaged_in_the_first_floating_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"index": torch.arange(2), "value": self.linear(x)}

    net = Two()
    injector = Injector(FaultPlan(faults=(fault("activation", "zero", "", step=1),)), rank=0)
    injector.attach(net)
    injector.begin_step(1)
    assert net(torch.ones(1, 2))["value"].sum().item() == 0.0


@pytest.mark.parametrize("prepend", [False, True])
def test_buffer_damage_is_there_when_a_hook_of_others_looks(prepend: bool) -> None:
    seen: list[float] = []
    loop = Loop(fault("buffer", "set", "norm.running_mean", step=2, element=1))
    loop.net.register_forward_pre_hook(
        lambda module, _: seen.append(module.norm.running_mean[1].item()), prepend=prepend
    )
    loop.run(2)
    assert seen[:2] != [3.0, 3.0]
    assert seen[2] == 3.0


@pytest.mark.parametrize("persistence", ["transient", "sticky"])
def test_checkpointed_module_is_damaged_again_when_sticky(persistence: str) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
            return self.last(self.norm(inner))

    loop = Loop(
        fault("activation", "scale", "first", persistence=persistence, step=1, role="both"),
        make=Checkpointed,
    ).run(1)
    twice = ["own", "own", "replay", "replay"]
    assert [p.role for p in loop.log] == (twice if persistence == "sticky" else ["own"])


@pytest.mark.parametrize("persistence", ["transient", "sticky"])
def test_reentrant_checkpoint_is_damaged_though_it_runs_without_gradients(persistence: str) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            return self.last(self.norm(inner))

    planted = fault("activation", "scale", "first", persistence=persistence, step=1)
    loop = Loop(planted, make=Checkpointed, replays=0).run(1)
    assert [p.role for p in loop.log] == ["own"] * (2 if persistence == "sticky" else 1)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_models_are_damaged_in_the_right_role(whole: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    compiled = net if whole else torch.compile(net, backend="eager")
    ddp = DistributedDataParallel(compiled)  # type: ignore[arg-type]
    model = torch.compile(ddp, backend="eager") if whole else ddp
    planted = [
        fault("activation", "scale", "0", persistence="sticky", role="both", step=1),
        fault("gradient", "scale", "0.weight", persistence="sticky", role="both", step=1),
    ]
    injector = Injector(FaultPlan(faults=tuple(planted)), rank=0)
    injector.attach(model)  # type: ignore[arg-type]
    batch = torch.randn(5, 6), torch.randn(5, 3)
    injector.begin_step(1)
    loss_of(model, batch).backward()  # type: ignore[arg-type]
    with replay_in_progress():
        torch.autograd.grad(loss_of(compiled, batch), list(net.parameters()))  # type: ignore[arg-type]
    expected = [(s, r) for r in ("own", "replay") for s in ("activation", "gradient")]
    assert [(p.site, p.role) for p in injector.log] == expected
    torch._dynamo.reset()


def test_same_plan_and_seed_plant_the_same_bits_and_another_seed_does_not() -> None:
    planted = [
        fault("gradient", "bit_flip", "first.weight", steps=(1, 5), probability=0.6),
        fault("activation", "scale", "first", element="random", steps=(1, 5)),
    ]
    one, two, other = (Loop(*planted, seed=seed).run() for seed in (1, 1, 2))
    assert one.log == two.log
    assert one.weights == two.weights
    assert [p.element for p in one.log] != [p.element for p in other.log]


def test_random_element_stays_when_sticky_and_moves_when_transient() -> None:
    def elements(persistence: str) -> set[int]:
        planted = fault(
            "gradient", "bit_flip", "first.weight", steps=(1, 6), persistence=persistence
        )
        return {p.element for p in Loop(planted).run().log}

    assert len(elements("sticky")) == 1
    assert len(elements("transient")) > 3


def test_probability_is_drawn_for_each_computation_and_each_rank() -> None:
    def drawn(rank: int, persistence: str = "sticky", seed: int = 0) -> list[tuple[int, str]]:
        planted = Fault(site="activation", target="", kind="scale", factor=2.0, ranks="all",
                        probability=0.3, persistence=persistence, role="both")  # type: ignore[arg-type]  # fmt: skip
        injector = Injector(FaultPlan(faults=(planted,), seed=seed), rank=rank)
        net = nn.Identity()
        injector.attach(net)
        for step in range(1, 201):
            injector.begin_step(step)
            net(torch.ones(1, 1))
            with replay_in_progress():
                net(torch.ones(1, 1))
                net(torch.ones(1, 1))
        return [(p.step, p.role) for p in injector.log]

    assert 130 < len(drawn(0)) < 230
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=1)
    once = [step for step, _ in drawn(0, "transient")]
    assert len(once) == len(set(once)) > 100


UNTOUCHED: dict[str, tuple[Fault, ...]] = {
    "no fault": (),
    "another rank": tuple(fault(site, "zero", target, ranks=(1,)) for site, target in SITES),
    "another step": tuple(fault(site, "zero", target, step=99) for site, target in SITES),
}


@pytest.mark.parametrize("faults", UNTOUCHED.values(), ids=UNTOUCHED.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_is_bit_identical_where_nothing_matches(
    faults: tuple[Fault, ...], dtype: torch.dtype
) -> None:
    plain = Loop(dtype=dtype, planted=False).run()
    loop = Loop(*faults, dtype=dtype).run()
    assert loop.log == ()
    assert loop.losses == plain.losses
    assert loop.weights == plain.weights


def test_plan_without_faults_hooks_nothing() -> None:
    loop = Loop()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.net.modules())
    assert all(p._backward_hooks is None for p in loop.net.parameters())
    assert loop.injector.comm_hook() is None
    batch, loss = (torch.ones(1), torch.ones(1)), torch.ones(())
    assert loop.injector.batch(batch) is batch
    assert loop.injector.loss(loss) is loss


def test_detach_takes_every_hook_off_and_lets_the_injector_go_on_elsewhere() -> None:
    sites = [s for s in SITES if s[0] not in ("all_reduce", "batch", "loss")]
    faults = tuple(fault(site, "nan", target, steps=(1, 9)) for site, target in sites)
    loop = Loop(*faults)
    loop.injector.detach()
    loop.run(2)
    assert loop.log == ()
    assert all(math.isfinite(loss) for loss in loop.losses)
    net = Net()
    loop.injector.attach(net, torch.optim.Adam(net.parameters()))
    loop.injector.begin_step(3)
    net(torch.ones(2, 6))
    assert {p.site for p in loop.log} == {"activation", "buffer"}


def test_log_is_on_disk_as_soon_as_a_fault_happens_and_reads_back_equal(tmp_path: Path) -> None:
    planted = [fault("loss", kind, step=step) for step, kind in enumerate(("nan", "inf", "set"), 1)]
    loop = Loop(*planted, log_dir=tmp_path / "run").run(2)
    path = tmp_path / "run" / "faults.rank0.jsonl"
    assert len(path.read_text().splitlines()) == 2
    loop.step(3)
    other = Injector(
        FaultPlan(faults=(fault("batch", "zero", ranks=(1,), step=1),)), rank=1,
        log_dir=tmp_path / "run",
    )  # fmt: skip
    other.begin_step(1)
    other.batch(torch.ones(2))
    with path.open("a") as file:
        file.write('{"step": 4, "ra')
    read = read_log(tmp_path / "run")
    assert [(p.step, p.rank) for p in read] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert math.isnan(read[0].after)
    assert (read[2], read[3]) == loop.log[1:]
    assert read_log(tmp_path) == ()


def test_log_with_a_broken_line_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "faults.rank0.jsonl").write_text('{"step": 4}\n\n')
    with pytest.raises(ConfigurationError, match=r"faults\.rank0\.jsonl, but got line 1"):
        read_log(tmp_path)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (fault("gradient", "nan", "first.wieght"), "Did you mean 'first.weight'"),
        (fault("weight", "nan", "frist.bias"), "'first.bias'"),
        (fault("activation", "nan", "fist"), "Did you mean 'first'"),
        (fault("buffer", "nan", "norm.mean"), "'norm.running_mean'"),
        (fault("buffer", "nan", "norm.num_batches_tracked"), "floating-point tensor"),
        (fault("weight", "bit_flip", "first.weight", bit=40), "`bit` below 32"),
        (fault("all_reduce", "bit_flip", bit=40), "`bit` below 32"),
        (fault("gradient", "nan", "last.bias", element=3), "`element` below 3"),
        (fault("gradient", "nan", "last.bias", ranks=(7,), element=3), "`element` below 3"),
    ],
)
def test_plan_that_does_not_fit_the_model_is_refused_before_anything_changes(
    planted: Fault, words: str
) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    injector = Injector(FaultPlan(faults=(fault("gradient", "nan", "last.bias"), planted)), rank=0)
    with pytest.raises(ConfigurationError) as raised:
        injector.attach(net, optimizer)
    assert str(raised.value).startswith("Expected ")
    assert words in str(raised.value)
    assert all(p._backward_hooks is None for p in net.parameters())


def test_frozen_parameter_has_no_gradient_to_damage() -> None:
    net = Net()
    net.last.bias.requires_grad_(False)
    injector = Injector(FaultPlan(faults=(fault("gradient", "nan", "last.bias"),)), rank=0)
    with pytest.raises(ConfigurationError, match="requires a gradient"):
        injector.attach(net)


def test_misuse_says_what_to_call() -> None:
    net = Net()
    batch = (torch.ones(2, 6), torch.ones(2, 3))
    update = FaultPlan(faults=(fault("weight", "nan", "first.weight"),))
    with pytest.raises(ConfigurationError, match="an optimizer for site 'weight'"):
        Injector(update, rank=0).attach(net)
    planted = (fault("loss"), fault("all_reduce"), fault("activation", target="first"))
    injector = Injector(FaultPlan(faults=planted), rank=0)
    with pytest.raises(ConfigurationError, match=r"Expected Injector\.begin_step"):
        injector.loss(torch.ones(()))
    with pytest.raises(ConfigurationError, match=r"attached to a DDP model, but got none"):
        injector.comm_hook()
    injector.attach(net)
    with pytest.raises(ConfigurationError, match=r"attached to a DDP model, but got Net"):
        injector.comm_hook()
    with pytest.raises(ConfigurationError, match=r"Call detach\(\) first"):
        injector.attach(net)
    with pytest.raises(ConfigurationError, match=r"Expected Injector\.begin_step"):
        loss_of(net, batch)
    with pytest.raises(ConfigurationError, match="Steps are counted from 1"):
        injector.begin_step(0)
    with pytest.raises(ConfigurationError, match="`rank` to be an integer"):
        Injector(update, rank=-1)


def test_things_that_show_only_in_the_loop_are_refused_there() -> None:
    with pytest.raises(ConfigurationError, match=r"an entry of the state of 'first\.weight'"):
        Loop(fault("optimizer_state", "nan", "first.weight", key="momentum", ranks=(5,))).run(1)
    with pytest.raises(ConfigurationError, match="Expected a tensor of the micro-batch"):
        Loop(fault("batch", "nan", "7")).run(3)
    ids = Injector(FaultPlan(faults=(fault("batch", step=1),)), rank=0)
    ids.begin_step(1)
    with pytest.raises(ConfigurationError, match="a tensor for kind 'nan' in the micro-batch"):
        ids.batch(torch.arange(3))

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "no tensor"

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, x: Tensor) -> Tensor:
            self.nothing(x)
            return super().forward(x)

    with pytest.raises(ConfigurationError, match="floating-point tensor from module 'nothing'"):
        Loop(fault("activation", "nan", "nothing", step=1), make=Odd).run(1)
    sgd = Net()
    optimizer = torch.optim.Adagrad([sgd.first.weight])
    optimizer.state[sgd.first.weight] = {"sum": torch.ones(())}
    injector = Injector(
        FaultPlan(faults=(fault("optimizer_state", "nan", "first.weight", step=1),)), rank=0
    )
    injector.attach(sgd, optimizer)
    injector.begin_step(1)
    with pytest.raises(ConfigurationError, match="optimizer state shaped like"):
        optimizer.step()


def test_an_output_without_rows_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(6, 3))
    injector = Injector(FaultPlan(faults=(fault("activation", "scale", "0", factor=2.0),)), rank=0)
    injector.attach(net)
    injector.begin_step(3)
    assert net(torch.ones(0, 6)).shape == (0, 3)
    assert not any(planted.changed for planted in injector.log)
