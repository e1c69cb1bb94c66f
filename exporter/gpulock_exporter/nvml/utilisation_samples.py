# SPDX-License-Identifier: Apache-2.0
"""How long a device was busy, and for how long that was seen, from the driver's buffer of samples.

A sample says how busy the device was since the sample before it. The buffer holds about 100 of
them, six a second. Its time stamps are microseconds of a clock that no document names (the epoch
on some drivers, the boot on others), so only their differences are used, and no more of them than
time has passed here. What was not seen is not observed, which is not idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Sample = tuple[int, float]  # time stamp in microseconds, percent

LONGEST = 1.5  # seconds that one sample may stand for: nvml.h says 1/6 to 1 second
SHORTEST = 1 / 6  # seconds that the driver's answer for now stands for at least
WHOLE = 100  # percent
MOST = 100  # entries of the buffer: a longer list is garbage (Syllo/nvtop issue 110)
SLACK = 1.0  # seconds by which samples may come late
DRY = 2.0  # seconds without a new sample: a card that is idle may not write any
HEAL = 10.0  # seconds after which a time stamp that nothing follows is not believed any more


class BusyTime(NamedTuple):
    """Seconds of work, and seconds that were seen."""

    busy: float
    observed: float


NOTHING = BusyTime(0.0, 0.0)


def integrate_samples(samples: Sequence[Sample], seen: int, allowed: float) -> tuple[BusyTime, int]:
    """Return what `samples` say of the time after `seen`, and the time stamp of the youngest.

    `allowed` is how many seconds can have passed since then. An entry that is older than the one
    before it or comes from the future is left out; one after a gap or above 100 % says nothing of
    its time. A list that is too long says nothing at all.
    """
    busy = observed = 0.0
    youngest = seen
    for moment, percent in samples:
        if not youngest < moment <= seen + allowed * 1e6:
            continue
        seconds = (moment - youngest) / 1e6
        youngest = moment
        if seconds <= LONGEST and 0 <= percent <= WHOLE:
            observed += seconds
            busy += seconds * percent / WHOLE
    return (NOTHING if len(samples) > MOST else BusyTime(busy, observed)), youngest


def are_samples_sound(samples: Sequence[Sample]) -> bool:
    """Return whether this can be what a driver has measured."""
    return len(samples) <= MOST and all(0 <= percent <= WHOLE for _, percent in samples)


class UtilizationSamples:
    """The samples of one device over its looks; times are CLOCK_BOOTTIME seconds.

    Each look asks the driver for what is younger than `since` says, and hands it to `add`. All
    that is ever observed is at most the time that passed, whatever the driver says. `sound` is
    whether what it said last can be.
    """

    def __init__(self, now: float) -> None:
        self._seen = 0  # time stamp of the youngest sample that is believed, 0: none yet
        self._moved = now  # when it last changed
        self._asked = now  # when the whole buffer was last asked for
        self._whole = True
        self.sound = True  # what the driver said last
        self._last = now
        self._credit = SLACK  # seconds that may still be observed

    def since(self, now: float) -> int:
        """Return the time stamp after which to ask: 0 for the whole buffer."""
        self._whole = not self._seen or now - max(self._moved, self._asked) > HEAL
        if self._whole:
            self._asked = now
        return 0 if self._whole else self._seen

    def add(self, samples: Sequence[Sample], now: float) -> BusyTime:
        """Take what the driver answered; return what it says of the time since the last look."""
        self._pass(now)
        if samples:
            self.sound = are_samples_sound(samples)
        if self._whole:  # where the buffer stands now; what is in it was before our time
            youngest = max((moment for moment, _ in samples), default=self._seen)
            found = NOTHING
        else:
            allowed = now - self._moved + SLACK
            found, youngest = integrate_samples(samples, self._seen, allowed)
        if youngest != self._seen:
            self._seen, self._moved = youngest, now
        return self._spend(found)

    def snapshot(self, percent: float, now: float) -> BusyTime:
        """Take the driver's answer for now where its buffer has run dry, or there is none."""
        self._pass(now)
        if now - self._moved <= DRY or not self.sound or not 0 <= percent <= WHOLE:
            return NOTHING
        seconds = min(SHORTEST, self._credit)
        return self._spend(BusyTime(seconds * percent / WHOLE, seconds))

    def _pass(self, now: float) -> None:
        self._credit = min(self._credit, SLACK) + max(0.0, now - self._last)
        self._last = now

    def _spend(self, found: BusyTime) -> BusyTime:
        """Return what was found unless it is more than can have been seen."""
        if found.observed > self._credit:
            return NOTHING
        self._credit -= found.observed
        return found
