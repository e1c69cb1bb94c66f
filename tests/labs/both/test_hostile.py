# SPDX-License-Identifier: Apache-2.0
"""A job that is hostile to any scheduler's node keeps no GPU of another user's."""

from __future__ import annotations

import pytest

from tests.labs.both.conftest import EVERY
from tests.labs.both.site import SHOW, Site
from tests.labs.common.installed import gate_file
from tests.labs.common.stranger import stranger_script
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]


def test_a_job_that_hides_and_has_every_device_open_keeps_no_other_users_lock(site: Site) -> None:
    """Tried: a job without a GPU opens all, by processes that are full, share a memory, or fork on.

    Stopped by: a lock is held by its owner's processes alone.
    """
    devices = sorted((site.gpus.drivers / site.node / "dev").glob("nvidia[0-9]*"))
    for device in devices:
        device.chmod(0o666)
    told = gate_file(site.gpus, "stranger", site.bob)
    stop = gate_file(site.gpus, "stranger.stop", site.bob)
    go, until_go = site.waiting("go")
    job = site.start(site.count, until_go)
    stranger = site.submit(0, stranger_script(told, devices), user=site.bob)
    wait_until(told.exists, why="the stranger to be ready")
    go.touch()
    site.wait_over(job)
    assert site.locks() == {}
    again = site.submit(site.count, SHOW)
    site.wait_over(again)
    assert "mask=0," in site.said(again)
    stop.touch()
    site.cancel(stranger)
    site.wait_empty()
    assert site.in_service()


@EVERY
def test_a_gate_that_a_stopped_process_holds_sends_jobs_back_and_stops_no_node(site: Site) -> None:
    """Tried: a process holds the gate and stops, while one job begins and another one ends.

    Stopped by: no hook waits longer than 20 s at the gate. What the job that ended has held is
    freed by the next reconcile.
    """
    ending = site.start(1)
    with site.shut_gate():
        job = site.submit(site.count - 1, SHOW, user=site.bob)
        said = site.wait_sent_back(job)
        assert "unknown: timed out on the lock /run/gpulock.claims/gate" in said
        assert site.in_service()
        site.end(ending)
        assert len(site.held(ending)) == 1
    site.reap()
    assert site.held(ending) == []
    site.begin(job)
    site.wait_over(job)
    assert "mask=" in site.said(job)
