"""What the audits can promise on this model and machine: decided before they are armed.

Each rank compares its own DDP step, the user's backward included, with its own replay, and two
replays with each other. A single rank that deviates while all others agree is left to the audits,
which have arbiters; a computation that deviates on several ranks does not repeat, and comparing it
would only name healthy devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdcwatch.core.records import Coverage
from sdcwatch.core.text import list_names, list_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAudit:
    """What one rank found about itself in one preflight step.

    Attributes:
        rank: The rank.
        outputs_equal: The loss of the step equals that of its replay, bit for bit.
        gradients_equal: So do the gradients.
        loss_repeats: Two replays have the same loss.
        gradients_repeat: Two replays have the same gradients.
        differing: Parameters whose gradient differs between step and replay, at most ten.
        error: What a replay ended with.
    """

    rank: int
    outputs_equal: bool = True
    gradients_equal: bool = True
    loss_repeats: bool = True
    gradients_repeat: bool = True
    differing: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class PreflightJudgement:
    """What one preflight step says.

    Attributes:
        coverage: What can be compared; None asks for another try with deterministic kernels.
        reason: One sentence for a person, with what to mend.
        notes: Ranks that deviate alone.
    """

    coverage: Coverage | None
    reason: str
    notes: tuple[str, ...] = ()


def _tolerated(ranks: Sequence[int], world_size: int) -> bool:
    """Few enough to be a device rather than the computation."""
    return world_size >= 3 and len(ranks) <= max(1, world_size // 8)


def judge_preflight(rows: Sequence[SelfAudit], *, deterministic: bool) -> PreflightJudgement:
    """Judge one preflight step from every rank's audit of itself.

    Args:
        rows: One per rank.
        deterministic: Deterministic kernels were on.
    """
    world = len(rows)
    failed = [r for r in rows if r.error]
    if failed:
        who = list_ranks([r.rank for r in failed])
        return PreflightJudgement(
            Coverage.OFF, f"a replay on {who} ended with {failed[0].error}; loss_fn must be "
            "callable again with the bare module and the same batch",
        )  # fmt: skip
    restless = [r.rank for r in rows if not (r.loss_repeats and r.gradients_repeat)]
    if restless and not _tolerated(restless, world):
        return _does_not_repeat(rows, restless, deterministic=deterministic)
    settled = [r for r in rows if r.rank not in restless]
    loss_differs = [r.rank for r in settled if not r.outputs_equal]
    if loss_differs and not _tolerated(loss_differs, world):
        return PreflightJudgement(
            Coverage.OFF,
            f"the loss of the step differs from its replay's on {list_ranks(loss_differs)}: put "
            "autocast inside loss_fn, call the model that loss_fn is given instead of "
            "model.module, use torch's default generators, and let loss_fn change nothing outside",
        )
    differs = [r for r in settled if not r.gradients_equal]
    ranks = [r.rank for r in differs]
    if differs and not _tolerated(ranks, world):
        return PreflightJudgement(
            Coverage.OUTPUTS_ONLY,
            f"the gradients of the step differ from their replay's on {list_ranks(ranks)} "
            f"({list_names(differs[0].differing)}): a term is added to the loss outside loss_fn, "
            "or the backward does more than loss.backward(); only losses are compared",
        )
    notes = [
        f"rank {rank} alone deviates from its own replay; the audits will tell why"
        for rank in (*restless, *loss_differs, *ranks)
    ]
    return PreflightJudgement(
        Coverage.FULL, "step and replay are equal bit for bit", tuple(dict.fromkeys(notes))
    )


def _does_not_repeat(
    rows: Sequence[SelfAudit], restless: Sequence[int], *, deterministic: bool
) -> PreflightJudgement:
    if not deterministic:
        return PreflightJudgement(None, f"replays do not repeat on {list_ranks(restless)}")
    if all(r.loss_repeats and r.outputs_equal for r in rows):
        return PreflightJudgement(
            Coverage.OUTPUTS_ONLY,
            f"gradients do not repeat on {list_ranks(restless)}, with deterministic kernels "
            "either; only losses are compared",
        )
    return PreflightJudgement(
        Coverage.OFF,
        f"losses do not repeat on {list_ranks(restless)}, with deterministic kernels either: seed "
        "every generator that loss_fn uses, or replace the operation that does not repeat",
    )
