# SPDX-License-Identifier: Apache-2.0
"""Wait for what happens, and call whom it concerns: the one place where gpulockd sleeps.

TERM and INT end gpulockd within a second, HUP re-reads the settings. A handler only notes what
came and wakes the loop. Where the end does not come by itself (a round waits at the gate, or for
slurmctld) an alarm ends the process wherever it is: a round may be stopped at any instruction, as
the sweep shows. What it has started the kernel or the service manager ends.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import FrameType

from gpulock.deadline import clock_boottime

READABLE = select.POLLIN


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

    def close(self, fd: int) -> None:
        """Close `fd`, and watch it no longer."""
        self.forget(fd)
        os.close(fd)

    def wait(self, until: float) -> None:
        """Sleep until something is ready, at most until then (CLOCK_BOOTTIME seconds); act."""
        left = max(0.0, until - clock_boottime())
        # a millisecond more: one less would turn the loop in vain until the time has come
        ready = self._poll.poll(int(left * 1000) + (1 if left else 0))
        for fd, events, act in [(fd, events, self._acts.get(fd)) for fd, events in ready]:
            # an earlier act may have forgotten it, and another file may have its number
            if act is not None and self._acts.get(fd) is act:
                act(events)


PATIENCE = 0.5  # seconds that a round at work has to end by itself


class DaemonSignals:
    """What came since it was asked last; `fd` is readable once something did."""

    def __init__(self) -> None:
        self.fd, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.ending = False
        self.reload = False

    def install(self) -> None:
        """Take the signals over."""
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGHUP, self._hang_up)
        signal.signal(signal.SIGALRM, self._alarm)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def close(self) -> None:
        """Let the interpreter take its time to end: its own SIGALRM would kill it by then."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def drain(self, _: int = 0) -> None:
        """Take the wake-ups away."""
        try:
            while os.read(self.fd, 64):
                pass
        except BlockingIOError:
            return

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.ending:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        self.ending = True

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self.reload = True

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        os._exit(0)
