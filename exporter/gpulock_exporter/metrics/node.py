# SPDX-License-Identifier: Apache-2.0
"""The families of the node and of the exporter itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from gpulock_exporter.metrics.families import make_family, node_family, node_value
from gpulock_exporter.metrics.labels import known_labels
from gpulock_exporter.state.snapshot import ExporterHealth, NodeSnapshot

REAPED_KEY, CLAIMS_KEY = "reaped_", "claims_"  # of gpulock.store.events
TIMEOUTS_KEY, WAITED_KEY = "lock_timeouts", "lock_wait_seconds"
DROPPED_KEY = "history_dropped"
LOCK_TIMEOUT = "lock_timeout"  # the result of a claim that never got in


def collect_node_families(snapshot: NodeSnapshot) -> Iterator[Metric]:
    """Yield the families of the node: its devices by state, and what the hooks have counted."""
    counters = snapshot.counters
    claims = counters_by_suffix(counters, CLAIMS_KEY)
    if counters:  # `increase` needs a value before the first claim that times out, or is lost
        claims[LOCK_TIMEOUT] = counters.get(TIMEOUTS_KEY, 0.0)
    yield node_family("gpus", "Devices in each state.", "state", snapshot.states or {})
    yield node_value(
        "reconcile_timestamp_seconds", "When all owners were last judged.", snapshot.reconciled
    )
    yield node_family(
        "locks_reaped_total",
        "Locks of owners that were proven dead.",
        "proof",
        counters_by_suffix(counters, REAPED_KEY),
    )
    yield node_family("claims_total", "Claims by how they ended, in this boot.", "result", claims)
    yield node_value("waiting", "Calls in the queue of users' claims.", len(snapshot.waiting))
    yield node_value(
        "lock_wait_seconds_total", "Time that claims waited for the gate.", counters.get(WAITED_KEY)
    )
    yield node_value(
        "history_dropped_total",
        "Finished claims that have no line in the history.",
        counters.get(DROPPED_KEY, 0.0 if counters else None),
    )
    yield make_family(
        "nvswitch_errors_total",
        "SXid errors of an NVSwitch, in this boot.",
        [
            (known_labels([("pci_bus_id", bus), ("sxid", str(number))]), times)
            for (bus, number), (times, _) in snapshot.switch_errors.items()
        ],
    )
    yield from collect_health_families(snapshot.health)


def counters_by_suffix(counters: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counters whose name begins with a prefix, by the rest of it."""
    return {
        name[len(prefix) :]: value for name, value in counters.items() if name.startswith(prefix)
    }


def collect_health_families(health: ExporterHealth) -> Iterator[Metric]:
    """Yield the families of the exporter itself."""
    yield node_value("nvml_up", "Whether the driver answers: its values are fresh.", health.nvml_up)
    yield node_value("nvml_workers_abandoned", "Workers that cannot be killed.", health.unkillable)
    yield node_value("sample_timestamp_seconds", "When the driver last answered.", health.sampled)
    yield node_family(
        "collector_success",
        "Whether a part of the last sample could be read.",
        "collector",
        {name: not fault for name, fault in sorted(health.collectors.items())},
    )
    yield node_family(
        "exporter_build_info", "Version of the exporter.", "version", {health.version: 1}
    )
