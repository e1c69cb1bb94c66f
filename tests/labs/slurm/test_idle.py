# SPDX-License-Identifier: Apache-2.0
"""IDLE_KILL on a Slurm node: scancel ends the one task of an array that idles."""

from __future__ import annotations

import pytest

from tests.labs.common.idle_node import assert_ends_the_idle_one, idling, keys
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SLEEP
from tests.labs.slurm.modes import NODE, by_gpulock
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


def test_the_task_that_idles_is_warned_and_cancelled_and_no_other(slurm_gpus: Gpulock) -> None:
    slurm = slurm_gpus.slurm
    place = slurm.lab / "idle"
    by_gpulock(slurm_gpus, keys(place))
    with idling(slurm_gpus, NODE, place) as node, daemon_on(slurm_gpus, NODE) as daemon:
        words = ("--array=1-2", "--gres=gpu:1", "-w", NODE)
        job = slurm.submit("slalice", *words, script=SLEEP)
        wait_until(lambda: len(slurm_gpus.locks(NODE)) == 2, why="two tasks to have their GPUs")
        (idle,) = slurm_gpus.held_by(slurm.tasks(job)[2])[NODE]
        assert_ends_the_idle_one(node, daemon, lambda: slurm_gpus.locks(NODE), idle)
        queue = ("squeue", "-h", "-r", "-o", "%i %t")
        wait_until(
            lambda: slurm.run_in(slurm.master, queue).stdout.split() == [f"{job}_1", "R"],
            why="slurmctld to be left with the other task",
        )
