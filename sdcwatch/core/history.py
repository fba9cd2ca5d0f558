"""What a segment of a run remembers from one check to the next, as one frozen value.

**Strikes.** A rank that was wrong once and is right when it repeats its work has a strike. Strikes
belong to a device, not to a rank number, and are counted over all checks. Two of them within
`STRIKE_WINDOW` audits name the device, but only while no other device has one in this segment, and
only while the computation repeats: a second device with a strike, or a rank of another device that
does not repeat its own work, means that strikes say nothing here.

**Who has matched.** A rank that has never matched any other since the start of the segment may run
other software, or be broken from the first step: it *differs*, and is no suspect, until a person
has looked.

**Streaks.** Three inconclusive audits in a row ask for a new preflight. A device that is confirmed
by repeats in three audits in a row stops the run, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sdcwatch.core.enums import Check, Coverage, Outcome
from sdcwatch.core.records import PreflightDone, Record, RunStarted
from sdcwatch.core.topology import RankInfo

STRIKE_WINDOW = 20
"""Audits in which a second strike of a device counts together with the first."""
INCONCLUSIVE_TO_ASK = 3
"""Inconclusive audits in a row that ask for a new preflight."""
CONFIRMED_TO_STOP = 3
"""Audits in a row that confirm the same device by repeats, after which the run stops."""

Device = tuple[str, str]
"""(instance id, GPU): what strikes and suspects belong to; ranks change from start to start."""


def device_of(info: RankInfo) -> Device:
    """The device on which a rank runs."""
    return info.instance_id, info.gpu


def devices_that_matched(records: Iterable[Record]) -> frozenset[Device]:
    """Devices that have matched others in some segment of a run, by the preflights of its records.

    Args:
        records: Starts and preflights of the run in their order; others are passed over.
    """
    found: set[Device] = set()
    ranks: Sequence[RankInfo] = ()
    for record in records:
        if isinstance(record, RunStarted):
            ranks = record.ranks
        elif isinstance(record, PreflightDone) and record.coverage is Coverage.FULL:
            left_out = frozenset(record.left_out)
            found |= {device_of(info) for info in ranks if info.rank not in left_out}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Strike:
    """A device was wrong once and right when it was asked again, or could not be asked.

    Attributes:
        device: The device.
        check: The check that saw it.
        step: At which step.
        audit: How many audits of the segment had been made by then.
    """

    device: Device
    check: Check
    step: int
    audit: int


@dataclass(frozen=True, slots=True)
class StrikeLedger:
    """The strikes of one segment; `add` gives a new ledger.

    Attributes:
        strikes: Those of the last `STRIKE_WINDOW` audits, the earliest first.
        audits: Audits made in this segment.
        struck: The first two devices that ever had a strike in this segment.
        repeats: False once a rank of another device did not repeat its own work.
    """

    strikes: tuple[Strike, ...] = ()
    audits: int = 0
    struck: tuple[Device, ...] = ()
    repeats: bool = True

    @property
    def blank(self) -> bool:
        """No device has had a strike yet: the first makes every rank repeat its own work."""
        return not self.struck

    def audited(self) -> StrikeLedger:
        """One more audit has been made; strikes that are too old are dropped."""
        number = self.audits + 1
        kept = tuple(s for s in self.strikes if number - s.audit < STRIKE_WINDOW)
        return replace(self, audits=number, strikes=kept)

    def add(self, devices: Iterable[Device], *, check: Check, step: int) -> StrikeLedger:
        """A strike for each of some devices."""
        new = tuple(Strike(device, check, step, self.audits) for device in dict.fromkeys(devices))
        struck = tuple(dict.fromkeys((*self.struck, *(s.device for s in new))))[:2]
        return replace(self, strikes=(*self.strikes, *new), struck=struck)

    def doubt(self) -> StrikeLedger:
        """The computation does not repeat on another device: strikes name nobody from now on."""
        return replace(self, repeats=False)

    def earlier(self, device: Device) -> Strike | None:
        """The latest strike of a device within the window."""
        return next((s for s in reversed(self.strikes) if s.device == device), None)

    def names(self, device: Device, *, struck_now: Collection[Device] = ()) -> Strike | None:
        """The earlier strike that names a device which has another one now, or None.

        Args:
            device: The device.
            struck_now: All devices with a strike at this check.
        """
        alone = set(self.struck) | set(struck_now) <= {device}
        return self.earlier(device) if alone and self.repeats else None


@dataclass(frozen=True, slots=True)
class History:
    """All that a segment remembers; the guard holds one and replaces it after each check.

    Attributes:
        ledger: Strikes.
        matched: Ranks that have matched another in this segment.
        differing: Ranks that were found to differ and have matched nobody since.
        matched_earlier: Devices that matched in an earlier segment of the run.
        inconclusive: Inconclusive audits in a row.
        confirmed: (rank, audits in a row that have confirmed it by repeats).
    """

    ledger: StrikeLedger = field(default_factory=StrikeLedger)
    matched: frozenset[int] = frozenset()
    differing: frozenset[int] = frozenset()
    matched_earlier: frozenset[Device] = frozenset()
    inconclusive: int = 0
    confirmed: tuple[tuple[int, int], ...] = ()

    @property
    def asks_for_preflight(self) -> bool:
        """So many inconclusive audits in a row that preflight has to look again."""
        return self.inconclusive >= INCONCLUSIVE_TO_ASK

    @property
    def must_stop(self) -> tuple[int, ...]:
        """Ranks confirmed so often in a row that the run stops, also where failures are skipped."""
        return tuple(rank for rank, audits in self.confirmed if audits >= CONFIRMED_TO_STOP)

    def compared(self, *, matched: Iterable[int], differing: Iterable[int]) -> History:
        """Ranks were compared, in preflight or in an audit.

        Args:
            matched: Ranks that matched others.
            differing: Ranks that did not, and had not before.
        """
        matches = self.matched | frozenset(matched)
        apart = (self.differing | frozenset(differing)) - matches
        if (matches, apart) == (self.matched, self.differing):
            return self
        return replace(self, matched=matches, differing=apart)

    def known(self, ranks: Sequence[RankInfo]) -> frozenset[int]:
        """Ranks on devices that matched in an earlier segment of the run."""
        return frozenset(i.rank for i in ranks if device_of(i) in self.matched_earlier)

    def audited(self, outcome: Outcome, confirmed: Sequence[int]) -> History:
        """An audit came to an outcome.

        Args:
            outcome: What it came to. One that did not compare anything changes no streak.
            confirmed: Ranks that were wrong in every repeat.
        """
        if outcome in (Outcome.NOT_RUN, Outcome.VOID):
            return self
        before = dict(self.confirmed)
        return replace(
            self,
            ledger=self.ledger.audited(),
            inconclusive=self.inconclusive + 1 if outcome is Outcome.INCONCLUSIVE else 0,
            confirmed=tuple((rank, before.get(rank, 0) + 1) for rank in confirmed),
        )

    def preflighted(self) -> History:
        """A new preflight has been asked for: streaks start over, strikes and matches stay."""
        return replace(self, inconclusive=0, confirmed=())

    def struck(self, devices: Iterable[Device], *, check: Check, step: int) -> History:
        """Strikes of some devices."""
        return replace(self, ledger=self.ledger.add(devices, check=check, step=step))

    def doubted(self) -> History:
        """The computation does not repeat: strikes name nobody from now on."""
        return replace(self, ledger=self.ledger.doubt())
