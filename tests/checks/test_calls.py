"""Ways to call a module: capture changes nothing, and what it caught repeats bit for bit.

Every case runs as a plain step and as an audit step; on audit steps the own calls are replayed,
from the values and from the bytes that would travel, inside the callback at the end of the backward
as the guard does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from calls import failing, inputs, odd, outputs, state
from calls.case import Case, run
from torch import nn

from sdcwatch.checks.capture import CallCapture
from sdcwatch.checks.captured import Backward
from sdcwatch.checks.payload import pack, unpack
from sdcwatch.checks.replay import Replayer, ReplayOptions, ReplayResult
from sdcwatch.checks.torch_internals import at_end_of_backward, dispatch_modes_off
from sdcwatch.errors import ConfigurationError

CPU = torch.device("cpu")
CASES = (*inputs.CASES, *outputs.CASES, *state.CASES, *odd.CASES, *failing.CASES)
pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.filterwarnings("ignore"),  # of the ways themselves; what is tested is equality
]


@dataclass
class Watcher:
    """Does at the end of a backward what the guard does."""

    audit: bool
    capture: CallCapture | None = None
    backwards: list[Backward] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def attach(self, net: nn.Module) -> None:
        self.capture = CallCapture(
            net,
            list(net.named_parameters()),
            CPU,
            on_gradient=lambda: at_end_of_backward(self.end),
            audit=lambda: self.audit,
        )
        self.capture.attach()

    def end(self) -> None:
        with dispatch_modes_off():  # which count operations
            backward = self.capture.end_backward()
            self.backwards.append(backward)
            if backward.audited:
                self.findings.append(self.finding(backward))
            elif not backward.micro_batch.problem:  # what check 1 asks for where it sees a NaN
                assert unpack(pack(backward.micro_batch), CPU).calls

    def finding(self, backward: Backward) -> str:
        replayer = Replayer(self.capture)
        again = replayer.run(backward.micro_batch, ReplayOptions(watch=True))
        shipped = replayer.self_audit(backward.micro_batch)
        assert described(backward, again) == described(backward, shipped)
        return "; ".join((*backward.doors, described(backward, again)))


def described(backward: Backward, result: ReplayResult) -> str:
    """Why a replay says nothing, or what differs; "" if it is the same bit for bit."""
    if result.not_run or result.error:
        return result.not_run or result.error
    same = (
        torch.equal(backward.gradients, result.gradients)
        and torch.equal(backward.outputs, result.outputs)
        and result.inner_equal
    )
    return "" if same and not result.disturbed else f"differs, {result.disturbed}"


def watched(case: Case, *, audit: bool) -> tuple[list, Watcher]:
    watcher = Watcher(audit)
    try:
        return run(case, watcher.attach), watcher
    finally:
        if watcher.capture is not None:
            assert watcher.capture.failure == ""
            watcher.capture.detach()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_bit_for_bit_the_same_and_each_audit_repeats_or_says_why(case):
    if case.refused:
        with pytest.raises(ConfigurationError):
            watched(case, audit=False)
        return
    expected = run(case)
    plain, _ = watched(case, audit=False)
    audited, watcher = watched(case, audit=True)
    assert plain == expected
    assert audited == expected
    told = [case.reason in finding for finding in watcher.findings if finding]
    if not case.reason:
        assert watcher.findings == [""] * len(watcher.backwards)
    elif case.sometimes:
        assert told == [True]
    else:
        assert told
        assert all(told)
        assert len(told) == len(watcher.findings)
