"""Traces of operations tell a device from software, with the operation, and change nothing."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.payload import MicroBatch, pack, unpack
from sdcwatch.checks.replay import Replayer, ReplayOptions
from sdcwatch.checks.trace import (
    REPEATS,
    TraceRecorder,
    repeated_trace,
    same_bits,
    traced_replay,
)
from sdcwatch.core.trace import Side, compare_repeats, first_difference, judge
from sdcwatch.core.trace_values import (
    OUTLINE_BYTES,
    SECTION_BYTES,
    Outline,
    Section,
    Trace,
    TraceFinding,
    TraceOutcome,
)

CPU = torch.device("cpu")
BIT = 1 << 12


class Net(nn.Module):
    """Branches, dropout, norms, a recurrent layer, and places where a rank may differ."""

    def __init__(self, *, recurrent: bool = False):
        super().__init__()
        self.t = nn.ModuleDict({k: nn.Linear(16, 8) for k in "abcd"})
        self.n, self.b = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.r = nn.GRU(8, 8) if recurrent else None
        self.also = lambda z: z
        self.order = lambda: "abcd"

    def forward(self, x):
        z = sum(self.t[k](x) for k in self.order())
        z = self.b(self.n(F.dropout(z, 0.1))).clone()
        z = self.also(z)
        if self.r is not None:
            z = z + self.r(z[None])[0][0]
        return F.gelu(z) + F.softmax(z, -1)


def prepared(model: nn.Module, *inputs: Tensor) -> tuple[Replayer, MicroBatch]:
    """A replayer of a model, and a micro-batch as another rank would get it."""
    capture = CallCapture(model, list(model.named_parameters()), CPU, audit=lambda: True)
    capture.attach()
    out = model(*(inputs or (torch.randn(6, 16),)))
    (out * torch.randn_like(out)).sum().backward()
    return Replayer(capture), unpack(pack(capture.end_backward().micro_batch), CPU)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


# --- faults that a device makes, planted where a mode does not look ---


class Counting(TorchDispatchMode):
    """Calls `act` with the number of each operation, its inputs and its outputs."""

    def __init__(self, act: Callable[[int, Any, list[Tensor], list[Tensor]], None]):
        super().__init__()
        self.act, self.count = act, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        with _disable_current_modes(), torch.no_grad():
            self.act(self.count, func, tensors(args), tensors(out))
        self.count += 1
        return out


def tensors(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def flip(tensor: Tensor) -> None:
    """One bit of the first element, behind dispatch; a device asks for no address."""
    with torch._C.DisableTorchFunction():
        words = torch.empty(0, dtype=torch.int32)
        words.set_(tensor.untyped_storage(), tensor.storage_offset(), (1,), (1,))
        words.bitwise_xor_(BIT)


class Faulty(TraceRecorder):
    """A recorder on a device with a fault: in an operation (below) or between two (above)."""

    def __init__(self, replayer: Replayer, below: Any = None, above: Any = None):
        super().__init__(replayer)
        self.below, self.above = below or nullcontext(), above or nullcontext()

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.below, super().running(), self.above:
            yield


def trace_of(replayer: Replayer, micro_batch: MicroBatch, **modes: Any) -> Trace:
    """A trace on a device with a fault, whose parameters are put back."""
    before = [p.detach().clone() for p in replayer.capture.module.parameters()]
    recorder = Faulty(replayer, **modes)
    result = replayer.run(micro_batch, ReplayOptions(observer=recorder))
    assert result.error == ""
    assert result.not_run == ""
    for parameter, value in zip(replayer.capture.module.parameters(), before, strict=True):
        with _disable_current_modes(), torch.no_grad():
            flipped = not torch.equal(parameter, value)
            parameter.data = value if flipped else parameter.data
    return recorder.trace()


def judged(disputed: Trace, *right: Trace) -> TraceFinding:
    """What ranks 3, 5, 6, … find that exchange outlines and one section as bytes."""
    traces = (disputed, *right)
    outlines = [trace.outline().pack() for trace in traces]
    assert max(map(len, outlines)) <= OUTLINE_BYTES
    found = [Outline.unpack(data) for data in outlines]
    where = first_difference(found)
    packed = [b"" if where is None else trace.section(where).pack() for trace in traces]
    assert max(map(len, packed)) <= SECTION_BYTES
    sections = [Section.unpack(data) if data else None for data in packed]
    sides = list(map(Side, (3, 5, 6, 7), found, sections))
    return judge(sides[0], sides[1:])


def plantable(func: Any, read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether an operation has computed something that a bit can be flipped in."""
    if not written or "empty" in str(func):
        return False
    out, sources = written[0], {t.untyped_storage().data_ptr() for t in read}
    fresh = out.untyped_storage().data_ptr() not in sources
    return out.dtype is torch.float32 and out.numel() > 0 and fresh


def test_a_flip_in_an_operation_is_told_as_the_device_with_that_operation(net):
    replayer, micro_batch = prepared(net)
    places = []

    def note(number, func, read, written):
        if plantable(func, read, written):
            places.append((number, func._schema.name))

    clean = trace_of(replayer, micro_batch, below=Counting(note))
    assert judged(trace_of(replayer, micro_batch), clean).outcome is TraceOutcome.EQUAL
    assert len(places) >= 22
    for wanted, operator in places[::2]:

        def act(number, func, read, written, wanted=wanted):
            if number == wanted:
                flip(written[0])

        found = judged(trace_of(replayer, micro_batch, below=Counting(act)), clean)
        assert (found.outcome, found.operator) == (TraceOutcome.DEVICE, operator)
        assert found.rank == 3


class FlipsAfter(Counting):
    """Flips a bit in a tensor of the last few operations once an operation is over.

    Keeps all tensors, as autograd adds gradients up in place where nobody else holds them.
    """

    def __init__(self, wanted: int, back: int):
        super().__init__(self.flip_one)
        self.wanted, self.back, self.kept, self.hit = wanted, back, [], False

    def flip_one(self, number, func, read, written):
        self.kept.append(written)
        if number != self.wanted:
            return
        recent = [t for ts in self.kept[max(0, number - self.back) :] for t in ts]
        for tensor in [t for t in recent if t.dtype is torch.float32 and t.numel()][:1]:
            flip(tensor)
            self.hit = True


@pytest.mark.parametrize("back", [0, 3, 9])
def test_a_flip_between_operations_is_told_as_the_device_or_never_read_again(back):
    torch.manual_seed(0)
    replayer, micro_batch = prepared(Net(recurrent=True))
    clean = trace_of(replayer, micro_batch, above=FlipsAfter(-1, 0))
    outcomes = []
    for wanted in range(back, len(clean.operations), 7):
        fault = FlipsAfter(wanted, back)
        found = judged(trace_of(replayer, micro_batch, above=fault), clean)
        if fault.hit:
            outcomes.append(found.outcome)
            assert found.rank == (3 if found.names_device else None), found
    assert set(outcomes) <= {TraceOutcome.DAMAGED, TraceOutcome.EQUAL}
    assert outcomes.count(TraceOutcome.DAMAGED) > len(outcomes) // 3


def test_a_damaged_value_is_told_with_the_operation_that_produced_it(net):
    replayer, micro_batch = prepared(net)
    clean = trace_of(replayer, micro_batch)
    norms = []

    def act(number, func, read, written):
        if "native_layer_norm.default" in str(func):
            norms.append(written[0])
        if norms and "batch_norm.default" not in str(func) and len(norms) == 1:
            flip(norms[0])
            norms.append(None)

    found = judged(trace_of(replayer, micro_batch, above=Counting(act)), clean)
    assert found.outcome is TraceOutcome.DAMAGED
    assert found.where == "aten::native_layer_norm in n"
    assert "changed before aten::" in str(found)


def test_a_gradient_damaged_on_its_way_is_told_with_the_operation_that_produced_it(net):
    replayer, micro_batch = prepared(net)
    clean = trace_of(replayer, micro_batch)
    last = [
        n
        for n, o in enumerate(clean.operations)
        if o.place.operator == "aten::native_layer_norm_backward"
    ]
    assert len(last) == 1

    def act(number, func, read, written):
        if "native_layer_norm_backward.default" in str(func):
            flip(written[1])

    found = judged(trace_of(replayer, micro_batch, above=Counting(act)), clean)
    assert found.outcome is TraceOutcome.DAMAGED
    assert (found.where, found.backward) == ("aten::native_layer_norm_backward in n", True)
    assert found.detail.endswith("before it was taken as the gradient of n.weight")


# --- what software does differently on one rank ---

SCALE = 1.0


def scaled_by_a_global(z):
    return z * SCALE


def sides_of(net: Net, change: Callable[[], None]) -> TraceFinding:
    """What is found if `change` happens on one rank only."""
    replayer, micro_batch = prepared(net)
    clean = repeated_trace(replayer, micro_batch)
    change()
    return judged(repeated_trace(replayer, micro_batch), clean, clean)


def test_a_global_that_differs_is_software_with_its_operation(net, monkeypatch):
    net.also = scaled_by_a_global
    found = sides_of(net, lambda: monkeypatch.setitem(globals(), "SCALE", 2.0))
    assert found.outcome is TraceOutcome.SOFTWARE
    assert found.operator == "aten::mul"
    assert found.detail == "`other` is 2.0, and 1.0 on rank 5"
    assert f"(`return z * SCALE`, {__file__}:" in found.said, "the user's own line"
    assert not found.names_device


def test_lines_are_those_of_the_forward_alone(net):
    """None of the backward, and none of the loop that called the replay."""
    replayer, micro_batch = prepared(net)
    operations = traced_replay(replayer, micro_batch).operations
    told = {o.line.rsplit(":", 1)[0] for o in operations if o.line}
    code = {line.strip() for line in inspect.getsource(Net.forward).splitlines()}
    assert {line.split("`")[1] for line in told} <= code | {"self.also = lambda z: z"}
    assert all(not o.line for o in operations if o.place.backward)
    plain = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    assert {o.line for o in traced_replay(*prepared(plain)).operations} == {""}


def test_a_tensor_in_a_closure_that_differs_is_software_with_its_operation(net):
    held = {"scale": torch.ones(8)}
    net.also = lambda z: z * held["scale"]
    found = sides_of(net, lambda: held.update(scale=torch.full((8,), 1.5)))
    assert found.outcome is TraceOutcome.SOFTWARE
    assert found.operator == "aten::mul"
    assert "outside the call" in found.detail


def test_a_state_in_a_plain_object_that_differs_is_software(net):
    class Config:
        alpha = 1.0

    config = Config()
    net.also = lambda z: z * config.alpha
    found = sides_of(net, lambda: setattr(config, "alpha", 3.0))
    assert (found.outcome, found.operator) == (TraceOutcome.SOFTWARE, "aten::mul")


def test_the_order_of_a_set_that_differs_is_software(net):
    orders = ["abcd"]
    net.order = lambda: orders[-1]
    found = sides_of(net, lambda: orders.append("badc"))
    assert found.outcome is TraceOutcome.SOFTWARE
    assert found.module == "t.b"
    assert "in t.a instead" in found.detail


def test_a_branch_on_the_rank_is_software_with_the_operation_that_only_one_runs(net):
    ranks = [0]
    net.also = lambda z: z.sin() if ranks[-1] else z
    found = sides_of(net, lambda: ranks.append(1))
    assert (found.outcome, found.operator) == (TraceOutcome.SOFTWARE, "aten::sin")


def test_a_table_filled_from_what_a_rank_saw_first_is_software(net):
    table = {}

    def shifted(z):
        return z + table.setdefault(z.shape[0], z.mean(1, keepdim=True).detach() * 2)

    def seen_first():
        table.clear()
        with torch.no_grad():
            net(torch.randn(6, 16))

    net.also = shifted
    found = sides_of(net, seen_first)
    assert found.outcome is TraceOutcome.SOFTWARE
    assert found.operator == "aten::add"


def test_a_generator_seeded_by_the_rank_is_software(net):
    seeds = [1]
    net.also = lambda z: F.dropout(z * torch.manual_seed(seeds[-1]).initial_seed(), 0.5)
    found = sides_of(net, lambda: seeds.append(2))
    assert found.outcome is TraceOutcome.SOFTWARE

    own = torch.Generator()
    net.also = lambda z: z + torch.rand(8, generator=own.manual_seed(seeds[-1]))
    found = sides_of(net, lambda: seeds.append(3))
    assert (found.outcome, found.operator) == (TraceOutcome.SOFTWARE, "aten::rand")
    assert "generator stands elsewhere" in found.detail


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flush_denormal", lambda on: torch.set_flush_denormal(on)),
        ("threads", lambda on: torch.set_num_threads(2 if on else 1)),
        ("mkldnn", lambda on: torch.backends.mkldnn.set_flags(not on)),
    ],
)
def test_a_setting_that_one_rank_changes_inside_the_call_is_software(net, name, change):
    before, switched = torch.get_num_threads(), [False]
    torch.set_num_threads(1)

    def inside(z):
        change(switched[-1])
        out = z * 2
        change(False)
        return out

    net.also = inside
    try:
        found = sides_of(net, lambda: switched.append(True))
    finally:
        change(False)
        torch.set_num_threads(before)
    assert found.outcome is TraceOutcome.SOFTWARE
    assert found.operator == "aten::mul"


def test_weights_that_one_rank_moved_make_its_trace_blind(net):
    replayer, micro_batch = prepared(net)
    clean = repeated_trace(replayer, micro_batch)
    with torch.no_grad():
        net.n.weight.add_(1)
    found = judged(repeated_trace(replayer, micro_batch), clean)
    assert found.outcome is TraceOutcome.BLIND
    assert found.detail == "the weights here are not those of the call"


@pytest.mark.parametrize("sides", ["one", "both"])
def test_a_writer_that_dispatch_cannot_see_names_nobody(net, sides):
    values = [0.5]

    def write(z):
        if values[-1] is not None:
            z.detach().numpy()[0, 0] = values[-1]
        return z

    net.also = write
    values += [None] if sides == "one" else []
    found = sides_of(net, lambda: values.append(0.25))
    assert found.outcome in (TraceOutcome.BLIND, TraceOutcome.SOFTWARE)
    assert not found.names_device
    assert found.operator


def test_memory_that_nothing_wrote_names_nobody(net):
    fills = [1.0]

    def partly(z):
        out = torch.empty(2, 8)
        with _disable_current_modes():
            out.fill_(fills[-1])  # what happened to be there
        out[0].copy_(z[0].detach())
        return z + out[1]

    net.also = partly
    found = sides_of(net, lambda: fills.append(2.0))
    assert found.outcome is TraceOutcome.SOFTWARE
    assert "a part only" in found.detail


# --- judging with more ranks ---


def test_an_operation_in_which_healthy_ranks_differ_names_nobody(net):
    replayer, micro_batch = prepared(net)

    def flipping(bit):
        def act(number, func, read, written):
            if "native_layer_norm.default" in str(func):
                written[0].view(torch.int32).reshape(-1)[:1].bitwise_xor_(bit)

        return Counting(act)

    first, second, third = (
        trace_of(replayer, micro_batch, below=flipping(bit)) for bit in (1, 2, 4)
    )
    assert judged(first, second).outcome is TraceOutcome.DEVICE
    found = judged(first, second, third)
    assert (found.outcome, found.operator) == (TraceOutcome.BLIND, "aten::native_layer_norm")
    assert found.detail == "ranks 5 and 6, both right, differ here too"


# --- what does not repeat ---


def find_unrepeatable(replayer: Replayer, micro_batch: MicroBatch) -> TraceFinding | None:
    trace = repeated_trace(replayer, micro_batch, repeats=REPEATS)
    assert trace.blind == ""
    return trace.unrepeated


@pytest.fixture(scope="module")
def wobble() -> Iterator[Callable[[Tensor], Tensor]]:
    library = torch.library.Library("sdcwatch_test", "FRAGMENT")
    library.define("wobble(Tensor x) -> Tensor")
    source = random.Random(0)
    library.impl("wobble", lambda x: x + source.random(), "CompositeExplicitAutograd")
    yield lambda z: z + torch.ops.sdcwatch_test.wobble(z.detach())
    library._destroy()


def test_an_operation_that_does_not_repeat_is_named_with_what_to_set(net, wobble):

    class Wobbling(nn.LayerNorm):
        def forward(self, x):
            return wobble(super().forward(x))

    net.n = Wobbling(8)
    replayer, micro_batch = prepared(net)
    found = find_unrepeatable(replayer, micro_batch)
    assert found.outcome is TraceOutcome.NONDETERMINISTIC
    assert found.where == "sdcwatch_test::wobble in n"
    assert found.advice.startswith("Ask the authors of sdcwatch_test::wobble")
    assert str(found).startswith("nondeterministic: sdcwatch_test::wobble in n (`yield lambda z: ")
    trace = repeated_trace(replayer, micro_batch)
    assert judged(trace, trace).outcome is TraceOutcome.NONDETERMINISTIC
    assert judged(trace, trace).rank is None


def test_a_generator_that_a_replay_does_not_put_back_does_not_repeat(net):
    drawn = random.SystemRandom()

    def also(z):
        own = torch.Generator().manual_seed(drawn.getrandbits(60))
        return z + torch.rand(8, generator=own)

    net.also = also
    replayer, micro_batch = prepared(net)
    found = find_unrepeatable(replayer, micro_batch)
    assert (found.outcome, found.operator) == (TraceOutcome.NONDETERMINISTIC, "aten::rand")
    assert "global generators" in found.advice


def test_a_model_that_repeats_is_said_to(net):
    replayer, micro_batch = prepared(net)
    assert find_unrepeatable(replayer, micro_batch) is None


# --- a trace changes nothing ---


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.table = nn.Embedding(9, 16, sparse=True)

    def forward(self, x):
        x = x + self.table(torch.arange(6) % 9)
        return self.attn(x[None], x[None], x[None])[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = Net(), reentrant

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.conv(x[None, None]))
        return torch.complex(y.float(), y.float()).abs().permute(0, 2, 3, 1).expand(3, -1, -1, -1)


def traces_of(model):
    """What a replay might leave behind, in the model and in torch."""
    return (
        [(id(p.grad), p.grad.to_dense().sum().item(), p._version) for p in model.parameters()],
        [(id(b), b._version) for b in model.buffers()],
        torch.get_rng_state().tolist(),
        [dict(m.__dict__).keys() for m in model.modules()],
        len(global_hooks._global_forward_hooks),
        len(global_hooks._global_forward_pre_hooks),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: Net(recurrent=True),
        Attention,
        lambda: Checkpointed(True),
        lambda: Checkpointed(False),
        Mixed,
    ],
    ids=["net", "recurrent", "attention", "reentrant", "checkpoint", "mixed"],
)
def test_a_trace_changes_no_bit_repeats_and_leaves_nothing_behind(make):
    torch.manual_seed(0)
    model = make()
    replayer, micro_batch = prepared(model, torch.randn(6, 16))
    plain = replayer.run(micro_batch)
    assert plain.error == ""
    before = traces_of(model)
    trace = repeated_trace(replayer, micro_batch, expected=plain)
    after = traces_of(model)
    assert trace.blind == ""
    assert trace.faithful
    assert trace.unrepeated is None
    assert before == after
    assert same_bits(replayer.run(micro_batch), plain)


def test_a_recomputation_is_told_with_the_modules_that_it_runs():
    torch.manual_seed(0)
    replayer, micro_batch = prepared(Checkpointed(False))
    places = {str(o.place) for o in traced_replay(replayer, micro_batch).operations}
    assert "aten::native_layer_norm in inner.n" in places
    assert "aten::native_layer_norm in inner.n, in the backward" in places
    assert "aten::native_layer_norm_backward in inner.n, in the backward" in places


def test_an_exception_in_a_traced_replay_makes_it_blind(net):
    replayer, micro_batch = prepared(net)

    def fail(z):
        msg = "odd"
        raise ValueError(msg)

    net.also = fail
    assert traced_replay(replayer, micro_batch).blind == "ValueError: odd"
    assert len(global_hooks._global_forward_hooks) == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_compiled_code_is_blind_with_the_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8))
    model[0].compile(backend="eager")
    replayer, micro_batch = prepared(model)
    trace = traced_replay(replayer, micro_batch)
    assert trace.blind == "compiled code runs, which a trace cannot see"
    assert compare_repeats(trace, trace).outcome is TraceOutcome.BLIND


def test_a_trace_that_comes_to_other_bits_than_the_plain_replay_is_not_trusted(net):
    replayer, micro_batch = prepared(net)
    plain = replayer.run(micro_batch)
    net.also = lambda z: z * 2
    doubled = repeated_trace(replayer, micro_batch, expected=plain)
    assert not doubled.faithful
    found = judged(doubled, doubled)
    assert found.outcome is TraceOutcome.BLIND
    assert "other numbers than without it" in found.detail
