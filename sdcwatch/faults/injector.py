"""Applies a fault plan to one rank, through hooks around the user's objects.

How it knows whose computation it damages: inside a replay of the guard `sdcwatch.replaying()` is
true, elsewhere the computation is the rank's own. A call without gradients, as for a validation, is
neither.

What happens inside the audited call is damaged in its own memory, out of sight of dispatch modes:
so a log of all operations finds a value that no operation has written, as it would on a device that
computed wrongly. What a script passes through `Injector.batch` and `Injector.loss` lies outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.replaying import replaying
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
)

Loss = TypeVar("Loss")

OWN, REPLAY = "own", "replay"


class Injector:
    """The faults of a plan that happen on one rank.

    Call `attach` and `comm_hook` before ``sdcwatch.init``, so that the damage is there before the
    guard looks. Every rank makes the same calls. None of them communicates. A plan without faults
    for a rank changes nothing on it.

    Args:
        plan: The whole plan, the same on every rank.
        rank: The rank of this process.
        log_dir: Directory for ``faults.rank<r>.jsonl``, appended to as faults happen; None keeps
            the log in memory only.

    Example:
        >>> from sdcwatch.faults import Fault, FaultPlan, Injector
        >>> model = torch.nn.Linear(2, 1)
        >>> fault = Fault(site="activation", target="", kind="nan", ranks=(0,), step=1)
        >>> injector = Injector(FaultPlan(faults=(fault,)), rank=0)
        >>> injector.attach(model)
        >>> injector.begin_step(1)
        >>> model(torch.ones(1, 2)).isnan().item()
        True
        >>> [(p.step, p.site, p.kind) for p in injector.log]
        [(1, 'activation', 'nan')]
    """

    def __init__(self, plan: FaultPlan, *, rank: int, log_dir: Path | str | None = None) -> None:
        ok = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
        expect(ok, "`rank` to be an integer >= 0", rank, "Pass dist.get_rank().")
        self._plan = plan
        self._planter = Planter(plan, rank, None if log_dir is None else Path(log_dir))
        self._module: nn.Module | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._aliases: GradientAliases | None = None
        self._looked_in = -1
        self._calls: list[bool] = []  # of the module, in progress: whether with gradients
        self._handles: list[RemovableHandle] = []
        self._first: list[RemovableHandle] = []

    @property
    def log(self) -> tuple[Planted, ...]:
        """What was planted on this rank so far, in order."""
        return tuple(self._planter.log)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hook into a model and its optimizer.

        Args:
            model: The DDP model, compiled or not. A bare module works too.
            optimizer: Needed for the sites `weight` and `optimizer_state`.

        Raises:
            ConfigurationError: The plan does not fit the model, whichever rank the fault is for.
                Nothing has been changed then.
        """
        if self._module is not None:
            msg = (
                "Expected an Injector that is not attached, but got one that is. "
                "Call detach() first, or make one per model."
            )
            raise ConfigurationError(msg)
        module = bare_module(model)
        optimizer = None if optimizer is None else innermost(optimizer)
        check_plan(self._plan, module, optimizer)
        self._module = module
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        if self._plan_has("all_reduce") and is_ddp(model):
            self._aliases = GradientAliases(list(module.parameters()))
            self._handles.append(module.register_forward_hook(_eager(self._watch_outputs)))
        self._hook_modules(module)
        for position, fault in self._planter.faults("gradient"):
            assert fault.target is not None
            self._handles.append(self._hook_leaf(position, fault, self._parameters[fault.target]))
        if optimizer is not None and self._plan_has("weight", "optimizer_state"):
            handle = optimizer.register_step_post_hook(self._after_update)
            _run_first(optimizer._optimizer_step_post_hooks, handle)
            self._handles.append(handle)

    def detach(self) -> None:
        """Take every hook off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first.clear()
        self._calls.clear()
        self._module = self._aliases = None

    def begin_step(self, step: int) -> None:
        """Say which step of the training loop begins, counted from 1.

        Raises:
            ConfigurationError: `step` is no integer >= 1.
        """
        self._planter.begin_step(step)
        self._calls.clear()  # an interrupted call skips the hook at its end
        if self._module is not None:
            for handle in self._first:
                _run_first(self._module._forward_pre_hooks, handle)
        for position, fault in self._planter.faults("rng"):
            if self._planter.due(position, fault, OWN):
                self._planter.note(position, fault, OWN, _reseed(fault))

    def batch(self, batch: Any) -> Any:
        """The micro-batch as this rank gets to see it, damaged before the model is called with it.

        Args:
            batch: Any nesting of tuples, lists and dicts; the tensors in it stay as they are, the
                result holds copies of the damaged ones.

        Raises:
            ConfigurationError: It has no tensor that the fault could happen to, or `begin_step` was
                never called.
        """
        for position, fault in self._planter.faults("batch"):
            if self._planter.may_happen(fault):
                damage = functools.partial(self._planter.damage, position, fault, role=OWN)
                batch = replace_tensor(batch, find_entry(batch, fault), damage)
        return batch

    def loss(self, loss: Loss) -> Loss:
        """The loss as the training script computed it on this rank, outside of the module.

        Its gradient is not touched: the derivative of a loss does not depend on its value.

        Args:
            loss: A floating-point tensor; anything else is returned as it is.

        Raises:
            ConfigurationError: `begin_step` was never called, or the fault cannot happen to it.
        """
        if not isinstance(loss, Tensor):
            return loss
        value: Tensor = loss
        for position, fault in self._planter.faults("loss"):
            damage = self._planter.damage(position, fault, value, OWN)
            if damage is not None:
                value = stand_in(value, damage.tensor)
        return value  # type: ignore[return-value]

    def comm_hook(self, process_group: Any = None) -> CommHook | None:
        """The ``(state, hook)`` pair for ``sdcwatch.init(comm_hook=...)`` or for DDP itself.

        It averages with the bits of plain DDP and then plants the `all_reduce` faults. None if no
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
                f"{'none' if self._module is None else type(self._module).__name__}. "
                "Call attach(ddp_model, optimizer) before comm_hook()."
            )
            raise ConfigurationError(msg)
        return corrupting_hook(process_group, self._aliases, self._corrupt)

    def _plan_has(self, *sites: str) -> bool:
        return any(fault.site in sites for fault in self._plan.faults)

    # Sites inside the forward.

    def _hook_modules(self, module: nn.Module) -> None:
        modules = dict(module.named_modules(remove_duplicate=False))
        within = self._planter.faults("activation", "replay")
        if within:
            self._handles += [
                module.register_forward_pre_hook(_eager(self._call_begins), prepend=True),
                module.register_forward_hook(_eager(self._call_ends), always_call=True),
            ]
        for position, fault in within:
            hook = functools.partial(self._after_module, position, fault)
            target = modules[fault.target or ""]
            handle = target.register_forward_hook(_eager(hook), with_kwargs=True)
            _run_first(target._forward_hooks, handle)
            self._handles.append(handle)
        for position, fault in self._planter.faults("buffer"):
            before = functools.partial(self._before_forward, position, fault)
            handle = module.register_forward_pre_hook(_eager(before), prepend=True)
            self._handles.append(handle)
            self._first.append(handle)  # before the guard takes its copy of the buffers, too

    def _call_begins(self, module: nn.Module, args: object) -> None:
        self._calls.append(torch.is_grad_enabled())

    def _call_ends(self, module: nn.Module, args: object, output: object) -> None:
        if self._calls:
            self._calls.pop()

    def _current_role(self) -> str | None:
        """Whose computation runs; None for one that trains nothing.

        A checkpoint runs without gradients inside a call that has them.
        """
        if replaying():
            return REPLAY
        return OWN if torch.is_grad_enabled() or any(self._calls) else None

    def _after_module(
        self,
        position: int,
        fault: Fault,
        module: nn.Module,
        args: object,
        kwargs: object,
        output: Any,
    ) -> Any:
        role = self._current_role()
        if role is None:
            return None
        damage = functools.partial(self._planter.damage, position, fault, role=role)
        where = find_tensor(output, fault.target or "")
        if where is None:  # a batch without rows: there is nothing to damage
            return None
        join = functools.partial(_wrong_result, module, (args, kwargs))
        with internals.dispatch_modes_off():
            return replace_tensor(output, where, damage, join)

    def _before_forward(self, position: int, fault: Fault, module: nn.Module, args: object) -> None:
        trains = torch.is_grad_enabled() and not replaying()
        if trains and fault.target is not None:
            self._damage_in_place(position, fault, _tensor(module, fault.target))

    # Sites inside the backward.

    def _watch_outputs(self, module: nn.Module, args: object, output: Any) -> None:
        """Look at the gradients when the first one arrives at the outputs, before any is added."""
        if not torch.is_grad_enabled() or replaying():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._backward_begins)

    def _backward_begins(self, gradients: object) -> None:
        task = internals.current_graph_task()
        if self._aliases is not None and task != self._looked_in:
            self._looked_in = task
            self._aliases.look()

    def _hook_leaf(self, position: int, fault: Fault, leaf: Tensor) -> RemovableHandle:
        hook = functools.partial(self._at_gradient, position, fault)
        handle: RemovableHandle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        assert leaf._backward_hooks is not None
        _run_first(leaf._backward_hooks, handle)
        return handle

    def _at_gradient(self, position: int, fault: Fault, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        role = REPLAY if replaying() else OWN
        with internals.dispatch_modes_off():
            damage = self._planter.damage(position, fault, gradient, role)
            if damage is None or _overwritten(gradient, damage.tensor):
                return None
            return damage.tensor

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
            _overwrite(tensor, damage.tensor)


def _wrong_result(module: nn.Module, given: object, result: Tensor, damaged: Tensor) -> Tensor:
    """The result of a module with other bits in its memory.

    What the call itself has computed may share that memory, such as the input of a view or of a
    module that works in place: it is wrong as well. Weights, and what came into the call from
    outside, are spared by a copy.
    """
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.grad_fn is None]
    others = (*tensors, *module.parameters(), *module.buffers())
    if any(internals.share_memory(result, t) for t in others):
        return stand_in(result, damaged)
    return result if _overwritten(result, damaged) else stand_in(result, damaged)


def _overwritten(tensor: Tensor, damaged: Tensor) -> bool:
    """Put the damage into the memory of a tensor; False where elements share their place."""
    if tensor.layout is not torch.strided:
        return False
    if any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return False
    _overwrite(tensor, damaged)
    return True


def _overwrite(tensor: Tensor, damaged: Tensor) -> None:
    # .data: a broken memory cell does not move autograd's version counter either
    tensor.data.copy_(damaged)


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
