# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR, its `locks` or one lock are removed while jobs run, and while a claim is at work."""

from __future__ import annotations

import pytest

from tests.world.budget import AT_CALLS, shuffled, some
from tests.world.casts import CASTS, LOST, LOST_POINTS, POINTS
from tests.world.choosers import Planned
from tests.world.explore import Explorer
from tests.world.play import sample_schedules
from tests.world.site import Site


@pytest.mark.parametrize("name", LOST)
def test_locks_that_are_lost_at_random_are_put_back(site: Site, name: str) -> None:
    sample_schedules(site, LOST[name], 1 / len(CASTS))


@pytest.mark.parametrize(("name", "actor", "what"), LOST_POINTS)
def test_locks_that_are_lost_at_any_call_are_put_back(
    site: Site, name: str, actor: str, what: str
) -> None:
    explorer = Explorer(site, LOST[name])
    for plan in some(shuffled(explorer.each_call(actor, what)), AT_CALLS / len(POINTS)):
        explorer.check(Planned(plan), "locks are lost")
