# SPDX-License-Identifier: Apache-2.0
"""What numbers from the driver are turned into, apart from any driver."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pynvml
import pytest
from gpulock_exporter.nvml import field_values
from gpulock_exporter.nvml.answers import NvmlDevice, PollContext
from gpulock_exporter.nvml.card import read_numa_node
from gpulock_exporter.nvml.field_values import (
    ECC,
    NVLINK,
    PCIE,
    PENDING,
    REASON_SECONDS,
    REMAPPED,
    NvmlField,
    board_values,
    field_error,
    read_fields,
)
from gpulock_exporter.nvml.process_lists import merge_process_lists
from gpulock_exporter.telemetry import CLOCK_REASONS, DeviceTelemetry, Process
from hypothesis import given
from hypothesis import strategies as st

REAL, NARROW, WIDE = 0, 1, 3  # nvmlValueType_t: double, unsigned int, unsigned long long


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


def test_field_values_become_attributes_in_base_units() -> None:
    values: dict[NvmlField, float] = {
        REASON_SECONDS[0]: 1_500_000_000,
        PENDING: 1,
        REMAPPED[1]: 2,
        NVLINK[0]: 3,
        NVLINK[1]: 0,
        PCIE[0]: 9,
    }
    found = board_values(values)
    assert {name: value for name, value in found.items() if value is not None} == {
        "clock_reason_seconds": {"sw_power_cap": 1.5},
        "remapped": {"uncorrectable": 2},
        "remap_pending": True,
        "nvlink_transmit": 3072,
        "nvlink_receive": 0,
    }
    assert found.keys() <= vars(DeviceTelemetry("", "", 0)).keys()


def test_seconds_and_state_of_one_reason_go_by_one_name() -> None:
    assert {field.key for field in REASON_SECONDS} <= set(CLOCK_REASONS.values())


def test_the_newer_field_of_a_reason_counts() -> None:
    both = [field for field in REASON_SECONDS if field.key == "sw_thermal_slowdown"]
    assert [field.id for field in both] == [75, 269]
    values: dict[NvmlField, float] = {both[1]: 2e9, both[0]: 1e9}
    assert board_values(values)["clock_reason_seconds"] == {"sw_thermal_slowdown": 2.0}


@given(
    st.lists(
        st.lists(st.builds(Process, st.integers(1, 9), st.none() | st.integers(0, 99))), max_size=3
    )
)
def test_each_process_is_told_once_with_the_most_memory(lists: list[list[Process]]) -> None:
    found = merge_process_lists(lists)
    assert [one.pid for one in found] == sorted({one.pid for some in lists for one in some})
    for one in found:
        all_of_it = [each.memory for some in lists for each in some if each.pid == one.pid]
        assert (one.memory or 0) == max(memory or 0 for memory in all_of_it)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("x\n", None), ("", None)])
def test_the_nearest_memory_is_the_kernels(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert read_numa_node(str(tmp_path), "0000:3b:00.0") == node
    assert read_numa_node(str(tmp_path), "0000:3c:00.0") is None
