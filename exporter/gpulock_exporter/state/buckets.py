# SPDX-License-Identifier: Apache-2.0
"""A claim's use over time, in a fixed number of buckets whose width doubles when they are full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpulock.node.sample import BUCKETS, MILLI

FIRST_WIDTH = 1.0  # seconds
LONGEST = 1e10  # seconds of a claim: beyond, a time is garbage


@dataclass
class Buckets:
    """Seconds at work (`used`) and seconds observed (`covered`) in each bucket from `since` on.

    What is not covered is not known: it is neither work nor idleness.
    """

    since: float
    width: float = FIRST_WIDTH
    used: list[float] = field(default_factory=list[float])
    covered: list[float] = field(default_factory=list[float])

    def add(self, at: float, used: float, covered: float) -> None:
        """Add a look that ended `at` a time, spread over the buckets that it covers.

        What it covers before `since` counts to the first bucket.
        """
        end = min(max(0.0, at - self.since), LONGEST)
        while end > BUCKETS * self.width:
            self.width *= 2
            self.used = sum_neighbour_pairs(self.used)
            self.covered = sum_neighbour_pairs(self.covered)
        begin = max(0.0, end - covered)
        last = max(0, math.ceil(end / self.width) - 1)
        missing = last + 1 - len(self.used)
        if missing > 0:
            self.used += [0.0] * missing
            self.covered += [0.0] * missing
        first = min(last, int(begin / self.width))
        for place in range(first, last + 1):
            share = 1.0
            if first < last:
                left, right = max(begin, place * self.width), min(end, (place + 1) * self.width)
                share = (right - left) / (end - begin)
            self.used[place] += used * share
            self.covered[place] += covered * share

    def texts(self) -> tuple[str, str]:
        """Return `used` and `covered` as a file has them, in milliseconds."""
        used, covered = (
            ",".join([f"{value * MILLI:.0f}" for value in values])
            for values in (self.used, self.covered)
        )
        return used, covered


def sum_neighbour_pairs(values: Sequence[float]) -> list[float]:
    """Return the sum of each two neighbours; the last one may be alone."""
    return [sum(values[place : place + 2]) for place in range(0, len(values), 2)]


def restore_buckets(
    since: float, width: float | None, used: Sequence[int], covered: Sequence[int]
) -> Buckets:
    """Return the buckets of a file; with an invalid width they start empty."""
    if width is None or not FIRST_WIDTH <= width <= LONGEST:
        return Buckets(since)
    both = list(zip(used, covered))[:BUCKETS]
    spans = [of / MILLI for _, of in both]
    works = [min(work / MILLI, span) for (work, _), span in zip(both, spans)]
    return Buckets(since, width, works, spans)
