# SPDX-License-Identifier: Apache-2.0
"""A counter of the driver made monotonic: it wraps, restarts with the driver, or is garbage.

A step is believed where the hardware could have done it in the time. Where a reading fits to
nothing it waits until the counter has moved on from there: garbage does not. Of two ways to
explain a reading the smaller step is taken, so that an error never adds what was not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 1.0  # seconds: a look takes a while, and its counters are not read at one moment
REPEATED = 10.0  # seconds for which a worker may hand on a counter that it reads seldom
WORD = 1 << 32
KIB_WORD = WORD << 10  # 32 bits that count KiB, handed on as bytes


@dataclass(frozen=True)
class CounterKind:
    """How fast a counter can run, in units a second, and the widths at which it may wrap.

    `whole`: it tells of this boot, so that its first reading counts. One that wraps does not.
    """

    fastest: float
    widths: tuple[int, ...] = ()
    whole: bool = True


# of a device's fields. Faster than anything that is sold: 1.4 kW boards, PCIe 6.0 x16 at 128 GB/s,
# NVLink 6 at 1.8 TB/s
KINDS: dict[str, CounterKind] = {
    "energy": CounterKind(5e3),
    "pcie_replays": CounterKind(1e7),
    "pcie_transmit": CounterKind(2.6e11, whole=False),
    "pcie_receive": CounterKind(2.6e11, whole=False),
    "nvlink_transmit": CounterKind(2e12, (WORD, KIB_WORD), whole=False),
    "nvlink_receive": CounterKind(2e12, (WORD, KIB_WORD), whole=False),
    "clock_reason_seconds": CounterKind(1.1),
    "ecc": CounterKind(1e7),
    "nvlink_errors": CounterKind(1e9),
}
SUMMED = CounterKind(2e12, whole=False)  # bytes that the worker adds up: from 0 with it


class CounterReading(NamedTuple):
    """What a counter showed, when it did so last, and since when (CLOCK_BOOTTIME seconds)."""

    value: float
    at: float
    since: float


@dataclass
class MonotonicCounter:
    """The total, and the last reading that was believed.

    `former` is the reading before a fall, kept for one more: the fall may have been the garbage.
    `doubt` is a reading that fits to nothing yet.
    """

    total: float = 0
    last: CounterReading | None = None
    former: CounterReading | None = None
    doubt: CounterReading | None = None

    def advance(self, value: float, at: float, kind: CounterKind, restarted: bool = False) -> float:
        """Take a reading; return by how much the total grew. `restarted`: the driver began anew."""
        if self.last is not None and value == self.last.value:  # no step is smaller than none
            if at - self.last.since > REPEATED:  # until then it may be one reading, told again
                self.former = None
            self.doubt = None
            self.last = CounterReading(value, at, self.last.since)
            return 0
        if not (value >= 0 and math.isfinite(value)):
            return 0
        if self.last is None and value <= kind.fastest * (at + SLACK):  # it can be of this boot
            self.last = CounterReading(value, at, at)
            self.total += value if kind.whole else 0
            return 0
        widths = () if restarted else kind.widths
        steps = [
            (grown, before)
            for before in (self.last, self.former, self.doubt)
            if before is not None
            and (before is not self.doubt or value != before.value)
            and (grown := counter_growth(before, value, at, kind.fastest, widths)) is not None
        ]
        if not steps:
            self.doubt = CounterReading(value, at, at)
            return 0
        grown, before = min(steps, key=lambda pair: pair[0])
        self.former = self.last if before is self.last and value < before.value else None
        self.doubt = None
        if value == before.value:
            self.last = CounterReading(value, at, before.since)
            return 0
        self.last = CounterReading(value, at, at)
        self.total += grown
        return grown


def counter_growth(
    before: CounterReading, value: float, at: float, fastest: float, widths: Sequence[int]
) -> float | None:
    """Return by how much a counter ran since a reading, None where it cannot have.

    A fall is a wrap where the step through the end is less than half of a width; any other fall is
    a restart.
    """
    passed = max(0.0, min(at - before.since, at - before.at + REPEATED))
    most = fastest * (passed + SLACK)
    grown = value - before.value
    if grown >= 0:
        return grown if grown <= most else None
    for width in widths:
        if before.value < width and 0 <= grown + width <= min(most, width / 2):
            return grown + width
    return value if value <= most else None
