"""What boards and alerts ask about runs and devices, as PromQL; one number or label per answer.

An answer about a run that exists is never empty where a tile shows it: nothing found is 0, and no
answer at all means that there is no such run.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcwatch.core.catalog import (
    CHECKPOINT_INFO,
    CHECKPOINTS,
    EVENT_INFO,
    GUARD_STATE,
    LAST_GOOD_CHECKPOINT_STEP,
    LAST_PROGRESS_TIME,
    OVERHEAD_TIME,
    RANK_EVIDENCE,
    RANK_LAST_FINDING_STEP,
    RANK_STATE,
    RANK_STRIKES,
    RUN_INFO,
    RUN_VERDICT,
    SKIPPED,
    STEP_TIME,
    SUSPECT_INFO,
    VERDICTS,
    Metric,
)
from sdcwatch.core.outcomes import MEANINGS
from sdcwatch.core.records import (
    Cause,
    CheckpointResult,
    GuardState,
    Outcome,
    RankState,
    RunWord,
    SkipReason,
)
from sdcwatch.monitor.promql import (
    RANGE,
    WHOLE_RANGE,
    Not,
    Scope,
    Window,
    constant,
    dedup_exporters,
    first_of,
    last,
    newest,
    per_interval,
    rate,
    select,
    summed,
    total,
)
from sdcwatch.monitor.theme import ENDED, GUARD_CODES, NOBODY, RANK_CODES, VANISHED

RANK = "suspect_rank"
DEVICE = ("suspect_gpu", "suspect_instance_id")
"""A suspect is a device: a rank is only where it ran."""
WHO = (RANK, "suspect_node", *DEVICE)
FINDINGS = tuple(o for o, m in MEANINGS.items() if m.failed or m.alarm is not None)
UNNAMED = tuple(o for o, m in MEANINGS.items() if m.alarm is RunWord.UNATTRIBUTED)
"""Something is wrong, and no device is named."""
NO_SOFTWARE = Not((Cause.SOFTWARE, Cause.SCALING))
"""Causes that leave a device possible."""
ACTIVE = (
    GuardState.PREFLIGHT,
    GuardState.ARMED,
    GuardState.OBSERVING,
    GuardState.DEGRADED,
    GuardState.TAINTED,
)
"""States of a run that has not said how it ended."""
UNTAINTED = tuple(s for s in ACTIVE if s is not GuardState.TAINTED)
OVER = (GuardState.FINISHED, GuardState.FAILED)
SKIPS = (SkipReason.NONFINITE, SkipReason.REPLAY, SkipReason.NOT_STEPPED)
"""Skips that count; those of the loss scaler are normal under fp16."""
HELD = Window.of("15d")
"""How far back boards look for a suspect that nobody has closed: Prometheus keeps 15 days."""
_CLOCK = "1h"
"""Resolution at which an earlier suspect and a later closing are told apart."""


def active(scope: Scope) -> str:
    """1 for each live run that has not ended."""
    return f"{dedup_exporters(select(GUARD_STATE, scope, state=ACTIVE), scope)} == 1"


def _exported(scope: Scope) -> str:
    """One series of each process, whatever it says: a one-hot gauge always has every state."""
    return select(GUARD_STATE, scope, state=GuardState.ARMED)


def alive(scope: Scope) -> str:
    """A value for each run that any process exports now."""
    return dedup_exporters(_exported(scope), scope)


def present(scope: Scope, window: Window = RANGE) -> str:
    """0 for each run that was exported within the window."""
    return f"{dedup_exporters(last(_exported(scope), window), scope)} * 0"


def or_none(counts: str, scope: Scope) -> str:
    """A count per run, 0 where there is a run and nothing was counted."""
    return f"{counts} or {present(scope)}"


def current(metric: Metric, scope: Scope) -> str:
    """The last value of a gauge of the process that started last."""
    return dedup_exporters(newest(select(metric, scope), scope), scope)


def since(time: str, scope: Scope) -> str:
    """Seconds since a unix time, nothing while it is 0; in a run that ended until its last step."""
    until = f"(time() + {present(scope)} and on ({scope.labels()}) {alive(scope)})"
    ended = dedup_exporters(last(select(LAST_PROGRESS_TIME, scope)), scope)
    return f"clamp_min(({until} or {ended}) - ({time} > 0), 0)"


def age(metric: Metric, scope: Scope) -> str:
    """Seconds since a unix time of the process that started last."""
    return since(current(metric, scope), scope)


def live_age(metric: Metric, scope: Scope) -> str:
    """Seconds since a unix time in a live run; `ENDED` where the run has ended."""
    lives = f"time() - ({current(metric, scope)} > 0) and on ({scope.labels()}) {active(scope)}"
    return f"{lives} or {present(scope)} + {ENDED}"


def word(metric: Metric, label: str, scope: Scope) -> str:
    """The value of a one-hot gauge or of the info metric, as the label of a series."""
    return f"{dedup_exporters(newest(select(metric, scope), scope), scope, label)} == 1"


def verdict(scope: Scope) -> str:
    """Each run in one word: the label `verdict` of a series."""
    return word(RUN_VERDICT, "verdict", scope)


def runs_with(scope: Scope, *words: RunWord) -> str:
    """1 for each run whose word is one of these."""
    gauge = newest(select(RUN_VERDICT, scope, verdict=words), scope)
    return f"{dedup_exporters(gauge, scope)} == 1"


def guard(scope: Scope) -> str:
    """The state of the guard, as the label `state`; vanished if it never said how it ended."""
    state = word(GUARD_STATE, "state", scope)
    went_on = newest(select(GUARD_STATE, scope, state=UNTAINTED), scope)
    gone = f"{dedup_exporters(went_on, scope)} == 1"
    gone = f"{gone} unless on ({scope.labels()}) {alive(scope)}"
    vanished = f'label_replace({gone}, "state", "{VANISHED}", "", "")'
    return f"{vanished} or ({state} unless on ({scope.labels()}) ({gone}))"


def guard_over_time(scope: Scope) -> str:
    """The state of the guard at each moment, as a number of `theme.GUARD_CODES`."""

    def state(chosen: GuardState) -> str:
        return f"{dedup_exporters(select(GUARD_STATE, scope, state=chosen), scope)} == 1"

    return first_of(*(constant(state(s), GUARD_CODES[s.value]) for s in GuardState))


def open_suspects(scope: Scope, window: Window, *labels: str) -> str:
    """1 for each device that is suspect and that nobody has closed, in whatever segment.

    A closing beats what earlier processes said. What a live process says beats both: evidence that
    came after a closing opens the suspect again.
    """
    device = scope.labels(*DEVICE)
    suspect = select(RANK_STATE, scope, state=RankState.SUSPECT)
    closed = select(RANK_STATE, scope, state=RankState.CLOSED)

    def when(selector: str) -> str:
        moments = f"(last_over_time({selector}[{_CLOCK}]) == 1) * 0 + time()"
        moment = f"max_over_time(({moments})[{window.text}:{_CLOCK}])"
        return f"max by ({device}) ({moment})"

    now = f"{dedup_exporters(suspect, scope, *labels)} == 1"
    held = f"{dedup_exporters(last(suspect, window), scope, *labels)} == 1"
    later = f"{when(closed)} >= on ({device}) {when(suspect)}"
    shut = f"max by ({device}) ({closed}) == 1"
    return f"({now} or ({held} unless on ({device}) ({later}))) unless on ({device}) ({shut})"


def rank_state(scope: Scope, *labels: str) -> str:
    """The state of devices that have one, as a number of `theme.RANK_CODES`."""
    suspects = open_suspects(scope, HELD, *labels)
    closed = last(select(RANK_STATE, scope, state=RankState.CLOSED), HELD)
    closed = f"{dedup_exporters(closed, scope, *labels)} == 1"
    device = scope.labels(*DEVICE)
    return (
        f"({constant(suspects, RANK_CODES[RankState.SUSPECT])}) or "
        f"({constant(closed, RANK_CODES[RankState.CLOSED])} unless on ({device}) ({suspects}))"
    )


def ranks_over_time(scope: Scope, *labels: str) -> str:
    """The state of devices at each moment, as a number of `theme.RANK_CODES`."""

    def state(chosen: RankState) -> str:
        return f"{dedup_exporters(select(RANK_STATE, scope, state=chosen), scope, *labels)} == 1"

    order = (RankState.CLOSED, RankState.SUSPECT)
    return first_of(*(constant(state(s), RANK_CODES[s]) for s in order))


def or_nobody(states: str, scope: Scope) -> str:
    """States of devices, and `NOBODY` for each run of the range in which no device has one."""
    return f"{states} or ({present(scope)} + {NOBODY} unless on ({scope.labels()}) ({states}))"


def evidence(scope: Scope, result: str, *labels: str) -> str:
    """Comparisons of suspects: ``mismatches`` or ``comparisons``, per check."""
    selector = select(RANK_EVIDENCE, scope, result=result)
    return dedup_exporters(last(selector, HELD), scope, *labels)


def last_finding(scope: Scope, *labels: str) -> str:
    """The step at which each suspect was last named."""
    return dedup_exporters(last(select(RANK_LAST_FINDING_STEP, scope), HELD), scope, *labels)


def wrong_in(scope: Scope, *labels: str) -> str:
    """In how many of how many comparisons each suspect was wrong: the label `wrong_in`."""

    def counted(result: str) -> str:
        selector = last(select(RANK_EVIDENCE, scope, result=result), HELD)
        by = scope.labels(*labels)
        return f'count_values by ({by}) ("{result}", {dedup_exporters(selector, scope, *labels)})'

    both = (
        f"{counted('mismatches')} * on ({scope.labels(*labels)}) "
        f"group_left (comparisons) {counted('comparisons')}"
    )
    text = f'label_join({both}, "wrong_in", " of ", "mismatches", "comparisons")'
    return dedup_exporters(text, scope, *labels, "wrong_in")


def operators(scope: Scope) -> str:
    """The operation in which each suspect computed wrongly, where it is known: `operator`."""
    known = select(SUSPECT_INFO, scope)
    moments = f"max_over_time((last_over_time({known}[{_CLOCK}]) * 0 + time())[{HELD.text}:1h])"
    device = scope.labels(*DEVICE)
    return f"topk by ({device}) (1, {dedup_exporters(moments, scope, *DEVICE, 'operator')}) * 0 + 1"


def highest(metric: Metric, scope: Scope) -> str:
    """The highest value in the range, over all segments."""
    return dedup_exporters(f"max_over_time({select(metric, scope)}[{RANGE.text}])", scope)


@dataclass(frozen=True, slots=True)
class Told:
    """Which text of an info metric is meant: the one whose step a gauge has.

    Attributes:
        by: Labels of gauge and text, besides those of the run.
        step: Label of the text that holds the step.
        text: Label that holds the text.
    """

    by: tuple[str, ...]
    step: str
    text: str


def told_at(info: str, gauge: str, scope: Scope, told: Told) -> str:
    """The text of an info metric at the step that a gauge has, the labels `step` and `text`.

    Earlier texts are in the same window; the gauge says which one holds, also after the end.
    """
    by = scope.labels(*told.by)
    step = f'count_values by ({by}) ("{told.step}", {gauge})'
    texts = dedup_exporters(info, scope, *told.by, told.step, told.text)
    return f"topk by ({by}) (1, {texts} and on ({by}, {told.step}) {step})"


def checkpoint(scope: Scope, window: Window = RANGE) -> str:
    """The last good checkpoint, as the labels `step` and `path`."""
    step = dedup_exporters(newest(select(LAST_GOOD_CHECKPOINT_STEP, scope), scope, window), scope)
    info = newest(select(CHECKPOINT_INFO, scope), scope, window)
    return told_at(info, step, scope, Told(by=(), step="step", text="path"))


def ranks_suspect(scope: Scope) -> str:
    """How many devices of each run somebody must act on."""
    return f"count by ({scope.labels()}) ({open_suspects(scope, HELD, *DEVICE)})"


def gpus_by_runs(scope: Scope) -> str:
    """In how many runs each GPU was suspect."""
    state = select(RANK_STATE, scope, state=RankState.SUSPECT)
    labels = ("suspect_node", "suspect_gpu")
    ever = dedup_exporters(f"max_over_time({state}[{RANGE.text}])", scope, *labels)
    return f"count by ({', '.join(labels)}) ({ever} == 1)"


def strikes(scope: Scope, *labels: str) -> str:
    """One-off mismatches per device."""
    return dedup_exporters(last(select(RANK_STRIKES, scope)), scope, *labels)


def skipped_updates(scope: Scope) -> str:
    """Updates skipped by the guard in the range, those of the loss scaler not counted."""
    return summed(total(select(SKIPPED, scope, reason=SKIPS), scope, RANGE, "reason"), scope)


def checkpoints(scope: Scope, result: CheckpointResult) -> str:
    """Checkpoints that came to one result in the range."""
    chosen = select(CHECKPOINTS, scope, result=result)
    return summed(total(chosen, scope, RANGE, "reason"), scope)


def unnamed_findings(scope: Scope) -> str:
    """Verdicts in the range that say something is wrong and name nobody."""
    chosen = select(VERDICTS, scope, outcome=UNNAMED, cause=NO_SOFTWARE)
    return summed(total(chosen, scope, RANGE, "check", "outcome"), scope)


def counted(metric: Metric, scope: Scope, outcomes: tuple[Outcome, ...] = ()) -> str:
    """The selector of a counter; of verdicts with some outcomes, if any are given."""
    return select(metric, scope, outcome=outcomes) if outcomes else select(metric, scope)


def bars(metric: Metric, scope: Scope, *labels: str, outcomes: tuple[Outcome, ...] = ()) -> str:
    """Events of a counter per interval, one bar of height one each."""
    return per_interval(counted(metric, scope, outcomes), scope, *labels)


def nothing_happened(metric: Metric, scope: Scope, outcomes: tuple[Outcome, ...] = ()) -> str:
    """0 for each run in whose whole range a counter counted nothing."""
    whole = total(counted(metric, scope, outcomes), scope, WHOLE_RANGE)
    return (
        f"{dedup_exporters(select(GUARD_STATE, scope), scope)} * 0 "
        f"unless on ({scope.labels()}) ({whole} > 0)"
    )


def run_labels(scope: Scope, *labels: str) -> str:
    """Configurations and links of each run in the range, as labels."""
    return dedup_exporters(last(select(RUN_INFO, scope)), scope, *labels)


def events(scope: Scope, *labels: str) -> str:
    """The last findings of each run, as labels."""
    return dedup_exporters(newest(select(EVENT_INFO, scope), scope), scope, *labels)


def overhead_ratio(scope: Scope, window: str) -> str:
    """Seconds in the guard per second of training step."""
    guarded = summed(rate(select(OVERHEAD_TIME, scope), scope, window, "check"), scope)
    steps = summed(rate(select(STEP_TIME, scope), scope, window, "kind"), scope)
    return f"{guarded} / ({steps} > 0)"


def overhead_so_far(scope: Scope) -> str:
    """The guard's share of step time over the life of the newest process; short runs have one."""
    guarded = newest(select(OVERHEAD_TIME, scope), scope)
    steps = newest(select(STEP_TIME, scope), scope)
    return (
        f"{summed(dedup_exporters(guarded, scope, 'check'), scope)} / "
        f"({summed(dedup_exporters(steps, scope, 'kind'), scope)} > 0)"
    )
