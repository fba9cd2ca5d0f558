"""Check 3 between ranks of one process: what a disagreement sends, and what it comes to."""

from dataclasses import replace

import torch

from sdcwatch.core.fingerprint import OptimizerFacts
from sdcwatch.core.records import Outcome
from sdcwatch.guard.fingerprint import (
    ReplicaSet,
    WeightCheck,
    pack_fingerprints,
    tensors_gathered,
    unpack_fingerprints,
)
from sdcwatch.testing import run_threads

TENSORS = 100
HEAD = 75


def disagree(wrong):
    """What each of three ranks comes to where rank 2 holds other bits in some tensors."""

    def body(exchange):
        named = [(f"w{i}", torch.full((3,), float(i))) for i in range(TENSORS)]
        if exchange.rank == 2:
            for i in wrong:
                named[i][1][1] += 1
        gathered, gather = [], exchange.gather
        exchange.gather = lambda m, o, **k: gathered.append(len(m)) or gather(m, o, **k)
        check = WeightCheck(ReplicaSet(exchange, lambda: named))
        assert not check.equal("x")
        judgement = check.dissent("x", None)
        return judgement.outcome, judgement.reason, judgement.disagreements, gathered

    return run_threads(3, body)


def test_of_one_tensor_that_differs_one_fingerprint_is_gathered():
    one, every = disagree((41,)), disagree(tuple(range(TENSORS)))

    outcome, reason, disagreements, gathered = one[0]
    assert all(result == one[0] for result in one)
    assert outcome is Outcome.SUSPECT
    assert "rank 2 dissents from the majority of 3 on 1 of 100 tensors (w41)" in reason
    assert gathered == [HEAD + 16]
    assert disagreements[0].dissenters == (2,)
    assert "element 1" in disagreements[0].note
    outcome, reason, disagreements, gathered = every[0]
    assert len(disagreements) == 64
    assert gathered == [HEAD + 64 * 16]
    assert "rank 2 dissents from the majority of 3" in reason


def test_what_a_rank_gathers_in_a_disagreement_stays_under_four_mebibytes():
    for world in (3, 64, 1024, 8192, 16_384, 100_000):
        assert 1 <= tensors_gathered(world) <= 64
        assert tensors_gathered(world) * 16 * world <= 2**22
    assert tensors_gathered(16_384) == 16


def test_a_fingerprint_arrives_as_it_was_sent():
    pairs = [(0, 2**64 - 1), (5, 6)]
    facts = OptimizerFacts(
        updates=2**40,
        skips=3,
        scale=65536.0,
        rates=0.1 + 0.2,
        groups="00" * 7 + "01",
        steps="ff" * 8,
        loaded="12" * 8,
        writes=-1,
        gradient_writes=7,
        untouched=True,
    )
    for sent in (OptimizerFacts(), facts, replace(facts, scale=None, rates=0.0)):
        message = pack_fingerprints(pairs, sent)
        assert len(message) == HEAD + 2 * 16
        assert unpack_fingerprints(message) == (pairs, sent)
