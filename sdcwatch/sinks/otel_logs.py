"""Non-pass verdicts as OpenTelemetry log records. Experimental: the logs API is still private.

A log record carries what a metric must not: tensor names, steps, the sentence for a person. The
application's logger provider is used if it has set
one; else one of our own pushes over OTLP/HTTP, as the standard variables say.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sdcwatch.core.outcomes import is_grave
from sdcwatch.core.records import Outcome, Record, Verdict, encode
from sdcwatch.sinks.base import BaseSink, SinkCounts, public_url
from sdcwatch.sinks.otel_internals import (
    ApiLoggerProvider,
    BatchLogRecordProcessor,
    LoggerProvider,
    LogRecordExportResult,
    OTLPLogExporter,
    ReadableLogRecord,
    SeverityNumber,
    endpoint_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.resources import Resource

EVENT_NAME = "sdcwatch.verdict"
_TENSORS = 10


class _OwnProcessExporter(OTLPLogExporter):
    """Exports in the process that made it and nowhere else; counts what does not arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._sdcwatch_pid = os.getpid()
        self.counts = SinkCounts("otel_logs")

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        if os.getpid() != self._sdcwatch_pid:
            return LogRecordExportResult.SUCCESS
        result = super().export(batch)
        if result is not LogRecordExportResult.SUCCESS:
            self.counts.dropped["error"] += len(batch)
        return result


class OtelLogSink(BaseSink):
    """Sends each non-pass verdict as one log record.

    Attributes:
        lines: One sentence about where they go.
    """

    name = "otel_logs"

    def __init__(
        self,
        provider: ApiLoggerProvider,
        labels: Mapping[str, str],
        version: str,
        lines: tuple[str, ...] = (),
    ) -> None:
        self.lines = lines
        self._labels = dict(labels)
        self._logger = provider.get_logger("sdcwatch", version)
        self._own: LoggerProvider | None = None
        self._exporter: _OwnProcessExporter | None = None

    @classmethod
    def over_otlp(cls, resource: Resource, labels: Mapping[str, str], version: str) -> OtelLogSink:
        """A sink with a provider of its own that pushes over OTLP/HTTP."""
        provider = LoggerProvider(resource, shutdown_on_exit=False)
        exporter = _OwnProcessExporter()
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        line = f"Verdicts are pushed as log records to {public_url(endpoint_of(exporter))}."
        sink = cls(provider, labels, version, (line,))
        sink._own, sink._exporter = provider, exporter
        return sink

    def attach(self, counts: SinkCounts) -> None:
        """Count log records that do not arrive as lost by this sink."""
        if self._exporter is not None:
            self._exporter.counts = counts

    def emit(self, record: Record) -> None:
        """Send one record if it is a verdict that is not a pass."""
        if not isinstance(record, Verdict) or record.outcome is Outcome.PASS:
            return
        self._logger.emit(
            timestamp=int(record.time * 1e9),
            severity_number=_severity(record),
            severity_text=_severity(record).name,
            body=record.reason,
            attributes={**self._labels, **_attributes(record)},
            event_name=EVENT_NAME,
        )

    def close(self, timeout_seconds: float) -> None:
        """Push what waits and let go; the dispatcher bounds how long that may take."""
        own, self._own = self._own, None
        if own is not None:
            own.shutdown()


def _severity(verdict: Verdict) -> SeverityNumber:
    return SeverityNumber.ERROR if is_grave(verdict) else SeverityNumber.WARN


def _attributes(verdict: Verdict) -> dict[str, Any]:
    tensors = [name for c in verdict.comparisons for name in c.tensors]
    tensors += [d.tensor for d in verdict.disagreements]
    tensors += [name for s in verdict.suspects for name in s.tensors]
    return {
        "sdcwatch.step": verdict.step,
        "sdcwatch.check": verdict.check.value,
        "sdcwatch.outcome": verdict.outcome.value,
        "sdcwatch.action": verdict.action.value,
        "sdcwatch.origin": verdict.origin.value,
        "sdcwatch.cause": verdict.cause.value,
        "sdcwatch.operator": verdict.operator,
        "sdcwatch.suspect.ranks": [s.rank for s in verdict.suspects],
        "sdcwatch.suspect.nodes": [s.node for s in verdict.suspects],
        "sdcwatch.suspect.gpus": [s.gpu for s in verdict.suspects],
        "sdcwatch.suspect.instances": [s.instance_id for s in verdict.suspects],
        "sdcwatch.ranks": list(verdict.ranks),
        "sdcwatch.tensors": list(dict.fromkeys(tensors))[:_TENSORS],
        "sdcwatch.record": encode(verdict),
    }
