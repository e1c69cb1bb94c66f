# SPDX-License-Identifier: Apache-2.0
"""The folder of an exporter: one writes it at a time.

The lock is a file that its user alone may open: a reader's flock would keep the exporter from
starting (facts/locking.md). The kernel lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import errno

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, LockTimeout, Refusal
from gpulock.store.gate import Gate
from gpulock_exporter.files.publish import make_exporter_folders

LOCK = "lock"


class FolderHold:
    """A folder that this exporter alone writes, for as long as it is held. Its files stay."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._gate: Gate | None = None

    def take(self) -> None:
        """Hold the folder, also where it was removed meanwhile: then it is made again.

        Raises Refusal where another exporter writes it, or OSError.
        """
        if self._gate is not None and not self._gate.is_named():
            self.release()
        if self._gate is None:
            make_exporter_folders(self._folder)
            gate = Gate(self._folder, Deadline(0.0), name=LOCK)
            try:
                gate.__enter__()
            except LockTimeout:
                raise Refusal(
                    BROKEN,
                    f"another gpulock-exporter writes {self._folder}",
                    "give this one a folder of its own (--folder)",
                ) from None
            self._gate = gate

    def release(self) -> None:
        """Let another exporter write the folder."""
        if self._gate is not None:
            self._gate.__exit__()
        self._gate = None


def is_disk_full(fault: BaseException) -> bool:
    """Return whether an error, or its cause, is that a file system has no room left."""
    number = getattr(fault, "errno", None) or getattr(fault.__cause__, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT)
