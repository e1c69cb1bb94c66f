# SPDX-License-Identifier: Apache-2.0
"""Field values: many numbers of a card for one call.

Only the worker imports this. The numbers of the fields are written out, with the release that
brought the newer ones, for nvidia-ml-py names only those that it knows. pynvml makes a structure
for each entry of a list, of which every attribute is a call of Python's: at one look a second that
was a third of what the worker costs, so the lists are ours and are kept.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pynvml

from gpulock_exporter.frame import RULES
from gpulock_exporter.nvml.answers import (
    NARROW,
    NOT_AVAILABLE,
    VALUES,
    NvmlDevice,
    PollContext,
    call_nvml,
)

FIELD = struct.Struct("@IIqqII8s")  # nvmlFieldValue_t
LISTS_KEPT = 64  # of fields that were asked for together: those that a card lacks are left out
ALL_LINKS = 0xFFFFFFFF  # nvml.h: the scope that adds up the counters of all NVLinks


class NvmlField(NamedTuple):
    """A field value: number and scope in nvml.h, and what it is in a record.

    `name` is the attribute; where that has values by name, `key` is that name. `read` makes of the
    number what stands there.
    """

    id: int
    scope: int
    name: str
    key: str = ""
    read: Callable[[float], Any] = int

    @property
    def collector(self) -> str:
        """Return what fails where this cannot be read."""
        return RULES[self.name].collector


def field_table(
    name: str, keys: Mapping[int, str], read: Callable[[float], Any] = int
) -> tuple[NvmlField, ...]:
    """Return the fields of an attribute that has values by name."""
    return tuple([NvmlField(number, 0, name, key, read) for number, key in keys.items()])


KIB = 1024
# 186 answers in microseconds; 185, the average over a second, holds the driver up for 3 ms
POWER = NvmlField(186, 0, "power")  # 535
ENERGY = NvmlField(83, 0, "energy")
REASON_SECONDS = field_table(  # of two with one name the last counts
    "clock_reason_seconds",
    {
        74: "sw_power_cap",
        75: "sw_thermal_slowdown",
        76: "sync_boost",
        77: "board_limit",
        79: "reliability",
        269: "sw_thermal_slowdown",  # 580.82, as are the next two: see reason_fields
        270: "hw_thermal_slowdown",
        271: "hw_power_brake_slowdown",
    },
    lambda nanoseconds: nanoseconds / 1e9,
)
MOVED_FROM, LOWER = 269, 18  # the number from which on fields were lower, and by how much
MOVED = ((575,), (580, 82))  # the first driver with the lower numbers, and the first without
ECC_PLACES = ("l1", "l2", "dram", "register", "texture")
ECC = field_table(  # volatile: since the driver was loaded
    "ecc",
    {
        **{7 + 2 * n: f"corrected.{place}" for n, place in enumerate(ECC_PLACES)},
        **{8 + 2 * n: f"uncorrected.{place}" for n, place in enumerate(ECC_PLACES)},
        17: "uncorrected.cbu",
    },
)
REMAPPED = field_table("remapped", {142: "correctable", 143: "uncorrectable"})
PENDING = NvmlField(144, 0, "remap_pending", read=bool)
FAILURE = NvmlField(145, 0, "remap_failure", read=bool)
RECOVERY_ACTION = NvmlField(230, 0, "recovery_action")  # 570
PCIE = (  # bytes; 555
    NvmlField(197, 0, "pcie_transmit"),
    NvmlField(198, 0, "pcie_receive"),
)
MEMORY_TEMPERATURE = NvmlField(82, 0, "memory_temperature", read=float)
REPLAYS = NvmlField(94, 0, "pcie_replays")
NVLINK_ERRORS = field_table(  # of all links together
    "nvlink_errors",
    {38: "crc_flit", 45: "crc_data", 52: "replay", 59: "recovery"},
)
NVLINK_STATES = tuple([NvmlField(165, n, "nvlink_active", str(n)) for n in range(18)])
NVLINK = (
    NvmlField(138, ALL_LINKS, "nvlink_transmit", read=lambda kib: int(kib) * KIB),
    NvmlField(139, ALL_LINKS, "nvlink_receive", read=lambda kib: int(kib) * KIB),
)

LARGEST = dict.fromkeys((PENDING, FAILURE, *NVLINK_STATES), 1)  # flags; others may be any
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
ZEROS = (0, 0, 0, 0, bytes(8))  # an entry behind number and scope: no time, so nobody filled it in
UNFILLED = (0, 0, 0, NOT_SUPPORTED, bytes(8))
UNKNOWN_FIELD = pynvml.NVML_ERROR_INVALID_ARGUMENT  # of one field: it is newer than the driver
BOARD_FIELDS = (PENDING, FAILURE, RECOVERY_ACTION, MEMORY_TEMPERATURE, REPLAYS)
ALWAYS = (*ECC, *REMAPPED, *BOARD_FIELDS)

FieldValue = tuple[int, int, bytes]  # error, nvmlValueType_t, the value as it lies in memory


def reason_fields(driver: str) -> tuple[NvmlField, ...]:
    """Return REASON_SECONDS with the numbers of the header of a driver, like 580.65.06. Pure.

    What others call 269 to 271 are settings of power with the drivers that have lower numbers.
    """
    release = tuple([int(part) for part in driver.split(".") if part.isdecimal()])
    lower = LOWER if MOVED[0] <= release < MOVED[1] else 0
    return tuple(
        [one._replace(id=one.id - lower * (one.id >= MOVED_FROM)) for one in REASON_SECONDS]
    )


class FieldList:
    """Field values that are asked for by one call, as (number, scope) of nvml.h."""

    def __init__(self, fields: Sequence[tuple[int, int]]) -> None:
        blank = bytearray(FIELD.size * len(fields))
        for place, pair in enumerate(fields):
            FIELD.pack_into(blank, place * FIELD.size, *pair, *UNFILLED)
        self._blank = bytes(blank)
        self._raw = blank
        self._argument = (ctypes.c_char * len(blank)).from_buffer(blank)
        self._count = ctypes.c_int(len(fields))

    def read(self, handle: pynvml.c_nvmlDevice_t) -> list[FieldValue]:
        """Ask; raise NVMLError."""
        self._raw[:] = self._blank  # nothing of another card is left, whatever the driver fills in
        call_nvml("nvmlDeviceGetFieldValues", handle, self._count, self._argument)
        entries = [
            UNFILLED if entry[2:] == ZEROS else entry[2:] for entry in FIELD.iter_unpack(self._raw)
        ]
        return [(error, value_type, value) for _, _, value_type, error, value in entries]


nvml_field_list = lru_cache(LISTS_KEPT)(FieldList)  # kept, and used by all cards in turn


def read_fields(
    device: NvmlDevice, poll: PollContext, fields: Iterable[NvmlField]
) -> dict[NvmlField, float]:
    """Return those of the fields that the device has, all by one call."""
    wanted = [field for field in fields if not device.is_absent(poll, field)]
    if not wanted:
        return {}
    try:
        answers = nvml_field_list(tuple([field[:2] for field in wanted])).read(device.handle)
    except pynvml.NVMLError as fault:
        for field in wanted:
            device.refused(poll, field.collector, field, fault.value)
        return {}
    values: dict[NvmlField, float] = {}
    for field, (error, value_type, value) in zip(wanted, answers):
        wrong = field_error(field, error, value_type)
        if wrong:
            device.refused(poll, field.collector, field, wrong)
            continue
        (number,) = VALUES[value_type].unpack(value)
        if number in NOT_AVAILABLE:
            continue
        if 0 <= number <= LARGEST.get(field, sys.float_info.max):
            values[field] = number
        else:
            poll.fail(field.collector, device.lock_id, f"field {field.id} cannot be {number}")
    return values


def field_error(field: NvmlField, error: int, value_type: int) -> int:
    """Return what is wrong with a field, 0: nothing.

    Bytes over PCIe in 32 bits wrap within 70 ms on a link of 64 GB/s: at one look a second
    nobody can tell how often. Such a counter is none.
    """
    if error:
        return NOT_SUPPORTED if error == UNKNOWN_FIELD else error
    if value_type >= len(VALUES) or (field in PCIE and value_type == NARROW):
        return NOT_SUPPORTED
    return 0
