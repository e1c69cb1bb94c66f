# SPDX-License-Identifier: Apache-2.0
"""A frame out of a line: what no hardware can have is dropped before it is believed.

Drivers hand out garbage: 900 % of utilisation, all bits set, the memory of another card. A value
that breaks the rule of its field is not known, which is not 0, and its collector has failed. Names
become keys of files and labels, so they are held to an alphabet.
"""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import islice
from typing import Any, NamedTuple, cast

from gpulock.errors import one_line
from gpulock_exporter.telemetry import (
    MOST_BYTES,
    MOST_ID,
    DeviceTelemetry,
    Frame,
    FrameError,
    Process,
    normalize_bus_id,
)

MOST_DEVICES = 1024  # of a frame: 16 cards of 7 instances are 128
MOST_NAMES = 64  # of reasons, of ECC counters, of links: of whatever becomes a label
LONGEST_TEXT = 128  # characters
MOST_PID = 1 << 22  # PID_MAX_LIMIT of a 64 bit kernel, proc_sys_kernel(5)

UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_.-]{0,95}")
NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}\Z")

JsonObject = dict[str, Any]
IMPOSSIBLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class FieldRule(NamedTuple):
    """What can be true of a field: the collector that tells it, its least and its most, its type.

    The type is bool, int, float or list; `by_name`: of each value.
    """

    collector: str
    least: float
    most: float
    kind: type
    by_name: bool = False


def field_rules() -> dict[str, FieldRule]:
    """Return what there is to know of each field that may not be known."""
    kinds: dict[str, type] = {"bool": bool, "int": int, "float": float}
    found = {"index": FieldRule("devices", 0, MOST_ID, int)}
    for one in dataclasses.fields(DeviceTelemetry):
        if one.metadata:
            words = re.findall(r"\w+", cast("str", one.type))  # dict[str, int] | None
            kind = kinds.get(words[2] if words[0] == "dict" else words[0], list)
            found[one.name] = FieldRule(**one.metadata, kind=kind, by_name=words[0] == "dict")
    return found


RULES = field_rules()


def decode_frame(line: bytes) -> Frame:
    """Return the frame of one line; raise FrameError.

    Of two devices with one lock id the first counts. What cannot be is a failure of its collector.
    """
    try:
        return read_frame(json.loads(line))
    except IMPOSSIBLE as fault:
        raise FrameError(f"not a frame: {type(fault).__name__} {fault}") from None


def read_frame(raw: Any) -> Frame:
    """Return the frame in a JSON object; raise one of IMPOSSIBLE."""
    frame = Frame(
        boottime=float(raw["boottime"]),
        driver=str(raw["driver"]),
        failures={name: str(why) for name, why in raw["failures"].items()},
        complete=raw["complete"] is True,
    )
    for bus, why in islice(raw["lost"].items(), MOST_DEVICES):
        if known := normalize_bus_id(bus):
            frame.lost[known] = clean_text(why)
    devices: dict[str, DeviceTelemetry] = {}
    for one in raw["devices"][:MOST_DEVICES]:
        device = read_device(one, frame.failures)
        if device is not None:
            devices.setdefault(device_lock_id(device), device)
    frame.devices = list(devices.values())
    return frame


def device_lock_id(device: DeviceTelemetry) -> str:
    """Return the id of a device's lock: its bus id, and for an instance which one it is."""
    if not device.parent:
        return device.bus
    return f"{device.parent}.gi{device.gi}.ci{device.ci}"


def read_device(raw: JsonObject, failures: dict[str, str]) -> DeviceTelemetry | None:
    """Return a device without what cannot be true; None for one that cannot be named.

    `failures` gets what that was, by collector. Raise one of IMPOSSIBLE for what is no device.
    """
    bus, parent = normalize_bus_id(raw["bus"]), normalize_bus_id(raw["parent"])
    device = DeviceTelemetry(bus or parent, raw["uuid"], 0, parent=parent)
    device.name, device.profile = clean_text(raw["name"]), clean_text(raw["profile"])
    if not UUID.fullmatch(device.uuid):
        if device.uuid:
            note_impossible_value(failures, bus, "uuid", device.uuid)
        device.uuid = ""
    for key, told in raw.items():
        rule = RULES.get(key)
        if rule is None or told is None:
            continue
        value = usable_value(told, rule)
        if value is not None:
            setattr(device, key, value)
        if value != told:
            note_impossible_value(failures, bus, key, told)
    if not device.bus or (raw["parent"] and (not parent or None in (device.gi, device.ci))):
        note_impossible_value(failures, "a device", "bus", (raw["bus"], raw["parent"]))
        return None
    if (device.memory_used or 0) > (device.memory_total or MOST_BYTES):
        note_impossible_value(failures, bus, "memory_used", device.memory_used)
        device.memory_used = None
    device.processes = usable_processes(raw.get("processes"))
    return device


def usable_value(value: Any, rule: FieldRule) -> Any:
    """Return a value as far as the rule of its field allows it, None where nothing of it can be."""
    if rule.by_name:
        if not isinstance(value, dict):
            return None
        one, some = rule._replace(by_name=False), cast("JsonObject", value).items()
        usable = {of: usable_value(own, one) for of, own in islice(some, MOST_NAMES) if is_name(of)}
        return {name: own for name, own in usable.items() if own is not None}
    if rule.kind is list:
        names = cast("list[object]", value) if isinstance(value, list) else []
        return [name for name in names[:MOST_NAMES] if is_name(name)]
    kind: Any = rule.kind
    if type(value) is not kind and not (kind is float and type(value) is int):
        return None
    number: float = value
    return kind(number) if kind is bool or rule.least <= number <= rule.most else None


def is_name(value: object) -> bool:
    """Return whether this may be a key of a file, and a label."""
    return isinstance(value, str) and NAME.match(value) is not None


def note_impossible_value(failures: dict[str, str], bus: str, key: str, value: object) -> None:
    """Say of a field's collector that it has failed, and by what."""
    collector = RULES[key].collector if key in RULES else "devices"
    failures.setdefault(collector, f"{bus}: {key} cannot be {str(value)[:LONGEST_TEXT]}")


def clean_text(text: str) -> str:
    """Return a text as one line of so much."""
    return one_line(text[:LONGEST_TEXT])


def usable_processes(raw: list[JsonObject] | None) -> list[Process] | None:
    """Return the processes of a list that can be, each once; raise one of IMPOSSIBLE."""
    if raw is None:
        return None
    listed = {int(one["pid"]): one for one in raw}
    memory = RULES["memory_used"]
    return [
        Process(pid, usable_value(one.get("memory"), memory))
        for pid, one in listed.items()
        if 0 < pid <= MOST_PID
    ]
