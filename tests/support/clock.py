# SPDX-License-Identifier: Apache-2.0
"""The one clock of the tests: time passes when a test or a sleep of the product lets it pass.

`wall_time` and `boot_time` are this machine's, for what a real process compares with its own.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

WALL = 1_795_000_000.0  # seconds since the epoch, when a virtual machine was booted
LONGEST = 1.0  # seconds of a sleep among programs that sleep
MOMENT = 0.01  # real seconds at most that a pause takes
ENOUGH = 2_000  # sleeps that a program at work may hold up: it is one that never ends
_REAL = time.clock_gettime
_REAL_SLEEP, _REAL_POLL = time.sleep, select.poll


Ready = TypeVar("Ready")


def boot_time() -> float:
    """Return the seconds since this machine was booted."""
    return _REAL(time.CLOCK_BOOTTIME)


def wall_time() -> float:
    """Return this machine's seconds since the epoch."""
    return _REAL(time.CLOCK_REALTIME)


class VirtualClock:
    """Seconds since boot, `now`, and since the epoch, `wall`; called, it returns the former.

    `then` has what happens at the n-th sleep.
    """

    def __init__(self, now: float = 1000.0, booted: float = WALL) -> None:
        self.now = now
        self.booted = booted
        self.sleeps: list[float] = []
        self.then: dict[int, Callable[[], object]] = {}
        self._withheld = 0
        self._rest = 0.0  # a sleep while all programs sleep is longer than the one before
        self._seen: list[tuple[str, str, str]] = []
        self._ahead: float | None = None  # of this machine's clock, while it runs

    def __call__(self) -> float:
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
        """Let time pass, but not while a program that this process has started is at work.

        Others have a moment: a pause may be for what is about to end, or to start a program.
        """
        self.sleeps.append(seconds)
        if self._ahead is not None:
            _REAL_SLEEP(seconds)
        elif self._withheld < ENOUGH and self._is_child_at_work():
            self._withheld, self._rest = self._withheld + 1, 0.0
            return
        else:
            _REAL_SLEEP(min(seconds, MOMENT))
        self._withheld = 0
        self.now += max(seconds, self._rest)
        self._rest = min(LONGEST, 2 * max(seconds, self._rest)) if self._seen else 0.0
        self.then.get(len(self.sleeps), bool)()

    def wait(self, ready: Callable[[], Ready], seconds: float) -> Ready:
        """Wait for what programs below this process do; time is up when all of them sleep."""
        for _ in range(ENOUGH):
            busy = self._is_child_at_work()
            if (found := ready()) or not busy:
                break
        if not found:
            self.now += seconds
        return found

    def _is_child_at_work(self) -> bool:
        """Give way to who works below this process; all of them sleep when none woke since."""
        seen = [one for one in list_descendants() if one[1] != "Z"]  # the others have ended
        asleep = seen == self._seen and all(state not in "RD" for _, state, _ in seen)
        self._seen = seen
        if seen and not asleep:
            _REAL_SLEEP(0.001)
        return bool(seen) and not asleep

    def run(self) -> None:
        """Let time pass by itself from now on: a real program is waited for."""
        self._ahead = self.now - boot_time()

    def gettime(self, which: int) -> float:
        """Return what clock_gettime does: of a clock of processes what the machine says."""
        if which == time.CLOCK_REALTIME:
            return self.booted + self()
        return self() if which in (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC) else _REAL(which)


class VirtualPoll:
    """select.poll whose time-out is a clock's, where programs below this process are waited for."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._real = clock, _REAL_POLL()
        self.register, self.unregister = self._real.register, self._real.unregister

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Return the descriptors that are ready."""
        if timeout and timeout > 0 and list_descendants():
            return self._clock.wait(lambda: self._real.poll(0), timeout / 1000)
        return self._real.poll(timeout)


def list_descendants() -> list[tuple[str, str, str]]:
    """Return pid, state and switches of context of each process below this one.

    Children of an ended process are not seen.
    """
    threads = os.listdir("/proc/self/task")
    pids = [pid for thread in threads for pid in children_of("self", thread)]
    found: list[tuple[str, str, str]] = []
    while pids:
        pid = pids.pop()
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            lines = ["State:\tR"]  # it ends just now
        state = next(line.split()[1] for line in lines if line.startswith("State:"))
        found.append((pid, state, " ".join(lines[-2:])))
        pids += children_of(pid, pid)
    return found


def children_of(pid: str, thread: str) -> list[str]:
    """Return the processes that a thread has started, none where it is over."""
    try:
        return Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


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
    patch.setattr(select, "poll", lambda: VirtualPoll(clock))
    return clock
