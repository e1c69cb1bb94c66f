# SPDX-License-Identifier: Apache-2.0
"""How long a device was busy, and for how long that was seen, from the driver's buffer of samples.

A sample says how busy the device was since the sample before it. The buffer holds about 100 of
them, six a second. Its time stamps are microseconds of a clock that no document names (the epoch
on some drivers, the boot on others), so only their differences are used, and no more of them than
time has passed here. What was not seen is not observed, which is not idle.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import pynvml

from gpulock_exporter.nvml.answers import NARROW, WORDS, call_nvml

Sample = tuple[int, float]  # time stamp in microseconds, percent

LONGEST_SAMPLE = 1.5  # seconds that one sample may stand for: nvml.h says 1/6 to 1 second
KEPT = 16.0  # seconds that the buffer holds, and that one answer for now stands for at most
WHOLE = 100  # percent
ROOM = 1024  # entries that there is room for: drivers keep 100 to 120
MOST_SAMPLES = 100  # entries of the buffer: a longer list is garbage (Syllo/nvtop issue 110)
SLACK = 1.0  # seconds by which samples may come late
DRY = 2.0  # seconds without a new sample: a card that is idle may not write any
HEAL = 10.0  # seconds after which a time stamp that nothing follows is not believed any more
SAMPLES = tuple(struct.Struct(f"@Q{word}") for word in WORDS)  # nvmlSample_t, by type of value


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
        if seconds <= LONGEST_SAMPLE and 0 <= percent <= WHOLE:
            observed += seconds
            busy += seconds * (percent / WHOLE)  # by rounding no more than them
    return (NOTHING if len(samples) > MOST_SAMPLES else BusyTime(busy, observed)), youngest


class UtilizationSamples:
    """The samples of one device over its looks; times are CLOCK_BOOTTIME seconds.

    Each look asks the driver for what is younger than `since` says, and hands it to `add`. That no
    more is observed than time has passed, the exporter sees to. `sound` is whether what the driver
    said last can be.
    """

    def __init__(self, now: float) -> None:
        self._seen = 0  # time stamp of the youngest sample that is believed, 0: none yet
        self._moved = now  # when it last changed
        self._asked = now  # when the whole buffer was last asked for
        self._whole = True
        self.sound = True  # what the driver said last
        self._last = now
        self._elapsed = 0.0  # seconds between the last two looks

    def since(self, now: float) -> int:
        """Return the time stamp after which to ask: 0 for the whole buffer."""
        stuck = self._moved < self._last and now - max(self._moved, self._asked) > HEAL
        self._whole = stuck or not self._seen
        if self._whole:
            self._asked = now
        return 0 if self._whole else self._seen

    def add(self, samples: Sequence[Sample], now: float) -> BusyTime:
        """Take what the driver answered; return what it says of the time since the last look."""
        self._pass(now)
        if samples:
            sound = all(0 <= percent <= WHOLE for _, percent in samples)
            self.sound = sound and len(samples) <= MOST_SAMPLES
        if self._whole:  # where the buffer stands now; what is in it was before our time
            youngest = max((moment for moment, _ in samples), default=self._seen)
            busy = NOTHING
        else:
            allowed = now - self._moved + SLACK
            busy, youngest = integrate_samples(samples, self._seen, allowed)
        if youngest != self._seen:
            self._seen, self._moved = youngest, now
        return busy

    def snapshot(self, percent: float, now: float) -> BusyTime:
        """Take the driver's answer for now where its buffer has run dry, or there is none.

        It stands for the time since the last look, of which it is a sample.
        """
        self._pass(now)
        if now - self._moved <= DRY or not self.sound or not 0 <= percent <= WHOLE:
            return NOTHING
        seconds = min(self._elapsed, KEPT)
        return BusyTime(seconds * (percent / WHOLE), seconds)

    def _pass(self, now: float) -> None:
        """Let time go by; both ways to observe are asked at one moment, and it counts once."""
        if now > self._last:
            self._elapsed = now - self._last
        self._last = now


class SampleList:
    """Room for the driver's buffer of samples of one device."""

    def __init__(self) -> None:
        self._raw = bytearray(ROOM * SAMPLES[NARROW].size)
        self._buffer = (ctypes.c_char * len(self._raw)).from_buffer(self._raw)

    def read(self, handle: pynvml.c_nvmlDevice_t, kind: int, since: int) -> list[Sample]:
        """Return what is younger than `since`, 0 for all: time stamp, value; raise NVMLError."""
        count, value_type = ctypes.c_uint(ROOM), ctypes.c_uint(0)
        where = (ctypes.byref(value_type), ctypes.byref(count), self._buffer)
        wanted = (ctypes.c_uint(kind), ctypes.c_ulonglong(since))
        call_nvml("nvmlDeviceGetSamples", handle, *wanted, *where)
        number = value_type.value if value_type.value < len(SAMPLES) else NARROW
        layout = SAMPLES[number]
        size = layout.size * min(count.value, ROOM)
        return list(layout.iter_unpack(memoryview(self._raw)[:size]))
