"""What ranks tell each other once, when they meet, and what must agree before a guard is built.

Each rank makes one `Introduction`; one gather carries them to every rank. The comparisons are pure
and give every rank the same answer, so that all ranks go on or all refuse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sdcwatch.core.text import list_ranks
from sdcwatch.core.topology import RankInfo

SHOWN_DIFFERENCES = 10
SPARE_FILES = 32
"""Files that a rank may need besides: event logs, endpoints, a connection to a server."""

Schema = Sequence[tuple[str, str, str]]
"""Name, shape and dtype of every tensor that must be the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank, as the others need to know it.

    Attributes:
        info: Who and where it is.
        run: What it would call the run; the name of rank 0 counts.
        run_id: What tells it from another run of that name; that of rank 0 counts.
        apart: What its directory's name has behind it, where a job has several guards; that of
            rank 0 counts.
        options: Options that decide when ranks meet, those that are not the default, as text.
        schema: Digest of the model's schema; see `schema_digest`.
        files: How many more files and sockets it may open.
        unused: Patterns of the option `local` that match nothing here.
    """

    info: RankInfo
    run: str
    options: Mapping[str, str]
    schema: str
    files: int
    run_id: str = ""
    apart: str = ""
    unused: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As it travels."""
        row = {**asdict(self), "options": dict(self.options)}
        return json.dumps(row, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Inverse of `encode`."""
        row = json.loads(data)
        info, unused = RankInfo(**row["info"]), tuple(row["unused"])
        return cls(**{**row, "info": info, "unused": unused})


def schema_digest(schema: Schema) -> str:
    """A digest that is equal exactly if two schemas are."""
    return hashlib.blake2b(json.dumps(list(schema)).encode(), digest_size=16).hexdigest()


def sides_of(values: Iterable[str]) -> dict[str, list[int]]:
    """The ranks that hold each value, given one value per rank."""
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    return sides


def option_differences(
    introductions: Sequence[Introduction], defaults: Mapping[str, str]
) -> list[str]:
    """One phrase per option that is not the same on every rank, naming values and ranks.

    Args:
        introductions: In rank order.
        defaults: The options that must agree, and the value of each where a rank names none.
    """
    said = []
    for name, default in defaults.items():
        sides = sides_of(one.options.get(name, default) for one in introductions)
        if len(sides) > 1:
            parts = [f"{value} on {list_ranks(ranks)}" for value, ranks in sides.items()]
            said.append(f"`{name}` {', '.join(parts)}")
    return said


def files_needed(world_size: int, partners: int) -> int:
    """Sockets of a rank's guard, and some to spare; bounded by a logarithm whatever the world is.

    Args:
        world_size: Number of ranks.
        partners: Ranks with which it may exchange micro-batches.
    """
    return partners + 4 * max(1, world_size - 1).bit_length() + SPARE_FILES


def file_problem(introductions: Sequence[Introduction], needed: int) -> str:
    """Which ranks cannot open as many files as a guard needs, as a clause, or ""."""
    short = [one.info.rank for one in introductions if one.files < needed]
    if not short:
        return ""
    fewest = min(introductions, key=lambda one: one.files)
    left, node = fewest.files, fewest.info.node
    return f"only {left} on rank {fewest.info.rank} ({node}); too few on {list_ranks(short)}"


def unused_everywhere(introductions: Sequence[Introduction]) -> tuple[str, ...]:
    """Patterns of the option `local` that match no tensor of any rank."""
    first, *others = (one.unused for one in introductions)
    return tuple(p for p in first if all(p in unused for unused in others))


def same_schema(introductions: Sequence[Introduction]) -> bool:
    """Whether every rank holds the same model."""
    return len({one.schema for one in introductions}) == 1


def schema_differences(schemas: Sequence[Schema]) -> list[str]:
    """One sentence per tensor that is not the same on every rank, at most ten."""
    tables = [{name: f"{shape} {dtype}" for name, shape, dtype in row} for row in schemas]
    said = []
    for name in dict.fromkeys(n for table in tables for n in table):
        sides = sides_of(table.get(name, "missing") for table in tables)
        if len(sides) > 1:
            parts = [f"{what} on {list_ranks(ranks)}" for what, ranks in sides.items()]
            said.append(f"{name}: {', '.join(parts)}")
    if not said:
        said.append("the parameters come in a different order")
    return said[:SHOWN_DIFFERENCES]
