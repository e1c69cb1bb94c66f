# SPDX-License-Identifier: Apache-2.0
"""How much is played: seconds or schedules, all in all, and from which seed on."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator

from tests.world.kernel import Plan

SECONDS = float(os.environ.get("GPULOCK_WORLD_SECONDS", "10"))
COUNT = int(os.environ.get("GPULOCK_WORLD_SCHEDULES", "0"))  # 0: as many as there is time for
SEED = int(os.environ.get("GPULOCK_WORLD_SEED") or "0") or random.randrange(1, 10**9)


SAMPLED, AT_CALLS, PREEMPTED = 0.5, 0.3, 0.2  # of the time
ALL = os.environ.get("GPULOCK_WORLD_ALL") == "1"  # every point, however long that takes


def seeds(part: float) -> Iterator[int]:
    """Yield the seeds of a test that is this part of all that are sampled."""
    late = time.monotonic() + SECONDS * SAMPLED * part
    most = max(1, round(COUNT * part))
    for number in itertools.count():
        if number >= most if COUNT else number and time.monotonic() > late:
            return
        yield SEED + number


def some(plans: Iterable[Plan], share: float) -> Iterator[Plan]:
    """Yield as many of these plans as there is time for, all of them with ALL."""
    late = time.monotonic() + SECONDS * share
    for number, plan in enumerate(plans):
        if number and not ALL and time.monotonic() > late:
            return
        yield plan


def shuffled(plans: list[Plan]) -> list[Plan]:
    """Return these plans in an order of this run's own."""
    random.Random(SEED).shuffle(plans)
    return plans
