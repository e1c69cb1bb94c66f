# SPDX-License-Identifier: Apache-2.0
"""All families of a snapshot; of devices one table: what each is called, means, is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Optional

from prometheus_client.metrics_core import Metric

from gpulock.alloc import states
from gpulock.node.devices import SHARE
from gpulock_exporter.metrics.families import Several, collect_identity_families, collect_pair
from gpulock_exporter.metrics.labels import Labels, LabelUser, known_labels, owner_labels
from gpulock_exporter.metrics.node import collect_health_families, collect_node_families
from gpulock_exporter.state.snapshot import DeviceSnapshot, NodeSnapshot
from gpulock_exporter.telemetry import CLOCK_REASONS

Value = Callable[[DeviceSnapshot], Optional[float]]


def read_counter(name: str) -> Value:
    """Return what reads a counter of a device."""
    return lambda seen: seen.counters.get(name)


def read_counters(prefix: str, label: str) -> Several:
    """Return what reads the counters whose name begins with a prefix; the rest is a label."""
    return lambda seen: [({label: of}, value) for of, value in counters_with_prefix(seen, prefix)]


def read_gpm_ratio(name: str) -> Value:
    """Return what reads a GPM ratio of the last look."""
    return lambda seen: (seen.gpm or {}).get(name)


def lock_acquired_time(seen: DeviceSnapshot) -> float | None:
    """Return when a lock was taken, None where its record does not tell."""
    record = seen.owner
    return record.claimed_at if record and record.claimed_at > 0 else None


# name behind `gpu_` and `mig_`, meaning, value
SINGLE: tuple[tuple[str, str, Value], ...] = (
    (
        "locked",
        "Whether the {device} is locked.",
        lambda seen: None if seen.state is None else bool(seen.lock),
    ),
    (
        "lock_acquired_timestamp_seconds",
        "When the lock of the {device} was taken.",
        lock_acquired_time,
    ),
    (
        "lock_stale",
        "Whether the owner of the {device} is proven dead, by the last reconcile.",
        attrgetter("stale"),
    ),
    (
        "last_busy_timestamp_seconds",
        "When the {device} was last observed at work in this boot.",
        attrgetter("last_busy"),
    ),
    (
        "foreign_processes",
        "Processes on the {device} that are neither its owner's nor a service; "
        "absent where some cannot be seen.",
        attrgetter("foreign"),
    ),
    ("quarantined", "Whether the {device} is out of service.", attrgetter("quarantined")),
    (
        "missing",
        "Whether the {device} is expected but not there.",
        lambda seen: None if seen.state is None else seen.state == states.MISSING,
    ),
    (
        "responding",
        "Whether the driver answers for the {device}; "
        "0 while a call for it hangs, or the driver has lost it.",
        attrgetter("responding"),
    ),
    (
        "utilization_ratio",
        "Share of time in which the {device} worked, at the last sample.",
        attrgetter("utilization"),
    ),
    (
        "busy_seconds_total",
        "Time in which the {device} was observed at work.",
        read_counter("busy"),
    ),
    (
        "observed_seconds_total",
        "Time in which the {device} was observed.",
        read_counter("observed"),
    ),
    ("memory_used_bytes", "Memory in use on the {device}.", attrgetter("memory_used")),
    ("memory_total_bytes", "Memory of the {device}.", attrgetter("memory_total")),
    (
        "memory_utilization_ratio",
        "Share of time in which memory of the GPU was read or written.",
        attrgetter("memory_utilization"),
    ),
    ("power_watts", "Power draw of the board.", attrgetter("power")),
    (
        "energy_joules_total",
        "Energy that the board took in this boot.",
        read_counter("energy"),
    ),
    ("power_limit_watts", "Limit of the power draw, as set.", attrgetter("power_limit")),
    (
        "power_limit_enforced_watts",
        "Limit of the power draw that is enforced.",
        attrgetter("power_limit_enforced"),
    ),
    ("temperature_celsius", "Temperature of the GPU.", attrgetter("temperature")),
    (
        "memory_temperature_celsius",
        "Temperature of the GPU's memory.",
        attrgetter("memory_temperature"),
    ),
    ("fan_ratio", "Speed of the fan, as a share of its highest.", attrgetter("fan")),
    (
        "driver_answer_seconds",
        "Time that the driver took to answer for the GPU, at the last sample.",
        attrgetter("answer"),
    ),
    ("pcie_generation", "Generation of the PCIe link now.", attrgetter("pcie_generation")),
    (
        "pcie_generation_max",
        "Highest generation that GPU and slot can have.",
        attrgetter("pcie_generation_max"),
    ),
    ("pcie_width_lanes", "Lanes of the PCIe link now.", attrgetter("pcie_width")),
    (
        "pcie_width_max_lanes",
        "Most lanes that GPU and slot can have.",
        attrgetter("pcie_width_max"),
    ),
    ("pcie_replays_total", "Packets that the PCIe link sent again.", read_counter("pcie_replays")),
    ("nvlink_active_links", "NVLinks that are up.", attrgetter("nvlink_active")),
    (
        "fabric_state",
        "Whether the GPU has joined the NVLink fabric: 1 not started; 2 in progress; 3 done; "
        "4 done with an error; 5 done but unhealthy.",
        attrgetter("fabric"),
    ),
    ("sm_clock_hertz", "Clock of the multiprocessors.", attrgetter("sm_clock")),
    ("memory_clock_hertz", "Clock of the memory.", attrgetter("memory_clock")),
    (
        "remapped_rows_pending",
        "Whether rows of memory wait for a reset.",
        attrgetter("remap_pending"),
    ),
    (
        "remapped_rows_failure",
        "Whether a row of memory could not be remapped.",
        attrgetter("remap_failure"),
    ),
    (
        "recovery_action",
        "What the GPU needs: 0 nothing; 1 a reset; 2 a reboot of the node; "
        "3 that its peers are drained; 4 to be drained and reset; 5 that its IMEX domain is "
        "recovered; 6 a reset of its bus; 7 a reboot of the system.",
        attrgetter("recovery_action"),
    ),
    *(
        (f"{bus}_{way}_bytes_total", f"Bytes {done} over {of}.", read_counter(f"{bus}_{way}"))
        for bus, of in (("pcie", "PCIe"), ("nvlink", "all NVLinks"))
        for way, done in (("transmit", "sent"), ("receive", "received"))
    ),
    *(
        (f"{name}_ratio", f"{meaning}, by GPM.", read_gpm_ratio(name))
        for name, meaning in (
            ("sm_active", "Share of time in which a multiprocessor of the {device} was at work"),
            ("sm_occupancy", "Share of the warps of the {device} that were resident"),
            ("tensor_active", "Share of time in which tensor cores of the {device} worked"),
            ("dram_active", "Share of the memory bandwidth of the {device} that was used"),
        )
    ),
)


def active_reasons(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
    """Yield each reason for a lower clock, and whether it holds."""
    active = seen.clock_reasons
    if active is not None:
        for name in dict.fromkeys((*CLOCK_REASONS.values(), *active)):
            yield {"reason": name}, name in active


def counters_with_prefix(seen: DeviceSnapshot, prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the counters whose name begins with a prefix, without it."""
    for name, value in seen.counters.items():
        if name.startswith(prefix):
            yield name[len(prefix) :], value


def ecc_errors(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
    """Yield the errors of each type and place: `corrected.dram`."""
    for name, value in counters_with_prefix(seen, "ecc."):
        kind, _, place = name.partition(".")
        yield known_labels([("type", kind), ("location", place)]), value


SEVERAL: tuple[tuple[str, str, Several], ...] = (
    (
        "health",
        "Whether the GPU passed a check at gpulockd's last look at it.",
        lambda seen: [({"check": name}, not why) for name, why in seen.checks.items()],
    ),
    (
        "quarantine_info",
        "Why the {device} is out of service; always 1.",
        lambda seen: [({"cause": cause}, 1) for cause in seen.causes],
    ),
    ("clock_event_active", "Whether a reason lowers the clocks.", active_reasons),
    (
        "clock_event_seconds_total",
        "Time for which a reason lowered the clocks.",
        read_counters("reason.", "reason"),
    ),
    (
        "xid_errors_total",
        "XID errors by code, in this boot.",
        lambda seen: [({"xid": str(xid)}, count) for xid, (count, _) in seen.xids.items()],
    ),
    (
        "xid_last_timestamp_seconds",
        "When the last XID error of a code was.",
        lambda seen: [({"xid": str(xid)}, at) for xid, (_, at) in seen.xids.items()],
    ),
    (
        "ecc_errors_total",
        "Memory errors that were found, in this boot, by type and location.",
        ecc_errors,
    ),
    (
        "nvlink_errors_total",
        "Errors on all NVLinks, by kind.",
        read_counters("nvlink_error.", "kind"),
    ),
    (
        "remapped_rows",
        "Rows of memory that were remapped, by cause.",
        lambda seen: [({"cause": cause}, count) for cause, count in (seen.remapped or {}).items()],
    ),
)


def share_parts(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
    """Yield which part of its card each share is; nobody knows that of one that Slurm counts."""
    for name, record in seen.sharers.items():
        if record.places > 0:
            yield {"share": name.partition(SHARE)[2]}, 1 / record.places


def share_values(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    """Return a value of each share; of a claim of several places the first has its value."""
    return [({"share": name.partition(SHARE)[2]}, value) for name, value in values.items()]


SHARES: tuple[tuple[str, str, Several], ...] = (
    (
        "share_ratio",
        "Which part of the GPU a share is, by the places that its card had at the claim.",
        share_parts,
    ),
    (
        "share_places",
        "How many shares the GPU gives out, by SHARES.",
        lambda seen: () if seen.places is None else [({}, float(seen.places))],
    ),
    (
        "share_memory_used_bytes",
        "Memory in use by the processes of a share of the GPU.",
        lambda seen: share_values(seen.share_memory),
    ),
    (
        "share_utilization_ratio",
        "Share of time in which the processes of a share of the GPU worked, at the last sample.",
        lambda seen: share_values(seen.share_use),
    ),
    (
        "share_idle_seconds",
        "Observed time since the processes of a share of the GPU last worked.",
        lambda seen: share_values(seen.share_idle),
    ),
)


def collect_families(
    snapshot: NodeSnapshot, label_user: LabelUser = LabelUser.NAME
) -> Iterator[Metric]:
    """Yield all families, those without a value too; `label_user` says how users are named."""
    found = [
        (one, known_labels([("gpu", one.gpu_label), ("uuid", one.uuid)]))
        for one in snapshot.devices
    ]
    yield from collect_identity_families(found, snapshot.driver)
    yield from collect_pair(
        found,
        "lock_info",
        "Which job holds the {device}; 1 while it does.",
        lambda seen: lock_info_labels(seen, label_user),
    )
    yield from collect_pair(
        found,
        "share_info",
        "Which jobs share the GPU, each by its own lock; 1 while they do.",
        lambda seen: share_info_labels(seen, label_user),
    )
    for name, meaning, several in SHARES:
        yield from collect_pair(found, name, meaning, several)
    for name, meaning, value in SINGLE:
        yield from collect_pair(found, name, meaning, single_value(value))
    for name, meaning, several in SEVERAL:
        yield from collect_pair(found, name, meaning, several)
    yield from collect_node_families(
        snapshot.counters, snapshot.states, snapshot.reconciled, snapshot.steps
    )
    yield from collect_health_families(snapshot.health)


def single_value(value: Value) -> Several:
    """Return a value without labels of its own as one of several, none where it is not known."""

    def values(seen: DeviceSnapshot) -> Iterable[tuple[Labels, float]]:
        found = value(seen)
        return () if found is None else (({}, found),)

    return values


def lock_info_labels(seen: DeviceSnapshot, label_user: LabelUser) -> Iterator[tuple[Labels, float]]:
    """Yield who holds a device alone."""
    if seen.owner is not None:
        yield known_labels(owner_labels(seen.owner, label_user)), 1


def share_info_labels(
    seen: DeviceSnapshot, label_user: LabelUser
) -> Iterator[tuple[Labels, float]]:
    """Yield who has a share of a device: a family of its own, since joins need one series each."""
    for name, record in seen.sharers.items():
        place = name.partition(SHARE)[2]
        yield known_labels([*owner_labels(record, label_user), ("share", place)]), 1
