# SPDX-License-Identifier: Apache-2.0
"""The double's field values have the numbers that NVIDIA's binding gives them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.double import Double
from tests.support.pairs import zip_equal

NVML: Any = importlib.import_module("pynvml")
NEW = "610.43.02"  # one driver for all tests of a process, which has one library


def fields(handle: Any, *ids: Any) -> list[int | None]:
    """Return the values of fields, None where there is none."""
    answers = NVML.nvmlDeviceGetFieldValues(handle, list(ids))
    wide = NVML.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    values = [a.value.ullVal if a.valueType == wide else a.value.uiVal for a in answers]
    return [None if a.nvmlReturn else value for a, value in zip_equal(answers, values)]


def test_the_fields_have_the_numbers_that_pynvml_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "ECC_SBE_VOL_DEV": "ecc.volatile.corrected.dram",
        "ECC_DBE_VOL_CBU": "ecc.volatile.uncorrected.cbu",
        "PERF_POLICY_POWER": "violation.power",
        "PERF_POLICY_THERMAL": "violation.thermal",
        "PERF_POLICY_SYNC_BOOST": "violation.sync_boost",
        "PERF_POLICY_BOARD_LIMIT": "violation.board_limit",
        "PERF_POLICY_RELIABILITY": "violation.reliability",
        "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": "violation.sw_thermal",
        "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": "violation.hw_thermal",
        "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": "violation.hw_power_brake",
        "MEMORY_TEMP": "temperature.memory",
        "TOTAL_ENERGY_CONSUMPTION": "energy",
        "POWER_INSTANT": "power.instant",
        "REMAPPED_COR": "remapped.correctable",
        "REMAPPED_UNC": "remapped.uncorrectable",
        "REMAPPED_PENDING": "remapped.pending",
        "REMAPPED_FAILURE": "remapped.failure",
        "PCIE_REPLAY_COUNTER": "pcie.replays",
        "PCIE_COUNT_RX_BYTES": "pcie.rx_bytes",
        "GET_GPU_RECOVERY_ACTION": "recovery_action",
    }
    ids = [getattr(NVML, f"NVML_FI_DEV_{name}") for name in keys]
    monkeypatch.setenv("NVML_DOUBLE", "")
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1, driver=NEW) as nvml:
        nvml.load_here()
        NVML.nvmlInit()
        nvml.update({f"gpu0.{key}": 1000 + n for n, key in enumerate(keys.values())})
        handle = NVML.nvmlDeviceGetHandleByIndex(0)
        assert fields(handle, *ids) == [1000 + n for n in range(len(keys))]
        NVML.nvmlShutdown()
