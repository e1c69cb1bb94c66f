# SPDX-License-Identifier: Apache-2.0
"""However a job, a shepherd, a daemon or a boot ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulock.store.grants import rewrite_claim
from gpulock.store.owner import Owner
from tests.labs.common.installed import SOAK, gate_file, reap
from tests.labs.common.processes import command_of
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    SLEEP,
    carriers,
    claims,
    end_carriers,
    group_of,
    held,
    on,
    records,
    said,
    sparing_execd,
    started,
    wait_said,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE, OTHER, THIRD = NODES


def rewrite(gpus: Gpulock, node: str, job: JobId, **changes: object) -> None:
    """Change fields of a job's record behind gpulock's back."""
    rewrite_claim(gpus.node(node).store, record_of(gpus, node, job).copy(**changes))


def record_of(gpus: Gpulock, node: str, job: JobId) -> Owner:
    """Return the record of one lock of a job."""
    return next(r for r in gpus.locks(node).values() if r.job_id == str(job))


def refused_all(gpus: Gpulock, node: str, free: int) -> str:
    """Ask for one GPU more than are free, past the scheduler's count; return the refusal."""
    gpus.sge.set_exechost(node, "gpu=99,gpuj=99,slots=99")
    try:
        job = gpus.sge.submit("glbob", *on(node, "-l", f"gpu={free + 1}"), stdin="true\n")
        gpus.sge.wait_state(job, "Rq")
        text = said(gpus, job, user="glbob")
        gpus.sge.qdel(str(job))
        gpus.sge.wait_done(job)  # else it may have been sent to the node once more
        return text
    finally:
        gpus.sge.set_exechost(node, f"gpu={GPUS},gpuj={GPUS},slots=16")


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


@pytest.fixture
def sparing(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let execd of OTHER leave daemonised children of a job alone, as 6.2u5 did."""
    with sparing_execd(gpus, OTHER):
        yield gpus


def test_a_child_alive_in_the_epilog_keeps_the_lock_draining_until_it_is_gone(
    sparing: Gpulock,
) -> None:
    go = gate_file(sparing, "go")
    text = f"(setsid sleep 600 >/dev/null 2>&1 &)\n{waiting_for(go)}"
    job = started(sparing, OTHER, 1, text)
    gid = group_of(sparing, OTHER, job)
    wait_until(
        lambda: any(command_of(pid) == "sleep 600" for pid in carriers(gid)), why="its child alone"
    )
    go.touch()
    sparing.sge.wait_done(job)
    lock = record_of(sparing, OTHER, job)
    assert lock.draining == 1 and len(carriers(gid)) == 1
    assert records(sparing, job)[-1]["failed"] == "0"
    told = reap(sparing, OTHER)
    assert [act for act, _ in told.acts()] == ["held"]
    assert f"carries the job's group {gid}" in told.reasons()
    assert "7 of 8 free" in refused_all(sparing, OTHER, 7)
    end_carriers(gid)
    assert reap(sparing, OTHER).acts() == [("freed", "dead")]
    assert sparing.locks(OTHER) == {}


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


def test_job_ids_and_tasks_that_begin_alike_free_only_their_own(gpus: Gpulock) -> None:
    go = gate_file(gpus, "go1")
    end_of_one = f"[ $SGE_TASK_ID = 11 ] && exec sleep 600\n{waiting_for(go)}"
    first = started(gpus, NODE, 1)
    longer = f"{first}3"
    if SOAK:  # the next id is the first one's with a digit more: a minute until execds are back
        gpus.sge.stop_qmaster()
        (gpus.sge.lab / "spool/qmaster/jobseqnum").write_text(f"{int(first) * 10 + 2}\n")
        gpus.sge.start_qmaster()
        gpus.sge.wait_queue(NODE, "")
    second = started(gpus, NODE, 1)
    if not SOAK:
        rewrite(gpus, NODE, second, job_id=longer)
    tasks = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=1", "-t", "1-11:10"), stdin=end_of_one)
    wait_until(lambda: len(held(gpus, NODE, tasks)) == 2, why="two tasks")
    go.touch()
    wait_until(lambda: len(held(gpus, NODE, tasks)) == 1, why="task 1 to give back")
    assert {r.task_id for r in gpus.locks(NODE).values() if r.job_id == str(tasks)} == {"11"}
    gpus.sge.qdel(str(first))
    gpus.sge.wait_settled(first)
    assert {r.job_id for r in gpus.locks(NODE).values()} == {longer, str(tasks)}
