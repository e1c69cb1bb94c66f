# SPDX-License-Identifier: Apache-2.0
"""Schedules of whole casts: at random, by priorities, and with something at each call.

A failure prints its seed, and the shortest schedule that fails as well. `make world SEED=n
SCHEDULES=1` plays that seed again.
"""

from __future__ import annotations

import random

import pytest

from tests.world.budget import ALL, AT_CALLS, PREEMPTED, SEED, seeds, shuffled, some
from tests.world.casts import CASTS, PAIRS, POINTS
from tests.world.choosers import Planned
from tests.world.explore import Explorer
from tests.world.site import Site


@pytest.mark.parametrize("name", CASTS)
def test_random_schedules_keep_every_promise(site: Site, name: str) -> None:
    explorer = Explorer(site, CASTS[name])
    for seed in seeds(1 / len(CASTS)):
        explorer.sample(seed)


@pytest.mark.parametrize(("name", "actor", "what"), POINTS)
def test_an_accident_at_any_call_breaks_no_promise(
    site: Site, name: str, actor: str, what: str
) -> None:
    explorer = Explorer(site, CASTS[name])
    for plan in some(shuffled(explorer.each_call(actor, what)), AT_CALLS / len(POINTS)):
        explorer.check(Planned(plan), f"at a call {what}" if what[0] == "(" else "accident")


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("begins", ["one", "two"])
def test_two_preemptions_of_a_pair_break_no_promise(site: Site, name: str, begins: str) -> None:
    explorer = Explorer(site, PAIRS[name])
    other = "two" if begins == "one" else "one"
    plans = explorer.preempted(begins, other, None if ALL else random.Random(SEED))
    for plan in some(plans, PREEMPTED / len(PAIRS) / 2):
        explorer.check(Planned(plan), "two preemptions")
