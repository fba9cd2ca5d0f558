import inspect

import pytest

from sdcwatch import errors
from sdcwatch.core.records import Check, Outcome, Verdict
from sdcwatch.errors import (
    EXIT_CODES,
    ConfigurationError,
    CorruptionDetected,
    Desync,
    RankGone,
    SchemaMismatch,
    SdcwatchError,
    SoftwareDivergence,
)

VERDICT = Verdict(
    step=7, time=0.0, check=Check.FINGERPRINT, outcome=Outcome.SUSPECT, reason="rank 3 dissents"
)
RAISED = {
    SchemaMismatch: SchemaMismatch(["w is (2,) on rank 0 and (3,) on rank 1"]),
    Desync: Desync({1: "backward 7", 0: "save 7"}),
    RankGone: RankGone((2,), "no answer for 60 s", "the audit of step 7"),
    CorruptionDetected: CorruptionDetected(VERDICT),
    SoftwareDivergence: SoftwareDivergence(VERDICT),
}
CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type)
    and issubclass(cls, BaseException)
    and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_documented_in_its_docstring_and_in_the_tree(cls):
    doc = inspect.getdoc(cls)
    assert doc
    assert doc.split("\n")[0].endswith(".")
    assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("cls", RAISED)
def test_the_facts_of_an_error_are_attributes_named_in_its_docstring(cls):
    facts = set(vars(RAISED[cls])) - {"code"}
    assert facts
    assert all(f"    {fact}:" in cls.__doc__ for fact in facts)


def test_every_error_that_stops_a_run_has_an_exit_code_of_its_own():
    codes = [cls.exit_code for cls in RAISED]
    assert len(set(codes)) == len(codes)
    assert 1 not in codes
    assert set(codes) < set(EXIT_CODES)
    assert len(EXIT_CODES) == len(codes) + 1
    assert all(str(code) in errors.__doc__ for code in EXIT_CODES)
    assert all(0 < code < 126 for code in EXIT_CODES)  # above, shells mean signals


@pytest.mark.parametrize("cls", RAISED)
def test_uncaught_it_ends_the_process_with_its_code_and_can_be_caught_as_an_exception(cls):
    error = RAISED[cls]
    assert isinstance(error, Exception)
    assert isinstance(error, SystemExit)
    assert error.code == error.exit_code == cls.exit_code
    with pytest.raises(Exception, match="rank"):
        raise error


@pytest.mark.parametrize("cls", [SchemaMismatch, Desync, RankGone])
def test_messages_say_expected_got_and_do(cls):
    message = str(RAISED[cls])
    assert message.startswith("Expected ")
    assert "but " in message
    assert message.endswith(".")
    assert "rank" in message


def test_the_tree_has_two_roots():
    assert issubclass(ConfigurationError, (SdcwatchError, ValueError))
    assert all(
        issubclass(cls, SdcwatchError) != issubclass(cls, CorruptionDetected) for cls in CLASSES
    )
    assert not issubclass(CorruptionDetected, SdcwatchError)


def test_a_finding_carries_its_verdict():
    assert CorruptionDetected(VERDICT).verdict is VERDICT
    assert str(CorruptionDetected(VERDICT)) == "rank 3 dissents"


def test_desync_lists_who_is_where_in_rank_order():
    assert "rank 0: save 7, rank 1: backward 7" in str(RAISED[Desync])


def test_rank_gone_without_names_says_so():
    assert "rank unknown did not answer" in str(RankGone((), "store gone", "the liveness check"))
