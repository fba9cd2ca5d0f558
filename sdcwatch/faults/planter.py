"""When a fault happens, and the log of what was really planted on one rank.

Everything that is random is drawn from the seed of the plan, the position of the fault, the step
and, for probabilities, the rank: the same plan plants the same bits in every run.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from sdcwatch.errors import ConfigurationError, expect
from sdcwatch.faults.damage import Damage, damaged
from sdcwatch.faults.plan import Fault, FaultPlan

_LOG_NAME = "faults.rank{rank}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One fault that happened.

    Attributes:
        step: The step in which it happened.
        rank: The rank on which it happened.
        fault: Position of the fault in the plan, from 0.
        name: Its label.
        site: Where.
        kind: What.
        role: "own" or "replay".
        target: Name of the module, parameter, buffer or batch entry, "" if there is none.
        element: Flat index of the example.
        before: Value of the example before.
        after: Value of the example after.
        changed: Elements whose bits changed; 0 if it happened and changed nothing.
    """

    step: int
    rank: int
    fault: int
    name: str
    site: str
    kind: str
    role: str
    target: str = ""
    element: int = 0
    before: float = 0.0
    after: float = 0.0
    changed: int = 0


class Planter:
    """Decides, damages and keeps the log, for one rank."""

    def __init__(self, plan: FaultPlan, rank: int, log_dir: Path | None) -> None:
        self._plan, self._rank = plan, rank
        self._faults = plan.on_rank(rank)
        self._path = None if log_dir is None else log_dir / _LOG_NAME.format(rank=rank)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self.log: list[Planted] = []
        self.step: int | None = None
        self._done: set[int] = set()
        self._seen: Counter[int] = Counter()

    def begin_step(self, step: int) -> None:
        """Start a step: transient faults may happen once more."""
        ok = isinstance(step, int) and not isinstance(step, bool) and step >= 1
        expect(ok, "`step` to be an integer >= 1", step, "Steps are counted from 1.")
        self.step = step
        self._done.clear()
        self._seen.clear()

    def faults(self, *sites: str) -> tuple[tuple[int, Fault], ...]:
        """The faults of this rank at these sites, each with its position in the plan."""
        return tuple((i, f) for i, f in self._faults if f.site in sites)

    def may_happen(self, fault: Fault) -> bool:
        """Whether a fault may happen in this step.

        Raises:
            ConfigurationError: No step has begun.
        """
        if self.step is None:
            msg = (
                "Expected Injector.begin_step(step) before the first computation, but got none. "
                "Call it at the top of the training loop."
            )
            raise ConfigurationError(msg)
        return fault.at_step(self.step)

    def due(self, position: int, fault: Fault, role: str) -> bool:
        """Whether a fault happens in this computation; draws the probability."""
        if not (self.may_happen(fault) and fault.in_role(role)) or position in self._done:
            return False
        self._seen[position] += 1
        # an all-reduce that errs on every rank errs alike, or it would not be a common cause
        who = "all" if fault.site == "all_reduce" else self._rank
        key = (self._plan.seed, position, self.step, who, self._seen[position])
        return fault.probability >= 1 or Random(f"due {key}").random() < fault.probability

    def damage(self, position: int, fault: Fault, tensor: Tensor, role: str) -> Damage | None:
        """Damage a copy if the fault is due, and log it; None if nothing happened."""
        if not self.due(position, fault, role):
            return None
        when = None if fault.persistence == "sticky" else self.step
        draw = Random(f"element {(self._plan.seed, position, when)}")
        damage = damaged(tensor, fault, draw, f"the {fault.site} {fault.target or ''}".strip())
        if damage is not None:
            self.note(position, fault, role, damage)
        return damage

    def note(self, position: int, fault: Fault, role: str, damage: Damage) -> None:
        """Log a fault that happened; a transient one is over for this step."""
        assert self.step is not None
        if fault.persistence == "transient":
            self._done.add(position)
        planted = Planted(
            step=self.step,
            rank=self._rank,
            fault=position,
            name=fault.label,
            site=fault.site,
            kind=fault.kind,
            role=role,
            target=fault.target or "",
            element=damage.element,
            before=damage.before,
            after=damage.after,
            changed=damage.changed,
        )
        self.log.append(planted)
        if self._path is not None:
            # opened each time: a run that a finding ends has its log complete
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_encode(planted) + "\n")


def read_log(directory: Path | str) -> tuple[Planted, ...]:
    """What every rank planted, ordered by step and rank, from a directory of logs.

    A torn last line is ignored. A directory without logs gives an empty tuple.

    Raises:
        ConfigurationError: A line other than the last cannot be read.
    """
    planted: list[Planted] = []
    for path in Path(directory).glob(_LOG_NAME.format(rank="*")):
        if re.fullmatch(_LOG_NAME.format(rank=r"\d+"), path.name):
            planted += _read(path)
    return tuple(sorted(planted, key=lambda p: (p.step, p.rank)))


def _read(path: Path) -> list[Planted]:
    lines = path.read_text(encoding="utf-8").split("\n")
    planted: list[Planted] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            planted.append(_decode(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            msg = (
                f"Expected planted faults in {path}, but got line {number}: {error}. "
                "Remove the line, or point to the directory of a run."
            )
            raise ConfigurationError(msg) from error
    return planted


def _encode(planted: Planted) -> str:
    plain: dict[str, Any] = asdict(planted)
    for name in ("before", "after"):
        if not math.isfinite(plain[name]):
            plain[name] = str(plain[name])  # "nan", "inf": JSON has no number for them
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _decode(line: str) -> Planted:
    data = json.loads(line)
    known = {f.name for f in fields(Planted)}
    values = {key: value for key, value in data.items() if key in known}
    for name in ("before", "after"):
        if isinstance(values.get(name), str):
            values[name] = float(values[name])
    return Planted(**values)
