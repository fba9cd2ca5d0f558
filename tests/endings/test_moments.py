"""One rank is busy for a while, another is killed, at any moments: the right one is named.

The moments are drawn from a seed. ``python tools/endings.py --moments 40`` plays 40 of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sdcwatch.core.records import Hang
from sdcwatch.errors import EXIT_RANK_GONE

from .conftest import WORLD, Ended, Nursery, Play

MOMENTS = int(os.environ.get("SDCWATCH_MOMENTS", "5"))
TOGETHER = 5
"""Runs at a time: they wait most of the time."""
DEADLINE_SECONDS, BUSY_SECONDS = 1.0, 2.5

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60 + 60 * -(-MOMENTS // TOGETHER))]


@dataclass(frozen=True)
class Moments:
    """What happens in one run.

    Attributes:
        busy: The rank whose training thread is busy for longer than the deadline.
        busy_at: When that begins, in seconds.
        killed: The rank that is killed; not the one that hosts the store.
        killed_at: When, in seconds.
    """

    busy: int
    busy_at: float
    killed: int
    killed_at: float

    @classmethod
    def drawn(cls, seed: int) -> Moments:
        draw = random.Random(seed)
        killed = draw.randrange(1, WORLD)
        busy = draw.choice([rank for rank in range(WORLD) if rank != killed])
        begins = draw.uniform(0.0, 1.0)
        return cls(busy, begins, killed, begins + draw.uniform(0.0, 2 * BUSY_SECONDS))


def carry_out(plays: list[tuple[Play, Moments]]) -> None:
    """Send each signal when its time has come."""
    for play, _ in plays:
        play.wait_for_files("steady-*", WORLD, seconds=100.0)
    started = time.monotonic()
    signals = [(m.busy_at, play, m.busy, signal.SIGUSR1) for play, m in plays]
    signals += [(m.killed_at, play, m.killed, signal.SIGKILL) for play, m in plays]
    for at, play, rank, number in sorted(signals, key=lambda row: row[0]):
        time.sleep(max(0.0, started + at - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it has ended already: see `check`
            play.kill(rank, number)


def check(ended: Ended, what: Moments) -> None:
    said = f"{what}\n" + "\n".join(f"--- {r}\n{t[-3000:]}" for r, t in enumerate(ended.stderr))
    expected = [-signal.SIGKILL if r == what.killed else EXIT_RANK_GONE for r in range(WORLD)]
    assert ended.codes == expected, said
    assert (ended.run_dir / f"busy-{what.busy}").exists(), said
    assert f"RankGone: rank {what.killed} absent" in ended.finish.reason, said
    for hang in ended.of(Hang):
        # Whoever is busy, or waits for it elsewhere, is said to be late and alive; else only the
        # one that was killed is named.
        late = all("is alive" in hang.left.get(str(rank), "") for rank in hang.absent)
        assert late or hang.absent == (what.killed,), f"{hang}\n{said}"
    for healthy in set(range(WORLD)) - {what.killed}:
        assert f"rank {healthy} gave no sign of life" not in "\n".join(ended.stderr), said


def test_whoever_is_killed_is_named_and_whoever_is_busy_is_not(
    nursery: Nursery, tmp_path: Path
) -> None:
    seeds = iter(range(MOMENTS))
    while some := [seed for seed, _ in zip(seeds, range(TOGETHER), strict=False)]:
        plays: list[tuple[Play, Moments]] = []
        for seed in some:
            run_dir = tmp_path / str(seed)
            run_dir.mkdir()
            play = nursery.play(
                "busy_and_killed",
                run_dir,
                DEADLINE=str(DEADLINE_SECONDS),
                BUSY=str(BUSY_SECONDS),
            )
            plays.append((play, Moments.drawn(seed)))
        carry_out(plays)
        for play, what in plays:
            check(play.end(), what)
