# SPDX-License-Identifier: Apache-2.0
"""However a job, a shepherd, a daemon or a boot ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.labs.common.processes import children_of, command_of, end, running
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    DAEMONISES,
    SOAK,
    carriers,
    claims,
    end_carriers,
    forget_conf,
    gate_file,
    group_of,
    held,
    on,
    other_boot,
    reap,
    records,
    restart_execd,
    said,
    script,
    sleepers,
    wait_said,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_ended, wait_until

pytestmark = pytest.mark.lab
NODE, OTHER, THIRD = NODES
SLEEP = "exec sleep 600\n"


def started(gpus: Gpulock, node: str, count: int, text: str = SLEEP, *more: str) -> JobId:
    """Start a job that holds GPUs; return it once it runs."""
    job = gpus.sge.submit("glalice", *on(node, "-l", f"gpu={count}", *more), stdin=text)
    gpus.sge.wait_running(job)
    return job


def rewrite(gpus: Gpulock, node: str, job: JobId, **changes: object) -> None:
    """Change fields of a job's records behind gpulock's back."""
    for name, record in gpus.locks(node).items():
        if record.job_id == str(job):
            place = gpus.sge.path_in(node, f"/run/gpulock/locks/{name}/owner")
            place.write_text(owner.encode_owner(record.copy(**changes)))


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


def kill_shepherd(gpus: Gpulock, node: str, job: JobId) -> int:
    """Kill a job's shepherd as an OOM killer would; return the job's group."""
    gid = group_of(gpus, node, job)
    shepherd = gpus.sge.shepherd_pid(job)
    os.kill(shepherd, signal.SIGKILL)
    wait_ended([shepherd], why="the shepherd to be gone")
    return gid


def test_jobs_that_are_deleted_or_run_out_of_time_give_back_at_once(gpus: Gpulock) -> None:
    deleted = started(gpus, NODE, 2)
    forced = started(gpus, NODE, 2)
    stopped = started(gpus, NODE, 1, "kill -STOP $$\n")
    timed = started(gpus, NODE, 2, SLEEP, "-l", "h_rt=10")
    granted = claims(gpus, NODE)  # one that runs out of time may have given back by now
    assert {job: len(devices) for job, devices in granted.items()} == {
        str(deleted): 2,
        str(forced): 2,
        str(stopped): 1,
        str(timed): 2,
    }
    assert len({device for devices in granted.values() for device in devices}) == 7
    gpus.sge.qdel(str(deleted))
    gpus.sge.qdel("-f", str(forced))
    gpus.sge.qdel(str(stopped))
    for job in (deleted, forced, timed, stopped):
        gpus.sge.wait_done(job)
    gpus.wait_free()
    assert gpus.sge.queue_states()[NODE] == ""


def test_locks_of_jobs_whose_epilog_cannot_run_are_freed_by_the_next_reconcile(
    gpus: Gpulock,
) -> None:
    home = gpus.sge.users["glalice"].home
    texts = {
        "removed": 'rm -rf "$PWD"\n',
        "closed": 'chmod 0 "$PWD"\n',
        "folder": "rm -f $SGE_STDOUT_PATH; mkdir $SGE_STDOUT_PATH\n",
        "fifo": "rm -f $SGE_STDOUT_PATH; mkfifo $SGE_STDOUT_PATH\n",
    }
    jobs: dict[str, JobId] = {}
    for name, text in texts.items():
        folder = home / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.chown(folder, 27001, 27001)
        words = on(NODE, "-l", "gpu=1", "-N", name, "-wd", str(folder))
        jobs[name] = gpus.sge.submit("glalice", *words, stdin=text)
    for name in ("removed", "closed", "folder"):
        gpus.sge.wait_state(jobs[name], "", "Eqw")
    wait_until(
        lambda: set(claims(gpus, NODE)) >= {str(j) for j in jobs.values()}, why="four claims"
    )
    # the FIFO keeps its shepherd waiting in open() for ever: it lives, and so does its lock
    gpus.sge.wait_running(jobs["fifo"])  # what has claimed may not have begun
    shepherd = gpus.sge.shepherd_pid(jobs["fifo"])
    wait_until(lambda: not carriers(group_of(gpus, NODE, jobs["fifo"])), why="the job's end")
    kept = reap(gpus, NODE)
    by_act = sorted(act for act, _ in kept.acts())
    assert by_act == ["freed", "freed", "freed", "held"], kept
    assert held(gpus, NODE, jobs["fifo"]) != []
    forks = wait_until(lambda: children_of(shepherd) or None, why="its epilog to hang")
    end([shepherd])
    try:
        assert reap(gpus, NODE).acts() == [("freed", "dead")]
        assert gpus.locks(NODE) == {}
        assert all(map(running, forks))
    finally:
        end(forks)
    assert gpus.sge.queue_states()[NODE] == ""


def test_a_killed_shepherd_leaves_its_lock_as_long_as_anything_of_the_job_lives(
    gpus: Gpulock,
) -> None:
    plain = started(gpus, NODE, 2)
    daemonised = started(gpus, NODE, 2, DAEMONISES)
    first = sleepers(group_of(gpus, NODE, plain), 1)
    alive = sleepers(group_of(gpus, NODE, daemonised), 2)
    for job in (plain, daemonised):
        kill_shepherd(gpus, NODE, job)
    told = reap(gpus, NODE)
    assert told.acts() == [("held", "alive")] * 4
    assert "runs without a shepherd" in told.reasons()
    assert "4 of 8 free" in refused_all(gpus, NODE, 4)  # nor does a claim that is short free them
    end(first)
    end(alive[:1])
    told = reap(gpus, NODE)
    assert sorted(told.acts()) == [("freed", "dead")] * 2 + [("held", "alive")] * 2
    assert len(held(gpus, NODE, daemonised)) == 2
    end(alive)
    after = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=8"), stdin=SLEEP)
    gpus.sge.wait_running(after)  # the claim itself settles what it needs
    assert len(held(gpus, NODE, after)) == GPUS


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


def test_after_a_reboot_old_locks_are_dead_and_a_kept_or_wiped_lock_directory_serves_again(
    gpus: Gpulock,
) -> None:
    """The nodes' jobs go on in fact: what decides is the boot id alone, as their pids are gone."""
    jobs = [started(gpus, node, 8) for node in (NODE, OTHER)]
    shutil.rmtree(gpus.sge.path_in(OTHER, "/run/gpulock/locks"))
    for name in ("boot_id", "gate", "totals"):
        gpus.sge.path_in(OTHER, f"/run/gpulock/{name}").unlink()
    with other_boot(gpus, NODE), other_boot(gpus, OTHER):
        told = reap(gpus, NODE)
        assert told.acts() == [("freed", "dead")] * GPUS
        assert "claimed before this boot" in told.reasons()
        for job in jobs:
            gpus.sge.qdel(str(job))
            gpus.sge.wait_done(job)
        later = [
            gpus.sge.submit("glbob", *on(n, "-l", "gpu=8"), stdin=SLEEP) for n in (NODE, OTHER)
        ]
        for job in later:
            gpus.sge.wait_running(job)
        assert len(held(gpus, NODE, later[0])) == len(held(gpus, OTHER, later[1])) == GPUS
        gpus.sge.clear_jobs()
    for node in (NODE, OTHER):
        assert gpus.locks(node) == {}


def test_when_run_is_wiped_nothing_is_granted_until_every_living_job_is_adopted(
    gpus: Gpulock,
) -> None:
    device = gpus.drivers / NODE / "dev/nvidia7"
    device.chmod(0o666)
    jobs = [started(gpus, NODE, count) for count in (1, 2)]
    orphan = started(gpus, NODE, 1, f"exec 3<>{device}\n{SLEEP}")
    masks = {job: held(gpus, NODE, job) for job in jobs}
    sleepers(group_of(gpus, NODE, orphan), 1)  # it has opened its device before
    gid = kill_shepherd(gpus, NODE, orphan)
    lock_dir = gpus.sge.path_in(NODE, "/run/gpulock")
    for place in lock_dir.iterdir():
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    refused = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=1"), stdin="true\n")
    gpus.sge.wait_state(refused, "Rq")
    assert "the locks of this boot were lost" in said(gpus, refused, user="glbob")
    assert gpus.sge.queue_states()[NODE] == ""
    assert gpus.locks(NODE) == {}
    told = reap(gpus, NODE)
    assert sorted(told.adopted) == sorted(map(str, jobs))
    assert {job: held(gpus, NODE, job) for job in jobs} == masks
    gpus.sge.qdel(str(refused))
    gpus.sge.wait_done(refused)
    gpus.sge.set_exechost(NODE, "gpu=99,gpuj=99,slots=99")
    try:
        more = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=4"), stdin=SLEEP)
        gpus.sge.wait_running(more)
        granted = held(gpus, NODE, more)
        seventh = sorted(
            p.name for p in (gpus.drivers / NODE / "proc/driver/nvidia/gpus").iterdir()
        )[7]
        assert seventh not in granted and len(granted) == 4
        assert "0 of 8 free" in refused_all(gpus, NODE, 0)
        gpus.sge.set_exechost(NODE, "gpu=99,gpuj=99,slots=99")
        end_carriers(gid)
        last = gpus.sge.submit("glbob", *on(NODE, "-l", "gpu=1"), stdin=SLEEP)
        gpus.sge.wait_running(last)
        assert held(gpus, NODE, last) == [seventh]
    finally:
        gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")
    assert {job: held(gpus, NODE, job) for job in jobs} == masks


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


def test_an_execd_that_dies_and_comes_back_changes_no_lock(gpus: Gpulock) -> None:
    job = started(gpus, THIRD, 3, waiting_for(gate_file(gpus, "go")))
    before = gpus.locks(THIRD).keys()
    gpus.sge.stop_execd(THIRD, kill=True)
    assert reap(gpus, THIRD).acts() == [("held", "alive")] * 3
    gpus.sge.start_execd(THIRD)
    assert gpus.locks(THIRD).keys() == before
    other = started(gpus, THIRD, 5)
    assert not set(held(gpus, THIRD, other)) & set(before)
    (gpus.sge.users["glalice"].home / "go").touch()
    wait_until(lambda: held(gpus, THIRD, job) == [] or None, why="its epilog")
    assert len(held(gpus, THIRD, other)) == 5
    # execd looks after what it did not start once a minute only: do not wait for it
    gpus.sge.qdel("-f", str(job))


def test_a_judge_that_cannot_see_holds_and_the_first_that_can_see_frees(gpus: Gpulock) -> None:
    job = started(gpus, NODE, 2)
    end_carriers(kill_shepherd(gpus, NODE, job))
    contained = reap(gpus, NODE, "unshare", "--pid", "--fork", "--mount-proc")
    assert contained.acts() == [("held", "unknown")] * 2
    assert "claimed in pid:" in contained.reasons()
    weak = reap(gpus, NODE, "setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all")
    assert weak.acts() == [("held", "unknown")] * 2, weak
    assert "cannot be seen" in weak.reasons()
    assert len(held(gpus, NODE, job)) == 2
    assert reap(gpus, NODE).acts() == [("freed", "dead")] * 2
    gpus.sge.wait_done(job)  # a qdel now would have qmaster wait half a minute


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


def test_many_short_jobs_share_no_device_and_leave_none_locked(gpus: Gpulock) -> None:
    """The jobs keep their own log: mask, start and end by the kernel's clock, appended."""
    number = 200 if SOAK else 40
    log = gpus.sge.lab / "shares"
    log.touch()
    log.chmod(0o666)
    text = (
        "read start rest </proc/uptime\nsleep 0.$((RANDOM % 4))\nread end rest </proc/uptime\n"
        f'echo "$JOB_ID.$SGE_TASK_ID $CUDA_VISIBLE_DEVICES $start $end" >>{log}\n'
    )
    program = script(gpus, "share", f"#!/bin/bash\n{text}")
    log.write_text("")
    kinds = (
        ("-l", "gpu=1"),
        ("-l", "gpu=2"),
        ("-l", "gpuj=3"),
        ("-pe", "smp", "2", "-l", "gpu=1"),
    )
    arrays = [
        gpus.sge.submit(user, *on(NODE, "-t", f"1-{number // 8}", *kind), str(program))
        for user in ("glalice", "glbob")
        for kind in kinds
    ]
    for job in arrays:
        gpus.sge.wait_done(job)
    # on a node where processes come and go all the time a release may leave a lock to the reaper
    left = gpus.locks(NODE)
    assert all(record.draining for record in left.values())
    assert reap(gpus, NODE).acts() == [("freed", "dead")] * len(left)
    assert gpus.locks(NODE) == {}
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == len({line[0] for line in lines}) == number // 8 * 8
    uses = sorted(
        (float(start), float(finish), device)
        for _, mask, start, finish in lines
        for device in mask.split(",")
    )
    overlaps = [
        (one, two)
        for number, one in enumerate(uses)
        for two in uses[number + 1 :]
        if one[2] == two[2] and two[0] < one[1]
    ]
    assert overlaps == []
    assert {len(mask.split(",")) for _, mask, _, _ in lines} == {1, 2, 3}
    assert len({device for _, _, device in uses}) > 2
    assert gpus.sge.queue_states()[NODE] == ""
