# SPDX-License-Identifier: Apache-2.0
"""How the exporter itself is."""

from __future__ import annotations

from gpulock_exporter.metrics.families import Metric, gauge, labels
from gpulock_exporter.state.snapshot import ExporterHealth

NVML_UP = gauge("nvml_up", "Whether the driver answers: its values are fresh.")
ABANDONED = gauge(
    "nvml_workers_abandoned", "Workers that hang in the driver and cannot even be killed."
)
SAMPLED = gauge("sample_timestamp_seconds", "When the driver last answered.")
SUCCESS = gauge("collector_success", "Whether a part of the last sample could be had.")
DURATION = gauge("collector_duration_seconds", "How long a part of the last sample took.")
RELOADED = gauge(
    "config_last_reload_successful", "Whether the web configuration that is there is in force."
)
BUILD = gauge("exporter_build_info", "Version of the exporter; always 1.")


def collect_health_families(health: ExporterHealth) -> list[Metric]:
    """Return the families of the exporter itself."""
    success, duration = Metric(SUCCESS), Metric(DURATION)
    for name, (seconds, fault) in health.collectors.items():
        key = labels([("collector", name)])
        success.values[key] = int(not fault)
        if seconds is not None:
            duration.values[key] = seconds
    return [
        Metric(NVML_UP, {"": int(health.nvml_up)}),
        Metric(ABANDONED, {"": health.abandoned}),
        Metric(SAMPLED, {} if health.sampled is None else {"": health.sampled}),
        success,
        duration,
        Metric(RELOADED, {} if health.reloaded is None else {"": int(health.reloaded)}),
        Metric(BUILD, {labels([("version", health.version)]): 1}),
    ]
