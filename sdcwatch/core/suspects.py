"""Suspect devices: everything that checks found out about one device, and what a person decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdcwatch.core.records import Closing, Device, RankState, Suspect, plain
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import clock, evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectDevice:
    """One device that a check has named.

    Attributes:
        findings: What each check found, in the order of checks; at least one.
        closing: What a person decided, if that covers the latest evidence.
    """

    findings: tuple[Suspect, ...]
    closing: Closing | None = None

    @property
    def newest(self) -> Suspect:
        """The latest finding: where the device was last."""
        return max(self.findings, key=lambda s: (s.last_time, s.last_step))

    @property
    def state(self) -> RankState:
        """Open or closed."""
        return RankState.SUSPECT if self.closing is None else RankState.CLOSED

    @property
    def first_step(self) -> int:
        """Step at which a check first named it."""
        return min(s.first_step for s in self.findings)

    @property
    def first_time(self) -> float:
        """Unix time of that."""
        return min(s.first_time for s in self.findings)

    @property
    def operator(self) -> str:
        """The operation in which it computed wrongly, if a trace could tell."""
        return next((s.operator for s in self.findings if s.operator), "")

    @property
    def evidence(self) -> str:
        """What supports naming it, in words."""
        return "; ".join(map(evidence, self.findings))

    @property
    def reproduced(self) -> bool | None:
        """Wrong again when asked again; None if no check asked."""
        asked = [s.reproduced for s in self.findings if s.reproduced is not None]
        return any(asked) if asked else None

    def to_dict(self) -> dict[str, Any]:
        """What a launcher or an inventory wants to know, as plain JSON values."""
        newest = self.newest
        return {
            "state": "open" if self.closing is None else "closed",
            "node": newest.node,
            "instance_id": newest.instance_id,
            "gpu": newest.gpu,
            "gpu_index": newest.gpu_index,
            "rank": newest.rank,
            "checks": [s.check.value for s in self.findings],
            "evidence": self.evidence,
            "reproduced": self.reproduced,
            "operator": self.operator,
            "first_step": self.first_step,
            "last_step": newest.last_step,
            "since": clock(self.first_time),
            "last": clock(newest.last_time),
            "closing": None if self.closing is None else plain(self.closing),
        }


def suspect_devices(summary: RunSummary) -> tuple[SuspectDevice, ...]:
    """The devices that checks have named in any segment of a run, by rank.

    A device with one open finding is open, whatever was closed before.
    """
    found: dict[Device, list[Suspect]] = {}
    for suspect in (*summary.suspects, *summary.closed_suspects):
        found.setdefault(suspect.device, []).append(suspect)
    still_open = {s.device for s in summary.suspects}
    devices = [
        SuspectDevice(
            findings=tuple(sorted(findings, key=lambda s: s.check)),
            closing=None
            if device in still_open
            else next(c for c in reversed(summary.closings) if c.covers(device)),
        )
        for device, findings in found.items()
    ]
    return tuple(sorted(devices, key=lambda d: (d.newest.rank, d.newest.device)))
