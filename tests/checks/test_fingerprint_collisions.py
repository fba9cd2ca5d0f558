"""Faults that a checksum can miss, thrown at ours and at two that are in use: ours misses none.

The baselines: ``torch.hash_tensor`` (XOR of the elements) and the plain sum together with the sum
of position times word, both modulo 2^64. Run with ``-s`` to see the table.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import torch

from sdcwatch.checks.fingerprint import CHUNK, COLUMNS, digest_tensor, digest_tensors

TRIALS = 300  # per kind of fault; per bit of a stuck lane before those that change nothing
WIDTH = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16}
INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
Sample = tuple[torch.Tensor, torch.Tensor]
Results = dict[tuple[str, str], list[int]]


def ours(batch_TN: torch.Tensor) -> torch.Tensor:
    return digest_tensors(batch_TN.unbind())


def xor(batch_TN: torch.Tensor) -> torch.Tensor:
    if hasattr(torch, "hash_tensor"):
        return torch.hash_tensor(batch_TN, 1).view(torch.int64)[:, None]
    words_TN = batch_TN.view(INTEGER[batch_TN.dtype])  # torch 2.8 has none
    return reduce(torch.bitwise_xor, words_TN.unbind(1)).to(torch.int64)[:, None]


def linear(batch_TN: torch.Tensor) -> torch.Tensor:
    words_TW = batch_TN.view(torch.int64)
    position_W = torch.arange(1, words_TW.shape[1] + 1)
    return torch.stack((words_TW.sum(1), (words_TW * position_W).sum(1)), 1)


CHECKSUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sdcwatch": ours,
    "torch.hash_tensor": xor,
    "linear": linear,
}


def count(kind: str, clean_TN: torch.Tensor, faulty_TN: torch.Tensor, results: Results) -> int:
    """Add up trials and misses; a trial in which no bit changed is none. Returns the trials."""
    integer = INTEGER[clean_TN.dtype]
    changed_T = (clean_TN.view(integer) != faulty_TN.view(integer)).any(1)
    clean_TN, faulty_TN = clean_TN[changed_T], faulty_TN[changed_T]
    trials = len(clean_TN)
    for name, checksum in CHECKSUMS.items() if trials else ():
        missed = int((checksum(clean_TN) == checksum(faulty_TN)).all(1).sum())
        results[kind, name][0] += missed
        results[kind, name][1] += trials
    return trials


def pick(generator: torch.Generator, high: int, low: int = 0) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def weights(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A third each: like weights, like the output of a ReLU (of one sign), and any bits at all."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02
    values[1::3] = values[1::3].abs() * 50
    samples = values.to(dtype)
    bits = samples[2::3].view(INTEGER[dtype])
    width = WIDTH[dtype]
    bits.random_(-(1 << (width - 1)), (1 << (width - 1)) - 1, generator=generator)
    return samples


def apply(
    change: Callable[[torch.Tensor, torch.Generator], None], clean_TN: torch.Tensor, seed: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    faulty_TN = clean_TN.clone()
    for row in faulty_TN.unbind():
        change(row, generator)
    return faulty_TN


def two_places(row: torch.Tensor, generator: torch.Generator) -> list[int]:
    first = pick(generator, row.numel())
    return [first, (first + pick(generator, row.numel(), 1)) % row.numel()]


def swap(row: torch.Tensor, generator: torch.Generator) -> None:
    places = two_places(row, generator)
    row[places] = row[places[::-1]]


def zero_two_equal(row: torch.Tensor, generator: torch.Generator) -> None:
    row[two_places(row, generator)] = 0


def flip_twice(row: torch.Tensor, generator: torch.Generator) -> None:
    bits = row.view(INTEGER[row.dtype])
    bit = pick(generator, WIDTH[row.dtype])
    mask = torch.ones((), dtype=bits.dtype) << bit
    bits[two_places(row, generator)] ^= mask


def negate_two(row: torch.Tensor, generator: torch.Generator) -> None:
    places = two_places(row, generator)
    row[places] = -row[places]


def matrix(row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    widths = (64, 96, 128, 192, 256, 384, 512, 768, 1023, 1024, 2046, 2048)
    width = widths[pick(generator, len(widths))]
    height = row.numel() // width
    return row[: width * height].view(height, width)


def negate_row(row: torch.Tensor, generator: torch.Generator) -> None:
    table = matrix(row, generator)
    table[pick(generator, table.shape[0])].neg_()


def negate_column(row: torch.Tensor, generator: torch.Generator) -> None:
    table = matrix(row, generator)
    table[:, pick(generator, table.shape[1])].neg_()


def negate_tile(row: torch.Tensor, generator: torch.Generator) -> None:
    table = matrix(row, generator)
    side = 2 << pick(generator, 5)
    top = pick(generator, max(1, table.shape[0] // side)) * side
    left = pick(generator, max(1, table.shape[1] // side)) * side
    table[top : top + side, left : left + side].neg_()


KINDS: dict[str, Callable[[torch.Tensor, torch.Generator], None]] = {
    "two elements swapped": swap,
    "two equal elements zeroed": zero_two_equal,
    "the same bit flipped twice": flip_twice,
    "two elements negated": negate_two,
    "a row negated": negate_row,
    "a column negated": negate_column,
    "an aligned tile negated": negate_tile,
}


def lanes(size: int, generator: torch.Generator) -> Iterator[slice]:
    """Every k-th element of an aligned stretch, as one broken lane of a unit would touch them."""
    while True:
        every = 8 << pick(generator, 5)
        length = min(256 << pick(generator, 4), size)
        begin = pick(generator, size - length + 1) // every * every
        yield slice(begin + pick(generator, every), begin + length, every)


def stick(clean_TN: torch.Tensor, bit: int, value: int, generator: torch.Generator) -> torch.Tensor:
    faulty_TN = clean_TN.clone()
    bits_TN = faulty_TN.view(INTEGER[clean_TN.dtype])
    mask = torch.ones((), dtype=bits_TN.dtype) << bit
    for row, lane in zip(bits_TN.unbind(), lanes(bits_TN.shape[1], generator), strict=False):
        if value:
            row[lane].bitwise_or_(mask)
        else:
            row[lane].bitwise_and_(~mask)
    return faulty_TN


def show(results: Results) -> None:
    kinds = list(dict.fromkeys(kind for kind, _ in results))
    print("\n" + f"{'missed of trials':48}" + "".join(f"{name:>20}" for name in CHECKSUMS))
    for kind in kinds:
        cells = (f"{results[kind, name][0]} of {results[kind, name][1]}" for name in CHECKSUMS)
        print(f"{kind:48}" + "".join(f"{cell:>20}" for cell in cells))


def misses(results: Results, name: str) -> dict[str, int]:
    return {kind: missed for (kind, n), (missed, _) in results.items() if n == name and missed}


@pytest.mark.parametrize("dtype", WIDTH)
def test_paired_and_structured_faults_are_all_seen_and_the_baselines_miss_some(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    results: Results = defaultdict(lambda: [0, 0])
    for seed, (kind, change) in enumerate(KINDS.items()):
        clean_TN = weights((TRIALS + 20, 8192), dtype, generator)
        if change is zero_two_equal:
            clean_TN[:] = clean_TN[:, :1]
        assert count(kind, clean_TN, apply(change, clean_TN, seed), results) >= TRIALS
    show(results)
    assert misses(results, "sdcwatch") == {}
    assert {
        "two elements swapped",
        "two equal elements zeroed",
        "the same bit flipped twice",
        "two elements negated",
        "a row negated",
        "a column negated",
        "an aligned tile negated",
    } <= misses(results, "torch.hash_tensor").keys()
    assert "two elements negated" in misses(results, "linear")


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("dtype", WIDTH)
def test_a_stuck_lane_is_seen_for_every_bit_and_the_baselines_miss_some(
    dtype: torch.dtype, value: int
) -> None:
    generator = torch.Generator().manual_seed(2 + value)
    results: Results = defaultdict(lambda: [0, 0])
    size = {torch.float64: 1536, torch.float32: 3072, torch.bfloat16: 6144}[dtype]
    clean_TN = weights((TRIALS, size), dtype, generator)
    for bit in range(WIDTH[dtype]):
        faulty_TN = stick(clean_TN, bit, value, generator)
        count(f"{dtype}, bit {bit:2} stuck at {value}", clean_TN, faulty_TN, results)
    show(results)
    trials = [total for (_, name), (_, total) in results.items() if name == "sdcwatch"]
    assert len(trials) == WIDTH[dtype]
    assert min(trials) >= TRIALS // 5
    assert sum(trials) >= TRIALS * WIDTH[dtype] // 2
    assert misses(results, "sdcwatch") == {}
    assert misses(results, "torch.hash_tensor")
    assert misses(results, "linear")


def test_what_moves_between_the_chunks_of_a_large_tensor_is_seen() -> None:
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randn(3 * CHUNK + 5000, generator=generator, dtype=torch.float64)
    before = digest_tensor(tensor)
    chunks = [slice(i * CHUNK, (i + 1) * CHUNK) for i in range(3)]
    whole = tensor.clone()
    whole[chunks[0]], whole[chunks[2]] = tensor[chunks[2]], tensor[chunks[0]]
    assert not torch.equal(digest_tensor(whole), before)
    for _ in range(40):
        at = pick(generator, CHUNK)
        for change in ("swap", "negate", "zero equal"):
            faulty = tensor.clone()
            clean = before
            pair = [at, at + CHUNK * pick(generator, 3, 1)]
            if change == "swap":
                faulty[pair] = tensor[pair[::-1]]
            elif change == "negate":
                faulty[pair] = -tensor[pair]
            else:
                faulty[pair] = 1.5
                clean = digest_tensor(faulty)
                faulty[pair] = 0
            assert not torch.equal(digest_tensor(faulty), clean), (change, pair)


@pytest.mark.parametrize("width", [1019, 1020, 1022, 1023, 1024, 1025, 2046, 2048, 3069])
def test_a_negated_tile_is_seen_at_any_width_that_the_columns_do_not_divide(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    clean_TN = torch.randn((50, 4 * width), generator=generator, dtype=torch.float64)
    faulty_TN = clean_TN.clone()
    tile = faulty_TN.view(50, 4, width)[:, :2, 10:12]
    tile.neg_()
    assert not (ours(clean_TN) == ours(faulty_TN)).all(1).any()


def test_the_known_blind_spot_is_a_matrix_whose_rows_are_a_multiple_of_the_columns() -> None:
    # There a change that cancels in pairs along both sides does so in every row and every column:
    # the sign of a float64, which is the top bit of a word, always does.
    clean = torch.randn(4, COLUMNS, dtype=torch.float64)
    faulty = clean.clone()
    faulty[:2, 10:12] *= -1
    assert torch.equal(digest_tensor(clean), digest_tensor(faulty))
    faulty[0, 10] *= -1
    assert not torch.equal(digest_tensor(clean), digest_tensor(faulty))
