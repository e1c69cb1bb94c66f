# SPDX-License-Identifier: Apache-2.0
"""IDLE_KILL: the shipped script has the scheduler end the one task of an array that idles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.labs.both.site import SLEEP, Site
from tests.labs.common.exporter_node import exporter
from tests.labs.daemon.daemon_lab import daemon_on
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BUSY = 90  # percent
WARN, KILL = "2", "4"  # observed seconds
SCRIPT = Path(__file__).parents[3] / "docs/examples/end-idle-job"
TELL = 'echo "$1 $GPULOCK_JOB_ID $GPULOCK_TASK_ID $GPULOCK_DEVICES"'


def test_the_task_that_idles_is_warned_and_ended_and_no_other(site: Site) -> None:
    gpus, place = site.gpus, site.gpus.cluster.lab / "idle"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    command, log = place / "command", place / "told"
    command.write_text(f'#!/bin/sh\n{TELL} >> {log}\nexec {SCRIPT} "$1"\n')
    command.chmod(0o755)
    site.configure(IDLE_WARN=WARN, IDLE_KILL=KILL, IDLE_COMMAND=str(command))
    index = {device.id: device.index for device in gpus.node(site.node).devices()}

    def told() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    seen = exporter(gpus, site.node, place, index.values(), BUSY)
    with seen as nvml, daemon_on(gpus, site.node) as daemon:
        job = site.submit(1, SLEEP, tasks=2)
        wait_until(lambda: len(site.locks()) == 2, why="two tasks to have their GPUs")
        wait_until(lambda: len(site.tasks(job)) == 2, why="both to run")
        (idle,) = site.held_by_task(job, 2)
        before = gpus.locks(site.node)
        (other,) = set(before) - {idle}

        def ended() -> bool:
            assert other in site.locks(), daemon.said()
            return idle not in site.locks()

        daemon.goes_round()
        assert told() == []
        nvml.load(index[idle], 0)
        daemon.rounds_until(ended, f"{before[idle].job()} to be ended")
        wait_until(lambda: len(told()) > 1, why="the command to be told")
        daemon.goes_round()
        facts = f"{before[idle].job_id} {before[idle].task_id} {idle}"
        assert told() == [f"warn {facts}", f"kill {facts}"]
        assert "IDLE_COMMAND kill" in daemon.said()
        left = {name: one.token for name, one in gpus.locks(site.node).items()}
        assert left == {other: before[other].token}
        wait_until(lambda: site.tasks(job) == [1], why="the scheduler to have ended it alone")
