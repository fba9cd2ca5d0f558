"""Logs every operation of a replay, so that a wrong one can be told from another computation.

A dispatch mode sees each operation of torch below autograd, in the forward, in recomputations and
in the backward. For each it logs the operator, the module it ran in, and fingerprints of what it
read and wrote; `sdcwatch.core.trace` compares the logs of two ranks. The mode changes no bit: it
calls each operation as it is and replaces nothing.

**Storages are followed**: each is fingerprinted whole when it is written and when it is read again.
A difference is a change between operations, which a device makes, or code that a mode cannot see.
Memory whose address was asked for (`numpy()`, `data_ptr()`, DLPack) is therefore marked.

**What is no difference**: contents that an operation overwrites, that a view only passes on, or
that nothing has written; device indices; addresses. Operations that draw random numbers log where
their generator stands. Settings of the process that decide bits are logged where they change.

**What it cannot see**: compiled code (`Trace.blind`), and kernels that other packages launch.

**Cost** about 5 plain replays for large tensors, more for small ones; a fingerprint of 16 bytes per
tensor stays on the device until the end. Run when something is wrong only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.module_state import numeric_environment
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.replay import Replayer, ReplayOptions, ReplayResult
from sdcwatch.checks.signals import let_through
from sdcwatch.checks.trace_reading import (
    Fingerprints,
    Memory,
    ModulePaths,
    constant_text,
    kind_of,
    leaves,
    strided_parts,
    tensor_leaves,
)
from sdcwatch.core.trace import compare_repeats
from sdcwatch.core.trace_values import (
    MAX_OPERATIONS,
    Born,
    Change,
    Operation,
    Place,
    Trace,
    TraceOutcome,
    Value,
)

_OWN = str(Path(__file__).parents[1])
REPEATS = 8
"""Traces at most of a micro-batch whose replays do not repeat, to find where."""

_UNSET = frozenset((
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
))  # fmt: skip
_OVERWRITES = frozenset((
    "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "fill_", "zero_", "copy_", "set_", "resize_",
))  # fmt: skip
_WORKSPACE_NAMES = frozenset(
    ("rng_state", "unused", "philox_seed", "philox_offset", "debug_attn_mask", "reserve")
)
_WORKSPACES = {
    "_cudnn_rnn": (3, 4),
    "miopen_rnn": (3, 4),
    "mkldnn_rnn_layer": (3,),
    "cudnn_batch_norm": (3,),
    "_embedding_bag": (1, 2, 3),
    "_embedding_bag_forward_only": (1, 2, 3),
}
"""Outputs that are for the backward only, and may hold memory that nothing wrote."""
_STATISTICS = frozenset(("running_mean", "running_var"))
"""Arguments that batch norms write without saying so in their schema."""
_EXPOSING = frozenset((
    "numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage",
    "_typed_storage", "__cuda_array_interface__",
))  # fmt: skip
_COMPILED = "compiled code runs, which a trace cannot see"


@dataclass
class _Read:
    """A value as it was seen; what its tickets stand for comes at the end."""

    value: Value
    ticket: int | None = None
    before: int | None = None
    now: int | None = None
    exposed: bool = False


@dataclass
class _Seen:
    """An operation as it was seen."""

    place: Place
    inputs: list[_Read] = field(default_factory=list)
    outputs: list[_Read] = field(default_factory=list)
    line: tuple[str, int] | None = None


@dataclass(frozen=True)
class _Shape:
    """What the schema of an operator says.

    Attributes:
        name: "aten::add_".
        arguments: Names of the positional arguments.
        written: Arguments that are written.
        overwritten: Those whose old contents do not matter.
        contents: Whether the contents of inputs matter.
        view: Its outputs are other views of its inputs.
        unset: Its outputs hold what nothing wrote.
        workspaces: Numbers of outputs that may.
        draws: It may draw random numbers.
        opaque: It may write what its schema does not say.
    """

    name: str
    arguments: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    contents: bool = True
    view: bool = False
    unset: bool = False
    workspaces: frozenset[int] = frozenset()
    draws: bool = False
    opaque: bool = False


def _shape_of(func: Any) -> _Shape:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operation of higher order, such as flex_attention
        return _Shape(f"higher_order::{func.name()}", draws=True, opaque=True)
    namespace, _, base = schema.name.partition("::")
    aliased = [a.alias_info for a in schema.arguments]
    names = tuple(a.name for a in schema.arguments)
    written = {n for n, i in zip(names, aliased, strict=True) if i is not None and i.is_write}
    unset = namespace == "aten" and base in _UNSET
    outputs = {a.name for a in schema.arguments if a.is_out}
    view = not written and any(r.alias_info is not None for r in schema.returns)
    named = {i for i, r in enumerate(schema.returns) if r.name in _WORKSPACE_NAMES}
    aten = namespace in ("aten", "prim", "prims")
    return _Shape(
        name=schema.name,
        arguments=names,
        written=frozenset(written | (_STATISTICS & set(names))),
        overwritten=frozenset(written if base in _OVERWRITES else outputs),
        contents=not (unset or view),
        view=view,
        unset=unset,
        workspaces=frozenset(named | set(_WORKSPACES.get(base, ()))),
        draws=torch.Tag.nondeterministic_seeded in func.tags or not aten,
        opaque=not aten,
    )


class TraceRecorder:
    """Logs what runs; an `Observer` of a replay.

    Never raises into the code that runs; what goes wrong in it makes the trace blind.

    Args:
        replayer: Whose module and parameters.
    """

    def __init__(self, replayer: Replayer) -> None:
        capture = replayer.capture
        self._device = capture.device
        self._fingerprints = Fingerprints()
        self._memory = Memory(self._fingerprints)
        self._paths = ModulePaths(capture.module)
        self._shapes: dict[Any, _Shape] = {}
        self._seen: list[_Seen] = []
        self._environment, self._settings = numeric_environment(), _settings()
        self._mode, self._exposures = _Operations(self), _Exposures(self._memory)
        self.blind = ""
        settings = [_constant(name, text) for name, text in self._environment.items()]
        self._seen.append(_Seen(Place("(settings)"), settings))
        for name, parameter in capture.named:
            self.given(f"parameter {name}", parameter)

    # --- an observer of a replay ---

    @contextmanager
    def running(self) -> Iterator[None]:
        """Log what is done inside."""
        with self._paths.followed(), self._exposures, self._mode:
            yield

    def given(self, origin: str, tensor: Tensor) -> None:
        """Note what travels with a micro-batch, or a parameter."""
        with self._quietly():
            for part in strided_parts(tensor) or ():
                self._memory.give(part, origin)

    def result(self, name: str, tensor: Tensor) -> None:
        """Note an output or a gradient, where the replay takes it."""
        with self._quietly():
            seen = _Seen(Place(f"({name})", *self._paths.now()))
            seen.inputs += self._read(tensor, contents=True)
            self._append(seen)

    def trace(self) -> Trace:
        """What was logged. Waits for the device."""
        if self.blind:
            return Trace(blind=self.blind)
        bits = self._fingerprints.resolve()
        return Trace(tuple(self._operation(seen, bits) for seen in self._seen))

    # --- an operation ---

    def begin(self, func: Any, args: Any, kwargs: Any) -> tuple[_Seen, _Shape] | None:
        """Note an operation and what it reads."""
        if self.blind:
            return None
        with self._quietly():
            shape = self._shapes.get(func)
            if shape is None:
                shape = self._shapes[func] = _shape_of(func)
            line = internals.operations_line(_OWN)
            seen = _Seen(Place(shape.name, *self._paths.now()), line=line)
            for name, value in _named(shape, args, kwargs):
                seen.inputs += self._argument(shape, name, value)
            if shape.draws and not any(leaves((args, kwargs), _is_generator)):
                seen.inputs += self._generators()
            self._note_environment(seen)
            self._append(seen)
            return seen, shape
        return None

    def end(self, begun: tuple[_Seen, _Shape], args: Any, kwargs: Any, out: Any) -> None:
        """Note what it wrote."""
        with self._quietly():
            seen, shape = begun
            writer = len(self._seen) - 1
            returned: set[int] = set()
            for number, value in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
                workspace = number in shape.workspaces
                for tensor in tensor_leaves(value):
                    returned.add(id(tensor))
                    seen.outputs += self._written(tensor, writer, shape, workspace=workspace)
                if not tensor_leaves(value):
                    seen.outputs.append(_number(value))
            for name, value in _named(shape, args, kwargs):
                if shape.opaque or name in shape.written:
                    for tensor in tensor_leaves(value):
                        if id(tensor) not in returned:
                            seen.outputs += self._written(tensor, writer, shape)

    def _append(self, seen: _Seen) -> None:
        if len(self._seen) >= MAX_OPERATIONS:
            self.blind = f"the call has more than {MAX_OPERATIONS} operations"
            return
        self._seen.append(seen)

    def _argument(self, shape: _Shape, name: str, value: Any) -> list[_Read]:
        tensors = tensor_leaves(value)
        if tensors:
            contents = shape.contents and name not in shape.overwritten
            return [r for t in tensors for r in self._read(t, contents=contents, view=shape.view)]
        if _is_generator(value):
            return [self._generator("generator", value.get_state())]
        return [_constant(name or "argument", constant_text(value))]

    def _read(self, tensor: Tensor, *, contents: bool, view: bool = False) -> list[_Read]:
        parts = strided_parts(tensor)
        if parts is None:
            return [_Read(Value(f"opaque {kind_of(tensor)}"))]
        found = []
        for part in parts:
            if view:  # what it passes on is read later
                owner, before, now = self._memory.owner(part), None, None
            else:
                owner, before, now = self._memory.look(part)
            origin = f"{owner.origin}+{part.storage_offset()}" if owner.origin else ""
            value = Value(kind_of(part), "", owner.born, origin, owner.writer)
            read = _Read(value, None, before, now, owner.exposed)
            if contents and not owner.workspace:
                read.ticket = self._fingerprints.of_tensor(part)
            found.append(read)
        return found

    def _written(
        self, tensor: Tensor, writer: int, shape: _Shape, *, workspace: bool = False
    ) -> list[_Read]:
        parts = strided_parts(tensor)
        if parts is None:
            return [_Read(Value(f"opaque {kind_of(tensor)}"))]
        found = []
        for part in parts:
            read = _Read(Value(kind_of(part)))
            if not shape.view:
                born = Born.UNSET if shape.unset else Born.OPERATION
                self._memory.write(part, writer, born, workspace=workspace)
                if not (shape.unset or workspace):
                    read.ticket = self._fingerprints.of_tensor(part)
            found.append(read)
        return found

    def _generators(self) -> list[_Read]:
        found = [self._generator("generator of the CPU", torch.get_rng_state())]
        if self._device.type != "cpu":
            state = torch.get_device_module(self._device).get_rng_state(self._device)
            found.append(self._generator("generator of the device", state))
        return found

    def _generator(self, kind: str, state: Tensor) -> _Read:
        return _Read(Value(kind, born=Born.GENERATOR), self._fingerprints.of_tensor(state))

    def _note_environment(self, seen: _Seen) -> None:
        if _settings() == self._settings:
            return
        now = numeric_environment()
        if now != self._environment:
            moved = {k: v for k, v in now.items() if v != self._environment.get(k)}
            seen.inputs += [_constant(name, text) for name, text in moved.items()]

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        with internals.dispatch_modes_off(), internals.torch_function_off(), torch.no_grad():
            try:
                yield
            except Exception as error:
                let_through(error)
                first = (str(error).splitlines() or [""])[0]
                self.blind = self.blind or f"the trace failed: {type(error).__name__}: {first}"

    # --- at the end ---

    def _operation(self, seen: _Seen, bits: list[str]) -> Operation:
        inputs = [self._value(read, bits) for read in seen.inputs]
        outputs = [self._value(read, bits) for read in seen.outputs]
        line = internals.source_line(*seen.line) if seen.line else ""
        return Operation.of(seen.place, inputs, outputs, line)

    def _value(self, read: _Read, bits: list[str]) -> Value:
        value = read.value
        if read.ticket is not None:
            value = replace(value, bits=bits[read.ticket])
        if read.before is None or read.now is None or bits[read.before] == bits[read.now]:
            return value
        by = self._seen[value.writer].place if value.writer >= 0 else None
        change = Change.EXPOSED if read.exposed else Change.CHANGED
        return replace(value, change=change, by=by)


def _settings() -> tuple[Any, ...]:
    """What `numeric_environment` would tell, in a microsecond: for every operation."""
    cudnn = torch.backends.cudnn
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mkldnn.enabled,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        sys.float_info.min * 0.5 == 0.0,  # this thread flushes denormals
    )


def _named(shape: _Shape, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Each argument and its name, in the order of the call."""
    for number, value in enumerate(args):
        yield shape.arguments[number] if number < len(shape.arguments) else "", value
    yield from sorted(kwargs.items())


def _constant(kind: str, text: str) -> _Read:
    return _Read(Value(kind, text[:120], Born.CODE))


def _number(value: Any) -> _Read:
    return _Read(Value(type(value).__name__, constant_text(value)[:120]))


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation on, and tells the recorder before and after."""

    supports_higher_order_operators = True

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._pass_on = internals.hidden_from_compiler(self._log)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True makes the first operation import the compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._pass_on(func, args, kwargs or {})

    def _log(self, func: Any, args: Any, kwargs: Any) -> Any:
        begun = self._recorder.begin(func, args, kwargs)
        out = func(*args, **kwargs)
        if begun is not None:
            self._recorder.end(begun, args, kwargs, out)
        return out


class _Exposures(TorchFunctionMode):
    """Notes whose memory is handed to code that a dispatch mode cannot see."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _EXPOSING and args and isinstance(args[0], Tensor):
            with internals.torch_function_off(), internals.dispatch_modes_off():
                self._memory.expose(args[0])
        return func(*args, **(kwargs or {}))


# --- traces of a micro-batch ---


def traced_replay(
    replayer: Replayer,
    micro_batch: MicroBatch,
    options: ReplayOptions | None = None,
    *,
    expected: ReplayResult | None = None,
) -> Trace:
    """Replay a micro-batch and log every operation.

    Needs no other rank and never raises; leaves nothing behind, as `Replayer.run`. Waits for the
    device.

    Args:
        replayer: Of this rank.
        micro_batch: Of any rank with the same weights.
        options: As for the plain replay.
        expected: What a plain replay on this rank came to: other bits make the trace unfaithful.

    Returns:
        The trace; `blind` says why there is none.
    """
    if replayer.capture.compiled:
        return Trace(blind=_COMPILED)
    with internals.dispatch_modes_off():
        try:
            recorder = TraceRecorder(replayer)
        except Exception as error:
            let_through(error)
            return Trace(blind=f"the trace failed: {type(error).__name__}")
        result = replayer.run(micro_batch, replace(options or ReplayOptions(), observer=recorder))
        if result.not_run or result.error:
            return Trace(blind=result.not_run or result.error)
        trace = recorder.trace()
    return replace(trace, faithful=expected is None or same_bits(result, expected))


def same_bits(one: ReplayResult, other: ReplayResult) -> bool:
    """Whether two replays came to the same outputs and gradients."""
    pairs = ((one.outputs, other.outputs), (one.gradients, other.gradients))
    return one.inner_equal == other.inner_equal and all(
        a is not None and b is not None and torch.equal(a, b) for a, b in pairs
    )


def repeated_trace(
    replayer: Replayer,
    micro_batch: MicroBatch,
    options: ReplayOptions | None = None,
    *,
    expected: ReplayResult | None = None,
    repeats: int = 2,
) -> Trace:
    """Trace a micro-batch several times: the first trace, with what did not repeat in it.

    Args:
        replayer: Of this rank.
        micro_batch: Of any rank with the same weights.
        options: As for the plain replay.
        expected: What a plain replay on this rank came to.
        repeats: Traces at most; it ends with the first that differs.
    """
    first = traced_replay(replayer, micro_batch, options, expected=expected)
    for _ in range(1, repeats):
        if first.blind:
            break
        found = compare_repeats(first, traced_replay(replayer, micro_batch, options))
        if found is None:
            continue
        if found.outcome is TraceOutcome.BLIND:
            return Trace(blind=found.detail)
        return replace(first, unrepeated=found)
    return first


def disputed_trace(
    replayer: Replayer, micro_batch: MicroBatch, options: ReplayOptions | None = None
) -> Trace:
    """Trace a micro-batch on which ranks disagree: twice, after a plain replay.

    Args:
        replayer: Of this rank.
        micro_batch: Of any rank with the same weights.
        options: As for the plain replay.
    """
    expected = replayer.run(micro_batch, options)
    return repeated_trace(replayer, micro_batch, options, expected=expected)
