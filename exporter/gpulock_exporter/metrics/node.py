# SPDX-License-Identifier: Apache-2.0
"""The families of the node and of the exporter itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from gpulock_exporter.metrics.families import family_name, make_family
from gpulock_exporter.metrics.labels import known_labels
from gpulock_exporter.state.snapshot import ExporterHealth

REAPED_KEY, CLAIMS_KEY = "reaped_", "claims_"  # of gpulock.store.event_log
TIMEOUTS_KEY, WAITED_KEY = "lock_timeouts", "lock_wait_seconds"
DROPPED_KEY = "history_dropped"
LOCK_TIMEOUT = "lock_timeout"  # the result of a claim that never got in


def one_value(name: str, meaning: str, value: float | None) -> Metric:
    """Return a family of the node as a whole, without a sample where its value is not known."""
    return labelled_values(name, meaning, "", {} if value is None else {"": value})


def labelled_values(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a family of one label, with its values by that."""
    family = make_family(name, meaning)
    for of, value in values.items():
        family.add_sample(family_name(family), known_labels([(label, of)]), value)
    return family


def collect_node_families(
    counters: Mapping[str, float],
    states: Mapping[str, float] | None,
    reconciled: float | None,
    waiting: int,
) -> Iterator[Metric]:
    """Yield the families of the node: its devices by state, and what the hooks have counted.

    `reconciled` is when a reconcile last judged all locks, epoch seconds; `waiting` are the calls
    in the queue.
    """
    reaped: dict[str, float] = {}
    claims: dict[str, float] = {}
    for key, value in counters.items():
        if key.startswith(REAPED_KEY):
            reaped[key.removeprefix(REAPED_KEY)] = value
        elif key.startswith(CLAIMS_KEY):
            claims[key.removeprefix(CLAIMS_KEY)] = value
        elif key == TIMEOUTS_KEY:
            claims[LOCK_TIMEOUT] = value
    if counters:  # `increase` needs a value before the first claim that times out
        claims.setdefault(LOCK_TIMEOUT, 0.0)
    yield labelled_values(
        "gpus",
        "Devices in each state; together as many as are expected.",
        "state",
        states or {},
    )
    yield one_value(
        "reconcile_timestamp_seconds",
        "When the owners of all locks were last judged.",
        reconciled,
    )
    yield labelled_values(
        "locks_reaped_total",
        "Locks that were freed because their owner was proven dead.",
        "proof",
        reaped,
    )
    yield labelled_values(
        "claims_total", "Claims by how they ended, in this boot.", "result", claims
    )
    yield one_value("waiting", "Calls that wait in the queue of users' claims.", waiting)
    yield one_value(
        "lock_wait_seconds_total",
        "Time that claims waited for the gate, in this boot.",
        counters.get(WAITED_KEY),
    )
    yield one_value(
        "history_dropped_total",
        "Finished claims that were dropped before their line in the history, in this boot.",
        # 0 from the first claim on: `increase` needs a value before the first loss
        counters.get(DROPPED_KEY, 0.0 if counters else None),
    )


def collect_switch_errors(errors: Mapping[tuple[str, int], tuple[int, float]]) -> Metric:
    """Return the family of the SXids of NVSwitches."""
    family = make_family("nvswitch_errors_total", "SXid errors of an NVSwitch, in this boot.")
    for (bus, number), (times, _) in errors.items():
        labels = known_labels([("pci_bus_id", bus), ("sxid", str(number))])
        family.add_sample(family_name(family), labels, times)
    return family


def collect_health_families(health: ExporterHealth) -> Iterator[Metric]:
    """Yield the families of the exporter itself."""
    told = health.collectors.items()
    yield one_value("nvml_up", "Whether the driver answers: its values are fresh.", health.nvml_up)
    yield one_value(
        "nvml_workers_abandoned",
        "Workers that hang in the driver and cannot be killed.",
        health.abandoned,
    )
    yield one_value("sample_timestamp_seconds", "When the driver last answered.", health.sampled)
    yield labelled_values(
        "collector_success",
        "Whether a part of the last sample could be read.",
        "collector",
        {name: not fault for name, (_, fault) in told},
    )
    yield labelled_values(
        "collector_duration_seconds",
        "How long a part of the last sample took.",
        "collector",
        {name: seconds for name, (seconds, _) in told if seconds is not None},
    )
    yield one_value(
        "config_last_reload_successful",
        "Whether the web configuration that is there is in force.",
        health.reloaded,
    )
    yield labelled_values(
        "exporter_build_info", "Version of the exporter; always 1.", "version", {health.version: 1}
    )
