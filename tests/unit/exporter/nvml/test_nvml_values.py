# SPDX-License-Identifier: Apache-2.0
"""What numbers from the driver are turned into: fields, samples, GPM's metrics."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pynvml
import pytest
from gpulock_exporter.nvml import field_values
from gpulock_exporter.nvml.answers import NAMED, RETRY, VALUES, NvmlDevice, PollContext
from gpulock_exporter.nvml.card import read_numa_node, read_nvlinks
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
    field_error,
    read_fields,
)
from gpulock_exporter.nvml.gpm import GRAPHICS, measure_gpm_window
from gpulock_exporter.nvml.slow_counters import board_values
from gpulock_exporter.nvml.utilisation_samples import (
    DRY,
    HEAL,
    KEPT,
    SAMPLES,
    BusyTime,
    Sample,
    UtilizationSamples,
    integrate_samples,
)

from tests.nvml.double import ERROR_GPU_IS_LOST, ERROR_NOT_SUPPORTED, ERROR_UNKNOWN, Double
from tests.support.exporter_nvml import Eye, device

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


PERIOD = 166_667  # microseconds, as drivers take samples
START = 1_700_000_000_000_000


def buffer(first: int, count: int, percent: float = 50) -> list[Sample]:
    """Return `count` samples from the one after `first` periods on."""
    return [(START + (first + n + 1) * PERIOD, percent) for n in range(count)]


@pytest.mark.parametrize(
    ("samples", "busy", "observed"),
    [
        pytest.param([], 0, 0, id="nothing new"),
        pytest.param([(500_000, 100), (1_000_000, 0)], 0.5, 1.0, id="half of it"),
        pytest.param([(500_000, 900), (1_000_000, 40)], 0.2, 0.5, id="900 % says nothing"),
        pytest.param([(500_000, -1), (1_000_000, 40)], 0.2, 0.5, id="less than nothing"),
        pytest.param([(0, 100), (1_000_000, 40)], 0.4, 1.0, id="what was seen before"),
        pytest.param([(600_000, 50), (300_000, 50)], 0.3, 0.6, id="time goes back"),
        pytest.param([(600_000, 50), (600_000, 100)], 0.3, 0.6, id="one moment twice"),
        pytest.param([(1_600_000, 100), (1_700_000, 100)], 0.1, 0.1, id="after a gap"),
        pytest.param([(10**18, 100), (1_000_000, 10)], 0.1, 1.0, id="from the future"),
        pytest.param([(1_500_000, 40)], 0.6, 1.5, id="the longest"),
        pytest.param([(n * 10_000, 100) for n in range(1, 101)], 1, 1, id="as many as there are"),
        pytest.param([(n * 10_000, 100) for n in range(1, 102)], 0, 0, id="too many"),
    ],
)
def test_a_list_of_samples_is_worth(samples: list[Sample], busy: float, observed: float) -> None:
    found, _ = integrate_samples(samples, seen=0, allowed=2.0)
    assert found == pytest.approx((busy, observed))


def fed(
    source: UtilizationSamples, looks: list[list[Sample]], start: float = 100.0
) -> list[BusyTime]:
    """Look once a second, each time at what a driver has that is younger than was asked for."""
    found: list[BusyTime] = []
    for second, samples in enumerate(looks, 1):
        since = source.since(start + second)
        found.append(source.add([one for one in samples if one[0] > since], start + second))
    return found


def test_a_clock_that_was_set_back_is_found_again() -> None:
    source = UtilizationSamples(100.0)
    fed(source, [buffer(0, 6), buffer(0, 12)])
    later = 100 + 2 + HEAL + 1
    assert source.since(later - 2) != 0
    source.add([], later - 2)
    assert source.since(later) == 0
    assert source.add([(5_000_000, 50)], later) == (0, 0)
    assert source.since(later + 1) == 5_000_000
    assert source.add([(6_000_000, 50)], later + 1) == (0.5, 1.0)


@pytest.mark.parametrize("period", [0.5, 1, 5, 9, 10, 11, 15])
def test_a_period_of_up_to_15_seconds_is_observed_whole(period: float) -> None:
    source, found = UtilizationSamples(100.0), list[BusyTime]()
    for n in range(1, 21):
        now = 100.0 + n * period
        since, youngest = source.since(now), 100 + int(n * period * 1e6 / PERIOD)
        samples = [one for one in buffer(youngest - 99, 99, 40) if one[0] > since]
        found.append(source.add(samples, now))
    assert sum(one.observed for one in found) == pytest.approx(19 * period, rel=0.03)
    assert sum(one.busy for one in found) == pytest.approx(0.4 * 19 * period, rel=0.03)


def test_a_card_that_writes_no_samples_while_idle_is_seen_by_snapshots() -> None:
    source = UtilizationSamples(100.0)
    source.since(101)
    source.add(buffer(0, 6), 101)
    assert source.snapshot(0, 101.5) == (0, 0), "its buffer has the word"
    source.since(101 + DRY)
    source.add([], 101 + DRY)
    source.add([], 102 + DRY)
    assert source.snapshot(0, 102 + DRY) == (0, 1)
    assert source.snapshot(50, 103 + DRY) == (0.5, 1)
    assert source.snapshot(900, 104 + DRY) == (0, 0)


def test_a_snapshot_does_not_stand_for_minutes_in_which_a_card_was_lost() -> None:
    source = UtilizationSamples(100.0)
    assert source.snapshot(50, 100 + 600).observed == KEPT


def test_the_end_of_a_link_whose_bus_id_is_no_text_is_a_failure_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbage = NVML.nvmlPciInfo_t(busId=b"\xff\xfe")
    monkeypatch.setattr(NAMED, "nvmlDeviceGetNvLinkState", lambda *_: 1)
    monkeypatch.setattr(NAMED, "nvmlDeviceGetNvLinkRemotePciInfo", lambda *_: garbage)
    look = PollContext(100.0)
    assert read_nvlinks(NvmlDevice(NVML.c_nvmlDevice_t(), "0000:3b:00.0"), look) is None
    assert {*look.failures} == {"nvlink"}


MIB = 1 << 20


@pytest.mark.parametrize(
    ("percent", "ratio"),
    [
        (0, 0),
        (100, 1),
        (100.4, 1),
        (101.5, None),
        (-0.1, None),
        (math.inf, None),
    ],
)
def test_a_metric_is_a_ratio_or_nothing(percent: float, ratio: float | None) -> None:
    found = measure_gpm_window({GRAPHICS: percent, 2: percent}, 1.0)
    assert found.active == ratio
    assert found.ratios.get("sm_active") == ratio


def test_traffic_is_a_rate_times_the_window() -> None:
    found = measure_gpm_window({20: 10, 21: 0.5, 60: 3, 61: 4}, 2.0)
    assert found.traffic == {
        "pcie_transmit": 20 * MIB,
        "pcie_receive": MIB,
        "nvlink_receive": 6 * MIB,
        "nvlink_transmit": 8 * MIB,
    }
    assert measure_gpm_window({20: -10, 60: -0.5}, 2.0).traffic == {}


def test_a_window_that_nobody_saw_whole_says_nothing(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml, Eye(nvml) as eye:
        assert [device(eye.look()).gpm is None for _ in range(2)] == [True, False]
        assert device(eye.look(after=100)).gpm is None, "that is nothing of now"
        assert device(eye.look()).gpm is not None
        nvml.fail("nvmlGpmSampleGet", ERROR_UNKNOWN)
        frame = eye.look()
        assert (device(frame).gpm, {*frame.failures}) == (None, {"gpm"})
        nvml.reset()
        assert [device(eye.look()).gpm is None for _ in range(2)] == [True, False], "one in between"


def test_what_is_not_supported_is_not_asked_again_and_a_lost_card_is_said(tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="dgx-h200", gpus=1) as nvml, Eye(nvml) as eye:
        nvml.fail("nvmlGpmSampleGet", ERROR_NOT_SUPPORTED)
        frame = eye.look()
        nvml.reset()
        assert (device(eye.look()).gpm, frame.failures) == (None, {})
        nvml.fail("nvmlGpmSampleGet", ERROR_GPU_IS_LOST)
        assert eye.look(after=RETRY).lost
