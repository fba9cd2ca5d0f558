from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sdcwatch.core.grade import Planted, grade
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    GateReason,
    Note,
    PreflightDone,
    Progress,
    Record,
    RunFinished,
    RunStarted,
    Verdict,
)
from sdcwatch.report.charts import loss_figure, ranks_figure
from sdcwatch.report.page import render, write_page

Planting = tuple[Planted, ...]


def text_of(page: str) -> str:
    """What a person reads: no scripts, no styles, one space between words."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


class References(HTMLParser):
    """Everything a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data") and tag != "a" and value:
                self.found.append(value)


def test_the_page_says_the_verdict_first(story: list[Record]) -> None:
    text = text_of(render(story))

    assert text.index("suspect") < text.index("Corruption was found, and it points to hardware")
    assert "ranks 1, 3 and 5 named, first at step 13" in text
    assert "The last good checkpoint is that of step 120. 1 checkpoint withheld." in text
    assert "Rank 4: wrong once and right when asked again" in text
    assert "The run was resumed once." in text


def test_the_page_of_a_run_with_a_suspect_says_what_to_do_now(story: list[Record]) -> None:
    text = text_of(render(story))
    assert "What to do now. Drain " in text
    assert "Resume from the last good checkpoint, that of step" in text
    assert "sdcwatch close " in text
    assert text.index("What to do now.") < text.index("ranks named")


def test_the_page_marks_checkpoints_that_were_never_confirmed(story: list[Record]) -> None:
    at = next(i for i, r in enumerate(story) if isinstance(r, Verdict) and r.check is Check.REPLAY)
    provisional = CheckpointEvent(
        step=story[at].step - 1,
        time=story[at].time,
        result=CheckpointResult.PROVISIONAL,
        reason=GateReason.OK,
        detail="The last clean audit is 9 steps old; the next one, if clean, confirms it.",
    )
    text = text_of(render([*story[:at], provisional, *story[at:]]))
    said = f"The checkpoint of step {provisional.step} was never confirmed: do not resume from it."
    assert said in text
    assert "✗ never confirmed: do not resume from it" in text
    assert "confirms it" not in text


def test_the_page_names_tensors_sides_and_evidence(story: list[Record]) -> None:
    text = text_of(render(story))

    assert "Rank 3's micro-batch, recomputed by rank 0: outputs equal, 12 gradients differ" in text
    assert "blocks.0.weight, blocks.1.weight and 10 more" in text
    assert "ranks 0, 1, 2, 3, 4 hold aa ; rank 5 hold bb" in text
    assert (
        "wrong in 2 of 2 comparisons with ranks 0 and 5, settled by rank 1; wrong when asked"
        in text
    )
    assert "GPU-3" in text
    assert "update skipped on every rank" in text


def test_the_page_shows_the_grade_if_there_is_one(story: list[Record], planted: Planting) -> None:
    assert "Planted faults" not in text_of(render(story))
    assert "Planted faults against verdicts: ✓ passed" in text_of(
        render(story, grade(story, planted))
    )
    failed = text_of(render(story, grade(story, planted[:3])))
    assert "✗ failed" in failed
    assert "unexpected verdict step 120" in failed


def test_a_clean_run_reads_as_clean_and_one_without_audits_as_not_checked(
    story: list[Record],
) -> None:
    calm = [r for r in story if isinstance(r, (Progress, RunFinished))][:1]
    clean = [story[0], story[1], *calm, story[-1]]
    assert "No corruption was found" in text_of(render(clean))
    assert "What to do now." not in text_of(render(clean))
    assert "No rank was named." in text_of(render(clean))

    blind = [story[0], story[-1]]
    assert "Nobody can say whether this run is clean" in text_of(render(blind))


def test_the_page_fetches_nothing(story: list[Record]) -> None:
    page = render(story)
    references = References()
    references.feed(page)

    assert references.found == []
    assert "default-src 'none'" in page


@pytest.mark.parametrize("reason", ["equal bits, with your own kernels", "Equal bits."])
def test_the_reason_of_preflight_ends_with_one_full_stop(story: list[Record], reason: str) -> None:
    told = [replace(r, reason=reason) if isinstance(r, PreflightDone) else r for r in story]

    assert f"{reason.rstrip('.')}. No mismatch in 30" in text_of(render(told))


def test_names_from_a_run_cannot_become_markup(story: list[Record]) -> None:
    evil = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'
    first = story[0]
    assert isinstance(first, RunStarted)
    ranks = tuple(replace(r, node=evil) for r in first.ranks)
    note = Note(step=1, time=first.time, code=evil, message=evil)
    verdict = next(r for r in story if isinstance(r, Verdict))
    dressed = replace(verdict, reason=evil)

    page = render([replace(first, run=evil, ranks=ranks), note, dressed, *story[1:]])

    assert evil not in page
    assert "<img src=x" not in page
    assert page.count("<script>") == 2


def test_the_page_replaces_an_older_one_as_a_whole(story: list[Record], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_page(story, path)
    write_page(story, path)

    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")


def test_losses_that_are_no_numbers_leave_gaps_and_no_errors(story: list[Record]) -> None:
    broken = [
        replace(r, loss=float("nan")) if isinstance(r, Progress) and r.step == 40 else r
        for r in story
    ]
    lines = [t for t in loss_figure(broken)["data"] if t["mode"] == "lines"]

    assert [t["x"] for t in lines] == [[12, 79], [140]]
    render(broken)


def test_every_rank_has_a_row_and_only_named_ranks_are_marked_as_such(
    story: list[Record],
) -> None:
    first = story[0]
    assert isinstance(first, RunStarted)
    figure = ranks_figure(story, first.ranks)
    marks = {(t["x"][0], t["y"][0], t["name"]) for t in figure["data"] if t["name"] != "rows"}

    assert figure["layout"]["yaxis"]["categoryarray"][-1] == "rank 0 · node-0"
    assert len(figure["layout"]["yaxis"]["categoryarray"]) == 6
    assert marks == {
        (13, "rank 1 · node-0", "✗ suspect"),
        (60, "rank 3 · node-1", "✗ suspect"),
        (80, "rank 4 · node-2", "△ not reproduced"),
        (120, "rank 5 · node-2", "✗ suspect"),
    }


def test_chromium_draws_the_charts(
    story: list[Record], planted: Planting, tmp_path: Path, write_run: Callable[..., Path]
) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium")
    page = write_page(story, tmp_path / "page.html", grade(story, planted))
    done = subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )

    assert done.stdout.count('class="main-svg"') >= 3
    assert "✗ suspect" in done.stdout
