"""What the software of this rank did to its weights, for check 3 to ask before it names a device.

Kept on the host and read off what torch counts anyway: nothing here waits for the device until
replicas differ. What it means is decided in `sdcwatch.core.fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdcwatch.checks.fingerprint import combine, digest_tensors
from sdcwatch.core.fingerprint import OptimizerFacts
from sdcwatch.core.text import count, list_names
from sdcwatch.guard.guarded import Guarded
from sdcwatch.guard.optimizer import parameters_of

WATCHED_GRADIENTS = 256
"""Up to so many parameters, writes into gradients are counted in every step: 0.1 µs for each."""
_SHOWN_ELEMENTS = 16
_TEXT = 120


class UpdateLog:
    """Counts what is done to the compared weights of one rank since replicas were last equal.

    Args:
        guarded: Whose weights.
        optimizers: All that are guarded by now.
        scale: Loss scale of this rank's GradScaler; None without one.

    Attributes:
        since: Step at which the replicas were last equal; None before the first comparison.
    """

    def __init__(
        self,
        guarded: Guarded,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        scale: Callable[[], float | None],
    ) -> None:
        self._optimizers, self._scale = optimizers, scale
        self._tensors = dict(guarded.compared)
        self._names = {id(p): n for n, p in guarded.compared}
        self._counts_gradients = 0 < len(self._tensors) <= WATCHED_GRADIENTS
        self._loaded: dict[int, list[str | Tensor]] = {}
        self._untouched = True
        self.since: int | None = None
        self.replicas_equal(None)

    def replicas_equal(self, step: int | None) -> None:
        """All counts begin anew: the replicas hold the same bits at `step`."""
        self.since = step
        self._apart_untouched = False
        self._updates = self._skips = 0
        self._rates: float | None = 0.0
        self._before = {n: _version(t) for n, t in self._tensors.items()}
        self._gradients_before: dict[str, int] = {}
        self._gradient_writes = dict.fromkeys(self._tensors, 0)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is guarded from now on, or has loaded a state."""
        states = [optimizer.state.get(p) for p in self._tensors.values()]
        tensors = [t for s in states if isinstance(s, dict) for _, t in _tensors_of(s)]
        digests = self._loaded.setdefault(id(optimizer), [])
        digests.append(_names_of_states(states))
        for device in dict.fromkeys(t.device for t in tensors):
            here = [t.detach() for t in tensors if t.device == device]
            digests.append(combine(digest_tensors(here), tuple(range(len(here)))))

    def backward_ended(self) -> None:
        """Gradients are reduced: writes into them from here on are the loop's."""
        if self._counts_gradients:
            self._gradients_before = self._gradient_versions()

    def stepped(self, optimizer: Any, *, skipped: bool) -> None:
        """An optimizer has stepped, or was made to skip."""
        before, self._gradients_before = self._gradients_before, {}
        if skipped:  # what was written into its gradients has moved nothing
            self._skips += 1
            return
        for name, version in self._gradient_versions().items() if before else ():
            self._gradient_writes[name] += version - before.get(name, version)
        self._untouched = False
        self._updates += 1
        for group in getattr(optimizer, "param_groups", ()):
            rate = group.get("lr", 0.0)
            if self._rates is None or not isinstance(rate, (int, float)):
                self._rates = None  # to read a tensor would wait for the device
            elif not self._is_local(group):
                self._rates += rate

    def found_apart(self) -> None:
        """Replicas were seen to differ in a backward, before its update."""
        self._apart_untouched = self._untouched

    def facts(self, differing: Iterable[str]) -> OptimizerFacts:
        """All that is compared between ranks; only asked where replicas differ.

        Args:
            differing: Names of the tensors that differ.
        """
        optimizers = self._optimizers()
        names = [n for n in differing if n in self._tensors]
        return OptimizerFacts(
            updates=self._updates,
            skips=self._skips,
            scale=self._scale(),
            rates=self._rates,
            groups=_digest(self._group_rows(optimizers)),
            steps=_digest(self._state_rows(optimizers)),
            loaded=_digest([_plain(self._loaded.get(id(one), [])) for one in optimizers]),
            writes=sum(_version(self._tensors[n]) - self._before[n] for n in names),
            gradient_writes=sum(self._gradient_writes[n] for n in names),
            untouched=self._untouched or self._apart_untouched,
        )

    def numbers(self) -> dict[str, str]:
        """What the optimizers hold, by name, in words: what `groups` and `steps` are digests of."""
        optimizers = self._optimizers()
        rows = {**self._group_rows(optimizers), **self._state_rows(optimizers)}
        return {name: text[:_TEXT] for name, text in rows.items()}

    def trained(self) -> list[Collection[str]]:
        """The compared tensors that each optimizer updates."""
        return [
            [self._names[id(p)] for p in parameters_of(one) if self._knows(p)]
            for one in self._optimizers()
        ]

    def _knows(self, parameter: Tensor) -> bool:
        return id(parameter) in self._names

    def _is_local(self, group: Mapping[str, Any]) -> bool:
        """Whether a group holds nothing that is compared."""
        return not any(map(self._knows, group["params"]))

    def _gradient_versions(self) -> dict[str, int]:
        gradients = ((n, t.grad) for n, t in self._tensors.items())
        return {n: g._version for n, g in gradients if g is not None}

    def _places(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterable[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
        for number, one in enumerate(optimizers):
            which = f" of optimizer {number}" if len(optimizers) > 1 else ""
            for place, group in enumerate(one.param_groups):
                if not self._is_local(group):
                    yield f"group {place}{which}", one, group

    def _group_rows(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        rows = {"the optimizer" if len(optimizers) == 1 else "optimizers": kinds}
        for where, _, group in self._places(optimizers):
            held = [self._names[id(p)] for p in group["params"] if self._knows(p)]
            of_names = _digest(held)[:8]
            rows[f"parameters of {where}"] = (
                f"{count(len(held), 'parameter')} ({list_names(held)}; {of_names})"
            )
            for key, value in sorted(group.items()):
                if key != "params":
                    rows[f"{key} of {where}"] = _number(value)
        return rows

    def _state_rows(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
        rows = {}
        for where, one, group in self._places(optimizers):
            states = [one.state.get(p) for p in group["params"] if self._knows(p)]
            held = [s for s in states if isinstance(s, dict)]
            steps = _host([s["step"] for s in held if "step" in s])
            rows[f"state of {where}"] = _names_of_states(states)
            if steps:
                lowest, highest = min(steps), max(steps)
                span = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
                rows[f"steps counted by {where}"] = f"{span} ({_digest(steps)[:8]})"
        return rows


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_of(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    held = ((str(k), v) for k, v in state.items() if isinstance(v, Tensor))
    return sorted(((k, v) for k, v in held if v.layout is torch.strided), key=lambda one: one[0])


def _names_of_states(states: Sequence[Any]) -> str:
    """Which names the states of some parameters hold, and how many have one."""
    held = [s for s in states if isinstance(s, dict) and s]
    names = sorted({str(k) for s in held for k, v in s.items() if v is not None})
    return f"{', '.join(names) or 'nothing'} for {len(held)} of {count(len(states), 'parameter')}"


def _host(values: Sequence[Any]) -> list[float]:
    """Numbers, some of them tensors with one element, in one read for each device."""
    found = [float(v) if not isinstance(v, Tensor) else None for v in values]
    for device in dict.fromkeys(v.device for v in values if isinstance(v, Tensor)):
        here = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.device == device]
        read = torch.stack([values[i].detach().reshape(()).double() for i in here]).tolist()
        for index, value in zip(here, read, strict=True):
            found[index] = value
    return [v for v in found if v is not None]


def _number(value: Any) -> str:
    """A value of `param_groups` as text that is equal on ranks that hold the same."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        shown = (
            flat.tolist() if flat.numel() <= _SHOWN_ELEMENTS else _plain([digest_tensors([flat])])
        )
        return repr(shown[0] if value.numel() == 1 else shown)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_number, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_number(v)}' for k, v in value.items())}}}"
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    return type(value).__name__  # its repr may hold an address


def _plain(values: Sequence[Any]) -> list[Any]:
    return [v.tolist() if isinstance(v, Tensor) else v for v in values]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
