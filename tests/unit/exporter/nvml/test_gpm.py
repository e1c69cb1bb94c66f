# SPDX-License-Identifier: Apache-2.0
"""GPM's window, and what its metrics are believed to say; NVML's calls stand in for themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pynvml
import pytest
from gpulock_exporter.nvml.answers import RETRY, GpuLostError, NvmlDevice, PollContext
from gpulock_exporter.nvml.gpm import (
    GRAPHICS,
    GpmWindow,
    measure_gpm_window,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("percent", "ratio"),
    [
        (0, 0),
        (37.5, 0.375),
        (100, 1),
        (100.4, 1),
        (101.5, None),
        (900, None),
        (-0.1, None),
        (math.nan, None),
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


@dataclass
class Driver:
    """NVML's calls for GPM: which samples there are, and between which two it was asked."""

    taken: list[int] = field(default_factory=list[int])
    held: set[int] = field(default_factory=set[int])
    asked: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    error: int = 0

    def alloc(self) -> pynvml.c_nvmlGpmSample_t:
        sample = pynvml.c_nvmlGpmSample_t()
        self.held.add(id(sample))
        return sample

    def free(self, sample: pynvml.c_nvmlGpmSample_t) -> None:
        self.held.remove(id(sample))

    def take(self, sample: pynvml.c_nvmlGpmSample_t) -> None:
        if self.error:
            raise pynvml.NVMLError(self.error)
        self.taken.append(id(sample))

    def between(
        self, first: pynvml.c_nvmlGpmSample_t, second: pynvml.c_nvmlGpmSample_t
    ) -> dict[int, float]:
        self.asked.append((id(first), id(second)))
        return {GRAPHICS: 50.0}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", made.alloc)
    monkeypatch.setattr(pynvml, "nvmlGpmSampleFree", made.free)
    monkeypatch.setattr("gpulock_exporter.nvml.gpm.gpm_metrics_between", made.between)
    return made


def card() -> NvmlDevice:
    return NvmlDevice(pynvml.c_nvmlDevice_t(), "0000:3b:00.0")


def test_one_sample_ends_a_window_and_begins_the_next(driver: Driver) -> None:
    window, of = GpmWindow(driver.take), card()
    assert window.step(PollContext(10.0), of) is None
    assert window.step(PollContext(10.9), of) is None, "that is less than a second"
    first = window.step(PollContext(11.0), of)
    assert first is not None
    assert (first.seconds, first.active) == (1.0, 0.5)
    assert window.step(PollContext(11.5), of) is None
    assert window.latest is first, "until there is another"
    second = window.step(PollContext(12.5), of)
    assert second is not None
    assert second.seconds == 1.5
    assert driver.asked == [tuple(driver.taken[0:2]), tuple(driver.taken[1:3])]
    window.close()
    assert driver.held == set()


def test_a_window_over_a_long_silence_says_nothing_of_now(driver: Driver) -> None:
    window, of = GpmWindow(driver.take), card()
    window.step(PollContext(10.0), of)
    assert window.step(PollContext(100.0), of) is None
    assert window.step(PollContext(101.0), of) is not None


def test_after_a_failure_a_new_window_begins(driver: Driver) -> None:
    window, of = GpmWindow(driver.take), card()
    window.step(PollContext(10.0), of)
    driver.error = 999
    look = PollContext(11.0)
    assert window.step(look, of) is None
    assert look.failures == {"gpm": "0000:3b:00.0: Unknown Error"}
    driver.error = 0
    assert window.step(PollContext(12.0), of) is None, "nobody saw the time in between"
    assert window.step(PollContext(13.0), of) is not None


def test_what_is_not_supported_is_not_taken_again_and_a_lost_card_is_said(driver: Driver) -> None:
    window, of = GpmWindow(driver.take), card()
    driver.error = pynvml.NVML_ERROR_NOT_SUPPORTED
    look = PollContext(10.0)
    assert window.step(look, of) is None
    driver.error = 0
    assert window.step(PollContext(11.0), of) is None
    assert (look.failures, driver.taken) == ({}, [])
    driver.error = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(GpuLostError):
        window.step(PollContext(11.0 + RETRY), of)
