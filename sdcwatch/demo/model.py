"""A small GPT, and real text without a download for it to learn.

The model has dropout, tied embeddings, pre-norm blocks and causal attention; the text is the byte
stream of the Python standard library's own sources.

Shape legend: B batch, T time, D model width, V vocabulary, H heads.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Size of the model.

    Attributes:
        vocabulary: Number of tokens; 256 for bytes.
        context: Longest sequence.
        width: Model width D.
        heads: Attention heads; divides `width`.
        layers: Transformer blocks.
        dropout: Dropout probability, on embeddings, attention and residuals.
    """

    vocabulary: int = 256
    context: int = 64
    width: int = 160
    heads: int = 5
    layers: int = 4
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend to earlier positions; same shape in and out."""
        batch, time, width = x_BTD.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(x_BTD).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y_BHTd = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y_BHTd.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """One block; same shape in and out."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm_attention(x_BTD)))
        out: Tensor = x_BTD + self.dropout(self.mlp(self.norm_mlp(x_BTD)))
        return out


class GPT(nn.Module):
    """A decoder over bytes; the token embedding is the output layer, too."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token.weight

    def forward(self, token_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits of shape (B, T, V) for the next token at each position; a mask of 0 hides one."""
        position_T = torch.arange(token_BT.shape[1], device=token_BT.device)
        x_BTD = self.dropout(self.token(token_BT) + self.position(position_T))
        x_BTD = x_BTD * mask_BT.unsqueeze(-1)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logit_BTV: Tensor = self.head(self.norm(x_BTD))
        return logit_BTV


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
    """One micro-batch: tokens, the tokens that follow, and a mask: 1 where there is a token."""

    token_BT: Tensor
    target_BT: Tensor
    mask_BT: Tensor


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
    mask_BT = torch.ones(batch, context)
    return Batch(window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous(), mask_BT)
