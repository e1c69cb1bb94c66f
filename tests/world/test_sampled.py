# SPDX-License-Identifier: Apache-2.0
"""Schedules of whole casts: at random, by priorities, and with something at each call.

A failure prints the shortest schedule that fails as well. `make world SEED=n SCHEDULES=1` plays the
seed of a random one again; of another `explorer.check(Planned(plan), "")` plays its plan.
What must hold is in `Site.begin`, `Site.check` (after each change of locks and
records), `Site.restored` and `Site.finish`. `casts.py` has
what a cast, a pair and a point are. Of LOST, locks, records or folders are removed meanwhile.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from tests.world.actors import Cast
from tests.world.budget import ALL, AT_CALLS, PREEMPTED, SEED, seeds, shuffled, some
from tests.world.casts import CASTS, LOST, LOST_POINTS, PAIRS, POINTS
from tests.world.choosers import Planned
from tests.world.explore import Explorer
from tests.world.health import HEALTH_CASTS, HEALTH_POINTS, HealthSite
from tests.world.kinds import KIND_CASTS, KIND_POINTS, KindSite
from tests.world.site import Site


class World(NamedTuple):
    """Casts on a site, and the calls at which something is to happen, each with its part."""

    site: type[Site]
    casts: dict[str, Cast]
    points: tuple[tuple[str, str, str], ...]
    part: float  # of all schedules, for each cast
    point_part: float


WORLDS = {
    "all": World(Site, CASTS, POINTS, 1 / len(CASTS), 1 / len(POINTS)),
    "lost": World(Site, LOST, LOST_POINTS, 1 / len(CASTS), 1 / len(POINTS)),
    "kinds": World(
        KindSite, KIND_CASTS, KIND_POINTS, 0.15 / len(KIND_CASTS), 0.15 / len(KIND_POINTS)
    ),
    "health": World(
        HealthSite, HEALTH_CASTS, HEALTH_POINTS, 0.15 / len(HEALTH_CASTS), 0.15 / len(HEALTH_POINTS)
    ),
}
SAMPLED = [
    pytest.param(one.site, cast, one.part, id=f"{world}-{name}")
    for world, one in WORLDS.items()
    for name, cast in one.casts.items()
]
AT_A_CALL = [
    pytest.param(one.site, one.casts[name], who, what, one.point_part, id=f"{world}-{name}-{at}")
    for world, one in WORLDS.items()
    for at, (name, who, what) in enumerate(one.points)
]


@pytest.mark.parametrize(("site", "cast", "part"), SAMPLED, indirect=["site"])
def test_random_schedules_keep_every_promise(site: Site, cast: Cast, part: float) -> None:
    explorer = Explorer(site, cast)
    for seed in seeds(part):
        explorer.sample(seed)


@pytest.mark.parametrize(("site", "cast", "actor", "what", "part"), AT_A_CALL, indirect=["site"])
def test_an_accident_at_any_call_breaks_no_promise(
    site: Site, cast: Cast, actor: str, what: str, part: float
) -> None:
    explorer = Explorer(site, cast)
    named = f"at a call {what}" if what[0] == "(" else "accident"
    plans = explorer.each_call(actor, what)
    assert plans, f"{actor} has no call at which {what} can be"
    for plan in some(shuffled(plans), AT_CALLS * part):
        explorer.check(Planned(plan), named)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("begins", ["one", "two"])
def test_two_preemptions_of_a_pair_break_no_promise(site: Site, name: str, begins: str) -> None:
    explorer = Explorer(site, PAIRS[name])
    other = "two" if begins == "one" else "one"
    plans = explorer.preempted(begins, other, None if ALL else random.Random(SEED))
    for plan in some(plans, PREEMPTED / len(PAIRS) / 2):
        explorer.check(Planned(plan), "two preemptions")
