"""What each kind does to the bits of a tensor."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from sdcwatch.errors import ConfigurationError
from sdcwatch.faults import Fault
from sdcwatch.faults.damage import Damage, damaged, stand_in

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS: dict[str, dict[str, Any]] = {
    "bit_flip": {"bit": 5},
    "scale": {"factor": -2.0},
    "set": {"value": 7.0},
    "nan": {},
    "inf": {},
    "stuck_lane": {"bit": 5, "stuck": 1, "every": 3},
    "zero": {},
}


def hit(tensor: Tensor, kind: str, seed: int = 0, **how: Any) -> Damage:
    fault = Fault(site="loss", kind=kind, ranks="all", **{**KINDS[kind], **how})
    before = tensor.clone()
    damage = damaged(tensor, fault, Random(seed))
    assert damage is not None
    assert torch.equal(bits(tensor), bits(before)), "the original was changed"
    assert damage.tensor.dtype == tensor.dtype
    assert damage.tensor.shape == tensor.shape
    return damage


def bits(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.contiguous().view(-1).view(WORDS[flat.dtype.itemsize])


def changed_at(tensor: Tensor, damage: Damage) -> list[int]:
    return (bits(tensor) != bits(damage.tensor)).nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("top", [False, True])
def test_bit_flip_changes_exactly_that_bit(dtype: torch.dtype, top: bool) -> None:
    bit = dtype.itemsize * 8 - 1 if top else 5
    x = torch.randn(4, 5).to(dtype)
    damage = hit(x, "bit_flip", bit=bit, element=13)
    different = bits(x) ^ bits(damage.tensor)
    width = dtype.itemsize * 8
    expected = torch.zeros_like(different)
    expected[13] = -(1 << bit) if bit == width - 1 else 1 << bit
    assert torch.equal(different, expected)
    assert (damage.element, damage.changed) == (13, 1)
    assert damage.before == x.flatten()[13].item()
    assert damage.after == damage.tensor.flatten()[13].item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("nan", lambda before, after: math.isnan(after)),
        ("inf", lambda before, after: after == math.inf),
        ("set", lambda before, after: after == 7.0),
        ("scale", lambda before, after: after == -2 * before),
        ("zero", lambda before, after: after == 0),
    ],
)
def test_value_kinds_hit_one_random_element(dtype: torch.dtype, kind: str, check: Any) -> None:
    x = torch.randn(6, 7).to(dtype)
    damage = hit(x, kind, element="random")
    assert changed_at(x, damage) == [damage.element]
    assert damage.changed == 1
    assert check(damage.before, damage.after)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["scale", "zero", "nan", "inf", "set", "bit_flip"])
def test_all_elements_are_hit_when_asked(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(3, 4).to(dtype) + 20
    assert changed_at(x, hit(x, kind, element="all")) == list(range(12))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stuck", [0, 1])
@pytest.mark.parametrize("top", [False, True])
def test_stuck_lane_holds_the_bit_in_every_lane(dtype: torch.dtype, stuck: int, top: bool) -> None:
    bit = dtype.itemsize * 8 - 1 if top else 4
    torch.manual_seed(0)
    x = torch.randn(50, dtype=torch.float64).to(dtype)
    damage = hit(x, "stuck_lane", bit=bit, stuck=stuck, every=3, element=2)
    lanes = set(range(2, 50, 3))
    held = (bits(damage.tensor) >> bit) & 1
    assert all(held[i] == stuck for i in lanes)
    wrong = [i for i in lanes if (bits(x)[i] >> bit) & 1 != stuck]
    assert changed_at(x, damage) == sorted(wrong)
    assert 0 < damage.changed == len(wrong) < len(lanes)


def test_random_element_is_the_same_for_the_same_draw_and_moves_with_it() -> None:
    x = torch.randn(1000)
    assert hit(x, "nan", seed=4).element == hit(x, "nan", seed=4).element
    assert len({hit(x, "nan", seed=seed).element for seed in range(20)}) > 15


def test_random_element_is_one_that_the_kind_changes() -> None:
    x = torch.zeros(100)
    x[::4] = 1.0
    for seed in range(20):
        assert hit(x, "scale", seed=seed, element="random").changed == 1


def test_damage_that_changes_nothing_says_so() -> None:
    damage = hit(torch.zeros(5), "zero")
    assert damage.changed == 0
    assert damage.before == damage.after == 0.0


@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.randn(6, 5).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(10, 12)[::2, 1::3],
        lambda: torch.randn(1, 4).expand(3, 4),
    ],
)
def test_strides_never_change_what_is_hit(layout: Any) -> None:
    x = layout()
    damage = hit(x, "bit_flip", element=7)
    dense = hit(x.contiguous(), "bit_flip", element=7)
    assert torch.equal(damage.tensor, dense.tensor)
    assert damage.tensor.stride() == torch.empty_like(x).stride()


def test_scalar_is_one_element_and_an_index_wraps() -> None:
    damage = hit(torch.tensor(3.0), "set", element=5)
    assert damage.tensor.item() == 7.0
    assert damage.element == 0


def test_integers_and_bools_take_bits_and_values() -> None:
    assert hit(torch.arange(5), "bit_flip", bit=0, element=2).tensor.tolist() == [0, 1, 3, 3, 4]
    assert hit(torch.arange(3), "set", element=0).tensor.tolist() == [7, 1, 2]
    assert hit(torch.arange(3), "scale").tensor.tolist() == [0, -2, -4]
    assert hit(torch.tensor([True, False]), "bit_flip", bit=0, element="all").tensor.tolist() == [
        False,
        True,
    ]


def test_complex_numbers_are_hit_in_one_part() -> None:
    x = torch.randn(3, 2, dtype=torch.complex64)
    damage = hit(x, "nan", element=5)
    assert changed_at(x, damage) == [5]
    assert math.isnan(damage.tensor[1, 0].imag.item())


def test_float8_takes_bits_and_values() -> None:
    x = torch.randn(8).to(torch.float8_e4m3fn)
    for kind in ("bit_flip", "set", "scale", "zero"):
        assert hit(x, kind, element=3).changed == 1


def test_sparse_values_are_hit_and_indices_stay() -> None:
    x = torch.sparse_coo_tensor([[4, 1, 4]], torch.ones(3, 2), (6, 2), check_invariants=True)
    fault = Fault(site="loss", kind="set", value=9.0, element=0, ranks="all")
    damage = damaged(x, fault, Random(0))
    assert damage is not None
    expected = x.to_dense()
    expected[1, 0] = 9.0
    assert torch.equal(damage.tensor.to_dense(), expected)


def test_empty_tensor_cannot_be_hit() -> None:
    fault = Fault(site="loss", kind="nan", ranks="all")
    assert damaged(torch.empty(0, 3), fault, Random(0)) is None
    sparse = torch.sparse_coo_tensor(size=(3, 2), check_invariants=True)
    assert damaged(sparse, fault, Random(0)) is None


@pytest.mark.parametrize(
    ("kind", "how", "dtype", "words"),
    [
        ("bit_flip", {"bit": 16}, torch.bfloat16, "`bit` below 16"),
        ("stuck_lane", {"bit": 32}, torch.float32, "`bit` below 32"),
        ("nan", {}, torch.int64, "floating-point tensor for kind 'nan'"),
        ("inf", {}, torch.bool, "floating-point tensor for kind 'inf'"),
    ],
)
def test_fault_that_the_dtype_cannot_have_is_refused(
    kind: str, how: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        hit(torch.ones(3).to(dtype), kind, **how)


def test_stand_in_has_the_new_value_and_passes_the_gradient_unchanged() -> None:
    x = torch.randn(4, requires_grad=True)
    replaced = stand_in(x * 2, torch.full((4,), 9.0))
    assert replaced.tolist() == [9.0] * 4
    torch.relu_(replaced).backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0, 8.0]
