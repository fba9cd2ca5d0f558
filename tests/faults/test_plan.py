"""Fault plans as values and as YAML: checked at construction, equal after a round trip."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcwatch.core.records import Check, Outcome
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults import Expectation, Fault, FaultPlan, load_plan, parse_plan
from sdcwatch.faults.plan import KINDS, SITES

DOCS = Path(__file__).parents[2] / "docs" / "faults.md"
NEEDS: dict[str, dict[str, Any]] = {
    "bit_flip": {"bit": 3},
    "scale": {"factor": 2.0},
    "set": {"value": 1.0},
    "nan": {},
    "inf": {},
    "stuck_lane": {"bit": 3, "stuck": 1, "every": 4},
    "zero": {},
}
NAMED = {"activation", "gradient", "weight", "optimizer_state", "buffer"}


def fault(**changes: Any) -> Fault:
    given: dict[str, Any] = {"site": "loss", "kind": "nan", "ranks": (0,)}
    return Fault(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"site": "los"}, "Did you mean 'loss'?"),
        ({"kind": "bitflip"}, "Did you mean 'bit_flip'?"),
        ({"ranks": ()}, "`ranks` to be ranks >= 0"),
        ({"ranks": 3}, "`ranks` to be ranks >= 0"),
        ({"ranks": (-1,)}, "`ranks` to be ranks >= 0"),
        ({"step": 0}, "Steps are counted from 1"),
        ({"step": True}, "`step` to be an integer >= 1"),
        ({"step": 3, "steps": (1, 2)}, "`step` or `steps`"),
        ({"steps": (5, 4)}, "first and the last step"),
        ({"steps": (5,)}, "first and the last step"),
        ({"probability": 0.0}, "`probability` in (0, 1]"),
        ({"probability": 1.5}, "`probability` in (0, 1]"),
        ({"persistence": "stuck"}, "`persistence` to be one of"),
        ({"target": "0.weight"}, "no `target` for site 'loss'"),
        ({"site": "gradient"}, "`target` for site 'gradient'"),
        ({"key": "exp_avg"}, "site 'optimizer_state' only"),
        ({"kind": "bit_flip"}, "`bit` for kind 'bit_flip'"),
        ({"bit": 3}, "no `bit` for kind 'nan'"),
        ({"kind": "bit_flip", "bit": 64}, "`bit` between 0 and 63"),
        ({"kind": "scale", "factor": float("inf")}, "`factor` to be a finite number"),
        ({"kind": "stuck_lane", "bit": 1, "every": 2, "stuck": 2}, "`stuck` to be 0 or 1"),
        ({"kind": "stuck_lane", "bit": 1, "every": 0, "stuck": 1}, "`every` to be an integer >= 1"),
        ({"kind": "stuck_lane", "bit": 1, "every": 2, "stuck": 1, "element": "all"}, "`element`"),
        ({"element": -1}, "`element` to be an index >= 0"),
        ({"element": "any"}, "`element` to be an index >= 0"),
        ({"role": "arbiter"}, "`role` to be one of"),
        ({"site": "weight", "target": "w", "role": "both"}, "role 'own' for site 'weight'"),
        ({"role": "replay"}, "role 'own' for site 'loss'"),
        ({"site": "replay", "role": "own"}, "role 'replay' for site 'replay'"),
        ({"site": "rng"}, "`kind` to be one of ('bit_flip', 'set', 'zero')"),
        ({"site": "rng", "kind": "zero", "element": 3}, "no `element` for site 'rng'"),
        ({"expect": "hit"}, "`expect` to be an Expectation"),
        ({"name": 3}, "`name` to be text"),
    ],
)
def test_fault_that_cannot_work_is_refused_with_what_to_do(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        fault(**changes)
    message = str(raised.value)
    assert message.startswith("Expected ")
    assert ", but got " in message
    assert words in message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"check": "weights"}, "`expect.check` to be one of"),
        ({"outcome": "found"}, "`expect.outcome` to be one of"),
        ({"ranks": [3]}, "`expect.ranks`"),
        ({"step": -1}, "`expect.step`"),
    ],
)
def test_expectation_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"check": "replay", "outcome": "suspect"}
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Expectation(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ({}, "own"),
        ({"site": "activation", "target": "m", "persistence": "sticky"}, "both"),
        ({"site": "gradient", "target": "w", "persistence": "sticky"}, "both"),
        ({"persistence": "sticky"}, "own"),
        (
            {"site": "gradient", "target": "w", "persistence": "sticky", "role": "own"},
            "own",
        ),
        ({"site": "replay"}, "replay"),
        ({"site": "replay", "persistence": "sticky"}, "replay"),
        ({"site": "weight", "target": "w", "persistence": "sticky"}, "own"),
    ],
)
def test_role_defaults_to_where_such_a_fault_shows(changes: dict[str, Any], role: str) -> None:
    assert fault(**changes).role == role


@pytest.mark.parametrize(
    ("kind", "element"),
    [
        ("bit_flip", "random"), ("scale", "all"), ("set", "random"), ("nan", "random"),
        ("inf", "random"), ("stuck_lane", 0), ("zero", "all"),
    ],
)  # fmt: skip
def test_element_defaults_to_what_the_kind_means(kind: str, element: Any) -> None:
    assert fault(kind=kind, **NEEDS[kind]).element == element


def test_when_and_where_are_decided_by_the_fault() -> None:
    ranged = fault(ranks=(1, 3), steps=(5, 7))
    assert [step for step in range(1, 10) if ranged.at_step(step)] == [5, 6, 7]
    assert [rank for rank in range(5) if ranged.on_rank(rank)] == [1, 3]
    once = fault(ranks="all", step=2)
    assert [step for step in range(1, 5) if once.at_step(step)] == [2]
    assert once.on_rank(77)
    assert fault().at_step(12345)
    plan = FaultPlan(faults=(ranged, once))
    assert plan.on_rank(1) == ((0, ranged), (1, once))
    assert plan.on_rank(2) == ((1, once),)


def test_plan_refuses_what_is_no_fault_and_no_seed() -> None:
    with pytest.raises(ConfigurationError, match="`faults` to be a tuple of Fault"):
        FaultPlan(faults=({"site": "loss"},))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="`seed` to be an integer >= 0"):
        FaultPlan(seed=-1)


names = st.text(max_size=12)
expectations = st.builds(
    Expectation,
    check=st.sampled_from(Check),
    outcome=st.sampled_from(Outcome),
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    step=st.none() | st.integers(0, 99),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    site = draw(st.sampled_from(SITES))
    kind = draw(st.sampled_from(("bit_flip", "set", "zero") if site == "rng" else KINDS))
    values: dict[str, Any] = {
        "bit": st.integers(0, 63),
        "factor": numbers,
        "value": numbers,
        "stuck": st.integers(0, 1),
        "every": st.integers(1, 99),
    }
    how = {name: draw(values[name]) for name in NEEDS[kind]}
    when = draw(
        st.sampled_from([{}, {"step": 3}, {"steps": (2, 9)}, {"steps": (4, 4)}, {"step": 1}])
    )
    if site in NAMED:
        how["target"] = draw(names)
    elif site in ("replay", "all_reduce", "batch"):
        how["target"] = draw(st.none() | names)
    if site == "optimizer_state":
        how["key"] = draw(st.none() | names)
    if site in ("activation", "gradient"):
        how["role"] = draw(st.sampled_from(("own", "replay", "both", None)))
    if site != "rng" and kind != "stuck_lane":
        how["element"] = draw(st.none() | st.integers(0, 99) | st.sampled_from(("random", "all")))
    return Fault(
        site=site,
        kind=kind,
        ranks=draw(st.just("all") | st.lists(st.integers(0, 9), min_size=1).map(tuple)),
        probability=draw(st.floats(0, 1, exclude_min=True)),
        persistence=draw(st.sampled_from(("transient", "sticky"))),
        expect=draw(st.none() | st.just("miss") | expectations),
        name=draw(names),
        **when,
        **how,
    )


@given(st.lists(faults(), max_size=3), st.integers(0, 2**63))
@settings(max_examples=150, deadline=None)
def test_yaml_round_trip_gives_an_equal_plan(entries: list[Fault], seed: int) -> None:
    plan = FaultPlan(faults=tuple(entries), seed=seed)
    assert parse_plan(plan.to_yaml()) == plan
    assert FaultPlan.from_dict(plan.to_dict()) == plan


def test_yaml_form_is_short_where_defaults_apply() -> None:
    text = FaultPlan(faults=(fault(kind="scale", factor=1.5, ranks=(3,), step=7),)).to_yaml()
    assert text.splitlines() == [
        "seed: 0", "faults:", "- site: loss", "  kind: scale", "  rank: 3", "  step: 7",
        "  role: own", "  element: all", "  factor: 1.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults: [", "Expected YAML"),
        ("- 3", "a fault plan to be a mapping"),
        ("faults: 3", "`faults` to be a list"),
        ("fault: []", "Did you mean 'faults'?"),
        ("faults: [3]", "Fault 1 of the plan: Expected fault to be a mapping"),
        ("faults: [{site: loss, kind: nan}]", "Fault 1 of the plan: Expected `ranks`"),
        ("faults: [{kind: nan, rank: 0}]", "Expected `site`"),
        ("faults: [{site: loss, kind: nan, rank: 0, ranks: all}]", "`rank` or `ranks`"),
        ("faults: [{site: loss, kind: nan, rank: 0, stpe: 3}]", "Did you mean 'step'"),
        ("faults: [{site: loss, kind: nan, rank: 0, step: x}]", "`step` to be an integer"),
        ("faults: [{site: loss, kind: scale, rank: 0, factor: big}]", "`factor` to be a finite"),
        ("faults: [{site: loss, kind: nan, rank: 0, expect: {check: replay}}]", "`outcome` in"),
        ("faults: [{site: loss, kind: nan, rank: 0, expect: {chek: replay}}]", "mean 'check'?"),
        ("seed: x", "`seed` to be an integer"),
    ],
)
def test_file_that_cannot_work_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load_plan(path)
    assert str(raised.value).startswith(str(path))
    assert words in str(raised.value)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected a fault plan at .*none\.yaml"):
        load_plan(tmp_path / "none.yaml")


def test_empty_file_is_a_plan_without_faults(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("")
    assert load_plan(tmp_path / "plan.yaml") == FaultPlan()


def test_numbers_without_a_dot_and_integer_names_are_read() -> None:
    text = "faults: [{site: activation, target: 0, kind: scale, factor: 1e-3, ranks: [0, 1]}]"
    (read,) = parse_plan(text).faults
    assert (read.target, read.factor, read.ranks) == ("0", 0.001, (0, 1))


def test_every_example_of_the_documentation_is_a_plan_and_every_site_has_one() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    plans = [parse_plan(block) for block in blocks]
    assert {f.site for plan in plans for f in plan.faults} == set(SITES)
    assert {f.kind for plan in plans for f in plan.faults} == set(KINDS)
    assert all(plan.faults for plan in plans)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_plans_loads_no_torch() -> None:
    code = "import sys, sdcwatch.faults as f; f.FaultPlan(); print('torch' in sys.modules)"
    assert run(code).stdout == "False\n"


def test_missing_yaml_names_the_extra() -> None:
    code = "import sys; sys.modules['yaml'] = None; import sdcwatch.faults as f; {}"
    for call in ("f.FaultPlan().to_yaml()", "f.load_plan('x')"):
        errors = run(code.format(call)).stderr
        assert "ImportError: Expected PyYAML" in errors
        assert "pip install 'sdcwatch[monitor]'" in errors


def test_public_names_exist() -> None:
    import sdcwatch.faults

    assert sorted(sdcwatch.faults.__all__) == sdcwatch.faults.__all__
    for name in sdcwatch.faults.__all__:
        assert getattr(sdcwatch.faults, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        sdcwatch.faults.Nothing  # noqa: B018
