"""However a run ends, every process ends, in time, and every place tells the same story.

Each rank is an interpreter of its own that leaves through finalisation; `tools/endings.py` plays
all of them ten times.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sdcwatch.core.records import Hang
from sdcwatch.errors import (
    EXIT_CORRUPTION,
    EXIT_DESYNC,
    EXIT_RANK_GONE,
    EXIT_SOFTWARE,
)

from .conftest import DEADLINE_SECONDS, MARGIN_SECONDS, SLACK, Ended, Nursery
from .hosts import Hosts

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = -signal.SIGINT


@dataclass(frozen=True)
class Story:
    """What every place says of an ending.

    Attributes:
        codes: Of each rank; a set where a rank may end in either way.
        state: In events.jsonl and summary.json.
        says: In the last lines of rank 0.
        how: Ways to leave the guard that are tested.
        recorded: The code in events.jsonl; by default that of rank 0.
        late: Seconds that the ending may take beyond deadline + margin.
    """

    codes: tuple[object, object, object]
    state: str
    says: str
    how: tuple[str, ...] = ("with",)
    recorded: int | None = None
    late: float = 0.0


ONLY_RANK_0_SAVES = Story((EXIT_DESYNC,) * 3, "failed", "Desync")
STORIES = {
    "finished": Story((0, 0, 0), "finished", "the run ended", ("with", "close", "neither")),
    "finding": Story(
        (EXIT_CORRUPTION,) * 3, "tainted", "tainted at step", ("with", "close", "neither")
    ),
    "software_finding": Story((EXIT_SOFTWARE,) * 3, "failed", "SoftwareDivergence"),
    "rank_killed": Story((EXIT_RANK_GONE, -signal.SIGKILL, EXIT_RANK_GONE), "failed", "RankGone"),
    "only_rank_0_saves_with_buffers": ONLY_RANK_0_SAVES,
    "exception": Story((EXIT_RANK_GONE, 1, EXIT_RANK_GONE), "failed", "RankGone"),
    "late_and_waited_for": Story((0, 0, 0), "finished", "the run ended", late=8.0),
    "save_raises": Story((1, 1, 1), "failed", "CheckpointError"),
    "second_init": Story((0, 0, 0), "finished", "the run ended"),
    "forks_helpers": Story((0, 0, 0), "finished", "the run ended", ("with", "close")),
    # Two records are waited for, the log at its end and the summary each for a while.
    "stalled_file": Story((0, 0, 0), "", "events.jsonl could not be written to the end", late=30.0),
    "full_disk": Story(
        (0, 0, 0), "", "events.jsonl and summary.json could not be written to the end"
    ),
}


def fits(code: int | None, expected: object) -> bool:
    return code in expected if isinstance(expected, set) else code == expected


def check(ended: Ended, story: Story) -> None:
    """Exit codes, stderr, events.jsonl and summary.json agree, and it did not take too long."""
    said = "\n".join(f"--- rank {r}\n{t[-3000:]}" for r, t in enumerate(ended.stderr))
    assert all(map(fits, ended.codes, story.codes)), f"{ended.codes}\n{said}"
    assert max(ended.seconds) < SLACK * (DEADLINE_SECONDS + MARGIN_SECONDS) + story.late, (
        ended.seconds
    )
    assert story.says in "\n".join(ended.stderr[0].splitlines()[-3:]), said
    assert "details: sdcwatch report" in ended.last_line(), said
    failed = [r for r, code in enumerate(ended.codes) if r and code not in (0, -signal.SIGKILL)]
    assert [r for r in failed if ": ended: " not in ended.last_line(r)] == [], said
    if not story.state:
        return
    assert ended.finish.state.value == story.state
    assert ended.summary["state"] == story.state
    code = story.recorded if story.recorded is not None else ended.codes[0]
    assert ended.finish.exit_code == code


@pytest.mark.parametrize(
    ("scenario", "how"), [(name, how) for name, story in STORIES.items() for how in story.how]
)
def test_every_process_ends_in_time_and_every_place_says_the_same(
    nursery: Nursery, tmp_path: Path, scenario: str, how: str
) -> None:
    check(nursery.play(scenario, tmp_path, how=how).end(), STORIES[scenario])


def test_rankgone_exit_a_rank_that_is_late_for_too_long_is_named_with_what_it_does(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.play("alive_and_late", tmp_path).end(kill_after=(1,))
    assert (ended.codes[0], ended.codes[2]) == (EXIT_RANK_GONE, EXIT_RANK_GONE)
    hangs = ended.of(Hang)
    assert {hang.absent for hang in hangs} == {(1,)}
    assert "is alive, after the" in hangs[0].left["1"]


@pytest.mark.parametrize(
    ("how", "other"),
    # Without `with`, what DDP raised where its peer left is what the interpreter ends with.
    [("with", EXIT_DESYNC), ("close", {EXIT_DESYNC, 1})],
    ids=["m10_hang_at_exit", "ck_rank0"],
)
def test_where_rank_0_alone_saves_every_process_ends_with_a_question_about_that(
    nursery: Nursery, tmp_path: Path, how: str, other: object
) -> None:
    ended = nursery.play("only_rank_0_saves", tmp_path, how=how).end()
    check(ended, replace(ONLY_RANK_0_SAVES, codes=(EXIT_DESYNC, other, other)))
    assert "`if rank == 0`" in ended.stderr[0]


@pytest.mark.netns
def test_partition_a_host_that_is_cut_off_and_those_that_wait_for_it_end_and_say_so(
    nursery: Nursery, tmp_path: Path, hosts: Hosts
) -> None:
    play = nursery.play("partition", tmp_path, **hosts.environment)
    play.wait_for_files("steady-*", 3)
    hosts.cut(1)
    for name in ("happened", "cut"):
        (tmp_path / name).touch()
    ended = play.end()
    check(ended, Story((EXIT_RANK_GONE,) * 3, "failed", "RankGone"))
    assert {hang.absent for hang in ended.of(Hang) if hang.reporter != 1} == {(1,)}
    assert "neither the store nor, through it, any rank can be reached" in ended.stderr[1]
    assert "waited 3 s; the store: did not answer" in ended.stderr[1]


def test_the_end_of_the_rank_that_hosts_the_store_is_told_as_such(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.play("store_gone", tmp_path).end()
    assert ended.codes == [-signal.SIGKILL, EXIT_RANK_GONE, EXIT_RANK_GONE]


@pytest.mark.parametrize(
    ("scenario", "number", "code"),
    [
        ("sigterm", signal.SIGTERM, {TERMINATED, EXIT_RANK_GONE}),
        ("sigint", signal.SIGINT, {INTERRUPTED, EXIT_RANK_GONE}),
        ("own_handler", signal.SIGTERM, {0}),
        ("later_handler", signal.SIGTERM, {0}),
        ("chained_handler", signal.SIGTERM, {TERMINATED, EXIT_RANK_GONE}),
    ],
)
def test_a_signal_ends_the_run_with_a_last_record_unless_the_program_handles_it(
    nursery: Nursery, tmp_path: Path, scenario: str, number: int, code: set[int]
) -> None:
    play = nursery.play(scenario, tmp_path)
    play.wait_for_files("steady-*", 3)
    for rank in range(3):
        play.kill(rank, number)
    ended = play.end()
    said = "\n".join(text[-2000:] for text in ended.stderr)
    assert all(c in code for c in ended.codes), f"{ended.codes}\n{said}"
    assert ended.finish.state.value == ("finished" if code == {0} else "failed")


@pytest.mark.parametrize(
    ("scenario", "how", "number", "code"),
    [
        ("exits", "with", 0, 3),
        ("exits", "neither", 0, 3),
        ("closes_at_exit", "", 0, 1),
        ("sigterm", "neither", signal.SIGTERM, TERMINATED),
        ("sleeps", "neither", signal.SIGTERM, TERMINATED),
        ("in_an_event_loop", "", signal.SIGTERM, TERMINATED),
        ("trains_in_a_thread", "", signal.SIGTERM, TERMINATED),
    ],
)
def test_a_code_is_the_same_in_the_log_however_the_script_came_to_it(
    nursery: Nursery, tmp_path: Path, scenario: str, how: str, number: int, code: int
) -> None:
    play = nursery.play(scenario, tmp_path, how=how, world=1)
    if number:
        play.wait_for_files("steady-0", 1)
        play.kill(0, number)
    ended = play.end()
    assert ended.codes == [code], ended.stderr[0][-2000:]
    assert (ended.finish.state.value, ended.finish.exit_code) == ("failed", code)
    assert ended.summary["state"] == "failed"
    assert "details: sdcwatch report" in ended.last_line()
    assert scenario != "sleeps" or (tmp_path / "cleaned").exists()
