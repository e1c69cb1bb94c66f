# SPDX-License-Identifier: Apache-2.0
"""The page in which a worker names each call into the driver before it makes it.

Nobody can ask a worker that hangs in the driver. Its supervisor reads the page when a frame is
late, and learns which card the other cards wait for.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line

PAGE = struct.Struct("=di32s128s")  # since, card, bus id, call; padded with zeros
NO_CARD = -1


class DriverCall(NamedTuple):
    """A call that is not over: since when (CLOCK_BOOTTIME seconds), of which card.

    `card` is NVML's index, NO_CARD for a call of none; `bus` is empty where it is not known yet.
    """

    since: float
    card: int
    bus: str
    name: str


class CallNote:
    """The worker's side of its page; file descriptor -1 is one that nobody reads."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        self._card = (NO_CARD, b"")

    def enter_card(self, index: int, bus: str) -> None:
        """Say that the calls from now on are of this card."""
        self._card = (index, bus.encode())

    def leave_card(self) -> None:
        """Say that the calls from now on are of no card, and that none is made now."""
        self._card = (NO_CARD, b"")
        self._write(0.0, b"")

    def name_call(self, name: str) -> None:
        """Name a call before it is made."""
        self._write(clock_boottime(), name.encode())

    def _write(self, since: float, name: bytes) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, PAGE.pack(since, *self._card, name), 0)


def read_driver_call(page: bytes) -> DriverCall | None:
    """Return the call of a card that was named last and has not come back, as a page tells."""
    if len(page) < PAGE.size:
        return None
    since, card, *texts = PAGE.unpack_from(page)
    if not since or card <= NO_CARD:
        return None
    # a worker may write anything
    bus, name = (one_line(raw.rstrip(b"\0").decode("ascii", "replace")) for raw in texts)
    return DriverCall(since, card, bus, name)
