# SPDX-License-Identifier: Apache-2.0
"""How a family reads its values of a device: an attribute, counters, states, shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Optional

from gpulock.alloc import states
from gpulock.node.devices import SHARE
from gpulock_exporter.metrics.families import Several
from gpulock_exporter.metrics.labels import Labels, known_labels
from gpulock_exporter.state.snapshot import DeviceSnapshot
from gpulock_exporter.telemetry import CLOCK_REASONS

Value = Callable[[DeviceSnapshot], Optional[float]]


def single(value: Value) -> Several:
    """Return a value without labels of its own as one of several, none where it is not known."""

    def values(seen: DeviceSnapshot) -> Iterable[tuple[Labels, float]]:
        known = value(seen)
        return () if known is None else (({}, known),)

    return values


def attribute(name: str) -> Several:
    """Return what reads an attribute of a device."""
    return single(attrgetter(name))


def counter(name: str) -> Several:
    """Return what reads a counter of a device."""
    return single(lambda seen: seen.counters.get(name))


def counters(prefix: str, label: str) -> Several:
    """Return what reads the counters whose name begins with a prefix; the rest is a label."""
    return lambda seen: [({label: of}, value) for of, value in counters_with_prefix(seen, prefix)]


def gpm_ratio(name: str) -> Several:
    """Return what reads a GPM ratio of the last look."""
    return single(lambda seen: (seen.gpm or {}).get(name))


def one_of(names: Mapping[int, str], attribute: str, label: str) -> Several:
    """Return a state by its number in `attribute`: 1 for the one that it is, 0 for the others."""

    def values(seen: DeviceSnapshot) -> list[tuple[Labels, float]]:
        now = names.get(getattr(seen, attribute))
        return state_set(label, names.values(), now) if now else []

    return values


def state_set(label: str, names: Iterable[str], now: str) -> list[tuple[Labels, float]]:
    """Return every state that there is, and whether it is the one of now."""
    return [({label: name}, name == now) for name in names]


def device_states(seen: DeviceSnapshot) -> list[tuple[Labels, float]]:
    """Return every state, and whether the device is in it; none where locks or quarantine are not
    known.
    """
    if seen.state is None or seen.causes is None:
        return []
    return state_set("state", states.STATES, seen.state)


def lock_acquired_time(seen: DeviceSnapshot) -> float | None:
    """Return when a lock was taken, None where its record does not tell."""
    record = seen.owner
    return record.claimed_at if record and record.claimed_at > 0 else None


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


def share_parts(seen: DeviceSnapshot) -> Iterator[tuple[Labels, float]]:
    """Yield which part of its card each share is; nobody knows that of one that Slurm counts."""
    for name, record in seen.sharers.items():
        if record.places > 0:
            yield {"share": name.partition(SHARE)[2]}, 1 / record.places


def share_values(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    """Return a value of each share; of a claim of several places the first has its value."""
    return [({"share": name.partition(SHARE)[2]}, value) for name, value in values.items()]
