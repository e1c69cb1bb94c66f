# SPDX-License-Identifier: Apache-2.0
"""What numbers from the driver are turned into, apart from any driver."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pynvml
import pytest
from gpulock_exporter.nvml import field_values
from gpulock_exporter.nvml.answers import VALUES, NvmlDevice, PollContext
from gpulock_exporter.nvml.card import read_numa_node
from gpulock_exporter.nvml.field_values import (
    BOARD_FIELDS,
    ECC,
    ENERGY,
    NVLINK,
    NVLINK_ERRORS,
    NVLINK_STATES,
    PCIE,
    PENDING,
    POWER,
    REASON_SECONDS,
    REMAPPED,
    NvmlField,
    board_values,
    field_error,
    read_fields,
)
from gpulock_exporter.nvml.utilisation_samples import SAMPLES

NVML: Any = pynvml  # of its structures the stub declares what gpulock uses
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
REAL, NARROW, WIDE = 0, 1, 3


NAMES = """
POWER_INSTANT TOTAL_ENERGY_CONSUMPTION PERF_POLICY_POWER PERF_POLICY_THERMAL PERF_POLICY_SYNC_BOOST
PERF_POLICY_BOARD_LIMIT PERF_POLICY_RELIABILITY CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN
CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN
ECC_SBE_VOL_L1 ECC_SBE_VOL_L2 ECC_SBE_VOL_DEV ECC_SBE_VOL_REG ECC_SBE_VOL_TEX
ECC_DBE_VOL_L1 ECC_DBE_VOL_L2 ECC_DBE_VOL_DEV ECC_DBE_VOL_REG ECC_DBE_VOL_TEX ECC_DBE_VOL_CBU
REMAPPED_COR REMAPPED_UNC PCIE_COUNT_TX_BYTES PCIE_COUNT_RX_BYTES
NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLINK_GET_STATE
NVLINK_THROUGHPUT_DATA_TX NVLINK_THROUGHPUT_DATA_RX
REMAPPED_PENDING REMAPPED_FAILURE GET_GPU_RECOVERY_ACTION MEMORY_TEMP PCIE_REPLAY_COUNTER
"""


def test_fields_have_the_numbers_that_nvidias_binding_gives_them() -> None:
    """The double has them by hand as well, and answers no other number."""
    counters = (*REASON_SECONDS, *ECC, *REMAPPED, *PCIE, *NVLINK_ERRORS)
    own = (POWER, ENERGY, *counters, NVLINK_STATES[0], *NVLINK, *BOARD_FIELDS)
    numbers = [getattr(NVML, f"NVML_FI_DEV_{name}") for name in NAMES.split()]
    assert [field.id for field in own] == numbers


@pytest.mark.parametrize(
    ("field", "error", "kind", "found"),
    [
        (ECC[0], 0, WIDE, 0),
        (ECC[0], 2, WIDE, 3),  # a field that is newer than the driver
        (ECC[0], 999, WIDE, 999),
        (ECC[0], 0, 99, 3),
        (PENDING, 0, NARROW, 0),
        (PCIE[0], 0, WIDE, 0),
        (PCIE[0], 0, NARROW, 3),  # wraps faster than we look
    ],
)
def test_the_error_of_a_field_is(field: NvmlField, error: int, kind: int, found: int) -> None:
    assert field_error(field, error, kind) == found


@pytest.mark.parametrize(("kind", "member"), list(enumerate(MEMBERS)))
def test_a_value_of_each_type_lies_where_pynvml_has_it(kind: int, member: str) -> None:
    number = 0.25 if member == "dVal" else 54321
    sample = NVML.c_nvmlSample_t()
    sample.timeStamp = 1 << 50
    setattr(sample.sampleValue, member, number)
    assert SAMPLES[kind].unpack(bytes(sample)) == (1 << 50, number)
    assert VALUES[kind].unpack(bytes(sample.sampleValue)) == (number,)


@pytest.mark.parametrize("number", [-1.0, math.inf])
def test_a_field_that_cannot_be_is_absent_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    class Driver:
        def read(self, _: object) -> list[tuple[int, int, bytes]]:
            return [(0, REAL, struct.pack("@d", one)) for one in (number, 5.0, 2**32 - 1)]

    def field_list(_: object) -> Driver:
        return Driver()

    monkeypatch.setattr(field_values, "nvml_field_list", field_list)
    look = PollContext(1.0)
    assert read_fields(NvmlDevice(pynvml.c_nvmlDevice_t(), "card"), look, ECC[:3]) == {ECC[1]: 5.0}
    assert look.failures == {"ecc": f"card: field 7 cannot be {number}"}


def test_the_newer_field_of_a_reason_counts() -> None:
    both = [field for field in REASON_SECONDS if field.key == "sw_thermal_slowdown"]
    assert [field.id for field in both] == [75, 269]
    values: dict[NvmlField, float] = {both[1]: 2e9, both[0]: 1e9}
    assert board_values(values)["clock_reason_seconds"] == {"sw_thermal_slowdown": 2.0}


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("x\n", None), ("", None)])
def test_the_nearest_memory_is_the_kernels(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert read_numa_node(str(tmp_path), "0000:3b:00.0") == node
    assert read_numa_node(str(tmp_path), "0000:3c:00.0") is None
