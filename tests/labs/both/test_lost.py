# SPDX-License-Identifier: Apache-2.0
"""Folders are lost, by a boot or by rm, without gpulockd: no GPU is granted twice or kept."""

from __future__ import annotations

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import Site
from tests.labs.common.installed import lose_locks, lose_locks_and_records, other_boot

pytestmark = pytest.mark.lab


@EVERY
@pytest.mark.parametrize("way", ["kept", "emptied"])
def test_after_a_reboot_old_locks_are_dead_and_kept_or_emptied_folders_serve_again(
    site: Site, way: str
) -> None:
    """What decides is the boot id alone, as old pids mean nothing: the job goes on at first."""
    old = site.start(site.count)
    if way == "emptied":
        lose_locks_and_records(site.gpus, site.node)
    with other_boot(site.gpus, site.node):
        site.reboot(old)
        assert len(site.locks()) == (site.count if way == "kept" else 0)
        site.come_back(old)  # the scheduler may run the old job's epilog, which finds nothing
        later = site.start(site.count, user=site.bob)
        assert len(site.held(later)) == site.count
        assert site.reap().acts() == [("held", "alive")] * site.count
        site.end(later)
        assert site.locks() == {}


@EVERY
def test_an_emptied_lock_dir_is_whole_again_before_a_gpu_is_granted(site: Site) -> None:
    jobs = [site.start(1), site.start(1)]
    held = {job: site.held(job) for job in jobs}
    lose_locks(site.gpus, site.node)

    later = site.start(1, user=site.bob)

    assert {job: site.held(job) for job in jobs} == held
    assert not {*site.held(later)} & {device for devices in held.values() for device in devices}
    site.end(*jobs, later)
    assert site.locks() == {}


@EVERY
def test_without_records_nothing_is_granted_until_an_administrator_says_that_no_job_is_left(
    site: Site,
) -> None:
    job = site.start(2)
    lose_locks_and_records(site.gpus, site.node)
    refused = site.submit(1, "echo ran\n", user=site.bob)
    assert "the records of this boot's claims were lost" in site.wait_sent_back(refused)
    assert site.in_service()
    assert "the records of this boot's claims were lost" in site.reap().refused
    site.end(job)

    with site.drained(refused):
        site.command("forget-locks")

    site.begin(refused)
    assert "ran\n" in site.wait_said(refused, "ran\n")
    site.wait_over(refused)
    assert site.locks() == {}
