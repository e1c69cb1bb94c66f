# SPDX-License-Identifier: Apache-2.0
"""What a card tells at a slower rhythm: temperature, clocks, counters, limits, links, its fabric.

Only the worker imports this.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pynvml

from gpulock_exporter.frame import RULES
from gpulock_exporter.nvml.answers import (
    NAMED,
    NOT_AVAILABLE,
    NvmlDevice,
    PollContext,
    call_nvml,
    calls,
)
from gpulock_exporter.nvml.field_values import (
    ALWAYS,
    NOT_SUPPORTED,
    NVLINK,
    NVLINK_ERRORS,
    NVLINK_STATES,
    PCIE,
    NvmlField,
    read_fields,
    reason_fields,
)

FABRIC_DONE = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
FABRIC_FAILED, FABRIC_UNHEALTHY = 4, 5  # ours: done with an error, and done but not well
FABRIC = struct.Struct("@I16sIIB3xIB3x")  # nvmlGpuFabricInfo_v3_t; version 2 ends with the mask
SUMMARY_UNHEALTHY = 2  # NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
MASK_FLAGS, FLAG_TRUE = (0, 2, 4, 6), 1  # of the health mask: two bits for each fault, 1: it is so
MASK_CONFIGURATION, CONFIGURATION_GOOD = 8, 1  # four bits: 0 not supported, 1 none is wrong
VERSION_WORD = 4  # bytes
WORD = 1 << 32
MILLI, MEGA, WHOLE = 1e3, 1e6, 100  # milliwatts, megahertz, percent


def fabric_query(call: str, version: int, size: int) -> Callable[[pynvml.c_nvmlDevice_t], int]:
    """Return a way to ask how far a card is registered with the NVLink fabric; 0: there is none.

    Without it CUDA finds no card on a node with NVSwitch (Hopper and later). A call without a
    version fills in neither that word nor whether the card is well there.
    """

    def read(handle: pynvml.c_nvmlDevice_t) -> int:
        raw = ctypes.create_string_buffer(FABRIC.size)
        struct.pack_into("@I", raw, 0, size | version << 24)
        call_nvml(call, handle, ctypes.byref(raw, 0 if version else VERSION_WORD))
        _, _, status, _, state, mask, summary = FABRIC.unpack(raw.raw)
        if state != FABRIC_DONE:
            return int(state)
        if status:
            return FABRIC_FAILED
        bad = summary == SUMMARY_UNHEALTHY or is_fabric_mask_bad(mask)
        return FABRIC_UNHEALTHY if bad else FABRIC_DONE

    return read


def is_fabric_mask_bad(mask: int) -> bool:
    """Return whether a health mask names a fault. Pure."""
    flags = any(mask >> shift & 3 == FLAG_TRUE for shift in MASK_FLAGS)
    return flags or mask >> MASK_CONFIGURATION & 15 > CONFIGURATION_GOOD


FABRIC_CALLS = (
    fabric_query("nvmlDeviceGetGpuFabricInfoV", 3, FABRIC.size),  # 550
    fabric_query("nvmlDeviceGetGpuFabricInfoV", 2, FABRIC.size - 4),
    fabric_query("nvmlDeviceGetGpuFabricInfo", 0, 0),  # 525
)


class SlowCounters:
    """The last values of a card that change seldom, by the names of their attributes in a record.

    They are read every few seconds. Some of it costs the driver a millisecond, with the lock held
    that the applications wait for (docs/facts/nvml.md, cost); the cards take
    turns. In between a frame has the last values, and their failures.
    """

    def __init__(self, driver: str) -> None:
        self._reasons = reason_fields(driver)
        self.values: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.due = 0.0
        self._pcie: dict[NvmlField, float] = {}

    def read(self, card: NvmlDevice, poll: PollContext, nvlink: bool, pcie: bool) -> None:
        """Ask the card; `nvlink` and `pcie` say which of those counters are wanted."""
        now = PollContext(poll.now)
        self.values, self.failures = {}, now.failures
        links = (*NVLINK, *NVLINK_ERRORS, *NVLINK_STATES) if nvlink else ()
        values = read_fields(card, now, (*self._reasons, *ALWAYS, *links, *(PCIE if pcie else ())))
        self._leave_out_narrow(card, now, values)
        self.values = board_values(values)
        for name, (read, *ways) in BOARD_CALLS.items():
            value = card.query(now, RULES[name].collector, *ways)
            if value is not None and value not in NOT_AVAILABLE:
                self.values[name] = read(value)
        if ecc := _with_sram(card, now, self.values.get("ecc")):
            self.values["ecc"] = ecc
        if nvlink and (fabric := card.query(now, "nvlink", *FABRIC_CALLS)):
            self.values["fabric"] = fabric

    def _leave_out_narrow(
        self, card: NvmlDevice, poll: PollContext, values: dict[NvmlField, float]
    ) -> None:
        """Drop bytes over PCIe that fell before they filled 32 bits: see `field_error`."""
        for field in PCIE:
            value = values.get(field, 0)
            if value < self._pcie.get(field, 0) < WORD:
                values.pop(field, None)
                card.refused(poll, field.collector, field, NOT_SUPPORTED)
            elif value:
                self._pcie[field] = value


def board_values(values: dict[NvmlField, float]) -> dict[str, Any]:
    """Return what field values say, by the names of the fields of a record."""
    board: dict[str, Any] = {}
    for field in sorted(values, key=lambda field: field.id):
        value = field.read(values[field])
        if field.key:
            board.setdefault(field.name, {})[field.key] = value
        else:
            board[field.name] = value
    if "nvlink_active" in board:
        board["nvlink_active"] = sum(board["nvlink_active"].values())
    if not board.get("memory_temperature"):  # 0: no sensor
        board.pop("memory_temperature", None)
    for sent, received in (NVLINK, PCIE):  # one direction alone is no traffic
        if not {sent.name, received.name} <= board.keys():
            board.pop(sent.name, None)
            board.pop(received.name, None)
    return board


def watts(milliwatts: int) -> float:
    """Return milliwatts in watts."""
    return milliwatts / MILLI


def hertz(megahertz: int) -> float:
    """Return megahertz in hertz."""
    return megahertz * MEGA


def _with_sram(
    card: NvmlDevice, poll: PollContext, ecc: dict[str, int] | None
) -> dict[str, int] | None:
    """Add the errors in SRAM, where a card (from Ampere on) tells them as one, by no field."""
    if ecc and any(not name.endswith(".dram") for name in ecc):
        return ecc  # it tells its caches apart, and they are the SRAM
    errors = dict(ecc or {})
    for name, way in SRAM_QUERIES.items():
        count = card.query(poll, "ecc", way)
        if count is not None and count not in NOT_AVAILABLE:
            errors[name] = count
    return errors or None


TEMPERATURE = NAMED.bind("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
# as CUDA 14 will want it (nvml.h 13): the other call is to go
TEMPERATURE_V = NAMED.bind("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU)
# how each value is made of the number that the first way gives which driver and card have
BOARD_CALLS: dict[str, tuple[Callable[..., Any], ...]] = {
    "persistence": ({0: False, 1: True}.get, calls.nvmlDeviceGetPersistenceMode),
    "power_limit": (watts, calls.nvmlDeviceGetPowerManagementLimit),
    "power_limit_enforced": (watts, calls.nvmlDeviceGetEnforcedPowerLimit),
    "temperature": (float, TEMPERATURE, TEMPERATURE_V),
    "fan": (lambda percent: percent / WHOLE, calls.nvmlDeviceGetFanSpeed),
    "sm_clock": (hertz, NAMED.bind("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)),
    "memory_clock": (hertz, NAMED.bind("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM)),
    "clock_reasons": (
        int,
        calls.nvmlDeviceGetCurrentClocksEventReasons,  # 535
        calls.nvmlDeviceGetCurrentClocksThrottleReasons,
    ),
    "pcie_generation": (int, calls.nvmlDeviceGetCurrPcieLinkGeneration),
    "pcie_generation_max": (int, calls.nvmlDeviceGetMaxPcieLinkGeneration),
    "pcie_width": (int, calls.nvmlDeviceGetCurrPcieLinkWidth),
    "pcie_width_max": (int, calls.nvmlDeviceGetMaxPcieLinkWidth),
}
SINCE_LOAD, SRAM = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_MEMORY_LOCATION_SRAM
SRAM_QUERIES = {
    name: NAMED.bind("nvmlDeviceGetMemoryErrorCounter", kind, SINCE_LOAD, SRAM)
    for name, kind in (
        ("corrected.sram", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ("uncorrected.sram", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    )
}
