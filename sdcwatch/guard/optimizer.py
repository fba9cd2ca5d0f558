"""Makes `optimizer.step()` obey the decision: the update happens on every rank or on none.

The decision is made at the end of the backward. Here it is only carried out: a skipped step runs
with every gradient gone, so that weights and state stay bit for bit, and leaves the gradients
zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.fingerprint import combine, digest_tensors
from sdcwatch.checks.shadow import KeptAttributes
from sdcwatch.errors import ConfigurationError, SdcwatchError


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The innermost real optimizer: accelerate, Fabric and others keep it in an attribute.

    Raises:
        ConfigurationError: There is none, or it is LBFGS, whose closure runs a varying number of
            times per rank.
    """
    inner = optimizer
    while (held := _wrapped(inner)) is not None:
        inner = held
    if not isinstance(inner, torch.optim.Optimizer):
        msg = (
            f"Expected `optimizer` to be a torch.optim.Optimizer, but got {type(optimizer)}. "
            "Pass the optimizer whose step() updates the model."
        )
        raise ConfigurationError(msg)
    if isinstance(inner, torch.optim.LBFGS):
        msg = (
            "Expected an optimizer that evaluates the model once per step, but got LBFGS. Use "
            "another optimizer: LBFGS calls its closure a different number of times on each rank."
        )
        raise ConfigurationError(msg)
    return inner


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Every parameter that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _wrapped(optimizer: Any) -> Any | None:
    """What a wrapper, by composition or by inheritance, updates with."""
    for name in ("optimizer", "_optimizer"):
        held = getattr(optimizer, "__dict__", {}).get(name)
        if held is not None and held is not optimizer and hasattr(held, "step"):
            return held
    return None


# Hooks and profiling, which are none of what a step may move.
_OF_TORCH = ("_optimizer_", "_zero_grad_", "_patch", "_warned")


class _Session(Protocol):
    optimizers: list[torch.optim.Optimizer]

    def update_is_skipped(self) -> bool: ...

    def after_update(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None: ...


@dataclass
class _Saved:
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    digest: tuple[int, ...] | None = None
    whole: KeptAttributes | None = None


class Adoption:
    """Guards optimizers that `init` was not given, as soon as they step a guarded parameter.

    A warm restart makes a new one; a second one may update the rest of the parameters.

    Args:
        named: The guarded parameters.
        hooks: Those of the optimizers that are known; added to.
        session: Given to new hooks.
        say: Told once for each optimizer.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        hooks: list[OptimizerHooks],
        session: _Session,
        say: Callable[[str], None],
    ) -> None:
        self._names = {id(p): n for n, p in named}
        self._hooks, self._session, self._say = hooks, session, say
        self._handle = register_optimizer_step_pre_hook(self._steps)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(h.optimizer is optimizer for h in self._hooks):
            return
        held = [self._names[id(p)] for p in parameters_of(optimizer) if id(p) in self._names]
        if not held:
            return
        kind = type(optimizer).__name__
        if internals.current_graph_task() >= 0:
            msg = (
                f"Expected updates after the backward, but got a step of {kind} inside it, on "
                f"{held[0]}: such a step cannot be skipped. Step after loss.backward(), not from a "
                "post-accumulate-gradient hook."
            )
            raise ConfigurationError(msg)
        unwrap(optimizer)
        self._session.optimizers.append(optimizer)
        self._hooks.append(OptimizerHooks(optimizer, self._session))
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        self._say(
            f"{kind} steps {held[0]}{more}, and sdcwatch.init was not given it: its steps are "
            "skipped too from now on. Pass every optimizer: init(model, [one, other])"
        )


class OptimizerHooks:
    """Step pre- and post-hooks on one optimizer.

    Args:
        optimizer: The innermost real optimizer.
        session: Asked whether to skip, told when an update happened.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, session: _Session) -> None:
        self.optimizer = optimizer
        self._session = session
        self._saved: _Saved | None = None
        self._verified = False
        self._depth = 0
        self._in_closure = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks off; puts back what a step that never finished had taken away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._put_back()

    def recover(self) -> None:
        """Put back what a step that ended in an exception left: torch runs no post-hook then."""
        if self._depth and not self._in_closure:
            self._put_back()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:  # an optimizer that steps inside its own step
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._apply()
            return None
        # A closure runs forward and backward inside step(); the decision is only known after it.
        wrapped = self._closure(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self._apply()
            return loss

        return run

    def _apply(self) -> None:
        if not self._session.update_is_skipped() or self._saved is not None:
            return
        saved = _Saved()
        if not type(self.optimizer).__module__.startswith("torch.optim"):
            saved.whole = KeptAttributes(self.optimizer, but=_OF_TORCH)
        elif not self._verified:
            saved.digest = self._digest()
        for group in self.optimizer.param_groups:
            saved.numbers.append({k: v for k, v in group.items() if k != "params"})
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                saved.gradients.append((parameter, parameter.grad))
                parameter.grad = None
        self._saved = saved

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        skipped = self._saved is not None
        self._put_back()
        self._session.after_update(self.optimizer, skipped=skipped)

    def _put_back(self) -> None:
        saved, self._saved, self._depth = self._saved, None, 0
        if saved is None:
            return
        for parameter, gradient in saved.gradients:
            parameter.grad = gradient.zero_()
        for group, numbers in zip(self.optimizer.param_groups, saved.numbers, strict=True):
            group.update(numbers)
        if saved.whole is not None:
            saved.whole.put_back()
        if saved.digest is not None and saved.digest != self._digest():
            msg = (
                "Expected a skipped step to leave weights and optimizer state untouched, but "
                f"{type(self.optimizer).__name__} changed them without gradients. Use "
                'mode="observe" with this optimizer.'
            )
            raise SdcwatchError(msg)
        self._verified = self._verified or saved.digest is not None

    def _digest(self) -> tuple[int, ...]:
        """Fingerprint of weights and state, on the host."""
        tensors: list[torch.Tensor | None] = []
        for parameter in parameters_of(self.optimizer):
            tensors.append(parameter.detach())
            state = self.optimizer.state.get(parameter, {})
            tensors += [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
        if not tensors:
            return ()
        table = torch.cat([digest_tensors([t]).cpu() for t in tensors])
        return tuple(combine(table, tuple(range(len(tensors)))).tolist())
