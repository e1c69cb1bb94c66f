# SPDX-License-Identifier: Apache-2.0
"""The families of devices as tables: what each is called, means, and is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Union

from gpulock.alloc import states
from gpulock.daemon.health.findings import ACTIONS
from gpulock.node.devices import SHARE
from gpulock_exporter.metrics.families import Sample, counters_by_suffix, known_labels
from gpulock_exporter.state.snapshot import DeviceSnapshot

CLOCK_REASONS = (  # nvmlClocksEventReasons of nvml.h, from bit 0 on
    *("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost"),
    *("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
    *("display_clock_setting", "board_limit", "reliability"),
)
FABRIC_STATES = {  # nvmlGpuFabricState_t; the last two are ours: nvml/slow_counters.py
    1: "not_started",
    2: "in_progress",
    3: "completed",
    4: "failed",
    5: "unhealthy",
}
# the samples of a device: their labels besides its own
Samples = Callable[[DeviceSnapshot], Iterable[Sample]]


def by_label(label: str, values: Mapping[str, float]) -> list[Sample]:
    """Return values by one label, whose words are gpulock's own or those of a frame."""
    return [({label: of}, value) for of, value in values.items()]


def state_set(label: str, names: Iterable[str], now: str) -> list[Sample]:
    """Return every state that there is, and whether it is the one of now."""
    return by_label(label, {name: name == now for name in names})


def numbered_state(names: Mapping[int, str], attribute: str, label: str) -> Samples:
    """Return a state by its number in `attribute`: 1 for the one that it is, 0 for the others."""

    def samples(seen: DeviceSnapshot) -> list[Sample]:
        now = names.get(getattr(seen, attribute))
        return state_set(label, names.values(), now) if now else []

    return samples


def device_states(seen: DeviceSnapshot) -> list[Sample]:
    """Return every state, and whether the device is in it.

    None where locks or quarantine are not known.
    """
    known = seen.state is not None and seen.causes is not None
    return state_set("state", states.STATES, seen.state or "") if known else []


def lock_acquired_time(seen: DeviceSnapshot) -> list[Sample]:
    """Return when a lock was taken, nothing where its record does not tell."""
    record = seen.owner
    return [({}, record.claimed_at)] if record and record.claimed_at > 0 else []


def active_reasons(seen: DeviceSnapshot) -> list[Sample]:
    """Return each reason for a lower clock, and whether it holds."""
    bits, names = seen.clock_reasons, enumerate(CLOCK_REASONS)
    known = {} if bits is None else {name: bits >> bit & 1 for bit, name in names}
    return by_label("reason", known)


def ecc_errors(seen: DeviceSnapshot) -> list[Sample]:
    """Return the errors of each type and place: `corrected.dram`."""
    samples: list[Sample] = []
    for name, value in counters_by_suffix(seen.counters, "ecc.").items():
        kind, _, place = name.partition(".")
        samples.append((known_labels([("type", kind), ("location", place)]), value))
    return samples


def share_values(values: Mapping[str, float]) -> list[Sample]:
    """Return a value of each share; of a claim of several places the first has its value."""
    return by_label("share", {name.partition(SHARE)[2]: value for name, value in values.items()})


def share_parts(seen: DeviceSnapshot) -> list[Sample]:
    """Return which part of its card each share is; nobody knows that of one that Slurm counts."""
    sharers = seen.sharers.items()
    return share_values({name: 1 / record.places for name, record in sharers if record.places > 0})


# name behind `gpu_`, meaning, and what has the values: an attribute, an entry of one, or a function
Row = tuple[str, str, Union[str, Samples]]


def read_samples(seen: DeviceSnapshot, source: str | Samples) -> Iterable[Sample]:
    """Return the samples of a device that a row is about; none where its value is not known."""
    if not isinstance(source, str):
        return source(seen)
    name, _, entry = source.partition(".")
    value = getattr(seen, name)
    if entry:
        value = (value or {}).get(entry)
    return () if value is None else [({}, value)]


DEVICE_ROWS: tuple[Row, ...] = (
    ("lock_acquired_timestamp_seconds", "When its lock was taken.", lock_acquired_time),
    ("idle_since_timestamp_seconds", "Since when it has been idle for its claim.", "idle_since"),
    ("last_busy_timestamp_seconds", "When it was last observed at work.", "last_busy"),
    ("foreign_processes", "Processes that are neither its owner's nor a service's.", "foreign"),
    (
        "quarantine_info",
        "Why it is out of service.",
        lambda seen: by_label("cause", dict.fromkeys(seen.causes or (), 1)),
    ),
    ("responding", "Whether the driver answers for the device.", "responding"),
    ("utilization_ratio", "Share of time at work, at the last sample.", "utilization"),
    ("busy_seconds_total", "Time in which the device was observed at work.", "counters.busy"),
    ("observed_seconds_total", "Time in which the device was observed.", "counters.observed"),
    ("memory_used_bytes", "Memory in use on the device.", "memory_used"),
    ("memory_total_bytes", "Memory of the device.", "memory_total"),
    *(
        (f"{name}_ratio", f"{meaning}, by GPM.", f"gpm.{name}")
        for name, meaning in (
            ("sm_active", "Share of time in which a multiprocessor of the device was at work"),
            ("sm_occupancy", "Share of the warps of the device that were resident"),
            ("tensor_active", "Share of time in which tensor cores of the device worked"),
            ("dram_active", "Share of the memory bandwidth of the device that was used"),
        )
    ),
)

BOARD_ROWS: tuple[Row, ...] = (
    ("memory_utilization_ratio", "Share of time in which memory was used.", "memory_utilization"),
    ("power_watts", "Power draw of the board.", "power"),
    ("energy_joules_total", "Energy that the board took in this boot.", "counters.energy"),
    ("power_limit_watts", "Limit of the power draw, as set.", "power_limit"),
    ("power_limit_enforced_watts", "Limit that is enforced.", "power_limit_enforced"),
    ("temperature_celsius", "Temperature of the GPU.", "temperature"),
    ("memory_temperature_celsius", "Temperature of the GPU's memory.", "memory_temperature"),
    ("fan_ratio", "Speed of the fan, as a share of its highest.", "fan"),
    ("driver_answer_seconds", "Time that the driver took to answer for it.", "answer"),
    ("pcie_generation", "Generation of the PCIe link now.", "pcie_generation"),
    ("pcie_generation_max", "Highest that GPU and slot can have.", "pcie_generation_max"),
    ("pcie_width_lanes", "Lanes of the PCIe link now.", "pcie_width"),
    ("pcie_width_max_lanes", "Most lanes that GPU and slot can have.", "pcie_width_max"),
    ("pcie_replays_total", "Packets that the PCIe link sent again.", "counters.pcie_replays"),
    ("nvlink_active_links", "NVLinks that are up.", "nvlink_active"),
    (
        "fabric_state",
        "How far it has joined the NVLink fabric.",
        numbered_state(FABRIC_STATES, "fabric", "state"),
    ),
    ("sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock"),
    ("memory_clock_hertz", "Clock of the memory.", "memory_clock"),
    ("remapped_rows_pending", "Whether rows of memory wait for a reset.", "remap_pending"),
    ("remapped_rows_failure", "Whether a row of memory could not be remapped.", "remap_failure"),
    (
        "recovery_action",
        "What the driver asks for.",
        numbered_state(ACTIONS, "recovery_action", "action"),
    ),
    *(
        (f"{bus}_{way}_bytes_total", f"Bytes {done} over {of}.", f"counters.{bus}_{way}")
        for bus, of in (("pcie", "PCIe"), ("nvlink", "all NVLinks"))
        for way, done in (("transmit", "sent"), ("receive", "received"))
    ),
    (
        "health",
        "Whether it passed a check of gpulockd's.",
        lambda seen: by_label("check", {name: not why for name, why in seen.checks.items()}),
    ),
    ("clock_event_active", "Whether a reason lowers the clocks.", active_reasons),
    (
        "clock_event_seconds_total",
        "Time for which a reason lowered the clocks.",
        lambda seen: by_label("reason", counters_by_suffix(seen.counters, "clock_reason_seconds.")),
    ),
    (
        "xid_errors_total",
        "XID errors by code, in this boot.",
        lambda seen: by_label("xid", {str(xid): count for xid, (count, _) in seen.xids.items()}),
    ),
    (
        "xid_last_timestamp_seconds",
        "When the last XID error of a code was.",
        lambda seen: by_label("xid", {str(xid): at for xid, (_, at) in seen.xids.items()}),
    ),
    ("ecc_errors_total", "Memory errors in this boot, by type and location.", ecc_errors),
    (
        "nvlink_errors_total",
        "Errors on all NVLinks, by kind.",
        lambda seen: by_label("kind", counters_by_suffix(seen.counters, "nvlink_errors.")),
    ),
    (
        "remapped_rows",
        "Rows of memory that were remapped, by cause.",
        lambda seen: by_label("cause", seen.remapped or {}),
    ),
    ("share_ratio", "Which part of the GPU a share is.", share_parts),
    ("share_places", "How many shares the GPU gives out, by SHARES.", "places"),
    (
        "share_memory_used_bytes",
        "Memory in use by a share.",
        lambda seen: share_values(seen.share_memory),
    ),
    (
        "share_idle_since_timestamp_seconds",
        "Since when a share has been idle.",
        lambda seen: share_values(seen.share_idle_since),
    ),
)
