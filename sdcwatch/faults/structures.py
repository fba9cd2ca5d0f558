"""Tensors inside the nested values that models return and loops pass around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.damage import Damage
from sdcwatch.faults.messages import nearest
from sdcwatch.faults.plan import Fault


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


def find_tensor(output: Any, module: str) -> int:
    """Position of the first floating-point leaf of a module's output.

    Raises:
        ConfigurationError: There is none.
    """
    leaves, _ = tree_flatten(output)
    where = _first_tensor(leaves, floating=True)
    if where is None:
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
