# SPDX-License-Identifier: Apache-2.0
"""Which card a worker is at and which call it makes, in memory that it shares with its supervisor.

Nobody can ask a worker that hangs in the driver. So it names each call before it makes it: half a
microsecond, and no system call. The supervisor reads the page when a frame is late, and learns
which card the other cards wait for.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line

PAGE = struct.Struct("=dii32s128s")  # since, card, cards, bus id, call; padded with zeros
NO_CARD = -1


class DriverCall(NamedTuple):
    """A call that is not over: since when (CLOCK_BOOTTIME seconds), of which of `cards` cards.

    `card` is NVML's index, NO_CARD for a call of none; `bus` is empty where it is not known yet.
    """

    since: float
    card: int
    cards: int
    bus: str
    name: str


class CallNote:
    """The page of one worker; file descriptor -1 is a page that nobody else reads."""

    def __init__(self, fd: int = -1) -> None:
        self.cards = 0
        self._page = mmap.mmap(fd, PAGE.size)
        self._card = (NO_CARD, b"")

    def enter_card(self, index: int, bus: str) -> None:
        """Say that the calls from now on are of this card."""
        self._card = (index, bus.encode())

    def leave_card(self) -> None:
        """Say that the calls from now on are of no card, and that none is made now."""
        self._card = (NO_CARD, b"")
        PAGE.pack_into(self._page, 0, 0.0, NO_CARD, 0, b"", b"")

    def name_call(self, name: str) -> None:
        """Name a call before it is made."""
        index, bus = self._card
        PAGE.pack_into(self._page, 0, clock_boottime(), index, self.cards, bus, name.encode())


def read_driver_call(page: bytes) -> DriverCall | None:
    """Return the call that was named last and has not come back, as far as a page tells."""
    if len(page) < PAGE.size:
        return None
    since, card, cards, bus, name = PAGE.unpack_from(page)
    if not since:
        return None
    return DriverCall(since, card, cards, plain_page_text(bus), plain_page_text(name))


def plain_page_text(raw: bytes) -> str:
    """Return a text of the page: a worker may write anything."""
    return one_line(raw.rstrip(b"\0").decode("ascii", "replace"))


class CardFilter(NamedTuple):
    """Which cards a worker asks: all but some, or `only` one.

    NVML's indexes are those of a node with so many `cards`. With another number they stand for
    other cards: then none is left out, and the only one is not there.
    """

    cards: int = 0
    without: frozenset[int] = frozenset()
    only: int | None = None

    def admits(self, index: int, cards: int) -> bool:
        """Return whether the card of an index is asked."""
        if self.only is not None:
            return (index, cards) == (self.only, self.cards)
        return cards != self.cards or index not in self.without

    def words(self) -> list[str]:
        """Return it as words of a command line: `without=1,3/8`, `only=3/8`; none for all."""
        if self.only is not None:
            return [f"only={self.only}/{self.cards}"]
        if not self.without:
            return []
        return [f"without={','.join(map(str, sorted(self.without)))}/{self.cards}"]


def parse_card_filter(words: dict[str, str]) -> CardFilter:
    """Return the filter in a worker's options by name; raise ValueError."""
    for name in ("only", "without"):
        if name in words:
            indexes, _, cards = words[name].partition("/")
            found = frozenset(int(one) for one in indexes.split(","))
            if name == "only":
                return CardFilter(int(cards), only=min(found))
            return CardFilter(int(cards), found)
    return CardFilter()
