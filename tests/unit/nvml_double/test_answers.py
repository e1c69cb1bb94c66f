# SPDX-License-Identifier: Apache-2.0
"""The double of NVIDIA's management library, asked by the real pynvml in this process."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.node.devices import INVENTORY_LINE, read_devices
from gpulock.simulate.node import write_simulated_node
from gpulock.simulate.presets import PRESETS
from gpulock.store.kv import decode_pairs
from tests.nvml.double import Double, Process
from tests.support.pairs import zip_equal

NVML: Any = importlib.import_module("pynvml")
NEW = "610.43.02"  # one driver for all tests here: a process has one library


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write each simulated node once: it is the slow part."""
    parent = tmp_path_factory.mktemp("nodes")

    @functools.cache
    def folder(preset: str) -> Path:
        gpus = {"dgx-h200": 3, "a100-mig": 2}.get(preset)
        return write_simulated_node(parent / preset, preset, gpus).directory

    return folder


def started(folder: Path, node: Path) -> Iterator[Double]:
    before = os.environ.get("NVML_DOUBLE")
    with Double(folder / "nvml", node=node, driver=NEW) as double:
        double.load_here()
        NVML.nvmlInit()
        yield double
        double.reset()
        NVML.nvmlShutdown()
    os.environ.pop("NVML_DOUBLE")
    if before is not None:
        os.environ["NVML_DOUBLE"] = before


@pytest.fixture
def nvml(tmp_path: Path, nodes: Callable[[str], Path]) -> Iterator[Double]:
    yield from started(tmp_path, nodes("dgx-h200"))


@pytest.fixture
def mig(tmp_path: Path, nodes: Callable[[str], Path]) -> Iterator[Double]:
    yield from started(tmp_path, nodes("a100-mig"))


@pytest.fixture
def node(
    tmp_path: Path, nodes: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[Double]:
    yield from started(tmp_path, nodes(request.param))


def gpu(index: int = 0) -> Any:
    return NVML.nvmlDeviceGetHandleByIndex(index)


def code(call: Any, *arguments: Any) -> int:
    """Return the error of a call, 0 for none."""
    try:
        call(*arguments)
    except NVML.NVMLError as fault:
        return int(fault.value)
    return 0


def fields(handle: Any, *ids: Any) -> list[int | None]:
    """Return the values of fields, None where there is none."""
    answers = NVML.nvmlDeviceGetFieldValues(handle, list(ids))
    wide = NVML.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    values = [a.value.ullVal if a.valueType == wide else a.value.uiVal for a in answers]
    return [None if a.nvmlReturn else value for a, value in zip_equal(answers, values)]


@pytest.mark.parametrize("node", PRESETS, indirect=True)
def test_nvml_and_proc_tell_the_same_of_a_simulated_node(node: Double) -> None:
    devices = read_devices(f"{node.node}/proc/driver/nvidia", f"{node.node}/sys")
    inventory = decode_pairs((node.node / "run/gpulock/inventory").read_text(), INVENTORY_LINE)
    assert NVML.nvmlDeviceGetCount() == len(devices)
    for device in devices:
        handle = gpu(device.index)
        pci = NVML.nvmlDeviceGetPciInfo(handle)
        assert pci.busId.lower() == f"0000{device.bus}"
        assert pci.busIdLegacy.lower() == device.bus
        assert NVML.nvmlDeviceGetUUID(handle) == inventory[f"gpu.{device.bus}.uuid"]
        assert NVML.nvmlDeviceGetMinorNumber(handle) == device.minor
        assert NVML.nvmlDeviceGetName(handle) == device.model
        memory = NVML.nvmlDeviceGetMemoryInfo(handle)
        assert memory.total >> 20 == int(inventory[f"gpu.{device.bus}.memory_mib"])
        assert NVML.nvmlDeviceGetIndex(handle) == device.index


def test_the_fields_have_the_numbers_that_pynvml_gives_them(nvml: Double) -> None:
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
    nvml.update({f"gpu0.{key}": 1000 + n for n, key in enumerate(keys.values())})
    ids = [getattr(NVML, f"NVML_FI_DEV_{name}") for name in keys]
    assert fields(gpu(), *ids) == [1000 + n for n in range(len(keys))]
    nvml.set("gpu1.field.299", 5)
    assert fields(gpu(1), NVML.NVML_FI_DEV_NVLINK_GET_POWER_STATE, 299) == [None, 5]
    nvml.fail("nvmlDeviceGetFieldValues.82", 3, gpu=1)
    assert fields(gpu(1), NVML.NVML_FI_DEV_MEMORY_TEMP, 186) == [None, 77880]


def test_the_choices_have_the_numbers_that_pynvml_gives_them(nvml: Double) -> None:
    handle = gpu()
    clocks = {"GRAPHICS": 11, "SM": 12, "MEM": 13, "VIDEO": 14}
    names = ("graphics", "sm", "memory", "video")
    nvml.update({f"gpu0.clock.{n}": v for n, v in zip_equal(names, clocks.values())})
    for name, value in clocks.items():
        assert NVML.nvmlDeviceGetClockInfo(handle, getattr(NVML, f"NVML_CLOCK_{name}")) == value
    places = {"L1_CACHE": "l1", "L2_CACHE": "l2", "DRAM": "dram", "REGISTER_FILE": "register"}
    places |= {"TEXTURE_MEMORY": "texture", "TEXTURE_SHM": "shm", "CBU": "cbu", "SRAM": "sram"}
    key = "gpu0.ecc.aggregate.uncorrected"
    nvml.update({f"{key}.{place}": n + 1 for n, place in enumerate(places.values())})
    nvml.set(key, None)
    for n, name in enumerate(places):
        place = getattr(NVML, f"NVML_MEMORY_LOCATION_{name}")
        assert NVML.nvmlDeviceGetMemoryErrorCounter(handle, 1, 1, place) == n + 1


def test_a_process_list_that_grows_between_two_calls(nvml: Double) -> None:
    ask = NVML.nvmlDeviceGetComputeRunningProcesses
    nvml.processes(0, [Process(11, "1M"), Process(12, "1M")], growth=20)
    assert code(ask, gpu()) == NVML.NVML_ERROR_INSUFFICIENT_SIZE  # pynvml leaves room for seven
    nvml.set("gpu0.processes.growth", 1)
    assert len(ask(gpu())) >= 42


def test_mig_devices_have_memory_and_names_but_no_utilisation(mig: Double) -> None:
    handle = gpu()
    assert NVML.nvmlDeviceGetMigMode(handle) == [1, 1]
    assert NVML.nvmlDeviceGetMaxMigDeviceCount(handle) == 7
    assert code(NVML.nvmlDeviceGetMigDeviceHandleByIndex, handle, 4) == NVML.NVML_ERROR_NOT_FOUND
    parts = [NVML.nvmlDeviceGetMigDeviceHandleByIndex(handle, n) for n in range(4)]
    ids = [
        (NVML.nvmlDeviceGetGpuInstanceId(p), NVML.nvmlDeviceGetComputeInstanceId(p)) for p in parts
    ]
    assert ids == [(2, 0), (3, 0), (9, 0), (10, 0)]
    assert NVML.nvmlDeviceGetName(parts[0]) == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert NVML.nvmlDeviceGetMemoryInfo(parts[3]).total == 9728 << 20
    assert [code(NVML.nvmlDeviceGetUtilizationRates, one) for one in (handle, parts[0])] == [3, 3]
    assert code(NVML.nvmlDeviceGetSamples, handle, 1, 0) == 3
    assert code(NVML.nvmlDeviceGetNvLinkState, handle, 0) == 3
    assert NVML.nvmlDeviceGetPowerUsage(handle) == 62_000
    assert code(NVML.nvmlDeviceGetPowerUsage, parts[0]) == 3


def test_processes_of_mig_devices_and_who_may_see_them(mig: Double) -> None:
    mig.processes(0, [Process(11, "1G", "C", (2, 0)), Process(12, "2G", "C", (9, 0))])
    second = NVML.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 2)
    ask = NVML.nvmlDeviceGetComputeRunningProcesses
    mig.set("root", 0)
    assert [(p.pid, p.gpuInstanceId) for p in ask(second)] == [(12, 9)]
    assert code(ask, gpu()) == NVML.NVML_ERROR_NO_PERMISSION
    mig.set("root", 1)
    assert [p.pid for p in ask(gpu())] == [11, 12]
