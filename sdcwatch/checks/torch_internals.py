"""Every undocumented use of torch in the checks: each once, with what it relies on.

Tests in ``tests/checks/test_torch_internals.py`` hold each of them; a new torch that changes one
fails there first. All of it is present from torch 2.8 to 2.13.
"""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_F = TypeVar("_F", bound=Callable[..., Any])
_ENGINE = torch.autograd.Variable._execution_engine


class Edge(NamedTuple):
    """Where a gradient arrives: an input of a node of the autograd graph."""

    node: Node
    number: int


class RunningBackward(NamedTuple):
    """A backward that is going on, in any thread.

    Attributes:
        roots: The nodes it began from.
        retains_graph: Whether its graph can be run through once more.
        accumulates: Whether it adds to `.grad`; `torch.autograd.grad` does not.
    """

    roots: tuple[Node, ...]
    retains_graph: bool
    accumulates: bool


# --- the graph ---


def edge_of(tensor: Tensor) -> Edge:
    """The place where the gradient of a tensor arrives; of a leaf, its accumulation."""
    node = tensor.grad_fn
    if node is not None:
        return Edge(node, tensor.output_nr)
    return Edge(accumulation_of(tensor), 0)


def accumulation_of(leaf: Tensor) -> Node:
    """The node that adds to the `.grad` of a leaf.

    As `torch.autograd.graph.get_gradient_edge` does it: torch makes a view of the leaf to find it,
    an operation that a mode would see.
    """
    with dispatch_modes_off():
        grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            view: Any = leaf.view_as(leaf)
            found: Node = view.grad_fn.next_functions[0][0]
        finally:
            torch._C._set_grad_enabled(grad_enabled)
    return found


def accumulates(node: Node) -> bool:
    """Whether a node adds to the `.grad` of a leaf."""
    return node.name() == "torch::autograd::AccumulateGrad"


def is_reentrant_checkpoint(node: Node) -> bool:
    """Whether a node runs a backward of its own and so refuses `torch.autograd.grad`.

    Such a checkpoint is a custom function, and every known one (torch, fairscale, Megatron) has
    "Checkpoint" in its name.
    """
    return "Checkpoint" in node.name()


def walk(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> set[Node]:
    """Every node reached from `roots`, themselves included, not going through `stop`."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen or (stop is not None and stop(node)):
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return seen


def tags_of(node: Node, key: str) -> list[Any]:
    """A list that lives as long as a node does: kept in its `metadata`, which is the node's own."""
    metadata: Any = node.metadata
    tags: list[Any] = metadata.setdefault(key, [])
    return tags


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one storage; asks neither for its address."""
    dense = one.layout is torch.strided and other.layout is torch.strided
    return dense and bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


# --- the engine ---


def current_graph_task() -> int:
    """The number of the backward that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def will_accumulate(leaf: Tensor) -> bool:
    """Whether the backward of this thread adds to the `.grad` of a leaf.

    The engine is asked, as `torch.autograd.graph.register_multi_grad_hook` does. About a leaf it
    refuses to answer inside `torch.autograd.grad`, which adds to none.
    """
    try:
        return torch._C._will_engine_execute_node(accumulation_of(leaf))
    except RuntimeError:
        return False


def running_backwards() -> list[RunningBackward]:
    """The backwards that are going on, read off the stacks of all threads.

    The engine does not tell its roots. `torch.autograd.backward` and `Tensor.backward` wait in
    ``torch.autograd.graph._engine_run_backward`` with the roots in a local variable; looking there
    changes nothing, where wrapping `torch.autograd.backward` would change what every other caller
    sees. On a GPU hooks run in threads of the engine, hence all of them; in a thread of Python's
    the own stack has it all, and the frames of another thread that runs are no safe thing to read.
    """
    own = _backwards_on(sys._getframe())
    if own and not isinstance(threading.current_thread(), threading._DummyThread):
        return own
    return [one for top in sys._current_frames().values() for one in _backwards_on(top)]


def ending_backwards() -> list[RunningBackward]:
    """As `running_backwards`, in a callback at the end of one: it runs in the caller's thread.

    On a GPU it may run in another, hence all of them where this one has none.
    """
    return _backwards_on(sys._getframe()) or running_backwards()


def _backwards_on(frame: FrameType | None) -> list[RunningBackward]:
    code = getattr(torch.autograd.graph._engine_run_backward, "__code__", None)
    found = []
    while frame is not None:
        if frame.f_code is code:
            found.append(_read(frame.f_locals))
        frame = frame.f_back
    return found


def _read(variables: Any) -> RunningBackward:
    given, rest = variables["t_outputs"], variables["args"]
    roots = [root.grad_fn if isinstance(root, Tensor) else root.node for root in given]
    retains = bool(rest[1]) if len(rest) > 1 else True
    accumulating = bool(variables["kwargs"].get("accumulate_grad", True))
    return RunningBackward(tuple(r for r in roots if r is not None), retains, accumulating)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward of this thread has ended, behind DDP's finalisation.

    Queued twice: DDP queues its own callback at the last gradient, later than ours is queued.
    """
    _ENGINE.queue_callback(lambda: _ENGINE.queue_callback(callback))


# --- modes ---


def capturing_cuda_graph() -> bool:
    """Whether kernels are recorded for a CUDA graph now instead of being run."""
    # A build without CUDA has no such function.
    initialised: Callable[[], bool] = torch.cuda.is_initialized
    return initialised() and bool(torch.cuda.is_current_stream_capturing())


def in_functorch() -> bool:
    """Whether code runs under `torch.func`: vmap, grad, jvp and the like."""
    return torch._C._functorch.maybe_current_level() is not None


def dispatch_modes_off() -> AbstractContextManager[Any]:
    """Hide what is done inside from dispatch modes of the user's, such as counters of FLOPs."""
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, ten times cheaper
        return nullcontext()
    return _disable_current_modes()


def saved_tensor_hooks_active() -> bool:
    """Whether hooks pack what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@functools.lru_cache(maxsize=4)
def _one(kind: str) -> Tensor:
    return torch.ones((1, 1), device=kind, requires_grad=True)


def cached_cast(kind: str) -> Node | None:
    """The node of autocast's cached cast of one leaf; the same as long as one region lasts.

    Autocast keeps its casts of float32 leaves until the outermost region ends. So two calls in one
    region see one node and share their casts, which adds their gradients up in the lower precision.

    Args:
        kind: Type of the device.

    Returns:
        None where nothing is cast or kept.
    """
    if not (torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()):
        return None
    with torch.enable_grad():
        product = torch.mm(_one(kind), _one(kind))
    return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]


# --- compiled modules ---


def hidden_from_compiler(function: _F) -> _F:
    """`function`, not traced by torch.compile. DDP has loaded the compiler already, if it is there.

    Importing it takes seconds, so it is not asked for where nobody has.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    hidden: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return hidden


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has put in place of the module's call; None where it has not."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace what `compiled_call` returns."""
    module._compiled_call_impl = call


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one inside it, runs through torch.compile."""
    return any(
        type(inner).__name__ == "OptimizedModule" or compiled_call(inner) is not None
        for inner in module.modules()
    )


@contextmanager
def no_recompilation() -> Iterator[None]:
    """Compiled code that would have to be compiled again raises, see `is_recompilation`."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


class CompiledAgain(RuntimeError):
    """Code was compiled where what had been compiled was to run."""


def graphs_compiled() -> int:
    """How many graphs with operations on tensors torch.compile has made in this process.

    Inside a compiled region `no_recompilation` comes too late. Frames without such operations, as
    DDP's own are, count nothing.
    """
    utilities = sys.modules.get("torch._dynamo.utils")
    return 0 if utilities is None else int(utilities.counters["stats"]["unique_graphs"])


def is_recompilation(error: BaseException) -> bool:
    """Whether an error was raised because of `no_recompilation`, or is `CompiledAgain`."""
    if isinstance(error, CompiledAgain):
        return True
    return "fail_on_recompile" in str(error) or "Recompile" in type(error).__name__


# --- modules ---


def calls_in_progress(module: nn.Module) -> int:
    """How often a module is on the stack of this thread: what nn.Module's own call says."""
    codes = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)
    count, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is codes[0] and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


# --- process groups ---


def collective_counts() -> dict[str, int]:
    """How many collectives each process group of this rank has begun.

    A group counts its own operations for the flight recorder; reading the count sends nothing.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    if world is None:
        return {}
    names = {group: world.pg_names.get(group, str(id(group))) for group in tuple(world.pg_map)}
    return {str(name): _count(group) for group, name in names.items()}


def _count(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a group without a backend, or one that is shut down, counts nothing
        return 0


class CollectiveAttempted(RuntimeError):
    """Code ran a collective where none may happen; it was stopped before it was issued."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops the first collective before it is issued, and says which line asked for it.

    Collectives go through the dispatcher as operations of ``c10d``. A mode sees every operation, so
    a replay under it is slower: for preflight, and for replays on some ranks only.

    Args:
        own: Folders whose frames are not the user's.

    Attributes:
        attempted: What was stopped, also where the user's code has caught the error.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = tuple(own)
        self.attempted: tuple[str, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything through but collectives."""
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            said = self._said(func)
            self.attempted = (*self.attempted, said)
            raise CollectiveAttempted(said)
        return func(*args, **(kwargs or {}))

    def _said(self, func: Any) -> str:
        """The operation, and the innermost line of the user's code that led to it."""
        name = str(func._schema.name).split("::")[-1].strip("_")
        found = _users_line(self._own, beyond=True)
        if found is None:
            return name
        line = source_line(*found)
        return f"{name} in {line}" if line.startswith("`") else f"{name}, {line}"


def operations_line(own: str) -> tuple[str, int] | None:
    """File and line of the user's code that runs the operation which a dispatch mode of ours sees.

    Args:
        own: Folder of ours. The first frame from there is the one that makes the call again; what
            is further out, as the training loop, runs no operation of the call.
    """
    return _users_line((own,), beyond=False)


def _users_line(own: tuple[str, ...], *, beyond: bool) -> tuple[str, int] | None:
    """Of the innermost frame that is not ours, torch's or a package's.

    Args:
        own: Folders of ours.
        beyond: Look further out than our own frames, too; else our modes alone are passed.
    """
    passed = (*own, __file__, *torch.__path__)
    frame: FrameType | None = sys._getframe(1)
    # The compiler's frames are between those of the modes where it is loaded.
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        mode = not beyond and name in ("__torch_dispatch__", "__torch_function__")
        if not (beyond or mode) and file.startswith(own):
            return None
        if not (mode or file.startswith(passed) or "site-packages" in file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=1024)
def source_line(file: str, line: int) -> str:
    """A line of code and where it stands: "`y = x + 1`, model.py:12"."""
    source = linecache.getline(file, line).strip()
    return f"`{source}`, {file}:{line}" if source else f"{file}:{line}"


class GeneratorsKept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts back, on leaving, the generators that operations were handed.

    A generator that a script made for itself is found in no module; a replay would advance it, and
    the run would go on with other numbers. Slower, as any mode: for preflight.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first: list[tuple[torch.Generator, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember the state of a generator before the first operation that draws from it."""
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and all(value != g for g, _ in self._first):
                self._first.append((value, value.get_state()))
        return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        """Leave the mode and put them back."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for generator, state in self._first:
            generator.set_state(state)


def live_grad_scalers() -> list[Any]:
    """Every enabled `torch.amp.GradScaler` of this process that has scaled a loss.

    Relies on: a scaler makes its scale, `_scale`, at its first `scale()`. Nothing registers
    scalers, so the garbage collector is asked: seldom.
    """
    found: list[Any] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler)
    ]
    return [scaler for scaler in found if scaler.is_enabled() and scaler._scale is not None]


_STEPS_OF_SCALERS = frozenset(
    (torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__)
)
_FRAMES = 32
"""How far out a scaler is looked for: frameworks and schedulers wrap `step` several times."""


def stepping_grad_scaler() -> Any:
    """The `torch.amp.GradScaler` whose `step` runs in this thread; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code in _STEPS_OF_SCALERS:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def grad_scaler_has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a scaler has unscaled the gradients of an optimizer since its last `update()`."""
    return id(optimizer) in scaler._per_optimizer_states


# --- operations ---


def running_node() -> Node | None:
    """The node whose backward runs in this thread; None outside of one.

    What anomaly mode and the profiler's annotations ask too.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node


def next_sequence_number() -> int:
    """The number that the next node of this thread gets; nodes are numbered as they are made."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def sequence_number(node: Node) -> int:
    """The number of a node; accumulations have the highest there is."""
    number: int = node._sequence_nr()
    return number


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others, as long as a `weak_storage` of it is held."""
    key: int = storage._cdata
    return key


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """Keeps the key of a storage from being used again, not its memory; `expired()` when gone."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def torch_function_off() -> AbstractContextManager[Any]:
    """Hide what is done inside from subclasses and modes that override functions of torch."""
    off: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return off
