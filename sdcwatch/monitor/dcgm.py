"""Metrics of NVIDIA's dcgm-exporter that stand beside the verdicts, where they exist.

Names are those of its default counters file; tests hold them against a committed scrape. Its label
`UUID` is our `gpu`, so a dashboard can ask for the same device.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcwatch.monitor.promql import variable_matcher


@dataclass(frozen=True, slots=True)
class DeviceMetric:
    """One metric of dcgm-exporter.

    Attributes:
        name: Its name in Prometheus.
        title: What people read.
        unit: Unit id of Grafana.
        counter: It only grows.
    """

    name: str
    title: str
    unit: str
    counter: bool = False

    def query(self) -> str:
        """Its series of the chosen GPUs, one each, however often they are scraped."""
        selector = f"{self.name}{{{variable_matcher('gpu', label='UUID')}}}"
        value = f"increase({selector}[$__rate_interval])" if self.counter else selector
        return f"max by (Hostname, gpu, UUID) ({value})"


TEMPERATURE = DeviceMetric("DCGM_FI_DEV_GPU_TEMP", "core", "celsius")
MEMORY_TEMPERATURE = DeviceMetric("DCGM_FI_DEV_MEMORY_TEMP", "memory", "celsius")
POWER = DeviceMetric("DCGM_FI_DEV_POWER_USAGE", "power", "watt")
SM_CLOCK = DeviceMetric("DCGM_FI_DEV_SM_CLOCK", "SM", "rotmhz")
MEMORY_CLOCK = DeviceMetric("DCGM_FI_DEV_MEM_CLOCK", "memory", "rotmhz")
XID = DeviceMetric("DCGM_FI_DEV_XID_ERRORS", "last XID", "none")
REMAPPED_BAD = DeviceMetric(
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "rows remapped, uncorrectable", "none", counter=True
)
REMAPPED_GOOD = DeviceMetric(
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "rows remapped, correctable", "none", counter=True
)
REMAP_FAILED = DeviceMetric("DCGM_FI_DEV_ROW_REMAP_FAILURE", "row remapping failed", "none")

DEVICE_METRICS = (
    TEMPERATURE,
    MEMORY_TEMPERATURE,
    POWER,
    SM_CLOCK,
    MEMORY_CLOCK,
    XID,
    REMAPPED_BAD,
    REMAPPED_GOOD,
    REMAP_FAILED,
)
