# SPDX-License-Identifier: Apache-2.0
"""What one look at the driver gives: the frame that the worker sends and the exporter believes.

A value that the card does not have is absent (None), never 0. Times are CLOCK_BOOTTIME seconds.
The worker imports this module, small ones of gpulock's own, pynvml and the standard library. A
frame crosses the pipe as one line of JSON. Each field of a device says what can be true of it, and
`frame_decoder` believes nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

LINE_LIMIT = 1 << 22  # bytes of a frame: 128 MIG devices with 100 processes each are 1 MiB

COLLECTORS = (  # what `failures` of a frame go by
    *("devices", "mig", "utilization", "memory", "power", "temperature", "clocks", "gpm"),
    *("processes", "counters", "ecc", "remapped", "pcie", "nvlink"),
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

BUS = re.compile(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
MOST_ID = 1 << 12  # of an index, a minor, an instance
MOST_BYTES = 1 << 50  # of memory
MOST_ERRORS = (1 << 32) - 2  # of memory; 32 bits of ones are no count
MOST_COUNT = (1 << 64) - 1  # of a counter of bytes


class FrameError(ValueError):
    """Say that a line is no frame."""


def known(collector: str, least: float = 0, most: float = 0) -> Any:
    """Return a field of a record that is None where it is not known.

    What can be true of it is between `least` and `most`; of values by name each is.
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
    long the driver's sample buffer covers. `utilization` and `memory_utilization` are ratios from
    0 to 1. Counters (`energy` J, `*_transmit` and `*_receive` bytes, `*_seconds` by reason,
    `ecc`, `pcie_replays`, `nvlink_errors`) run since the driver was loaded and may wrap or restart
    at 0; the exporter makes them monotonic.
    `clock_reasons` are the names of those that are active.
    """

    bus: str
    uuid: str
    index: int
    minor: int | None = known("devices", 0, MOST_ID)
    name: str = ""
    parent: str = ""
    gi: int | None = known("devices", 0, MOST_ID)
    ci: int | None = known("devices", 0, MOST_ID)
    profile: str = ""
    mig: bool | None = known("mig")
    persistence: bool | None = known("devices")
    # seconds that the driver took for this card at the last look
    answer: float | None = known("devices", 0, 1e6)
    numa: int | None = known("devices", 0, MOST_ID)
    # the kernel puts own pages into its memory
    coherent: bool | None = known("devices")
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
    # ratio of its highest speed; some fans turn faster than that
    fan: float | None = known("temperature", 0, 2)
    sm_clock: float | None = known("clocks", 0, 2e10)  # hertz
    memory_clock: float | None = known("clocks", 0, 2e11)
    clock_reasons: list[str] | None = known("clocks")
    clock_reason_seconds: dict[str, float] | None = known("clocks", 0, 1e15)
    ecc: dict[str, int] | None = known("ecc", 0, MOST_ERRORS)  # `corrected.sram`, ...
    remapped: dict[str, int] | None = known("remapped", 0, MOST_ERRORS)  # rows by cause
    remap_pending: bool | None = known("remapped")
    remap_failure: bool | None = known("remapped")
    recovery_action: int | None = known("remapped", 0, max(RECOVERY_ACTIONS))
    # now, and the most that card and slot can have
    pcie_generation: int | None = known("pcie", 1, 9)
    pcie_generation_max: int | None = known("pcie", 1, 9)
    pcie_width: int | None = known("pcie", 1, 32)
    pcie_width_max: int | None = known("pcie", 1, 32)
    pcie_replays: int | None = known("pcie", 0, MOST_ERRORS)
    nvlink_errors: dict[str, int] | None = known("nvlink", 0, MOST_BYTES)  # by kind: `replay`, ...
    nvlink_active: int | None = known("nvlink", 0, MOST_ID)  # links that are up
    fabric: int | None = known("nvlink", 1, max(FABRIC_STATES))
    pcie_transmit: int | None = known("pcie", 0, MOST_COUNT)
    pcie_receive: int | None = known("pcie", 0, MOST_COUNT)
    nvlink_transmit: int | None = known("nvlink", 0, MOST_COUNT)
    nvlink_receive: int | None = known("nvlink", 0, MOST_COUNT)
    # of these bytes, what the worker adds up: from 0 with it
    summed: list[str] | None = known("gpm")
    gpm: dict[str, float] | None = known("gpm", 0, 1)  # ratios by name: sm_active, ...
    # NVLinks to the bus id of a peer; `switch`: to NVSwitch
    links: dict[str, int] | None = known("devices", 0, MOST_ID)
    processes: list[Process] | None = None  # None: not looked at this time, or not supported


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
    return _ENCODER.encode(frame).encode() + b"\n"


def _known_fields(record: object) -> dict[str, Any]:
    """Return what is known of a record: its fields without those that are absent."""
    return {name: value for name, value in vars(record).items() if value is not None}


# a frame is a tree of records, which nothing else in it is
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_known_fields)
