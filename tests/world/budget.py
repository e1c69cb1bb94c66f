# SPDX-License-Identifier: Apache-2.0
"""How many schedules are played, and from which seed on: the same ones however fast it goes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from itertools import islice

from tests.support.seeds import chosen_seed
from tests.world.kernel import Plan

COUNT = int(os.environ.get("GPULOCK_WORLD_SCHEDULES") or "200")  # at random, of all casts
SEED = chosen_seed("GPULOCK_WORLD_SEED")
# for each schedule at random, of CASTS and PAIRS: lost locks, kinds and health come on top
AT_CALLS, PREEMPTED = 0.6, 0.4
ALL = os.environ.get("GPULOCK_WORLD_ALL") == "1"  # every point, however long that takes


def count_of(part: float) -> int:
    """Return how many schedules this part of them is, one at least."""
    return max(1, round(COUNT * part))


def seeds(part: float) -> range:
    """Return the seeds of a test that is this part of all that are sampled."""
    return range(SEED, SEED + count_of(part))


def some(plans: Iterable[Plan], part: float) -> Iterator[Plan]:
    """Return as many of these plans as this part is, all of them with ALL."""
    return iter(plans) if ALL else islice(plans, count_of(part))


def shuffled(plans: list[Plan]) -> list[Plan]:
    """Return these plans in an order of this run's own."""
    random.Random(SEED).shuffle(plans)
    return plans
