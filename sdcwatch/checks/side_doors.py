"""Ways by which a gradient enters a module other than by its outputs.

A replay starts from the gradients at the outputs of a call. A regulariser on a parameter, an
auxiliary loss that the module leaves in an attribute, ``ddp.module.encode(x)`` beside the call, a
gradient penalty: they reach the parameters by another way, and a replay cannot repeat that. Seen
from the roots of the backward, each is an edge from a node outside every call to a parameter, or to
a node inside a call that is none of its outputs.

**False positives** none in the 240 ways to call a module that were tried: a node of the graph is
either made by a call or it is not. **Cost** a walk over the graph, 3 ms for 858 nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.autograd.graph import Node

from sdcwatch.checks.torch_internals import Edge, accumulates, walk

_CASTS = frozenset(("ToCopyBackward0", "torch::autograd::AccumulateGrad"))
SHOWN = 8
"""Doors named at most."""


@dataclass(frozen=True, slots=True)
class CallGraph:
    """The part of the graph that one call made.

    Attributes:
        outputs: Where gradients arrive from outside.
        upstream: Nodes behind its inputs and behind the state that it found.
        carried: Of these, the nodes behind the state.
        region: Number of its autocast region; 0 for none.
    """

    outputs: tuple[Edge, ...]
    upstream: frozenset[Node]
    carried: frozenset[Node]
    region: int

    def inside(self) -> set[Node]:
        """Every node that the call made, and the accumulations below."""
        starts = [edge.node for edge in self.outputs if edge.node not in self.upstream]
        return walk(starts, lambda node: node in self.upstream)


def find_side_doors(
    roots: Iterable[Node], calls: Sequence[CallGraph], parameters: Mapping[Node, str]
) -> tuple[str, ...]:
    """Name every way into the calls, and into the parameters, that is no output.

    Args:
        roots: Where the backward began.
        calls: The calls whose outputs got a gradient.
        parameters: The accumulation of each parameter, and its name.

    Returns:
        One sentence each, without a full stop; empty if there is none.
    """
    insides = [call.inside() for call in calls]
    within = set[Node]().union(*insides)
    outputs = {edge for call in calls for edge in call.outputs}
    found = []
    for node in walk(roots) - within:
        for following, index in node.next_functions:
            if following is None or Edge(following, index) in outputs:
                continue
            if following in parameters:
                name = parameters[following]
                found.append(f"{node.name()} outside the call reads the parameter {name}")
            elif following in within and not accumulates(following):
                below = _nearest(following, parameters)
                found.append(
                    f"{node.name()} outside the call reads {following.name()} inside it{below}"
                )
    found += _between(calls, insides)
    return tuple(sorted(dict.fromkeys(found)))[:SHOWN]


def _between(calls: Sequence[CallGraph], insides: Sequence[set[Node]]) -> list[str]:
    """Ways from one call into another that go around inputs and outputs."""
    found = []
    for number, call in enumerate(calls):
        if any(f in call.carried for node in insides[number] for f, _ in node.next_functions if f):
            found.append("the graph of an earlier call goes on in the state of the module")
        for earlier in range(number):
            shared = insides[number] & insides[earlier]
            casts = _CASTS if call.region and call.region == calls[earlier].region else ()
            if names := {n.name() for n in shared if not accumulates(n)} - set(casts):
                found.append(f"two calls share {min(names)}")
    return found


def _nearest(node: Node, parameters: Mapping[Node, str]) -> str:
    """Where in the model a node is: the first parameter that is met below it."""
    seen, waiting = {node}, [node]
    for current in waiting:  # grows meanwhile: breadth first
        if current in parameters:
            return f", near {parameters[current]}"
        following = [f for f, _ in current.next_functions if f is not None and f not in seen]
        seen.update(following)
        waiting += following
    return ""
