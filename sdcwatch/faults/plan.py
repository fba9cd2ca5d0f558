"""What is planted, where, when and on which rank: plain values, no torch.

A `Fault` is one damage; a `FaultPlan` is a tuple of them with a seed. Both are frozen and checked
at construction, so that a plan that cannot work fails before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args

from sdcwatch.core.records import Check, Outcome
from sdcwatch.errors import ConfigurationError, expect, nearest

Site = Literal[
    "activation",
    "gradient",
    "loss",
    "all_reduce",
    "weight",
    "optimizer_state",
    "replay",
    "batch",
    "rng",
    "buffer",
]
Kind = Literal["bit_flip", "scale", "set", "nan", "inf", "stuck_lane", "zero"]
Role = Literal["own", "replay", "both"]
Persistence = Literal["transient", "sticky"]

SITES: tuple[Site, ...] = get_args(Site)
KINDS: tuple[Kind, ...] = get_args(Kind)

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "bit_flip": ("bit",),
    "scale": ("factor",),
    "set": ("value",),
    "nan": (),
    "inf": (),
    "stuck_lane": ("bit", "stuck", "every"),
    "zero": (),
}
"""The fields that say how, by kind; each is required there and refused elsewhere."""

_TARGET_REQUIRED = ("activation", "gradient", "weight", "optimizer_state", "buffer")
_TARGET_REFUSED = ("loss", "rng")
_BOTH_PASSES = ("activation", "gradient")
"""Sites that exist in a replay as well as in a rank's own pass."""

_RNG_KINDS = ("bit_flip", "set", "zero")


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    known = value in allowed
    expect(known, f"`{name}` to be one of {allowed}", value, nearest(str(value), allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The verdict that a fault should lead to; grading a run compares it with what was said.

    Attributes:
        check: The check that should find it.
        outcome: What it should come to.
        ranks: The ranks it should name; empty where nobody should be named.
        step: The step of the verdict, if another than the step of the fault.
    """

    check: Check
    outcome: Outcome
    ranks: tuple[int, ...] = ()
    step: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        _one_of("expect.check", self.check, tuple(c.value for c in Check))
        _one_of("expect.outcome", self.outcome, tuple(o.value for o in Outcome))
        object.__setattr__(self, "check", Check(self.check))
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        ok = isinstance(self.ranks, tuple) and all(_is_int(r, 0) for r in self.ranks)
        expect(ok, "`expect.ranks` to be ranks >= 0", self.ranks, "Pass a tuple of ranks.")
        ok = self.step is None or _is_int(self.step, 0)
        expect(ok, "`expect.step` to be a step >= 0", self.step, "Pass the step of the verdict.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault.

    Attributes:
        site: Where the damage happens; docs/faults.md has one example for each.
        kind: What happens to the bits.
        ranks: The ranks on which it happens, or "all".
        target: Module (`activation`, `replay`), parameter (`gradient`, `weight`,
            `optimizer_state`, optional for `all_reduce`), buffer (`buffer`), or the index or key
            of a tensor in the batch (`batch`, optional).
        key: Entry of the optimizer's state; default the first one shaped like the parameter.
        step: The only step of the fault; or
        steps: first and last step, both included; neither means every step.
        probability: Chance of each matching computation, drawn from the plan's seed.
        persistence: "transient": at most one computation of a step; "sticky": every one.
        role: In the rank's "own" pass, in a "replay" of anybody's micro-batch on this rank
            (arbitration included), or "both". Default: both if sticky, else own. Only `activation`
            and `gradient` have a choice: they alone lie inside of what is replayed.
        bit: For `bit_flip` and `stuck_lane`: the bit, 0 is the lowest.
        element: Flat index of the element (taken modulo the size where the size is known only
            when it happens), "random" or "all". Default: all for `scale` and `zero`, 0 (the
            first lane) for `stuck_lane`, else random. Random means seeded: the same element in
            every computation if sticky, another one in each step if transient.
        factor: For `scale`.
        value: For `set`; for the site `rng`, the seed.
        stuck: For `stuck_lane`: the value of the bit, 0 or 1.
        every: For `stuck_lane`: the distance between two lanes, in elements.
        expect: The verdict it should lead to, "miss" if it cannot be seen by design, or None.
        name: What a table calls it.
    """

    site: Site
    kind: Kind
    ranks: tuple[int, ...] | Literal["all"]
    target: str | None = None
    key: str | None = None
    step: int | None = None
    steps: tuple[int, int] | None = None
    probability: float = 1.0
    persistence: Persistence = "transient"
    role: Role | None = None
    bit: int | None = None
    element: int | Literal["random", "all"] | None = None
    factor: float | None = None
    value: float | None = None
    stuck: int | None = None
    every: int | None = None
    expect: Expectation | Literal["miss"] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Check every field and fill in the defaults that depend on others."""
        _one_of("site", self.site, SITES)
        _one_of("kind", self.kind, KINDS)
        _one_of("persistence", self.persistence, get_args(Persistence))
        self._check_who_and_when()
        self._check_target()
        self._check_parameters()
        self._settle_role()
        self._settle_element()
        ok = self.expect in (None, "miss") or isinstance(self.expect, Expectation)
        expect(ok, '`expect` to be an Expectation, "miss" or None', self.expect, "Pass one.")
        expect(isinstance(self.name, str), "`name` to be text", self.name, "Pass a short name.")

    def _check_who_and_when(self) -> None:
        ok = self.ranks == "all" or (
            isinstance(self.ranks, tuple)
            and bool(self.ranks)
            and all(_is_int(rank, 0) for rank in self.ranks)
        )
        expect(ok, '`ranks` to be ranks >= 0 or "all"', self.ranks, "Pass a tuple such as (3,).")
        ok = self.step is None or self.steps is None
        expect(ok, "`step` or `steps`", (self.step, self.steps), "Pass one of the two.")
        ok = self.step is None or _is_int(self.step, 1)
        expect(ok, "`step` to be an integer >= 1", self.step, "Steps are counted from 1.")
        if self.steps is not None:
            pair = self.steps
            ok = isinstance(pair, tuple) and len(pair) == 2 and all(_is_int(s, 1) for s in pair)
            expect(
                ok and pair[0] <= pair[1],
                "`steps` to be the first and the last step, counted from 1",
                pair,
                "Pass a pair such as (5, 20).",
            )
        ok = _is_number(self.probability) and 0 < self.probability <= 1
        expect(ok, "`probability` in (0, 1]", self.probability, "Leave it out for always.")

    def _check_target(self) -> None:
        ok = self.target is None or isinstance(self.target, str)
        expect(ok, "`target` to be a name", self.target, "Pass text.")
        if self.site in _TARGET_REQUIRED:
            do = "Name the module, parameter or buffer as the model's named_*() methods do."
            expect(self.target is not None, f"`target` for site {self.site!r}", None, do)
        if self.site in _TARGET_REFUSED:
            do = "Leave it out."
            expect(self.target is None, f"no `target` for site {self.site!r}", self.target, do)
        ok = self.key is None or (self.site == "optimizer_state" and isinstance(self.key, str))
        expect(ok, "`key` with site 'optimizer_state' only", self.key, "Leave it out.")

    def _check_parameters(self) -> None:
        wanted = _PARAMETERS[self.kind]
        for name in ("bit", "factor", "value", "stuck", "every"):
            given = getattr(self, name)
            if name in wanted:
                expect(given is not None, f"`{name}` for kind {self.kind!r}", given, "Pass it.")
            else:
                do = f"Kind {self.kind!r} takes {wanted or 'none'}."
                expect(given is None, f"no `{name}` for kind {self.kind!r}", given, do)
        ok = self.bit is None or (_is_int(self.bit, 0) and self.bit < 64)
        expect(ok, "`bit` between 0 and 63", self.bit, "0 is the lowest bit.")
        for name in ("factor", "value"):
            given = getattr(self, name)
            do = "Use kind 'nan' or 'inf' for those."
            expect(given is None or _is_number(given), f"`{name}` to be a finite number", given, do)
        ok = self.stuck in (None, 0, 1) and not isinstance(self.stuck, bool)
        expect(ok, "`stuck` to be 0 or 1", self.stuck, "Pass the value the bit is stuck at.")
        ok = self.every is None or _is_int(self.every, 1)
        expect(ok, "`every` to be an integer >= 1", self.every, "Pass the distance of the lanes.")
        if self.site == "rng":
            _one_of("kind", self.kind, _RNG_KINDS)

    def _settle_role(self) -> None:
        role = self.role
        if role is None:
            if self.site == "replay":
                role = "replay"
            else:
                both = self.site in _BOTH_PASSES and self.persistence == "sticky"
                role = "both" if both else "own"
        _one_of("role", role, get_args(Role))
        if self.site == "replay":
            expect(role == "replay", "role 'replay' for site 'replay'", role, "Leave it out.")
        elif self.site not in _BOTH_PASSES:
            do = f"Only {_BOTH_PASSES} happen in a replay too; leave it out."
            expect(role == "own", f"role 'own' for site {self.site!r}", role, do)
        object.__setattr__(self, "role", role)

    def _settle_element(self) -> None:
        element = self.element
        if self.site == "rng":
            expect(element is None, "no `element` for site 'rng'", element, "Leave it out.")
            return
        if element is None:
            whole = self.kind in ("scale", "zero")
            element = 0 if self.kind == "stuck_lane" else "all" if whole else "random"
        ok = _is_int(element, 0) or (element in ("random", "all") and self.kind != "stuck_lane")
        words = "" if self.kind == "stuck_lane" else ', "random" or "all"'
        expect(ok, f"`element` to be an index >= 0{words}", element, "Indices are flat.")
        object.__setattr__(self, "element", element)

    @property
    def label(self) -> str:
        """Its name, or one made of kind, site and target."""
        return self.name or " ".join(filter(None, (self.kind, self.site, self.target)))

    def on_rank(self, rank: int) -> bool:
        """Whether it happens on this rank."""
        return self.ranks == "all" or rank in self.ranks

    def at_step(self, step: int) -> bool:
        """Whether it may happen at this step."""
        if self.step is not None:
            return step == self.step
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def in_role(self, role: str) -> bool:
        """Whether it happens in a computation of this role: "own" or "replay"."""
        return self.role in (role, "both")

    def to_dict(self) -> dict[str, Any]:
        """As plain values, defaults left out; `from_dict` is the inverse."""
        plain: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or value == f.default:
                continue
            if f.name == "ranks" and len(value) == 1:
                plain["rank"] = value[0]
            else:
                plain[f.name] = list(value) if isinstance(value, tuple) else value
        if isinstance(self.expect, Expectation):
            wanted = self.expect
            plain["expect"] = {"check": wanted.check.value, "outcome": wanted.outcome.value}
            if wanted.ranks:
                plain["expect"]["ranks"] = list(wanted.ranks)
            if wanted.step is not None:
                plain["expect"]["step"] = wanted.step
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fault:
        """A fault from plain values, as the YAML form has them.

        Raises:
            ConfigurationError: A key is unknown, a value cannot work, or one is missing.
        """
        names = [f.name for f in fields(cls)]
        values = _known(data, [*names, "rank"], "fault")
        if "rank" in values:
            expect("ranks" not in values, "`rank` or `ranks`", sorted(values), "Pass one.")
            values["ranks"] = (values.pop("rank"),)
        target = values.get("target")
        if isinstance(target, int) and not isinstance(target, bool):
            values["target"] = str(target)  # modules of nn.Sequential have such names
        for name in ("ranks", "steps"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        for name in ("factor", "value", "probability"):
            if name in values:
                values[name] = _number(values[name])
        if isinstance(values.get("expect"), Mapping):
            wanted = _known(values["expect"], [f.name for f in fields(Expectation)], "`expect`")
            _required(wanted, ("check", "outcome"), "`expect`")
            wanted["ranks"] = tuple(wanted.get("ranks", ()))
            values["expect"] = Expectation(**wanted)
        _required(values, ("site", "kind", "ranks"), "a fault")
        return cls(**values)


def _known(data: Any, names: list[str], what: str) -> dict[str, Any]:
    is_mapping = isinstance(data, Mapping)
    expect(is_mapping, f"{what} to be a mapping", data, "See docs/faults.md for the form.")
    for key in data:
        expect(key in names, f"a field of {what}", key, nearest(str(key), names))
    return dict(data)


def _required(values: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    for name in names:
        do = "Add it; `rank: 3` is short for `ranks: [3]`." if name == "ranks" else "Add it."
        expect(name in values, f"`{name}` in {what}", sorted(values), do)


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3, without a dot, as text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of a run, in the order in which they apply to the same tensor.

    Attributes:
        faults: What is planted; none is a valid plan.
        seed: Seed of random elements and of probabilities. Plan and seed fix every bit.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        ok = isinstance(self.faults, tuple) and all(isinstance(f, Fault) for f in self.faults)
        expect(ok, "`faults` to be a tuple of Fault", self.faults, "Pass (Fault(...), ...).")
        ok = _is_int(self.seed, 0)
        expect(ok, "`seed` to be an integer >= 0", self.seed, "Pass a number.")

    def on_rank(self, rank: int) -> tuple[tuple[int, Fault], ...]:
        """The faults of one rank, each with its position in the plan."""
        return tuple((i, fault) for i, fault in enumerate(self.faults) if fault.on_rank(rank))

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `from_dict` is the inverse."""
        return {"seed": self.seed, "faults": [fault.to_dict() for fault in self.faults]}

    def to_yaml(self) -> str:
        """The plan in the YAML form of docs/faults.md.

        Raises:
            ImportError: PyYAML is missing; the message names the extra.
        """
        from sdcwatch.faults.plan import dump_plan

        return dump_plan(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FaultPlan:
        """A plan from plain values, as the YAML form has them.

        Raises:
            ConfigurationError: A key is unknown or a value cannot work; the message says which
                fault of the list it is.
        """
        values = _known(data, ["seed", "faults"], "a fault plan")
        faults = values.get("faults") or []
        is_list = isinstance(faults, list)
        expect(is_list, "`faults` to be a list", faults, "See docs/faults.md for the form.")
        entries = enumerate(cast("list[Any]", faults), start=1)
        built = tuple(_entry(position, entry) for position, entry in entries)
        return cls(faults=built, seed=values.get("seed", 0))


def _entry(position: int, data: Any) -> Fault:
    try:
        return Fault.from_dict(data)
    except ConfigurationError as error:
        msg = f"Fault {position} of the plan: {error}"
        raise ConfigurationError(msg) from error


def _yaml() -> ModuleType:
    """PyYAML, which only fault plans in files need."""
    try:
        import yaml
    except ImportError as error:  # pragma: no cover - exercised in a process without PyYAML
        msg = (
            "Expected PyYAML for fault plans, but it is missing. "
            "Do: pip install 'sdcwatch[monitor]'"
        )
        raise ImportError(msg) from error
    return yaml


def load_plan(path: Path | str) -> FaultPlan:
    """Read a fault plan.

    Args:
        path: A YAML file in the form of docs/faults.md.

    Raises:
        ConfigurationError: The file is missing, is no YAML, or holds a plan that cannot work; the
            message names the file and the fault.
    """
    _yaml()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        msg = f"Expected a fault plan at {path}, but got: {error.strerror}. Check the path."
        raise ConfigurationError(msg) from error
    try:
        return parse_plan(text)
    except ConfigurationError as error:
        msg = f"{path}: {error}"
        raise ConfigurationError(msg) from error


def parse_plan(text: str) -> FaultPlan:
    """A fault plan from YAML text.

    Raises:
        ConfigurationError: The text is no YAML or holds a plan that cannot work.
    """
    yaml = _yaml()
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        msg = f"Expected YAML, but got: {error}. Correct the syntax there."
        raise ConfigurationError(msg) from error
    return FaultPlan.from_dict({} if data is None else data)


def dump_plan(plan: FaultPlan) -> str:
    """A fault plan as YAML text; `parse_plan` is the inverse."""
    # non-ASCII text is escaped: PyYAML folds some of it, U+0085 for one, if it may write it plainly
    text: str = _yaml().safe_dump(plan.to_dict(), sort_keys=False)
    return text
