"""The names in a plan, held against the model and the optimizer before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from sdcwatch.errors import ConfigurationError, expect, nearest
from sdcwatch.faults.damage import Damage, check_dtype
from sdcwatch.faults.plan import Fault, FaultPlan

_UPDATE_SITES = ("weight", "optimizer_state")


def without_compile(model: nn.Module) -> nn.Module:
    """The module inside a ``torch.compile`` wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def is_ddp(model: nn.Module) -> bool:
    """Whether it is a DDP model, compiled or not."""
    return isinstance(without_compile(model), DistributedDataParallel)


def bare_module(model: nn.Module) -> nn.Module:
    """The user's module inside DDP and compile wrappers."""
    inner = without_compile(model)
    if isinstance(inner, DistributedDataParallel):
        return without_compile(inner.module)
    return inner


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that really steps, inside wrappers that hold it as ``.optimizer``."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def check_plan(plan: FaultPlan, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Hold every fault of a plan, of all ranks, against the bare module and the optimizer.

    The result is the same on every rank, so that all of them fail together.

    Raises:
        ConfigurationError: A name is unknown, an element or a bit is beyond the tensor, or the
            plan needs an optimizer and there is none.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))
    for fault in plan.faults:
        if fault.site in ("activation", "replay") and fault.target is not None:
            expect_name(fault.target, modules, "module")
        elif fault.site == "buffer":
            _check_tensor(fault, buffers, "buffer")
        elif fault.site in ("gradient", "all_reduce", *_UPDATE_SITES):
            _check_parameter(fault, parameters)
        if fault.site in _UPDATE_SITES:
            do = "Pass the optimizer to Injector.attach()."
            expect(optimizer is not None, f"an optimizer for site {fault.site!r}", None, do)


def expect_name(name: str, known: Mapping[str, object], what: str) -> None:
    """Raise `ConfigurationError` with the nearest names unless the name is known."""
    expect(name in known, f"the name of a {what} of the model", name, nearest(name, known))


def _check_parameter(fault: Fault, parameters: Mapping[str, nn.Parameter]) -> None:
    if fault.target is not None:
        _check_tensor(fault, parameters, "parameter")
        needs = parameters[fault.target].requires_grad
        do = "Name a parameter that is trained."
        expect(needs, "a parameter that requires a gradient", fault.target, do)
        return
    for name, parameter in parameters.items():
        check_dtype(fault, parameter.dtype, f"parameter {name!r}")


def _check_tensor(fault: Fault, known: Mapping[str, Tensor], what: str) -> None:
    assert fault.target is not None
    expect_name(fault.target, known, what)
    tensor = known[fault.target]
    check_dtype(fault, tensor.dtype, f"{what} {fault.target!r}")
    size = tensor.numel()
    if isinstance(fault.element, int) and fault.site != "optimizer_state":
        expected = f"`element` below {size}, the size of {what} {fault.target!r}"
        expect(fault.element < size, expected, fault.element, "Indices are flat.")


def state_tensor(fault: Fault, parameter: Tensor, state: Mapping[str, object]) -> Tensor | None:
    """The tensor of the optimizer's state that a fault is about; None while there is no state.

    Raises:
        ConfigurationError: The state has no such entry, or none that is shaped like the parameter.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if not state:
        return None
    if fault.key is not None:
        do = nearest(fault.key, tensors)
        expect(fault.key in tensors, f"an entry of the state of {fault.target!r}", fault.key, do)
        return tensors[fault.key]
    for value in tensors.values():
        if value.shape == parameter.shape and value.is_floating_point():
            return value
    msg = (
        f"Expected optimizer state shaped like {fault.target!r}, but got {sorted(state)}. "
        "Name an entry with `key`, or use an optimizer that keeps such state."
    )
    raise ConfigurationError(msg)


def replace_tensor(
    value: Any,
    where: int,
    damage: Callable[..., Damage | None],
    join: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Any:
    """The value with one of its leaves damaged; the value itself if nothing was due.

    Args:
        value: Any nesting of tuples, lists, dicts and registered classes.
        where: Position of the leaf, from `find_entry` or `find_tensor`.
        damage: Damages a copy of ``tensor=`` if it is due.
        join: Makes the new leaf from the old one and the damaged copy; default the copy.
    """
    leaves, spec = tree_flatten(value)
    done = damage(tensor=leaves[where])
    if done is None:
        return value
    leaves[where] = done.tensor if join is None else join(leaves[where], done.tensor)
    return tree_unflatten(leaves, spec)


def find_tensor(output: Any, module: str) -> int | None:
    """Position of the first floating-point leaf of a module's output; None if all are empty.

    Raises:
        ConfigurationError: There is none.
    """
    leaves, _ = tree_flatten(output)
    where = _first_tensor(leaves, floating=True)
    empty = any(isinstance(x, Tensor) and x.is_floating_point() and not x.numel() for x in leaves)
    if where is None and not empty:
        msg = (
            f"Expected a floating-point tensor from module {module!r}, but got "
            f"{type(output).__name__} without one. Name a module that returns one."
        )
        raise ConfigurationError(msg)
    return where


def find_entry(batch: Any, fault: Fault) -> int:
    """Position of the leaf of a micro-batch that a fault is about.

    Raises:
        ConfigurationError: There is no such tensor.
    """
    paths, _ = tree_flatten_with_path(batch)
    names = [keystr(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    if fault.target is None:
        where = _first_tensor(leaves, floating=fault.kind in ("nan", "inf", "scale"))
        if where is not None:
            return where
        msg = (
            f"Expected a tensor for kind {fault.kind!r} in the micro-batch, but got {names}. "
            "Use another kind, or name an entry with `target`."
        )
        raise ConfigurationError(msg)
    tensors = {n: i for i, n in enumerate(names) if isinstance(leaves[i], Tensor)}
    for spelling in (fault.target, f"[{fault.target}]", f"['{fault.target}']"):
        if spelling in tensors:
            return tensors[spelling]
    msg = (
        f"Expected a tensor of the micro-batch as `target`, but got {fault.target!r}. "
        f"{nearest(fault.target, tensors)}"
    )
    raise ConfigurationError(msg)


def _first_tensor(leaves: Sequence[Any], *, floating: bool) -> int | None:
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            continue
        if not floating or leaf.is_floating_point() or leaf.is_complex():
            return i
    return None
