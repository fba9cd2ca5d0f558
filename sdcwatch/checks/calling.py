"""How a call of the module is made once more: the one place that knows of frameworks and compilers.

A replay calls the bare module. Two things stand in the way. Lightning and Fabric run another method
through the call: for its length they put a closure in the place of `forward`, which puts the
original back and runs the method. And a module compiled together with DDP around it runs other code
than the bare one, so the compiled object is called, with DDP's own work switched off.

Under Lightning's Trainer the module that DDP wraps is called for `training_step`, which logs and
counts and, in manual optimisation, runs backwards of its own. So what is captured there are the
outermost calls *inside* it: see `Entrances`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from sdcwatch.checks import torch_internals as internals


class Caller(Protocol):
    """A way to make a call once more."""

    @property
    def covers(self) -> str:
        """What runs in a replay, for the preflight record."""
        ...

    @property
    def compiled_around(self) -> bool:
        """Whether the module was compiled with DDP around it."""
        ...

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the module; what it returns is collected by the capture's own hook."""
        ...


def redirected_method(module: nn.Module) -> str:
    """The method that a redirected forward runs; "" where `forward` is its own.

    The closure of Lightning and of Fabric holds the name in a variable called `method_name`.
    """
    forward = module.__dict__.get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "method_name" not in names:
        return ""
    held: Any = forward.__closure__[names.index("method_name")].cell_contents  # type: ignore[union-attr]
    return held if isinstance(held, str) else ""


class Entrances:
    """The modules whose outermost calls are captured.

    That is the module that DDP wraps. Of a `LightningModule` under its Trainer it is also every
    module that it may call inside `training_step`; then a call for `training_step` only leads to
    theirs. Modules in those of torch.nn are left out, and so are layers with a fast path of their
    own for evaluation, which a hook would switch off.

    Args:
        module: The module that DDP wraps.

    Attributes:
        inside: The calls inside of `training_step` are captured.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inside = _steps_in_lightning(module)
        self.below: dict[str, nn.Module] = dict(_callable_parts(module)) if self.inside else {}
        self._names = {id(part): name for name, part in self.below.items()}

    def leads_on(self, module: nn.Module) -> bool:
        """Whether the call that begins only leads to those that are captured."""
        return self.inside and module is self.module and bool(redirected_method(module))

    def method(self, module: nn.Module) -> str:
        """What a replay has to call: "" for the module, the name of a method, or a part of it."""
        if module is self.module:
            return redirected_method(module)
        return _PART + self._names[id(module)]

    def widen(self) -> str:
        """Capture `training_step` itself from now on.

        Returns:
            What changes, for a person; "" where it cannot be done: the backwards of manual
            optimisation run inside of it.
        """
        if not self.inside or not getattr(self.module, "automatic_optimization", True):
            return ""
        self.inside = False
        return "training_step itself is replayed, with log and log_dict muted"


_PART = "call "
"""Before the name of a submodule, where a method would stand."""
_FAST_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _is_lightning(module: nn.Module) -> bool:
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def _steps_in_lightning(module: nn.Module) -> bool:
    """Under a Trainer; Fabric calls what the user's loop calls."""
    held = module.__dict__
    trained = held.get("_trainer") is not None and held.get("_fabric") is None
    return trained and _is_lightning(module) and held.get("_compiler_ctx") is None


def _callable_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if any(kind.__name__ == "Metric" for kind in type(child).__mro__):
            continue  # of torchmetrics: holds no weights
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if not container and not isinstance(child, _FAST_PATH) and _holds_state(child):
            yield path, child
        if container or not type(child).__module__.startswith("torch.nn."):
            yield from _callable_parts(child, f"{path}.")


def _holds_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def put_outermost(module: nn.Module, hooks: tuple[int, int] | None) -> str:
    """Put two hooks of a module around those that were registered later.

    Args:
        module: The module, whose call begins.
        hooks: Numbers of the first forward pre-hook and of the last forward hook; None for none.

    Returns:
        Why this call comes too soon for it, or "".
    """
    if hooks is None:
        return ""
    first, last = hooks
    after: Any = module._forward_hooks
    if next(reversed(after), last) != last:
        after.move_to_end(last)  # in time: they are listed when the forward has run
    before: Any = module._forward_pre_hooks
    if next(iter(before), first) == first:
        return ""
    before.move_to_end(first, last=False)
    return "a hook changed the inputs before the guard saw them, in this call alone"


class BareCall:
    """Calls the bare module, as DDP does."""

    compiled_around = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def covers(self) -> str:
        """What runs in a replay."""
        if internals.compiled_call(self._module) is not None:
            return "the module as compiled by module.compile()"
        if type(self._module).__name__ == "OptimizedModule":
            return "the module as compiled before DDP"
        return "parts that are compiled, compiled" if internals.is_compiled(self._module) else ""

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the module, one of its methods through it, or a part of it."""
        if method.startswith(_PART):
            self._module.get_submodule(method[len(_PART) :])(*args, **kwargs)
            return
        with _redirected(self._module, method), _muted(self._module, method):
            self._module(*args, **kwargs)


class CompiledAroundDdp:
    """Calls what was compiled with DDP in it; DDP neither broadcasts nor reduces meanwhile.

    The compiler breaks off where DDP enters its module, so that the code of the module is the same
    as in training, whatever DDP does around it.

    Args:
        compiled: The compiled object.
        ddp: The DDP module in it.
        module: The bare module in that.
    """

    covers = "the module as compiled with DDP around it"
    compiled_around = True

    def __init__(self, compiled: Callable[..., Any], ddp: Any, module: nn.Module) -> None:
        self._compiled, self._ddp, self._module = compiled, ddp, module

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the compiled object.

        Raises:
            CompiledAgain: The module was compiled once more for it.
        """
        known = internals.graphs_compiled()
        with _silent(self._ddp), _redirected(self._module, method):
            self._compiled(*args, **kwargs)
        if internals.graphs_compiled() != known:
            raise internals.CompiledAgain


class _NoRebuild:
    """Stands for DDP's reducer: the first call after a backward has it broadcast new buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer
        self._rebuild_buckets = internals.hidden_from_compiler(lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


@contextmanager
def _silent(ddp: Any) -> Iterator[None]:
    """DDP runs no collective: no buffers, no buckets, nothing about ranks that have joined."""
    stand_ins = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        "reducer": _NoRebuild(ddp.reducer),
        "_join_config": ddp._join_config._replace(enable=False),
    }
    before = {name: getattr(ddp, name) for name in stand_ins}
    ddp.__dict__.update(stand_ins)
    try:
        yield
    finally:
        ddp.__dict__.update(before)


def choose_caller(given: Callable[..., Any], ddp: Any, module: nn.Module) -> Caller:
    """How calls are made once more.

    Args:
        given: What the training loop calls.
        ddp: The DDP module in it; None without one.
        module: The bare module.
    """
    if ddp is None:
        return BareCall(module)
    around = given is not ddp and type(given).__name__ == "OptimizedModule"
    if around or internals.compiled_call(ddp) is not None:
        return CompiledAroundDdp(given, ddp, module)
    return BareCall(module)


@contextmanager
def _redirected(module: nn.Module, method: str) -> Iterator[None]:
    """For one call, another method in the place of `forward`, as the frameworks do it."""
    if not method:
        yield
        return
    own = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return getattr(module, method)(*args, **kwargs)

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        restore()


def mutes_logging(module: nn.Module, method: str) -> bool:
    """Whether a replay of this method leaves out what it logs: of a LightningModule's step."""
    return bool(method) and not method.startswith(_PART) and _is_lightning(module)


@contextmanager
def _muted(module: nn.Module, method: str) -> Iterator[None]:
    """For a replay of a LightningModule's step, `log` and `log_dict` that do nothing.

    Lightning would add what is logged to the results of the step, and reduce it over the ranks.
    """
    if not mutes_logging(module, method):
        yield
        return
    held = module.__dict__
    before = {name: held.get(name) for name in ("log", "log_dict")}
    for name in before:
        held[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name, own in before.items():
            held.pop(name)
            if own is not None:
                held[name] = own
