"""The judgement of traces: what differs first decides, and little of a trace crosses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdcwatch.core.trace import Side, compare_repeats, first_difference, judge, what_to_set
from sdcwatch.core.trace_values import (
    MAX_VALUES,
    OUTLINE_BYTES,
    SECTION_BYTES,
    Born,
    Change,
    Operation,
    Outline,
    Place,
    Section,
    Trace,
    TraceFinding,
    TraceOutcome,
    Value,
)

ADD = Place("aten::add", "blocks.3.attn")


def value(bits, **more):
    return Value("float32[4][1]", bits, **more)


def operation(number, inputs=None, outputs=None):
    read = (value(f"{number:016x}", writer=number - 1),) if inputs is None else inputs
    wrote = (value(f"{number + 1:016x}"),) if outputs is None else outputs
    return Operation.of(Place(f"aten::op{number}", f"blocks.{number % 7}"), read, wrote)


def trace(length=300, **changed):
    """A trace of `length` operations; `at_7=operation` puts another in its place."""
    other = {int(name.removeprefix("at_")): one for name, one in changed.items()}
    return Trace(tuple(other.get(n, operation(n)) for n in range(length)))


def judged(*traces):
    outlines = [Outline.unpack(t.outline().pack()) for t in traces]
    where = first_difference(outlines)
    sections = [None if where is None else Section.unpack(t.section(where).pack()) for t in traces]
    sides = [Side(rank, o, s) for rank, o, s in zip((4, 0, 1), outlines, sections, strict=False)]
    return judge(sides[0], sides[1:])


@pytest.mark.parametrize("place", [0, 31, 32, 150, 299])
def test_other_bits_from_the_same_inputs_are_the_device(place):
    wrong = operation(place, outputs=(value("bad0"),))
    found = judged(trace(**{f"at_{place}": wrong}), trace(), trace())
    assert (found.outcome, found.rank) == (TraceOutcome.DEVICE, 4)
    assert (found.operator, found.module) == (f"aten::op{place}", f"blocks.{place % 7}")
    assert found.position == place
    assert found.names_device


def test_a_value_changed_on_one_side_is_the_device_with_its_producer():
    hurt = value("bad0", writer=9, change=Change.CHANGED, by=ADD)
    found = judged(trace(at_40=operation(40, inputs=(hurt,))), trace())
    assert found.outcome is TraceOutcome.DAMAGED
    assert (found.rank, found.where) == (4, "aten::add in blocks.3.attn")
    found = judged(trace(), trace(at_40=operation(40, inputs=(hurt,))))
    assert (found.outcome, found.rank) == (TraceOutcome.DAMAGED, 0)


def test_memory_that_other_code_holds_names_nobody_when_it_changes():
    hurt = value("bad0", writer=9, change=Change.EXPOSED, by=ADD)
    found = judged(trace(at_40=operation(40, inputs=(hurt,))), trace())
    assert found.outcome is TraceOutcome.BLIND
    assert not found.names_device


@pytest.mark.parametrize(
    ("born", "outcome"),
    [
        (Born.OUTSIDE, TraceOutcome.SOFTWARE),
        (Born.CODE, TraceOutcome.SOFTWARE),
        (Born.GENERATOR, TraceOutcome.SOFTWARE),
        (Born.PARTLY, TraceOutcome.SOFTWARE),
        (Born.UNSET, TraceOutcome.BLIND),
        (Born.SEVERAL, TraceOutcome.BLIND),
        (Born.GIVEN, TraceOutcome.DAMAGED),
    ],
)
def test_where_a_differing_input_comes_from_decides(born, outcome):
    sides = [
        trace(at_40=operation(40, inputs=(value(bits, born=born, origin="argument 0"),)))
        for bits in ("aa", "bb")
    ]
    found = judged(*sides)
    assert (found.outcome, found.operator, found.rank) == (outcome, "aten::op40", None)


def test_a_value_that_both_sides_saw_change_names_nobody():
    sides = [
        trace(at_40=operation(40, inputs=(value(b, change=Change.CHANGED, by=ADD),)))
        for b in ("aa", "bb")
    ]
    assert judged(*sides).outcome is TraceOutcome.BLIND


def test_another_operation_module_length_or_layout_is_software():
    elsewhere = replace(operation(40), place=Place("aten::op40", "other"))
    wider = operation(40, outputs=(Value("float32[2, 2][2,1]", "aa"),))
    for other in (trace(at_40=operation(41)), trace(at_40=elsewhere), trace(at_40=wider)):
        found = judged(other, trace())
        assert (found.outcome, found.position) == (TraceOutcome.SOFTWARE, 40)
    longer = judged(trace(301), trace(300))
    assert (longer.outcome, longer.operator) == (TraceOutcome.SOFTWARE, "aten::op300")
    assert longer.detail == "only rank 4 runs it"


def test_equal_traces_are_equal_and_need_no_section():
    assert judged(trace(), trace(), trace()).outcome is TraceOutcome.EQUAL


def test_where_ranks_that_are_right_differ_first_nobody_is_named():
    garbage = trace(at_30=operation(30, outputs=(value("9a"),)))
    wrong = trace(at_40=operation(40, outputs=(value("bad0"),)))
    found = judged(wrong, trace(), garbage)
    assert (found.outcome, found.position) == (TraceOutcome.BLIND, 30)
    later = trace(at_50=operation(50, outputs=(value("9a"),)))
    assert judged(wrong, trace(), later).outcome is TraceOutcome.DEVICE


def test_a_blind_or_unfaithful_side_names_nobody():
    wrong = trace(at_40=operation(40, outputs=(value("bad0"),)))
    blind = Trace(blind="compiled code runs")
    assert judged(blind, trace()).detail == "compiled code runs"
    assert judged(wrong, blind).detail == "compiled code runs"
    assert judged(wrong, replace(trace(), faithful=False)).outcome is TraceOutcome.BLIND
    assert judged(wrong, blind, trace()).outcome is TraceOutcome.DEVICE


def test_an_operation_that_does_not_repeat_names_nobody_and_says_what_to_set():
    index_add = Place("aten::index_add_", "blocks.3.attn")
    sides = [
        trace(at_40=Operation.of(index_add, (value("aa"),), (value(bits),)))
        for bits in ("b0", "b1")
    ]
    found = compare_repeats(*sides)
    assert str(found) == (
        "nondeterministic: aten::index_add_ in blocks.3.attn; it does not repeat: the same inputs"
        " give other bits. Set torch.use_deterministic_algorithms(True)."
    )
    assert compare_repeats(trace(), trace()) is None
    mine = replace(trace(), unrepeated=found)
    alone = judged(mine, trace(), trace())
    assert (alone.outcome, alone.rank) == (TraceOutcome.NONDETERMINISTIC, 4)
    assert judged(mine, mine).rank is None


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", "CUBLAS_WORKSPACE_CONFIG"),
        ("aten::_scaled_dot_product_flash_attention_backward", "SDPBackend.MATH"),
        ("aten::convolution_backward", "cudnn.benchmark = False"),
        ("aten::scatter_add_", "use_deterministic_algorithms"),
        ("flash_attn::_forward", "authors of flash_attn::_forward"),
    ],
)
def test_what_to_set_depends_on_the_operation(operator, part):
    assert part in what_to_set(operator)


def test_what_crosses_is_small_whatever_the_trace():
    many = tuple(value(f"{n:016x}", writer=n) for n in range(40))
    wide = Operation.of(Place("aten::cat" * 40, "m." * 200), many, many)
    assert len(wide.inputs) == MAX_VALUES
    long = Trace((wide,) * 33_000)
    outline = long.outline()
    assert len(outline.pack()) <= OUTLINE_BYTES
    assert Outline.unpack(outline.pack()) == outline
    section = long.section(range(0, outline.stride))
    assert len(section.operations) == outline.stride
    assert len(section.pack()) <= SECTION_BYTES
    assert Section.unpack(section.pack()) == section


def test_traces_of_very_different_length_are_compared_on_the_longer_stride():
    short, long = trace(300), trace(33_000)
    assert short.outline().stride < long.outline().stride
    found = judged(short, long)
    assert (found.outcome, found.position) == (TraceOutcome.SOFTWARE, 300)


def test_damaged_bytes_are_refused():
    for data in (b"", b"{}\n", b"nonsense", trace().outline().pack()[:-3]):
        with pytest.raises(ValueError, match="outline"):
            Outline.unpack(data)
    for data in (b"", b"nonsense"):
        with pytest.raises(ValueError, match="section"):
            Section.unpack(data)


def test_a_finding_crosses_as_json():
    found = TraceFinding(outcome=TraceOutcome.DEVICE, operator="aten::mm", module="a", rank=2)
    assert TraceFinding.from_json(found.to_json()) == found
