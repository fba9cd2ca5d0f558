"""Remembers the calls of a module and the gradients that arrive at their outputs.

`CallCapture` hooks the module that DDP wraps. The training loop stays as it is: no output is
replaced, no number, no graph and no exception of the user's changes.

**In order, on every step**

1. A call begins: references to its inputs (with their versions, so that an overwritten one is
   known), generators, autocast. `audit()` is asked here; on an audit step inputs and state are
   copied, and weights are fingerprinted.
2. It ends: each tensor that it returned gets a prehook on its *node*, which runs after every hook
   of the user's and, unlike an identity in between, leaves the user with the graph that there was.
   A hook of the user's on the module is part of the call, whenever it was registered.
3. The first gradient that arrives calls `on_gradient()`, once per backward that adds to the
   gradients of the module: the place to queue a callback (`torch_internals.at_end_of_backward`).
4. In that callback `end_backward()` returns a `Backward`: the calls that got a gradient as a
   `MicroBatch`, and on audit steps digests, side doors and weights. `keep()` sets one of an
   accumulation aside; `take_kept()` hands them out.

It is idle under `no_grad`, inside `torch.func`, in a replay, and in `torch.autograd.grad`. Nothing
here waits for the device, or raises but in a CUDA graph's capture: see `MicroBatch.problem`.

**A call** is one from outside the module: what it calls itself is part of it. **A window** belongs
to one graph task of the engine; one that runs inside is a reentrant checkpoint. **Memory**: nothing
here keeps a graph alive. A call is forgotten when its graph is. **Cost** of a plain call:
`benchmarks/hooks.py`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.calling import Entrances, put_outermost
from sdcwatch.checks.captured import (
    Alive,
    Arrivals,
    Backward,
    BackwardWindow,
    CallRecord,
    InertCopyHook,
    Kept,
    Replicas,
    Signatures,
    held_bytes,
    outputs_of,
)
from sdcwatch.checks.module_state import (
    HostGenerators,
    StateWatch,
    numeric_environment,
    read_autocast,
    read_generators,
)
from sdcwatch.checks.nonfinite import probe_plain
from sdcwatch.checks.reading import (
    digest_each,
    find_call_graphs,
    gradient_table,
    make_micro_batch,
    output_digests,
)
from sdcwatch.checks.replaying import replaying
from sdcwatch.checks.serialise import NotTransportable, Scope, freeze, tensors_in
from sdcwatch.checks.side_doors import find_side_doors
from sdcwatch.checks.signals import let_through
from sdcwatch.checks.torch_internals import Edge, RunningBackward
from sdcwatch.errors import ConfigurationError, SdcwatchError

_IN_A_CUDA_GRAPH = (
    "Expected the training step to run as Python, but got one that is captured into a CUDA graph: "
    "a replay of the graph runs no hook, so nothing would be checked. Train without the capture; "
    'torch.compile(mode="reduce-overhead") makes graphs of the parts in between, and is guarded.'
)
_NOT_KEPT = "the micro-batch was not kept: it is larger than the limit"


class CallCapture:
    """Captures the calls of one module, see the head of this file.

    Args:
        module: The bare module, as DDP calls it.
        parameters: Name and parameter, in the order of the digests.
        device: Device of the module.
        on_gradient: Called inside a backward at its first gradient.
        audit: Whether the call that begins is to be audited.
        local: Names of parameters that other ranks hold otherwise: in no digest.
        max_kept_bytes: What plain steps and `keep` may hold at most.

    Attributes:
        signatures: The kinds of inputs of a compiled module, in order.
    """

    def __init__(  # noqa: PLR0913 - most of it by name
        self,
        module: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        *,
        on_gradient: Callable[[], None] = lambda: None,
        audit: Callable[[], bool] = lambda: False,
        local: Collection[str] = (),
        max_kept_bytes: int = 1 << 30,
    ) -> None:
        self.module, self.device = module, device
        self.entrances = Entrances(module)
        self.named = tuple(parameters)
        self.scope = Scope(module, device)
        self.state = StateWatch(module, self.scope)
        self._parameters = [p for _, p in self.named]
        self.replicas = Replicas(self.named, local)
        self._on_gradient, self._audit = on_gradient, audit
        self._max_kept_bytes = max_kept_bytes
        self._thread = threading.local()
        self._host = HostGenerators()
        self._records: list[CallRecord] = []
        self._window: BackwardWindow | None = None
        self._ignored = -1
        self._reached: nn.Parameter | None = None
        self._leaf_hooks: list[Any] = []
        self._leaves: dict[Node, int] = {}
        self._kept: deque[Backward] = deque()
        self._dropped = self._kept_bytes = 0
        self._handles: list[Any] = []
        self._places: dict[nn.Module, tuple[int, int]] = {}
        self._wrapped: Callable[..., Any] | None = None
        self._region: tuple[Node | None, int, int] = (None, 0, 0)
        self.signatures = Signatures(module)
        self._key = f"sdcwatch.{id(self)}"
        self.compiled = internals.is_compiled(module)
        self.failure = ""

    # --- on and off ---

    def attach(self) -> None:
        """Put the hooks on. Needs no other rank; may be called again.

        Raises:
            ConfigurationError: The module takes no hooks.
        """
        if self._handles or self._wrapped is not None:
            return
        if isinstance(self.module, torch.jit.ScriptModule):
            msg = (
                "Expected a module written in Python, but got a scripted one, which takes no hooks."
                " Wrap it in an nn.Module that calls it."
            )
            raise ConfigurationError(msg)
        inner = internals.compiled_call(self.module)
        if inner is None:
            begin, end = InertCopyHook(self._begin), InertCopyHook(self._end)
            for one in (self.module, *self.entrances.below.values()):
                before = one.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
                after = one.register_forward_hook(end, with_kwargs=True, always_call=True)
                self._handles += [before, after]
                self._places[one] = before.id, after.id
            return
        self._wrapped = inner
        internals.set_compiled_call(self.module, self._around(inner))

    def detach(self) -> None:
        """Take every hook off, in any state; may be called again."""
        while self._handles:
            self._handles.pop().remove()
        self._places.clear()
        if self._wrapped is not None:
            internals.set_compiled_call(self.module, self._wrapped)
            self._wrapped = None
        self.abort()

    def abort(self) -> None:
        """Forget every call and every backward, in any state."""
        self._records.clear()
        self._close_window()
        self._kept.clear()
        self._dropped = self._kept_bytes = 0

    def _around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        # Hooks of a module compiled by `module.compile()` would be traced with it.
        begin = internals.hidden_from_compiler(self._begin)
        end = internals.hidden_from_compiler(self._end)
        module = self.module

        def call(*args: Any, **kwargs: Any) -> Any:
            out = None
            try:
                begin(module, args, kwargs)
                out = inner(*args, **kwargs)
            finally:
                end(module, args, kwargs, out)
            return out

        return call

    # --- a call ---

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        local = self._thread
        depth = getattr(local, "depth", 0)
        if self.entrances.leads_on(module):
            local.depth = 0
            return
        if depth and self._wrapped is None and module is self.module and not self.entrances.inside:
            # A KeyboardInterrupt in a call skips the hook at its end.
            depth = min(depth, internals.calls_in_progress(module) - 1)
        local.depth = depth + 1
        if depth:
            return
        local.open, late = None, put_outermost(module, self._places.get(module))
        if internals.in_functorch():
            return
        if self.compiled:
            self.signatures.note(args, kwargs)
        if not torch.is_grad_enabled() or replaying():
            return
        if internals.capturing_cuda_graph():
            raise ConfigurationError(_IN_A_CUDA_GRAPH)
        try:
            local.open = self._open(module, args, kwargs)
            local.open.problem = local.open.problem or late
        except (SdcwatchError, SystemExit):  # what was found out about the last step
            raise
        except Exception as error:
            self._failed(error)

    def _open(self, module: nn.Module, args: Any, kwargs: Any) -> CallRecord:
        if self._window is not None and internals.current_graph_task() < 0:
            self._close_window()  # its backward ended in an exception
        audit = self._audit()
        if not audit:
            record = CallRecord(args, kwargs, audit=False)
            self._open_plain(record, module)
            return record
        with internals.dispatch_modes_off():
            record = CallRecord(args, kwargs, audit=True)
            self._open_plain(record, module)
            self._open_audit(record)
        return record

    def _open_plain(self, record: CallRecord, module: nn.Module) -> None:
        record.generators = self._host.read(self.device, always=record.audit)
        record.autocast = autocast = read_autocast(self.device)
        if autocast.casts:
            record.region = self._region_number(record)
        record.method = self.entrances.method(module)
        needing = [t for t, _ in record.versions if t.requires_grad]
        if needing:
            record.input_edges = tuple(map(internals.edge_of, needing))

    def _open_audit(self, record: CallRecord) -> None:
        state = self.state.read()
        held = tensors_in((dict(state.attributes), dict(state.buffers)))
        carried = [t for t in held if t.requires_grad and t.grad_fn is not None]
        record.state_edges = tuple(map(internals.edge_of, carried))
        record.environment = numeric_environment()
        record.read_weights(self.replicas)
        record.look_around(self.module, self.state)
        try:
            record.frozen = freeze((record.args, record.kwargs, state), self.scope)
        except NotTransportable as error:
            record.problem = str(error)
        record.args = record.kwargs = None  # the copy stands for them
        record.versions = []
        self._hook_leaves()

    def _end(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        local = self._thread
        depth = getattr(local, "depth", 1)
        local.depth = max(0, depth - 1)
        if depth != 1 or internals.in_functorch():
            return
        collected = getattr(local, "collected", None)
        if replaying():
            if collected is not None:
                collected.append(out)
            return
        record, local.open = getattr(local, "open", None), None
        if record is None or out is None or not torch.is_grad_enabled():
            return
        try:
            self._finish(record, out)
        except Exception as error:
            self._failed(error)

    def _finish(self, record: CallRecord, out: Any) -> None:
        self._sweep()
        if self._host.learning:
            self._host.learn(record.generators)
        if record.audit:
            record.look_back(read_generators(self.device))
        tensors = outputs_of(out)
        record.outputs = len(tensors)
        if not tensors:
            return
        alive = Alive()
        record.alive = weakref.ref(alive)
        inner = self._look_inside(record, tensors) if record.audit else {}
        inputs, places = {*record.input_edges}, set[Edge]()
        upstream = {e.node for e in (*record.input_edges, *record.state_edges)}
        for number, tensor in enumerate(tensors):
            edge = internals.edge_of(tensor)
            if edge in inputs or edge in places or edge.node in upstream:
                continue
            self._hook_output(record, number, edge, alive, inner)
            places.add(edge)
        record.input_edges = record.state_edges = ()
        with internals.dispatch_modes_off():
            record.probe(tensors)
            if record.audit:
                record.digests = digest_each(tensors)
        self._records.append(record)

    def _hook_output(
        self,
        record: CallRecord,
        number: int,
        edge: Edge,
        alive: Alive,
        inner: dict[Edge, list[tuple[Node, int]]],
    ) -> None:
        index = edge.number  # a hook that held the edge would keep its own node alive for good
        if record.audit:
            leaf = self._leaves.get(edge.node)
            for node, place in inner.get(edge, ()):
                node.register_hook(
                    lambda gradients, _, at=place: self._part(record, number, gradients[at], leaf)
                )
            if leaf is not None:
                record.returned_leaves = (*record.returned_leaves, leaf)
        if internals.accumulates(edge.node):
            return
        if record.audit:
            internals.tags_of(edge.node, self._key).append((alive, "output", index))
        # It holds `alive` as well: the call is forgotten when its nodes are gone.
        arrived = functools.partial(self._arrived, record, number, index, alive)
        edge.node.register_prehook(arrived)

    def _look_inside(
        self, record: CallRecord, tensors: Sequence[Tensor]
    ) -> dict[Edge, list[tuple[Node, int]]]:
        """Which nodes inside the call read each output; marks what lies behind its inputs."""
        upstream = {e.node for e in (*record.input_edges, *record.state_edges)}
        carried = {e.node for e in record.state_edges}
        for node in upstream:
            if not internals.accumulates(node):
                kind = "carried" if node in carried else "input"
                internals.tags_of(node, self._key).append((record, kind, 0))
        edges = [internals.edge_of(t) for t in tensors]
        if len(edges) == 1 and not internals.accumulates(edges[0].node):
            return {}
        wanted = set(edges)
        readers: dict[Edge, list[tuple[Node, int]]] = {}
        starts = [e.node for e in edges if e.node not in upstream]
        for node in internals.walk(starts, lambda n: n in upstream):
            for place, (following, index) in enumerate(node.next_functions):
                if following is not None and (edge := Edge(following, index)) in wanted:
                    readers.setdefault(edge, []).append((node, place))
        return readers

    def _region_number(self, record: CallRecord) -> int:
        """The same number for calls that share one region of autocast and its casts."""
        with internals.dispatch_modes_off():
            node = internals.cached_cast(self.device.type)
        if node is None:
            return 0
        known, number, versions = self._region
        now = sum(p._version for p in self._parameters)
        if node is not known:
            number, versions = number + 1, now
            self._region = (node, number, versions)
        if now != versions:
            record.problem = "the autocast region is older than the weights, and so are its casts"
        return number

    def _sweep(self) -> None:
        """Forget calls whose graph is gone; one may have kept another's alive."""
        known = -1
        while self._records and len(self._records) != known:
            known = len(self._records)
            self._records = [record for record in self._records if not record.dead]

    def _failed(self, error: Exception) -> None:
        let_through(error)
        self.failure = self.failure or f"{type(error).__name__}: {error}"

    # --- a backward ---

    def _hook_leaves(self) -> None:
        if self._leaf_hooks:
            return
        for number, parameter in enumerate(self._parameters):
            if not parameter.requires_grad:
                continue
            node = internals.edge_of(parameter).node
            self._leaves[node] = number
            self._leaf_hooks.append(
                node.register_prehook(
                    lambda gradients, at=number: self._arrived_at_leaf(at, gradients[0])
                )
            )

    def _join(self) -> BackwardWindow | None:
        """The window that a gradient belongs to; None where it adds to nothing."""
        task = internals.current_graph_task()
        window = self._window
        if window is not None:
            if task == window.task or task in window.inside:
                return window
            if len(internals.running_backwards()) > 1:
                window.inside.add(task)
                return window
            self._close_window()  # its backward ended in an exception
        if task == self._ignored or replaying() or internals.in_functorch():
            return None
        if not self._accumulates():
            self._ignored = task
            return None
        # Python's and NumPy's only where they matter: reading them takes longer than all the rest.
        generators = self._host.read(self.device, always=bool(self._leaf_hooks))
        self._window = BackwardWindow(task, len(self._parameters), self.device, generators)
        self._on_gradient()
        return self._window

    def _accumulates(self) -> bool:
        """Whether the backward that runs adds to a gradient of the module."""
        # First the one that the last backward reached: one question instead of one per parameter.
        last = self._reached
        if last is not None and last.requires_grad and internals.will_accumulate(last):
            return True
        trained = [p for p in self._parameters if p.requires_grad]
        self._reached = next((p for p in trained if internals.will_accumulate(p)), None)
        if self._reached is not None:
            return True
        # A reentrant checkpoint hides what is in it until its own backward has begun.
        return bool(trained) and any(
            any(map(internals.is_reentrant_checkpoint, internals.walk(running.roots)))
            for running in internals.running_backwards()
            if running.accumulates
        )

    def _arrived(
        self, record: CallRecord, number: int, index: int, alive: Alive, gradients: Sequence[Any]
    ) -> None:
        window, gradient = self._join(), gradients[index]
        if window is None or gradient is None:
            return
        try:
            with internals.dispatch_modes_off():
                self._note_arrival(window, record, number, gradient.detach())
        except Exception as error:
            let_through(error)
            record.problem = record.problem or f"{type(error).__name__}: {error}"

    def _note_arrival(
        self, window: BackwardWindow, record: CallRecord, number: int, gradient: Tensor
    ) -> None:
        arrivals = window.arrivals.get(record)
        if arrivals is None:
            arrivals = window.arrivals[record] = Arrivals()
        if gradient.layout is torch.strided:
            window.probes.append(probe_plain(gradient))
        if record.audit:
            arrivals.totals[number] = freeze(gradient, self.scope)
            return
        window.kept_bytes += gradient.numel() * gradient.element_size()
        if window.kept_bytes > self._max_kept_bytes:
            record.problem = record.problem or _NOT_KEPT
            return
        arrivals.totals[number] = gradient
        arrivals.versions.append((gradient, gradient._version))

    def _part(
        self, record: CallRecord, number: int, gradient: Tensor | None, leaf: int | None
    ) -> None:
        window = self._join()
        if window is None:
            return
        arrivals = window.arrivals.setdefault(record, Arrivals())
        if gradient is None:
            return
        with internals.dispatch_modes_off():
            copied = gradient.detach().clone()
        if leaf is not None:
            arrivals.leaves.setdefault(leaf, []).append(copied)
        else:
            arrivals.inner.setdefault(number, []).append(copied)

    def _arrived_at_leaf(self, number: int, gradient: Tensor | None) -> None:
        window = self._join()
        if window is None or gradient is None:
            return
        try:
            with internals.dispatch_modes_off():
                window.log.add(number, gradient.detach())
        except Exception as error:
            self._failed(error)

    def end_backward(self) -> Backward | None:
        """Close the window, at the end of the backward; None where no gradient has arrived.

        Needs no other rank and does not wait for the device. Call it in the callback that
        `on_gradient` has queued.
        """
        window = self._window
        if window is None:
            return None
        running = internals.ending_backwards()
        try:
            with internals.dispatch_modes_off():
                return self._read_window(window, running)
        finally:
            if not any(backward.retains_graph for backward in running):
                for record in window.arrivals:
                    record.release()
            self._close_window()

    def _read_window(self, window: BackwardWindow, running: Sequence[RunningBackward]) -> Backward:
        arrivals = {r: window.arrivals[r] for r in self._records if r in window.arrivals}
        audited = bool(self._leaf_hooks) and all(record.audit for record in arrivals)
        held = {record.snapshot(): a for record, a in arrivals.items()}
        failure, self.failure = self.failure, ""  # of this step; the next one may go well
        missed = self.replicas.missed(window.log) if self._leaf_hooks else ""
        backward = Backward(
            len(arrivals),
            audited,
            functools.partial(
                make_micro_batch, window, held, self.state, self.signatures.text, failure or missed
            ),
            functools.partial(held_bytes, held),
            probes=[probe for record in arrivals for probe in record.probes],
            arrived=window.probes,
            loss=next((record.scalar for record in reversed(arrivals)), None),
        )
        if not audited:
            return backward
        weights, moved = self.replicas.compared(arrivals)
        roots = [root for one in running for root in one.roots]
        graphs = find_call_graphs(roots, arrivals, self._key, self._leaves)
        names = {node: self.named[number][0] for node, number in self._leaves.items()}
        return replace(
            backward,
            outputs=output_digests(arrivals, self.device),
            gradients=self.replicas.rows(gradient_table(window, arrivals, self.device)),
            doors=find_side_doors(roots, graphs, names),
            roots_known=bool(roots),
            weights=weights,
            moved=moved,
            communicated=any(record.communicated for record in arrivals),
        )

    def _close_window(self) -> None:
        self._window = None
        if self._leaf_hooks and not any(r.audit and not r.released for r in self._records):
            while self._leaf_hooks:
                self._leaf_hooks.pop().remove()
            self._leaves = {}

    # --- what stays ---

    def weights(self) -> Tensor:
        """The fingerprint of all replicas now, int64 (2,), on the device; does not wait."""
        return self.replicas.fingerprint()

    def keep(self, backward: Backward) -> None:
        """Set aside a backward of a step that goes on; the earliest go when it gets too much."""
        self._kept.append(backward)
        self._kept_bytes += backward.held_bytes
        while self._kept_bytes > self._max_kept_bytes:
            self._kept_bytes -= self._kept.popleft().held_bytes
            self._dropped += 1

    def take_kept(self) -> Kept:
        """Hand out what was set aside, and forget it."""
        kept = Kept(tuple(self._kept), self._dropped)
        self._kept.clear()
        self._dropped = self._kept_bytes = 0
        return kept

    @contextmanager
    def collecting(self) -> Iterator[list[Any]]:
        """Collect what the module returns at the place where capture looks, in a replay."""
        before = getattr(self._thread, "collected", None), getattr(self._thread, "depth", 0)
        collected: list[Any] = []
        self._thread.collected, self._thread.depth = collected, 0
        try:
            yield collected
        finally:
            self._thread.collected, self._thread.depth = before
