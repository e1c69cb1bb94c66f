# SPDX-License-Identifier: Apache-2.0
"""GPM's window, and what its metrics are believed to say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from gpulock_exporter.nvml.answers import RETRY
from gpulock_exporter.nvml.gpm import GRAPHICS, measure_gpm_window

from tests.nvml.double import ERROR_GPU_IS_LOST, ERROR_NOT_SUPPORTED, ERROR_UNKNOWN, Double
from tests.support.exporter_nvml import Eye, device

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
