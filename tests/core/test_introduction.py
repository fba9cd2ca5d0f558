"""What ranks compare when they meet: pure, the same answer on every rank."""

from __future__ import annotations

import json
from dataclasses import replace

from sdcwatch.core.introduction import (
    Introduction,
    file_problem,
    files_needed,
    option_differences,
    same_schema,
    schema_differences,
    schema_digest,
)
from sdcwatch.core.topology import RankInfo

SCHEMA = [("0.weight", "(2, 2)", "torch.float32"), ("0.bias", "(2,)", "torch.float32")]
DEFAULTS = {"audit_every": "100", "mode": "'enforce'"}


def introductions(world: int) -> list[Introduction]:
    return [
        Introduction(
            info=RankInfo(
                rank=rank,
                node=f"n{rank}",
                host=f"h{rank}",
                local_rank=0,
                pid=rank,
                instance_id=f"i{rank}",
            ),
            run="night-1",
            options={"audit_every": "50"},
            schema=schema_digest(SCHEMA),
            files=1000,
        )
        for rank in range(world)
    ]


def test_an_introduction_arrives_as_it_was_sent() -> None:
    (one,) = introductions(1)
    assert Introduction.decode(one.encode()) == one


def test_an_introduction_is_small_whatever_the_model_is() -> None:
    (one,) = introductions(1)
    assert len(one.encode()) < 400


def test_equal_options_are_no_difference_also_where_one_rank_names_the_default() -> None:
    ranks = introductions(3)
    ranks[1] = replace(ranks[1], options={"audit_every": "50", "mode": "'enforce'"})
    assert option_differences(ranks, DEFAULTS) == []


def test_a_difference_names_the_option_its_values_and_the_ranks() -> None:
    ranks = introductions(3)
    ranks[2] = replace(ranks[2], options={})
    assert option_differences(ranks, DEFAULTS) == [
        "`audit_every` 50 on ranks 0 and 1, 100 on rank 2"
    ]


def test_one_rank_with_another_model_is_seen() -> None:
    ranks = introductions(3)
    assert same_schema(ranks)
    ranks[1] = replace(ranks[1], schema=schema_digest(SCHEMA[:1]))
    assert not same_schema(ranks)


def test_a_schema_that_came_back_from_json_has_the_same_digest() -> None:
    assert schema_digest(json.loads(json.dumps(SCHEMA))) == schema_digest(SCHEMA)


def test_differing_models_are_told_by_tensor_and_ranks() -> None:
    other = [SCHEMA[0], ("0.bias", "(3,)", "torch.float32")]
    assert schema_differences([SCHEMA, other, SCHEMA]) == [
        "0.bias: (2,) torch.float32 on ranks 0 and 2, (3,) torch.float32 on rank 1"
    ]


def test_the_same_tensors_in_another_order_are_told_as_such() -> None:
    assert schema_differences([SCHEMA, SCHEMA[::-1]]) == [
        "the parameters come in a different order"
    ]


def test_the_sockets_of_a_rank_do_not_grow_with_the_world() -> None:
    assert files_needed(16_384, partners=34) < 150
    assert files_needed(16_384, partners=34) - files_needed(64, partners=34) <= 4 * 8


def test_ranks_that_may_not_open_enough_files_are_named() -> None:
    ranks = introductions(3)
    assert file_problem(ranks, 1000) == ""
    ranks[1] = replace(ranks[1], files=12)
    ranks[2] = replace(ranks[2], files=40)
    assert file_problem(ranks, 50) == "only 12 on rank 1 (n1); too few on ranks 1 and 2"
