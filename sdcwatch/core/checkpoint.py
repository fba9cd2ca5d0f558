"""Whether a checkpoint may be saved, and how far it can be trusted.

Never green while blind: only a step that was itself audited clean gives `SAVED`. With audits off
(one rank, coverage off, ``audit_every=None``) a checkpoint is saved, because withholding all of
them would help nobody, but as `PROVISIONAL` for the reason `NO_AUDIT`, and nothing confirms it.
Where ranks differ and are left out of the audits it is `PROVISIONAL` for the reason `DIFFERS`, and
nothing confirms it either. After a named suspect, or after more differed than broken devices
explain, checkpoints are withheld until an audit is clean again.

Also when checks are due: steps are absolute, so that every rank and every resume agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcwatch.core.records import CheckpointResult, GateReason
from sdcwatch.core.text import count, list_ranks

SUSPECTS_SHOWN = 4
"""Suspects that the reason of a refusal names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFacts:
    """What the gate looks at.

    Attributes:
        step: Step of the checkpoint.
        tainted: A weight check has failed in this run.
        nonfinite_passed: Check 1 passed at this step.
        replay_failed: An audit at this step failed.
        fingerprint_passed: Check 3 passed at this step.
        last_clean_audit_step: Step of the last clean audit; None before the first.
        audit_age_limit: Largest age of that audit in steps; None for no limit.
        preflighted: Preflight is done.
        audits_on: Check 2 runs in this run.
        weights_finite: Weights and floating buffers are finite on all ranks.
        suspects: Devices named since the last clean audit, in words.
        widespread: Since the last clean audit more differed than broken devices explain.
        differing: Ranks that are left out of the audits because they have never matched.
        left_behind: A skipped step has left something as its forward made it, on some rank.
        framework: A framework writes the checkpoint; whether it succeeds is not known here.
    """

    step: int
    tainted: bool
    nonfinite_passed: bool
    replay_failed: bool
    fingerprint_passed: bool
    last_clean_audit_step: int | None
    audit_age_limit: int | None
    preflighted: bool
    audits_on: bool
    weights_finite: bool = True
    suspects: tuple[str, ...] = ()
    widespread: bool = False
    differing: tuple[int, ...] = ()
    left_behind: bool = False
    framework: bool = False


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate decided.

    Attributes:
        save: Call the user's `save`.
        result: `SAVED`, `PROVISIONAL` or `WITHHELD`.
        reason: Why, as a closed word.
        detail: Why, as a sentence.
        audit_age: Steps since the last clean audit; None if there was none.
    """

    save: bool
    result: CheckpointResult
    reason: GateReason
    detail: str
    audit_age: int | None


def _listed(suspects: tuple[str, ...]) -> str:
    more = len(suspects) - SUSPECTS_SHOWN
    shown = ", ".join(suspects[:SUSPECTS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _failed_here(facts: GateFacts) -> tuple[GateReason, str] | None:
    """What was found at this step, or for good; the gravest first."""
    if facts.tainted:
        return GateReason.TAINTED, "A weight check failed earlier: the replicas are corrupt."
    if not facts.fingerprint_passed:
        return GateReason.FINGERPRINT, "The replicas hold different weights at this step."
    if not facts.weights_finite:
        return GateReason.WEIGHTS_NONFINITE, "Weights or buffers are not finite at this step."
    if facts.left_behind:
        return (
            GateReason.NONFINITE,
            "A skipped step left buffers or attributes of the module that could not be put back.",
        )
    if not facts.nonfinite_passed:
        return GateReason.NONFINITE, "A loss or gradient was not finite at this step."
    if facts.replay_failed:
        also = f": {_listed(facts.suspects)}" if facts.suspects else ""
        return GateReason.REPLAY, f"The replay audit failed at this step{also}."
    return None


def _not_audited(facts: GateFacts, age: int | None) -> tuple[GateReason, str] | None:
    """What the audits before this step leave open; only asked where there are audits."""
    limit = facts.audit_age_limit
    if not facts.preflighted:
        return GateReason.NOT_PREFLIGHTED, "Preflight is not done: nothing has been audited yet."
    if facts.suspects:
        return (
            GateReason.SUSPECT,
            f"No audit has been clean since {_listed(facts.suspects)} was named as suspect.",
        )
    if facts.widespread:
        return (
            GateReason.WIDESPREAD,
            "No audit has been clean since more ranks differed than broken devices explain.",
        )
    if age is None:
        return GateReason.NO_AUDIT, "No audit has been clean since the start, or since one failed."
    if limit is not None and age > limit:
        return (
            GateReason.AUDIT_TOO_OLD,
            f"The last clean audit is {count(age, 'step')} old; at most {limit} are allowed.",
        )
    return None


def judge_checkpoint(facts: GateFacts) -> GateDecision:
    """Save or withhold the checkpoint of one step; pure, the same on every rank."""
    last = facts.last_clean_audit_step
    age = None if last is None else facts.step - last
    refusal = _failed_here(facts)
    if refusal is None and facts.audits_on:
        refusal = _not_audited(facts, age)
    if refusal is not None:
        return GateDecision(False, CheckpointResult.WITHHELD, *refusal, age)
    if not facts.audits_on:
        detail = "Audits are off: nothing will confirm this checkpoint."
        return GateDecision(True, CheckpointResult.PROVISIONAL, GateReason.NO_AUDIT, detail, age)
    if facts.differing:
        detail = (
            f"The audits leave out {list_ranks(facts.differing)}, which has matched no other since "
            "the start: nothing will confirm this checkpoint."
        )
        return GateDecision(True, CheckpointResult.PROVISIONAL, GateReason.DIFFERS, detail, age)
    reason = GateReason.FRAMEWORK if facts.framework else GateReason.OK
    if age == 0:
        detail = "Every check passed at this step."
        return GateDecision(True, CheckpointResult.SAVED, reason, detail, age)
    old = count(age or 0, "step")
    detail = f"The last clean audit is {old} old; the next one, if clean, confirms it."
    return GateDecision(True, CheckpointResult.PROVISIONAL, reason, detail, age)


def is_confirmable(decision: GateDecision) -> bool:
    """Whether the next clean audit confirms what was saved."""
    confirmable = (GateReason.OK, GateReason.FRAMEWORK)
    return decision.result is CheckpointResult.PROVISIONAL and decision.reason in confirmable


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
