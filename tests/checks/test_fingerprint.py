"""Equal bits give equal fingerprints whatever the layout; one flipped bit never does."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcwatch.checks import fingerprint
from sdcwatch.checks.fingerprint import (
    CHUNK,
    COLUMNS,
    ROW,
    combine,
    digest_tensor,
    digest_tensors,
    salt,
    to_pairs,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
MODULUS = 1 << 64


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of arbitrary bit patterns; NaNs and infinities are among them."""
    generator = torch.Generator().manual_seed(seed)
    elements = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    size = elements * dtype.itemsize
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def flip(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit of its storage flipped, counted from the first byte."""
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    return copy


def reference(tensor: torch.Tensor) -> tuple[int, int]:
    """The definition, in Python integers and one word at a time."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    sums: list[int] = []
    columns: list[int] = []
    for begin in range(0, len(words), CHUNK):
        chunk = words[begin : begin + CHUNK]
        sums += [sum(chunk[i : i + ROW]) for i in range(0, len(chunk), ROW)]
        columns += [sum(chunk[i::COLUMNS]) for i in range(min(COLUMNS, len(chunk)))]
    plain = sum(sums) % MODULUS

    def mix(x: int) -> int:
        for _ in range(2):
            x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 % MODULUS
        return x ^ (x >> 32)

    mixed = mix(len(data) + 1)
    for position, value in enumerate(sums + columns, start=1):
        mixed += mix((value + mix(position * 0x9E3779B97F4A7C15 % MODULUS)) % MODULUS)
    return plain, mixed % MODULUS


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(digest_tensor(first), digest_tensor(second))


@pytest.mark.parametrize(
    "elements",
    [
        0,
        1,
        2,
        3,
        2 * ROW - 1,
        2 * ROW,
        2 * COLUMNS,
        2 * COLUMNS + 1,
        9000,
        2 * CHUNK,
        4 * CHUNK + 5,
    ],
)
def test_a_digest_is_what_its_definition_says(elements: int) -> None:
    tensor = random_bits((elements,), torch.float32, seed=elements)
    assert to_pairs(digest_tensor(tensor)) == [reference(tensor)]


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)
dtypes = st.sampled_from(DTYPES)


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=dtypes, data=st.data())
def test_any_single_flipped_bit_changes_the_digest(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_bits(shape, dtype)
    bits = tensor.numel() * (1 if dtype is torch.bool else 8 * dtype.itemsize)
    if bits == 0:
        return
    bit = data.draw(st.integers(0, bits - 1))
    if dtype is torch.bool:  # only the lowest bit of a byte is one that a bool has
        bit *= 8
    assert not equal(tensor, flip(tensor, bit))


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    words=st.sampled_from([COLUMNS, COLUMNS * ROW - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 777]),
    data=st.data(),
)
def test_any_single_flipped_bit_of_a_large_tensor_changes_the_digest(
    dtype: torch.dtype, words: int, data: st.DataObject
) -> None:
    tensor = torch.zeros(words * 8 // dtype.itemsize, dtype=dtype)
    before = digest_tensor(tensor)
    bit = data.draw(st.integers(0, 64 * words - 1))
    assert not torch.equal(before, digest_tensor(flip(tensor, bit)))


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=dtypes, data=st.data())
def test_equal_bits_in_another_memory_layout_give_the_same_digest(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_bits(shape, dtype)
    order = data.draw(st.permutations(range(len(shape))))
    inverse = [order.index(d) for d in range(len(shape))]
    permuted = tensor.permute(order).contiguous().permute(inverse)
    offset = data.draw(st.integers(0, 5))
    step = data.draw(st.integers(1, 3))
    room = torch.zeros(offset + step * tensor.numel() + 1, dtype=dtype)
    spread = room[offset : offset + step * tensor.numel() : step]
    spread.copy_(tensor.reshape(-1))
    assert tensor.shape == permuted.shape
    assert equal(tensor, permuted)
    assert equal(tensor, spread.view(shape) if step == 1 else spread.reshape(shape))
    assert equal(tensor.reshape(-1), spread)


def test_channels_last_transposed_and_expanded_tensors_count_as_their_elements() -> None:
    image = random_bits((2, 5, 6, 7), torch.float32)
    matrix = random_bits((300, 1000), torch.bfloat16)
    row = random_bits((1, 37), torch.float32)
    assert equal(image, image.to(memory_format=torch.channels_last))
    assert equal(matrix, matrix.t().contiguous().t())
    assert not equal(matrix, matrix.t())
    assert equal(row.expand(5, 37), row.expand(5, 37).contiguous())


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    row = torch.arange(16.0)  # as the momentum of a layer with one output has it
    for shape, strides in (((1, 16), (1, 1)), ((2, 1, 8), (8, 3, 1)), ((1, 1), (5, 7))):
        odd = row.as_strided(shape, strides)
        assert torch.equal(digest_tensor(odd), digest_tensor(odd.clone().reshape(-1)))
        assert torch.equal(digest_tensors([odd]), digest_tensor(odd)[None])


def test_pending_conjugation_and_negation_count_as_done() -> None:
    tensor = torch.randn(33, dtype=torch.complex64)
    assert equal(tensor.conj(), tensor.conj().resolve_conj())
    assert not equal(tensor.conj(), tensor)
    assert tensor.conj().imag.is_neg()
    assert equal(tensor.conj().imag, tensor.conj().imag.resolve_neg())


def test_bits_count_and_not_values() -> None:
    zero = torch.zeros(5)
    nan = torch.full((5,), torch.nan)
    other_nan = flip(nan, 0)
    assert other_nan.isnan().all()
    assert not equal(zero, -zero)
    assert not equal(nan, other_nan)
    assert equal(nan, nan.clone())


def test_requiring_gradients_being_a_parameter_or_a_subclass_changes_nothing() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            msg = f"{func} went through the subclass"
            raise AssertionError(msg)

    tensor = torch.randn(100)
    expected = digest_tensor(tensor)
    assert torch.equal(digest_tensor(torch.nn.Parameter(tensor.clone())), expected)
    subclass = tensor.as_subclass(Refuses)
    actual = digest_tensors([subclass])[0]
    assert type(actual) is torch.Tensor
    assert torch.equal(actual, expected)


def test_a_sparse_gradient_counts_as_its_stored_entries() -> None:
    def sparse(rows: list[int], values: list[float]) -> torch.Tensor:
        entries = torch.tensor(values)
        return torch.sparse_coo_tensor([rows], entries, (9,), check_invariants=True)

    tensor = sparse([1, 4, 1], [0.5, 2.0, 3.0])
    assert equal(tensor, sparse([1, 4, 1], [0.5, 2.0, 3.0]))
    assert not equal(tensor, sparse([1, 5, 1], [0.5, 2.0, 3.0]))
    assert not equal(tensor, sparse([1, 4, 1], [0.5, 2.0, -3.0]))
    assert not equal(tensor, sparse([1, 4], [0.5, 2.0]))
    assert not equal(tensor, tensor.to_dense())


def test_length_is_part_of_a_digest_although_the_tail_is_padded_with_zeros() -> None:
    digests = {to_pairs(digest_tensor(torch.zeros(n)))[0] for n in (0, 1, 2, 3, 4, 512, 513, 2042)}
    assert len(digests) == 8


def test_none_has_a_value_of_its_own() -> None:
    table = digest_tensors([None, torch.zeros(0), torch.zeros(()), torch.zeros(7), None])
    pairs = to_pairs(table)
    assert pairs[0] == pairs[4]
    assert len(set(pairs)) == 4
    assert torch.equal(digest_tensor(None), table[0])


def test_a_list_is_digested_as_its_tensors_one_by_one() -> None:
    sizes = (0, 1, 5, 64, 64, 64, 255, 512, 513, 2042, 2043, 2043, 20000, 20000, 2 * CHUNK, 0, 64)
    tensors: list[torch.Tensor | None] = [
        random_bits((size,), torch.float32, seed) for seed, size in enumerate(sizes)
    ]
    tensors.insert(3, None)
    tensors += [random_bits((4, 8), dtype) for dtype in DTYPES]
    tensors += [torch.randn(600_000), torch.randn(600_000), torch.randn(30, 20).t()]
    expected = torch.stack([digest_tensor(t) for t in tensors])
    assert torch.equal(digest_tensors(tensors), expected)


def test_many_tensors_of_one_size_are_digested_in_several_batches() -> None:
    tensors = list(torch.randn(70, 16_000).unbind())
    expected = torch.stack([digest_tensor(t) for t in tensors])
    assert CHUNK // 8000 < 70
    assert torch.equal(digest_tensors(tensors), expected)


def test_an_empty_list_gives_an_empty_table() -> None:
    assert digest_tensors([]).shape == (0, 2)
    assert digest_tensors([]).dtype == torch.int64
    assert to_pairs(digest_tensors([])) == []


def test_the_input_is_left_as_it_was() -> None:
    tensors = [random_bits((n,), torch.float32, n) for n in (5, 1000, 9000, 9000)]
    copies = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    digest_tensors(tensors)
    assert all(
        torch.equal(t.view(torch.int32), c.view(torch.int32))
        for t, c in zip(tensors, copies, strict=True)
    )
    assert [t._version for t in tensors] == versions


def test_settings_of_the_program_do_not_matter() -> None:
    tensors = [torch.randn(3, 5), torch.randn(3000), None, torch.randn(20_001)]
    expected = digest_tensors(tensors)
    for cache in (fingerprint._plan, fingerprint._key_table):
        cache.cache_clear()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
            assert digest_tensors(tensors).cpu().equal(expected)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(digest_tensors(tensors), expected)


def test_random_number_generators_are_not_touched() -> None:
    before = torch.get_rng_state()
    combine(digest_tensors([torch.ones(9), None]), (1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_threads_does_not_matter() -> None:
    tensor = torch.randn(3 * CHUNK)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest_tensor(tensor)
        torch.set_num_threads(2)
        assert torch.equal(digest_tensor(tensor), one)
    finally:
        torch.set_num_threads(threads)


def test_it_works_in_a_hook_and_in_a_callback_of_the_autograd_engine() -> None:
    digests: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> None:
        digests.append(digest_tensor(gradient))
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: digests.append(digest_tensor(parameter.grad))
        )

    parameter = torch.nn.Parameter(torch.randn(50))
    parameter.register_hook(hook)
    (parameter.exp().sum()).backward()
    assert len(digests) == 2
    assert torch.equal(digests[0], digests[1])
    assert torch.equal(digests[0], digest_tensor(parameter.grad))


def test_nothing_is_read_back_from_the_device() -> None:
    # The meta device has no values: any .item(), .tolist() or bool() of a tensor raises there.
    tensors = [
        torch.empty(n, device="meta") for n in (0, 1, 3, 700, 2043, 9000, 9000, 2 * CHUNK + 3)
    ]
    table = digest_tensors([*tensors, None])
    assert table.shape == (9, 2)
    assert combine(table, tuple(range(9))).shape == (2,)


def test_another_process_gets_the_same_numbers() -> None:
    code = (
        "import torch; from sdcwatch.checks.fingerprint import *; t = torch.arange(5000.);"
        "print(to_pairs(digest_tensor(t)), salt('a.weight', t),"
        "to_pairs(combine(digest_tensors([t, None]), (3, 4))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tensor = torch.arange(5000.0)
    expected = (
        f"{to_pairs(digest_tensor(tensor))} {salt('a.weight', tensor)} "
        f"{to_pairs(combine(digest_tensors([tensor, None]), (3, 4)))}"
    )
    assert run.stdout.strip() == expected


def test_salts_tell_names_dtypes_and_shapes_apart() -> None:
    tensor = torch.zeros(2, 3)
    others = [
        salt("a", tensor),
        salt("b", tensor),
        salt("a", tensor.double()),
        salt("a", tensor.t()),
        salt("a", torch.zeros(2, 4)),
    ]
    assert len(set(others)) == 5
    assert salt("a", tensor) == salt("a", torch.ones(2, 3))
    assert all(-(1 << 63) <= s < 1 << 63 for s in others)


def test_each_half_of_a_combined_digest_depends_on_everything() -> None:
    table = digest_tensors([torch.randn(5), torch.randn(7), None, torch.randn(1)])
    salts = (11, -12, 13, 14)
    changed = [combine(table[[1, 0, 2, 3]], salts), combine(table, (11, -12, 14, 13))]
    for row in range(4):
        for column in range(2):
            for bit in (0, 31, 62):
                other = table.clone()
                other[row, column] ^= 1 << bit
                changed.append(combine(other, salts))
    changed.append(combine(table[:3], salts[:3]))
    changed.append(combine(table, salts))
    halves = torch.stack(changed)
    assert len(set(halves[:, 0].tolist())) == len(changed)
    assert len(set(halves[:, 1].tolist())) == len(changed)


def test_tensors_that_trade_places_change_the_combined_digest_even_with_equal_salts() -> None:
    table = digest_tensors([torch.zeros(4), torch.ones(4)])
    assert not torch.equal(combine(table, (5, 5)), combine(table.flip(0), (5, 5)))


def test_a_table_with_too_few_salts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected a table of shape \(1, 2\).*got \(2, 2\)"):
        combine(digest_tensors([None, None]), (1,))


def test_pairs_are_unsigned() -> None:
    table = torch.tensor([[-1, 0], [1, -(1 << 63)]])
    assert to_pairs(table) == [(MODULUS - 1, 0), (1, 1 << 63)]
