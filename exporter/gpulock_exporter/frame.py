# SPDX-License-Identifier: Apache-2.0
"""What a worker says: a frame of each look at the driver, and the call in which it is.

A value that the card does not have is absent (None), never 0. Times are CLOCK_BOOTTIME seconds. A
frame crosses the pipe as one line of JSON. Drivers hand out garbage: 900 % of utilisation, all bits
set, the memory of another card. Each field of a device says what can be true of it; what breaks
that rule is not known, and its collector has failed. Names become keys of files and labels, so they
are held to an alphabet.

Nobody can ask a worker that hangs in the driver: before each call it names it in a page. Its
supervisor reads the page when a frame is late, and learns which card the other cards wait for.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line

BUS = re.compile(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_.-]{0,95}")
DEVICE_NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}\Z")
LONGEST_TEXT = 128  # characters
MOST_DEVICES = 1024  # of a frame: 16 cards of 7 instances are 128
MOST_NAMES = 64  # of ECC counters, of links: of whatever becomes a label
MOST_ID = 1 << 12  # of an index, a minor, an instance
MOST_PID = 1 << 22  # PID_MAX_LIMIT of a 64 bit kernel, proc_sys_kernel(5)
MOST_BYTES = 1 << 50  # of memory
MOST_ERRORS = (1 << 32) - 2  # of memory; 32 bits of ones are no count
MOST_COUNT = (1 << 64) - 1  # of a counter of bytes
IMPOSSIBLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
PAGE = struct.Struct("=di32s128s")  # since, card, bus id, call; padded with zeros
NO_CARD = -1


class FieldRule(NamedTuple):
    """What can be true of a field, or, `by_name`, of each of its values."""

    collector: str  # that fails where it is not so
    least: float
    most: float
    kinds: tuple[type, ...]  # the first is what a value becomes
    by_name: bool = False


def known(collector: str, least: float = False, most: float = True) -> Any:
    """Return a field that is None where it is not known; without bounds it is a yes or no."""
    kinds = (float, int) if type(most) is float else (type(most),)
    return field(default=None, metadata={"rule": FieldRule(collector, least, most, kinds)})


@dataclass
class DeviceTelemetry:
    """A GPU, or a MIG instance of it (`gi`, `ci`); one look.

    `busy` and `observed` are seconds since the last look: how long the device did work, and how
    long the driver's sample buffer covers. Ratios are from 0 to 1. Counters (`energy`, bytes,
    errors, `*_seconds`) run since the driver was loaded, and may wrap or restart at 0.
    """

    bus: str
    uuid: str
    index: int = known("devices", 0, MOST_ID)
    minor: int | None = known("devices", 0, MOST_ID)
    name: str = ""
    gi: int | None = known("devices", 0, MOST_ID)
    ci: int | None = known("devices", 0, MOST_ID)
    profile: str = ""
    mig: bool | None = known("mig")
    persistence: bool | None = known("devices")
    answer: float | None = known("devices", 0.0, 1e6)  # seconds that the driver took for this card
    numa: int | None = known("devices", 0, MOST_ID)
    coherent: bool | None = known("devices")  # the kernel puts own pages into its memory
    utilization: float | None = known("utilization", 0.0, 1.0)
    memory_utilization: float | None = known("utilization", 0.0, 1.0)
    busy: float | None = known("utilization", 0.0, 1e6)
    observed: float | None = known("utilization", 0.0, 1e6)
    memory_used: int | None = known("memory", 0, MOST_BYTES)
    memory_total: int | None = known("memory", 1, MOST_BYTES)
    power: float | None = known("power", 0.0, 5000.0)  # watts: the largest boards are at 1,400
    energy: float | None = known("power", 0.0, 1e18)  # joules
    temperature: float | None = known("temperature", -50.0, 200.0)
    memory_temperature: float | None = known("temperature", -50.0, 200.0)
    power_limit: float | None = known("power", 0.0, 5000.0)  # as set; the enforced one may be lower
    power_limit_enforced: float | None = known("power", 0.0, 5000.0)
    fan: float | None = known("temperature", 0.0, 2.0)  # of its highest speed, which some exceed
    sm_clock: float | None = known("clocks", 0.0, 2e10)  # hertz
    memory_clock: float | None = known("clocks", 0.0, 2e11)
    clock_reasons: int | None = known("clocks", 0, MOST_ERRORS)  # bits of those that are active
    clock_reason_seconds: dict[str, float] | None = known("clocks", 0.0, 1e15)
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
    fabric: int | None = known("nvlink", 1, 5)  # nvml/slow_counters.py
    pcie_transmit: int | None = known("pcie", 0, MOST_COUNT)  # bytes, as are the next three
    pcie_receive: int | None = known("pcie", 0, MOST_COUNT)
    nvlink_transmit: int | None = known("nvlink", 0, MOST_COUNT)
    nvlink_receive: int | None = known("nvlink", 0, MOST_COUNT)
    nvlink_summed: bool | None = known("gpm")  # whether the worker adds them up, from 0
    gpm: dict[str, float] | None = known("gpm", 0.0, 1.0)  # ratios by name: sm_active, ...
    links: dict[str, int] | None = known("devices", 0, MOST_ID)  # to a peer's bus id, or `switch`
    processes: dict[int, int | None] | None = None  # bytes by pid, where told; None: not listed

    @property
    def lock_id(self) -> str:
        """Return the id of its lock: its bus id, and for an instance which one it is."""
        return self.bus if self.gi is None else f"{self.bus}.gi{self.gi}.ci{self.ci}"


RULES: dict[str, FieldRule] = {
    one.name: one.metadata["rule"]._replace(by_name="dict" in str(one.type))
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
    """Return a frame as one line."""
    return json.dumps(frame, separators=(",", ":"), default=vars).encode() + b"\n"


def decode_frame(line: bytes) -> Frame:
    """Return the frame of one line; raise ValueError. What cannot be is a collector's failure."""
    try:
        raw = json.loads(line)
        frame = Frame(float(raw["boottime"]), str(raw["driver"]), complete=raw["complete"] is True)
        frame.failures = {name: str(why) for name, why in raw["failures"].items()}
        read = [read_device(one, frame.failures) for one in raw["devices"][:MOST_DEVICES]]
        frame.devices = [device for device in read if device]
        lost = [(normalize_bus_id(bus), why) for bus, why in raw["lost"].items()][:MOST_DEVICES]
        frame.lost = {bus: one_line(why[:LONGEST_TEXT]) for bus, why in lost if bus}
        return frame
    except IMPOSSIBLE as fault:
        raise ValueError(f"not a frame: {type(fault).__name__} {fault}") from None


def read_device(raw: dict[str, Any], failures: dict[str, str]) -> DeviceTelemetry | None:
    """Return a device without what cannot be true; None for one that cannot be named.

    `failures` gets what that was, by collector. Raise one of IMPOSSIBLE for what is no device.
    """
    values = {key: usable_value(raw[key], rule) for key, rule in RULES.items()}
    values["bus"] = normalize_bus_id(raw["bus"])
    values["uuid"] = raw["uuid"] if UUID.fullmatch(raw["uuid"]) else ""
    if (values["memory_used"] or 0) > (values["memory_total"] or MOST_BYTES):
        values["memory_used"] = None
    for key in [key for key, value in values.items() if value != raw[key]]:
        words = f"{values['bus']}: {key} cannot be {str(raw[key])[:LONGEST_TEXT]}"
        failures.setdefault(RULES[key].collector if key in RULES else "devices", words)
    naming = ("bus", "index") if raw["gi"] is None else ("bus", "index", "gi", "ci")
    if any(values[key] in ("", None) for key in naming):
        return None
    if (listed := raw["processes"]) is not None:
        values["processes"] = {
            int(pid): usable_value(memory, RULES["memory_used"])
            for pid, memory in listed.items()
            if 0 < int(pid) <= MOST_PID
        }
    values |= {key: one_line(raw[key][:LONGEST_TEXT]) for key in ("name", "profile")}
    return DeviceTelemetry(**values)


def usable_value(value: Any, rule: FieldRule) -> Any:
    """Return a value as far as the rule of its field allows it, None where nothing of it can be."""
    _, least, most, kinds, by_name = rule
    make = kinds[0]
    if not by_name:
        return make(value) if type(value) in kinds and least <= value <= most else None
    if type(value) is not dict:
        return None
    usable = [
        (name, make(own))
        for name, own in value.items()
        if type(own) in kinds and least <= own <= most and DEVICE_NAME.match(name)
    ]
    return dict(usable[:MOST_NAMES])


class DriverCall(NamedTuple):
    """A call that is not over: since when (CLOCK_BOOTTIME seconds), of which card.

    `card` is NVML's index, NO_CARD for a call of none; `bus` is empty where it is not known yet.
    """

    since: float
    card: int
    bus: str
    name: str


class CallNote:
    """The worker's side of its page; file descriptor -1 is one that nobody reads."""

    def __init__(self, fd: int = -1) -> None:
        self._page = mmap.mmap(fd, PAGE.size)
        self._card = (NO_CARD, b"")

    def enter_card(self, index: int, bus: str) -> None:
        """Say that the calls from now on are of this card."""
        self._card = (index, bus.encode())

    def leave_card(self) -> None:
        """Say that the calls from now on are of no card, and that none is made now."""
        self._card = (NO_CARD, b"")
        PAGE.pack_into(self._page, 0, 0.0, *self._card, b"")

    def name_call(self, name: bytes) -> None:
        """Name a call before it is made."""
        PAGE.pack_into(self._page, 0, clock_boottime(), *self._card, name)


def read_driver_call(page: bytes) -> DriverCall | None:
    """Return the call of a card that was named last and has not come back, as a page tells."""
    if len(page) < PAGE.size:
        return None
    since, card, *texts = PAGE.unpack_from(page)
    if not since or card <= NO_CARD:
        return None
    # a worker may write anything
    bus, name = (one_line(raw.rstrip(b"\0").decode("ascii", "replace")) for raw in texts)
    return DriverCall(since, card, bus, name)
