# SPDX-License-Identifier: Apache-2.0
"""However a job or its supervisors end, without gpulockd: no lock leaks, none is freed too soon."""

from __future__ import annotations

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import DAEMONISES, SLEEP, Site
from tests.labs.common.installed import SOAK
from tests.labs.common.processes import end

pytestmark = pytest.mark.lab
NUMBER = 200 if SOAK else 20
STOPS, STAYS = "kill -STOP $$\n", "trap '' TERM\nexec sleep 600\n"


@pytest.mark.short
@EVERY
def test_jobs_that_are_ended_or_fail_give_back_at_once(site: Site) -> None:
    jobs = [site.start(1, script) for script in (SLEEP, STOPS, STAYS)]
    assert sorted(map(len, map(site.held, jobs))) == [1, 1, 1]
    assert len(site.locks()) == 3
    site.end(*jobs)
    assert site.locks() == {}
    site.wait_over(site.submit(2, "exit 7\n"))
    assert site.locks() == {}
    assert site.in_service()


def test_a_job_without_supervisors_keeps_its_locks_as_long_as_anything_of_it_lives(
    site: Site,
) -> None:
    job = site.start(2, DAEMONISES)
    alive = site.sleepers(job, 2)
    site.kill_supervisors(job)
    assert site.reap().acts() == [("held", "alive")] * 2
    free = f"{site.count - 2} of {site.count} free"
    assert free in site.refused(site.count)  # nor does a claim that is short free them
    site.conclude(job)
    end(alive[:1])
    assert site.reap().acts() == [("held", "alive")] * 2
    assert free in site.refused(site.count)
    end(alive[1:])
    assert len(site.held(site.start(site.count, user=site.bob))) == site.count
