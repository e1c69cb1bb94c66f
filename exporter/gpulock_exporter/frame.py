# SPDX-License-Identifier: Apache-2.0
"""What one look at the driver gives: the frame that the worker sends and the exporter believes.

A value that the card does not have is absent (None), never 0. Times are CLOCK_BOOTTIME seconds. A
frame crosses the pipe as one line of JSON. Drivers hand out garbage: 900 % of utilisation, all bits
set, the memory of another card. Each field of a device says what can be true of it; what breaks
that rule is not known, and its collector has failed. Names become keys of files and labels, so they
are held to an alphabet. The worker imports this module too: it is small.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple

from gpulock.errors import one_line

CLOCK_REASONS = {  # nvmlClocksEventReasons of nvml.h: what `clock_reasons` may hold
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
BUS = re.compile(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_.-]{0,95}")
NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}\Z")
LONGEST_TEXT = 128  # characters
MOST_DEVICES = 1024  # of a frame: 16 cards of 7 instances are 128
MOST_NAMES = 64  # of reasons, of ECC counters, of links: of whatever becomes a label
MOST_ID = 1 << 12  # of an index, a minor, an instance
MOST_PID = 1 << 22  # PID_MAX_LIMIT of a 64 bit kernel, proc_sys_kernel(5)
MOST_BYTES = 1 << 50  # of memory
MOST_ERRORS = (1 << 32) - 2  # of memory; 32 bits of ones are no count
MOST_COUNT = (1 << 64) - 1  # of a counter of bytes
IMPOSSIBLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class FrameError(ValueError):
    """Say that a line is no frame."""


def known(collector: str, least: float = 0, most: float = 0) -> Any:
    """Return a field that is None where it is not known, and else from `least` to `most`.

    Of values by name each is.
    """
    return field(default=None, metadata={"collector": collector, "least": least, "most": most})


@dataclass
class Process:
    """A process that NVML lists on a device; memory in bytes, None where NVML does not tell."""

    pid: int
    memory: int | None = None


@dataclass
class DeviceTelemetry:
    """A GPU, or a MIG instance (`parent` is its card's bus id); one look.

    `busy` and `observed` are seconds since the last look: how long the device did work, and how
    long the driver's sample buffer covers. Ratios are from 0 to 1. Counters (`energy` J,
    `*_transmit` and `*_receive` bytes, `*_seconds` by reason, `ecc`, `pcie_replays`,
    `nvlink_errors`) run since the driver was loaded and may wrap or restart at 0; the exporter
    makes them monotonic.
    """

    bus: str
    uuid: str
    index: int = known("devices", 0, MOST_ID)
    minor: int | None = known("devices", 0, MOST_ID)
    name: str = ""
    parent: str = ""
    gi: int | None = known("devices", 0, MOST_ID)
    ci: int | None = known("devices", 0, MOST_ID)
    profile: str = ""
    mig: bool | None = known("mig")
    persistence: bool | None = known("devices")
    answer: float | None = known("devices", 0, 1e6)  # seconds that the driver took for this card
    numa: int | None = known("devices", 0, MOST_ID)
    coherent: bool | None = known("devices")  # the kernel puts own pages into its memory
    utilization: float | None = known("utilization", 0, 1)
    memory_utilization: float | None = known("utilization", 0, 1)
    busy: float | None = known("utilization", 0, 1e6)
    observed: float | None = known("utilization", 0, 1e6)
    memory_used: int | None = known("memory", 0, MOST_BYTES)
    memory_total: int | None = known("memory", 1, MOST_BYTES)
    power: float | None = known("power", 0, 5000)  # watts: the largest boards are at 1,400
    energy: float | None = known("power", 0, 1e18)
    temperature: float | None = known("temperature", -50, 200)
    memory_temperature: float | None = known("temperature", -50, 200)
    power_limit: float | None = known("power", 0, 5000)  # as set; the enforced one may be lower
    power_limit_enforced: float | None = known("power", 0, 5000)
    fan: float | None = known("temperature", 0, 2)  # of its highest speed, which some exceed
    sm_clock: float | None = known("clocks", 0, 2e10)  # hertz
    memory_clock: float | None = known("clocks", 0, 2e11)
    clock_reasons: list[str] | None = known("clocks")  # those that are active
    clock_reason_seconds: dict[str, float] | None = known("clocks", 0, 1e15)
    ecc: dict[str, int] | None = known("ecc", 0, MOST_ERRORS)  # `corrected.sram`, ...
    remapped: dict[str, int] | None = known("remapped", 0, MOST_ERRORS)  # rows by cause
    remap_pending: bool | None = known("remapped")
    remap_failure: bool | None = known("remapped")
    recovery_action: int | None = known("remapped", 0, 7)  # nvmlDeviceGpuRecoveryAction_t
    pcie_generation: int | None = known("pcie", 1, 9)  # now, and the most of card and slot
    pcie_generation_max: int | None = known("pcie", 1, 9)
    pcie_width: int | None = known("pcie", 1, 32)
    pcie_width_max: int | None = known("pcie", 1, 32)
    pcie_replays: int | None = known("pcie", 0, MOST_ERRORS)
    nvlink_errors: dict[str, int] | None = known("nvlink", 0, MOST_BYTES)  # by kind: `replay`, ...
    nvlink_active: int | None = known("nvlink", 0, MOST_ID)  # links that are up
    fabric: int | None = known("nvlink", 1, 5)  # nvml/fabric.py
    pcie_transmit: int | None = known("pcie", 0, MOST_COUNT)
    pcie_receive: int | None = known("pcie", 0, MOST_COUNT)
    nvlink_transmit: int | None = known("nvlink", 0, MOST_COUNT)
    nvlink_receive: int | None = known("nvlink", 0, MOST_COUNT)
    summed: list[str] | None = known("gpm")  # of these bytes, what the worker adds up from 0
    gpm: dict[str, float] | None = known("gpm", 0, 1)  # ratios by name: sm_active, ...
    links: dict[str, int] | None = known("devices", 0, MOST_ID)  # to a peer's bus id, or `switch`
    processes: list[Process] | None = None  # None: not looked at this time, or not supported

    @property
    def lock_id(self) -> str:
        """Return the id of its lock: its bus id, and for an instance which one it is."""
        return f"{self.parent}.gi{self.gi}.ci{self.ci}" if self.parent else self.bus


class FieldRule(NamedTuple):
    """What can be true of a field of the type `kind`, or, `by_name`, of each of its values."""

    collector: str
    least: float
    most: float
    kind: str
    by_name: bool = False


TYPES: dict[str, set[type]] = {  # what JSON has for each; a bool is no int
    **{"bool": {bool}, "int": {int}, "float": {float, int}},
    **{"list": {list}, "dict": {dict}},
}
RULES = {
    one.name: FieldRule(
        **one.metadata,
        kind=re.findall("bool|int|float|list", str(one.type))[0],
        by_name="dict" in str(one.type),
    )
    for one in fields(DeviceTelemetry)
    if one.metadata
}
# what `failures` of a frame go by
COLLECTORS = sorted({*(rule.collector for rule in RULES.values()), "processes", "counters"})


@dataclass
class Frame:
    """One look at all devices. `failures` has the error of each collector that failed.

    `lost` has the driver's words on each card that was there and is lost, by bus id. `complete` is
    whether NVML was asked for every card: one that is not among `devices` does not answer.
    """

    boottime: float
    driver: str = ""
    devices: list[DeviceTelemetry] = field(default_factory=list[DeviceTelemetry])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = False


def normalize_bus_id(text: str) -> str:
    """Return a PCI bus id as the kernel writes it, NVML's 8 digits or not; empty for none."""
    match = BUS.fullmatch(text.lower())
    return f"{int(match[1], 16):04x}{match[2]}" if match else ""


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as one line; of its records what is known."""

    def known_fields(record: object) -> dict[str, Any]:
        return {name: value for name, value in vars(record).items() if value is not None}

    return json.dumps(frame, separators=(",", ":"), default=known_fields).encode() + b"\n"


def decode_frame(line: bytes) -> Frame:
    """Return the frame of one line; raise FrameError.

    Of two devices with one lock id the first counts. What cannot be is a failure of its collector.
    """
    try:
        raw = json.loads(line)
        failures = {name: str(why) for name, why in raw["failures"].items()}
        devices: dict[str, DeviceTelemetry] = {}
        for one in raw["devices"][:MOST_DEVICES]:
            if device := read_device(one, failures):
                devices.setdefault(device.lock_id, device)
        told = {normalize_bus_id(bus): clean_text(why) for bus, why in raw["lost"].items()}
        lost = dict(islice(((bus, why) for bus, why in told.items() if bus), MOST_DEVICES))
        driver, complete = str(raw["driver"]), raw["complete"] is True
        return Frame(float(raw["boottime"]), driver, [*devices.values()], failures, lost, complete)
    except IMPOSSIBLE as fault:
        raise FrameError(f"not a frame: {type(fault).__name__} {fault}") from None


def read_device(raw: dict[str, Any], failures: dict[str, str]) -> DeviceTelemetry | None:
    """Return a device without what cannot be true; None for one that cannot be named.

    `failures` gets what that was, by collector. Raise one of IMPOSSIBLE for what is no device.
    """
    bus, parent = normalize_bus_id(raw["bus"]), normalize_bus_id(raw["parent"])
    device = DeviceTelemetry(bus or parent, raw["uuid"], 0, parent=parent)
    device.name, device.profile = clean_text(raw["name"]), clean_text(raw["profile"])

    def fail(key: str, value: object, of: str = bus) -> None:
        collector = RULES[key].collector if key in RULES else "devices"
        failures.setdefault(collector, f"{of}: {key} cannot be {str(value)[:LONGEST_TEXT]}")

    if device.uuid and not UUID.fullmatch(device.uuid):
        fail("uuid", device.uuid)
        device.uuid = ""
    for key, rule in RULES.items():
        if (told := raw.get(key)) is not None:
            value = usable_value(told, rule)
            if value is not None:
                setattr(device, key, value)
            if value != told:
                fail(key, told)
    if not device.bus or (raw["parent"] and (not parent or None in (device.gi, device.ci))):
        fail("bus", (raw["bus"], raw["parent"]), "a device")
        return None
    if (device.memory_used or 0) > (device.memory_total or MOST_BYTES):
        fail("memory_used", device.memory_used)
        device.memory_used = None
    if (listed := raw.get("processes")) is not None:
        processes = {int(one["pid"]): one.get("memory") for one in listed}  # each once
        device.processes = [
            Process(pid, usable_value(memory, RULES["memory_used"]))
            for pid, memory in processes.items()
            if 0 < pid <= MOST_PID
        ]
    return device


def usable_value(value: Any, rule: FieldRule) -> Any:
    """Return a value as far as the rule of its field allows it, None where nothing of it can be."""
    kind = "dict" if rule.by_name else rule.kind
    if type(value) not in TYPES[kind]:
        return None
    if kind == "dict":
        one, some = rule._replace(by_name=False), islice(value.items(), MOST_NAMES)
        usable = {name: usable_value(own, one) for name, own in some if is_name(name)}
        return {name: own for name, own in usable.items() if own is not None}
    if kind == "list":
        return [name for name in value[:MOST_NAMES] if is_name(name)]
    fits = kind == "bool" or rule.least <= value <= rule.most
    return (float(value) if kind == "float" else value) if fits else None


def is_name(value: object) -> bool:
    """Return whether this may be a key of a file, and a label."""
    return isinstance(value, str) and NAME.match(value) is not None


def clean_text(text: str) -> str:
    """Return a text as one line of so much."""
    return one_line(text[:LONGEST_TEXT])
