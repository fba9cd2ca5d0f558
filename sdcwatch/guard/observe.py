"""What this rank saw in its own step: read off the device once, at the end of the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _NormBase

from sdcwatch.checks.nonfinite import confirm_nonfinite
from sdcwatch.checks.payload import join, join_losses
from sdcwatch.core.nonfinite import RankFinite
from sdcwatch.guard.replay import OwnStep
from sdcwatch.guard.setup import Guarded, Parts
from sdcwatch.guard.window import StepWindow


def gradient_homes(guarded: Guarded) -> dict[int, int]:
    """Where each gradient lives before the backward, by id of its parameter.

    DDP divides those that live in their bucket already. Others it copies there, multiplied: also
    those that an accumulation under no_sync has made anew.
    """
    ddp = guarded.ddp
    if ddp is None or not ddp.gradient_as_bucket_view:
        return {}
    return {
        id(p): p.grad.untyped_storage().data_ptr()
        for _, p in guarded.named
        if p.grad is not None and p.grad.layout is torch.strided
    }


def observe(parts: Parts, window: StepWindow) -> tuple[RankFinite, float | None]:
    """The step's one read of the device: loss, local and reduced screens.

    Returns:
        What this rank saw, `weights` not looked at, and the last finite or non-finite loss.
    """
    screen, guarded = parts.screen, parts.guarded
    losses = [f.value.reshape(()).float() for f in window.finished_forwards]
    if guarded.ddp is None:
        local = reduced = [g.sum().float() for g in _gradients(guarded)]
        elements = expected = 0
    else:
        local, reduced = screen.local, screen.reduced
        elements, expected = screen.elements, _expected_elements(guarded)
    values = torch.stack([*losses, *local, *reduced]).tolist() if losses or local else []
    n, m = len(losses), len(losses) + len(local)
    seen_local, seen_reduced = (not all(map(math.isfinite, v)) for v in (values[n:m], values[m:]))
    if seen_reduced:  # the sum of finite numbers may overflow
        seen_reduced = any(confirm_nonfinite(g) for g in _gradients(guarded))
    own = RankFinite(
        rank=parts.exchange.rank,
        local=seen_local,
        reduced=seen_reduced,
        loss=not all(map(math.isfinite, values[:n])),
        weights=False,
        buckets_reduced=elements,
        buckets_expected=expected,
    )
    return own, values[n - 1] if n else parts.reporter.loss


def _gradients(guarded: Guarded) -> list[torch.Tensor]:
    return [p.grad for _, p in guarded.named if p.grad is not None]


def _expected_elements(guarded: Guarded) -> int:
    ignored = getattr(guarded.ddp, "parameters_to_ignore", ())
    return sum(p.numel() for n, p in guarded.named if p.requires_grad and n not in ignored)


def weights_nonfinite(guarded: Guarded) -> bool:
    """Whether a weight, or a buffer that a forward reads, is poisoned.

    Exact; only asked when something was seen. A buffer may have been poisoned by data in an earlier
    step, on this rank alone: whoever replays without it gets a finite value.
    """
    return any(confirm_nonfinite(p.detach()) for _, p in guarded.named) or any(
        _is_poisoned(buffer) for buffer in _read_buffers(guarded.module)
    )


def _read_buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for owner in module.modules():
        # While it trains it only writes its statistics, which tell of this step.
        if not (isinstance(owner, _NormBase) and owner.training):
            yield from owner.buffers(recurse=False)


def _is_poisoned(buffer: torch.Tensor) -> bool:
    """Non-finite, and not by design: masks are made of negative infinities."""
    if not confirm_nonfinite(buffer):
        return False
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer.float()
    return bool((values.isnan() | values.isposinf()).any())


def gradients_hold_nan(guarded: Guarded) -> bool:
    """Whether a reduced gradient holds a NaN rather than an infinity; only asked then."""
    values = (g.coalesce().values() if g.is_sparse else g for g in _gradients(guarded))
    return any(bool(torch.isnan(v).any()) for v in values)


def own_step(parts: Parts, window: StepWindow) -> OwnStep | None:
    """What was captured of the synchronising backward; None if it cannot be replayed."""
    captured = [
        f.pending.finish() for f in window.finished_forwards if f.synchronises and f.pending.audit
    ]
    if not captured or any(c.loss is None or c.gradients is None for c in captured):
        return None
    losses = [c.loss for c in captured if c.loss is not None]
    return OwnStep(
        join([c.micro_batch for c in captured]), join_losses(losses), captured[-1].gradients
    )
