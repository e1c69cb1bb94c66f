# SPDX-License-Identifier: Apache-2.0
"""LEFTOVER_PROCESSES on a real Slurm: the Epilog ends what outlives its step daemon, no more."""

from __future__ import annotations

import pytest

from tests.labs.common.processes import running
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import held, kill_steps, started
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock

pytestmark = pytest.mark.lab
KEYS = {
    "LEFTOVER_PROCESSES": "kill",
}
EXTRA = {**SLURM_CONF, "KillWait": "1"}
TWO = "--gres=gpu:2"
DEAF = "trap '' TERM\nwhile :; do sleep 1; done\n"
PROCTRACK = pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])


@pytest.mark.short
@PROCTRACK
def test_what_a_killed_step_daemon_leaves_is_ended_and_a_neighbour_is_not(
    slurm_gpus: Gpulock, proctrack: str
) -> None:
    by_gpulock(slurm_gpus, KEYS, extra=EXTRA, proctrack=proctrack)
    slurm = slurm_gpus.slurm
    neighbour = started(slurm_gpus, NODE, "--gres=gpu:1")
    others = slurm.job_processes(neighbour, NODE)
    job = started(slurm_gpus, NODE, TWO, script=DEAF)
    left = kill_steps(slurm_gpus, job, NODE)
    assert left != []
    slurm.scancel(job)
    slurm.wait_settled(job)  # the Epilog ran
    assert not any(map(running, left))
    assert held(slurm_gpus, job, NODE) == []
    assert others != [] and slurm.job_processes(neighbour, NODE) == others
    assert len(held(slurm_gpus, neighbour, NODE)) == 1
