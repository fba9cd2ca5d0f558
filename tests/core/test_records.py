import json
import math
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcwatch.core import records
from sdcwatch.core.records import (
    RECORD_TYPES,
    SCHEMA,
    Check,
    CheckpointEvent,
    CheckpointResult,
    Comparison,
    GateReason,
    GuardState,
    Note,
    Outcome,
    Progress,
    Record,
    RunFinished,
    Suspect,
    Verdict,
    decode,
    encode,
    plain,
    to_dict,
)


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_every_kind_of_record_survives_a_round_trip(kind):
    @given(record=st.from_type(RECORD_TYPES[kind]))
    @settings(max_examples=8, deadline=None, derandomize=True)
    def survives(record):
        line = encode(record)
        assert "\n" not in line
        back = decode(line)
        assert type(back) is RECORD_TYPES[kind]
        assert encode(back) == line
        if "NaN" not in line:
            assert back == record

    survives()


def test_every_record_type_has_a_kind_of_its_own():
    subclasses = {
        cls
        for cls in vars(records).values()
        if isinstance(cls, type) and issubclass(cls, Record) and cls is not Record
    }
    assert set(RECORD_TYPES.values()) == subclasses
    assert len(RECORD_TYPES) == len(subclasses)


def test_nested_values_come_back_as_what_they_were():
    suspect = Suspect(
        rank=3, node="n1", instance_id="i-1", gpu="GPU-1", gpu_index=None, check=Check.REPLAY,
        mismatches=2, comparisons=2, partners=(1, 5), reproduced=True, tensors=("a", "b"),
    )  # fmt: skip
    verdict = Verdict(
        step=7, time=1.5, check=Check.REPLAY, outcome=Outcome.SUSPECT, reason="rank 3",
        suspects=(suspect,), comparisons=(Comparison(producer=1, replayer=3, wrong=(3,)),),
    )  # fmt: skip
    back = decode(encode(verdict))
    assert back == verdict
    assert isinstance(back.suspects, tuple)
    assert back.suspects[0].check is Check.REPLAY
    assert back.comparisons[0].wrong == (3,)


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_a_loss_that_json_has_no_number_for_travels_as_a_word(value, text):
    line = encode(Progress(step=1, time=0.0, first_step=1, loss=value))
    assert json.loads(line, parse_constant=pytest.fail)["loss"] == text
    back = decode(line).loss
    assert back == value or (math.isnan(value) and math.isnan(back))


def test_whole_numbers_in_float_fields_come_back_as_floats():
    line = encode(Progress(step=1, time=0.0, first_step=1)).replace('"time":0.0', '"time":5')
    assert isinstance(decode(line).time, float)


def test_fields_of_a_later_package_with_the_same_schema_are_passed_over():
    data = {**to_dict(Note(step=1, time=0.0, code="c", message="m")), "colour": "green"}
    assert decode(json.dumps(data)) == Note(step=1, time=0.0, code="c", message="m")


def test_fields_that_an_older_package_did_not_write_take_their_default():
    data = to_dict(RunFinished(step=1, time=0.0, state=GuardState.FINISHED, reason="done"))
    del data["exit_code"]
    assert decode(json.dumps(data)).exit_code == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "Expecting value"),
        ('{"schema":1,"kind":"note","st', "Unterminated"),
        ("[1, 2]", "Expected a record with a `kind`"),
        ("{}", "Expected a record with a `kind`"),
        ('"text"', "Expected a record with a `kind`"),
        (json.dumps({"schema": SCHEMA + 1, "kind": "note"}), f"Expected schema <= {SCHEMA}"),
        (json.dumps({"schema": SCHEMA, "kind": "poem"}), "got kind 'poem'"),
        (json.dumps({"schema": SCHEMA, "kind": "note", "step": 1}), "Expected the fields"),
        (
            json.dumps({"schema": 1, "kind": "finish", "step": 1, "time": 0, "reason": "",
                        "state": "asleep"}),
            "asleep",
        ),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_of_this_schema_is_a_value_error(line, says):
    with pytest.raises(ValueError, match=says.replace("`", ".")):
        decode(line)


def test_a_newer_schema_says_what_to_do():
    with pytest.raises(ValueError, match="Update sdcwatch to read it"):
        decode(json.dumps({"schema": 99, "kind": "start"}))


def test_every_value_and_field_of_the_public_words_is_frozen_and_typed():
    for cls in (*RECORD_TYPES.values(), Suspect, Comparison):
        assert is_dataclass(cls)
        assert cls.__dataclass_params__.frozen
        assert set(get_type_hints(cls)) >= {f.name for f in fields(cls)}


def test_the_word_of_every_enum_value_is_lower_case_with_underscores():
    enums = [e for e in vars(records).values() if isinstance(e, type) and issubclass(e, Enum)]
    words = [str(member.value) for enum in enums if enum is not Enum for member in enum]
    assert len(words) > 50
    assert all(re.fullmatch(r"[a-z]+([_ ][a-z]+)*", word) for word in words)


def test_plain_values_are_what_json_takes():
    event = CheckpointEvent(
        step=1, time=0.0, result=CheckpointResult.SAVED, reason=GateReason.OK, audit_age=None
    )
    assert plain((event,)) == [
        {
            "step": 1,
            "time": 0.0,
            "result": "saved",
            "reason": "ok",
            "detail": "",
            "path": "",
            "audit_age": None,
        }
    ]
    assert plain({3: (1.0, Check.REPLAY)}) == {"3": [1.0, "replay"]}


GARBAGE = (None, 5, -1.5, "x", True, [], [5], ["x"], [[]], [{}], {}, {"a": 1}, {"rank": []})


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_whatever_is_in_a_line_decode_gives_a_record_or_a_value_error(kind):
    names = {"schema", "kind", *(f.name for f in fields(RECORD_TYPES[kind]))}

    @given(record=st.from_type(RECORD_TYPES[kind]))
    @settings(max_examples=1, deadline=None, derandomize=True)
    def survives(record):
        for name in names:
            for value in GARBAGE:
                try:
                    back = decode(json.dumps({**to_dict(record), name: value}))
                except ValueError:
                    continue
                assert isinstance(back, Record)

    survives()
