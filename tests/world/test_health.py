# SPDX-License-Identifier: Apache-2.0
"""Cards that sicken, recover and are tested: schedules, and planted faults that they find."""

from __future__ import annotations

import pytest

from gpulock.daemon.health import policy
from tests.support.faults import returning
from tests.world.health import HEALTH_CASTS, HEALTH_POINTS
from tests.world.play import check_each_call, find_planted_fault, sample_schedules
from tests.world.site import Site

PART = 0.15  # of as many as the other schedules, beside them


@pytest.mark.parametrize("name", HEALTH_CASTS)
def test_random_schedules_of_health_keep_every_promise(health_site: Site, name: str) -> None:
    sample_schedules(health_site, HEALTH_CASTS[name], PART / len(HEALTH_CASTS))


@pytest.mark.parametrize(("name", "actor", "what"), HEALTH_POINTS)
def test_an_accident_at_any_call_of_health_breaks_no_promise(
    health_site: Site, name: str, actor: str, what: str
) -> None:
    check_each_call(health_site, HEALTH_CASTS[name], actor, what, PART / len(HEALTH_POINTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "result"),
    [
        (policy.HealthPolicy, "_quarantine_news", {}),  # what is found stays in service
        (policy.HealthPolicy, "_restore_recovered", {}),  # what was put out stays out
    ],
)
def test_a_planted_fault_of_health_is_found(
    health_site: Site, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, result: object
) -> None:
    monkeypatch.setattr(owner, name, returning(result))
    find_planted_fault(health_site, HEALTH_CASTS["link"])
