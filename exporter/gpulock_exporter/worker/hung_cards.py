# SPDX-License-Identifier: Apache-2.0
"""Cards whose calls hang in the driver or crash: left out of the worker, tried apart, let in again.

A worker that looks at all cards is as slow as the slowest. The one that is started after a hang or
a crash leaves out the card in whose call the last one was. That card is tried by a process of its
own, which disturbs nobody, less and less often. Where it answers, the next worker asks it again.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import NamedTuple

from gpulock_exporter.driver_calls import DriverCall

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 640.0  # seconds until a card is tried again
FORGOTTEN = 3600.0  # seconds without a hang, after which the pauses start over


class HungCard(NamedTuple):
    """A card with a call that hung or crashed: which, when, how often, when it is tried again.

    `crash` is the signal by which that call ended its process, 0 where it hung.
    """

    call: DriverCall
    at: float
    times: int
    due: float
    out: bool = True
    crash: int = 0

    def words(self) -> str:
        """Return it as a clause."""
        often = f", {self.times} times by now" if self.times > 1 else ""
        how = "hangs in the driver"
        if self.crash:
            how = f"ends its process by {signal.Signals(self.crash).name}"
        return f"{self.call.name or 'a call'} {how}{often}"


class HungCards:
    """Those of one node, by NVML's index. Times are CLOCK_BOOTTIME seconds."""

    def __init__(self) -> None:
        self.cards: dict[int, HungCard] = {}

    def out(self) -> dict[int, HungCard]:
        """Return the cards that are left out."""
        return {index: card for index, card in self.cards.items() if card.out}

    def leave_out(self, index: int, call: DriverCall | None, now: float, crash: int = 0) -> None:
        """Leave out a card whose call hangs, or crashed by a signal; None: the call of before."""
        before = self.cards.get(index)
        known = call or (before.call if before else DriverCall(now, index, "", ""))
        again = before is not None and now - before.at < FORGOTTEN
        times = before.times + 1 if before is not None and again else 1
        pause = min(FIRST_PAUSE * 2 ** min(times - 1, 16), LONGEST_PAUSE)
        self.cards[index] = HungCard(known, now, times, now + pause, crash=crash)

    def let_in(self, index: int) -> None:
        """Ask a card again that answers."""
        self.cards[index] = self.cards[index]._replace(out=False)

    def retry_now(self, indexes: Collection[int], now: float) -> None:
        """Try these cards as soon as can be."""
        for index in indexes:
            self.cards[index] = self.cards[index]._replace(due=now)

    def due(self, now: float, stuck: Collection[int]) -> int | None:
        """Return the card that is to be tried; none of those in which a process is stuck."""
        due = [n for n, card in self.out().items() if card.due <= now and n not in stuck]
        return min(due, default=None)
