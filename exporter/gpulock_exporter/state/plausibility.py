# SPDX-License-Identifier: Apache-2.0
"""What can be true of a device: everything else in a frame is dropped before it is believed.

Drivers hand out garbage: 900 % of utilisation, all bits set, the memory of another card. A value
that no hardware can have is not known, which is not 0, and its collector has failed. Names become
keys of files and labels, so they are held to an alphabet. Board facts are never an instance's.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast

from gpulock.errors import one_line
from gpulock_exporter.telemetry import (
    FABRIC_STATES,
    RECOVERY_ACTIONS,
    DeviceTelemetry,
    Frame,
    Process,
)

MOST_DEVICES = 1024  # of a frame: 16 cards of 7 instances are 128
MOST_NAMES = 64  # of reasons, of ECC counters, of links: of whatever becomes a label
LONGEST_TEXT = 128  # characters
PID_LENGTH = 8  # digits, and one more than any pid has
MOST_WORKING = 1 << 10  # processes of a card that say how much they worked
MOST_PID = 1 << 22  # PID_MAX_LIMIT of a 64 bit kernel, proc_sys_kernel(5)
MOST_BYTES = 1 << 50  # of memory
MOST_ERRORS = (1 << 32) - 2  # of memory; 32 bits of ones are no count
MOST_ID = 1 << 12  # of an index, a minor, an instance
KEPT = 2048  # texts, cut to LONGEST_TEXT, that are judged once: each second has the same ones

BUS = re.compile(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_.-]{0,95}")
NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}")


class FieldRule(NamedTuple):
    """What can be true of a field: its least and most, and the collector that tells it.

    Of one that has names, each of them is from 0 to `most`.
    """

    collector: str
    least: float
    most: float


RULES = {
    "utilization": FieldRule("utilization", 0, 1),
    "memory_utilization": FieldRule("utilization", 0, 1),
    "busy": FieldRule(
        "utilization", 0, 1e6
    ),  # seconds; `device_totals` compares them with the clock
    "observed": FieldRule("utilization", 0, 1e6),
    "memory_used": FieldRule("memory", 0, MOST_BYTES),
    "memory_total": FieldRule("memory", 1, MOST_BYTES),
    "power": FieldRule("power", 0, 5000),  # watts: the largest boards are at 1,400
    "temperature": FieldRule("temperature", -50, 200),
    "memory_temperature": FieldRule("temperature", -50, 200),
    "power_limit": FieldRule("power", 0, 5000),
    "power_limit_enforced": FieldRule("power", 0, 5000),
    "fan": FieldRule("temperature", 0, 2),  # some fans turn faster than their nominal speed
    "answer": FieldRule("devices", 0, 1e6),
    "pcie_generation": FieldRule("pcie", 1, 9),
    "pcie_generation_max": FieldRule("pcie", 1, 9),
    "pcie_width": FieldRule("pcie", 1, 32),
    "pcie_width_max": FieldRule("pcie", 1, 32),
    "pcie_replays": FieldRule("pcie", 0, MOST_ERRORS),
    "nvlink_errors": FieldRule("nvlink", 0, MOST_BYTES),
    "nvlink_active": FieldRule("nvlink", 0, MOST_ID),
    "fabric": FieldRule("nvlink", min(FABRIC_STATES), max(FABRIC_STATES)),
    "sm_clock": FieldRule("clocks", 0, 2e10),  # hertz
    "memory_clock": FieldRule("clocks", 0, 2e11),
    "index": FieldRule("devices", 0, MOST_ID),
    "minor": FieldRule("devices", 0, MOST_ID),
    "numa": FieldRule("devices", 0, MOST_ID),
    "recovery_action": FieldRule("remapped", 0, max(RECOVERY_ACTIONS)),
    "clock_reason_seconds": FieldRule("clocks", 0, math.inf),
    "ecc": FieldRule("ecc", 0, MOST_ERRORS),
    "remapped": FieldRule("remapped", 0, MOST_BYTES),
    "gpm": FieldRule("gpm", 0, 1),
    "links": FieldRule("devices", 0, MOST_ID),
}
BOARD = (
    *(
        "memory_utilization",
        "power",
        "energy",
        "temperature",
        "sm_clock",
        "memory_clock",
        "clock_reasons",
    ),
    *("clock_reason_seconds", "ecc", "remapped", "remap_pending", "remap_failure"),
    *("memory_temperature", "power_limit", "power_limit_enforced", "fan", "answer"),
    *("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max", "pcie_replays"),
    *("nvlink_errors", "nvlink_active", "fabric"),
    *("recovery_action", "pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive"),
)

_V = TypeVar("_V", int, float)


def usable_devices(frame: Frame) -> dict[str, DeviceTelemetry]:
    """Return the devices of a frame by lock id, cleaned; of two with one id the first.

    What cannot be is a failure of its collector, and is put among those of the frame.
    """
    found: dict[str, DeviceTelemetry] = {}
    for device in frame.devices[:MOST_DEVICES]:
        clean = drop_impossible_values(device, frame.failures)
        if clean is not None:
            found.setdefault(device_lock_id(clean), clean)
    return found


def usable_lost_cards(frame: Frame) -> dict[str, str]:
    """Return the driver's words on each card that it has lost, by bus id."""
    found = [(normalize_bus_id(bus), why) for bus, why in list(frame.lost.items())[:MOST_DEVICES]]
    return {bus: _clean_text(why[:LONGEST_TEXT]) for bus, why in found if bus}


def device_lock_id(device: DeviceTelemetry) -> str:
    """Return the id of a device's lock: its bus id, and for an instance which one it is."""
    if not device.parent:
        return device.bus
    return f"{device.parent}.gi{device.gi}.ci{device.ci}"


def drop_impossible_values(
    device: DeviceTelemetry, failures: dict[str, str] | None = None
) -> DeviceTelemetry | None:
    """Return a device without what cannot be true; None for one that cannot be named.

    `failures` gets what that was, by collector.
    """
    failures = {} if failures is None else failures
    bus, parent = normalize_bus_id(device.bus), normalize_bus_id(device.parent)
    if device.parent:
        part = (device.gi, device.ci)
        if not parent or not all(n is not None and 0 <= n <= MOST_ID for n in part):
            _note_impossible_value(failures, "a device", "bus", f"{device.parent} {part}")
            return None
        bus = bus or parent
    if not bus:
        _note_impossible_value(failures, "a device", "bus", device.bus)
        return None
    clean = copy.copy(device)
    clean.bus, clean.parent = bus, parent
    clean.uuid = device.uuid if _is_uuid(device.uuid[:LONGEST_TEXT]) else ""
    clean.name = _clean_text(device.name[:LONGEST_TEXT])
    clean.profile = _clean_text(device.profile[:LONGEST_TEXT])
    clean.clock_reasons = _clean_names(device.clock_reasons)
    clean.summed = _clean_names(device.summed)
    clean.processes = _clean_processes(device.processes)
    clean.process_use = _clean_process_use(device.process_use)
    if clean.process_use is None and device.process_use is not None:
        _note_impossible_value(failures, bus, "utilization", device.process_use)
    if clean.uuid != device.uuid:
        _note_impossible_value(failures, bus, "uuid", device.uuid)
    for field, rule in RULES.items():
        told = getattr(device, field)
        if isinstance(told, dict):
            values = cast("dict[str, float]", told)
            named = _clean_named_values(values, rule.most)
            setattr(clean, field, named)
            wrong = {one: values[one] for one in values if one not in named}
            if wrong:
                _note_impossible_value(failures, bus, field, wrong)
        elif told is not None and not rule.least <= told <= rule.most:
            setattr(clean, field, None if field != "index" else 0)
            _note_impossible_value(failures, bus, field, told)
    if (clean.memory_used or 0) > (clean.memory_total or MOST_BYTES):
        _note_impossible_value(failures, bus, "memory_used", clean.memory_used)
        clean.memory_used = None
    if clean.parent:
        for field in BOARD:
            setattr(clean, field, None)
    return clean


def _note_impossible_value(failures: dict[str, str], bus: str, field: str, value: object) -> None:
    """Say of a field's collector that it has failed, and by what."""
    text = f"{bus}: {field} cannot be {str(value)[:LONGEST_TEXT]}"
    failures.setdefault(RULES[field].collector if field in RULES else "devices", text)


def normalize_bus_id(text: str) -> str:
    """Return a PCI bus id as the kernel writes it, NVML's 8 digits or not; empty for none."""
    return _normalize_bus_id(text[:LONGEST_TEXT])


@lru_cache(KEPT)
def _normalize_bus_id(text: str) -> str:
    match = BUS.fullmatch(text.lower())
    return f"{int(match[1], 16):04x}{match[2]}" if match else ""


@lru_cache(KEPT)
def _is_uuid(text: str) -> bool:
    return UUID.fullmatch(text) is not None and "?" not in text


@lru_cache(KEPT)
def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


@lru_cache(KEPT)
def _clean_text(text: str) -> str:
    return one_line(text)


def _clean_names(names: list[str] | None) -> list[str] | None:
    if names is None:
        return None
    return [name for name in names[:MOST_NAMES] if _is_name(name[:LONGEST_TEXT])]


def _clean_named_values(values: Mapping[str, _V], most: float) -> dict[str, _V]:
    """Return what has a usable name and is a number from 0 to `most`."""
    some = values.items() if len(values) <= MOST_NAMES else list(values.items())[:MOST_NAMES]
    return {
        name: value
        for name, value in some
        if _is_name(name[:LONGEST_TEXT]) and 0 <= value <= most and value != math.inf
    }


def _clean_processes(found: list[Process] | None) -> list[Process] | None:
    if found is None:
        return None
    return [
        Process(one.pid, one.memory if 0 <= (one.memory or 0) <= MOST_BYTES else None)
        for one in {p.pid: p for p in found if 0 < p.pid <= MOST_PID}.values()
    ]


def _clean_process_use(found: dict[str, float] | None) -> dict[str, float] | None:
    """Return how much each process worked; where one of them cannot be, none is believed."""
    sound = found is not None and all(
        word.isascii() and word.isdigit() and len(word) < PID_LENGTH and 0 <= part <= 1
        for word, part in found.items()
    )
    return found if sound and len(found or ()) <= MOST_WORKING else None
