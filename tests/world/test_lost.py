# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR, locks, records or their folder are removed while jobs run and claims are at work."""

from __future__ import annotations

import pytest

from tests.world.casts import CASTS, LOST, LOST_POINTS, POINTS
from tests.world.play import check_each_call, sample_schedules
from tests.world.site import Site


@pytest.mark.parametrize("name", LOST)
def test_locks_that_are_lost_at_random_are_put_back(site: Site, name: str) -> None:
    sample_schedules(site, LOST[name], 1 / len(CASTS))


@pytest.mark.parametrize(("name", "actor", "what"), LOST_POINTS)
def test_locks_that_are_lost_at_any_call_are_put_back(
    site: Site, name: str, actor: str, what: str
) -> None:
    check_each_call(site, LOST[name], actor, what, 1 / len(POINTS))
