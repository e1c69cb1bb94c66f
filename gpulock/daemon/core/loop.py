# SPDX-License-Identifier: Apache-2.0
"""Wait for what happens, and call whom it concerns: the one place where gpulockd sleeps."""

from __future__ import annotations

import select
from collections.abc import Callable

from gpulock.deadline import clock_boottime

READABLE = select.POLLIN
WRITABLE = select.POLLOUT
LONGEST = 3600.0  # seconds; poll(2) counts milliseconds in an int


class EventLoop:
    """Descriptors with what is to be called when they are ready (with poll's events)."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._acts: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, act: Callable[[int], None], events: int = READABLE) -> None:
        """Call `act` whenever `fd` is ready; once more changes act and events."""
        self._poll.register(fd, events)
        self._acts[fd] = act

    def forget(self, fd: int) -> None:
        """Watch `fd` no longer; to be called before it is closed."""
        if self._acts.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, until: float) -> None:
        """Sleep until something is ready, at most until then (CLOCK_BOOTTIME seconds); act."""
        left = min(max(0.0, until - clock_boottime()), LONGEST)
        # a millisecond more: one less would turn the loop in vain until the time has come
        for fd, events in self._poll.poll(int(left * 1000) + (1 if left else 0)):
            act = self._acts.get(fd)  # an earlier act may have forgotten it
            if act is not None:
                act(events)
