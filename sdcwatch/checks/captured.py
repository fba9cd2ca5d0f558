"""What a capture holds: calls that wait for their backward, backwards that run, what they leave."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.calling import mutes_logging
from sdcwatch.checks.fingerprint import combine, digest_tensors, salt
from sdcwatch.checks.gradients import GradientLog
from sdcwatch.checks.hidden import HiddenState, advanced
from sdcwatch.checks.module_state import Autocast, Generators, StateWatch, read_autocast
from sdcwatch.checks.nonfinite import probe_plain
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.serialise import Frozen, flat_tensors, tensors_in
from sdcwatch.checks.torch_internals import Edge
from sdcwatch.core.text import list_names


@dataclass
class Backward:
    """What one backward left. Tensors are on the module's device; nothing was waited for.

    Attributes:
        calls: How many calls of the module got a gradient at an output.
        audited: Every one of them was made on an audit step.
        make: Makes `micro_batch`.
        measure: Counts `held_bytes`.
        outputs: int64 (k, 2), digests of the outputs that got a gradient; None unless audited.
        gradients: int64 (n, 2), one digest per compared parameter of the gradient of this
            backward, None being a value; None unless audited.
        probes: float32 () each: the sums of the outputs, non-finite where an output holds a NaN or
            an infinity, or where its sum overflows.
        arrived: float32 () each: the same of the gradients that arrived at outputs.
        loss: float32 (): the only scalar output of the last call; None if it has none or several.
        doors: Ways by which a gradient entered other than by outputs (audit steps).
        roots_known: Whether side doors could be looked for.
        weights: int64 (c + 1, 2): fingerprint of the weights at each call and now; None unless
            audited. Equal rows, or somebody has written weights in between.
        moved: Names of those weights, for when the rows differ.
        communicated: A call has run a collective (audit steps).
    """

    calls: int
    audited: bool
    make: Callable[[], MicroBatch] = field(repr=False)
    measure: Callable[[], int] = field(default=lambda: 0, repr=False)
    outputs: Tensor | None = None
    gradients: Tensor | None = None
    probes: Sequence[Tensor] = ()
    arrived: Sequence[Tensor] = ()
    loss: Tensor | None = None
    doors: tuple[str, ...] = ()
    roots_known: bool = True
    weights: Tensor | None = None
    moved: Callable[[], tuple[str, ...]] = tuple
    communicated: bool = False

    @functools.cached_property
    def micro_batch(self) -> MicroBatch:
        """The calls as a value. Of a plain step it is made, and copied, when first asked for.

        Ask before the loop goes on: what it overwrites is not replayed.
        """
        return self.make()

    @functools.cached_property
    def held_bytes(self) -> int:
        """What it keeps from being freed until it is forgotten, in bytes."""
        return self.measure()


@dataclass(frozen=True, slots=True)
class Kept:
    """Earlier backwards of a step.

    Attributes:
        backwards: In order, the latest ones as far as the limit allows.
        dropped: How many earlier ones were not kept.
    """

    backwards: tuple[Backward, ...]
    dropped: int


_MOST_SIGNATURES = 512


class Signatures:
    """The kinds of inputs that a compiled module was called with: they decide about its kernels.

    Args:
        module: The module.

    Attributes:
        text: All of them, in the order in which they came first; "" of one that is not compiled.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: set[str] = set()
        self.text = ""

    def note(self, args: Any, kwargs: Any) -> None:
        """A call begins."""
        told = [torch.is_grad_enabled(), self._module.training]
        shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors_in((args, kwargs))]
        signature = repr((told, shapes))
        if signature not in self._seen and len(self._seen) < _MOST_SIGNATURES:
            self._seen.add(signature)
            self.text += f"{signature}\n"


class Replicas:
    """Which parameters of a module other ranks hold too.

    Args:
        named: Name and parameter of all.
        local: Names of those that belong to this rank alone.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], local: Collection[str]) -> None:
        held = [(i, n, p) for i, (n, p) in enumerate(named) if n not in local]
        self._places, self._tensors = [i for i, _, _ in held], [p for _, _, p in held]
        self._names = [n for _, n, _ in held]
        self._salts = tuple(salt(n, p) for _, n, p in held)
        self._apart = {i: n for i, (n, _) in enumerate(named) if n in local}

    def digests(self) -> Tensor:
        """Of each of them now, int64 (n, 2), on the device; does not wait."""
        return digest_tensors([p.detach() for p in self._tensors])

    def fingerprint(self, digests_n2: Tensor | None = None) -> Tensor:
        """Of all of them, now or by their digests, int64 (2,), on the device; does not wait."""
        return combine(self.digests() if digests_n2 is None else digests_n2, self._salts)

    def compared(
        self, records: Iterable[CallRecord]
    ) -> tuple[Tensor, Callable[[], tuple[str, ...]]]:
        """Fingerprints at each call and now, int64 (c + 1, 2), and what names those that differ.

        Does not wait for the device; asking for the names does.
        """
        digests, fingerprints = [], []
        for record in records:
            if record.weights is not None and record.digests_of_weights is not None:
                fingerprints.append(record.weights)
                digests.append(record.digests_of_weights)
        digests.append(self.digests())
        fingerprints.append(self.fingerprint(digests[-1]))
        return torch.stack(fingerprints), functools.partial(self._moved, digests)

    def _moved(self, digests: Sequence[Tensor]) -> tuple[str, ...]:
        """Names of those whose digests are not the same all along."""
        every = torch.stack(tuple(digests))
        differs = (every != every[:1]).any(dim=2).any(dim=0).tolist()
        return tuple(name for name, other in zip(self._names, differs, strict=True) if other)

    def rows(self, table_N2: Tensor) -> Tensor:
        """Their rows of a table of all parameters."""
        return table_N2[self._places] if self._apart else table_N2

    def missed(self, log: GradientLog) -> str:
        """Why no other rank can repeat a backward, by the gradients that arrived; or ""."""
        used = sorted(log.arrived & self._apart.keys()) if self._apart else ()
        if not used:
            return ""
        return (
            f"the forward uses {list_names([self._apart[i] for i in used])}, of which each rank "
            "has its own: it is not the same function on every rank, and no other can repeat it; "
            "call what uses them outside of the module that DDP wraps"
        )


class Alive:
    """Lives as long as a node of the graph that holds it."""

    __slots__ = ("__weakref__",)


class Around:
    """What a call may move that no replay can put back, read before it.

    Args:
        module: The module that is called.
        state: Watches its state.
        mutes: A replay of this call leaves out its logging, and with that the collectives of the
            logging; preflight's replay says whether any is left.
    """

    def __init__(self, module: nn.Module, state: StateWatch, *, mutes: bool) -> None:
        self._module, self._state, self._mutes = module, state, mutes
        self._collectives, self._iterators = internals.collective_counts(), self._positions()

    def _positions(self) -> dict[str, Any]:
        return HiddenState(self._module, self._state.unwatched()).advancing()

    def left(self) -> tuple[bool, str]:
        """After the call: whether it has communicated, and why it cannot be made again or ""."""
        counted = not self._mutes and self._collectives != internals.collective_counts()
        return counted, advanced(self._iterators, self._positions())


_NO_ENVIRONMENT: dict[str, str] = {}  # travels in a payload, so it has to pickle


class CallRecord:
    """One call, from its beginning until its graph is gone.

    What only some calls have stands in the class: a plain call pays for none of it.

    Args:
        args: Positional inputs.
        kwargs: The others.
        audit: Whether the call is to be audited.
    """

    generators_after: Generators | None = None
    region = 0
    method = ""
    problem = ""
    released = False
    frozen: Frozen | None = None
    environment: Mapping[str, str] = _NO_ENVIRONMENT
    weights: Tensor | None = None
    digests_of_weights: Tensor | None = None
    around: Around | None = None
    communicated = False
    input_edges: tuple[Edge, ...] = ()
    state_edges: tuple[Edge, ...] = ()
    outputs = 0
    returned_leaves: tuple[int, ...] = ()
    digests: Tensor | None = None
    probes: Sequence[Tensor] = ()
    scalar: Tensor | None = None
    alive: weakref.ref[Alive] | None = None

    def __init__(self, args: Any, kwargs: Any, *, audit: bool) -> None:
        self.audit = audit
        tensors = flat_tensors((*args, *kwargs.values()))
        if tensors is None:
            tensors = tensors_in((args, kwargs))
            self.args, self.kwargs = (args, kwargs) if audit else containers((args, kwargs))
        else:
            self.args, self.kwargs = args, kwargs.copy()
        self.versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self.default_dtype = torch.get_default_dtype()
        self.generators: Generators
        self.autocast: Autocast

    def snapshot(self) -> CallRecord:
        """The record as it is now, which keeps what it holds when the call lets go of it."""
        copied = CallRecord.__new__(CallRecord)
        copied.__dict__.update(self.__dict__)
        return copied

    def read_weights(self, replicas: Replicas) -> None:
        """Before the call, on an audit step: the weights that it computes with."""
        self.digests_of_weights = replicas.digests()
        self.weights = replicas.fingerprint(self.digests_of_weights)

    def look_around(self, module: nn.Module, state: StateWatch) -> None:
        """Before the call, on an audit step: what it may move that no replay can put back."""
        self.around = Around(module, state, mutes=mutes_logging(module, self.method))

    def look_back(self, generators: Generators) -> None:
        """After the call, on an audit step: what it has moved."""
        self.generators_after = generators
        if self.around is not None:
            self.communicated, problem = self.around.left()
            self.problem = self.problem or problem

    def probe(self, outputs: Sequence[Tensor]) -> None:
        """After the call: one sum of each dense output, and which is the only scalar."""
        probes, scalars = [], []
        for output in outputs:
            if output.layout is torch.strided:
                probes.append(probe_plain(output.detach()))
                if output.numel() == 1:
                    scalars.append(probes[-1])
        self.probes = probes
        if len(scalars) == 1:
            self.scalar = scalars[0]

    @property
    def dead(self) -> bool:
        """No backward can run through it any more."""
        return self.alive is not None and self.alive() is None

    @property
    def overwritten(self) -> bool:
        """An input has been written into since the call."""
        return any(tensor._version != version for tensor, version in self.versions)

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps from being freed."""
        own = 0 if self.frozen is None else self.frozen.size_bytes
        return own + sum(t.numel() * t.element_size() for t, _ in self.versions)

    def release(self) -> None:
        """Let go of the inputs."""
        self.args = self.kwargs = None
        self.versions = []
        self.frozen = None
        self.released = True
        self.problem = self.problem or "its backward has run"


class Arrivals:
    """What arrived at the outputs of one call in one window."""

    def __init__(self) -> None:
        self.totals: dict[int, Any] = {}
        self.inner: dict[int, list[Tensor]] = {}
        self.versions: list[tuple[Tensor, int]] = []
        self.leaves: dict[int, list[Tensor]] = {}

    @property
    def overwritten(self) -> bool:
        """A gradient has been written into since it arrived."""
        return any(tensor._version != version for tensor, version in self.versions)

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps from being freed."""
        totals = self.totals.values()
        return sum(t.size_bytes if isinstance(t, Frozen) else t.nbytes for t in totals)


class BackwardWindow:
    """One backward."""

    def __init__(self, task: int, size: int, device: torch.device, generators: Generators) -> None:
        self.task = task
        self.inside: set[int] = set()
        self.generators = generators
        self.autocast = read_autocast(device)
        self._size = size
        self._log: GradientLog | None = None
        self.arrivals: dict[CallRecord, Arrivals] = {}
        self.probes: list[Tensor] = []
        self.kept_bytes = 0

    @property
    def log(self) -> GradientLog:
        """Digests of what arrives at parameters; made when an audit first asks for it."""
        if self._log is None:
            self._log = GradientLog(self._size)
        return self._log

    @property
    def reentrant(self) -> bool:
        """Another backward ran inside."""
        return bool(self.inside)


class InertCopyHook:
    """A hook that copies of the module do not carry: what is copied or pickled does nothing.

    The stand-in is from the standard library, so that a pickled model loads without this package.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = internals.hidden_from_compiler(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook does on the module itself."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _stand_in()

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "sdcwatch.copied_hook")


def _stand_in() -> Callable[..., None]:
    return functools.partial(sys.audit, "sdcwatch.copied_hook")


def held_bytes(calls: Mapping[CallRecord, Arrivals]) -> int:
    """Bytes that some calls, and what arrived at them, keep from being freed."""
    return sum(record.held_bytes + arrivals.held_bytes for record, arrivals in calls.items())


def outputs_of(out: Any) -> list[Tensor]:
    """The tensors with a gradient in what a module returned, in a fixed order."""
    kind = type(out)
    values = (out,) if kind is Tensor else out if kind is tuple or kind is list else None
    tensors = None if values is None else flat_tensors(values)
    return [t for t in (tensors_in(out) if tensors is None else tensors) if t.requires_grad]


def containers(value: Any) -> Any:
    """A copy of the containers in a value, with the same tensors in them."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(containers(item) for item in value)
    return value
