import itertools

import pytest

from sdcwatch.core.history import (
    CONFIRMED_TO_STOP,
    INCONCLUSIVE_TO_ASK,
    STRIKE_WINDOW,
    History,
    StrikeLedger,
    device_of,
    devices_that_matched,
)
from sdcwatch.core.records import Check, Coverage, Outcome, PreflightDone, RunStarted

A, B, C = ("i-0", "gpu-a"), ("i-0", "gpu-b"), ("i-1", "gpu-c")


def struck(ledger, device, step, check=Check.REPLAY):
    return ledger.add((device,), check=check, step=step)


def test_a_device_is_known_by_its_instance_and_gpu_whatever_its_rank(topology):
    infos = topology("2x2").ranks
    assert device_of(infos[3]) == ("i-1", "cpu-sim-node-1-1")
    assert len({device_of(info) for info in infos}) == 4


def test_devices_have_matched_that_a_full_preflight_did_not_leave_out(topology):
    def start(ranks):
        return RunStarted(
            step=0, time=1.0, run="r", version="1", ranks=ranks, fault_domain="node",
            mode="enforce", on_failure="skip", audit_every=10, fingerprint_every=5,
            checkpoint_every=None, max_audit_age=10, quorum=2, parameters=4, parameter_bytes=64,
        )  # fmt: skip

    def armed(coverage=Coverage.FULL, left_out=()):
        return PreflightDone(
            step=3, time=2.0, coverage=coverage, reason="", deterministic_kernels=False, repeats=4,
            left_out=left_out,
        )  # fmt: skip

    ranks = topology("2x2").ranks
    devices = [device_of(info) for info in ranks]
    assert devices_that_matched([start(ranks)]) == frozenset()
    assert devices_that_matched([start(ranks), armed(Coverage.OFF)]) == frozenset()
    records = [start(ranks), armed(left_out=(1, 2)), start(ranks[:2]), armed(left_out=(0,))]
    found = devices_that_matched(records)
    assert found == {devices[0], devices[1], devices[3]}
    assert History(matched_earlier=found).known(ranks) == {0, 1, 3}


def test_the_first_strike_names_nobody_and_the_second_of_the_same_device_does():
    ledger = StrikeLedger()
    assert ledger.blank
    assert ledger.names(A, struck_now=(A,)) is None
    ledger = struck(ledger.audited(), A, step=10)
    assert not ledger.blank
    earlier = ledger.audited().names(A, struck_now=(A,))
    assert (earlier.step, earlier.check, earlier.device) == (10, Check.REPLAY, A)


@pytest.mark.parametrize("checks", [*itertools.product((Check.NONFINITE, Check.REPLAY), repeat=2)])
def test_strikes_count_over_all_checks(checks):
    ledger = struck(StrikeLedger(), A, 7, checks[0]).audited()
    assert ledger.names(A, struck_now=(A,)).check is checks[0]
    assert len(struck(ledger, A, 9, checks[1]).strikes) == 2


@pytest.mark.parametrize("other_first", [True, False])
def test_a_strike_of_another_device_in_this_segment_ends_naming_by_strikes(other_first):
    ledger = StrikeLedger()
    for device in (B, A) if other_first else (A, B):
        ledger = struck(ledger.audited(), device, step=1)
    for _ in range(3 * STRIKE_WINDOW):  # also long after it has left the window
        ledger = ledger.audited()
    ledger = struck(ledger, A, step=99)
    assert ledger.names(A, struck_now=(A,)) is None
    assert ledger.earlier(A).step == 99


def test_two_devices_at_once_name_neither():
    ledger = struck(StrikeLedger(), A, 1)
    assert ledger.names(A, struck_now=(A, C)) is None


@pytest.mark.parametrize("audits", [1, STRIKE_WINDOW - 1, STRIKE_WINDOW, STRIKE_WINDOW + 1])
def test_a_strike_counts_for_a_window_of_audits(audits):
    ledger = struck(StrikeLedger(), A, step=5)
    for _ in range(audits):
        ledger = ledger.audited()
    assert (ledger.names(A, struck_now=(A,)) is not None) == (audits < STRIKE_WINDOW)


def test_where_another_device_does_not_repeat_strikes_name_nobody():
    ledger = struck(StrikeLedger(), A, 1).doubt()
    assert ledger.names(A, struck_now=(A,)) is None
    assert struck(ledger, A, 2).names(A, struck_now=(A,)) is None


def test_the_ledger_stays_small_however_many_strikes_there_are():
    ledger = StrikeLedger()
    for audit in range(500):
        ledger = ledger.audited().add([("i", f"{audit % 7}")], check=Check.REPLAY, step=audit)
    assert len(ledger.strikes) <= STRIKE_WINDOW
    assert len(ledger.struck) == 2


def test_a_ledger_is_a_value():
    before = StrikeLedger()
    struck(before, A, 1)
    assert before == StrikeLedger()
    assert struck(before, A, 1) == struck(before, A, 1)


def test_three_inconclusive_audits_in_a_row_ask_for_a_new_preflight():
    history = History()
    for number in range(1, INCONCLUSIVE_TO_ASK + 1):
        history = history.audited(Outcome.INCONCLUSIVE, ())
        assert history.asks_for_preflight == (number == INCONCLUSIVE_TO_ASK)
    assert not history.preflighted().asks_for_preflight


@pytest.mark.parametrize(
    ("between", "asks"),
    [
        (Outcome.PASS, False),
        (Outcome.SUSPECT, False),
        (Outcome.NOT_RUN, True),
        (Outcome.VOID, True),
    ],
)
def test_only_an_audit_that_compared_something_ends_a_streak(between, asks):
    history = History()
    for outcome in (Outcome.INCONCLUSIVE, Outcome.INCONCLUSIVE, between, Outcome.INCONCLUSIVE):
        history = history.audited(outcome, ())
    assert history.asks_for_preflight == asks


def test_a_rank_confirmed_in_three_audits_in_a_row_stops_the_run():
    history = History()
    for number in range(1, CONFIRMED_TO_STOP + 1):
        history = history.audited(Outcome.SUSPECT, (3, 5) if number == 1 else (3,))
        assert history.must_stop == ((3,) if number == CONFIRMED_TO_STOP else ())
    assert history.audited(Outcome.PASS, ()).must_stop == ()


def test_a_rank_that_is_right_in_between_starts_over():
    history = History()
    for confirmed in ((3,), (3,), (), (3,), (3,)):
        history = history.audited(Outcome.SUSPECT if confirmed else Outcome.PASS, confirmed)
    assert history.must_stop == ()


def test_a_rank_that_differed_and_then_matched_has_matched():
    history = History().compared(matched=(0, 1), differing=(2,))
    assert (history.matched, history.differing) == ({0, 1}, {2})
    history = history.compared(matched=(2,), differing=())
    assert (history.matched, history.differing) == ({0, 1, 2}, frozenset())
    assert history.compared(matched=(0,), differing=(1,)) == history


def test_a_new_preflight_keeps_strikes_and_matches():
    history = History().struck((A,), check=Check.NONFINITE, step=3)
    history = history.compared(matched=(1,), differing=())
    again = history.preflighted()
    assert (again.ledger, again.matched) == (history.ledger, history.matched)
