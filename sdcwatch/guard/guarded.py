"""What is guarded: the model as the loop calls it, what DDP and torch.compile hide, its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.config import GuardConfig
from sdcwatch.core.fingerprint import split_local
from sdcwatch.core.introduction import Schema
from sdcwatch.core.text import count, list_names
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.hook import GradientProbes, released_probes
from sdcwatch.guard.loss_scale import LossScale
from sdcwatch.guard.optimizer import Steppers, held_by, steppers

_WRAPPED_IN = ("_orig_mod", "_forward_module")
"""Where torch.compile and Fabric keep what they wrap."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What is guarded, as `sdcwatch.init` was given it.

    Attributes:
        model: As the loop calls it.
        given: The same without what frameworks put around it: DDP, or what torch.compile made.
        ddp: The DDP wrapper, or None.
        module: What DDP calls: the bare module, compiled or not.
        optimizers: Those that take step hooks: the innermost ones, and what is around them.
        named: Name and parameter, frozen ones included.
        device: Device of the module.
        loss_scale: In the gradients of the model.
        wrappers: What steps around optimizers and takes no hooks.
        local: Names of parameters and buffers that belong to each rank alone.
        spoken: Each parameter's name for a person: of a tied weight, all its names.
        schema: Name, shape and dtype of each tensor that is the same on every rank.
        unused: Patterns of the option `local` that match nothing here.
        notes: What a person should know of what is not guarded.
    """

    model: torch.nn.Module
    given: torch.nn.Module
    ddp: DistributedDataParallel | None
    module: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    named: tuple[tuple[str, torch.nn.Parameter], ...]
    device: torch.device
    loss_scale: LossScale = field(default_factory=LossScale)
    wrappers: tuple[Any, ...] = ()
    local: frozenset[str] = frozenset()
    spoken: Mapping[str, str] = field(default_factory=dict)
    schema: Schema = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[tuple[str, torch.nn.Parameter], ...]:
        """Name and parameter, of those that are replicas."""
        return tuple((n, p) for n, p in self.named if n not in self.local)

    @property
    def trained(self) -> tuple[tuple[str, torch.nn.Parameter], ...]:
        """Name and parameter, of those that need a gradient now."""
        return tuple((n, p) for n, p in self.named if p.requires_grad)

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced; None for the default group."""
        return None if self.ddp is None else self.ddp.process_group

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is around the model, inside DDP, or on a part of it."""
        return is_compiled(self.given, self.module)

    @property
    def synchronises(self) -> bool:
        """Whether DDP reduces gradients in the backward of the call that it makes now."""
        return self.ddp is None or bool(self.ddp.require_backward_grad_sync)

    def replicated(self, *, buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        return replicas(self.module, self.compared, self.local, buffers=buffers)


def replicas(
    module: torch.nn.Module,
    compared: Sequence[tuple[str, torch.Tensor]],
    local: Collection[str],
    *,
    buffers: bool,
) -> list[tuple[str, torch.Tensor]]:
    """Parameters, and if asked for the floating-point buffers, that are the same on every rank."""
    tensors = list(compared)
    if buffers:
        floating = (one for one in module.named_buffers() if one[1].is_floating_point())
        tensors += [(n, b) for n, b in floating if plain_name(n) not in local]
    return tensors


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what Fabric puts around it."""
    inner = model.__dict__.get("_modules", {}).get("_forward_module")
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def bare_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, torch.compile and Fabric."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := _inside(model)) is not None:
            model = inner
        else:
            return model


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, also inside Fabric's module, around or inside torch.compile; or None."""
    inner: torch.nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = _inside(inner)
    return inner


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    children = model.__dict__.get("_modules", {})
    found = (children.get(name) for name in _WRAPPED_IN)
    return next((child for child in found if isinstance(child, torch.nn.Module)), None)


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile puts in between."""
    return name.replace("_orig_mod.", "")


def ignored_by_ddp(ddp: DistributedDataParallel | None) -> frozenset[str]:
    """Names of the parameters and buffers in DDP's ignore list, which it neither sends nor reduces.

    One that the module holds under several names is ignored under each of them, or not at all.
    """
    if ddp is None:
        return frozenset()
    listed = set(getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ()))
    delayed = {id(p) for p in getattr(ddp, "_delay_all_reduce_params", ())}
    names: dict[int, set[str]] = {}
    for name, tensor in (
        *ddp.module.named_parameters(remove_duplicate=False),
        *ddp.module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), set()).add(name)
    every = (held for one, held in names.items() if one not in delayed and held <= listed)
    return frozenset(plain_name(name) for held in every for name in held)


def what_is_guarded(model: torch.nn.Module, optimizer: Any, config: GuardConfig) -> Guarded:
    """Check what `sdcwatch.init` was given, on this rank alone, and say what of it is guarded.

    Raises:
        ConfigurationError: Something cannot be guarded; the message says what to do.
    """
    if not isinstance(model, torch.nn.Module):
        msg = (
            f"Expected `model` to be a torch.nn.Module, but got {type(model)}. Pass the DDP model."
        )
        raise ConfigurationError(msg)
    found = _look_through(optimizer)
    bare, given, ddp = bare_module(model), unwrapped(model), find_ddp(model)
    module = given if ddp is None else ddp.module
    ignored, named = ignored_by_ddp(ddp), tuple(bare.named_parameters())
    spoken = spoken_names(module, named)
    _refuse_sharding(model, [o for each in found for o in each.optimizers])
    _require_ddp(model, ddp, config)
    optimizers = _updating(found, {id(p) for _, p in named})
    names = [*(n for n, _ in named), *(n for n, _ in bare.named_buffers())]
    _, left_out, unused = split_local(names, local=config.local, ignored=ignored)
    local = frozenset(left_out)
    if local.issuperset(n for n, _ in named):
        msg = (
            f"Expected parameters that are the same on every rank, but got `local` {config.local} "
            f"and DDP's ignore list, which leave out all {len(named)}. Name fewer of them."
        )
        raise ConfigurationError(msg)
    compared = [(n, p) for n, p in named if n not in local]
    same = replicas(module, compared, local, buffers=config.buffers)
    return Guarded(
        model=model,
        given=given,
        ddp=ddp,
        module=module,
        optimizers=optimizers,
        named=named,
        device=named[0][1].device,
        loss_scale=LossScale(config.scaler),
        wrappers=_each_once([w for each in found for w in each.wrappers]),
        local=local,
        spoken=spoken,
        schema=tuple((name, str(tuple(t.shape)), str(t.dtype)) for name, t in same),
        unused=unused,
        notes=_left_out(module, optimizers, sorted(local)),
    )


def spoken_names(
    module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> dict[str, str]:
    """Each parameter's name for a person: of a tied weight, all its names."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(plain_name(name))
    others = {n: [o for o in names.get(id(p), ()) if o != n] for n, p in named}
    return {n: f"{n} (also {', '.join(also)})" if also else n for n, also in others.items()}


def _left_out(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], local: Sequence[str]
) -> tuple[str, ...]:
    """Sentences about parameters that another optimizer updates, and tensors of one rank alone."""
    notes, names = [], unguarded_parameters(module, optimizers)
    if names:
        notes.append(
            f"{count(len(names), 'trainable parameter')} ({list_names(names)}) not in the "
            "optimizers that init was given: after a failed check only their updates are skipped. "
            "Pass every optimizer, as sdcwatch.init(model, [one, other])"
        )
    if local:
        notes.append(
            f"{list_names(local)} belong to each rank alone, by DDP's ignore list or `local`: they "
            "are compared with no other rank's, and their gradients are not audited"
        )
    return tuple(notes)


def is_compiled(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether torch.compile is around or inside either module, or `compile()` was called on one.

    Args:
        model: As the loop calls it.
        module: What DDP calls.
    """
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for whole in (model, module)
        for part in whole.modules()
    )


def unguarded_parameters(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[str]:
    """Names of the trainable parameters of `module` that none of `optimizers` holds."""
    held = held_by(optimizers)
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def _look_through(optimizer: Any) -> list[Steppers]:
    """What each of the given optimizers is made of."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        msg = "Expected one optimizer or more, but got none. Pass those that update the model."
        raise ConfigurationError(msg)
    return list(map(steppers, given))


def _require_ddp(
    model: torch.nn.Module, ddp: DistributedDataParallel | None, config: GuardConfig
) -> None:
    """Check that there is a DDP model if it is needed, and one whose gradients can be screened."""
    if ddp is None and config.audit_every is not None:
        msg = (
            "Expected `model` to be a DistributedDataParallel model, because audits are on, but "
            f"got {type(model).__name__}. Call init after DistributedDataParallel(model), with "
            "what that returns; a run on one rank has nothing to audit: audit_every=None."
        )
        raise ConfigurationError(msg)
    if ddp is not None and getattr(ddp, "mixed_precision", None) is not None:
        msg = (
            "Expected a DDP model that computes with the parameters that the optimizer updates, "
            "but got one with mixed_precision, whose own communication hook cannot be composed "
            "with another. Leave it out and call the model under torch.autocast."
        )
        raise ConfigurationError(msg)
    if ddp is not None and has_guard(ddp):
        msg = (
            "Expected a DDP model without a guard, but got one whose guard is open. Keep that one, "
            "or close() it before you call sdcwatch.init() again."
        )
        raise ConfigurationError(msg)
    if ddp is not None and has_comm_hook(ddp):
        msg = (
            "Expected a DDP model without a communication hook, but got one that has one. Pass it "
            "as sdcwatch.init(..., comm_hook=(state, hook)) instead of registering it."
        )
        raise ConfigurationError(msg)


def _updating(found: Sequence[Steppers], ours: set[int]) -> tuple[torch.optim.Optimizer, ...]:
    """Those that update parameters of the model; one inside another may update copies of its own.

    Raises:
        ConfigurationError: None of what one given optimizer is made of does.
    """
    optimizers: list[torch.optim.Optimizer] = []
    for each in found:
        updating = [o for o in each.optimizers if not ours.isdisjoint(held_by([o]))]
        if not updating:
            msg = (
                "Expected `optimizer` to update parameters of `model`, but got one that holds none "
                "of them. Build it from model.parameters()."
            )
            raise ConfigurationError(msg)
        optimizers += updating
    return _each_once(optimizers)


def _each_once(things: Sequence[Any]) -> tuple[Any, ...]:
    return tuple({id(one): one for one in things}.values())


def _is_a(thing: object, name: str) -> bool:
    """Whether a class of that name is among its types; no such class is imported for the answer."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def _refuse_sharding(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what keeps another part of the weights or of the state on each rank."""
    if any(_is_a(part, "FullyShardedDataParallel") for part in model.modules()):
        msg = (
            "Expected every rank to hold the whole model, but got FullyShardedDataParallel. Train "
            "with DistributedDataParallel: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    sharded = [name for name, p in model.named_parameters() if _is_a(p, "DTensor")]
    if sharded:
        msg = (
            f"Expected every rank to hold the whole model, but got DTensor parameters, the first "
            f"of {len(sharded)} is {sharded[0]}. Train with DistributedDataParallel, without "
            "fully_shard or tensor parallelism: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    if any(_is_a(one, "ZeroRedundancyOptimizer") for one in optimizers):
        msg = (
            "Expected an optimizer that updates all weights on every rank, but got "
            "ZeroRedundancyOptimizer. Pass the optimizer that it shards, built from "
            "model.parameters(): one rank's update would reach the others without a comparison."
        )
        raise ConfigurationError(msg)


def has_guard(ddp: DistributedDataParallel) -> bool:
    """Whether an open guard has its hook there."""
    hooks = getattr(ddp, "_comm_hooks", ())
    return any(isinstance(state, GradientProbes) and not state.released for _, state in hooks)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered already, other than a closed guard's."""
    return bool(getattr(ddp, "_comm_hooks", None)) and released_probes(ddp) is None
