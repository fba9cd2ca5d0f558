"""From a fault plan to what a grade needs, and to what each segment of the demo plants."""

from __future__ import annotations

from dataclasses import replace

from sdcwatch.core.grade import Planted
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults.plan import Expectation, Fault, FaultPlan

EVER = 2**31
_DIVERGING_SITES = ("weight", "optimizer_state", "all_reduce")
_FEWEST_RANKS = 3
"""With fewer, nobody can settle whether producer or replayer is wrong."""


def planted_of(plan: FaultPlan, world_size: int) -> tuple[Planted, ...]:
    """What a grade needs to know of each fault."""
    return tuple(_planted(fault, world_size) for fault in plan.faults)


def _planted(fault: Fault, world_size: int) -> Planted:
    first, last = span_of(fault)
    ranks = tuple(range(world_size)) if fault.ranks == "all" else fault.ranks
    common = Planted(
        name=fault.label,
        where=" ".join(
            filter(None, (fault.kind.replace("_", " "), "in", fault.site, fault.target))
        ),
        ranks=ranks,
        first_step=first,
        last_step=last,
        expected="nothing stated",
    )
    if isinstance(fault.expect, Expectation):
        wanted = fault.expect
        return replace(
            common,
            expected="verdict",
            check=wanted.check,
            outcome=wanted.outcome,
            named=wanted.ranks,
            step=wanted.step,
        )
    return replace(common, expected="miss") if fault.expect == "miss" else common


def span_of(fault: Fault) -> tuple[int, int]:
    """First and last step at which a fault may act."""
    if fault.step is not None:
        return fault.step, fault.step
    return fault.steps if fault.steps is not None else (1, EVER)


def fit_to(plan: FaultPlan, world_size: int) -> FaultPlan:
    """The plan with every rank taken modulo the world size: for the plan that ships with the demo.

    Raises:
        ConfigurationError: Too few ranks to settle an audit.
    """
    if world_size < _FEWEST_RANKS:
        msg = (
            f"Expected at least {_FEWEST_RANKS} ranks for the default faults, but got "
            f"{world_size}. Pass more --nodes, a fault plan of your own, or --faults none."
        )
        raise ConfigurationError(msg)
    return replace(plan, faults=tuple(_fit(fault, world_size) for fault in plan.faults))


def _fit(fault: Fault, world_size: int) -> Fault:
    wanted = fault.expect
    if isinstance(wanted, Expectation):
        wanted = replace(wanted, ranks=tuple(r % world_size for r in wanted.ranks))
    ranks = fault.ranks if fault.ranks == "all" else tuple(r % world_size for r in fault.ranks)
    return replace(fault, ranks=ranks, expect=wanted)


def check_ranks(plan: FaultPlan, world_size: int) -> None:
    """Check that every rank of the plan exists.

    Raises:
        ConfigurationError: One does not.
    """
    for fault in plan.faults:
        absent = [r for r in fault.ranks if r != "all" and int(r) >= world_size]
        if absent:
            msg = (
                f"Expected ranks below {world_size}, but got rank {absent[0]} in fault "
                f"{fault.label!r}. Correct the plan, or pass more --nodes."
            )
            raise ConfigurationError(msg)


def after(plan: FaultPlan, step: int) -> FaultPlan:
    """What is left of a plan once the machine that failed at `step` has been replaced."""
    return replace(plan, faults=tuple(f for f in plan.faults if span_of(f)[0] > step))


def may_stop(plan: FaultPlan) -> bool:
    """Whether the plan holds a fault that makes replicas differ, which ends a segment."""
    return any(fault.site in _DIVERGING_SITES for fault in plan.faults)
