# SPDX-License-Identifier: Apache-2.0
"""However a job, a shepherd, a daemon or a boot ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

import pytest

from gpulock.store.owner import Owner
from tests.labs.common.installed import SOAK, gate_file
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    SLEEP,
    claims,
    held,
    started,
    wait_said,
    waiting_for,
)
from tests.labs.sge.lab import JobId

pytestmark = pytest.mark.lab
NODE = NODES[0]


def record_of(gpus: Gpulock, node: str, job: JobId) -> Owner:
    """Return the record of one lock of a job."""
    return next(r for r in gpus.locks(node).values() if r.job_id == str(job))


def test_jobs_that_are_deleted_by_force_or_run_out_of_time_give_back_at_once(gpus: Gpulock) -> None:
    forced = started(gpus, NODE, 2)
    timed = started(gpus, NODE, 2, SLEEP, "-l", "h_rt=10")
    granted = claims(gpus, NODE)  # one that runs out of time may have given back by now
    assert {job: len(devices) for job, devices in granted.items()} == {
        str(forced): 2,
        str(timed): 2,
    }
    gpus.sge.qdel("-f", str(forced))
    for job in (forced, timed):
        gpus.sge.wait_done(job)
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""


def test_a_job_that_runs_again_gets_locks_of_its_new_run_and_nothing_leaks(gpus: Gpulock) -> None:
    """One at a time: with two, qmaster sends a job back while it is still ending (8.1.9)."""
    kinds = ("exit 99", "qmod -rj") if SOAK else ("exit 99",)
    for kind in kinds:
        ready = gate_file(gpus, "ready")
        text = (
            "echo run=$RESTARTED mask=$CUDA_VISIBLE_DEVICES\n"
            f"[ $RESTARTED = 1 ] && exec sleep 600\n{waiting_for(ready)}exit 99\n"
        )
        job = started(gpus, NODE, 2, text, "-r", "y")
        first = record_of(gpus, NODE, job)
        if kind == "exit 99":
            ready.touch()
        else:
            gpus.sge.qmod("-rj", str(job))
        wait_said(gpus, job, "run=1")
        second = record_of(gpus, NODE, job)
        assert second.run() != first.run() and second.token != first.token
        assert second.pid == gpus.sge.shepherd_pid(job)
        assert len(held(gpus, NODE, job)) == len(gpus.locks(NODE)) == 2
        gpus.sge.qdel(str(job))
        gpus.sge.wait_done(job)
        gpus.wait_free()
