from pathlib import Path

from sdcwatch.core.advice import SECTIONS, what_to_do
from sdcwatch.core.records import Check, RunWord, Suspect
from sdcwatch.core.saved import condemnation, distrust, resumed_from_condemned
from sdcwatch.core.summary import RunSummary
from sdcwatch.core.text import count, counted_in_group, list_names, list_ranks, shortened


def test_ranks_are_listed_in_order_once_and_shortened_when_many():
    assert list_ranks([]) == "no rank"
    assert list_ranks([3]) == "rank 3"
    assert list_ranks((2, 1, 2)) == "ranks 1 and 2"
    assert list_ranks({0, 4, 5}) == "ranks 0, 4 and 5"
    assert list_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert list_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_names_are_shortened_after_three():
    assert list_names(["a"]) == "a"
    assert list_names(["a", "b", "c"]) == "a, b and c"
    assert list_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_counts_agree_with_their_noun():
    assert [count(n, "check") for n in (0, 1, 2)] == ["0 checks", "1 check", "2 checks"]


def test_checkpoints_that_nobody_vouches_for_are_listed_with_what_to_do():
    assert distrust((), ()) == []
    assert distrust((20, 40, 60, 80), ()) == [
        "the checkpoints of steps 20, 40, 60 and 80 were never confirmed: do not resume from them"
    ]
    assert distrust((20,), (90,)) == [
        "the checkpoint of step 20 was never confirmed: do not resume from it",
        "the checkpoint of step 90 is provisional: not confirmed by an audit",
    ]
    assert condemnation(range(20, 120, 20)).startswith("5 checkpoints of steps 20 to 100 will")


def test_a_text_is_cut_at_a_word_and_shows_it():
    said = "Read error: Connection reset by peer"
    assert shortened(said, 36) == said
    assert shortened(said, 34) == "Read error: Connection reset by…"
    assert shortened(said, 32) == "Read error: Connection reset by…"
    assert shortened(said, 12) == "Read error…"
    assert shortened("a/long/path/without/words", 10) == "a/long/pa…"


def test_a_run_with_a_suspect_says_what_to_do_and_a_clean_one_does_not():
    named = Suspect(
        rank=3, node="n1", instance_id="i-1", gpu="GPU-3", gpu_index=1, check=Check.REPLAY,
        mismatches=2, comparisons=2,
    )  # fmt: skip
    run = RunSummary(verdict=RunWord.SUSPECT, suspects=(named,), run_dir="/runs/a b", segments=1)
    assert what_to_do(run) == [
        "Drain GPU-3 on n1; keep it for diagnosis, do not restart on it.",
        "No checkpoint of this run has passed the checks: start again from an older one.",
        "When that is done, close the finding: sdcwatch close '/runs/a b' --gpu GPU-3 --reason ...",
        "More: docs/runbook.md, SdcwatchSuspectRank.",
    ]
    tainted = RunSummary(
        verdict=RunWord.TAINTED, last_good_checkpoint_step=40, last_good_checkpoint_path="a.pt"
    )
    assert what_to_do(tainted)[0] == (
        "Resume from the last good checkpoint, that of step 40 (a.pt)."
    )
    for word in (RunWord.CLEAN, RunWord.NOT_CHECKED, RunWord.WARNING):
        assert what_to_do(RunSummary(verdict=word)) == []


def test_the_sections_of_the_runbook_that_texts_name_exist():
    page = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")
    for section in SECTIONS.values():
        assert f"\n## {section}\n" in page


def test_a_run_that_goes_on_from_a_condemned_checkpoint_is_told_which_is_good() -> None:
    assert resumed_from_condemned(0, (), None) == ""
    assert resumed_from_condemned(20, (40, 60), 20) == ""
    assert resumed_from_condemned(40, (40, 60), 40) == "", "it was saved once more"
    said = resumed_from_condemned(40, (40, 60), 20)
    assert said.startswith("the run goes on from step 40, whose checkpoint was never confirmed")
    assert "Resume from that of step 20, the last good one" in said
    assert "Resume from an older run" in resumed_from_condemned(40, (40,), None)


def test_ranks_of_a_group_are_told_with_what_the_job_calls_them() -> None:
    assert counted_in_group(range(4096)) == ""
    assert counted_in_group((1, 2)).endswith(
        "DDP model: rank 0 is rank 1 of the job, rank 1 is rank 2 of the job"
    )
    assert counted_in_group(range(8, 8192)).endswith("8176 more")
