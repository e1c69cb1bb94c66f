# SPDX-License-Identifier: Apache-2.0
"""Field values: many numbers of a card for one call.

Only the worker imports this. The numbers of the fields are written out, with the release that
brought the newer ones, for nvidia-ml-py names only those that it knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.lists import NARROW, VALUES, nvml_field_list

ALL_LINKS = 0xFFFFFFFF  # nvml.h: the scope that adds up the counters of all NVLinks


class NvmlField(NamedTuple):
    """A field value: number and scope in nvml.h, its collector, and what it is called here."""

    id: int
    scope: int
    collector: str
    name: str


# 186 answers in microseconds; 185, the average over a second, holds the driver up for 3 ms
POWER = NvmlField(186, 0, "power", "power")  # 535
ENERGY = NvmlField(83, 0, "power", "energy")
REASON_SECONDS = (  # nanoseconds; of two with one name the last counts
    NvmlField(74, 0, "clocks", "sw_power_cap"),
    NvmlField(75, 0, "clocks", "sw_thermal_slowdown"),
    NvmlField(76, 0, "clocks", "sync_boost"),
    NvmlField(77, 0, "clocks", "board_limit"),
    NvmlField(79, 0, "clocks", "reliability"),
    NvmlField(269, 0, "clocks", "sw_thermal_slowdown"),  # 575, as are the next two
    NvmlField(270, 0, "clocks", "hw_thermal_slowdown"),
    NvmlField(271, 0, "clocks", "hw_power_brake_slowdown"),
)
ECC = (  # volatile: since the driver was loaded
    NvmlField(7, 0, "ecc", "corrected.l1"),
    NvmlField(8, 0, "ecc", "uncorrected.l1"),
    NvmlField(9, 0, "ecc", "corrected.l2"),
    NvmlField(10, 0, "ecc", "uncorrected.l2"),
    NvmlField(11, 0, "ecc", "corrected.dram"),
    NvmlField(12, 0, "ecc", "uncorrected.dram"),
    NvmlField(13, 0, "ecc", "corrected.register"),
    NvmlField(14, 0, "ecc", "uncorrected.register"),
    NvmlField(15, 0, "ecc", "corrected.texture"),
    NvmlField(16, 0, "ecc", "uncorrected.texture"),
    NvmlField(17, 0, "ecc", "uncorrected.cbu"),
)
REMAPPED = (
    NvmlField(142, 0, "remapped", "correctable"),
    NvmlField(143, 0, "remapped", "uncorrectable"),
)
PENDING = NvmlField(144, 0, "remapped", "pending")
FAILURE = NvmlField(145, 0, "remapped", "failure")
RECOVERY_ACTION = NvmlField(230, 0, "remapped", "recovery_action")  # 570
PCIE = (NvmlField(197, 0, "pcie", "transmit"), NvmlField(198, 0, "pcie", "receive"))  # bytes; 555
NVLINK = (  # KiB
    NvmlField(138, ALL_LINKS, "nvlink", "transmit"),
    NvmlField(139, ALL_LINKS, "nvlink", "receive"),
)

WORD = 1 << 32
NOT_AVAILABLE = frozenset({WORD - 1, (1 << 64) - 1})  # NVML_VALUE_NOT_AVAILABLE
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
UNKNOWN_FIELD = pynvml.NVML_ERROR_INVALID_ARGUMENT  # of one field: it is newer than the driver


def read_fields(
    device: NvmlDevice, look: PollContext, fields: Iterable[NvmlField]
) -> dict[NvmlField, float]:
    """Return those of the fields that the device has, all by one call."""
    wanted = [field for field in fields if not device.is_absent(look, field)]
    if not wanted:
        return {}
    try:
        answers = nvml_field_list(tuple([field[:2] for field in wanted])).read(device.handle)
    except pynvml.NVMLError as fault:
        for field in wanted:
            device.refused(look, field.collector, field, fault.value)
        return {}
    found: dict[NvmlField, float] = {}
    for field, (error, value_type, value) in zip(wanted, answers, strict=True):
        wrong = field_error(field, error, value_type)
        if wrong:
            device.refused(look, field.collector, field, wrong)
            continue
        (number,) = VALUES[value_type].unpack(value)
        if number in NOT_AVAILABLE:
            continue
        if 0 <= number < math.inf:
            found[field] = number
        else:
            look.fail(field.collector, device.name, f"field {field.id} cannot be {number}")
    return found


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


def fields_by_name(
    values: dict[NvmlField, float], fields: Iterable[NvmlField]
) -> dict[str, float] | None:
    """Return those of `fields` that there are by their names, None where there is none."""
    return {field.name: values[field] for field in fields if field in values} or None
