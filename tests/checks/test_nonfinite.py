"""The screen never misses a non-finite element, and the confirmation is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcwatch.checks.nonfinite import confirm_nonfinite, probe

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SMALL = [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
BAD = [float("nan"), float("inf"), -float("inf")]


def tripped(tensor: torch.Tensor) -> bool:
    return not bool(probe(tensor).isfinite())


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from([*REAL, *COMPLEX]),
    size=st.integers(1, 3000),
    values=st.lists(st.sampled_from(BAD), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_nonfinite_element_trips_the_screen_and_is_confirmed(
    dtype: torch.dtype, size: int, values: list[float], data: st.DataObject
) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    for value in values:
        at = data.draw(st.integers(0, size - 1))
        imaginary = dtype.is_complex and data.draw(st.booleans())
        tensor[at] = complex(0.0, value) if imaginary else value
    assert tripped(tensor)
    assert confirm_nonfinite(tensor)


@settings(max_examples=100, deadline=None)
@given(dtype=st.sampled_from(SMALL), size=st.integers(1, 500), data=st.data())
def test_every_nan_in_eight_bits_trips_the_screen_and_is_confirmed(
    dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    tensor = torch.ones(size).to(dtype)
    assert not tripped(tensor)
    assert not confirm_nonfinite(tensor)
    at = data.draw(st.integers(0, size - 1))
    tensor.view(torch.uint8)[at] = torch.tensor(float("nan")).to(dtype).view(torch.uint8)
    assert tripped(tensor)
    assert confirm_nonfinite(tensor)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (100, 7)])
def test_ordinary_tensors_do_not_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    value = probe(tensor)
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert bool(value.isfinite())
    assert not confirm_nonfinite(tensor)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_and_booleans_never_trip(dtype: torch.dtype) -> None:
    largest = True if dtype is torch.bool else torch.iinfo(dtype).max
    tensor = torch.full((100,), largest, dtype=dtype)
    assert probe(tensor).item() == 0.0
    assert probe(tensor).dtype == torch.float32
    assert not confirm_nonfinite(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4,), 1e300, dtype=torch.float64),
        torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64),
        torch.full((4,), torch.finfo(torch.float32).max),
        torch.full((4,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
    ],
)
def test_an_overflow_of_the_sum_is_a_candidate_that_is_not_confirmed(tensor: torch.Tensor) -> None:
    assert tripped(tensor)
    assert not confirm_nonfinite(tensor)


def test_a_scaled_half_precision_gradient_is_no_candidate_although_its_sum_exceeds_the_type() -> (
    None
):
    tensor = torch.full((10_000,), 60_000.0, dtype=torch.float16)
    assert tensor.sum().isinf()
    assert not tripped(tensor)


def test_opposite_infinities_do_not_cancel() -> None:
    tensor = torch.tensor([torch.inf, -torch.inf, 1.0])
    assert tripped(tensor)
    assert confirm_nonfinite(tensor)


def test_layout_gradient_and_sparsity_do_not_matter() -> None:
    matrix = torch.randn(30, 40)
    matrix[17, 3] = torch.nan
    entries = torch.tensor([2.0, torch.inf])
    sparse = torch.sparse_coo_tensor([[1, 1]], entries, (5,), check_invariants=True)
    for tensor in (
        matrix.t(),
        matrix[:, 3],
        matrix.requires_grad_(),
        sparse,
        torch.tensor([1 + 1j, complex(1, torch.nan)]).conj(),
    ):
        assert tripped(tensor)
        assert not probe(tensor).requires_grad
        assert confirm_nonfinite(tensor)
    assert not tripped(matrix[:, 4])
    assert not confirm_nonfinite(matrix[:, 4])


def test_the_screen_reads_nothing_back_from_the_device() -> None:
    # The meta device has no values: any .item() or bool() of a tensor raises there.
    for dtype in (*REAL, *COMPLEX, *INTEGERS, *SMALL):
        assert probe(torch.empty(10, dtype=dtype, device="meta")).shape == ()
