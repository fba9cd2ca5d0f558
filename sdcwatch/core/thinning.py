"""Long runs in few records: progress of neighbouring windows is added up, nothing else is touched.

Sums, histograms and counts of two neighbouring windows add up exactly; of loss, ages and totals
at a moment the later one stands. A run folded from merged records is the run folded from all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sdcwatch.core.records import Cause, Check, Count, Durations, Outcome, Progress, Record

FRESH_SECONDS = 60.0
"""How long every progress record of a segment is written; then they are merged."""
LONGEST_SECONDS = 30.0
"""What one written progress record spans at most: as much of the passes is lost in a crash."""
AHEAD_SECONDS = 5.0
"""After a written progress record, how long a verdict or a skip does not make the next be written
ahead of its time: a run that skips every step would write as many as it has steps."""
KEPT = 2000
"""Progress records that a reader holds at least before it merges neighbours."""


def interval_seconds(running_seconds: float) -> float:
    """What one written progress record spans after so many seconds of a segment; 0 to write all.

    A sixtieth of the time so far, at most `LONGEST_SECONDS`: a short run is seen in full, and a day
    comes to some 3,100 records.
    """
    if running_seconds < FRESH_SECONDS:
        return 0.0
    return min(LONGEST_SECONDS, running_seconds / FRESH_SECONDS)


def merged_durations(entries: Iterable[Durations]) -> tuple[Durations, ...]:
    """One histogram for each check, phase and set of buckets, in order of first appearance."""
    found: dict[tuple[object, ...], Durations] = {}
    for entry in entries:
        key = (entry.check, entry.phase, entry.buckets)
        before = found.get(key)
        found[key] = entry if before is None else before.merged(entry)
    return tuple(found.values())


def merged(first: Progress, second: Progress) -> Progress:
    """The progress of two neighbouring windows of one segment, the later one second."""
    counts, overhead = Counter[tuple[Check, Outcome, Cause]](), dict[str, float]()
    for window in (first, second):
        for entry in window.counts:
            counts[entry.check, entry.outcome, entry.cause] += entry.count
        for name, seconds in window.overhead_seconds.items():
            overhead[name] = round(overhead.get(name, 0.0) + seconds, 7)
    return replace(
        second,
        first_step=min(first.first_step, second.first_step),
        counts=tuple(
            Count(check=check, outcome=outcome, count=count, cause=cause)
            for (check, outcome, cause), count in counts.items()
        ),
        comparisons=first.comparisons + second.comparisons,
        output_mismatches=first.output_mismatches + second.output_mismatches,
        gradient_mismatches=first.gradient_mismatches + second.gradient_mismatches,
        weight_checks=first.weight_checks + second.weight_checks,
        disagreements=first.disagreements + second.disagreements,
        loss=first.loss if second.loss is None else second.loss,
        durations=merged_durations((*first.durations, *second.durations)),
        plain_steps=first.plain_steps + second.plain_steps,
        plain_seconds=round(first.plain_seconds + second.plain_seconds, 7),
        audit_steps=first.audit_steps + second.audit_steps,
        audit_seconds=round(first.audit_seconds + second.audit_seconds, 7),
        overhead_seconds=overhead,
        last_clean_audit_step=second.last_clean_audit_step or first.last_clean_audit_step,
        last_clean_audit_time=second.last_clean_audit_time or first.last_clean_audit_time,
        last_weight_check_step=second.last_weight_check_step or first.last_weight_check_step,
        last_weight_check_time=second.last_weight_check_time or first.last_weight_check_time,
    )


def _halved(records: Sequence[Record]) -> list[Record]:
    """Every two neighbouring progress records as one."""
    kept: list[Record] = []
    open_pair = False  # the last kept one is a progress record without a partner yet
    for record in records:
        is_progress = isinstance(record, Progress)
        last = kept[-1] if kept else None
        if open_pair and isinstance(record, Progress) and isinstance(last, Progress):
            kept[-1], open_pair = merged(last, record), False
        else:
            kept.append(record)
            open_pair = is_progress
    return kept


def thin(records: Iterable[Record], kept: int = KEPT) -> list[Record]:
    """A stream of records in the memory of a short run: neighbours in progress are merged.

    Where more than twice `kept` progress records are held, every two neighbours become one, as
    often as it takes. What lies between two other records is never moved past one of them.

    Args:
        records: In order of time; taken one at a time.
        kept: Progress records to hold before merging.
    """
    held: list[Record] = []
    progress, limit = 0, 2 * kept
    for record in records:
        held.append(record)
        progress += isinstance(record, Progress)
        if progress > limit:
            held = _halved(held)
            progress = sum(isinstance(r, Progress) for r in held)
            limit = max(2 * kept, 2 * progress)  # nothing more to merge: look again much later
    return held
