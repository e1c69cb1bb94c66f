# SPDX-License-Identifier: Apache-2.0
"""The signals of gpulockd: TERM and INT end it within a second, HUP re-reads the settings.

A handler only notes what came and wakes the loop. Where the end does not come by itself (a round
waits at the gate, or for slurmctld) an alarm raises EndedError wherever we are: a round may be
stopped at any instruction, as the sweep shows.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

PATIENCE = 0.5  # seconds that a round at work has to end by itself


class ShutdownTimeoutError(BaseException):
    """End now: the time to end by itself is over."""


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
        raise ShutdownTimeoutError
