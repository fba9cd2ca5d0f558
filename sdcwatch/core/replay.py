"""Check 2's judgement: from comparisons that do not match to a named rank, or to none.

`sdcwatch.core.arbitration` says which value is right; this module says what that means.

**Naming: not reproducible is not broken.** A rank is named only if it is wrong again in every one
of its `REPEATS` repeats, and every rank that agreed and was asked is right in all of its own. If
each computation deviated with any probability e, that would have probability e^8 (1-e)^16 < 3e-7
for each suspicion; with two repeats each, a 20 % noisy operation gets a healthy rank named within a
hundred audits. A rank that is right again even once has a strike (`sdcwatch.core.history`). An
agreeing rank that differs from itself, or a rank of another device that does not repeat its own
work after the first strike, means that the computation does not repeat: nobody is named.

**A rank that has never matched** since the start of the segment *differs*: other software, another
environment, or a device that was broken when the segment began. It is `SUSPECT` only where that
device matched in an earlier segment of the run and no fact separates it from the others.

**The unit that fails is the fault domain.** A node of which all ranks are wrong is named as such.
At most two domains are named in one audit.

With four voters or more no healthy rank is blamed for up to two faulty ranks, whatever wrong values
they give, and none for a node whose ranks are all wrong. A world of three ranks has three votes:
there two ranks with *equal* wrong values look exactly like one bad rank, and only ``quorum=3``,
which names nobody there, is safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdcwatch.core.arbitration import DISTURBED as DISTURBED
from sdcwatch.core.arbitration import DOMAINS_EXPLAINED, ERROR_PREFIX, REPEATS, Settlement
from sdcwatch.core.arbitration import NOT_KEPT as NOT_KEPT
from sdcwatch.core.arbitration import OVERWRITTEN as OVERWRITTEN
from sdcwatch.core.arbitration import Mismatch as Mismatch
from sdcwatch.core.arbitration import Repeat as Repeat
from sdcwatch.core.arbitration import compared_only as compared_only
from sdcwatch.core.arbitration import error_value as error_value
from sdcwatch.core.arbitration import explain as explain
from sdcwatch.core.arbitration import involved_ranks as involved_ranks
from sdcwatch.core.arbitration import is_error as is_error
from sdcwatch.core.arbitration import is_widespread as is_widespread
from sdcwatch.core.arbitration import plan_arbitration as plan_arbitration
from sdcwatch.core.arbitration import plan_repeats as plan_repeats
from sdcwatch.core.arbitration import settle as settle
from sdcwatch.core.enums import Cause, Check, Outcome
from sdcwatch.core.history import History, Strike, device_of
from sdcwatch.core.text import count, list_ranks
from sdcwatch.core.topology import DOMAINS_TO_NAME, Pairing, Topology

LISTED = 64
"""Ranks that a judgement lists at most without blaming them."""
DESCRIBED = 4
"""Named ranks, or damaged payloads, that a reason describes one by one."""


@dataclass(frozen=True, slots=True)
class Named:
    """A rank that an audit found wrong, with the evidence.

    Attributes:
        rank: The rank.
        mismatches: Comparisons in which it was wrong.
        comparisons: Comparisons it took part in.
        partners: Ranks it was compared with.
        arbiters: Ranks that recomputed and settled it.
        reproduced: It was wrong in every repeat; None if it could not be asked.
        producers: Whose micro-batches it got wrong.
        operator: The operation in which its device computed wrongly, with its module; "" if a
            trace of operations could not tell.
    """

    rank: int
    mismatches: int
    comparisons: int
    partners: tuple[int, ...]
    arbiters: tuple[int, ...]
    reproduced: bool | None
    producers: tuple[int, ...]
    operator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """What is known of one audit.

    Attributes:
        comparisons_total: Comparisons over all ranks.
        mismatches: Those that did not match.
        arbitration: ``arbitration[producer][arbiter]`` is that arbiter's value; only for producers
            that were arbitrated.
        repeats: By (rank, producer), the values of the repeats in order.
        transport: Producers whose payload arrived damaged.
        pairing: Who recomputed whom.
        restless: Ranks that did not get their own micro-batch right in `REPEATS` repeats of it;
            None if not all were asked. See `asks_everybody`.
        separating: Facts about software and environment that separate the ranks that have never
            matched from the others, as sentences.
    """

    comparisons_total: int
    mismatches: Sequence[Mismatch] = ()
    arbitration: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    repeats: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    transport: tuple[int, ...] = ()
    pairing: Pairing | None = None
    restless: tuple[int, ...] | None = None
    separating: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditJudgement:
    """What one audit came to.

    Attributes:
        outcome: The outcome; only `SUSPECT` names ranks.
        reason: One sentence for a person.
        named: Ranks that are wrong and were wrong again, or have a second strike.
        strikes: Ranks that were wrong once and right when asked again.
        ranks: Ranks it concerns without blaming them, at most `LISTED`: those with a strike, those
            that differ, or both sides of every comparison that did not match.
        settlement: What arbitration came to.
        differing: Ranks that are wrong again and again and have never matched in this segment.
        domains: Fault domains of which every rank is named, where they have several.
        cause: `DEVICE` or `SOFTWARE` where traces of operations say so (`core.disputes`).
        operator: The operation in which results began to differ, or that does not repeat.
    """

    outcome: Outcome
    reason: str
    named: tuple[Named, ...] = ()
    strikes: tuple[Named, ...] = ()
    ranks: tuple[int, ...] = ()
    settlement: Settlement = field(default_factory=Settlement)
    differing: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()
    cause: Cause = Cause.NONE
    operator: str = ""


class _Answers:
    """What the repeats say: how many a rank made of a micro-batch, and how many were wrong."""

    def __init__(
        self, settlement: Settlement, repeats: Mapping[tuple[int, int], tuple[str, ...]]
    ) -> None:
        self.settlement = settlement
        self._wrong: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], int] = {}
        for key, values in repeats.items():
            failed = sum(values.count(value) for value in set(values) if is_error(value))
            right = settlement.right.get(key[1])
            self._made[key] = len(values) - failed
            self._wrong[key] = len(values) - failed - (values.count(right) if right else 0)

    def unsteady(self) -> tuple[int, ...]:
        """Agreeing ranks that differ from themselves."""
        found = {
            rank
            for producer, ranks in self.settlement.agreeing.items()
            for rank in ranks
            if self._wrong.get((rank, producer))
        }
        return tuple(sorted(found))

    def wrong_again(self, rank: int) -> tuple[int, int]:
        """Repeats of a wrong rank that were wrong, and all of them."""
        keys = [(rank, producer) for producer in self.settlement.wrong.get(rank, ())]
        return sum(self._wrong.get(k, 0) for k in keys), sum(self._made.get(k, 0) for k in keys)

    def _complete(self, rank: int, producer: int) -> bool:
        """The rank and at least one that agrees made every repeat of a micro-batch."""
        controls = self.settlement.agreeing[producer]
        return self._made.get((rank, producer), 0) >= REPEATS and any(
            self._made.get((other, producer), 0) >= REPEATS for other in controls
        )

    def reproduced(self, rank: int) -> bool | None:
        """Whether a wrong rank was wrong in every repeat of a micro-batch; None if not known."""
        keys = [(rank, p) for p in self.settlement.wrong[rank] if self._complete(rank, p)]
        if not keys:
            return None
        return any(self._wrong[key] == self._made[key] for key in keys)


def _partners(rank: int, facts: AuditFacts) -> tuple[int, ...]:
    """Whom a rank was compared with, as far as that is known."""
    met = {r for b in facts.mismatches if rank in b.ends for r in b.ends}
    if facts.pairing is not None:
        met |= {facts.pairing.replayer[rank], facts.pairing.producer[rank]}
    return tuple(sorted(met - {rank}))


def _evidence(rank: int, facts: AuditFacts, answers: _Answers) -> Named:
    producers = answers.settlement.wrong[rank]
    arbiters = {a for producer in producers for a in facts.arbitration.get(producer, {})}
    return Named(
        rank=rank,
        mismatches=len(producers),
        comparisons=2,  # as producer and as replayer
        partners=_partners(rank, facts),
        arbiters=tuple(sorted(arbiters)),
        reproduced=answers.reproduced(rank),
        producers=producers,
    )


def _described(named: Named, answers: _Answers) -> str:
    """One wrong rank in words."""
    if not named.producers:
        return f"rank {named.rank} matched neither of two other domains, like its whole domain"
    if named.mismatches == named.comparisons:
        where = "in both of its comparisons"
    elif named.producers == (named.rank,):
        where = "on its own micro-batch"
    else:
        where = f"in its replay of rank {named.producers[0]}"
    agreeing = {r for p in named.producers for r in answers.settlement.agreeing[p]}
    again, asked = answers.wrong_again(named.rank)
    said = f"rank {named.rank} is wrong {where}, settled by {list_ranks(agreeing)}"
    return f"{said}, and wrong again in {again} of {asked} repeats"


def _each_described(found: Sequence[Named], answers: _Answers) -> str:
    parts = [_described(n, answers) for n in found[:DESCRIBED]]
    if len(found) > DESCRIBED:
        parts.append(f"so are {list_ranks(n.rank for n in found[DESCRIBED:])}")
    return "; ".join(parts)


class _Case:
    """One audit after arbitration: what it and the repeats came to."""

    def __init__(
        self,
        facts: AuditFacts,
        settlement: Settlement,
        topology: Topology,
        quorum: int,
        history: History | None,
    ) -> None:
        self.facts, self.settlement, self.topology = facts, settlement, topology
        self.quorum, self.history = quorum, history
        self.answers = _Answers(settlement, facts.repeats)
        self.found = [_evidence(rank, facts, self.answers) for rank in settlement.wrong]
        proven = [n for n in self.found if n.reproduced]
        self.apart = tuple(n.rank for n in proven if self._never_matched(n.rank))
        self.proven = self._with_their_domain([n for n in proven if n.rank not in self.apart])
        self.strikes = tuple(n for n in self.found if n.reproduced is False)

    def _never_matched(self, rank: int) -> bool:
        """Neither before in this segment nor now; nor this device in an earlier one, as it is."""
        if self.history is None or rank in self.history.matched:
            return False
        if rank in matched_ranks(self.facts):
            return False
        known = device_of(self.topology.ranks[rank]) in self.history.matched_earlier
        return bool(self.facts.separating) or not known

    def _with_their_domain(self, proven: list[Named]) -> tuple[Named, ...]:
        """Add ranks of a domain so large that not all of its comparisons were arbitrated.

        One is added if it matched neither of two other domains, in an audit that its domain alone
        explains and in which every rank of it that was asked is proven wrong.
        """
        domains, facts = self.topology.domains, self.facts
        asked = {r for b in facts.mismatches if b.producer in facts.arbitration for r in b.ends}
        number = Counter(r for b in facts.mismatches for r in b.ends)
        ranks = {n.rank for n in proven}
        more = []
        for domain in {d for found in explain(facts.mismatches, self.topology) for d in found}:
            inside = {rank for rank in number if domains[rank] == domain}
            known = inside & asked
            if known < inside and known <= ranks and len(known) >= DESCRIBED:
                met = {rank: _partners(rank, facts) for rank in inside - asked}
                more += [
                    Named(rank, 2, 2, others, (), None, ())
                    for rank, others in met.items()
                    if number[rank] == 2 and len({domains[r] for r in others}) == 2
                ]
        return tuple(sorted((*proven, *more), key=lambda n: n.rank))

    def judge(self) -> AuditJudgement:
        unsteady = self.answers.unsteady()
        settled = self.settlement
        if unsteady:
            said = f"repeats of {list_ranks(unsteady)} differ among themselves"
            return self._does_not_repeat(said)
        if self.proven:
            return self._suspects()
        if restless := self._restless_elsewhere():
            return self._does_not_repeat(
                f"{list_ranks(n.rank for n in self.strikes)} was wrong once, and "
                f"{list_ranks(restless)} of another device cannot repeat its own micro-batch either"
            )
        if self.strikes:
            return self._struck()
        if self.apart and not settled.inconclusive and len(self.apart) == len(self.found):
            return self._differs()
        if self.found:
            said = (
                f"a quorum contradicts {list_ranks(settled.wrong)}, and the {REPEATS} repeats "
                "that show whether this happens again were not all made"
            )
            return self._nobody(Outcome.UNATTRIBUTED, said)
        open_ones = settled.inconclusive or tuple(b.producer for b in self.facts.mismatches)
        said = (
            f"no value of the micro-batch of {list_ranks(open_ones)} is held by "
            f"{self.quorum} ranks and by more than any other"
        )
        return self._nobody(Outcome.INCONCLUSIVE, said)

    def _involved(self, without: Iterable[int] = ()) -> tuple[int, ...]:
        blamed = set(without)
        ranks = involved_ranks(self.facts.mismatches)
        return tuple(rank for rank in ranks if rank not in blamed)[:LISTED]

    def _nobody(self, outcome: Outcome, said: str) -> AuditJudgement:
        return AuditJudgement(
            outcome, said, (), self.strikes, self._involved(), self.settlement, self.apart
        )

    def _does_not_repeat(self, said: str) -> AuditJudgement:
        said += ": the computation does not repeat, and nobody is blamed until the next preflight"
        return self._nobody(Outcome.NONDETERMINISTIC, said)

    def _restless_elsewhere(self) -> tuple[int, ...]:
        """Ranks of devices without a strike that do not repeat their own work."""
        ranks = self.topology.ranks
        devices = {device_of(ranks[n.rank]) for n in self.strikes}
        restless = self.facts.restless or ()
        return tuple(r for r in restless if device_of(ranks[r]) not in devices)

    def _suspects(self) -> AuditJudgement:
        domains, ranks = self.topology.domains, {n.rank for n in self.proven}
        at_fault = dict.fromkeys(domains[n.rank] for n in self.proven)
        if len(at_fault) > DOMAINS_EXPLAINED:
            said = (
                f"{list_ranks(ranks)} of {len(at_fault)} fault domains are wrong at once: too many "
                "for broken devices, so nobody is named"
            )
            return self._nobody(Outcome.WIDESPREAD, said)
        sizes = Counter(domains[rank] for rank in ranks)
        whole = tuple(d for d in at_fault if sizes[d] == self.topology.domain_sizes[d] > 1)
        parts = [self._whole(domain) for domain in whole]
        singly = [n for n in self.proven if domains[n.rank] not in whole]
        if singly:
            parts.append(_each_described(singly, self.answers))
        if self.apart:
            parts.append(f"{list_ranks(self.apart)} has never matched any other")
        return AuditJudgement(
            Outcome.SUSPECT,
            "; ".join(parts),
            self.proven,
            self.strikes,
            self._involved(without=ranks),
            self.settlement,
            self.apart,
            whole,
        )

    def _whole(self, domain: str) -> str:
        """A domain of which every rank is wrong, in words."""
        found = [n for n in self.proven if self.topology.domains[n.rank] == domain]
        agreeing = {r for n in found for p in n.producers for r in self.settlement.agreeing[p]}
        counts = [self.answers.wrong_again(n.rank) for n in found]
        again, asked = (sum(column) for column in zip(*counts, strict=True))
        return (
            f"all {len(found)} ranks of {domain} are wrong ({list_ranks(n.rank for n in found)}), "
            f"settled by {list_ranks(agreeing)}, and wrong again in {again} of {asked} repeats: "
            "what they share is broken"
        )

    def _struck(self) -> AuditJudgement:
        """Wrong once and right again: a strike each, and a name for a device that has two."""
        said = _each_described(self.strikes, self.answers)
        ranks = tuple(n.rank for n in self.strikes)  # a strike is not shared with the partner
        ledger = None if self.history is None else self.history.ledger
        devices = [device_of(self.topology.ranks[rank]) for rank in ranks]
        if ledger is not None and len(set(devices)) == 1:
            earlier = ledger.names(devices[0], struck_now=devices)
            if earlier is not None:
                reason = f"{said}; {second_strike(earlier)}"
                return AuditJudgement(
                    Outcome.SUSPECT,
                    reason,
                    self.strikes,
                    self.strikes,
                    self._involved(without=ranks),
                    self.settlement,
                    self.apart,
                )
        return AuditJudgement(
            Outcome.NOT_REPRODUCED,
            said,
            (),
            self.strikes,
            ranks[:LISTED],
            self.settlement,
            self.apart,
        )

    def _differs(self) -> AuditJudgement:
        said = (
            f"{list_ranks(self.apart)} computes other bits than all others and has never matched "
            f"any since the start of this segment; {why_apart(self.facts.separating)}"
        )
        return AuditJudgement(
            Outcome.DIFFERS, said, (), (), self.apart[:LISTED], self.settlement, self.apart
        )


def second_strike(earlier: Strike) -> str:
    """Why a device is named although it is right when asked again, as a clause."""
    return (
        f"this device was wrong once before, at step {earlier.step} (check {earlier.check.value}), "
        "and no other device has been in this segment"
    )


def why_apart(separating: Sequence[str]) -> str:
    """What may be behind ranks that differ from the start, as a clause."""
    if separating:
        return f"compare their software first: {'; '.join(separating)}"
    return (
        "no fact about software or environment separates them: compare the software of these ranks "
        "first, then take their devices for broken"
    )


def matched_ranks(facts: AuditFacts, differing: Iterable[int] = ()) -> frozenset[int]:
    """Ranks that matched another in an audit, in a comparison or as the agreeing side of one.

    Args:
        facts: The audit; nobody is known to have matched without its pairing.
        differing: Ranks that differ from the others: that two of them match says nothing.
    """
    if facts.pairing is None:
        return frozenset()
    apart = frozenset(differing)
    missed = {b.producer for b in facts.mismatches} | set(facts.transport)
    pairs = (
        pair
        for pair in enumerate(facts.pairing.replayer)
        if pair[0] not in missed and not apart.issuperset(pair)
    )
    return frozenset(rank for pair in pairs for rank in pair)


def asks_everybody(judgement: AuditJudgement, history: History) -> bool:
    """Whether every rank has to repeat its own micro-batch before the audit is judged again.

    So it is at the first strike of a segment: what does not repeat on other devices either is no
    device's fault. Repeat `REPEATS` times, put the ranks that were wrong even once into
    `AuditFacts.restless`, and judge again.
    """
    return judgement.outcome is Outcome.NOT_REPRODUCED and history.ledger.blank


def remember(
    history: History, facts: AuditFacts, judgement: AuditJudgement, topology: Topology, *, step: int
) -> History:
    """The history after an audit: strikes, matches, streaks. Pure, the same on every rank."""
    confirmed = [n.rank for n in judgement.named if n.reproduced]
    after = history.audited(judgement.outcome, confirmed)
    struck = [device_of(topology.ranks[n.rank]) for n in judgement.strikes]
    if struck:
        after = after.struck(struck, check=Check.REPLAY, step=step)
    if judgement.outcome is Outcome.NONDETERMINISTIC:
        after = after.doubted()
    matched = matched_ranks(facts, {*history.differing, *judgement.differing})
    agreeing = {r for ranks in judgement.settlement.agreeing.values() for r in ranks}
    return after.compared(
        matched=matched | (agreeing - history.differing), differing=judgement.differing
    )


def _judge_without_blame(
    facts: AuditFacts, compared: Sequence[Mismatch], topology: Topology
) -> AuditJudgement | None:
    """The judgements that need no arbitration, or None if it has to decide."""
    failed = [
        b for b in facts.mismatches if is_error(b.producer_value) or is_error(b.replayer_value)
    ]
    ranks = involved_ranks(facts.mismatches)[:LISTED]
    domains = len(topology.domain_sizes)
    mismatches = f"{len(compared)} of {count(facts.comparisons_total, 'comparison')} did not match"
    if is_widespread(compared, topology, comparisons_total=facts.comparisons_total):
        noun = topology.domain_noun
        said = f"{mismatches}: more than two broken {noun}s explain, so nobody is named"
        return AuditJudgement(Outcome.WIDESPREAD, said, ranks=ranks)
    if compared and domains < DOMAINS_TO_NAME:
        said = (
            f"{mismatches} ({list_ranks(ranks)}), and naming one takes {DOMAINS_TO_NAME} "
            f"{topology.domain_noun}s, while there {'is' if domains == 1 else 'are'} {domains}"
        )
        return AuditJudgement(Outcome.UNATTRIBUTED, said, ranks=ranks)
    if compared:
        return None
    if facts.transport:
        ends = {r for pair in _damaged(facts) for r in pair if r is not None}
        said = (
            f"{_transported(facts)}; no device is named: look at the network between the two, and "
            "at the host memory of both"
        )
        return AuditJudgement(Outcome.TRANSPORT, said, ranks=tuple(sorted(ends))[:LISTED])
    if failed:
        one = failed[0]
        error = one.replayer_value if is_error(one.replayer_value) else one.producer_value
        said = (
            f"the replay of rank {one.producer} on rank {one.replayer} ended with: "
            f"{error.removeprefix(ERROR_PREFIX).strip()}"
        )
        if len(failed) > 1:
            said += f"; {len(failed) - 1} more ended so or similarly"
        return AuditJudgement(Outcome.NOT_RUN, said, ranks=ranks)
    return AuditJudgement(
        Outcome.PASS, f"all {count(facts.comparisons_total, 'comparison')} matched bit for bit"
    )


def _damaged(facts: AuditFacts) -> list[tuple[int, int | None]]:
    """Who sent each payload that arrived damaged, and to whom, if that is known."""
    to = None if facts.pairing is None else facts.pairing.replayer
    return [(rank, None if to is None else to[rank]) for rank in facts.transport]


def _transported(facts: AuditFacts) -> str:
    pairs = _damaged(facts)
    shown = [
        f"rank {sender}" + ("" if to is None else f" to rank {to}")
        for sender, to in pairs[:DESCRIBED]
    ]
    more = len(pairs) - len(shown)
    also = f" and {more} more" if more else ""
    return f"the payload of {', '.join(shown)}{also} arrived damaged"


def usable_facts(facts: AuditFacts, history: History | None = None) -> AuditFacts:
    """The facts of an audit without the mismatches that are not judged.

    Those are the ones whose payload arrived damaged, and those with a rank that is known to differ:
    what it computes says nothing about a device.
    """
    apart = frozenset[int]() if history is None else history.differing
    usable = tuple(
        b
        for b in facts.mismatches
        if b.producer not in facts.transport and apart.isdisjoint(b.ends)
    )
    total = facts.comparisons_total - (len(facts.mismatches) - len(usable))
    return replace(facts, mismatches=usable, comparisons_total=total)


def judge_audit(
    facts: AuditFacts,
    topology: Topology,
    *,
    quorum: int = 2,
    history: History | None = None,
) -> AuditJudgement:
    """Judge one audit from its facts; pure, the same on every rank.

    Args:
        facts: What was compared, arbitrated and repeated. A comparison whose payload arrived
            damaged is judged as transport, not as a mismatch.
        topology: Where the ranks are.
        quorum: Different ranks that must hold a value for it to be right.
        history: What the segment remembers. Without it a strike never names anybody, and every
            rank is taken to have matched before.
    """
    judged = usable_facts(facts, history)
    compared = tuple(compared_only(judged.mismatches))
    judgement = _judge_without_blame(judged, compared, topology)
    if judgement is None:
        settlement = settle(compared, facts.arbitration, quorum=quorum, domains=topology.domains)
        case = _Case(replace(judged, mismatches=compared), settlement, topology, quorum, history)
        judgement = case.judge()
        if facts.transport:
            judgement = replace(judgement, reason=f"{judgement.reason}; {_transported(facts)}")
    if judgement.outcome is Outcome.PASS and history is not None:
        apart = history.differing - matched_ranks(facts, history.differing)
        return _left_out(facts, tuple(sorted(apart))) if apart else judgement
    return judgement


def _left_out(facts: AuditFacts, ranks: tuple[int, ...]) -> AuditJudgement:
    """Nothing but ranks that are known to differ did not match."""
    said = (
        f"all comparisons without {list_ranks(ranks)} matched bit for bit; {list_ranks(ranks)} "
        f"still differs; {why_apart(facts.separating)}"
    )
    return AuditJudgement(Outcome.DIFFERS, said, ranks=ranks[:LISTED], differing=ranks)
