"""The OTLP/HTTP push of metrics. Everything about it comes from the standard OTEL_* variables.

Metrics are cumulative, so a push that fails loses no event; it is counted all the same, because
nobody sees what is not pushed.
"""

from __future__ import annotations

import os
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from sdcwatch.sinks.base import SinkCounts, public_url
from sdcwatch.sinks.otel_internals import StaysDeadInChild, endpoint_of


class _OwnProcessExporter(OTLPMetricExporter):
    """Exports in the process that made it and nowhere else; counts the pushes that fail.

    A forked DataLoader worker inherits the counters. Pushed from there they would be the parent's
    events once more, under a new identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sdcwatch_pid = os.getpid()
        self.counts = SinkCounts("otel")
        self.busy = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        if os.getpid() != self._sdcwatch_pid:
            return MetricExportResult.SUCCESS
        self.busy = True
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.busy = False
        if result is not MetricExportResult.SUCCESS:
            self.counts.dropped["error"] += 1
        return result


class OtlpReader(StaysDeadInChild):
    """Pushes at an interval, and once more at the end.

    Attributes:
        where: Where it pushes, fit for a console.
    """

    def __init__(self) -> None:
        self._own_exporter = _OwnProcessExporter()
        self.where = public_url(endpoint_of(self._own_exporter))
        super().__init__(self._own_exporter)

    def attach(self, counts: SinkCounts) -> None:
        """Count failed pushes there."""
        self._own_exporter.counts = counts

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Push once more and stop; a push that is not done in time is counted as lost."""
        super().shutdown(timeout_millis, **kwargs)
        if self._own_exporter.busy:
            self._own_exporter.counts.dropped["timeout"] += 1
