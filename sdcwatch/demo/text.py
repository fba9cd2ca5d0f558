"""Real text without a download: the byte stream of the Python standard library's own sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_LIMIT_BYTES = 4_000_000
"""As much of the library as the demo reads: enough for thousands of steps, loaded in a moment."""
_VALIDATION_SHARE = 0.1
_SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"))


@dataclass(frozen=True, slots=True)
class Text:
    """A byte-level corpus.

    Attributes:
        train_N: Training bytes, uint8.
        validation_N: Held-out bytes, uint8: the end of the stream.
        files: How many files were read.
    """

    train_N: Tensor
    validation_N: Tensor
    files: int


class Batch(NamedTuple):
    """One micro-batch: tokens, the tokens that follow, and a weight for each position."""

    token_BT: Tensor
    target_BT: Tensor
    weight_BT: Tensor


def load_text(root: Path | None = None, *, limit_bytes: int = _LIMIT_BYTES) -> Text:
    """Read the standard library's ``.py`` files in a fixed order.

    Args:
        root: Folder to read; default the standard library of the running interpreter.
        limit_bytes: Stop after this many bytes.

    Raises:
        FileNotFoundError: The folder holds no Python source, as in a stripped installation.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    stream, files = bytearray(), 0
    for path in _sources(root):
        stream += path.read_bytes()
        files += 1
        if len(stream) >= limit_bytes:
            break
    if not stream:
        msg = f"Expected Python sources below {root}, but got none. Run with a full Python install."
        raise FileNotFoundError(msg)
    all_N = torch.frombuffer(stream[:limit_bytes], dtype=torch.uint8)
    cut = int(len(all_N) * (1 - _VALIDATION_SHARE))
    return Text(all_N[:cut], all_N[cut:], files)


def _sources(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.py"))
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and p.name not in _SKIPPED):
        yield from sorted(folder.rglob("*.py"))


def draw_batch(bytes_N: Tensor, *, batch: int, context: int, key: int) -> Batch:
    """Draw windows at random; `key` alone decides which, so a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(key)
    start_B = torch.randint(len(bytes_N) - context - 1, (batch,), generator=generator)
    window_BT = bytes_N[start_B[:, None] + torch.arange(context + 1)].long()
    weight_BT = torch.ones(batch, context)
    return Batch(window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous(), weight_BT)
