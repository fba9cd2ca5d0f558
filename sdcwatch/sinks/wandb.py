"""Records as W&B history, a table of events, alerts and a summary.

In a run that the script has made, the script's own rows come first: this sink logs with
``commit=False`` only and never with ``step=``, so that no row of the host is lost. Its rows then
ride on the host's and may overwrite each other, which costs nothing: history carries running
totals, and each event is a row of an incremental table, whose increments are files of their own.
A run that we were asked to make commits each row.

Every call into wandb happens on the sink's worker thread.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

try:
    import wandb
except ImportError as error:
    msg = "Expected wandb to be installed. Install it with: pip install 'sdcwatch[wandb]'"
    raise ImportError(msg) from error

from sdcwatch.core.outcomes import is_grave
from sdcwatch.core.records import Outcome, Progress, Record, RunFinished, Verdict
from sdcwatch.core.summary import RunSummary
from sdcwatch.sinks.base import SummarySink, without_user_info
from sdcwatch.sinks.wandb_rows import (
    AXIS,
    COLUMNS,
    HISTORY_KEYS,
    TABLE,
    alert_text,
    alert_title,
    event_row,
    history_row,
    incident,
    summary_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SUSPECT_TAG = "sdc-suspect"
TABLE_SECONDS = 10.0  # each table log uploads an increment; a run may fail at every step
ALERT_SECONDS = 1  # 0 reads as unset, and unset is a minute


class WandbSink(SummarySink):
    """Reports one run to W&B.

    Args:
        run: The W&B run, or a function that makes one when the first record comes.
        links: ``dashboard``: URL of the Grafana dashboard.
        report: The HTML report, logged as an artifact if it is there at the end.

    Attributes:
        lines: One sentence about where it reports.
        links: ``wandb``: URL of the run, if it has one.
    """

    name = "wandb"

    def __init__(
        self,
        run: Any,
        *,
        links: Mapping[str, str] | None = None,
        report: Path | None = None,
    ) -> None:
        super().__init__()
        self._make: Callable[[], Any] | None = run if not hasattr(run, "log") else None
        self._run: Any = None if self._make else run
        self._dashboard = without_user_info((links or {}).get("dashboard", ""))
        self._report = report
        self._summary = RunSummary()
        self._told: dict[str, object] = {}
        self._table: Any = None
        self._rows_waiting = 0
        self._table_due = 0.0
        self._incidents: set[tuple[str, str, tuple[int, ...]]] = set()
        self._defined = False
        self._gave_up = False
        url = getattr(self._run, "url", None)
        self.links = {"wandb": without_user_info(url)} if isinstance(url, str) and url else {}
        where = self.links.get("wandb") or "a run of its own"
        if self._run is not None and not self.links:
            where = f"the offline run in {getattr(self._run, 'dir', '')}"
        self.lines = (f"Events and summary go to W&B: {where}.",)

    @classmethod
    def created(
        cls,
        arguments: Mapping[str, Any],
        *,
        close_seconds: float,
        links: Mapping[str, str] | None = None,
        report: Path | None = None,
    ) -> WandbSink:
        """A sink with a run of its own, made by ``wandb.init(**arguments)`` and finished by it."""

        def make() -> Any:
            # W&B waits for its server without limit at the end unless told otherwise.
            settings = wandb.Settings(finish_timeout=max(1.0, close_seconds))
            return wandb.init(**{"settings": settings, **arguments})

        return cls(make, links=links, report=report)

    def receive(self, record: Record, summary: RunSummary) -> None:
        """Report one record.

        Raises:
            Exception: The first of the calls into wandb that failed; all of them were tried.
        """
        self._summary = summary
        self._begin()
        failures = _Failures()
        # The word and the suspects first: a slow backend may not let us come to the rest.
        failures.attempt(self._summarise)
        if isinstance(record, Verdict) and record.outcome is not Outcome.PASS:
            failures.attempt(lambda: self._event(record))
        if isinstance(record, Progress | Verdict | RunFinished):
            failures.attempt(self._log)
        failures.raise_first()

    def close(self, timeout_seconds: float) -> None:
        """Log the last totals and the report; finish the run if it is ours."""
        failures = _Failures()
        if self._run is not None:
            failures.attempt(self._summarise)
            failures.attempt(self._log)
            failures.attempt(self._log_table)
            if (report := self._report) is not None and report.is_file():
                failures.attempt(lambda: log_report(self._run, report))
            if self._make is not None:
                # By itself it knows of no code: this is before the process ends with one.
                code = self._summary.exit_code
                failures.attempt(lambda: self._run.finish(exit_code=code))
        failures.raise_first()

    def _begin(self) -> None:
        if self._defined:
            return
        if self._run is None:
            if self._make is None or self._gave_up:
                msg = "Expected a W&B run, but wandb.init() failed before. Look at its own log."
                raise RuntimeError(msg)
            self._gave_up = True  # one attempt: it may take W&B 90 s to give up
            self._run = self._make()
        self._defined = True
        self._table = wandb.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")
        self._run.define_metric(AXIS, hidden=True)
        # One by one: a glob of ours would compete with the "*" of Lightning and transformers.
        for key in HISTORY_KEYS:
            self._run.define_metric(key, step_metric=AXIS)

    def _log(self) -> None:
        row: dict[str, Any] = dict(history_row(self._summary))
        self._run.log(row, commit=self._make is not None)
        if self._rows_waiting and time.monotonic() >= self._table_due:
            self._log_table()

    def _log_table(self) -> None:
        """Upload what the table has gained: slow, so nothing waits behind it."""
        if self._rows_waiting:
            self._run.log({AXIS: self._summary.last_step, TABLE: self._table}, commit=False)
            self._rows_waiting = 0
            self._table_due = time.monotonic() + TABLE_SECONDS

    def _event(self, verdict: Verdict) -> None:
        self._table.add_data(*event_row(verdict))
        self._rows_waiting += 1
        key = incident(verdict)
        if key is not None and key not in self._incidents:
            self._incidents.add(key)
            self._run.alert(
                title=alert_title(verdict),
                text=alert_text(verdict, self._dashboard),
                level="ERROR" if is_grave(verdict) else "WARN",
                wait_duration=ALERT_SECONDS,
            )
        if verdict.outcome is Outcome.SUSPECT and SUSPECT_TAG not in (self._run.tags or ()):
            self._run.tags = (*(self._run.tags or ()), SUSPECT_TAG)

    def _summarise(self) -> None:
        values = summary_values(self._summary, self._dashboard)
        changed = {k: v for k, v in values.items() if self._told.get(k, _NEVER) != v}
        if changed:
            self._run.summary.update(changed)
            self._told.update(changed)


_NEVER = object()


class _Failures:
    """Tries every call and keeps the first failure."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._first = self._first or error

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first


def log_report(run: Any, path: Path) -> None:
    """Log the HTML report of a run as an artifact of that W&B run."""
    artifact = wandb.Artifact(f"sdcwatch-report-{run.id}", type="sdcwatch-report")
    artifact.add_file(str(path))
    run.log_artifact(artifact)


def publish_report(
    path: Path, arguments: Mapping[str, Any], *, finish_seconds: float = 10.0
) -> bool:
    """Log the report through a short W&B run of its own, once the run it is about has ended.

    Args:
        path: The HTML report.
        arguments: For ``wandb.init``; pass the ``group`` of the run it is about.
        finish_seconds: How long to wait for the server.

    Returns:
        Whether W&B took it; a failure is no exception, because the run is over and was fine.
    """
    settings = wandb.Settings(finish_timeout=finish_seconds, init_timeout=finish_seconds)
    try:
        run = wandb.init(**{"job_type": "sdcwatch-report", "settings": settings, **arguments})
        log_report(run, path)
        run.finish()
    except Exception:
        return False
    return True


def active_run() -> Any | None:
    """The run of ``wandb.init`` in this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def active_run_id() -> str | None:
    """Its id, or None: a name for the guarded run where neither config nor launcher has one."""
    run_id = getattr(active_run(), "id", None)
    return run_id if isinstance(run_id, str) and run_id else None
