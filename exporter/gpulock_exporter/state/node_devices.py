# SPDX-License-Identifier: Apache-2.0
"""The driver's own list of the devices of the node.

The driver's files in /proc take its locks, so that a driver that hangs hangs every reader. A thread
of its own reads them, and the others take what it read last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gpulock.errors import Refusal
from gpulock.node.devices import Device

PERIOD = 10.0  # seconds between two readings of the driver's list


class DeviceList:
    """What the driver listed last: None as long as it never did; `fault` says why it does not.

    `version` tells whether the list has changed in what does not come from the driver: `glance`
    has it read anew then. It must not block.
    """

    def __init__(
        self,
        read: Callable[[], list[Device]],
        version: Callable[[], object] = lambda: None,
        period: float = PERIOD,
    ) -> None:
        self._read = read
        self._version = version
        self._period = period
        self._known: object = None  # the version that was read last
        self._due = threading.Event()
        self._ended = False
        self._found: tuple[list[Device] | None, str] = (None, "not listed yet")

    @property
    def devices(self) -> list[Device] | None:
        """Return the list; it is replaced, never changed."""
        return self._found[0]

    @property
    def fault(self) -> str:
        """Return why the last reading failed, empty where it did not."""
        return self._found[1]

    def read(self) -> None:
        """Read the list now; may hang with the driver. A driver that is gone lists nothing."""
        try:
            self._found = (self._read(), "")
        except Refusal as fault:
            self._found = ([], fault.why)
        except OSError as fault:
            self._found = (None, str(fault))

    def refresh_if_changed(self) -> None:
        """Have the list read before its time where root has published another inventory."""
        if self._version() != self._known:
            self._due.set()

    def start(self) -> None:
        """Read again and again, in a thread that nobody waits for."""
        threading.Thread(target=self._run, name="devices", daemon=True).start()

    def stop(self) -> None:
        """End the thread, once it does not hang."""
        self._ended = True
        self._due.set()

    def _run(self) -> None:
        while not self._ended:
            self._due.clear()
            self._known = self._version()
            self.read()
            if not self._ended:
                self._due.wait(self._period)


def inventory_version(lock_dir: str) -> tuple[int, int, int]:
    """Return what tells one published inventory from another, zeros for none."""
    try:
        info = os.stat(f"{lock_dir}/inventory")
    except OSError:
        return (0, 0, 0)
    return (info.st_ino, info.st_mtime_ns, info.st_size)
