"""When the periodic checks are due. Steps are absolute, so every rank and every resume agree."""

from __future__ import annotations


def _due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0


def audit_due(step: int, *, audit_every: int | None, checkpoint_every: int | None) -> bool:
    """Whether `step` is an audit step: every `audit_every` steps, and wherever a checkpoint is due.

    Args:
        step: Training step, counted from 1.
        audit_every: None turns audits off, on checkpoint steps too.
        checkpoint_every: Steps between checkpoints, if they are known ahead.
    """
    if audit_every is None:
        return False
    return _due(step, audit_every) or _due(step, checkpoint_every)


def fingerprint_due(
    step: int, *, fingerprint_every: int | None, checkpoint_every: int | None
) -> bool:
    """Whether weights are compared after `step`: at step 0, periodically, and before checkpoints.

    Args:
        step: Training step, counted from 1; 0 is before the first update.
        fingerprint_every: None leaves step 0 and checkpoint steps.
        checkpoint_every: Steps between checkpoints, if they are known ahead.
    """
    return step == 0 or _due(step, fingerprint_every) or _due(step, checkpoint_every)
