# SPDX-License-Identifier: Apache-2.0
"""A frame out of a line: what no hardware can have is dropped before it is believed.

Drivers hand out garbage: 900 % of utilisation, all bits set, the memory of another card. A value
that breaks the rule of its field is not known, which is not 0, and its collector has failed. Names
become keys of files and labels, so they are held to an alphabet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from gpulock.errors import one_line
from gpulock_exporter.telemetry import (
    BOARD_RULES,
    MOST_BYTES,
    RULES,
    VERSION,
    DeviceTelemetry,
    FieldRule,
    Frame,
    FrameError,
    Process,
    Xid,
)

MOST_DEVICES = 1024  # of a frame: 16 cards of 7 instances are 128
MOST_NAMES = 64  # of reasons, of ECC counters, of links: of whatever becomes a label
LONGEST_TEXT = 128  # characters
PID_LENGTH = 8  # digits, and one more than any pid has
MOST_WORKING = 1 << 10  # processes of a card that say how much they worked
MOST_PID = 1 << 22  # PID_MAX_LIMIT of a 64 bit kernel, proc_sys_kernel(5)
KEPT = 2048  # texts, cut to LONGEST_TEXT, that are judged once: each second has the same ones

BUS = re.compile(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_.-]{0,95}")
NAME = re.compile(r"[a-z0-9][a-z0-9_.:-]{0,63}")

TEXTS = ("bus", "parent", "uuid", "name", "profile")  # of a device

JsonObject = dict[str, Any]


def decode_frame(line: bytes) -> Frame:
    """Return the frame of one line; raise FrameError.

    Of two devices with one lock id the first counts. What cannot be is a failure of its collector.
    """
    try:
        raw = as_object(json.loads(line))
    except (ValueError, RecursionError) as fault:
        raise FrameError(f"not a frame: {fault}") from None
    if raw.get("version", VERSION) != VERSION:
        raise FrameError(f"a frame of version {raw['version']}")
    frame = Frame(
        sequence=read_value(raw, "sequence", int),
        boottime=read_value(raw, "boottime", float),
        wall=read_value(raw, "wall", float),
        driver=read_value(raw, "driver", str, ""),
        durations=read_values(raw, "durations", float),
        failures=read_values(raw, "failures", str),
        complete=read_value(raw, "complete", bool, False),
    )
    events = map(as_object, read_value(raw, "xids", list, []))
    frame.xids = [Xid(read_value(one, "uuid", str), read_value(one, "xid", int)) for one in events]
    told = list(read_values(raw, "lost", str).items())[:MOST_DEVICES]
    lost = [(normalize_bus_id(bus), clean_text(why[:LONGEST_TEXT])) for bus, why in told]
    frame.lost = {bus: why for bus, why in lost if bus}
    devices: dict[str, DeviceTelemetry] = {}
    for one in read_value(raw, "devices", list, [])[:MOST_DEVICES]:
        device = read_device(as_object(one), frame.failures)
        if device is not None:
            devices.setdefault(device_lock_id(device), device)
    frame.devices = list(devices.values())
    return frame


def as_object(raw: object) -> JsonObject:
    """Return what is a JSON object; raise FrameError."""
    if not isinstance(raw, dict):
        raise FrameError(f"{type(raw).__name__} where an object belongs")
    return cast("JsonObject", raw)


def read_value(raw: JsonObject, name: str, kind: type, default: object = None) -> Any:
    """Return a value of that type; raise FrameError."""
    value = raw.get(name, default)
    if kind is float and type(value) is int and value <= MOST_BYTES:
        return float(value)
    if type(value) is not kind:
        raise FrameError(f"{name} is {type(value).__name__}")
    return value


def read_values(raw: JsonObject, name: str, kind: type) -> dict[str, Any]:
    """Return an object whose values are all of that type; raise FrameError."""
    values = as_object(raw.get(name, {}))
    return {key: read_value(values, key, kind) for key in values}


def device_lock_id(device: DeviceTelemetry) -> str:
    """Return the id of a device's lock: its bus id, and for an instance which one it is."""
    if not device.parent:
        return device.bus
    return f"{device.parent}.gi{device.gi}.ci{device.ci}"


def read_device(raw: JsonObject, failures: dict[str, str]) -> DeviceTelemetry | None:
    """Return a device without what cannot be true; None for one that cannot be named.

    `failures` gets what that was, by collector. Raise FrameError where a text is none.
    """
    texts = [read_value(raw, key, str, "")[:LONGEST_TEXT] for key in TEXTS]
    bus, parent = normalize_bus_id(texts[0]), normalize_bus_id(texts[1])
    usable = {key: usable_value(raw.get(key), rule) for key, rule in RULES.items()}
    usable["index"] = usable_value(raw.get("index"), RULES["minor"])
    usable["uuid"] = texts[2] if is_uuid(texts[2]) else ""
    usable["process_use"] = usable_process_use(raw.get("process_use"))
    place = (parent, usable["gi"], usable["ci"])
    if not (bus or parent) or (texts[1] and ("" in place or None in place)):
        note_impossible_value(failures, "a device", "bus", (texts[0], texts[1], *place[1:]))
        return None
    for key, value in usable.items():
        told = raw.get(key)
        if told is not None and value != told:
            note_impossible_value(failures, bus or parent, key, told)
    known: JsonObject = {
        key: value
        for key, value in usable.items()
        if value is not None and not (parent and key in BOARD_RULES)
    }
    device = DeviceTelemetry(**{"bus": bus or parent, "index": 0, **known})
    device.parent, device.name, device.profile = parent, *map(clean_text, texts[3:])
    device.processes = usable_processes(raw.get("processes"))
    if (device.memory_used or 0) > (device.memory_total or MOST_BYTES):
        note_impossible_value(failures, bus or parent, "memory_used", device.memory_used)
        device.memory_used = None
    return device


def usable_value(value: object, rule: FieldRule) -> object:
    """Return a value as far as its rule allows it, None where nothing of it can be."""
    if value is None:
        return None
    if rule.by_name:
        return usable_values(value, rule)
    if rule.kind is list:
        names = cast("list[object]", value) if isinstance(value, list) else []
        return [one for one in names[:MOST_NAMES] if isinstance(one, str) and is_name(one)]
    if type(value) is not rule.kind and not (rule.kind is float and type(value) is int):
        return None
    if rule.kind is bool:
        return value
    number = cast("float", value)
    if not rule.least <= number <= rule.most:
        return None
    return float(number) if rule.kind is float else number


def usable_values(values: object, rule: FieldRule) -> dict[str, object] | None:
    """Return what has a usable name and a usable value."""
    if not isinstance(values, dict):
        return None
    single = rule._replace(by_name=False)
    some = islice(cast("Mapping[str, object]", values).items(), MOST_NAMES)
    judged = [(name, usable_value(value, single)) for name, value in some if is_name(name)]
    return {name: value for name, value in judged if value is not None}


def note_impossible_value(failures: dict[str, str], bus: str, key: str, value: object) -> None:
    """Say of a field's collector that it has failed, and by what."""
    text = f"{bus}: {key} cannot be {str(value)[:LONGEST_TEXT]}"
    collector = RULES[key].collector if key in RULES else "devices"
    failures.setdefault("utilization" if key == "process_use" else collector, text)


def normalize_bus_id(text: str) -> str:
    """Return a PCI bus id as the kernel writes it, NVML's 8 digits or not; empty for none."""
    return _normalize_bus_id(text[:LONGEST_TEXT])


@lru_cache(KEPT)
def _normalize_bus_id(text: str) -> str:
    match = BUS.fullmatch(text.lower())
    return f"{int(match[1], 16):04x}{match[2]}" if match else ""


@lru_cache(KEPT)
def is_uuid(text: str) -> bool:
    """Return whether a text can be a UUID."""
    return UUID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Return whether a text can be a key of a file, and a label."""
    return _is_name(text[:LONGEST_TEXT])


@lru_cache(KEPT)
def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


@lru_cache(KEPT)
def clean_text(text: str) -> str:
    """Return a text as one line."""
    return one_line(text)


def usable_processes(raw: object) -> list[Process] | None:
    """Return the processes of a list that can be, each once; raise FrameError."""
    if raw is None:
        return None
    if not isinstance(raw, list):
        raise FrameError(f"processes is {type(raw).__name__}")
    listed = {read_value(one, "pid", int): one for one in map(as_object, cast("list[object]", raw))}
    sizes = RULES["memory_used"]
    return [
        Process(pid, cast("int | None", usable_value(one.get("memory"), sizes)))
        for pid, one in listed.items()
        if 0 < pid <= MOST_PID
    ]


def usable_process_use(raw: object) -> dict[str, float] | None:
    """Return how much each process worked; where one of them cannot be, none is believed."""
    if not isinstance(raw, dict) or len(cast("JsonObject", raw)) > MOST_WORKING:
        return None
    shares = cast("dict[str, object]", raw)
    for word, share in shares.items():
        is_pid = word.isascii() and word.isdigit() and len(word) < PID_LENGTH
        if not is_pid or type(share) not in (int, float) or not 0 <= cast("float", share) <= 1:
            return None
    return cast("dict[str, float]", shares)
