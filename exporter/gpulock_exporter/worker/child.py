# SPDX-License-Identifier: Apache-2.0
"""One worker process: its frames, its last words, and the page in which it names its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpulock.errors import one_line
from gpulock_exporter.driver_calls import NO_CARD, PAGE, DriverCall, read_driver_call
from gpulock_exporter.frame import Frame, decode_frame

LINE_LIMIT = 1 << 22  # bytes of a frame: 128 MIG devices with 100 processes each are 1 MiB
WORDS = 400  # bytes of a worker's standard error that are told
CHUNK = 1 << 16  # bytes: what a pipe holds, pipe(7)
LONG_CALL = 0.25  # of the time after which a frame is late: a shorter call is not what it waits for
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)  # signals by which a library ends its process; others may send any of the rest


class WorkerTimeouts(NamedTuple):
    """Seconds: for the first frame after a start (NVML initialises cards), and between two."""

    first: float = 30.0
    frame: float = 5.0


class WorkerChild:
    """A worker that is started now; raise OSError where none can be.

    `since` is when it was heard last, or started, `killed` when it was, 0 where it was not.
    `card` is the one that it hangs in, or tries: the frames of one that tries are not read.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None, now: float, card: int = NO_CARD
    ) -> None:
        self.since, self.killed, self.card = now, 0.0, card
        self.is_heard = False
        self._buffer = b""
        self._page, self._words = map(os.memfd_create, ("gpulock-call", "gpulock-words"))
        for descriptor in (self._page, self._words):
            weakref.finalize(self, os.close, descriptor)
        self.process = subprocess.Popen(
            [*argv, f"note={self._page}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if card == NO_CARD else subprocess.DEVNULL,
            stderr=self._words,
            env=env,
            start_new_session=True,  # a terminal's ^C is for the parent
            pass_fds=(self._page,),
        )
        self.frames = self.process.stdout

    def call(self) -> DriverCall | None:
        """Return the call of one card that it makes now, as far as it names one."""
        return read_driver_call(os.pread(self._page, PAGE.size, 0))

    def late_call(self, now: float, limits: WorkerTimeouts) -> DriverCall | None:
        """Return the call of one card for which a late frame waits."""
        call = self.call()
        if call is None or now - call.since < LONG_CALL * limits.frame:
            return None
        return call

    def due(self, limits: WorkerTimeouts) -> float:
        """Return until when its next frame must come, and its call be over."""
        frame = self.since + (limits.frame if self.is_heard else limits.first)
        call = self.call()
        return frame if call is None else min(frame, call.since + limits.frame)

    def receive(self, now: float) -> list[Frame]:
        """Return the frames that are whole by now; raise ValueError for garbage."""
        if self.frames is None:
            return []
        data = os.read(self.frames.fileno(), CHUNK)
        if not data:
            self.close()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LINE_LIMIT:
            raise ValueError("a frame without end")
        frames = [decode_frame(line) for line in lines]
        if frames:
            self.is_heard, self.since = True, now
            os.ftruncate(self._words, 0)  # what a library says again and again
        return frames

    def last_words(self) -> str:
        """Return what it said since its last frame, as one line."""
        size = os.fstat(self._words).st_size
        said = os.pread(self._words, WORDS, max(0, size - WORDS)).decode("utf-8", "replace")
        return one_line(" ".join(said.strip("\0").split()))

    def kill(self, now: float) -> None:
        """Send SIGKILL, and listen no more; a driver that hangs may keep it from dying."""
        self.killed = now
        try:
            os.kill(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.close()

    def close(self) -> None:
        """Listen no more."""
        if self.frames is not None:
            self.frames.close()
        self.frames = None

    def crash(self) -> int:
        """Return the signal by which a library ended it, 0 where none did."""
        code = self.process.poll()
        return -code if code is not None and -code in CRASHES else 0
