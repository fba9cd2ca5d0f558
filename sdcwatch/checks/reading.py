"""Reads what a backward has left: the micro-batch, the digests, the calls in the graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from sdcwatch.checks import torch_internals as internals
from sdcwatch.checks.captured import Arrivals, BackwardWindow, CallRecord
from sdcwatch.checks.fingerprint import digest_tensors
from sdcwatch.checks.gradients import digest_gradient
from sdcwatch.checks.module_state import StateWatch
from sdcwatch.checks.payload import Call, MicroBatch
from sdcwatch.checks.serialise import Frozen, NotTransportable, freeze
from sdcwatch.checks.side_doors import CallGraph
from sdcwatch.checks.torch_internals import Edge

OVERWRITTEN = "an input, or a gradient at an output, was overwritten since the call"
_Calls = Mapping[CallRecord, Arrivals]


def make_micro_batch(
    window: BackwardWindow, calls: _Calls, state: StateWatch, signatures: str, failure: str
) -> MicroBatch:
    """The calls of a backward as a value; those of a plain step are copied here.

    Args:
        window: The backward.
        calls: Each call, and what arrived at its outputs, in the order of the calls.
        state: Of the module; what a plain step did not copy is read now.
        signatures: Inputs that a compiled module has seen.
        failure: What went wrong in a hook, or "".
    """
    problem = failure or next((record.problem for record in calls if record.problem), "")
    if not problem and any(r.overwritten or a.overwritten for r, a in calls.items()):
        problem = OVERWRITTEN
    made: tuple[Call, ...] = ()
    if not problem:
        try:
            with internals.dispatch_modes_off():
                made = tuple(_call(record, a, state) for record, a in calls.items())
        except NotTransportable as error:
            problem = str(error)
    return MicroBatch(
        made,
        window.generators,
        window.autocast,
        reentrant=window.reentrant,
        signatures=signatures,
        exact=all(record.audit for record in calls),
        problem=problem,
    )


def _call(record: CallRecord, arrivals: Arrivals, state: StateWatch) -> Call:
    scope = state.scope
    inputs = record.frozen
    if inputs is None:
        # Of a plain step: the state of now is as good for a question about finiteness.
        inputs = freeze((record.args, record.kwargs, state.read()), scope)
    totals = arrivals.totals.items()
    return Call(
        inputs=inputs,
        method=record.method,
        generators=record.generators,
        generators_after=record.generators_after,
        autocast=record.autocast,
        region=record.region,
        default_dtype=record.default_dtype,
        environment=record.environment,
        weights=record.weights,
        outputs=record.outputs,
        gradients={n: t if isinstance(t, Frozen) else freeze(t, scope) for n, t in totals},
        inner={number: freeze(parts, scope) for number, parts in arrivals.inner.items()},
    )


def output_digests(calls: _Calls, device: torch.device) -> Tensor:
    """int64 (k, 2): of the outputs that got a gradient, call by call."""
    rows = [
        record.digests[sorted({*a.totals, *a.inner})]
        for record, a in calls.items()
        if record.digests is not None
    ]
    empty = torch.zeros((0, 2), dtype=torch.int64, device=device)
    return torch.cat([empty, *rows])


def gradient_table(window: BackwardWindow, calls: _Calls, device: torch.device) -> Tensor:
    """int64 (n, 2): one digest per parameter, of what a replay can repeat.

    Of a parameter that the module returned, that is what came from inside the call.
    """
    table_N2 = window.log.table(device)
    for record, arrivals in calls.items():
        for leaf in record.returned_leaves:
            parts = arrivals.leaves.get(leaf)
            row = digest_tensors([None])[0] if parts is None else digest_gradient(total(parts))
            table_N2[leaf] = row.to(device)
    return table_N2


def find_call_graphs(
    roots: Sequence[Node], calls: _Calls, key: str, leaves: Mapping[Node, int]
) -> list[CallGraph]:
    """Find the calls in the graph again by the tags on its nodes: nothing else has held it.

    Args:
        roots: Where the backward began.
        calls: Those to find.
        key: Of the tags.
        leaves: The accumulation of each parameter, and its number.
    """
    outputs: dict[int, list[Edge]] = {id(record): [] for record in calls}
    inputs: dict[int, set[Node]] = {id(record): set() for record in calls}
    carried: dict[int, set[Node]] = {id(record): set() for record in calls}
    tokens = {id(r.alive()): id(r) for r in calls if r.alive is not None}
    for node in internals.walk(roots):
        if internals.accumulates(node):  # never tagged
            continue
        for owner, kind, number in internals.tags_of(node, key):
            if kind == "output" and id(owner) in tokens:
                outputs[tokens[id(owner)]].append(Edge(node, number))
            elif kind != "output" and id(owner) in inputs:
                (carried if kind == "carried" else inputs)[id(owner)].add(node)
    nodes = {number: node for node, number in leaves.items()}
    return [
        CallGraph(
            outputs=(
                *outputs[id(record)],
                *(Edge(nodes[leaf], 0) for leaf in record.returned_leaves if leaf in nodes),
            ),
            upstream=frozenset(inputs[id(record)] | carried[id(record)]),
            carried=frozenset(carried[id(record)]),
            region=record.region,
        )
        for record in calls
    ]


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of gradients in the order in which they arrived, as the engine adds them up."""
    return functools.reduce(torch.add, parts)


def digest_each(tensors: Sequence[Tensor]) -> Tensor:
    """int64 (n, 2): the digest of each of some tensors of any layout."""
    return torch.stack([digest_gradient(tensor) for tensor in tensors])
