"""A computation that does not repeat must not get anybody named, however often it is audited."""

import random
from dataclasses import replace

import pytest

from sdcwatch.core.arbitration import AGREEING_ASKED, REPEATS
from sdcwatch.core.history import History
from sdcwatch.core.records import Outcome
from sdcwatch.core.replay import (
    AuditFacts,
    Mismatch,
    asks_everybody,
    judge_audit,
    plan_arbitration,
    plan_repeats,
    remember,
    settle,
)
from sdcwatch.core.topology import draw_pairing

AUDITS = 1000


class Noise:
    """Every computation deviates with some probability, to a value never seen before."""

    def __init__(self, probability, seed):
        self.probability = probability
        self.random = random.Random(seed)
        self.deviations = 0

    def compute(self):
        if self.random.random() >= self.probability:
            return "right"
        self.deviations += 1
        return f"deviation {self.deviations}"


def audit(topology, step, noise, **options):
    pairing = draw_pairing(topology, step=step, seed=0)
    pairs = [(p, r, noise.compute(), noise.compute()) for p, r in enumerate(pairing.replayer)]
    mismatches = [Mismatch(*pair) for pair in pairs if pair[2] != pair[3]]
    plan = plan_arbitration(mismatches, topology)
    arbitration = {p: {a: noise.compute() for a in ranks} for p, ranks in plan.items()}
    orders = plan_repeats(settle(mismatches, arbitration, domains=topology.domains))
    facts = AuditFacts(
        comparisons_total=topology.world_size,
        mismatches=mismatches,
        arbitration=arbitration,
        repeats={
            (o.rank, o.producer): tuple(noise.compute() for _ in range(o.times)) for o in orders
        },
        pairing=pairing,
    )
    return facts, judge_audit(facts, topology, **options)


def two_repeats_would_name(facts, judgement):
    """What naming after two repeats of one rank and its control would have done."""
    settled = judgement.settlement
    return any(
        settled.right[producer] not in facts.repeats[rank, producer][:2]
        and facts.repeats[next(a for a in settled.agreeing[producer] if (a, producer) in
                               facts.repeats), producer][:2] == ("right",) * 2
        for rank, producers in settled.wrong.items()
        for producer in producers
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "probability"),
    [
        ("3x1", 0.2),
        ("3x2", 0.2),
        ("4x2", 0.2),
        ("2+2+1", 0.2),
        ("3x2", 0.5),
        ("3x2", 0.01),
        ("3+2+2", 0.01),
    ],
)
def test_a_noisy_operation_names_nobody_in_a_thousand_audits(layout, probability, topology):
    where, noise, naive, alarms = topology(layout), Noise(probability, seed=7), 0, 0
    for step in range(1, AUDITS + 1):
        # without a memory of earlier strikes: each audit has to hold by itself
        facts, judgement = audit(where, step, noise)
        assert judgement.outcome is not Outcome.SUSPECT
        assert judgement.named == ()
        alarms += judgement.outcome is not Outcome.PASS
        if judgement.settlement.wrong:
            naive += two_repeats_would_name(facts, judgement)
    assert alarms > 20
    if probability == 0.2:
        assert naive > 0, "the simulation is too tame to tell the rules apart"


def test_the_chance_that_noise_names_a_rank_stays_below_its_bound():
    # all repeats of the suspect wrong, all of the control's right, at the worst noise there is
    agreeing = REPEATS * AGREEING_ASKED
    worst = max(
        (e / 1000) ** REPEATS * (1 - e / 1000) ** agreeing for e in range(1, 1000)
    )  # fmt: skip
    assert worst < 3e-7


@pytest.mark.parametrize("probability", [0.005, 0.05, 0.2])
@pytest.mark.parametrize("layout", ["3x1", "3x2", "4x2"])
def test_noise_names_nobody_by_strikes_either(layout, probability, topology):
    where, outcomes = topology(layout), []
    for seed in range(10):
        noise, history = Noise(probability, seed), History()
        for step in range(1, 101):
            facts, judgement = audit(where, step, noise, history=history)
            if asks_everybody(judgement, history):
                restless = [
                    rank
                    for rank in range(where.world_size)
                    if any(noise.compute() != "right" for _ in range(REPEATS))
                ]
                facts = replace(facts, restless=tuple(restless))
                judgement = judge_audit(facts, where, history=history)
            history = remember(history, facts, judgement, where, step=step)
            outcomes.append(judgement.outcome)
            if probability >= 0.05:
                assert judgement.named == ()
    named = outcomes.count(Outcome.SUSPECT)
    assert named <= (3 if probability == 0.005 else 0)  # two chance events on one of W devices
    assert Outcome.NOT_REPRODUCED in outcomes or Outcome.NONDETERMINISTIC in outcomes


@pytest.mark.parametrize("layout", ["3x1", "3x2", "4x2", "3+2+2", "2+2+1"])
@pytest.mark.parametrize("same_value", [True, False])
def test_a_rank_that_is_always_wrong_is_named_in_every_audit_of_a_quiet_run(
    layout, same_value, topology
):
    where, calls = topology(layout), iter(range(10**6))

    def compute(rank):
        if rank != 1:
            return "right"
        return "wrong" if same_value else f"wrong {next(calls)}"

    for step in range(1, 21):
        pairing = draw_pairing(where, step=step, seed=0)
        pairs = [(p, r, compute(p), compute(r)) for p, r in enumerate(pairing.replayer)]
        mismatches = [Mismatch(*pair) for pair in pairs if pair[2] != pair[3]]
        plan = plan_arbitration(mismatches, where)
        arbitration = {p: {a: compute(a) for a in ranks} for p, ranks in plan.items()}
        orders = plan_repeats(settle(mismatches, arbitration, domains=where.domains))
        repeats = {
            (o.rank, o.producer): tuple(compute(o.rank) for _ in range(o.times)) for o in orders
        }
        facts = AuditFacts(
            comparisons_total=where.world_size,
            mismatches=mismatches,
            arbitration=arbitration,
            repeats=repeats,
        )
        judgement = judge_audit(facts, where)
        assert judgement.outcome is Outcome.SUSPECT
        assert [(n.rank, n.mismatches, n.comparisons, n.reproduced) for n in judgement.named] == [
            (1, 2, 2, True)
        ]
