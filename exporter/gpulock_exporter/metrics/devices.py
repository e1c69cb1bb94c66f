# SPDX-License-Identifier: Apache-2.0
"""What each device does: the driver's values while they are fresh, and counters from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulock_exporter.metrics.families import Metric, labels
from gpulock_exporter.metrics.labels import (
    FamilyPair,
    LabelledDevice,
    Several,
    Value,
    board_counter,
    board_gauge,
    counter_pair,
    gauge_pair,
)
from gpulock_exporter.state.snapshot import DeviceSnapshot
from gpulock_exporter.telemetry import CLOCK_REASONS


def field_getter(name: str) -> Value:
    """Return what gives a value of the last look."""
    return lambda seen: None if seen.values is None else getattr(seen.values, name)


def flag_getter(name: str) -> Value:
    """Return what gives a yes or no of the last look."""

    def value(seen: DeviceSnapshot) -> float | None:
        found = getattr(seen.values, name) if seen.values else None
        return None if found is None else int(found)

    return value


def gpm_ratio_getter(name: str) -> Value:
    """Return what gives a GPM ratio of the last look."""

    def value(seen: DeviceSnapshot) -> float | None:
        return (seen.values.gpm or {}).get(name) if seen.values else None

    return value


def counter_getter(name: str) -> Value:
    """Return what gives a counter."""
    return lambda seen: seen.counts.counters.get(name)


SINGLE: tuple[tuple[FamilyPair, Value], ...] = (
    (
        gauge_pair(
            "utilization_ratio", "Share of time in which the {device} worked, at the last look."
        ),
        field_getter("utilization"),
    ),
    (
        counter_pair("busy_seconds", "Time in which the {device} was observed at work."),
        lambda seen: seen.counts.busy,
    ),
    (
        counter_pair(
            "observed_seconds", "Time for which it is known whether the {device} was at work."
        ),
        lambda seen: seen.counts.observed,
    ),
    (
        gauge_pair("memory_used_bytes", "Memory in use on the {device}."),
        field_getter("memory_used"),
    ),
    (gauge_pair("memory_total_bytes", "Memory of the {device}."), field_getter("memory_total")),
    (
        board_gauge(
            "memory_utilization_ratio",
            "Share of time in which memory of the GPU was read or written.",
        ),
        field_getter("memory_utilization"),
    ),
    (board_gauge("power_watts", "Power draw of the board."), field_getter("power")),
    (
        board_counter("energy_joules", "Energy that the board took in this boot."),
        counter_getter("energy"),
    ),
    (board_gauge("temperature_celsius", "Temperature of the GPU."), field_getter("temperature")),
    (board_gauge("sm_clock_hertz", "Clock of the multiprocessors."), field_getter("sm_clock")),
    (board_gauge("memory_clock_hertz", "Clock of the memory."), field_getter("memory_clock")),
    (
        board_gauge("remapped_rows_pending", "Whether rows of memory wait for a reset."),
        flag_getter("remap_pending"),
    ),
    (
        board_gauge("remapped_rows_failure", "Whether a row of memory could not be remapped."),
        flag_getter("remap_failure"),
    ),
    (
        board_gauge(
            "recovery_action",
            "What the GPU needs: 0 nothing, 1 a reset, 2 a reboot of the node, "
            "3 that its peers are drained, 4 to be drained and reset.",
        ),
        field_getter("recovery_action"),
    ),
    *(
        (
            board_counter(f"{bus}_{way}_bytes", f"Bytes {done} over {of}."),
            counter_getter(f"{bus}_{way}"),
        )
        for bus, of in (("pcie", "PCIe"), ("nvlink", "all NVLinks"))
        for way, done in (("transmit", "sent"), ("receive", "received"))
    ),
    *(
        (gauge_pair(f"{name}_ratio", meaning + ", by GPM."), gpm_ratio_getter(name))
        for name, meaning in (
            ("sm_active", "Share of time in which a multiprocessor of the {device} was at work"),
            ("sm_occupancy", "Share of the warps of the {device} that were resident"),
            ("tensor_active", "Share of time in which tensor cores of the {device} worked"),
            ("dram_active", "Share of the memory bandwidth of the {device} that was used"),
        )
    ),
)


def collect_device_families(found: Sequence[LabelledDevice]) -> list[Metric]:
    """Return the families of use."""
    metrics: list[Metric] = []
    for pair, value in SINGLE:
        metrics += pair.metrics(found, value)
    for pair, values in SEVERAL:
        metrics += pair.all(found, values)
    return metrics


def active_reasons(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield each reason for a lower clock, and whether it holds."""
    active = seen.values.clock_reasons if seen.values else None
    if active is not None:
        for name in dict.fromkeys((*CLOCK_REASONS.values(), *active)):
            yield labels([("reason", name)]), int(name in active)


def reason_seconds(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield how long each reason held."""
    for name, value in counters_with_prefix(seen, "reason."):
        yield labels([("reason", name)]), value


def ecc_errors(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield the errors of each type and place: `corrected.dram`."""
    for name, value in counters_with_prefix(seen, "ecc."):
        kind, _, place = name.partition(".")
        yield labels([("type", kind), ("location", place)]), value


def remapped_rows(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield the rows that were remapped, by cause."""
    rows = seen.values.remapped if seen.values else None
    for cause, count in (rows or {}).items():
        yield labels([("cause", cause)]), count


def xid_errors(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield how many XIDs of each code there were, also of a card that has gone since."""
    for xid, (count, _) in seen.xids.items():
        yield f'xid="{xid}"', count


def xid_times(seen: DeviceSnapshot) -> Iterator[tuple[str, float]]:
    """Yield when the last XID of each code was."""
    for xid, (_, at) in seen.xids.items():
        yield f'xid="{xid}"', at


def counters_with_prefix(seen: DeviceSnapshot, prefix: str) -> Iterable[tuple[str, float]]:
    """Return the counters whose name begins with a prefix, without it."""
    counters_ = seen.counts.counters.items()
    return [(name[len(prefix) :], value) for name, value in counters_ if name.startswith(prefix)]


SEVERAL: tuple[tuple[FamilyPair, Several], ...] = (
    (
        board_gauge("clock_event_active", "Whether a reason keeps the clocks down."),
        active_reasons,
    ),
    (
        board_counter("clock_event_seconds", "Time for which a reason kept the clocks down."),
        reason_seconds,
    ),
    (board_counter("xid_errors", "XID errors by code, in this boot."), xid_errors),
    (
        board_gauge("xid_last_timestamp_seconds", "When the last XID error of a code was."),
        xid_times,
    ),
    (
        board_counter(
            "ecc_errors", "Memory errors that were found, in this boot, by type and location."
        ),
        ecc_errors,
    ),
    (board_gauge("remapped_rows", "Rows of memory that were remapped, by cause."), remapped_rows),
)
