# SPDX-License-Identifier: Apache-2.0
"""A boot or LOCK_DIR is lost, without gpulockd: nothing is granted twice, and nothing stays."""

from __future__ import annotations

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import Site

pytestmark = pytest.mark.lab


@EVERY
@pytest.mark.parametrize("way", ["reap", "claim", "wiped"])
def test_after_a_reboot_old_locks_are_dead_and_a_kept_or_wiped_lock_dir_serves_again(
    site: Site, way: str
) -> None:
    """What decides is the boot id alone, as old pids mean nothing: the job goes on at first."""
    old = site.start(site.count)
    if way == "wiped":
        site.lose_locks()
    with site.other_boot():
        if way == "reap":
            told = site.reap()
            assert told.acts() == [("freed", "dead")] * site.count
            assert "claimed before this boot" in told.reasons()
        site.reboot(old)
        site.come_back(old)
        assert len(site.locks()) == (site.count if way == "claim" else 0)
        later = site.start(site.count, user=site.bob)
        assert len(site.held(later)) == site.count
        assert site.reap().acts() == [("held", "alive")] * site.count
        site.end(later)
        assert site.locks() == {}


@EVERY
def test_when_lock_dir_is_lost_nothing_is_granted_until_living_jobs_are_adopted(
    site: Site,
) -> None:
    jobs = [site.start(1), site.start(2)]
    held = {job: site.held(job) for job in jobs}
    site.lose_locks()
    refused = site.submit(1, "echo ran\n", user=site.bob)
    assert "the locks of this boot were lost" in site.wait_sent_back(refused)
    assert site.in_service()
    assert site.locks() == {}
    assert sorted(site.reap().adopted) == sorted(map(str, jobs))
    assert {job: site.held(job) for job in jobs} == held
    site.begin(refused)
    assert "ran\n" in site.wait_said(refused, "ran\n")
    site.end(*jobs)
    site.wait_over(refused)
    assert site.locks() == {}


@EVERY
def test_a_job_that_ended_while_its_locks_were_lost_is_not_adopted_for_good(site: Site) -> None:
    ended, living = site.start(2), site.start(2)
    held = site.held(living)
    site.lose_locks()
    site.end(ended)
    site.reap()
    assert (site.held(living), len(site.locks())) == (held, 2)
    later = site.start(2, user=site.bob)
    assert len(site.held(later)) == 2 and not {*site.held(later)} & {*held}
