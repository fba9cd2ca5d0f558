from sdcwatch.core.saved import condemnation, distrust
from sdcwatch.core.text import count, list_names, list_ranks


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
