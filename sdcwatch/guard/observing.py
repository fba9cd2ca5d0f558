"""What one rank sees of a step: sums on the device, read by the host with the agreed word.

`look` leaves everything on the device, `observed` reads it once it has come along with the result
of the step's all-reduce. The exact answers are asked for only where something was seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

from sdcwatch.checks.captured import Backward
from sdcwatch.checks.nonfinite import confirm_nonfinite, probe
from sdcwatch.checks.payload import MicroBatch
from sdcwatch.checks.serialise import Scope
from sdcwatch.core.nonfinite import NAMES_SHOWN, RankFinite
from sdcwatch.guard.guarded import Guarded, plain_name
from sdcwatch.guard.hook import GradientProbes
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


@dataclass(frozen=True, slots=True)
class Seen:
    """What the probes of a step came to, on the device; the host has not read it.

    Attributes:
        values: float32 (n,): the recorded loss, losses, outputs, what arrived there, local
            gradients, reduced ones.
        sizes: How many of each.
        nonfinite: bool (): a loss or a gradient is a candidate for the exact answer.
        short: Fewer gradient elements were reduced than the model has; known to the host.
    """

    values: torch.Tensor
    sizes: tuple[int, ...]
    nonfinite: torch.Tensor
    short: bool


def look(
    guarded: Guarded,
    probes: GradientProbes,
    window: StepWindow,
    recorded_loss: torch.Tensor | None,
) -> Seen:
    """What this rank saw, left on the device. The host does not wait.

    Args:
        guarded: Whose gradients are looked at.
        probes: What the communication hook saw.
        window: The step.
        recorded_loss: What `Guard.record_loss` was given in this step, () on any device, or None.
    """
    backwards = [*window.earlier.backwards, *([window.backward] if window.backward else [])]
    scalar = _scalar_output(backwards)
    local, reduced = probes.local, probes.reduced
    if guarded.ddp is None:
        local = reduced = [g.sum().float() for g in _gradients(guarded)]
    parts = (
        [] if recorded_loss is None else [recorded_loss],  # may be of the step before: only shown
        [] if scalar is None else [scalar],
        [probe for b in backwards for probe in b.probes],
        [probe for b in backwards for probe in b.arrived],
        local,
        reduced,
    )
    values = [as_floats(guarded.device, group) for group in parts]
    _, losses, _, _, seen_local, seen_reduced = values
    told = torch.cat((losses, seen_local, seen_reduced))
    short = guarded.ddp is not None and probes.elements < _expected_elements(guarded)
    if not short:
        probes.complete()
    return Seen(
        torch.cat(values),
        tuple(v.numel() for v in values),
        torch.isfinite(told).all().logical_not(),
        short,
    )


def observed(
    guarded: Guarded, probes: GradientProbes, seen: Seen, values: Sequence[float], rank: int
) -> tuple[RankFinite, float | None]:
    """What this rank saw, read. Waits for the device only where something is not finite.

    Args:
        guarded: As for `look`.
        probes: As for `look`.
        seen: What `look` returned.
        values: The same values on the host.
        rank: This rank.

    Returns:
        The facts, `weights` not looked at, and the last loss, finite or not; None for a step
        without one.
    """
    left = iter(values)
    groups = [tuple(itertools.islice(left, size)) for size in seen.sizes]
    recorded, losses, outputs, arrived, seen_local, seen_reduced = groups
    reduced_nonfinite = _nonfinite_in(seen_reduced)
    if reduced_nonfinite:  # the sum of finite numbers may overflow
        reduced_nonfinite = any(confirm_nonfinite(g) for g in _gradients(guarded))
    missing = _not_reduced(guarded, probes) if seen.short else []
    reduced_buckets = len(probes.buckets)
    own = RankFinite(
        rank=rank,
        local=_nonfinite_in(seen_local),
        reduced=reduced_nonfinite,
        # Of an output that is no scalar, infinities may be a mask's: a fact beside a gradient only.
        loss=_nonfinite_in(losses) or (_nonfinite_in(seen_local) and _nonfinite_in(outputs)),
        weights=False,
        buckets_reduced=reduced_buckets,
        buckets_expected=(
            max(probes.buckets_total, reduced_buckets + 1) if seen.short else reduced_buckets
        ),
        arrived=_nonfinite_in(arrived),
        nan=any(map(math.isnan, (*seen_local, *arrived))),
        not_reduced=tuple(missing[:NAMES_SHOWN]),
        not_reduced_total=len(missing),
    )
    return own, next(iter((*recorded, *losses)), None)


def _nonfinite_in(values: Sequence[float]) -> bool:
    return not all(map(math.isfinite, values))


def holds_nan(
    seen: RankFinite, micro_batches: Sequence[MicroBatch], scope: Scope, *, reduced: bool
) -> bool:
    """Whether a NaN was among what this rank saw: a sum of both infinities is one as well.

    What arrived decides where it was not finite: infinities make NaNs on their way down. Else the
    reduced gradient tells, in which every NaN of a rank is left.
    """
    if not seen.arrived:
        return reduced
    calls = [call for m in micro_batches for call in m.calls]
    tensors = [frozen.thaw(scope) for call in calls for frozen in call.gradients.values()]
    return any(bool(torch.isnan(t).any()) for t in tensors) if tensors else reduced


def not_replayable(window: StepWindow, micro_batches: Sequence[MicroBatch]) -> str:
    """Why the micro-batches of a step cannot be replayed, or ""."""
    if window.earlier.dropped:
        return f"{window.earlier.dropped} earlier micro-batches were not kept (max_payload_mb)"
    return next((m.problem for m in micro_batches if m.problem), "")


def _scalar_output(backwards: Sequence[Backward]) -> torch.Tensor | None:
    return next((b.loss for b in reversed(backwards) if b.loss is not None), None)


def as_floats(device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Floats of any shapes and devices as one float32 (n,) on `device`."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    if all(not t.shape and t.dtype is torch.float32 and t.device == device for t in tensors):
        return torch.stack([t.detach() for t in tensors])  # the usual case, a third of the cost
    return torch.cat([t.detach().reshape(-1).to(device, torch.float32) for t in tensors])


def fill_with_nan(gradient: torch.Tensor) -> None:
    """Make a gradient NaN in place, also a sparse one."""
    (gradient._values() if gradient.is_sparse else gradient).fill_(float("nan"))


def _gradients(guarded: Guarded) -> list[torch.Tensor]:
    return [p.grad for _, p in guarded.named if p.grad is not None]


def _expected(guarded: Guarded) -> list[tuple[str, torch.nn.Parameter]]:
    ignored = {plain_name(n) for n in getattr(guarded.ddp, "parameters_to_ignore", ())}
    return [(n, p) for n, p in guarded.trained if n not in ignored]


def _expected_elements(guarded: Guarded) -> int:
    return sum(p.numel() for _, p in _expected(guarded))


def _not_reduced(guarded: Guarded, probes: GradientProbes) -> list[str]:
    """Names of the parameters that no bucket of this backward held; first those without gradient.

    One of these keeps a whole bucket from its reduction.
    """
    reduced = probes.reduced_parameters()
    missing = [(n, p) for n, p in _expected(guarded) if id(p) not in reduced]
    return [n for n, p in sorted(missing, key=lambda one: one[1].grad is not None)]


def weights_nonfinite(
    guarded: Guarded,
    before: Callable[[str, torch.Tensor], torch.Tensor],
    poisoned: Callable[[str, torch.Tensor], bool],
) -> bool:
    """Whether a weight, or a buffer that a forward reads, is poisoned.

    Exact; only asked when something was seen. A buffer may have been poisoned by data in an earlier
    step, on this rank alone: whoever replays without it gets a finite value.

    Args:
        guarded: Whose weights and buffers.
        before: A buffer of that name as it was before the step, which may have poisoned it.
        poisoned: Whether a buffer of that name is not finite, and not by design.
    """
    weights = [p.detach() for _, p in guarded.named]
    sums = as_floats(guarded.device, [probe(w) for w in weights])
    # One read for all weights; a sum may overflow, hence the exact answer.
    if not bool(torch.isfinite(sums).all()) and any(map(confirm_nonfinite, weights)):
        return True
    return any(poisoned(name, before(name, b)) for name, b in _read_buffers(guarded.module))


def _read_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        # While it trains it only writes its statistics, which tell of this step.
        if not (isinstance(owner, _NormBase) and owner.training):
            yield from owner.named_buffers(prefix, recurse=False)


def gradients_hold_nan(guarded: Guarded) -> bool:
    """Whether a reduced gradient holds a NaN rather than an infinity; only asked then."""
    values = (g.coalesce().values() if g.is_sparse else g for g in _gradients(guarded))
    return any(bool(torch.isnan(v).any()) for v in values)
