"""What a dashboard answers about runs and ranks, as PromQL; one number or label per answer."""

from __future__ import annotations

from sdcwatch.core.catalog import Metric
from sdcwatch.core.records import CheckpointResult, Coverage, GuardState, Outcome, RankState
from sdcwatch.monitor.alerts import OPEN, SKIPS, UNNAMED, open_suspects
from sdcwatch.monitor.promql import (
    CHECKPOINTS,
    COVERAGE,
    GUARD_STATE,
    LAST_CLEAN_AUDIT_STEP,
    LAST_EVENT_STEP,
    RANGE,
    RANK_EVIDENCE,
    RANK_STATE,
    RANK_STRIKES,
    RUN_INFO,
    SKIPPED,
    VERDICTS,
    Scope,
    constant,
    fact,
    first_of,
    last,
    newest,
    select,
    summed,
    total,
)
from sdcwatch.monitor.theme import GUARD_CODES, RANK_CODES, VerdictCode

WHO = ("suspect_rank", "suspect_node", "suspect_gpu")
FINDINGS = tuple(o for o in Outcome if o is not Outcome.PASS)


def latest(metric: Metric, scope: Scope) -> str:
    """The last value of a gauge per run, also after the run ended."""
    return fact(last(select(metric, scope)), scope)


def current(metric: Metric, scope: Scope) -> str:
    """The last value of a gauge of the process that started last."""
    return fact(newest(select(metric, scope), scope), scope)


def since(time: str) -> str:
    """Seconds since a unix time; nothing while it is 0."""
    return f"time() - ({time} > 0)"


def age(metric: Metric, scope: Scope) -> str:
    """Seconds since a unix time of the process that started last."""
    return since(current(metric, scope))


def word(metric: Metric, label: str, scope: Scope) -> str:
    """The value of a one-hot gauge or of the info metric, as the label of a series."""
    return f"{fact(newest(select(metric, scope), scope), scope, label)} == 1"


def verdict_code(scope: Scope) -> str:
    """Each run in one number, worst first; never clean while nothing was checked."""
    suspects = fact(f"({open_suspects(scope, RANGE, 'suspect_rank', 'suspect_gpu')})", scope)
    tainted = newest(select(GUARD_STATE, scope, state=GuardState.TAINTED), scope)
    failed = total(
        select(VERDICTS, scope, check="fingerprint", outcome=FINDINGS), scope, RANGE, "outcome"
    )
    unnamed = total(select(VERDICTS, scope, outcome=UNNAMED), scope, RANGE, "outcome")
    coverage = {
        c: f"{fact(newest(select(COVERAGE, scope, coverage=c), scope), scope)} == 1"
        for c in (Coverage.OFF, Coverage.OUTPUTS_ONLY)
    }
    unaudited = f"{current(LAST_CLEAN_AUDIT_STEP, scope)} == 0"
    everything = current(LAST_CLEAN_AUDIT_STEP, scope)
    return first_of(
        constant(suspects, VerdictCode.SUSPECT),
        constant(f"{fact(tainted, scope)} == 1", VerdictCode.TAINTED),
        constant(f"{summed(failed, scope)} > 0", VerdictCode.TAINTED),
        constant(f"{summed(unnamed, scope)} > 0", VerdictCode.NO_NAME),
        constant(coverage[Coverage.OFF], VerdictCode.NOT_CHECKED),
        constant(unaudited, VerdictCode.NOT_CHECKED),
        constant(coverage[Coverage.OUTPUTS_ONLY], VerdictCode.OUTPUTS_ONLY),
        constant(everything, VerdictCode.CLEAN),
    )


def guard_code(scope: Scope, *, held: bool = False) -> str:
    """The state of the guard as a number.

    Args:
        scope: The scope.
        held: The last state within the range instead of the state at each moment.
    """

    def state(chosen: GuardState) -> str:
        selector = select(GUARD_STATE, scope, state=chosen)
        return f"{fact(newest(selector, scope) if held else selector, scope)} == 1"

    return first_of(*(constant(state(s), code) for s, code in GUARD_CODES.items()))


def rank_code(scope: Scope, *labels: str, held: bool = False) -> str:
    """The state of ranks that have one, as a number.

    Args:
        scope: The scope.
        *labels: Beside those of the run.
        held: The last state within the range instead of the state at each moment.
    """

    def state(chosen: RankState) -> str:
        selector = select(RANK_STATE, scope, state=chosen)
        return f"{fact(last(selector) if held else selector, scope, *labels)} == 1"

    order = (RankState.CLOSED, RankState.SUSPECT)
    return first_of(*(constant(state(s), RANK_CODES[s]) for s in order))


def evidence(scope: Scope, result: str, *labels: str) -> str:
    """Comparisons of suspects: ``mismatches`` or ``comparisons``, per check."""
    selector = select(RANK_EVIDENCE, scope, result=result)
    return fact(last(selector), scope, *labels, "check")


def beside_evidence(scope: Scope, expression: str, on: str, *labels: str) -> str:
    """Another fact about the same rows as `evidence`, so that a table can merge them.

    Args:
        scope: The scope.
        expression: One value per `on`.
        on: Labels of the expression.
        *labels: Labels of the rows, besides `check`.
    """
    return f"{evidence(scope, 'mismatches', *labels)} * 0 + on ({on}) group_left () ({expression})"


def highest(metric: Metric, scope: Scope, *labels: str) -> str:
    """The highest value in the range: a resumed process starts from 0 and forgets."""
    return fact(f"max_over_time({select(metric, scope)}[{RANGE.text}])", scope, *labels)


def last_step_of_check(scope: Scope) -> str:
    """The step of the last verdict of a check that was not a pass."""
    return highest(LAST_EVENT_STEP, scope, "check")


def ranks_suspect(scope: Scope) -> str:
    """How many ranks of each run somebody must act on."""
    return f"count by ({scope.labels()}) ({open_suspects(scope, RANGE, *WHO)})"


def gpus_by_runs(scope: Scope) -> str:
    """In how many runs each GPU was suspect."""
    ever = fact(
        f"max_over_time({select(RANK_STATE, scope, state=OPEN)}[$__range])", scope, *WHO[1:]
    )
    return f"count by (node, gpu) ({ever} == 1)"


def strikes(scope: Scope, *labels: str) -> str:
    """One-off mismatches per rank."""
    return fact(last(select(RANK_STRIKES, scope)), scope, *labels)


def skipped_updates(scope: Scope) -> str:
    """Updates skipped by the guard in the range, those of the loss scaler not counted."""
    return summed(total(select(SKIPPED, scope, reason=SKIPS), scope, RANGE, "reason"), scope)


def checkpoints(scope: Scope, result: CheckpointResult) -> str:
    """Checkpoints that came to one result in the range."""
    chosen = select(CHECKPOINTS, scope, result=result)
    return summed(total(chosen, scope, RANGE, "reason"), scope)


def unnamed_findings(scope: Scope) -> str:
    """Verdicts in the range that say something is wrong and name nobody."""
    chosen = select(VERDICTS, scope, outcome=UNNAMED)
    return summed(total(chosen, scope, RANGE, "check", "outcome"), scope)


def run_links(scope: Scope, *labels: str) -> str:
    """Configuration and links of each run, as labels."""
    return fact(newest(select(RUN_INFO, scope), scope), scope, *labels)
