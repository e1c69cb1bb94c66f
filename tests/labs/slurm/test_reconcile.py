# SPDX-License-Identifier: Apache-2.0
"""gpulockd on a Slurm node: what a job without an Epilog leaves, and what only looks dead."""

from __future__ import annotations

import shutil

import pytest

from tests.labs.common.installed import empty
from tests.labs.common.processes import end
from tests.labs.daemon.daemon_lab import WITHOUT_PERIOD, daemon_on
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, stops
from tests.labs.slurm.jobs import held, kill_steps, reap, shut_gate, started, wait_requeued
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, by_gpulock
from tests.labs.slurm.test_ends import EXTRA, TWO, leak
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


@pytest.fixture
def hooks(slurm_gpus: Gpulock) -> Stops:
    """Give a test, in which gpulock chooses, hooks that it can stop."""
    found = stops(slurm_gpus)
    by_gpulock(slurm_gpus, hooks=found.hooks, extra=EXTRA)
    return found


def locked(gpus: Gpulock, job: JobId) -> bool:
    return bool(held(gpus, job, NODE))


def test_a_job_whose_epilog_did_not_run_is_freed_at_once_where_its_steps_were_seen(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    with daemon_on(slurm_gpus, NODE, program=WITHOUT_PERIOD) as daemon:
        job = started(slurm_gpus, NODE, TWO)
        daemon.goes_round()
        leak(slurm_gpus, hooks, job)
        daemon.frees(lambda: locked(slurm_gpus, job))


def test_a_job_whose_step_daemons_were_killed_is_held_as_long_as_it_lives(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    with daemon_on(slurm_gpus, NODE) as daemon:
        job = started(slurm_gpus, NODE, TWO)
        daemon.goes_round()
        living = kill_steps(slurm_gpus, job, NODE)
        assert living
        daemon.goes_round()
        slurm_gpus.slurm.scancel(job)
        slurm_gpus.slurm.wait_done(job)  # the Epilog ran, and left it to gpulockd
        daemon.goes_round()
        assert len(held(slurm_gpus, job, NODE)) == 2
        end(living)
        daemon.frees(lambda: locked(slurm_gpus, job))


def test_what_only_looks_dead_keeps_its_devices(slurm_gpus: Gpulock, hooks: Stops) -> None:
    """A slurmd that is restarted, a slurmctld that is down, a gate that is held too long."""
    slurm = slurm_gpus.slurm
    with daemon_on(slurm_gpus, NODE) as daemon:
        job = started(slurm_gpus, NODE, TWO)
        before = held(slurm_gpus, job, NODE)
        slurm.stop_slurmd(NODE, kill=True)
        daemon.goes_round()
        slurm.start_slurmd(NODE)
        daemon.goes_round()
        slurm.stop_slurmctld()
        try:
            daemon.goes_round()
            assert held(slurm_gpus, job, NODE) == before
        finally:
            slurm.start_slurmctld()
        with shut_gate(slurm_gpus, NODE):
            daemon.process.send_signal(1)
        daemon.goes_round()
        assert held(slurm_gpus, job, NODE) == before
        assert "freed" not in daemon.said()


def test_without_slurmctld_an_unseen_job_is_held_and_told_once(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    """Its Prolog claimed before gpulockd came; it ended before a step of it was ever seen."""
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    leak(slurm_gpus, hooks, job)
    slurm.stop_slurmctld()
    try:
        with daemon_on(slurm_gpus, NODE) as daemon:
            for _ in range(2):
                daemon.goes_round()
            assert len(held(slurm_gpus, job, NODE)) == 2
            told = [line for line in daemon.said().splitlines() if "is not freed" in line]
            assert len(told) == 2, told  # one a device
    finally:
        slurm.start_slurmctld()
    with daemon_on(slurm_gpus, NODE) as daemon:
        daemon.frees(lambda: locked(slurm_gpus, job))
        assert "slurmctld says CANCELLED" in daemon.said()


def test_locks_that_somebody_removes_are_granted_to_nobody_and_put_back(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    del hooks
    slurm = slurm_gpus.slurm
    jobs = [started(slurm_gpus, NODE, "--gres=gpu:1") for _ in range(2)]
    masks = {job: held(slurm_gpus, job, NODE) for job in jobs}
    ids = {record.job_id: name for name, record in slurm_gpus.locks(NODE).items()}
    locks = slurm_gpus.cluster.path_in(NODE, "/run/gpulock/locks")

    shutil.rmtree(locks)  # by an administrator who clears stuck locks, without gpulockd
    refused = slurm.submit("slbob", "-w", NODE, TWO, script="echo ran\n")
    wait_requeued(slurm_gpus, refused)
    assert "the locks were lost" in slurm.said(refused)
    assert not slurm.is_out(NODE)
    assert sorted(reap(slurm_gpus, NODE).adopted) == sorted(map(str, jobs))
    assert {job: held(slurm_gpus, job, NODE) for job in jobs} == masks

    shutil.rmtree(locks / ids[str(jobs[0])])
    with daemon_on(slurm_gpus, NODE) as daemon:
        daemon.goes_round()
        assert {job: held(slurm_gpus, job, NODE) for job in jobs} == masks
        empty(locks)
        wait_until(lambda: len(slurm_gpus.locks(NODE)) == 2, why="all locks")
        assert {job: held(slurm_gpus, job, NODE) for job in jobs} == masks
        assert f"restored {ids[str(jobs[0])]} of job {jobs[0]}" in daemon.said()
        slurm.begin(refused)
        assert slurm.wait_done(refused) == "COMPLETED"
        for job in jobs:
            slurm.scancel(job)
            slurm.wait_done(job)
        wait_until(lambda: slurm_gpus.locks(NODE) == {}, why="no lock")
        daemon.goes_round()
        told = sorted(line["job_id"] for line in daemon.history())
        assert told == sorted(map(str, (*jobs, refused)))
