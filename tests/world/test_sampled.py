# SPDX-License-Identifier: Apache-2.0
"""Schedules of whole casts: at random, by priorities, and with something at each call.

A failure prints the shortest schedule that fails as well. `make world SEED=n SCHEDULES=1` plays the
seed of a random one again; of another `explorer.check(Planned(plan), "")` plays its plan.
What must hold is in `Site.begin`, `Site.check` (after each step) and `Site.finish`. `casts.py` has
what a cast, a pair and a point are.
"""

from __future__ import annotations

import random

import pytest

from tests.world.budget import ALL, PREEMPTED, SEED, some
from tests.world.casts import CASTS, PAIRS, POINTS
from tests.world.choosers import Planned
from tests.world.explore import Explorer
from tests.world.play import check_each_call, sample_schedules
from tests.world.site import Site


@pytest.mark.parametrize("name", CASTS)
def test_random_schedules_keep_every_promise(site: Site, name: str) -> None:
    sample_schedules(site, CASTS[name], 1 / len(CASTS))


@pytest.mark.parametrize(("name", "actor", "what"), POINTS)
def test_an_accident_at_any_call_breaks_no_promise(
    site: Site, name: str, actor: str, what: str
) -> None:
    check_each_call(site, CASTS[name], actor, what, 1 / len(POINTS))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("begins", ["one", "two"])
def test_two_preemptions_of_a_pair_break_no_promise(site: Site, name: str, begins: str) -> None:
    explorer = Explorer(site, PAIRS[name])
    other = "two" if begins == "one" else "one"
    plans = explorer.preempted(begins, other, None if ALL else random.Random(SEED))
    for plan in some(plans, PREEMPTED / len(PAIRS) / 2):
        explorer.check(Planned(plan), "two preemptions")
