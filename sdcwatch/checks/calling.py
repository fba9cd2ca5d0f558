"""How a call of the module is made once more: the one place that knows of frameworks and compilers.

A replay calls the bare module. Two things stand in the way. Lightning and Fabric run another method
through the call: for its length they put a closure in the place of `forward`, which puts the
original back and runs the method. And a module compiled together with DDP around it runs other code
than the bare one, so the compiled object is called, with DDP's own work switched off.
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
        """Call the module, or one of its methods through it."""
        with _redirected(self._module, method):
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
