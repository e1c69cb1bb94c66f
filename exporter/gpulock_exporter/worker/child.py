# SPDX-License-Identifier: Apache-2.0
"""One worker process, with the page in which it names its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence

from gpulock_exporter.driver_calls import NO_CARD, PAGE, DriverCall, read_driver_call


class WorkerChild:
    """A worker that was started; raise OSError where none can be. `listened`: by pipes."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None, listened: bool = True
    ) -> None:
        self._shared = frozenset[str]()
        end = subprocess.PIPE if listened else subprocess.DEVNULL
        # read, not mapped: what a worker makes shorter would end who has it mapped (mmap(2))
        self._page = page = os.memfd_create("gpulock-call")
        weakref.finalize(self, os.close, page)
        os.ftruncate(page, PAGE.size)
        self.process = subprocess.Popen(
            [*argv, f"note={page}"],
            stdin=end,
            stdout=end,
            stderr=end,
            env=env,
            start_new_session=True,  # a terminal's ^C is for the parent
            pass_fds=(page,),
        )

    def call(self) -> DriverCall | None:
        """Return the call of one card that it makes now, as far as it names one."""
        call = read_driver_call(os.pread(self._page, PAGE.size, 0))
        return call if call is not None and call.card > NO_CARD else None

    def calling_since(self) -> float:
        """Return since when it makes that call, 0 where it makes none."""
        call = self.call()
        return call.since if call else 0.0

    def share(self, cards: frozenset[str]) -> None:
        """Say which cards are shared, by bus id, where that has changed.

        One that hangs does not read: it is told as soon as there is room.
        """
        pipe = self.process.stdin
        if pipe is None or pipe.closed or cards == self._shared:
            return
        try:
            os.set_blocking(pipe.fileno(), False)
            os.write(pipe.fileno(), f"{' '.join(sorted(cards))}\n".encode())
        except OSError:
            return
        self._shared = cards

    def kill(self) -> None:
        """Send SIGKILL; a driver that hangs may keep it from dying."""
        try:
            os.kill(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
