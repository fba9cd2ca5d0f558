"""Repeats the calls and the backward of a micro-batch on this rank, and leaves no trace.

**What it compares.** That outputs, and the parts of their gradients that come from inside, are the
producer's bit for bit is left to the caller: a replay gives digests. With the same weights, kernels
and machine type they are equal.

**Two ways to the gradients.** `torch.autograd.grad` on the parameters themselves touches neither
`.grad` nor DDP's reducer; both hang on the accumulation, which it skips. A reentrant checkpoint
refuses it: then leaves that share the parameters' memory are swapped in for a plain backward, and
the parameters themselves need no gradient meanwhile, so that nothing can arrive in them by another
way. On both paths a gradient is digested and dropped as it arrives, and tensor hooks on the
parameters run once more.

**What is put back**: generators, buffers, attributes and training flags of the module, the default
dtype, `.grad`, and what the user's code moves outside of the module (`sdcwatch.checks.hidden`).
What a forward moved is told in `trace`, by name. A parameter that it wrote cannot be put back, only
told.

**Cost.** A forward and backward, one digest per gradient, a copy of buffers and attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.calling import BareCall, Caller
from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.captured import outputs_of
from sdcwatch.checks.fingerprint import digest_tensors, to_pairs
from sdcwatch.checks.gradients import GradientHooks, GradientLog, digest_gradient
from sdcwatch.checks.hidden import HiddenState
from sdcwatch.checks.module_state import (
    HOST_GENERATORS,
    ModuleState,
    ReboundState,
    numeric_environment,
    read_generators,
    spoken,
)
from sdcwatch.checks.nonfinite import confirm_nonfinite, probe
from sdcwatch.checks.payload import Call, MicroBatch, pack, unpack
from sdcwatch.checks.reading import total
from sdcwatch.checks.replaying import replay_in_progress
from sdcwatch.checks.serialise import NotTransportable, tensors_in
from sdcwatch.checks.signals import let_through

_OWN = (str(Path(__file__).parent),)
_NOT_STOPPABLE = "in compiled code a collective cannot be stopped, and preflight has not looked yet"
_JUDGED_BY_SELF_AUDIT = frozenset(
    ("saved_tensor_hooks",)
)  # moving to the CPU is exact, casting is not


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to.

    Attributes:
        outputs: int64 (k, 2), digests of the outputs that got a gradient; None after an error.
        gradients: int64 (n, 2), one digest per compared parameter; None after an error.
        inner_equal: The parts of output gradients that come from inside are the producer's.
        outputs_nonfinite: Whether one of these outputs holds NaN or infinity.
        gradients_nonfinite: Whether a gradient does.
        disturbed: Generators that ended elsewhere than the producer's, those of the process only
            where they moved in both: no vote where bits differ.
        not_run: Why nothing was run, or nothing can be compared, or "": named, and nobody's fault.
        trace: What the calls moved: "parameter a.weight", "buffer b.mean", "attribute c.n",
            "generator random". Looked for if asked; parameters always.
        hidden: What they moved outside of the module, and was put back.
        lost: What they moved outside of the module, and could not be put back.
        collectives: Collectives that the calls ran: their groups, or the one that was stopped, with
            the line that asked for it.
        error: Type and first line of the exception that ended the replay, or "".
    """

    outputs: Tensor | None = None
    gradients: Tensor | None = None
    inner_equal: bool = True
    outputs_nonfinite: bool = False
    gradients_nonfinite: bool = False
    disturbed: tuple[str, ...] = ()
    not_run: str = ""
    trace: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    error: str = ""


class GradientSum:
    """The gradients of several micro-batches, added up in the dtype of `.grad`.

    A sum may overflow where no part of it does.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, number: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add the gradient of parameter `number`."""
        part = gradient.detach().to(dtype)
        held = self._sums.get(number)
        self._sums[number] = part.clone() if held is None else held + part

    def nonfinite(self) -> bool:
        """Whether a sum holds NaN or infinity. Waits for the device."""
        return any(confirm_nonfinite(held) for held in self._sums.values())


class Observer(Protocol):
    """Looks on while a replay runs."""

    def running(self) -> AbstractContextManager[None]:
        """Entered around the user's code: each forward, and the backward."""
        ...

    def given(self, origin: str, tensor: Tensor) -> None:
        """A tensor that came with the micro-batch, before the user's code gets it."""
        ...

    def result(self, name: str, tensor: Tensor) -> None:
        """An output or a gradient, just before its digest is taken."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a replay does besides.

    Attributes:
        watch: Look for everything that the calls move.
        forbid_collectives: Stop the first collective before it is issued: its line is in
            `ReplayResult.collectives` and in the error. Slower.
        where_eager: Forbid them only where nothing is compiled, which would be compiled once more.
        scale_free: Start from ones instead of from the gradients that arrived.
        onto: Adds the gradients up.
        observer: Looks on.
        any_environment: Also where switches that decide bits are not those of the call.
    """

    watch: bool = False
    any_environment: bool = False
    forbid_collectives: bool = False
    where_eager: bool = False
    scale_free: bool = False
    onto: GradientSum | None = None
    observer: Observer | None = None


class Replayer:
    """Replays micro-batches on the module of a capture.

    Args:
        capture: Of this rank's module, attached.
        caller: How a call is made; the bare module by default.
    """

    def __init__(self, capture: CallCapture, caller: Caller | None = None) -> None:
        self.capture = capture
        self.caller: Caller = caller or BareCall(capture.module)
        if self.caller.compiled_around:
            capture.compiled = True  # nothing in the bare module shows it

    def run(self, micro_batch: MicroBatch, options: ReplayOptions | None = None) -> ReplayResult:
        """Make the calls and the backward of a micro-batch once more.

        Needs no other rank, and never raises: out of memory and any exception of the user's code
        are results. Waits for the device.

        Args:
            micro_batch: Of any rank with the same weights; nothing in it is changed.
            options: What to do besides.
        """
        with internals.dispatch_modes_off():
            return self._run(micro_batch, options or ReplayOptions())

    def _run(self, micro_batch: MicroBatch, options: ReplayOptions) -> ReplayResult:
        try:
            if reason := self._obstacle(micro_batch, options):
                return ReplayResult(not_run=reason)
            hidden = HiddenState(self.capture.module, self.capture.state.unwatched())
            with hidden:
                result = _Run(self.capture, self.caller, micro_batch, options).result()
            return replace(result, hidden=hidden.moved, lost=hidden.lost)
        except NotTransportable as error:
            let_through(error)
            return ReplayResult(not_run=str(error))
        except internals.CollectiveAttempted as error:
            return ReplayResult(collectives=(str(error),), error=f"{type(error).__name__}: {error}")
        except Exception as error:
            let_through(error)
            if internals.is_recompilation(error):
                return ReplayResult(not_run="the module would have to be compiled once more")
            first_line = (str(error).splitlines() or [""])[0]
            return ReplayResult(error=f"{type(error).__name__}: {first_line}")

    def run_packed(self, message: Tensor, options: ReplayOptions | None = None) -> ReplayResult:
        """Replay from the bytes of a message, as another rank would: for a self-audit.

        Args:
            message: What `pack` gave.
            options: What to do besides.
        """
        try:
            micro_batch = unpack(message, self.capture.device)
        except NotTransportable as error:
            return ReplayResult(not_run=str(error))
        return self.run(micro_batch, options)

    def self_audit(
        self, micro_batch: MicroBatch, options: ReplayOptions | None = None
    ) -> ReplayResult:
        """Pack this rank's own micro-batch and replay it from the bytes."""
        try:
            message = pack(micro_batch)
        except NotTransportable as error:
            return ReplayResult(not_run=str(error))
        return self.run_packed(message, options)

    def _obstacle(self, micro_batch: MicroBatch, options: ReplayOptions) -> str:
        """Why a replay here could not be compared, or ""."""
        if micro_batch.problem:
            return micro_batch.problem
        if not micro_batch.calls:
            return "no call of the module got a gradient"
        if micro_batch.signatures != self.capture.signatures.text:
            return "the compiled module has seen other shapes here, so its code may differ"
        here = numeric_environment()
        for call in () if options.any_environment else micro_batch.calls:
            there = call.environment
            compared = (k for k in there if k not in _JUDGED_BY_SELF_AUDIT)
            if name := next((k for k in compared if there[k] != here.get(k)), ""):
                return f"{name} was {there[name]} at the call and is {here[name]} here"
        weights = [call.weights for call in micro_batch.calls if call.weights is not None]
        if weights:
            own = to_pairs(self.capture.weights())
            if any(to_pairs(w) != own for w in weights):
                return "the weights here are not those of the call"
        return ""


class _Run:
    """One replay."""

    def __init__(
        self,
        capture: CallCapture,
        caller: Caller,
        micro_batch: MicroBatch,
        options: ReplayOptions,
    ) -> None:
        self._capture, self._caller = capture, caller
        self._micro_batch, self._options = micro_batch, options
        self._parameters = [p for _, p in capture.named]
        self._log = GradientLog(len(self._parameters))
        self._flags: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._roots: list[tuple[Tensor, Tensor]] = []
        self._inputs: list[Tensor] = []
        self._handles: list[Any] = []
        self._inner_equal = True
        self._disturbed: dict[str, None] = {}
        self._trace: dict[str, None] = {}

    def result(self) -> ReplayResult:
        capture = self._capture
        versions = [p._version for p in self._parameters]
        counts = internals.collective_counts()
        stopped = internals.NoCollectives(_OWN)
        with ExitStack() as stack:
            stack.enter_context(replay_in_progress())
            stack.enter_context(_kept(capture.device))
            state = stack.enter_context(capture.state.rebound())
            if state.lost:
                return ReplayResult(not_run=f"{state.lost[0]} has moved on this rank alone")
            if capture.compiled and not self._caller.compiled_around:
                stack.enter_context(internals.no_recompilation())
            # Under a mode compiled code would be compiled once more.
            options, eager = self._options, not capture.compiled
            forbid = options.forbid_collectives and (eager or not options.where_eager)
            if forbid and not eager:
                return ReplayResult(not_run=_NOT_STOPPABLE)
            if (options.watch or forbid) and eager:
                stack.enter_context(internals.GeneratorsKept())
            if forbid:
                stack.enter_context(stopped)
            stack.callback(self._unhook)
            stack.enter_context(torch.enable_grad())
            self._pass(state)
        if forbid and stopped.attempted:
            return ReplayResult(collectives=stopped.attempted, error="a collective was stopped")
        after = internals.collective_counts()
        for (name, parameter), version in zip(capture.named, versions, strict=True):
            if parameter._version != version:
                self._trace[f"parameter {name}"] = None
        return self._result(tuple(n for n in after if after[n] != counts.get(n, 0)))

    def _result(self, collectives: tuple[str, ...]) -> ReplayResult:
        device = self._capture.device
        for number, output in enumerate(self._outputs):
            self._tell_result(f"output {number}", output)
        table_N2 = self._capture.replicas.rows(self._log.table(device))
        rows = [digest_gradient(t) for t in self._outputs]
        empty = torch.zeros((0, 2), dtype=torch.int64, device=device)
        return ReplayResult(
            outputs=torch.cat([empty, *(row[None] for row in rows)]),
            gradients=table_N2,
            inner_equal=self._inner_equal,
            outputs_nonfinite=any(confirm_nonfinite(t) for t in self._outputs),
            gradients_nonfinite=any(bool(flag) for flag in self._flags),
            disturbed=tuple(self._disturbed),
            trace=tuple(self._trace),
            collectives=collectives,
        )

    def _pass(self, state: ReboundState) -> None:
        fresh = self._micro_batch.reentrant
        with ExitStack() as stack:
            leaves: list[Tensor] = list(self._parameters)
            if fresh:
                leaves = stack.enter_context(_fresh_leaves(self._capture.module, self._parameters))
            self._forwards(state)
            self._backward(leaves, fresh=fresh)

    def _forwards(self, state: ReboundState) -> None:
        with ExitStack() as stack:
            region = 0
            for call in self._micro_batch.calls:
                if not call.region or call.region != region:
                    stack.close()
                    stack.enter_context(call.autocast.entered())
                    region = call.region
                self._forward(call, state)

    def _forward(self, call: Call, state: ReboundState) -> None:
        capture = self._capture
        args, kwargs, module_state = call.inputs.thaw(capture.scope)
        self._inputs += [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.is_leaf]
        state.load(module_state)
        self._give("argument", (args, kwargs))
        self._give("state", dict(module_state.attributes))
        for name, buffer in module_state.buffers.items():
            self._give(f"buffer {spoken(name)}", buffer)
        before = self._watched(module_state)
        torch.set_default_dtype(call.default_dtype)
        call.generators.restore(capture.device)
        with capture.collecting() as collected, self._observed():
            self._caller.call(call.method, args, kwargs)
        self._compare_generators(call)
        self._compare_state(module_state, before)
        outputs = outputs_of(collected[-1]) if collected else []
        if len(outputs) != call.outputs:
            msg = f"{len(outputs)} tensors with a gradient were returned, not {call.outputs}"
            raise RuntimeError(msg)
        self._take(call, outputs)

    def _take(self, call: Call, outputs: Sequence[Tensor]) -> None:
        scope = self._capture.scope
        for number in sorted({*call.gradients, *call.inner}):
            output = outputs[number]
            self._outputs.append(output.detach())
            if number not in call.gradients:
                continue
            seed: Tensor = call.gradients[number].thaw(scope)
            if self._options.scale_free:
                seed = torch.ones_like(seed)
            self._give(f"gradient of output {len(self._outputs) - 1}", seed)
            if number not in call.inner:
                self._roots.append((output, seed))
                continue
            parts = call.inner[number].thaw(scope)
            edge = internals.edge_of(output)
            hook = self._substitute(edge.number, seed, digest_gradient(total(parts)))
            self._handles.append(edge.node.register_prehook(hook))

    def _substitute(self, index: int, seed: Tensor, expected: Tensor) -> Callable[..., Any]:
        """A hook that compares the part from inside and lets the whole gradient pass on."""

        def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            here = gradients[index]
            with internals.dispatch_modes_off():
                if here is None or not torch.equal(digest_gradient(here.detach()), expected):
                    self._inner_equal = False
            return (*gradients[:index], seed, *gradients[index + 1 :])

        return hook

    def _backward(self, leaves: Sequence[Tensor], *, fresh: bool) -> None:
        outputs, seeds = [o for o, _ in self._roots], [s for _, s in self._roots]
        micro_batch = self._micro_batch
        if not outputs:
            return
        with ExitStack() as stack:
            stack.callback(GradientHooks(leaves, self._arrived).remove)
            if micro_batch.autocast is not None:
                stack.enter_context(micro_batch.autocast.entered())
            if micro_batch.generators is not None:
                micro_batch.generators.restore(self._capture.device)
            if fresh:
                stack.enter_context(_foreign_gradients_kept(outputs, leaves))
            stack.enter_context(self._observed())
            if fresh:
                torch.autograd.backward(outputs, seeds)
                return
            wanted = [leaf for leaf in (*leaves, *self._inputs) if leaf.requires_grad]
            if wanted:
                torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)

    def _observed(self) -> AbstractContextManager[None]:
        observer = self._options.observer
        return nullcontext() if observer is None else observer.running()

    def _give(self, origin: str, value: Any) -> None:
        observer = self._options.observer
        if observer is None:
            return
        tensors = tensors_in(value)
        for number, tensor in enumerate(tensors):
            observer.given(origin if len(tensors) == 1 else f"{origin} {number}", tensor)

    def _tell_result(self, name: str, tensor: Tensor) -> None:
        if self._options.observer is not None:
            self._options.observer.result(name, tensor)

    def _arrived(self, number: int, gradient: Tensor) -> Tensor | None:
        with internals.dispatch_modes_off():
            return self._take_gradient(number, gradient)

    def _take_gradient(self, number: int, gradient: Tensor) -> Tensor | None:
        self._tell_result(f"gradient of {self._capture.named[number][0]}", gradient)
        self._log.add(number, gradient)
        self._look(gradient)
        if self._options.onto is not None:
            parameter = self._parameters[number]
            dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
            self._options.onto.add(number, gradient, dtype)
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return None
        # One zero in the gradient's shape: what the engine collects takes no memory.
        return gradient.new_zeros(()).expand(gradient.shape)

    def _look(self, gradient: Tensor) -> None:
        if gradient.device.type == "cpu":
            suspicious = not math.isfinite(probe(gradient).item())
            if suspicious and confirm_nonfinite(gradient):
                self._flags.append(torch.tensor(True, device="cpu"))
            return
        # Exact at once, because a GPU is asked only at the end, when the gradient is gone.
        values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
        self._flags.append(~torch.isfinite(values).all())

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # --- traces ---

    def _compare_generators(self, call: Call) -> None:
        now = read_generators(self._capture.device)
        expected = now if call.generators_after is None else call.generators_after
        # Exporters and loggers draw from Python's at any moment, in the step as in the replay: a
        # call that draws moves it in both.
        drawn = {*call.generators.differing(expected)} & {*call.generators.differing(now)}
        for name in expected.differing(now):
            if name in drawn or name not in HOST_GENERATORS:
                self._disturbed[name] = None
        if self._options.watch:
            for name in call.generators.differing(now):
                self._trace[f"generator {name}"] = None

    def _watched(self, state: ModuleState) -> tuple[Mapping[Any, Any], Any] | None:
        if not self._options.watch:
            return None
        watch = self._capture.state
        buffers = digest_tensors(list(state.buffers.values()))
        return watch.tokens(), dict(zip(state.buffers, to_pairs(buffers), strict=True))

    def _compare_state(
        self, state: ModuleState, before: tuple[Mapping[Any, Any], Any] | None
    ) -> None:
        if before is None:
            return
        tokens, digests = before
        now = self._capture.state.tokens()
        for name in (*tokens, *(n for n in now if n not in tokens)):
            if now.get(name) != tokens.get(name):
                self._trace[f"attribute {spoken(name)}"] = None
        buffers = dict(self._capture.state.buffers())
        pairs = to_pairs(digest_tensors(list(buffers.values())))
        after = dict(zip(buffers, pairs, strict=True))
        for name in (*digests, *(n for n in after if n not in digests)):
            if after.get(name) != digests.get(name):
                self._trace[f"buffer {spoken(name)}"] = None


@contextmanager
def _kept(device: torch.device) -> Iterator[None]:
    """Put generators and default dtype back."""
    generators, dtype = read_generators(device), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        generators.restore(device)


@contextmanager
def _fresh_leaves(module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Leaves that share the parameters' memory, in the module in their place."""
    trained = {id(p): p for p in (*module.parameters(), *parameters) if p.requires_grad}
    leaves = {key: _fresh_leaf(parameter) for key, parameter in trained.items()}
    owners = [(m, n, p) for m in module.modules() for n, p in m._parameters.items()]
    flat = [(m, m._flat_weights) for m in module.modules() if isinstance(m, nn.RNNBase)]
    try:
        for owner, name, parameter in owners:
            if id(parameter) in leaves:
                owner._parameters[name] = leaves[id(parameter)]
        for rnn, weights in flat:
            rnn._flat_weights = [leaves.get(id(w), w) for w in weights]
        for parameter in trained.values():
            parameter.requires_grad_(False)
        yield [leaves.get(id(parameter), parameter) for parameter in parameters]
    finally:
        for parameter in trained.values():
            parameter.requires_grad_(True)
        for owner, name, swapped in owners:
            owner._parameters[name] = swapped
        for rnn, weights in flat:
            rnn._flat_weights = weights


def _fresh_leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    for hook in tuple((parameter._backward_hooks or {}).values()):
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    leaf.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    return leaf


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


@contextmanager
def _foreign_gradients_kept(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keep `.grad` of leaves in the graph that are not the module's, such as one in a closure."""
    ours = {id(leaf) for leaf in leaves}
    nodes = internals.walk(o.grad_fn for o in outputs if o.grad_fn is not None)
    reached: list[Any] = [node.variable for node in nodes if hasattr(node, "variable")]
    foreign = [(leaf, leaf.grad) for leaf in reached if id(leaf) not in ours]
    try:
        for leaf, _ in foreign:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in reversed(foreign):
            leaf.grad = gradient
