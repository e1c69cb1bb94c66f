# SPDX-License-Identifier: Apache-2.0
"""IDLE_KILL on a Grid Engine node: qdel ends the one task of an array that idles."""

from __future__ import annotations

import pytest

from tests.labs.common.idle_node import assert_ends_the_idle_one, idling, keys
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import on
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]


def test_the_task_that_idles_is_warned_and_deleted_and_no_other(gpus: Gpulock) -> None:
    sge = gpus.sge
    place = sge.lab / "idle"
    gpus.configure(NODE, **keys(place))
    with idling(gpus, NODE, place) as node, daemon_on(gpus, NODE) as daemon:
        job = sge.submit("glalice", "-t", "1-2", *on(NODE, "-l", "gpu=1"), stdin="exec sleep 600\n")
        wait_until(lambda: len(gpus.locks(NODE)) == 2, why="two tasks to have their GPUs")
        sge.wait_state(job, "r")
        (idle,) = [name for name, one in gpus.locks(NODE).items() if one.task_id == "2"]
        assert_ends_the_idle_one(node, daemon, lambda: gpus.locks(NODE), idle)
        wait_until(lambda: not sge.state(job, 2), why="qmaster to forget it")
        assert sge.state(job, 1) == "r"
