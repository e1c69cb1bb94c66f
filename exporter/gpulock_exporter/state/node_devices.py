# SPDX-License-Identifier: Apache-2.0
"""The driver's own list of the devices of the node.

The driver's files in /proc take its locks, so that a driver that hangs hangs every reader. A thread
of its own reads them, and the others take what it read last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpulock.errors import Refusal
from gpulock.node.devices import Device

PERIOD = 5.0  # seconds between two readings of the driver's list


class DeviceList:
    """What the driver listed last: None as long as it never did. It is replaced, never changed."""

    def __init__(self, read: Callable[[], list[Device]], period: float = PERIOD) -> None:
        self.devices: list[Device] | None = None
        self._read = read
        self._period = period
        self._ended = threading.Event()

    def read(self) -> None:
        """Read the list now; may hang with the driver. A driver that is gone lists nothing."""
        try:
            self.devices = self._read()
        except Refusal:
            self.devices = []
        except OSError:
            self.devices = None

    def start(self) -> None:
        """Read again and again, in a thread that nobody waits for."""
        threading.Thread(target=self._run, name="devices", daemon=True).start()

    def stop(self) -> None:
        """End the thread, once it does not hang."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.read()
            self._ended.wait(self._period)
