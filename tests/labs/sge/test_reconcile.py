# SPDX-License-Identifier: Apache-2.0
"""gpulockd on a Grid Engine node: what a job without an epilog leaves, and what only looks dead."""

from __future__ import annotations

import pytest

from tests.labs.common.processes import end
from tests.labs.daemon.daemon_lab import daemon_on
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import DAEMONISES, end_carriers, group_of, held, on, sleepers
from tests.labs.sge.lab import JobId
from tests.labs.sge.test_ends import kill_shepherd, started
from tests.labs.sge.wait import until

pytestmark = pytest.mark.lab
NODE, _, THIRD = NODES
SOON = 15.0  # seconds: half a period, which restarts with a round


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
    with daemon_on(gpus, NODE) as daemon:
        job = started(gpus, NODE, 2)
        daemon.goes_round()
        pid = gpus.sge.shepherd_pid(job)
        (sleeper,) = sleepers(group_of(gpus, NODE, job), 1)
        end([pid, sleeper])
        assert daemon.frees(lambda: locked(gpus, NODE, job)) < SOON


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
            gpus.sge.wait_state(job, "Rq", seconds=60)

            def told() -> bool:
                """Return whether the user reads it: it is refused, and told, again and again."""
                daemon.goes_round()
                seen.append(gpus.sge.qstat("-j", str(job)))
                return "gpulock=gpulock: job " in seen[-1] and "0 of 8 free" in seen[-1]

            seen: list[str] = []
            until(
                told,
                what="its context to say why",
                interval=1,
                why=lambda: daemon.said() + "\n".join(seen),
            )
            gpus.sge.qdel(str(job), str(holder))
        finally:
            gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")
