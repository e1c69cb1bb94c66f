# SPDX-License-Identifier: Apache-2.0
"""gpulockd on a Grid Engine node: what a job without an epilog leaves, and what only looks dead."""

from __future__ import annotations

import shutil

import pytest

from tests.labs.common.processes import end
from tests.labs.daemon.daemon_lab import WITHOUT_PERIOD, daemon_on
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    DAEMONISES,
    command,
    empty,
    end_carriers,
    group_of,
    held,
    on,
    reap,
    said,
    sleepers,
)
from tests.labs.sge.lab import JobId
from tests.labs.sge.test_ends import SLEEP, kill_shepherd, started
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE, _, THIRD = NODES


def locked(gpus: Gpulock, node: str, job: JobId) -> bool:
    return bool(held(gpus, node, job))


def test_a_killed_shepherds_lock_is_freed_when_its_processes_are_gone_and_not_before(
    gpus: Gpulock,
) -> None:
    with daemon_on(gpus, NODE) as daemon:
        job = started(gpus, NODE, 2, DAEMONISES)
        living = sleepers(group_of(gpus, NODE, job), 2)
        gid = kill_shepherd(gpus, NODE, job)
        daemon.goes_round()
        assert len(held(gpus, NODE, job)) == 2
        end(living[:1])
        daemon.goes_round()
        assert len(held(gpus, NODE, job)) == 2
        end_carriers(gid)
        daemon.frees(lambda: locked(gpus, NODE, job))
        assert f"no process carries its group {gid}" in daemon.said()


def test_a_shepherd_that_dies_last_is_seen_at_once(gpus: Gpulock) -> None:
    with daemon_on(gpus, NODE, program=WITHOUT_PERIOD) as daemon:
        job = started(gpus, NODE, 2)
        daemon.goes_round()
        pid = gpus.sge.shepherd_pid(job)
        (sleeper,) = sleepers(group_of(gpus, NODE, job), 1)
        end([pid, sleeper])
        daemon.frees(lambda: locked(gpus, NODE, job))


def test_without_qmaster_the_dead_are_freed_all_the_same(gpus: Gpulock) -> None:
    with daemon_on(gpus, NODE) as daemon:
        job = started(gpus, NODE, 2)
        gpus.sge.stop_qmaster()
        try:
            end_carriers(kill_shepherd(gpus, NODE, job))
            daemon.frees(lambda: locked(gpus, NODE, job))
        finally:
            gpus.sge.start_qmaster()
        gpus.sge.qdel("-f", str(job))


def test_a_refused_job_says_why_where_its_user_looks(gpus: Gpulock) -> None:
    with daemon_on(gpus, NODE) as daemon:
        holder = started(gpus, NODE, 8)
        gpus.sge.set_exechost(NODE, "gpu=99,gpuj=99,slots=99")
        try:
            job = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=1"), stdin="true\n")
            gpus.sge.wait_state(job, "Rq")

            def told() -> bool:
                """Return whether the user reads it: it is refused, and told, again and again."""
                daemon.goes_round()
                seen.append(gpus.sge.qstat("-j", str(job)))
                return "gpulock=gpulock: job " in seen[-1] and "0 of 8 free" in seen[-1]

            seen: list[str] = []
            wait_until(
                told, why=lambda: "its context to say why\n" + daemon.said() + "\n".join(seen)
            )
            gpus.sge.qdel(str(job), str(holder))
        finally:
            gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")


def test_locks_that_somebody_removes_are_granted_to_nobody_and_put_back(gpus: Gpulock) -> None:
    jobs = [started(gpus, NODE, count) for count in (1, 2)]
    masks = {job: held(gpus, NODE, job) for job in jobs}
    locks = gpus.sge.path_in(NODE, "/run/gpulock/locks")

    shutil.rmtree(locks)  # by an administrator who clears stuck locks, without gpulockd
    refused = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=5"), stdin=SLEEP)
    gpus.sge.wait_state(refused, "Rq")
    assert "the locks were lost" in said(gpus, refused, user="glbob")
    assert gpus.sge.queue_states()[NODE] == ""
    assert "locks lost" in command(gpus, NODE, "status")
    assert sorted(reap(gpus, NODE).adopted) == sorted(map(str, jobs))
    assert {job: held(gpus, NODE, job) for job in jobs} == masks
    gpus.sge.qdel(str(refused))
    gpus.sge.wait_done(refused)

    shutil.rmtree(locks / masks[jobs[0]][0])
    with daemon_on(gpus, NODE) as daemon:
        daemon.goes_round()
        assert {job: held(gpus, NODE, job) for job in jobs} == masks
        empty(locks)
        wait_until(lambda: len(gpus.locks(NODE)) == 3, why="all locks")
        assert {job: held(gpus, NODE, job) for job in jobs} == masks
        assert f"restored {masks[jobs[0]][0]} of job {jobs[0]}" in daemon.said()
        more = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=5"), stdin=SLEEP)
        gpus.sge.wait_running(more)
        assert not {*held(gpus, NODE, more)} & {*masks[jobs[0]], *masks[jobs[1]]}
        for job in (*jobs, more):
            gpus.sge.qdel(str(job))
            gpus.sge.wait_done(job)
        wait_until(lambda: gpus.locks(NODE) == {}, why="no lock")
        told = sorted(line["job_id"] for line in daemon.history())
        assert told == sorted(map(str, (*jobs, more)))
