"""Fingerprints: two 64-bit checksums of the bits of a tensor, the instrument of checks 2 and 3.

**What.** The bytes of a tensor in logical order, zero-padded to 64-bit words, are cut into chunks
of 256 x 1021 words. In each chunk the words are summed along rows of 256 and along columns 1021
apart, modulo 2^64. The *plain* checksum adds up the row sums. The *mixed* one adds up every row sum
and every column sum after a 64-bit finaliser has mixed it with its position. Sums modulo 2^64 do
not depend on the order of addition, so any device, thread count or chunking gives the same result.

**Why not linear.** A sum of i*w modulo 2^64 sees the top bits of a word only through the parity of
positions: half of all sign flips in pairs, and stuck lanes of high bits, go unseen. The finaliser
is not linear, so equal and opposite changes at two positions do not cancel.

**Why 1021.** A change that cancels within every row and every column is missed. The columns are a
prime number of words apart, which the row length of hardly any matrix is a multiple of; with 1023,
a negated 2 x 2 tile of a float64 matrix of 1023 columns was missed in every trial. The same tile
of a matrix whose rows are a multiple of 1021 words is the known blind spot.

**Why two fingerprints can differ.** One bit is enough: +0.0 and -0.0 differ, and so do NaNs with
different payloads. Strides and memory layout never matter. Shape, dtype and name are not part of a
tensor's own fingerprint; `combine` mixes them in through `salt`.

**False positives** none: equal bits give equal fingerprints. **Misses**: about 2^-64 for a change
that is not made to fit. It is a checksum, not a cryptographic hash.

**Cost** about twice one float32 `sum()` over the same bytes, and some 0.3 ms per call; temporaries
of 2 % of the bytes, and a copy of tensors that are not contiguous. Nothing here waits for the
device except `to_pairs` and `describe_difference`.

Shape suffixes: N tensors, G tensors of one size, M sums, W words, B bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROW = 256
"""Words in a row; also rows of columns in a chunk."""
COLUMNS = 1021
"""Words between two of the same column; also rows in a chunk."""
CHUNK = ROW * COLUMNS
"""Words in a chunk: 2 MiB, so that the second reduction reads it from the cache."""

_WORD_BYTES = 8
_STACKED = 8192
"""Tensors of one size up to this many words are copied together and reduced in one call."""
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
)
"""What nearly all tensors are: their bits are taken without a look at anything else."""
_ABSENT = -1
_ABSENT_DIGEST = (-0x7A23F00C1D4B5E69, 0x0B5E55ED5EA51DE5)
_UNSIGNED = (1 << 64) - 1
_MULTIPLIER = 0xD6E8FEB86659FD93 - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _mix(x_M: torch.Tensor) -> torch.Tensor:
    """Mix contiguous int64 words in place with a non-linear permutation of the 64-bit numbers.

    Twice x ^= x >> 32, x *= multiplier, and x ^= x >> 32 once more. A logical shift by 32 is the
    upper half as seen from the lower one: one operation where a signed shift takes three.
    """
    low_M, high_M = x_M.view(torch.int32).view(-1, 2).unbind(1)
    low_M.bitwise_xor_(high_M)
    x_M.mul_(_MULTIPLIER)
    low_M.bitwise_xor_(high_M)
    x_M.mul_(_MULTIPLIER)
    low_M.bitwise_xor_(high_M)
    return x_M


def _mix_int(x: int) -> int:
    """`_mix` of one unsigned number, on the host."""
    for _ in range(2):
        x = ((x ^ (x >> 32)) * _MULTIPLIER) & _UNSIGNED
    x ^= x >> 32
    return x - (x >> 63 << 64)


@lru_cache(maxsize=64)
def _key_table(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        position_M = torch.arange(1, size + 1, dtype=torch.int64, device=device)
        return _mix(position_M.mul_(_GOLDEN))


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """One key per position; tables are shared by rounding the size up to a power of two."""
    return _key_table(1 << max(12, (count - 1).bit_length()), device)[:count]


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors with the same number of words: their sums are adjacent rows of one table.

    Attributes:
        members: Places of the tensors in the list.
        words: Words of each.
        rows, sums: Sums of each: `rows` row sums first, column sums up to `sums`.
        begin: Place of the first sum in the buffer of all sums.
        first: Place of the first tensor in the order of groups.
        keys_M: One key per sum of a tensor.
        stacked: Tensors are copied together.
    """

    members: tuple[int, ...]
    words: int
    rows: int
    sums: int
    begin: int
    first: int
    keys_M: torch.Tensor
    stacked: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a list of tensors of given sizes is digested.

    Attributes:
        groups: Tensors that have words, by their number.
        total: Sums of all tensors.
        parts: Sums in the order in which they are made: of a group that is stacked in one part, of
            other tensors as `_part_sizes` says.
        order_N: Place of each tensor of the list in the order of groups; None if it is the same.
        start_N2: What each digest starts from: its length, or the reserved value of None.
    """

    groups: tuple[_Group, ...]
    total: int
    parts: tuple[int, ...]
    order_N: torch.Tensor | None
    start_N2: torch.Tensor


def _sum_counts(words: int) -> tuple[int, int]:
    """How many row sums and how many sums in all a tensor has."""
    chunks, rest = divmod(words, CHUNK)
    rows = chunks * COLUMNS - (-rest // ROW)
    return rows, rows + chunks * COLUMNS + min(rest, COLUMNS)


def _part_sizes(words: int) -> list[int]:
    """Of one tensor: rows of its chunks, full rows and last row of the rest, columns of both.

    Without those that are 0.
    """
    chunks, rest = divmod(words, CHUNK)
    rows, in_last_row = divmod(rest, ROW)
    whole = chunks * COLUMNS
    sizes = (whole, rows, int(in_last_row > 0), whole, min(rest, COLUMNS))
    return [size for size in sizes if size]


@lru_cache(maxsize=128)
def _plan(sizes_bytes: tuple[int, ...], device: torch.device) -> _Plan:
    """The plan for tensors of these sizes; `_ABSENT` stands for None."""
    by_words: dict[int, list[int]] = {}
    for member, size in enumerate(sizes_bytes):
        by_words.setdefault(-(-max(size, 0) // _WORD_BYTES), []).append(member)
    order = [member for members in by_words.values() for member in members]
    starts = [_ABSENT_DIGEST if s == _ABSENT else (0, _mix_int(s + 1)) for s in sizes_bytes]
    groups: list[_Group] = []
    parts: list[int] = []
    begin = first = 0
    order_N = None
    with torch.inference_mode(False), torch.no_grad():
        for words, members in by_words.items():
            rows, sums = _sum_counts(words)
            if words:
                keys_M = _keys(sums, device)
                stacked = len(members) > 1 and words <= _STACKED
                places = tuple(members)
                groups.append(_Group(places, words, rows, sums, begin, first, keys_M, stacked))
                one = _part_sizes(words)
                parts += [sums * len(members)] if stacked else one * len(members)
            begin += sums * len(members)
            first += len(members)
        if order != sorted(order):
            order_N = torch.tensor(order, dtype=torch.int64, device=device).argsort()
        start_N2 = torch.tensor(starts, dtype=torch.int64, device=device)
    return _Plan(tuple(groups), begin, tuple(parts), order_N, start_N2)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in _PLAIN_DTYPES
        and type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, with conjugation and negation done. Needs `no_grad`."""
    if tensor.layout is torch.sparse_coo:
        stored = (tensor._indices(), tensor._values())
        return torch.cat([_flat(part).view(torch.uint8) for part in stored])
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return _line(tensor)


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a strided tensor in logical order, contiguous."""
    # view(-1) would keep the odd stride that a contiguous tensor of one element may have
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as int64 words; copied only where they are scattered or need a tail."""
    flat = _line(flat)
    element_bytes = flat.element_size()
    size_bytes, offset_bytes = flat.numel() * element_bytes, flat.storage_offset() * element_bytes
    if size_bytes % _WORD_BYTES == 0 and offset_bytes % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    words = torch.zeros(-(-size_bytes // _WORD_BYTES), dtype=torch.int64, device=flat.device)
    words.view(torch.uint8)[:size_bytes].copy_(flat.view(torch.uint8))
    return words


def _contiguous_words(flat: torch.Tensor, count: int) -> torch.Tensor:
    """`_words`, of any shape where nothing has to be copied or told apart."""
    last = flat.shape[-1] * flat.element_size() if flat.dim() else 1
    if last % _WORD_BYTES or flat.nbytes != count * _WORD_BYTES or not flat.is_contiguous():
        return _words(flat)
    if 1 in flat.shape:  # the stride there may be odd, which `view` refuses
        return _words(flat)
    aligned = flat.storage_offset() * flat.element_size() % _WORD_BYTES == 0
    return flat.view(torch.int64) if aligned else _words(flat)


def _sum_chunks(words_W: torch.Tensor, rows_M: torch.Tensor, columns_M: torch.Tensor) -> None:
    """Row and column sums of whole chunks; on the CPU one chunk at a time, for its cache."""
    chunks = words_W.numel() // CHUNK
    by_row = words_W.view(chunks, COLUMNS, ROW)
    by_column = words_W.view(chunks, ROW, COLUMNS)
    rows_M, columns_M = rows_M.view(chunks, COLUMNS), columns_M.view(chunks, COLUMNS)
    at_once = 1 if words_W.device.type == "cpu" else chunks
    for first in range(0, chunks, at_once):
        part = slice(first, first + at_once)
        torch.sum(by_row[part], 2, out=rows_M[part])
        torch.sum(by_column[part], 1, out=columns_M[part])


def _sum_rest(words_GW: torch.Tensor, rows_GM: torch.Tensor, columns_GM: torch.Tensor) -> None:
    """Row and column sums of G tensors of less than a chunk each, as if zeros followed."""
    count = words_GW.shape[1]
    rows, in_last_row = divmod(count, ROW)
    if rows:
        by_row = words_GW.as_strided((words_GW.shape[0], rows, ROW), (words_GW.stride(0), ROW, 1))
        torch.sum(by_row, 2, out=rows_GM[:, :rows])
    if in_last_row:
        torch.sum(words_GW[:, rows * ROW :], 1, out=rows_GM[:, rows])
    deep, beyond = divmod(count, COLUMNS)
    if deep == 0:
        columns_GM.copy_(words_GW)
        return
    by_column = words_GW.as_strided(
        (words_GW.shape[0], deep, COLUMNS), (words_GW.stride(0), COLUMNS, 1)
    )
    torch.sum(by_column, 1, out=columns_GM)
    if beyond:
        columns_GM[:, :beyond].add_(words_GW[:, deep * COLUMNS :])


def _sum_one(words: torch.Tensor, count: int, parts: Iterator[torch.Tensor]) -> None:
    """Row and column sums of one tensor into its parts, as `_part_sizes` orders them.

    Args:
        words: Its words, contiguous, of any shape.
        count: How many.
        parts: Where its sums go comes next.
    """
    begin, chunks = words.storage_offset(), 0
    if count >= CHUNK:
        chunks = count // CHUNK * CHUNK
        chunk_rows, begin, count = next(parts), begin + chunks, count - chunks
    rows, in_last_row = divmod(count, ROW)
    if rows:
        torch.sum(words.as_strided((rows, ROW), (ROW, 1), begin), 1, out=next(parts))
    if in_last_row:
        rest = words.as_strided((1, in_last_row), (in_last_row, 1), begin + rows * ROW)
        torch.sum(rest, 1, out=next(parts))
    if chunks:
        whole_W = words.as_strided((chunks,), (1,), begin - chunks)
        _sum_chunks(whole_W, chunk_rows, next(parts))
    deep, beyond = divmod(count, COLUMNS)
    if deep:
        columns_M = next(parts)
        torch.sum(words.as_strided((deep, COLUMNS), (COLUMNS, 1), begin), 0, out=columns_M)
        if beyond:
            rest = words.as_strided((beyond,), (1,), begin + deep * COLUMNS)
            columns_M.narrow(0, 0, beyond).add_(rest)
    elif count:
        next(parts).copy_(words.as_strided((count,), (1,), begin))


class _Batch:
    """Small tensors that are copied together, and reduced where they lie in the cache.

    Of one type and whole words they are copied by one call however many there are, of any sizes.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[list[torch.Tensor], _Group, torch.Tensor]] = []
        self._words, self._dtype = 0, torch.float32

    def add(self, flats: Sequence[torch.Tensor], group: _Group, sums_GM: torch.Tensor) -> None:
        """Tensors of one group, and the table that their sums go to."""
        dtype, size_bytes = flats[0].dtype, group.words * _WORD_BYTES
        alike = dtype in _PLAIN_DTYPES and all(
            f.dtype is dtype and f.nbytes == size_bytes for f in flats
        )
        at_once = max(1, CHUNK // group.words)
        for begin in range(0, len(flats), at_once):
            some, table_GM = flats[begin : begin + at_once], sums_GM[begin : begin + at_once]
            if not alike:
                _sum_table(torch.stack([_words(f) for f in some]), group, table_GM)
                continue
            words = len(some) * group.words
            if dtype is not self._dtype or self._words + words > CHUNK:
                self.flush()
            self._dtype = dtype
            self._waiting.append((list(some), group, table_GM))
            self._words += words

    def flush(self) -> None:
        """Copy and reduce what waits."""
        if not self._waiting:
            return
        every = [flat for some, _, _ in self._waiting for flat in some]
        words_W = torch._C._nn.flatten_dense_tensors(every).view(torch.int64)
        sizes = [len(some) * group.words for some, group, _ in self._waiting]
        pieces = words_W.split_with_sizes(sizes)
        for piece_W, (_, group, table_GM) in zip(pieces, self._waiting, strict=True):
            _sum_table(piece_W.view(-1, group.words), group, table_GM)
        self._waiting, self._words = [], 0


def _sum_table(words_GW: torch.Tensor, group: _Group, sums_GM: torch.Tensor) -> None:
    _sum_rest(words_GW, sums_GM[:, : group.rows], sums_GM[:, group.rows :])


def _sum_all(plan: _Plan, flats: Sequence[torch.Tensor | None], sums_M: torch.Tensor) -> None:
    """Fill the buffer of all sums."""
    parts = iter(sums_M.split_with_sizes(plan.parts))
    batch = _Batch()
    for group in plan.groups:
        here = [flat for member in group.members if (flat := flats[member]) is not None]
        if group.stacked:
            batch.add(here, group, next(parts).view(-1, group.sums))
            continue
        for flat in here:
            _sum_one(_contiguous_words(flat, group.words), group.words, parts)
    batch.flush()


def _digest(flats: list[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    sizes = tuple(_ABSENT if f is None else f.nbytes for f in flats)
    plan = _plan(sizes, device)
    sums_M = torch.empty(plan.total, dtype=torch.int64, device=device)
    mixed_M = torch.empty(plan.total, dtype=torch.int64, device=device)
    digest_N2 = torch.zeros((len(flats), 2), dtype=torch.int64, device=device)
    _sum_all(plan, flats, sums_M)
    tables = []
    for group in plan.groups:
        shape, stride = (len(group.members), group.sums), (group.sums, 1)
        sums_GM = sums_M.as_strided(shape, stride, group.begin)
        mixed_GM = mixed_M.as_strided(shape, stride, group.begin)
        torch.add(sums_GM, group.keys_M, out=mixed_GM)
        tables.append((sums_GM[:, : group.rows], mixed_GM))
    _mix(mixed_M)
    for group, (rows_GM, mixed_GM) in zip(plan.groups, tables, strict=True):
        last = group.first + len(group.members)
        torch.sum(rows_GM, 1, out=digest_N2[group.first : last, 0])
        torch.sum(mixed_GM, 1, out=digest_N2[group.first : last, 1])
    if plan.order_N is not None:
        digest_N2 = digest_N2.index_select(0, plan.order_N)
    return digest_N2.add_(plan.start_N2)


@torch.no_grad()
def digest_tensors(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Fingerprint each tensor of a list; None has a reserved value that no tensor is given.

    Args:
        tensors: Tensors of any dtype and memory layout on one device, or None. Of a sparse COO
            tensor the stored indices and values count, in the order in which they are stored.

    Returns:
        int64 of shape (N, 2) on that device (the CPU if there is no tensor): plain and mixed
        checksum. The host does not wait for the device.
    """
    with torch._C.DisableTorchFunctionSubclass():
        device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
        if not tensors:
            return torch.zeros((0, 2), dtype=torch.int64, device=device)
        return _digest([t if t is None or _is_plain(t) else _flat(t) for t in tensors], device)


def digest_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    """Fingerprint one tensor.

    Returns:
        int64 of shape (2,) on its device: plain and mixed checksum. The host does not wait.
    """
    return digest_tensors((tensor,))[0]


def salt(name: str, tensor: torch.Tensor) -> int:
    """A stable number for a tensor's name, dtype and shape: the same in every process.

    Returns:
        A signed 64-bit number.
    """
    text = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}"
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


@lru_cache(maxsize=32)
def _combine_keys(salts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        salts_N = torch.tensor(salts, dtype=torch.int64, device=device)
        return salts_N.add_(_keys(len(salts), device))


@torch.no_grad()
def combine(table_N2: torch.Tensor, salts: tuple[int, ...]) -> torch.Tensor:
    """Fold the fingerprints of a model into one.

    Each of the two results depends on both checksums, the salt and the position of every tensor, so
    one of them alone is a sound 64-bit comparison.

    Args:
        table_N2: int64 of shape (N, 2), from `digest_tensors`.
        salts: N numbers from `salt`.

    Returns:
        int64 of shape (2,) on the table's device. The host does not wait for the device.
    """
    if table_N2.shape != (len(salts), 2):
        msg = (
            f"Expected a table of shape ({len(salts)}, 2), one row per salt, but got "
            f"{tuple(table_N2.shape)}. Pass the salts of the tensors that were digested."
        )
        raise ValueError(msg)
    mixed_N = _mix(table_N2[:, 0] + _combine_keys(salts, table_N2.device))
    first_N = _mix(mixed_N.add_(table_N2[:, 1]))
    second_N = _mix(first_N + _GOLDEN)
    return torch.stack((first_N.sum(), second_N.sum()))


def to_pairs(table_N2: torch.Tensor) -> list[tuple[int, int]]:
    """The rows of a table, or one digest, as pairs of unsigned numbers. Waits for the device."""
    rows: list[list[int]] = table_N2.reshape(-1, 2).tolist()
    return [(plain & _UNSIGNED, mixed & _UNSIGNED) for plain, mixed in rows]


def _bytes(flat_N: torch.Tensor) -> torch.Tensor:
    return flat_N.view(torch.uint8).view(flat_N.numel(), flat_N.element_size())


@torch.no_grad()
def describe_difference(first: torch.Tensor, second: torch.Tensor) -> str:
    """Say in a few words how two tensors of one shape and dtype differ in their bits.

    Returns:
        ``""`` if they do not; ``"sign of zero"``, ``"NaN payload"`` or both if that is all; else
        which bit of which element, or how many elements; and by how many ulps, the steps between
        neighbouring numbers of the type. Waits for the device.
    """
    if first.dtype != second.dtype or first.shape != second.shape:
        return (
            f"{first.dtype} of shape {tuple(first.shape)} against "
            f"{second.dtype} of shape {tuple(second.shape)}"
        )
    one_N, other_N = _flat(first).cpu(), _flat(second).cpu()
    if one_N.shape != other_N.shape:
        return f"{one_N.numel()} stored bytes against {other_N.numel()}"
    if one_N.numel() == 0:
        return ""
    flipped_NB = _bytes(one_N) ^ _bytes(other_N)
    changed_N = flipped_NB.any(1).nonzero()[:, 0].tolist()
    if not changed_N:
        return ""
    here_N, there_N = _at(one_N, changed_N), _at(other_N, changed_N)
    same_numbers = _same_numbers(here_N, there_N)
    if same_numbers:
        return same_numbers
    bits = int.from_bytes(bytes(flipped_NB[changed_N[0]].tolist()), "little")
    apart = _ulps(here_N, there_N)
    if len(changed_N) == 1 and bits.bit_count() == 1:
        return f"bit {bits.bit_length() - 1} of element {changed_N[0]}{apart}"
    total = one_N.numel()
    return f"{len(changed_N)} of {total} elements{apart}, the first is element {changed_N[0]}"


def _at(flat_N: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Some of the elements; those of one byte as bytes, because older torch cannot pick float8."""
    if flat_N.element_size() > 1:
        return flat_N[places]
    return flat_N.view(torch.uint8)[places].view(flat_N.dtype)


_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_MOST_ULPS = 10**6


def _ulps(one_N: torch.Tensor, other_N: torch.Tensor) -> str:
    """How many steps of their type two sets of finite numbers are apart at most; "" otherwise."""
    if one_N.is_complex():
        one_N, other_N = torch.view_as_real(one_N).view(-1), torch.view_as_real(other_N).view(-1)
    kind = _AS_INTEGERS.get(one_N.dtype)
    if kind is None or not bool((one_N.isfinite() & other_N.isfinite()).all()):
        return ""
    lowest = torch.iinfo(kind).min
    places = []
    for flat_N in (one_N, other_N):
        plain_N = flat_N.contiguous().view(kind).to(torch.int64)
        # Negative numbers count downwards from zero.
        places.append(torch.where(plain_N < 0, lowest - plain_N, plain_N))
    here_N, there_N = places
    same_N = (here_N < 0) == (there_N < 0)  # there the difference cannot overflow
    far_N = (here_N.to(torch.float64) - there_N.to(torch.float64)).abs()
    exact_N = (here_N - there_N).abs().clamp(max=2 * _MOST_ULPS).to(torch.float64)
    most = int(torch.where(same_N, exact_N, far_N).max().item())
    if most > _MOST_ULPS:
        return ", over a million ulps apart"
    upto = "" if len(one_N) == 1 else "up to "
    return f", {upto}{most} ulp{'' if most == 1 else 's'} apart"


def _same_numbers(one_N: torch.Tensor, other_N: torch.Tensor) -> str:
    """What differs where no number does, of elements that differ in bits; "" if a number does."""
    if one_N.is_complex():
        one_N, other_N = torch.view_as_real(one_N).view(-1), torch.view_as_real(other_N).view(-1)
    if not one_N.is_floating_point():
        return ""
    changed_N = (_bytes(one_N) != _bytes(other_N)).any(1)
    one_N, other_N = one_N.to(torch.float64)[changed_N], other_N.to(torch.float64)[changed_N]
    zeros_N = one_N == other_N  # equal with other bits: the two zeros
    nans_N = one_N.isnan() & other_N.isnan()
    if not (zeros_N | nans_N).all():
        return ""
    found = (("sign of zero", zeros_N), ("NaN payload", nans_N))
    return " and ".join(name for name, at_N in found if at_N.any())
