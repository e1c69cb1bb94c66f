# SPDX-License-Identifier: Apache-2.0
"""The page of memory that a worker shares with its supervisor.

Nobody can ask a worker that hangs in the driver. So it names each call in the page before it makes
it: half a microsecond, and no system call. The supervisor reads the page when a frame is late, and
learns which card the other cards wait for.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line

PAGE = struct.Struct("=di32s128s")  # since, card, bus id, call; padded with zeros
SIZE = 4096  # bytes
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
    """The page of one worker; file descriptor -1 is a page that nobody else has."""

    def __init__(self, fd: int = -1) -> None:
        self._page = mmap.mmap(fd, SIZE)
        self._card = (NO_CARD, b"")

    def enter_card(self, index: int, bus: str) -> None:
        """Say that the calls from now on are of this card."""
        self._card = (index, bus.encode())

    def leave_card(self) -> None:
        """Say that the calls from now on are of no card, and that none is made now."""
        self._card = (NO_CARD, b"")
        PAGE.pack_into(self._page, 0, 0.0, NO_CARD, b"", b"")

    def name_call(self, name: str) -> None:
        """Name a call before it is made."""
        PAGE.pack_into(self._page, 0, clock_boottime(), *self._card, name.encode())


def make_page() -> int:
    """Return the descriptor of a page for a worker."""
    page = os.memfd_create("gpulock-call")
    os.ftruncate(page, SIZE)
    return page


def read_driver_call(page: bytes) -> DriverCall | None:
    """Return the call of a card that was named last and has not come back, as a page tells."""
    if len(page) < PAGE.size:
        return None
    since, card, bus, name = PAGE.unpack_from(page)
    if not since or card <= NO_CARD:
        return None
    return DriverCall(since, card, plain_page_text(bus), plain_page_text(name))


def plain_page_text(raw: bytes) -> str:
    """Return a text of the page: a worker may write anything."""
    return one_line(raw.rstrip(b"\0").decode("ascii", "replace"))
