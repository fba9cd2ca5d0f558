"""Makes `optimizer.step()` obey the decision: the update happens on every rank or on none.

The decision is made at the end of the backward. Here it is only carried out: a skipped step runs
with every gradient gone, so that weights and state stay bit for bit, and leaves the gradients
zeroed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.fingerprint import combine, digest_tensors
from sdcwatch.checks.kept import KeptAttributes
from sdcwatch.errors import ConfigurationError, SdcwatchError

_PASSED_ON = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""Packages whose wrappers move no weight themselves."""


@dataclass(frozen=True, slots=True)
class Steppers:
    """All that an optimizer which `init` was given is made of.

    Attributes:
        optimizers: Those that take step hooks, with those that they hold, from outside in.
        wrappers: Objects around them that take none, and may move weights in their own `step`.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    wrappers: tuple[Any, ...] = ()


def steppers(optimizer: Any) -> Steppers:
    """Look through an optimizer: wrappers by composition and by inheritance, SAM's inner one.

    Raises:
        ConfigurationError: There is none, or one is LBFGS, whose closure runs a varying number of
            times per rank.
    """
    found: dict[int, Any] = {}
    wrappers: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if id(one) in found or id(one) in wrappers:
            continue
        held = _held_by(one)
        if _passes_on(one) and held:
            pass
        elif _takes_hooks(one):
            _refuse_lbfgs(one)
            found[id(one)] = one
        elif held:
            wrappers[id(one)] = one
        else:
            msg = (
                f"Expected `optimizer` to be a torch.optim.Optimizer, but got {type(one)}. "
                "Pass the optimizer whose step() updates the model."
            )
            raise ConfigurationError(msg)
        waiting += held
    return Steppers(tuple(found.values()), tuple(wrappers.values()))


def is_foreign(optimizer: Any) -> bool:
    """Whether somebody else wrote it than torch: it may move weights without a gradient."""
    return not type(optimizer).__module__.startswith("torch.optim")


def _takes_hooks(optimizer: Any) -> bool:
    """A subclass that never called `Optimizer.__init__` has none."""
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )


def _passes_on(optimizer: Any) -> bool:
    return type(optimizer).__module__.split(".")[0] in _PASSED_ON


def _refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        msg = (
            "Expected an optimizer that evaluates the model once per step, but got LBFGS. Use "
            "another optimizer: LBFGS calls its closure a different number of times on each rank."
        )
        raise ConfigurationError(msg)


def _held_by(optimizer: Any) -> list[Any]:
    """The optimizers in an object's attributes, and in lists and dicts there."""
    own = getattr(optimizer, "__dict__", {})
    named = [own[n] for n in ("optimizer", "_optimizer") if hasattr(own.get(n), "step")]
    for value in own.values():
        parts = value.values() if isinstance(value, dict) else value
        parts = parts if isinstance(value, (dict, list, tuple)) else (value,)
        named += [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    return [one for one in {id(n): n for n in named}.values() if one is not optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Every parameter that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Ids of the parameters that they update."""
    return {id(p) for one in optimizers for p in parameters_of(one)}


# Hooks and profiling, which are none of what a step may move.
_OF_TORCH = ("_optimizer_", "_zero_grad_", "_patch", "_warned")


class _Session(Protocol):
    optimizers: list[torch.optim.Optimizer]

    @property
    def stepping(self) -> bool: ...

    @property
    def updated(self) -> bool: ...

    def step_begins(self, optimizer: Any) -> None: ...

    def step_broken(self) -> None: ...

    def update_is_skipped(self) -> bool: ...

    def kept(self, optimizer: Any) -> Snapshot | None: ...

    def after_update(self, optimizer: Any, *, skipped: bool) -> None: ...

    def loaded(self, optimizer: torch.optim.Optimizer) -> None: ...


@dataclass
class _Saved:
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    digest: tuple[int, ...] | None = None
    whole: Snapshot | None = None


class Snapshot(KeptAttributes):
    """All that an optimizer holds, and weights, to be put back in place after a skipped step.

    Args:
        optimizer: It, or what steps around it.
        parameters: The weights.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(optimizer, but=_OF_TORCH)
        self._parameters = parameters
        for parameter in parameters:
            self._keep(parameter)

    @torch.no_grad()
    def put_weights_back(self) -> None:
        """Only the weights, in place."""
        for parameter in self._parameters:
            self._kept[id(parameter)].refill()


KNOWN_FOR_ONE = 4
"""Adopted optimizers of one parameter that are held: a loop may make a new one in every cycle."""


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
        self._adopted: list[OptimizerHooks] = []
        self._said = weakref.WeakSet[torch.optim.Optimizer]()
        self._handle = register_optimizer_step_pre_hook(self._steps)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()
        for hooks in tuple(self._adopted):
            self._drop(hooks)

    def _drop(self, hooks: OptimizerHooks) -> None:
        """Let go of one; if it steps again, it is found again."""
        hooks.remove()
        self._adopted.remove(hooks)
        self._hooks.remove(hooks)
        self._session.optimizers.remove(hooks.optimizer)

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(h.optimizer is optimizer for h in self._hooks):
            return
        guarded = [id(p) for p in parameters_of(optimizer) if id(p) in self._names]
        held = [self._names[key] for key in guarded]
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
        _refuse_lbfgs(optimizer)
        inside = self._session.stepping  # made by one that is guarded
        same = [h for h in self._adopted if not held_by([h.optimizer]).isdisjoint(guarded)]
        for old in same[: 1 - KNOWN_FOR_ONE]:  # a loop that makes new ones lets go of the old ones
            self._drop(old)
        self._session.optimizers.append(optimizer)
        self._adopted.append(OptimizerHooks(optimizer, self._session))
        self._hooks.append(self._adopted[-1])
        if inside or optimizer in self._said:
            return
        self._said.add(optimizer)
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        self._say(
            f"{kind} steps {held[0]}{more}, and sdcwatch.init was not given it: its steps are "
            "skipped too from now on. Pass every optimizer: init(model, [one, other])"
        )


LEARNED_CLOSURES = 3
"""Closures before which the weights are fingerprinted: moved through `.data`, no version tells."""


class OptimizerHooks:
    """Step pre- and post-hooks on one optimizer.

    One of torch does nothing where no gradient is left, so a skipped step runs without any. One of
    somebody else's runs with gradients of zero, and all that it holds is put back.

    Args:
        optimizer: One that takes hooks.
        session: Asked whether to skip, told when an update happened.
        parameters: What it updates, where it has no `param_groups`.
    """

    def __init__(
        self,
        optimizer: Any,
        session: _Session,
        parameters: Sequence[torch.nn.Parameter] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._session = session
        self._given = parameters
        self._foreign = is_foreign(optimizer)
        self._saved: _Saved | None = None
        self._verified = False
        self._depth = 0
        self._in_closure = False
        self._learning = LEARNED_CLOSURES
        self._moves_first = False  # as SAM does: before its closure runs
        self._start: Snapshot | None = None
        self._moved = False
        self._remove = self._attach()

    def _attach(self) -> Callable[[], None]:
        handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
            self.optimizer.register_load_state_dict_post_hook(self._session.loaded),
        ]
        self._session.loaded(self.optimizer)

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def remove(self) -> None:
        """Take the hooks off; puts back what a step that never finished had taken away."""
        self._remove()
        self._put_back()

    def recover(self) -> None:
        """Put back what a step that ended in an exception left: torch runs no post-hook then."""
        if self._depth and not self._in_closure:
            self._put_back()
            self._session.step_broken()

    def _parameters(self) -> Sequence[torch.nn.Parameter]:
        return parameters_of(self.optimizer) if self._given is None else self._given

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:  # an optimizer that steps inside its own step
            return None
        self._session.step_begins(self.optimizer)
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
        before: Any = None
        self._start, self._moved = None, False
        if self._foreign:
            if not self._session.updated:
                self._apply()  # decided before the call: SAM's first half is what is left out
            self._start = (
                Snapshot(self.optimizer, self._parameters()) if self._moves_first else None
            )
            before = self._place()

        def run() -> Any:
            nonlocal before
            if before is not None:
                self._moved = self._moves_first = self._moves_first or before != self._place()
                self._learning -= self._learning > 0
                before = None
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            if not self._session.update_is_skipped():
                self._saved = None  # of a backward before the call, which was given up
            self._apply()
            return loss

        return run

    def _place(self) -> Any:
        """Where the weights are, as far as the host can tell; exact in the first steps."""
        parameters = self._parameters()
        known = [(p._version, p.data_ptr()) for p in parameters]
        return known, _fingerprint(parameters) if self._learning else None

    def _apply(self) -> None:
        if not self._session.update_is_skipped():
            return
        if self._saved is None:
            self._saved = self._save()
        self._take_gradients(self._saved)

    def _save(self) -> _Saved:
        saved = _Saved()
        if self._moved:
            saved.whole = self._start  # without it, what it moved is for itself to put back
        elif self._foreign:
            kept = self._session.kept(self.optimizer)
            saved.whole = kept or Snapshot(self.optimizer, self._parameters())
        elif not self._verified:
            saved.digest = self._digest()
        for group in getattr(self.optimizer, "param_groups", ()):
            saved.numbers.append({k: v for k, v in group.items() if k != "params"})
        return saved

    def _take_gradients(self, saved: _Saved) -> None:
        taken = {id(p) for p, _ in saved.gradients}
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            if id(parameter) not in taken:
                saved.gradients.append((parameter, parameter.grad))
            if self._foreign:
                parameter.grad.detach().zero_()
            else:
                parameter.grad = None

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        skipped = self._saved is not None
        self._put_back()
        self._session.after_update(self.optimizer, skipped=skipped)

    def _put_back(self) -> None:
        saved, self._saved, self._start, self._depth = self._saved, None, None, 0
        if saved is None:
            return
        for parameter, gradient in saved.gradients:
            parameter.grad = gradient.detach().zero_()
        groups = getattr(self.optimizer, "param_groups", ())
        for group, numbers in zip(groups, saved.numbers, strict=True):
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
        tensors: list[torch.Tensor] = []
        for parameter in self._parameters():
            tensors.append(parameter)
            state = self.optimizer.state.get(parameter, {})
            tensors += [v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
        return _fingerprint(tensors)


def _fingerprint(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if not tensors:
        return ()
    table = torch.cat([digest_tensors([t.detach()]).cpu() for t in tensors])
    return tuple(combine(table, tuple(range(len(tensors)))).tolist())


class WrapperHooks(OptimizerHooks):
    """The same around the `step` of an object that takes no hooks, as Lookahead by composition.

    Its `step` is wrapped on the object itself, as torch's schedulers do.
    """

    def _attach(self) -> Callable[[], None]:
        held, inner = vars(self.optimizer), self.optimizer.step
        own = held.get("step")
        on = True

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not on:
                return inner(*args, **kwargs)
            changed = self._before(self.optimizer, (self.optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
            out = inner(*args, **kwargs)
            self._after(self.optimizer, (), {})
            return out

        def remove() -> None:
            nonlocal on
            on = False
            if held.get("step") is not step:
                return  # somebody has wrapped it again since
            if own is None:
                del held["step"]
            else:
                held["step"] = own

        held["step"] = step
        return remove
