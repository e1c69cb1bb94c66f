# SPDX-License-Identifier: Apache-2.0
"""PrologFlags=RunInJob: hooks run in the job's extern step, and give back what it held.

Slurm has it since 24.05; an earlier one runs the same jobs with Contain.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.labs.common.installed import reap
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK, is_reaped, notes, started, wait_requeued
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock
from tests.labs.slurm.releases import RUNS_EPILOGS_AS_ROOT, RUNS_HOOKS_IN_JOB
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
EXTRA = {**SLURM_CONF, "KillWait": "1", "BatchStartTimeout": "120"}
KEYS = {"SYS_ROOT": "/sys"}
JOBS = 8
PROCTRACK = pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])


def run_in_job(gpus: Gpulock, proctrack: str, **keys: str) -> None:
    """Let the hooks run in the job, where this Slurm can."""
    flags = "RunInJob" if gpus.slurm.release >= RUNS_HOOKS_IN_JOB else "Contain"
    by_gpulock(gpus, {**KEYS, **keys}, extra=EXTRA, proctrack=proctrack, prolog_flags=flags)


@pytest.mark.short
@PROCTRACK
def test_jobs_one_after_the_other_and_beside_each_other_give_back(
    slurm_gpus: Gpulock, proctrack: str
) -> None:
    """Where an Epilog started as the job's user the reaper frees, and the next job waits."""
    run_in_job(slurm_gpus, proctrack, SLURM_WAIT="50")
    slurm = slurm_gpus.slurm
    script = f"{SHOW_MASK}exec sleep 0.3\n"
    jobs = [slurm.submit("slalice", "-w", NODE, "--gres=gpu:2", script=script) for _ in range(JOBS)]
    untouched = 0
    for job in jobs:
        assert slurm.wait_settled(job) == "COMPLETED", slurm.said(job)
        assert slurm.said(job) in ("mask=0,1.\n", "mask=2,3.\n")
        kept = [one for one in slurm_gpus.locks(NODE).values() if one.job_id == str(job)]
        if kept:  # its Epilog is over
            # A step daemon that is just starting may be anybody's, its own may still be ending: an
            # Epilog of root's that sees one leaves the lock draining (docs/facts/slurm.md).
            untouched += not all(one.draining for one in kept)
            wait_until(partial(is_reaped, slurm_gpus, job, NODE), why=f"job {job} to be reaped")
    assert (slurm_gpus.locks(NODE), slurm.node_words(NODE)) == ({}, {"IDLE"})
    may_be_the_users = RUNS_HOOKS_IN_JOB <= slurm.release < RUNS_EPILOGS_AS_ROOT
    assert untouched <= (JOBS / 2 if may_be_the_users else 0)


@PROCTRACK
def test_a_requeued_job_takes_the_same_devices_again(slurm_gpus: Gpulock, proctrack: str) -> None:
    """Its own extern step daemon has the job's id, and was there before its Prolog."""
    run_in_job(slurm_gpus, proctrack)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, "--gres=gpu:4")
    slurm.requeue(job)
    wait_requeued(slurm_gpus, job)
    slurm.begin(job)
    slurm.wait_running(job)
    assert len(slurm_gpus.held_by(job)[NODE]) == 4
    slurm.scancel(job)
    slurm.wait_done(job)
    reap(slurm_gpus, NODE)
    assert (slurm_gpus.locks(NODE), notes(slurm_gpus, NODE)) == ({}, [])
