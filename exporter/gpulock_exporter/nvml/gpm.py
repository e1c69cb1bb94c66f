# SPDX-License-Identifier: Apache-2.0
"""GPM: what a card of Hopper or later did between two samples, on a window of our own.

Only the worker imports this. One sample ends a window and begins the next, so no moment is
missed, and nobody else's samples shorten ours. All of it is per GPU instance, not per compute
instance (nvml.h, nvmlGpmMigSampleGet).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pynvml

from gpulock_exporter.nvml.answers import NvmlDevice, PollContext, calls

SHORTEST_WINDOW = 0.95  # seconds between two samples: each look takes one, also one a little early
LONGEST_WINDOW = 60.0  # seconds after which a window says nothing of now

# nvmlGpmMetricId_t
GRAPHICS, PCIE_TRANSMIT, PCIE_RECEIVE, NVLINK_RECEIVE, NVLINK_TRANSMIT = 1, 20, 21, 60, 61
RATIOS = {2: "sm_active", 3: "sm_occupancy", 5: "tensor_active", 10: "dram_active"}
TRAFFIC = {
    PCIE_TRANSMIT: "pcie_transmit",
    PCIE_RECEIVE: "pcie_receive",
    NVLINK_TRANSMIT: "nvlink_transmit",
    NVLINK_RECEIVE: "nvlink_receive",
}
METRICS = (GRAPHICS, *RATIOS, *TRAFFIC)
METRIC = struct.Struct("@IId24x")  # nvmlGpmMetric_t: id, error, value, and its names
MIB = 1 << 20
WHOLE = 100.0
ROUNDING = 1.0  # percent that a metric may be above the whole
FASTEST = 1e8  # MiB/s, a hundred times what any link does
GPM = "GPM"  # what a device may not have


class GpmMeasurement(NamedTuple):
    """What happened in a window of `seconds`: ratios by name, bytes by name, time at work.

    `wrong` has by its number each metric that cannot be.
    """

    seconds: float
    ratios: dict[str, float]
    traffic: dict[str, int]
    active: float | None  # ratio of the time in which anything ran
    wrong: dict[int, float]


class GpmWindow:
    """The two samples of one device; `take` fills one. `latest` is the last whole window."""

    def __init__(self, take: Callable[[pynvml.c_nvmlGpmSample_t], object]) -> None:
        self.latest: GpmMeasurement | None = None
        self._take = take
        self._samples: list[pynvml.c_nvmlGpmSample_t] = []
        self._since: float | None = None  # when the first of them was taken

    def step(self, poll: PollContext, device: NvmlDevice) -> GpmMeasurement | None:
        """Return a window that ends now, None where none does."""
        if device.is_absent(poll, GPM):
            self.latest = self._since = None
            return None
        if self._since is not None and poll.now - self._since < SHORTEST_WINDOW:
            return None
        since, self._since, self.latest = self._since, None, None
        try:
            while len(self._samples) < 2:  # noqa: PLR2004 (a window has two ends)
                self._samples.append(calls.nvmlGpmSampleAlloc())
            self._samples.reverse()
            self._take(self._samples[1])
            self._since = poll.now
            if since is not None and poll.now - since <= LONGEST_WINDOW:
                values = gpm_metrics_between(self._samples[0], self._samples[1])
                self.latest = measure_gpm_window(values, poll.now - since)
                for number, value in self.latest.wrong.items():
                    poll.fail("gpm", device.lock_id, f"metric {number} cannot be {value}")
        except pynvml.NVMLError as fault:
            device.refused(poll, "gpm", GPM, fault.value)
        return self.latest

    def close(self) -> None:
        """Give the samples back; the next window begins anew."""
        self.latest = self._since = None
        while self._samples:
            try:
                calls.nvmlGpmSampleFree(self._samples.pop())
            except pynvml.NVMLError:
                continue  # the driver is gone, and they are with it


def measure_gpm_window(values: dict[int, float], seconds: float) -> GpmMeasurement:
    """Return what metrics by their ids say; one that is no number is not known."""
    sound = {
        number: value
        for number, value in values.items()
        if 0 <= value <= (FASTEST if number in TRAFFIC else WHOLE + ROUNDING)
    }
    return GpmMeasurement(
        seconds,
        {RATIOS[n]: min(value / WHOLE, 1.0) for n, value in sound.items() if n in RATIOS},
        {TRAFFIC[n]: int(rate * MIB * seconds) for n, rate in sound.items() if n in TRAFFIC},
        min(sound[GRAPHICS] / WHOLE, 1.0) if GRAPHICS in sound else None,
        {n: value for n, value in values.items() if n not in sound and not math.isnan(value)},
    )


def is_gpm_supported(device: NvmlDevice, poll: PollContext) -> bool:
    """Return whether the card has GPM."""
    if device.is_absent(poll, GPM):
        return False
    support = device.query(poll, "gpm", calls.nvmlGpmQueryDeviceSupport)
    if support is not None and not support.isSupportedDevice:
        device.refused(poll, "gpm", GPM, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return False
    return support is not None


def gpm_metrics_between(
    first: pynvml.c_nvmlGpmSample_t, second: pynvml.c_nvmlGpmSample_t
) -> dict[int, float]:
    """Return the metrics between two samples that the driver could make."""
    asked, answers = _gpm_request()
    asked.sample1, asked.sample2 = first, second
    calls.nvmlGpmMetricsGet(asked)
    return {number: value for number, error, value in METRIC.iter_unpack(answers) if not error}


@cache
def _gpm_request() -> tuple[pynvml.c_nvmlGpmMetricsGet_t, memoryview]:
    """Return the one structure of 20 KiB that all windows use in turn, and where its answers are.

    An attribute of a structure of pynvml's is a call of Python's: see field_values.
    """
    raw = bytearray(ctypes.sizeof(pynvml.c_nvmlGpmMetricsGet_t))
    asked = pynvml.c_nvmlGpmMetricsGet_t.from_buffer(raw)
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(METRICS)
    for place, number in enumerate(METRICS):
        asked.metrics[place].metricId = number
    begin = ctypes.addressof(asked.metrics[0]) - ctypes.addressof(asked)
    return asked, memoryview(raw)[begin : begin + METRIC.size * len(METRICS)]
