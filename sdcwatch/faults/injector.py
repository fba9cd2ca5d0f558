"""Applies a fault plan to one rank, through wrappers and hooks around the user's objects.

How it knows whose computation it damages: a loss function that is called with the DDP model is the
rank's own pass, one that is called with the bare module is a replay. A backward takes the role of
the forward whose loss it started from, through a hook on that loss, so it does not matter that a
replay runs inside the callback at the end of the rank's own backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sdcwatch.errors import ConfigurationError, expect
from sdcwatch.faults.damage import Damage, stand_in
from sdcwatch.faults.plan import Fault, FaultPlan
from sdcwatch.faults.planter import Planted, Planter
from sdcwatch.faults.reduction import CommHook, GradientAliases, corrupting_hook
from sdcwatch.faults.targets import (
    bare_module,
    check_plan,
    find_entry,
    find_tensor,
    innermost,
    is_ddp,
    replace_tensor,
    state_tensor,
    without_compile,
)

Loss = TypeVar("Loss")

OWN, REPLAY = "own", "replay"


class Injector:
    """The faults of a plan that happen on one rank.

    Call `attach` and `comm_hook` before ``sdcwatch.init``, so that the damage is there before the
    guard looks; `wrap_loss` gives the loss function to pass to it. Every rank makes the same calls.
    None of them communicates. A plan without faults for a rank changes nothing on it.

    Args:
        plan: The whole plan, the same on every rank.
        rank: The rank of this process.
        log_dir: Directory for ``faults.rank<r>.jsonl``, appended to as faults happen; None keeps
            the log in memory only.

    Example:
        >>> from sdcwatch.faults import Fault, FaultPlan, Injector
        >>> model = torch.nn.Linear(2, 1)
        >>> plan = FaultPlan(faults=(Fault(site="loss", kind="nan", ranks=(0,), step=1),))
        >>> injector = Injector(plan, rank=0)
        >>> injector.attach(model)
        >>> loss_fn = injector.wrap_loss(lambda model, batch: model(batch).sum())
        >>> injector.begin_step(1)
        >>> loss_fn(model, torch.ones(1, 2)).isnan().item()
        True
        >>> [(p.step, p.site, p.kind) for p in injector.log]
        [(1, 'loss', 'nan')]
    """

    def __init__(self, plan: FaultPlan, *, rank: int, log_dir: Path | str | None = None) -> None:
        ok = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
        expect(ok, "`rank` to be an integer >= 0", rank, "Pass dist.get_rank().")
        self._plan = plan
        self._planter = Planter(plan, rank, None if log_dir is None else Path(log_dir))
        self._model: nn.Module | None = None
        self._module: nn.Module | None = None
        self._detached = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._aliases: GradientAliases | None = None
        self._forward_role: str | None = None
        self._backward_role = OWN
        self._handles: list[RemovableHandle] = []
        self._leaf_handles: list[RemovableHandle] = []

    @property
    def log(self) -> tuple[Planted, ...]:
        """What was planted on this rank so far, in order."""
        return tuple(self._planter.log)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hook into a model and its optimizer.

        Args:
            model: The DDP model, compiled or not. A bare module works too; calls with that very
                module are then its own pass.
            optimizer: Needed for the sites `weight` and `optimizer_state`.

        Raises:
            ConfigurationError: The plan does not fit the model, whichever rank the fault is for.
                Nothing has been changed then.
        """
        if self._model is not None:
            msg = (
                "Expected an Injector that is not attached, but got one that is. "
                "Call detach() first, or make one per model."
            )
            raise ConfigurationError(msg)
        module = bare_module(model)
        optimizer = None if optimizer is None else innermost(optimizer)
        check_plan(self._plan, module, optimizer)
        self._model, self._module = without_compile(model), module
        self._detached = False
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        if any(f.site == "all_reduce" for f in self._plan.faults) and is_ddp(model):
            self._aliases = GradientAliases(list(module.parameters()))
        self._hook_modules(module)
        for position, fault in self._planter.faults("gradient"):
            assert fault.target is not None
            self._handles.append(self._hook_leaf(position, fault, self._parameters[fault.target]))
        if optimizer is not None and self._plan_has("weight", "optimizer_state"):
            handle = optimizer.register_step_post_hook(self._after_update)
            _run_first(optimizer._optimizer_step_post_hooks, handle)
            self._handles.append(handle)

    def detach(self) -> None:
        """Take every hook off; wrapped loss functions then only pass the call on."""
        for handle in (*self._handles, *self._leaf_handles):
            handle.remove()
        self._handles.clear()
        self._leaf_handles.clear()
        self._model = self._module = self._aliases = None
        self._detached = True

    def begin_step(self, step: int) -> None:
        """Say which step of the training loop begins, counted from 1.

        Raises:
            ConfigurationError: `step` is no integer >= 1.
        """
        self._planter.begin_step(step)
        self._drop_leaf_handles()
        self._backward_role = OWN
        for position, fault in self._planter.faults("rng"):
            if self._planter.due(position, fault, OWN):
                self._planter.note(position, fault, OWN, _reseed(fault))

    def batch(self, step: int, batch: Any) -> Any:
        """The micro-batch as this rank gets to see it, damaged before anybody looks.

        Args:
            step: Its step; begun by this call if `begin_step` was not called for it.
            batch: Any nesting of tuples, lists and dicts; the tensors in it stay as they are, the
                result holds copies of the damaged ones.

        Raises:
            ConfigurationError: It has no tensor that the fault could happen to.
        """
        if self._planter.step != step:
            self.begin_step(step)
        for position, fault in self._planter.faults("batch"):
            if fault.at_step(step):
                damage = functools.partial(self._planter.damage, position, fault, role=OWN)
                batch = replace_tensor(batch, find_entry(batch, fault), damage)
        return batch

    def wrap_loss(self, loss_fn: Callable[..., Loss]) -> Callable[..., Loss]:
        """The loss function to train and to guard with.

        Args:
            loss_fn: Called as ``loss_fn(model, ...)``; returned as it is if this rank has no part
                in the plan that needs it.

        Raises:
            ConfigurationError: From the call, if `attach` or `begin_step` was never called, or a
                fault cannot happen to the tensor it is about.
        """
        needed = self._planter.faults("activation", "gradient", "loss", "replay", "buffer")
        if not needed and not self._plan_has("all_reduce"):
            return loss_fn

        @functools.wraps(loss_fn)
        def with_faults(model: nn.Module, *args: Any, **kwargs: Any) -> Loss:
            if self._detached:
                return loss_fn(model, *args, **kwargs)
            if self._module is None:
                msg = (
                    "Expected an attached Injector, but got none. "
                    "Call attach(model, optimizer) before the first step."
                )
                raise ConfigurationError(msg)
            role = self._role_of(model)
            self._drop_leaf_handles()
            if role == REPLAY:
                self._hook_fresh_leaves(model)
            outer, self._forward_role = self._forward_role, role
            try:
                loss = loss_fn(model, *args, **kwargs)
            finally:
                self._forward_role = outer
            return self._finish_loss(loss, role)

        return with_faults

    def comm_hook(self, process_group: Any = None) -> CommHook | None:
        """The ``(state, hook)`` pair for ``sdcwatch.init(comm_hook=...)`` or for DDP itself.

        It averages with the bits of plain DDP and then plants the `all_reduce` faults; for that it
        must see each backward begin, so train with the loss function from `wrap_loss`. None if no
        rank has such a fault.

        Args:
            process_group: The group DDP reduces over; None for the default group.

        Raises:
            ConfigurationError: The injector is not attached to a DDP model.
        """
        if not self._plan_has("all_reduce"):
            return None
        if self._aliases is None:
            msg = (
                "Expected an Injector that is attached to a DDP model, but got "
                f"{'none' if self._model is None else type(self._model).__name__}. "
                "Call attach(ddp_model, optimizer) before comm_hook()."
            )
            raise ConfigurationError(msg)
        return corrupting_hook(process_group, self._aliases, self._corrupt)

    def _plan_has(self, *sites: str) -> bool:
        return any(fault.site in sites for fault in self._plan.faults)

    def _role_of(self, model: nn.Module) -> str:
        inner = without_compile(model)
        own = isinstance(inner, DistributedDataParallel) or inner is self._model
        return OWN if own else REPLAY

    # Sites inside the forward.

    def _hook_modules(self, module: nn.Module) -> None:
        modules = dict(module.named_modules(remove_duplicate=False))
        for position, fault in self._planter.faults("activation", "replay"):
            hook = functools.partial(self._after_module, position, fault)
            target = modules[fault.target or ""]
            self._handles.append(target.register_forward_hook(_eager(hook)))
        for position, fault in self._planter.faults("buffer"):
            before = functools.partial(self._before_forward, position, fault)
            handle = module.register_forward_pre_hook(_eager(before), prepend=True)
            self._handles.append(handle)

    def _current_role(self) -> str | None:
        """The role of the forward that runs, also of one that checkpointing recomputes."""
        if self._forward_role is None and torch._C._current_graph_task_id() != -1:
            return self._backward_role
        return self._forward_role

    def _after_module(
        self, position: int, fault: Fault, module: nn.Module, args: object, output: Any
    ) -> Any:
        role = self._current_role()
        if role is None:
            return None
        damage = functools.partial(self._planter.damage, position, fault, role=role)
        where = find_tensor(output, fault.target or "")
        return replace_tensor(output, where, damage, stand_in)

    def _before_forward(self, position: int, fault: Fault, module: nn.Module, args: object) -> None:
        if self._forward_role == OWN and fault.target is not None:
            self._damage_in_place(position, fault, _tensor(module, fault.target))

    def _finish_loss(self, loss: Loss, role: str) -> Loss:
        if not isinstance(loss, Tensor):
            return loss
        value: Tensor = loss
        for position, fault in self._planter.faults("loss"):
            damage = self._planter.damage(position, fault, value, role)
            if damage is not None:
                value = stand_in(value, damage.tensor)
        if value.requires_grad:
            enter = functools.partial(self._enter_backward, role)
            value.register_hook(enter)  # type: ignore[no-untyped-call]
        return value  # type: ignore[return-value]

    # Sites inside the backward.

    def _enter_backward(self, role: str, gradient: Tensor) -> None:
        self._backward_role = role
        if role == OWN and self._aliases is not None:
            self._aliases.look()

    def _hook_leaf(self, position: int, fault: Fault, leaf: Tensor) -> RemovableHandle:
        hook = functools.partial(self._at_gradient, position, fault)
        handle: RemovableHandle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        assert leaf._backward_hooks is not None
        _run_first(leaf._backward_hooks, handle)
        return handle

    def _hook_fresh_leaves(self, model: nn.Module) -> None:
        # A replay may swap leaves of its own in for the parameters; they have no hooks of ours.
        for position, fault in self._planter.faults("gradient"):
            assert fault.target is not None
            leaf = _tensor(bare_module(model), fault.target)
            if leaf is not self._parameters[fault.target] and leaf.requires_grad:
                self._leaf_handles.append(self._hook_leaf(position, fault, leaf))

    def _drop_leaf_handles(self) -> None:
        while self._leaf_handles:
            self._leaf_handles.pop().remove()

    def _at_gradient(self, position: int, fault: Fault, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        damage = self._planter.damage(position, fault, gradient, self._backward_role)
        return None if damage is None else damage.tensor

    def _corrupt(self, reduced: Tensor, bucket: Any, views: Sequence[Tensor]) -> Tensor:
        for position, fault in self._planter.faults("all_reduce"):
            if fault.target is None:
                if bucket.index() != 0:
                    continue
                part = reduced
            else:
                wanted = self._parameters[fault.target]
                at = [i for i, p in enumerate(bucket.parameters()) if p is wanted]
                if not at:
                    continue
                part = views[at[0]] if views else reduced
            damage = self._planter.damage(position, fault, part, OWN)
            if damage is None:
                continue
            if not views:
                reduced = damage.tensor
            else:
                part.copy_(damage.tensor)
        return reduced

    # Sites outside of both.

    def _after_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for fault in self._plan.faults:
            if fault.site == "optimizer_state":
                self._state_of(optimizer, fault)  # an unknown key fails on every rank alike
        for position, fault in self._planter.faults("weight", "optimizer_state"):
            assert fault.target is not None
            if fault.site == "weight":
                tensor: Tensor | None = self._parameters[fault.target]
            else:
                tensor = self._state_of(optimizer, fault)
            if tensor is not None:
                self._damage_in_place(position, fault, tensor)

    def _state_of(self, optimizer: torch.optim.Optimizer, fault: Fault) -> Tensor | None:
        assert fault.target is not None
        parameter = self._parameters[fault.target]
        state: Mapping[str, object] = optimizer.state.get(parameter, {})
        return state_tensor(fault, parameter, state)

    def _damage_in_place(self, position: int, fault: Fault, tensor: Tensor) -> None:
        damage = self._planter.damage(position, fault, tensor, OWN)
        if damage is not None:
            # .data: a broken memory cell does not move autograd's version counter either
            tensor.data.copy_(damage.tensor)


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    # a plan is Python: torch.compile is to break the graph here rather than trace it
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _run_first(hooks: MutableMapping[int, Any], handle: RemovableHandle) -> None:
    """Move a hook before those of others: the damage is there when anybody looks."""
    others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
    for key, _ in others:
        del hooks[key]
    hooks.update(others)


def _tensor(module: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor)
    return tensor


def _reseed(fault: Fault) -> Damage:
    """Seed torch's generators with a damaged seed."""
    before = torch.initial_seed()
    if fault.kind == "bit_flip":
        assert fault.bit is not None
        seed = before ^ (1 << fault.bit)
    else:
        seed = int(fault.value or 0) % (1 << 64)
    generator = torch.manual_seed(seed)
    changed = int(seed != before)
    return Damage(generator.get_state(), 0, before, seed, changed)
