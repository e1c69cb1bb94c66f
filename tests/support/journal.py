# SPDX-License-Identifier: Apache-2.0
"""gpulockd's journal, of which a test hears each line."""

from __future__ import annotations

import os

from gpulock.daemon.core.journal import DaemonJournal


class HeardJournal(DaemonJournal):
    """A journal with levels, and `said`."""

    def __init__(self) -> None:
        self._heard = os.memfd_create("journal")
        self._read = 0
        super().__init__(self._heard, levels=True)

    def __del__(self) -> None:
        os.close(self._heard)

    def said(self) -> list[str]:
        """Return what was said since the last time."""
        text = os.pread(self._heard, 1 << 20, self._read)
        self._read += len(text)
        return text.decode().splitlines()
