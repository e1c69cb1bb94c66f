# SPDX-License-Identifier: Apache-2.0
"""The one clock of the tests: time passes when a test or a sleep of the product lets it pass.

`wall_time` and `boot_time` are this machine's, for what a real process compares with its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

WALL = 1_795_000_000.0  # seconds since the epoch, when a virtual machine was booted
_REAL = time.clock_gettime
_REAL_SLEEP = time.sleep


def boot_time() -> float:
    """Return the seconds since this machine was booted."""
    return _REAL(time.CLOCK_BOOTTIME)


def wall_time() -> float:
    """Return this machine's seconds since the epoch."""
    return _REAL(time.CLOCK_REALTIME)


class VirtualClock:
    """Seconds since boot, `now`, and since the epoch, `wall`; called, it returns the former.

    `then` has what happens at the n-th sleep, `interrupts` at the n-th look, as a signal would.
    """

    def __init__(self, now: float = 1000.0, booted: float = WALL) -> None:
        self.now = now
        self.booted = booted
        self.looks = 0
        self.sleeps: list[float] = []
        self.then: dict[int, Callable[[], object]] = {}
        self.interrupts: dict[int, Callable[[], object]] = {}
        self._ahead: float | None = None  # of this machine's clock, while it runs

    def __call__(self) -> float:
        self.looks += 1
        self.interrupts.pop(self.looks, bool)()
        if self._ahead is not None:
            self.now = boot_time() + self._ahead
        return self.now

    @property
    def wall(self) -> float:
        """Return the seconds since the epoch."""
        return self.booted + self.now

    @property
    def slept(self) -> float:
        """Return how long was slept in all."""
        return sum(self.sleeps)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.sleeps.append(seconds)
        if self._ahead is not None:
            _REAL_SLEEP(seconds)
        self.now += seconds
        self.then.get(len(self.sleeps), bool)()

    def run(self) -> None:
        """Let time pass by itself from now on: a real program is waited for."""
        self._ahead = self.now - boot_time()

    def gettime(self, which: int) -> float:
        """Return what clock_gettime does: of a clock of processes what the machine says."""
        if which == time.CLOCK_REALTIME:
            return self.booted + self()
        return self() if which in (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC) else _REAL(which)


def replace_clock(patch: pytest.MonkeyPatch) -> VirtualClock:
    """Let the product in this process go by a clock that stands still, from this second on.

    It is a whole number, so that a start in ticks is not before what happens in the same moment.
    """
    now = float(int(boot_time()))
    clock = VirtualClock(now, float(int(wall_time())) - now)
    patch.setattr(time, "clock_gettime", clock.gettime)
    patch.setattr(time, "clock_gettime_ns", lambda which: int(clock.gettime(which) * 1e9))
    patch.setattr(time, "monotonic", clock)
    patch.setattr(time, "time", lambda: clock.gettime(time.CLOCK_REALTIME))
    patch.setattr(time, "time_ns", lambda: int(clock.gettime(time.CLOCK_REALTIME) * 1e9))
    patch.setattr(time, "sleep", clock.sleep)
    return clock
