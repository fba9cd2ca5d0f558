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
a negated 2 x 2 tile of a float64 matrix of 1023 columns was missed in every trial.

**Why two fingerprints can differ.** One bit is enough: +0.0 and -0.0 differ, and so do NaNs with
different payloads. Strides and memory layout never matter. Shape, dtype and name are not part of a
tensor's own fingerprint; `combine` mixes them in through `salt`.

**False positives** none: equal bits give equal fingerprints. **Misses**: about 2^-64 for a change
that is not made to fit. It is a checksum, not a cryptographic hash.

**Cost** about twice one float32 `sum()` over the same bytes; temporaries below 4 % of the largest
tensor. Nothing here waits for the device except `to_pairs` and `describe_difference`.

Shape suffixes: N tensors, M partial sums, W words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW = 256
"""Words in a row; also rows of columns in a chunk."""
COLUMNS = 1021
"""Words between two of the same column; also rows in a chunk."""
CHUNK = ROW * COLUMNS
"""Words in a chunk: 2 MiB, so that the second reduction reads it from the cache."""

_WORD_BYTES = 8
_ABSENT = -1
_ABSENT_DIGEST = (0x5DC0FFEE0DDBA11 - (1 << 63), 0x0B5E55ED5EA51DE5)
_SIGNED = 1 << 63
_UNSIGNED = (1 << 64) - 1
_MASK = (1 << 31) - 1  # >> of int64 copies the sign; these are the bits that a logical shift keeps
_MULTIPLIERS = (
    0xFF51AFD7ED558CCD - (1 << 64),
    0xC4CEB9FE1A85EC53 - (1 << 64),
)  # MurmurHash3 fmix64
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _mix(x_M: torch.Tensor) -> torch.Tensor:
    """Mix int64 words in place with MurmurHash3's finaliser, a non-linear permutation."""
    shifted_M = torch.empty_like(x_M)
    for multiplier in (*_MULTIPLIERS, None):
        torch.bitwise_right_shift(x_M, 33, out=shifted_M)
        x_M.bitwise_xor_(shifted_M.bitwise_and_(_MASK))
        if multiplier is not None:
            x_M.mul_(multiplier)
    return x_M


def _mix_int(x: int) -> int:
    """`_mix` of one unsigned number, on the host, as a signed one."""
    for multiplier in (*_MULTIPLIERS, 1):
        x = (x & _UNSIGNED) ^ ((x & _UNSIGNED) >> 33)
        x *= multiplier
    return _signed(x)


def _signed(x: int) -> int:
    return ((x + _SIGNED) & _UNSIGNED) - _SIGNED


@lru_cache(maxsize=64)
def _key_table(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        position_M = torch.arange(1, size + 1, dtype=torch.int64, device=device)
        return _mix(position_M.mul_(_GOLDEN))


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """One key per position; tables are shared by rounding the size up to a power of two."""
    return _key_table(1 << max(12, (count - 1).bit_length()), device)[:count]


def _sum_counts(size_bytes: int) -> tuple[int, int]:
    """How many row sums and how many sums in all a tensor has."""
    words = -(-max(size_bytes, 0) // _WORD_BYTES)
    chunks, rest = divmod(words, CHUNK)
    rows = chunks * COLUMNS - (-rest // ROW)
    return rows, rows + chunks * COLUMNS + min(rest, COLUMNS)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the sums of a list of tensors lie in one buffer: row sums first, then column sums.

    Attributes:
        spans: Begin, end of row sums, end of column sums of each tensor.
        keys_M: One key per sum, by its position in its tensor.
        begin_N: As `spans`, on the device, counted in a buffer that begins with one zero.
        row_end_N: As above.
        end_N: As above.
        start_N2: What each digest starts from: its length, or the reserved value of None.
    """

    spans: tuple[tuple[int, int, int], ...]
    keys_M: torch.Tensor
    begin_N: torch.Tensor
    row_end_N: torch.Tensor
    end_N: torch.Tensor
    start_N2: torch.Tensor


@lru_cache(maxsize=128)
def _plan(sizes_bytes: tuple[int, ...], device: torch.device) -> _Plan:
    """The plan for tensors of these sizes; `_ABSENT` stands for None."""
    counts = [_sum_counts(size) for size in sizes_bytes]
    begins = list(accumulate((total for _, total in counts), initial=0))[:-1]
    spans = tuple((b, b + r, b + t) for b, (r, t) in zip(begins, counts, strict=True))
    starts = [_ABSENT_DIGEST if s == _ABSENT else (0, _mix_int(s + 1)) for s in sizes_bytes]
    with torch.inference_mode(False), torch.no_grad():
        keys = [_keys(total, device) for _, total in counts]
        table_3N = torch.tensor(spans, dtype=torch.int64, device=device).T.contiguous()
        return _Plan(
            spans=spans,
            keys_M=keys[0] if len(keys) == 1 else torch.cat(keys),
            begin_N=table_3N[0],
            row_end_N=table_3N[1],
            end_N=table_3N[2],
            start_N2=torch.tensor(starts, dtype=torch.int64, device=device),
        )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, without gradient, conjugation or negation pending."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous 1-D tensor as int64 words; copied only where they need a tail."""
    size_bytes = flat.numel() * flat.element_size()
    offset_bytes = flat.storage_offset() * flat.element_size()
    if size_bytes % _WORD_BYTES == 0 and offset_bytes % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    words = torch.zeros(-(-size_bytes // _WORD_BYTES), dtype=torch.int64, device=flat.device)
    words.view(torch.uint8)[:size_bytes].copy_(flat.view(torch.uint8))
    return words


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


def _sum_rest(words_W: torch.Tensor, rows_M: torch.Tensor, columns_M: torch.Tensor) -> None:
    """Row and column sums of less than a chunk, as if zeros followed."""
    count = words_W.numel()
    rows, in_last_row = divmod(count, ROW)
    if rows:
        torch.sum(words_W[: rows * ROW].view(rows, ROW), 1, out=rows_M[:rows])
    if in_last_row:
        torch.sum(words_W[rows * ROW :], 0, out=rows_M[rows])
    if count <= COLUMNS:
        columns_M.copy_(words_W)
        return
    deep, beyond = divmod(count, COLUMNS)
    torch.sum(words_W[: deep * COLUMNS].view(deep, COLUMNS), 0, out=columns_M)
    columns_M[:beyond].add_(words_W[deep * COLUMNS :])


def _fill(words_W: torch.Tensor, rows_M: torch.Tensor, columns_M: torch.Tensor) -> None:
    whole = words_W.numel() // CHUNK
    split = whole * CHUNK
    if whole:
        _sum_chunks(words_W[:split], rows_M[: whole * COLUMNS], columns_M[: whole * COLUMNS])
    if split < words_W.numel():
        _sum_rest(words_W[split:], rows_M[whole * COLUMNS :], columns_M[whole * COLUMNS :])


def _digest(flats: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    sizes = tuple(_ABSENT if f is None else f.numel() * f.element_size() for f in flats)
    plan = _plan(sizes, device)
    total = plan.spans[-1][2]
    # A leading zero makes the running totals exclusive: the sum over [b, e) is total[e] - total[b].
    sums_2M = torch.zeros((2, total + 1), dtype=torch.int64, device=device)
    plain_M = sums_2M[0, 1:]
    for flat, (begin, row_end, end) in zip(flats, plan.spans, strict=True):
        if flat is not None and end > begin:
            _fill(_words(flat), plain_M[begin:row_end], plain_M[row_end:end])
    mixed_M = torch.add(plain_M, plan.keys_M, out=sums_2M[1, 1:])
    _mix(mixed_M)
    running_2M = sums_2M.cumsum(1)
    plain_N = running_2M[0].index_select(0, plan.row_end_N)
    plain_N -= running_2M[0].index_select(0, plan.begin_N)
    mixed_N = running_2M[1].index_select(0, plan.end_N)
    mixed_N -= running_2M[1].index_select(0, plan.begin_N)
    return torch.stack((plain_N, mixed_N), 1).add_(plan.start_N2)


@torch.no_grad()
def digest_tensors(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Fingerprint each tensor of a list; None has a reserved value that no tensor is given.

    Args:
        tensors: Strided tensors of any dtype and layout on one device, or None.

    Returns:
        int64 of shape (N, 2) on that device (the CPU if there is no tensor): plain and mixed
        checksum. The host does not wait for the device.
    """
    device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
    if not tensors:
        return torch.zeros((0, 2), dtype=torch.int64, device=device)
    with torch._C.DisableTorchFunctionSubclass():
        return _digest([None if t is None else _flat(t) for t in tensors], device)


def digest_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    """Fingerprint one tensor.

    Returns:
        int64 of shape (2,) on the tensor's device: plain and mixed checksum. The host does not
        wait for the device.
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
        which bit of which element, or how many elements. Waits for the device.
    """
    if first.dtype != second.dtype or first.shape != second.shape:
        return (
            f"{first.dtype} of shape {tuple(first.shape)} against "
            f"{second.dtype} of shape {tuple(second.shape)}"
        )
    one_N, other_N = _flat(first).cpu(), _flat(second).cpu()
    if one_N.numel() == 0:
        return ""
    flipped_NB = _bytes(one_N) ^ _bytes(other_N)
    changed_N = flipped_NB.any(1).nonzero()[:, 0].tolist()
    if not changed_N:
        return ""
    same_numbers = _same_numbers(one_N[changed_N], other_N[changed_N])
    if same_numbers:
        return same_numbers
    bits = int.from_bytes(bytes(flipped_NB[changed_N[0]].tolist()), "little")
    if len(changed_N) == 1 and bits.bit_count() == 1:
        return f"bit {bits.bit_length() - 1} of element {changed_N[0]}"
    return f"{len(changed_N)} of {one_N.numel()} elements, the first is element {changed_N[0]}"


def _same_numbers(one_N: torch.Tensor, other_N: torch.Tensor) -> str:
    """What differs where no number does, of elements that differ in bits; "" if a number does."""
    if one_N.is_complex():
        one_N, other_N = torch.view_as_real(one_N).view(-1), torch.view_as_real(other_N).view(-1)
    if not one_N.is_floating_point():
        return ""
    changed_N = (_bytes(one_N) != _bytes(other_N)).any(1)
    one_N, other_N = one_N[changed_N].to(torch.float64), other_N[changed_N].to(torch.float64)
    zeros_N = one_N == other_N  # equal with other bits: the two zeros
    nans_N = one_N.isnan() & other_N.isnan()
    if not (zeros_N | nans_N).all():
        return ""
    found = (("sign of zero", zeros_N), ("NaN payload", nans_N))
    return " and ".join(name for name, at_N in found if at_N.any())
