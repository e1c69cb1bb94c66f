# SPDX-License-Identifier: Apache-2.0
"""A point in time that a hook does not outlive: Grid Engine sets none (facts/grid-engine.md).

Hot. CLOCK_BOOTTIME: neither a clock that is set nor a node that slept moves it.
"""

import time


class Deadline:
    """Count down from `seconds`."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = clock_boottime() + seconds

    def left(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._end - clock_boottime())

    def sooner(self, seconds: float) -> "Deadline":
        """Return the earlier of this deadline and one `seconds` from now."""
        return Deadline(min(self.left(), seconds))


def clock_boottime() -> float:
    """Return seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
