# SPDX-License-Identifier: Apache-2.0
"""A week of requests of 200 users for 8 GPUs: who waits for how long, by three rules.

`python -m tests.bench.queue_week [SEED]`. Strict: nobody goes before the first. Turns: as gpulockd
does it (gpulock.workstation.backfill). Always: whoever has room goes.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

from gpulock.workstation.backfill import keeps_free_devices

GPUS, USERS, WEEK = 8, 200, 7 * 86400.0
SIZES, SHARES = (1, 2, 4, 8), (60, 22, 13, 5)
LOAD = 0.8  # of the GPU time that there is
MEDIAN, SPREAD = 2400.0, 1.2  # seconds, and sigma of the logarithm
LOOK = 30.0  # seconds between two looks at the queue

Rule = Callable[[float], bool]  # whether free GPUs are kept for one who has waited so long
RULES: dict[str, Rule] = {
    "strict": lambda _: True,
    "turns": keeps_free_devices,
    "always": lambda _: False,
}


class Request(NamedTuple):
    """What a user asks for: when, how many GPUs, for how long."""

    at: float
    user: int
    size: int
    seconds: float


def make_week(seed: int) -> list[Request]:
    """Return a week's requests in order."""
    chance = random.Random(seed)
    requests: list[Request] = []
    asked = 0.0
    while asked < LOAD * GPUS * WEEK:
        (size,) = chance.choices(SIZES, SHARES)
        seconds = min(86400.0, MEDIAN * chance.lognormvariate(0.0, SPREAD))
        at, user = chance.uniform(0.0, WEEK), chance.randrange(USERS)
        requests.append(Request(at, user, size, seconds))
        asked += size * seconds
    return sorted(requests)


def simulate_queue(requests: list[Request], keeps: Rule) -> list[tuple[int, float]]:
    """Return size and wait of each request, once all were served."""
    now, free, waits = 0.0, GPUS, list[tuple[int, float]]()
    coming, queue = list(reversed(requests)), list[Request]()
    ends: list[tuple[float, int]] = []
    first, first_since = None, 0.0
    while coming or queue:
        now = now + LOOK if queue else max(now, coming[-1].at)
        while coming and coming[-1].at <= now:
            queue.append(coming.pop())
        while ends and ends[0][0] <= now:
            free += heapq.heappop(ends)[1]
        left: list[Request] = []
        for one in queue:
            if left and (left[0] is first and keeps(now - first_since)):
                left.append(one)
            elif one.size <= free and not (left and keeps(0.0)):
                free -= one.size
                heapq.heappush(ends, (now + one.seconds, one.size))
                waits.append((one.size, now - one.at))
            else:
                left.append(one)
                if len(left) == 1 and one is not first:
                    first, first_since = one, now
        queue = left
    return waits


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(words: list[str]) -> None:
    """Print a table of waits in minutes."""
    requests = make_week(int(words[0]) if words else 1)
    print(f"{len(requests)} requests of {USERS} users for {GPUS} GPUs in a week; waits in minutes")
    print(f"{'rule':8}" + "".join(f"{size:>4} GPU p50   p95   max" for size in SIZES))
    for name, keeps in RULES.items():
        waits = simulate_queue(requests, keeps)
        cells = ""
        for size in SIZES:
            mine = [wait / 60 for of, wait in waits if of == size]
            p50, p95 = percentile(mine, 0.5), percentile(mine, 0.95)
            cells += f"{p50:12.0f}{p95:6.0f}{max(mine):6.0f}"
        print(f"{name:8}{cells}")


if __name__ == "__main__":
    main(sys.argv[1:])
