# SPDX-License-Identifier: Apache-2.0
"""IDLE_KILL: the scheduler ends the one task of an array that idles."""

from __future__ import annotations

import pytest

from tests.labs.both.site import SLEEP, Site
from tests.labs.common.idle_node import assert_ends_the_idle_one, idling, keys
from tests.labs.daemon.daemon_lab import daemon_on
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


def test_the_task_that_idles_is_warned_and_ended_and_no_other(site: Site) -> None:
    place = site.gpus.cluster.lab / "idle"
    site.configure(**keys(place))
    with idling(site.gpus, site.node, place) as node, daemon_on(site.gpus, site.node) as daemon:
        job = site.submit_many(2, 1, SLEEP)
        wait_until(lambda: len(site.locks()) == 2, why="two tasks to have their GPUs")
        wait_until(lambda: len(site.tasks(job)) == 2, why="both to run")
        (idle,) = site.held_by_task(job, 2)
        assert_ends_the_idle_one(node, daemon, lambda: site.gpus.locks(site.node), idle)
        wait_until(lambda: site.tasks(job) == [1], why="the scheduler to have ended it alone")
