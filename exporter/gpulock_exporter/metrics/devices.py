# SPDX-License-Identifier: Apache-2.0
"""What each device does: the driver's values while they are fresh, and counters from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulock_exporter.metrics.families import Metric, labels
from gpulock_exporter.metrics.labels import (
    Labelled,
    Pair,
    Several,
    Value,
    board_counter,
    board_gauge,
    counters,
    gauges,
)
from gpulock_exporter.state.snapshot import Seen
from gpulock_exporter.telemetry import CLOCK_REASONS


def field(name: str) -> Value:
    """Return what gives a value of the last look."""
    return lambda seen: None if seen.values is None else getattr(seen.values, name)


def flag(name: str) -> Value:
    """Return what gives a yes or no of the last look."""

    def value(seen: Seen) -> float | None:
        found = getattr(seen.values, name) if seen.values else None
        return None if found is None else int(found)

    return value


def ratio(name: str) -> Value:
    """Return what gives a GPM ratio of the last look."""

    def value(seen: Seen) -> float | None:
        return (seen.values.gpm or {}).get(name) if seen.values else None

    return value


def total(name: str) -> Value:
    """Return what gives a counter."""
    return lambda seen: seen.counts.counters.get(name)


SINGLE: tuple[tuple[Pair, Value], ...] = (
    (
        gauges(
            "utilization_ratio", "Share of time in which the {device} worked, at the last look."
        ),
        field("utilization"),
    ),
    (
        counters("busy_seconds", "Time in which the {device} was observed at work."),
        lambda seen: seen.counts.busy,
    ),
    (
        counters(
            "observed_seconds", "Time for which it is known whether the {device} was at work."
        ),
        lambda seen: seen.counts.observed,
    ),
    (gauges("memory_used_bytes", "Memory in use on the {device}."), field("memory_used")),
    (gauges("memory_total_bytes", "Memory of the {device}."), field("memory_total")),
    (
        board_gauge(
            "memory_utilization_ratio",
            "Share of time in which memory of the GPU was read or written.",
        ),
        field("memory_utilization"),
    ),
    (board_gauge("power_watts", "Power draw of the board."), field("power")),
    (
        board_counter("energy_joules", "Energy that the board took in this boot."),
        total("energy"),
    ),
    (board_gauge("temperature_celsius", "Temperature of the GPU."), field("temperature")),
    (board_gauge("sm_clock_hertz", "Clock of the multiprocessors."), field("sm_clock")),
    (board_gauge("memory_clock_hertz", "Clock of the memory."), field("memory_clock")),
    (
        board_gauge("remapped_rows_pending", "Whether rows of memory wait for a reset."),
        flag("remap_pending"),
    ),
    (
        board_gauge("remapped_rows_failure", "Whether a row of memory could not be remapped."),
        flag("remap_failure"),
    ),
    (
        board_gauge(
            "recovery_action",
            "What the GPU needs: 0 nothing, 1 a reset, 2 a reboot of the node, "
            "3 that its peers are drained, 4 to be drained and reset.",
        ),
        field("recovery_action"),
    ),
    *(
        (board_counter(f"{bus}_{way}_bytes", f"Bytes {done} over {of}."), total(f"{bus}_{way}"))
        for bus, of in (("pcie", "PCIe"), ("nvlink", "all NVLinks"))
        for way, done in (("transmit", "sent"), ("receive", "received"))
    ),
    *(
        (gauges(f"{name}_ratio", meaning + ", by GPM."), ratio(name))
        for name, meaning in (
            ("sm_active", "Share of time in which a multiprocessor of the {device} was at work"),
            ("sm_occupancy", "Share of the warps of the {device} that were resident"),
            ("tensor_active", "Share of time in which tensor cores of the {device} worked"),
            ("dram_active", "Share of the memory bandwidth of the {device} that was used"),
        )
    ),
)


def collect(found: Sequence[Labelled]) -> list[Metric]:
    """Return the families of use."""
    metrics: list[Metric] = []
    for pair, value in SINGLE:
        metrics += pair.metrics(found, value)
    for pair, values in SEVERAL:
        metrics += pair.all(found, values)
    return metrics


def active_reasons(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield each reason for a lower clock, and whether it holds."""
    active = seen.values.clock_reasons if seen.values else None
    if active is not None:
        for name in dict.fromkeys((*CLOCK_REASONS.values(), *active)):
            yield labels([("reason", name)]), int(name in active)


def reason_seconds(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield how long each reason held."""
    for name, value in prefixed(seen, "reason."):
        yield labels([("reason", name)]), value


def ecc_errors(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield the errors of each type and place: `corrected.dram`."""
    for name, value in prefixed(seen, "ecc."):
        kind, _, place = name.partition(".")
        yield labels([("type", kind), ("location", place)]), value


def remapped_rows(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield the rows that were remapped, by cause."""
    rows = seen.values.remapped if seen.values else None
    for cause, count in (rows or {}).items():
        yield labels([("cause", cause)]), count


def xid_errors(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield how many XIDs of each code there were, also of a card that has gone since."""
    for xid, (count, _) in seen.xids.items():
        yield f'xid="{xid}"', count


def xid_times(seen: Seen) -> Iterator[tuple[str, float]]:
    """Yield when the last XID of each code was."""
    for xid, (_, at) in seen.xids.items():
        yield f'xid="{xid}"', at


def prefixed(seen: Seen, prefix: str) -> Iterable[tuple[str, float]]:
    """Return the counters whose name begins with a prefix, without it."""
    counters_ = seen.counts.counters.items()
    return [(name[len(prefix) :], value) for name, value in counters_ if name.startswith(prefix)]


SEVERAL: tuple[tuple[Pair, Several], ...] = (
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
