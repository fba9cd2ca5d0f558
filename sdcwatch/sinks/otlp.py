"""The OTLP/HTTP push of metrics. Everything about it comes from the standard OTEL_* variables."""

from __future__ import annotations

import os
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from sdcwatch.sinks.base import public_url


class _OwnProcessExporter(OTLPMetricExporter):
    """Exports in the process that made it and nowhere else.

    A forked DataLoader worker inherits the counters. Pushed from there they would be the parent's
    events once more, under a new identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sdcwatch_pid = os.getpid()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        if os.getpid() != self._sdcwatch_pid:
            return MetricExportResult.SUCCESS
        return super().export(metrics_data, timeout_millis, **kwargs)


class _OwnProcessReader(PeriodicExportingMetricReader):
    """A periodic reader that stays dead in a forked child.

    The SDK's starts a new thread there, which blocks for ever on a lock that was held by an export
    during the fork.
    """

    def _at_fork_reinit(self) -> None:
        """Start nothing."""


def otlp_reader() -> tuple[PeriodicExportingMetricReader, str]:
    """A reader that pushes, and where to, without user info.

    Raises:
        ValueError: A standard variable cannot be read.
    """
    exporter = _OwnProcessExporter()
    return _OwnProcessReader(exporter), public_url(exporter._endpoint)
