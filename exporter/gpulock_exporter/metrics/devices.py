# SPDX-License-Identifier: Apache-2.0
"""All families of a snapshot; of devices two tables: what each is called, means, is read from.

A MIG instance is a device as a GPU is: it has the families of CLAIM. A GPU with instances has those
of BOARD alone, so that no sum counts anything twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from gpulock.node.devices import SHARE, card_bus_id
from gpulock_exporter.metrics.device_values import (
    active_reasons,
    attribute,
    counter,
    counters,
    device_states,
    ecc_errors,
    gpm_ratio,
    lock_acquired_time,
    one_of,
    share_parts,
    share_values,
    single,
)
from gpulock_exporter.metrics.families import Several, collect_family, collect_info_family
from gpulock_exporter.metrics.labels import Labels, LabelUser, known_labels, owner_labels
from gpulock_exporter.metrics.node import (
    collect_health_families,
    collect_node_families,
    collect_switch_errors,
)
from gpulock_exporter.state.snapshot import DeviceSnapshot, NodeSnapshot
from gpulock_exporter.telemetry import FABRIC_STATES, RECOVERY_ACTIONS

Family = tuple[str, str, Several]

# name behind `gpu_`, meaning, values
CLAIM: tuple[Family, ...] = (
    (
        "lock_acquired_timestamp_seconds",
        "When the lock of the device was taken.",
        single(lock_acquired_time),
    ),
    (
        "idle_since_timestamp_seconds",
        "The last sample, less the observed time since the device last worked for its claim.",
        attribute("idle_since"),
    ),
    (
        "last_busy_timestamp_seconds",
        "When the device was last observed at work in this boot.",
        attribute("last_busy"),
    ),
    (
        "foreign_processes",
        "Processes on the device that are neither its owner's nor a service; "
        "absent where some cannot be seen.",
        attribute("foreign"),
    ),
    (
        "quarantine_info",
        "Why the device is out of service; always 1.",
        lambda seen: [({"cause": cause}, 1) for cause in seen.causes or ()],
    ),
    (
        "responding",
        "Whether the driver answers for the device; "
        "0 while a call for it hangs, or the driver has lost it.",
        attribute("responding"),
    ),
    (
        "utilization_ratio",
        "Share of time in which the device worked, at the last sample.",
        attribute("utilization"),
    ),
    ("busy_seconds_total", "Time in which the device was observed at work.", counter("busy")),
    ("observed_seconds_total", "Time in which the device was observed.", counter("observed")),
    ("memory_used_bytes", "Memory in use on the device.", attribute("memory_used")),
    ("memory_total_bytes", "Memory of the device.", attribute("memory_total")),
    *(
        (f"{name}_ratio", f"{meaning}, by GPM.", gpm_ratio(name))
        for name, meaning in (
            ("sm_active", "Share of time in which a multiprocessor of the device was at work"),
            ("sm_occupancy", "Share of the warps of the device that were resident"),
            ("tensor_active", "Share of time in which tensor cores of the device worked"),
            ("dram_active", "Share of the memory bandwidth of the device that was used"),
        )
    ),
)

BOARD: tuple[Family, ...] = (
    (
        "memory_utilization_ratio",
        "Share of time in which memory of the GPU was read or written.",
        attribute("memory_utilization"),
    ),
    ("power_watts", "Power draw of the board.", attribute("power")),
    ("energy_joules_total", "Energy that the board took in this boot.", counter("energy")),
    ("power_limit_watts", "Limit of the power draw, as set.", attribute("power_limit")),
    (
        "power_limit_enforced_watts",
        "Limit of the power draw that is enforced.",
        attribute("power_limit_enforced"),
    ),
    ("temperature_celsius", "Temperature of the GPU.", attribute("temperature")),
    (
        "memory_temperature_celsius",
        "Temperature of the GPU's memory.",
        attribute("memory_temperature"),
    ),
    ("fan_ratio", "Speed of the fan, as a share of its highest.", attribute("fan")),
    (
        "driver_answer_seconds",
        "Time that the driver took to answer for the GPU, at the last sample.",
        attribute("answer"),
    ),
    ("pcie_generation", "Generation of the PCIe link now.", attribute("pcie_generation")),
    (
        "pcie_generation_max",
        "Highest generation that GPU and slot can have.",
        attribute("pcie_generation_max"),
    ),
    ("pcie_width_lanes", "Lanes of the PCIe link now.", attribute("pcie_width")),
    (
        "pcie_width_max_lanes",
        "Most lanes that GPU and slot can have.",
        attribute("pcie_width_max"),
    ),
    ("pcie_replays_total", "Packets that the PCIe link sent again.", counter("pcie_replays")),
    ("nvlink_active_links", "NVLinks that are up.", attribute("nvlink_active")),
    (
        "fabric_state",
        "How far the GPU has joined the NVLink fabric; 1 for the state that it is in.",
        one_of(FABRIC_STATES, "fabric", "state"),
    ),
    ("sm_clock_hertz", "Clock of the multiprocessors.", attribute("sm_clock")),
    ("memory_clock_hertz", "Clock of the memory.", attribute("memory_clock")),
    (
        "remapped_rows_pending",
        "Whether rows of memory wait for a reset.",
        attribute("remap_pending"),
    ),
    (
        "remapped_rows_failure",
        "Whether a row of memory could not be remapped.",
        attribute("remap_failure"),
    ),
    (
        "recovery_action",
        "What the driver asks for; 1 for the action that it is.",
        one_of(RECOVERY_ACTIONS, "recovery_action", "action"),
    ),
    *(
        (f"{bus}_{way}_bytes_total", f"Bytes {done} over {of}.", counter(f"{bus}_{way}"))
        for bus, of in (("pcie", "PCIe"), ("nvlink", "all NVLinks"))
        for way, done in (("transmit", "sent"), ("receive", "received"))
    ),
    (
        "health",
        "Whether the GPU passed a check at gpulockd's last look at it.",
        lambda seen: [({"check": name}, not why) for name, why in seen.checks.items()],
    ),
    ("clock_event_active", "Whether a reason lowers the clocks.", active_reasons),
    (
        "clock_event_seconds_total",
        "Time for which a reason lowered the clocks.",
        counters("reason.", "reason"),
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
    ("nvlink_errors_total", "Errors on all NVLinks, by kind.", counters("nvlink_error.", "kind")),
    (
        "remapped_rows",
        "Rows of memory that were remapped, by cause.",
        lambda seen: [({"cause": cause}, count) for cause, count in (seen.remapped or {}).items()],
    ),
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
        "share_idle_since_timestamp_seconds",
        "The last sample, less the observed time since the processes of a share last worked.",
        lambda seen: share_values(seen.share_idle_since),
    ),
)


def collect_families(
    snapshot: NodeSnapshot, label_user: LabelUser = LabelUser.NAME
) -> Iterator[Metric]:
    """Yield all families, those without a value too; `label_user` says how users are named."""
    devices = [
        (one, known_labels([("gpu", one.gpu_label), ("uuid", one.uuid)]))
        for one in snapshot.devices
    ]
    cards = [pair for pair in devices if not pair[0].instance]
    split = {card_bus_id(one.id) for one in snapshot.devices if one.instance}
    claimed = [pair for pair in devices if pair[0].id not in split]
    yield collect_info_family(devices, snapshot.driver)
    meaning = "Whether the device is in a state; 1 for the state that it is in."
    yield collect_family(devices, "state", meaning, device_states)
    yield collect_family(
        claimed,
        "lock_info",
        "Which job holds the device; 1 while it does.",
        lambda seen: lock_info_labels(seen, label_user),
    )
    yield collect_family(
        cards,
        "share_info",
        "Which jobs share the GPU, each by its own lock; 1 while they do.",
        lambda seen: share_info_labels(seen, label_user),
    )
    for having, table in ((claimed, CLAIM), (cards, BOARD)):
        for name, meaning, values in table:
            yield collect_family(having, name, meaning, values)
    yield from collect_node_families(
        snapshot.counters, snapshot.states, snapshot.reconciled, len(snapshot.waiting)
    )
    yield collect_switch_errors(snapshot.switch_errors)
    yield from collect_health_families(snapshot.health)


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
