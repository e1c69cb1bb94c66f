# SPDX-License-Identifier: Apache-2.0
"""What changes seldom, or is a counter that nobody needs by the second: read every few seconds.

Only the worker imports this. Some of it costs the driver a millisecond, with the lock held that
the applications wait for (docs/facts/nvml.md, cost); the cards take turns. In between a frame has
the last values, and their failures.
"""

from __future__ import annotations

from typing import Any

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.field_values import (
    ECC,
    FAILURE,
    NOT_SUPPORTED,
    NVLINK,
    PCIE,
    PENDING,
    REASON_SECONDS,
    RECOVERY_ACTION,
    REMAPPED,
    WORD,
    NvmlField,
    fields_by_name,
    read_fields,
)

KIB = 1024
ALWAYS = (*REASON_SECONDS, *ECC, *REMAPPED, PENDING, FAILURE, RECOVERY_ACTION)


class SlowCounters:
    """The last values of a card, by the names of the attributes of `Device`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.due = 0.0
        self._pcie: dict[NvmlField, float] = {}

    def read(self, card: NvmlDevice, look: PollContext, nvlink: bool, pcie: bool) -> None:
        """Ask the card; `nvlink` and `pcie` say which of those counters are wanted."""
        now = PollContext(look.now)
        self.values, self.failures = {}, now.failures
        wanted = (*ALWAYS, *(NVLINK if nvlink else ()), *(PCIE if pcie else ()))
        values = read_fields(card, now, wanted)
        self._leave_out_narrow(card, now, values)
        persistence = card.query(now, "devices", pynvml.nvmlDeviceGetPersistenceMode)
        self.values = {
            **board_values(values),
            "ecc": _with_sram(card, now, _error_counts(values, ECC)),
            "persistence": None if persistence is None else persistence == 1,
        }

    def _leave_out_narrow(
        self, card: NvmlDevice, look: PollContext, values: dict[NvmlField, float]
    ) -> None:
        """Drop bytes over PCIe that fell before they filled 32 bits: see `field_error`."""
        for field in PCIE:
            value = values.get(field, 0)
            if value < self._pcie.get(field, 0) < WORD:
                values.pop(field, None)
                card.refused(look, field.collector, field, NOT_SUPPORTED)
            elif value:
                self._pcie[field] = value


def board_values(values: dict[NvmlField, float]) -> dict[str, Any]:
    """Return what field values say, by the names of the attributes of `Device`."""
    seconds = fields_by_name(values, REASON_SECONDS)
    links, pcie = _link_direction_pair(values, NVLINK), _link_direction_pair(values, PCIE)
    return {
        "clock_reason_seconds": seconds and {name: ns / 1e9 for name, ns in seconds.items()},
        "remapped": _error_counts(values, REMAPPED),
        "remap_pending": _flag_of_field(values.get(PENDING)),
        "remap_failure": _flag_of_field(values.get(FAILURE)),
        "recovery_action": _whole_number(values.get(RECOVERY_ACTION)),
        "nvlink_transmit": links and int(links[0]) * KIB,
        "nvlink_receive": links and int(links[1]) * KIB,
        "pcie_transmit": pcie and int(pcie[0]),
        "pcie_receive": pcie and int(pcie[1]),
    }


def _link_direction_pair(
    values: dict[NvmlField, float], fields: tuple[NvmlField, NvmlField]
) -> tuple[float, float] | None:
    """Return both directions of a link, or nothing."""
    sent, received = (values.get(field) for field in fields)
    return None if sent is None or received is None else (sent, received)


def _error_counts(
    values: dict[NvmlField, float], fields: tuple[NvmlField, ...]
) -> dict[str, int] | None:
    found = fields_by_name(values, fields)
    return None if found is None else {name: int(count) for name, count in found.items()}


def _flag_of_field(value: float | None) -> bool | None:
    return None if value is None else value == 1


def _whole_number(value: float | None) -> int | None:
    return None if value is None else int(value)


def _with_sram(
    card: NvmlDevice, look: PollContext, ecc: dict[str, int] | None
) -> dict[str, int] | None:
    """Add the errors in SRAM, where a card (from Ampere on) tells them as one, by no field."""
    if ecc and any(not name.endswith(".dram") for name in ecc):
        return ecc  # it tells its caches apart, and they are the SRAM
    found = dict(ecc or {})
    for name, way in (
        ("corrected.sram", _corrected_sram_errors),
        ("uncorrected.sram", _uncorrected_sram_errors),
    ):
        count = card.query(look, "ecc", way)
        if count is not None:
            found[name] = count
    return found or None


def _corrected_sram_errors(handle: pynvml.c_nvmlDevice_t) -> int:
    return _sram_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)


def _uncorrected_sram_errors(handle: pynvml.c_nvmlDevice_t) -> int:
    return _sram_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)


def _sram_errors(handle: pynvml.c_nvmlDevice_t, kind: int) -> int:
    place = pynvml.NVML_MEMORY_LOCATION_SRAM
    return pynvml.nvmlDeviceGetMemoryErrorCounter(handle, kind, pynvml.NVML_VOLATILE_ECC, place)
