"""A difference in bits, in words: what is no number gone wrong is told apart."""

import pytest
import torch

from sdcwatch.checks.fingerprint import describe_difference

nan = float("nan")
zero8 = torch.zeros(2).to(torch.float8_e5m2)


def flip(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit of its storage flipped, counted from the first byte."""
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    return copy


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.zeros(3), torch.zeros(3), ""),
        (torch.zeros(0), torch.zeros(0), ""),
        (torch.zeros(3), -torch.zeros(3), "sign of zero"),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "sign of zero"),
        (torch.zeros(2).bfloat16(), -torch.zeros(2).bfloat16(), "sign of zero"),
        (zero8, flip(zero8, 7), "sign of zero"),
        (torch.tensor([nan, 1.0]), flip(torch.tensor([nan, 1.0]), 0), "NaN payload"),
        (torch.tensor([nan, 0.0]), torch.tensor([-nan, -0.0]), "sign of zero and NaN payload"),
        (torch.tensor([1j]).conj(), torch.tensor([complex(-0.0, -1)]), "sign of zero"),
        (torch.ones(4), flip(torch.ones(4), 2 * 32 + 30), "bit 30 of element 2"),
        (torch.ones(4), flip(torch.ones(4), 2 * 32), "bit 0 of element 2, 1 ulp apart"),
        (torch.ones(2), flip(torch.ones(2), 31), "bit 31 of element 0, over a million ulps apart"),
        (torch.tensor([1e-45, 1]), torch.tensor([-1e-45, 1]),
         "bit 31 of element 0, 2 ulps apart"),
        (torch.ones(3).bfloat16(), torch.tensor([1.0078125, 1.015625, 1]).bfloat16(),
         "2 of 3 elements, up to 2 ulps apart, the first is element 0"),
        (torch.ones(2).double(), torch.tensor([1 + 3 * 2.0**-52, 1], dtype=torch.float64),
         "1 of 2 elements, 3 ulps apart, the first is element 0"),
        (torch.tensor(3), torch.tensor(2), "bit 0 of element 0"),
        (torch.ones(4), torch.tensor([1.0, 3, 1, 2]),
         "2 of 4 elements, over a million ulps apart, the first is element 1"),
        (torch.zeros(2), torch.tensor([nan, -0.0]), "2 of 2 elements, the first is element 0"),
        (torch.zeros(2), torch.zeros(3),
         "torch.float32 of shape (2,) against torch.float32 of shape (3,)"),
    ],
)  # fmt: skip
def test_a_difference_is_described_in_words(
    first: torch.Tensor, second: torch.Tensor, expected: str
) -> None:
    assert describe_difference(first, second) == expected


def test_sparse_tensors_are_described_by_what_they_store() -> None:
    def sparse(rows: list[int], values: list[float]) -> torch.Tensor:
        entries = torch.tensor(values)
        return torch.sparse_coo_tensor([rows], entries, (9,), check_invariants=True)

    tensor = sparse([1, 4, 1], [0.5, 2.0, 3.0])
    assert describe_difference(tensor, tensor.clone()) == ""
    assert describe_difference(tensor, sparse([1, 4], [0.5, 2.0])) == "36 stored bytes against 24"
