# SPDX-License-Identifier: Apache-2.0
"""The two clocks of the exporter."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpulock.deadline import clock_boottime

STEP = 1.0  # seconds by which the wall clock was set, rather than that it drifts


@dataclass(frozen=True)
class Moment:
    """One moment: CLOCK_BOOTTIME seconds, for durations, and epoch seconds, for people."""

    boottime: float
    wall: float


def current_moment() -> Moment:
    """Return this moment, by the clocks of this machine."""
    return Moment(clock_boottime(), time.time())


def steady_offset(before: float | None, now: Moment) -> float:
    """Return what to add to a boottime to get its epoch seconds.

    It stays the same while the two clocks only drift apart, so that the timestamp of one event
    is the same number in each scrape; it follows once the wall clock was set.
    """
    offset = now.wall - now.boottime
    return offset if before is None or abs(offset - before) > STEP else before
