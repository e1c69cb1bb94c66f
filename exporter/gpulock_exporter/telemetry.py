# SPDX-License-Identifier: Apache-2.0
"""What one look at the driver gives: the frame that the worker sends and the exporter believes.

A value that the card does not have is absent (None), never 0. Times are CLOCK_BOOTTIME seconds.
The worker imports this module, gpulock.deadline, pynvml and the standard library, no more. A frame
crosses the pipe as one line of JSON; what comes out of the pipe is checked like any other input.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, Optional, Protocol, TypeVar, cast, get_type_hints

VERSION = 1
LINE_LIMIT = 1 << 22  # bytes of a frame: 128 MIG devices with 100 processes each are 1 MiB

# What `failures` of a frame go by. `counters` reads the last four of the second line at once, so
# that they have no `durations` of their own.
COLLECTORS = (
    *("devices", "mig", "utilization", "memory", "power", "temperature", "clocks", "gpm"),
    *("processes", "xid", "counters", "ecc", "remapped", "pcie", "nvlink"),
)
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
FABRIC_STATES = {  # nvmlGpuFabricState_t; the last two are ours: nvml/fabric.py
    1: "not_started",
    2: "in_progress",
    3: "completed",
    4: "failed",
    5: "unhealthy",
}
RECOVERY_ACTIONS = {  # nvmlDeviceGpuRecoveryAction_t
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}

_T = TypeVar("_T", bound="FrameRecord")


class FrameError(ValueError):
    """Say that a line is no frame."""


@dataclass
class FrameRecord:
    """A flat part of a frame; unknown keys are ignored, a value of another type is an error."""

    @classmethod
    def read(cls: type[_T], raw: object) -> _T:
        """Return the record in a JSON object; raise FrameError."""
        if not isinstance(raw, dict):
            raise FrameError(f"{cls.__name__} is {type(raw).__name__}")
        told, hints = cast("dict[str, Any]", raw), _record_hints(cls.__name__)
        # by names of ours: those of another string take Python five times as long as keywords
        known = {name: told[name] for name in hints if name in told}
        for name, value in known.items():
            if type(value) not in hints[name].plain:
                known[name] = _check_record_value(value, hints[name], name)
        try:
            return cls(**known)
        except TypeError as fault:
            raise FrameError(str(fault)) from None


@dataclass
class Process(FrameRecord):
    """A process that NVML lists on a device; memory in bytes, None where NVML does not tell."""

    pid: int
    memory: Optional[int] = None


@dataclass
class DeviceTelemetry(FrameRecord):
    """A GPU, or a MIG instance (`parent` is its card's bus id); one look.

    `busy` and `observed` are seconds since the last look: how long the device did work, and how
    long the driver's sample buffer covers. `utilization` and `memory_utilization` are ratios from
    0 to 1. Counters (`energy` J, `*_transmit` and `*_receive` bytes, `*_seconds` by reason,
    `ecc`, `pcie_replays`, `nvlink_errors`) run since the driver was loaded and may wrap or restart
    at 0; the exporter makes them monotonic.
    `clock_reasons` are the names of those that are active.
    """

    bus: str
    uuid: str
    index: int
    minor: Optional[int] = None
    name: str = ""
    parent: str = ""
    gi: Optional[int] = None
    ci: Optional[int] = None
    profile: str = ""
    mig: Optional[bool] = None
    persistence: Optional[bool] = None
    answer: Optional[float] = None  # seconds that the driver took for this card at the last look
    numa: Optional[int] = None
    coherent: Optional[bool] = None  # the kernel puts its own pages into the card's memory
    utilization: Optional[float] = None
    memory_utilization: Optional[float] = None
    busy: Optional[float] = None
    observed: Optional[float] = None
    memory_used: Optional[int] = None
    memory_total: Optional[int] = None
    power: Optional[float] = None
    energy: Optional[float] = None
    temperature: Optional[float] = None
    memory_temperature: Optional[float] = None
    power_limit: Optional[float] = None  # as set; the enforced one may be lower
    power_limit_enforced: Optional[float] = None
    fan: Optional[float] = None  # ratio of its highest speed
    sm_clock: Optional[float] = None
    memory_clock: Optional[float] = None
    clock_reasons: Optional[list[str]] = None
    clock_reason_seconds: Optional[dict[str, float]] = None
    ecc: Optional[dict[str, int]] = None  # `corrected.sram`, `uncorrected.dram`, ...
    remapped: Optional[dict[str, int]] = None  # rows by cause
    remap_pending: Optional[bool] = None
    remap_failure: Optional[bool] = None
    recovery_action: Optional[int] = None
    pcie_generation: Optional[int] = None  # now, and the most that card and slot can have
    pcie_generation_max: Optional[int] = None
    pcie_width: Optional[int] = None
    pcie_width_max: Optional[int] = None
    pcie_replays: Optional[int] = None
    nvlink_errors: Optional[dict[str, int]] = None  # by kind: `crc_flit`, `replay`, ...
    nvlink_active: Optional[int] = None  # links that are up
    fabric: Optional[int] = None  # 1 not started, 2 in progress, 3 done; 4 failed, 5 unhealthy
    pcie_transmit: Optional[int] = None
    pcie_receive: Optional[int] = None
    nvlink_transmit: Optional[int] = None
    nvlink_receive: Optional[int] = None
    summed: Optional[list[str]] = None  # of these bytes, what the worker adds up: from 0 with it
    gpm: Optional[dict[str, float]] = None  # ratios by name: sm_active, tensor_active, ...
    process_use: Optional[dict[str, float]] = None  # by pid, share of time since the last look
    processes: Optional[list[Process]] = None  # None: not looked at this time, or not supported
    links: Optional[dict[str, int]] = None  # NVLinks to the bus id of a peer; `switch`: to NVSwitch


@dataclass
class Xid(FrameRecord):
    """An XID event since the last look."""

    uuid: str
    xid: int


@dataclass
class Frame(FrameRecord):
    """One look at all devices. `failures` has the error of each collector that failed.

    `lost` has the driver's words on each card that was there and is lost, by bus id. `complete` is
    whether NVML was asked for every card: one that is not among `devices` does not answer.
    """

    sequence: int
    boottime: float
    wall: float
    driver: str = ""
    devices: list[DeviceTelemetry] = field(default_factory=list[DeviceTelemetry])
    xids: list[Xid] = field(default_factory=list[Xid])
    durations: dict[str, float] = field(default_factory=dict[str, float])  # by collector, seconds
    failures: dict[str, str] = field(default_factory=dict[str, str])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = False
    version: int = VERSION


class FrameSource(Protocol):
    """Where frames come from: NVML, or a simulated node."""

    def open(self) -> None:
        """Get ready; raise RuntimeError with the driver's words where that cannot be."""

    def look(self, processes: bool, shared: Collection[str] = ()) -> Frame:
        """Look once, with process lists where they are wanted.

        `shared` are the cards of which it is wanted how much each process worked, by bus id.
        """
        ...

    def close(self) -> None:
        """Let go of the driver."""


class _Hint(NamedTuple):
    """An annotation, taken apart once: a frame has hundreds of values.

    A value whose type is in `plain` is taken as it is; `inner` is what a list or a dict holds.
    """

    kind: type[Any]
    inner: _Hint | None
    plain: frozenset[type[Any]]


@cache
def _record_hints(name: str) -> dict[str, _Hint]:
    """Return what the fields of a record are to be."""
    record: type[FrameRecord] = globals()[name]
    hints = get_type_hints(record)
    return {one.name: _annotation_hint(hints[one.name]) for one in fields(record)}


def _annotation_hint(annotation: Any) -> _Hint:
    arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
    if type(None) in arguments:
        known = _annotation_hint(next(one for one in arguments if one is not type(None)))
        return known._replace(plain=known.plain | {type(None)})
    kind = getattr(annotation, "__origin__", annotation)
    inner = _annotation_hint(arguments[-1]) if arguments else None
    plain = frozenset[type[Any]]() if inner or issubclass(kind, FrameRecord) else frozenset({kind})
    return _Hint(kind, inner, plain)


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as one line."""
    return _ENCODER.encode(frame).encode() + b"\n"


def decode_frame(line: bytes) -> Frame:
    """Return the frame of one line; raise FrameError."""
    try:
        frame = Frame.read(json.loads(line))
    except (ValueError, OverflowError, RecursionError) as fault:
        raise FrameError(f"not a frame: {fault}") from None
    if frame.version != VERSION:
        raise FrameError(f"a frame of version {frame.version}")
    return frame


def _known_fields(record: FrameRecord) -> dict[str, Any]:
    """Return what is known of a record: its fields without those that are absent."""
    return {name: value for name, value in vars(record).items() if value is not None}


# a frame is a tree of records, which nothing else in it is
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_known_fields)


def _check_record_value(value: Any, hint: _Hint, name: str) -> Any:
    """Return `value` where it is what the annotation says; raise FrameError."""
    if type(value) in hint.plain:
        return value
    if issubclass(hint.kind, FrameRecord):
        return hint.kind.read(value)
    if hint.kind is float and type(value) is int:
        return float(value)
    if type(value) is not hint.kind or hint.inner is None:
        raise FrameError(f"{name} is {type(value).__name__}")
    inner = hint.inner
    if hint.kind is list:
        return [_check_record_value(one, inner, name) for one in cast("list[Any]", value)]
    pairs = cast("dict[str, Any]", value)
    if inner.plain.issuperset(map(type, pairs.values())):
        return pairs
    return {key: _check_record_value(one, inner, name) for key, one in pairs.items()}
