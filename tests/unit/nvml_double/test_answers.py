# SPDX-License-Identifier: Apache-2.0
"""The double of NVIDIA's management library, asked by the real pynvml in this process."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.node.devices import INVENTORY_LINE, read_devices
from gpulock.simulate.node import write_simulated_node
from gpulock.simulate.presets import PRESETS
from gpulock.store.kv import decode_pairs
from tests.nvml import double as face
from tests.nvml.cards import CARDS
from tests.nvml.double import Double, Process
from tests.nvml.node import node_keys
from tests.support.pairs import zip_equal
from tests.support.wait import let_work

NVML: Any = importlib.import_module("pynvml")
NEW = "610.43.02"  # one driver for all tests here: a process has one library
START = 1_800_000_000_000_000  # microseconds since 1970: the clock of the tests that stop it
README = Path(face.__file__).with_name("README.md")


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
    signed = NVML.NVML_VALUE_TYPE_SIGNED_INT
    values = [
        a.value.ullVal
        if a.valueType == wide
        else a.value.siVal
        if a.valueType == signed
        else a.value.uiVal
        for a in answers
    ]
    return [None if a.nvmlReturn else value for a, value in zip_equal(answers, values)]


def energy() -> int | None:
    """Return what the first GPU took so far, in mJ."""
    return fields(gpu(), NVML.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION)[0]


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


def test_memory_is_told_in_two_ways(nvml: Double) -> None:
    nvml.update({"gpu0.memory.used": "20G", "gpu0.memory.reserved": "600M"})
    first = NVML.nvmlDeviceGetMemoryInfo(gpu())
    second = NVML.nvmlDeviceGetMemoryInfo(gpu(), version=NVML.nvmlMemory_v2)
    assert (first.used, second.used) == ((20 << 30) + (600 << 20), 20 << 30)
    assert second.reserved == 600 << 20 and first.free == second.free
    assert first.total == second.total == first.used + first.free


def test_the_buffer_of_samples_is_what_the_load_was(nvml: Double) -> None:
    nvml.update({"now": START, "gpu*.samples.period": 200_000, "gpu*.samples.count": 50})
    nvml.step("gpu0.utilization.gpu", 90, at=START / 1e6 - 4)
    nvml.step("gpu0.utilization.gpu", 30, at=START / 1e6 - 1.1)
    kind = NVML.NVML_GPU_UTILIZATION_SAMPLES
    of_type, samples = NVML.nvmlDeviceGetSamples(gpu(), kind, 0)
    assert of_type == NVML.NVML_VALUE_TYPE_UNSIGNED_INT and len(samples) == 50
    assert [s.timeStamp for s in samples] == list(range(START - 49 * 200_000, START + 1, 200_000))
    values = [s.sampleValue.uiVal for s in samples]
    assert values == [0] * 30 + [90] * 14 + [60] + [30] * 5  # one period was half and half
    assert NVML.nvmlDeviceGetUtilizationRates(gpu()).gpu == 30
    _, newer = NVML.nvmlDeviceGetSamples(gpu(), kind, START - 400_000)
    assert [s.timeStamp for s in newer] == [START - 200_000, START]
    assert code(NVML.nvmlDeviceGetSamples, gpu(), kind, START) == NVML.NVML_ERROR_NOT_FOUND


def test_garbage_samples_are_handed_out_as_given(nvml: Double) -> None:
    nvml.samples(1, "gpu", [(START + n, 900) for n in range(100)])
    _, samples = NVML.nvmlDeviceGetSamples(gpu(1), NVML.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert len(samples) == 100 and {s.sampleValue.uiVal for s in samples} == {900}
    nvml.set("gpu1.samples.gpu", "!999")
    assert code(NVML.nvmlDeviceGetSamples, gpu(1), 1, 0) == NVML.NVML_ERROR_UNKNOWN


def test_process_utilisation_is_not_found_while_nothing_runs(nvml: Double) -> None:
    call = NVML.nvmlDeviceGetProcessUtilization
    assert code(call, gpu(), 0) == NVML.NVML_ERROR_NOT_FOUND
    nvml.set("gpu0.process_utilization", f"77:80:30:0:0:{START},78:900:1:2:3:{START + 1}")
    assert [(s.pid, s.smUtil, s.decUtil) for s in call(gpu(), 0)] == [(77, 80, 0), (78, 900, 3)]
    assert [s.pid for s in call(gpu(), START)] == [78]
    assert code(call, gpu(), START + 1) == NVML.NVML_ERROR_NOT_FOUND


def test_counters_run_wrap_and_go_back(nvml: Double) -> None:
    nvml.update({"now": START, "gpu0.energy": f"5000+77000/s@{START - 2_000_000}"})
    assert energy() == 159_000
    nvml.set("gpu0.pcie.tx_bytes", f"4294967290+10/s@{START - 1_000_000}%4294967296")
    assert fields(gpu(), NVML.NVML_FI_DEV_PCIE_COUNT_TX_BYTES) == [4]
    nvml.set("gpu0.energy", f"5000-10/s@{START - 100_000_000}")
    assert energy() == 4000
    nvml.set("gpu0.energy", 2**64 - 1)
    assert energy() == 2**64 - 1


@pytest.mark.real_time
def test_the_clock_can_run_faster(nvml: Double) -> None:
    real = round(time.time() * 1e6)
    nvml.update({"now": f"{START}+1000000000/s@{real}", "gpu0.energy": f"0+1000/s@{START}"})
    first = energy() or 0
    let_work(0.02)
    assert (energy() or 0) - first >= 20_000


def test_the_fields_have_the_numbers_that_pynvml_gives_them(nvml: Double) -> None:
    keys = {
        "ECC_CURRENT": "ecc.mode",
        "ECC_DBE_VOL_TOTAL": "ecc.volatile.uncorrected",
        "ECC_SBE_AGG_DEV": "ecc.aggregate.corrected.dram",
        "RETIRED_PENDING": "retired.pending",
        "PERF_POLICY_POWER": "violation.power",
        "PERF_POLICY_THERMAL": "violation.thermal",
        "PERF_POLICY_SYNC_BOOST": "violation.sync_boost",
        "PERF_POLICY_BOARD_LIMIT": "violation.board_limit",
        "PERF_POLICY_LOW_UTILIZATION": "violation.low_utilization",
        "PERF_POLICY_RELIABILITY": "violation.reliability",
        "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": "violation.sw_thermal",
        "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": "violation.hw_thermal",
        "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": "violation.hw_power_brake",
        "MEMORY_TEMP": "temperature.memory",
        "ENERGY": "energy",
        "POWER_AVERAGE": "power.average",
        "POWER_INSTANT": "power.instant",
        "POWER_CURRENT_LIMIT": "power.limit.enforced",
        "POWER_REQUESTED_LIMIT": "power.limit",
        "REMAPPED_COR": "remapped.correctable",
        "REMAPPED_UNC": "remapped.uncorrectable",
        "REMAPPED_PENDING": "remapped.pending",
        "REMAPPED_FAILURE": "remapped.failure",
        "PCIE_REPLAY_COUNTER": "pcie.replays",
        "PCIE_COUNT_RX_BYTES": "pcie.rx_bytes",
        "GET_GPU_RECOVERY_ACTION": "recovery_action",
        "NVLINK_LINK_COUNT": "nvlink.count",
    }
    nvml.update({f"gpu0.{key}": 1000 + n for n, key in enumerate(keys.values())})
    ids = [getattr(NVML, f"NVML_FI_DEV_{name}") for name in keys]
    assert fields(gpu(), *ids) == [1000 + n for n in range(len(keys))]
    limits = [NVML.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT, (NVML.NVML_FI_DEV_POWER_AVERAGE, 2)]
    assert fields(gpu(1), *limits) == [-8, 46560]
    nvml.set("gpu1.field.299", 5)
    assert fields(gpu(1), NVML.NVML_FI_DEV_NVLINK_GET_POWER_STATE, 299) == [None, 5]
    nvml.fail("nvmlDeviceGetFieldValues.82", 3, gpu=1)
    assert fields(gpu(1), NVML.NVML_FI_DEV_MEMORY_TEMP, 91) == [None, 18]


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


def test_temperature_power_and_reasons(nvml: Double) -> None:
    nvml.update({"gpu0.temperature": 91, "gpu0.power": 627_320, "gpu0.clocks.reasons": 0x24})
    assert NVML.nvmlDeviceGetTemperature(gpu(), 0) == NVML.nvmlDeviceGetTemperatureV(gpu(), 0) == 91
    assert NVML.nvmlDeviceGetPowerUsage(gpu()) == 627_320
    assert NVML.nvmlDeviceGetCurrentClocksEventReasons(gpu()) == 0x24
    assert NVML.nvmlDeviceGetCurrentClocksThrottleReasons(gpu()) == 0x24
    assert code(NVML.nvmlDeviceGetFanSpeed, gpu()) == NVML.NVML_ERROR_NOT_SUPPORTED


def test_gpm_is_the_mean_between_two_samples(nvml: Double) -> None:
    nvml.step("gpu0.gpm.2", 80.5, at=START / 1e6 + 6)

    def sample(second: int) -> Any:
        nvml.set("now", START + second * 1_000_000)
        taken = NVML.nvmlGpmSampleAlloc()
        return NVML.nvmlGpmSampleGet(gpu(), taken)

    def ask(first: Any, second: Any) -> Any:
        get = NVML.c_nvmlGpmMetricsGet_t()
        get.version, get.numMetrics = NVML.NVML_GPM_METRICS_GET_VERSION, 2
        get.sample1, get.sample2 = first, second
        get.metrics[0].metricId, get.metrics[1].metricId = NVML.NVML_GPM_METRIC_SM_UTIL, 30
        return NVML.nvmlGpmMetricsGet(get)

    start, end = sample(0), sample(8)
    answer = ask(start, end)
    assert math.isclose(answer.metrics[0].value, 80.5 / 4)
    assert answer.metrics[0].metricInfo.unit == b"%"
    assert answer.metrics[1].nvmlReturn == NVML.NVML_ERROR_NOT_SUPPORTED
    assert code(ask, end, start) == NVML.NVML_ERROR_INVALID_ARGUMENT
    assert NVML.nvmlGpmQueryDeviceSupport(gpu()).isSupportedDevice == 1
    NVML.nvmlGpmSampleFree(start)
    NVML.nvmlGpmSampleFree(end)


def test_process_lists_of_every_kind(nvml: Double) -> None:
    nvml.processes(0, [Process(11, "512M"), Process(12, "-", "G"), Process(13, "1G", "M")])
    compute = NVML.nvmlDeviceGetComputeRunningProcesses(gpu())
    assert [(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in compute] == [
        (11, 512 << 20, 2**32 - 1)
    ]
    assert [p.pid for p in NVML.nvmlDeviceGetComputeRunningProcesses_v2(gpu())] == [11]
    graphics = NVML.nvmlDeviceGetGraphicsRunningProcesses(gpu())
    assert [(p.pid, p.usedGpuMemory) for p in graphics] == [(12, None)]
    assert [p.pid for p in NVML.nvmlDeviceGetMPSComputeRunningProcesses(gpu())] == [13]
    nvml.processes(0, [Process(11, "512M"), Process(12, "2M", "G"), Process(13, "1G", "M")])
    version, every = NVML.nvmlProcessDetailList_v1, NVML.NVML_PROCESS_MODE_ALL
    detail = NVML.nvmlDeviceGetRunningProcessDetailList(gpu(), version, every)
    assert [p.pid for p in detail] == [11, 12, 13]
    assert NVML.nvmlDeviceGetComputeRunningProcesses(gpu(1)) == []


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


def test_mig_instances_that_are_taken_apart_while_held(mig: Double) -> None:
    part = NVML.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 0)
    mig.update({f"gpu0.mig{n}.uuid": None for n in range(4)})
    mig.update({"gpu0.mig.mode": 0, "gpu0.mig.mode.pending": 0})
    assert code(NVML.nvmlDeviceGetMemoryInfo, part) == NVML.NVML_ERROR_INVALID_ARGUMENT
    assert NVML.nvmlDeviceGetUtilizationRates(gpu()).gpu == 0
    assert NVML.nvmlDeviceGetMaxMigDeviceCount(gpu()) == 0


def test_a_card_is_split_again_and_made_whole(nvml: Double) -> None:
    nvml.split(1, ["3g.71gb", "1g.18gb"])
    assert NVML.nvmlDeviceGetMigMode(gpu(1)) == [1, 1]
    first, second = (NVML.nvmlDeviceGetMigDeviceHandleByIndex(gpu(1), n) for n in range(2))
    assert NVML.nvmlDeviceGetName(first) == "NVIDIA H200 MIG 3g.71gb"
    before = NVML.nvmlDeviceGetUUID(second)
    nvml.split(1, ["1g.18gb"] * 16)
    parts = [NVML.nvmlDeviceGetMigDeviceHandleByIndex(gpu(1), n) for n in range(16)]
    uuids = {NVML.nvmlDeviceGetUUID(part) for part in parts}
    assert len(uuids) == 16 and before not in uuids
    nvml.split(1, [])
    assert NVML.nvmlDeviceGetMigMode(gpu(1)) == [0, 0]
    assert code(NVML.nvmlDeviceGetUUID, first) == NVML.NVML_ERROR_INVALID_ARGUMENT


def test_gpm_of_a_mig_instance(mig: Double) -> None:
    mig.update({"gpu0.gpm": 1, "gpu0.mig1.gpm.2": 44, "now": START})
    samples = [NVML.nvmlGpmSampleAlloc(), NVML.nvmlGpmSampleAlloc()]
    for n, sample in enumerate(samples):
        mig.set("now", START + n * 1_000_000)
        NVML.nvmlGpmMigSampleGet(gpu(), 3, sample)
    get = NVML.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics = NVML.NVML_GPM_METRICS_GET_VERSION, 1
    get.sample1, get.sample2 = samples
    get.metrics[0].metricId = 2
    assert NVML.nvmlGpmMetricsGet(get).metrics[0].value == 44
    assert code(NVML.nvmlGpmMigSampleGet, gpu(), 7, samples[0]) == NVML.NVML_ERROR_INVALID_ARGUMENT


def test_nvlinks_and_their_counters(nvml: Double) -> None:
    assert NVML.nvmlDeviceGetNvLinkState(gpu(), 17) == 1
    assert NVML.nvmlDeviceGetNvLinkRemoteDeviceType(gpu(), 3) == NVML.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert code(NVML.nvmlDeviceGetNvLinkState, gpu(), 18) == NVML.NVML_ERROR_INVALID_ARGUMENT
    transmit = NVML.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    nvml.update({"gpu0.nvlink.*.tx_kib": 5, "gpu0.nvlink.3.tx_kib": 7})
    assert fields(gpu(), (transmit, 0), (transmit, 3), (transmit, 2**32 - 1)) == [5, 7, 17 * 5 + 7]
    nvml.set("gpu0.nvlink.2.state", 0)
    assert NVML.nvmlDeviceGetNvLinkState(gpu(), 2) == 0


@pytest.mark.parametrize("node", ["dgx1"], indirect=True)
def test_a_cube_mesh_and_its_processors(node: Double) -> None:
    mesh = {NVML.nvmlDeviceGetNvLinkRemotePciInfo(gpu(), n).busId.lower() for n in range(6)}
    assert mesh == {f"00000000:{bus}:00.0" for bus in ("07", "0a", "0b", "85")}
    assert list(NVML.nvmlDeviceGetCpuAffinity(gpu(5), 2)) == [0xFFFFF00000 | 0xF << 60, 0xFFFF]
    assert code(NVML.nvmlDeviceGetNumaNodeId, gpu()) == NVML.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("error", [3, 4, 15, 999])
def test_a_call_fails_as_told_on_one_gpu_only(nvml: Double, error: int) -> None:
    nvml.fail("nvmlDeviceGetPower*", error, gpu=1)
    assert code(NVML.nvmlDeviceGetPowerUsage, gpu(1)) == error
    assert code(NVML.nvmlDeviceGetPowerUsage, gpu(0)) == 0
    assert code(NVML.nvmlDeviceGetTemperature, gpu(1), 0) == 0
    nvml.fail("nvmlDeviceGetPower*", 0, gpu=1)
    assert code(NVML.nvmlDeviceGetPowerUsage, gpu(1)) == 0


def test_a_lost_card_is_counted_but_says_nothing(nvml: Double) -> None:
    handle = gpu(1)
    nvml.lose(1)
    assert NVML.nvmlDeviceGetCount() == 3
    assert code(gpu, 1) == 15
    assert code(NVML.nvmlDeviceGetUUID, handle) == 15
    assert code(NVML.nvmlDeviceGetFanControlPolicy_v2, handle, 0) == 15  # one that is never played


def test_a_card_that_is_gone_moves_the_others_up(nvml: Double) -> None:
    uuids = [NVML.nvmlDeviceGetUUID(gpu(n)) for n in range(3)]
    handle = gpu(1)
    nvml.set("gpu1.gone", 1)
    assert NVML.nvmlDeviceGetCount() == 2
    assert NVML.nvmlDeviceGetUUID(gpu(1)) == uuids[2]
    assert NVML.nvmlDeviceGetIndex(gpu(1)) == 1
    assert code(NVML.nvmlDeviceGetTemperature, handle, 0) == NVML.NVML_ERROR_GPU_IS_LOST


def test_a_uuid_can_change_while_a_handle_is_held(nvml: Double) -> None:
    handle = gpu()
    new = "GPU-11111111-2222-3333-4444-555555555555"
    nvml.set("gpu0.uuid", new)
    assert NVML.nvmlDeviceGetUUID(handle) == new


def test_what_is_not_a_handle_is_an_invalid_argument(nvml: Double) -> None:
    assert nvml.held()
    for call in (NVML.nvmlDeviceGetUUID, NVML.nvmlDeviceGetMemoryInfo, NVML.nvmlDeviceGetPciInfo):
        assert code(call, NVML.c_nvmlDevice_t()) == NVML.NVML_ERROR_INVALID_ARGUMENT
    assert code(gpu, 3) == NVML.NVML_ERROR_INVALID_ARGUMENT


def test_a_reloaded_driver_needs_a_new_start(nvml: Double) -> None:
    nvml.set("reload", 1)
    assert code(NVML.nvmlDeviceGetCount) == NVML.NVML_ERROR_UNKNOWN
    NVML.nvmlShutdown()
    NVML.nvmlInit()
    assert NVML.nvmlDeviceGetCount() == 3
    nvml.set("reload", 0)
    NVML.nvmlShutdown()
    NVML.nvmlInit()


def test_the_last_line_counts_and_nothing_means_not_supported(nvml: Double) -> None:
    nvml.set("gpu0.temperature", 50)
    nvml.set("gpu*.temperature", 60)
    nvml.set("gpu1.temperature", 70)
    assert [NVML.nvmlDeviceGetTemperature(gpu(n), 0) for n in range(3)] == [60, 70, 60]
    nvml.set("gpu2.temperature", None)
    assert code(NVML.nvmlDeviceGetTemperature, gpu(2), 0) == NVML.NVML_ERROR_NOT_SUPPORTED
    nvml.unset("gpu1.temperature", "gpu*.temperature", "gpu2.temperature")
    assert [NVML.nvmlDeviceGetTemperature(gpu(n), 0) for n in range(3)] == [50, 28, 28]
    with nvml.control.open("a") as file:  # by hand: a line is read when it is whole
        file.write("gpu0.temperature=5")
        file.flush()
        assert NVML.nvmlDeviceGetTemperature(gpu(), 0) == 50
        file.write("5\n")
    assert NVML.nvmlDeviceGetTemperature(gpu(), 0) == 55


def test_every_key_of_cards_and_nodes_is_in_the_readme(nodes: Callable[[str], Path]) -> None:
    documented: set[str] = set()
    for text in re.findall(r"`([^` ]+)`", README.read_text()):
        parts = [part.split(",") for part in re.split(r"[{}]", text)]
        documented |= {"".join(choice) for choice in itertools.product(*parts)}
    used = {key for card in CARDS.values() for key in card}
    for preset in ("dgx1", "dgx-h200", "a100-mig"):
        used |= {re.sub(r"^gpu\d+\.", "", key) for key in node_keys(nodes(preset), NEW)}
    assert len(used) > 150
    for key in used:
        common = re.sub(r"\b(gpm)\.\d+$", r"\1.", key)
        common = re.sub(r"^nvlink\.(\d+|\*)\.", "", re.sub(r"^mig\d+\.", "", common))
        places = re.sub(r"\.(sram|dram|l1|l2|register|texture|cbu)$", "", common)
        wanted = {common, places, *(f"{common}{end}" for end in ("N", "ID"))}
        assert wanted & documented, key
