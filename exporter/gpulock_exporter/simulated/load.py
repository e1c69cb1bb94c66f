# SPDX-License-Identifier: Apache-2.0
"""How a simulated job works: a pattern by which each device can be told from its neighbours.

Pure functions of the device and of the seconds since it was claimed, so that two exporters that
look at one node see the same.
"""

from __future__ import annotations

import math

START = 8.0  # seconds in which a job gets going
LOADING = 20.0  # seconds in which it fills the device's memory
RATE = 6  # samples a second, as the driver takes them
MOST = 96  # samples: the driver remembers no more
EPOCH, CHECKPOINT, EDGE = 45.0, 9.0, 3.0  # seconds


def device_load(device: int, seconds: float) -> float:
    """Return how much of a device a job uses, 0 to 1, `seconds` after it was claimed."""
    if seconds <= 0:
        return 0.0
    shapes = (_steady_load, _wave_load, _epoch_load, _starved_load)
    return min(1.0, seconds / START) * shapes[device % len(shapes)](seconds + 5.0 * device)


def mean_device_load(device: int, since: float, until: float) -> float:
    """Return the mean of `load` between two moments, as the driver's samples would give it."""
    span = max(0.0, until - since)
    count = max(1, math.ceil(min(span * RATE, MOST)))
    step = span / count
    return sum(device_load(device, since + (n + 0.5) * step) for n in range(count)) / count


def memory_share(device: int, seconds: float) -> float:
    """Return which part of a device's memory a job uses."""
    return (0.4 + 0.07 * (device % 8)) * max(0.0, min(1.0, seconds / LOADING))


def _steady_load(seconds: float) -> float:
    return 0.96 + 0.02 * math.sin(seconds / 3)


def _wave_load(seconds: float) -> float:
    return 0.62 + 0.3 * math.sin(2 * math.pi * seconds / 60)


def _epoch_load(seconds: float) -> float:
    """Work, and write a checkpoint: nearly idle for a while."""
    phase = seconds % (EPOCH + CHECKPOINT)
    away = max(0.0, min(1.0, phase / EDGE, (EPOCH - phase) / EDGE))
    return 0.06 + 0.86 * away


def _starved_load(seconds: float) -> float:
    """Wait for data most of the time."""
    return 0.28 + 0.12 * math.sin(2 * math.pi * seconds / 90)
