# SPDX-License-Identifier: Apache-2.0
"""However a job, a shepherd, a daemon or a boot ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gpulock.store.grants import rewrite_claim
from gpulock.store.owner import Owner
from tests.labs.common.processes import command_of
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    SLEEP,
    SOAK,
    carriers,
    claims,
    end_carriers,
    forget_conf,
    gate_file,
    group_of,
    held,
    kill_shepherd,
    lose_locks,
    on,
    reap,
    records,
    restart_execd,
    said,
    sleepers,
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


def test_a_device_whose_lock_was_removed_and_that_an_orphan_has_open_is_granted_to_nobody(
    gpus: Gpulock,
) -> None:
    device = gpus.drivers / NODE / "dev/nvidia0"
    device.chmod(0o666)
    orphan = started(gpus, NODE, 1, f"exec 3<>{device}\n{SLEEP}")
    (used,) = held(gpus, NODE, orphan)
    gid = group_of(gpus, NODE, orphan)
    sleepers(gid, 1)  # it has opened its device before
    kill_shepherd(gpus, NODE, orphan)
    lose_locks(gpus, NODE)
    assert reap(gpus, NODE).restored == [str(orphan)]
    whole = gpus.sge.submit("glbob", *on(NODE, "-l", f"gpu={GPUS - 1}"), stdin=SLEEP)
    gpus.sge.wait_running(whole)
    assert used not in held(gpus, NODE, whole)
    assert "0 of 8 free" in refused_all(gpus, NODE, 0)
    end_carriers(gid)
    last = started(gpus, NODE, 1)
    assert held(gpus, NODE, last) == [used]


@pytest.fixture
def sparing(gpus: Gpulock) -> Iterator[Gpulock]:
    """Let execd of OTHER leave daemonised children of a job alone, as 6.2u5 did."""
    restart_execd(gpus, OTHER, execd_params="ENABLE_ADDGRP_KILL=false")
    yield gpus
    gpus.sge.clear_jobs()
    forget_conf(gpus, OTHER, "execd_params")


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


def test_pids_and_groups_that_others_use_again_and_clocks_set_back_mislead_nobody(
    gpus: Gpulock,
) -> None:
    victim = started(gpus, NODE, 1)
    reused_pid, reused_gid, gid_alone, future = (started(gpus, NODE, 1) for _ in range(4))
    other = record_of(gpus, NODE, victim)
    for job in (reused_pid, reused_gid, gid_alone):
        end_carriers(kill_shepherd(gpus, NODE, job))
    stray = subprocess.Popen(
        ["setpriv", f"--groups={other.add_grp_id + 50}", "sleep", "600"], env={"PATH": "/usr/bin"}
    )
    # the dead shepherd's pid is another living job's shepherd, its start time is not
    rewrite(gpus, NODE, reused_pid, pid=other.pid)
    # the group of the dead job was handed to a living one: all carriers are that one's children
    rewrite(gpus, NODE, reused_gid, add_grp_id=other.add_grp_id)
    # a process of nobody's carries the group: held as alive
    rewrite(gpus, NODE, gid_alone, add_grp_id=other.add_grp_id + 50)
    rewrite(gpus, NODE, future, claimed_at=4e9)
    rewrite(gpus, NODE, victim, claimed_at=1.0)
    try:
        wait_until(lambda: carriers(other.add_grp_id + 50) == [stray.pid], why="the stray's group")
        told = reap(gpus, NODE)
        left = {record.job_id for record in gpus.locks(NODE).values()}
        assert left == {str(victim), str(gid_alone), str(future)}, told
        assert sorted(told.acts()) == [("freed", "dead")] * 2 + [("held", "alive")] * 3
        assert "another job's now" in told.reasons()
    finally:
        stray.kill()
        stray.wait()
    assert sorted(reap(gpus, NODE).acts()) == [("freed", "dead")] + [("held", "alive")] * 2
    gpus.sge.qdel(str(future), str(victim))
    gpus.sge.wait_done(future)
    gpus.sge.wait_done(victim)
    gpus.wait_free()


def test_a_carrier_that_is_not_the_heirs_child_makes_a_reused_group_unknown(gpus: Gpulock) -> None:
    heir = started(gpus, NODE, 1)
    gone = started(gpus, NODE, 1)
    gid = group_of(gpus, NODE, heir)
    end_carriers(kill_shepherd(gpus, NODE, gone))
    rewrite(gpus, NODE, gone, add_grp_id=gid)
    stray = subprocess.Popen(["setpriv", f"--groups={gid}", "sleep", "600"])
    try:
        wait_until(lambda: stray.pid in carriers(gid), why="the stray's group")
        told = reap(gpus, NODE)
        assert sorted(told.acts()) == [("held", "alive"), ("held", "unknown")]
    finally:
        stray.kill()
        stray.wait()
    assert sorted(reap(gpus, NODE).acts()) == [("freed", "dead"), ("held", "alive")]


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
