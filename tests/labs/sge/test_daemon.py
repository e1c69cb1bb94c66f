# SPDX-License-Identifier: Apache-2.0
"""The crash matrix on a real Grid Engine with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an epilog. What is freed is held against a witness of its
own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from gpulock.simulate.node import write_simulated_node
from tests.labs.common.installed import driver_settings
from tests.labs.common.processes import children_of, end, running
from tests.labs.daemon.daemon_lab import (
    CONTAINED,
    WITHOUT_PTRACE,
    Daemon,
    assert_freed,
    assert_held,
    assert_over,
    assert_over_by_boot,
    daemon_on,
    restless,
)
from tests.labs.daemon.daemon_witness import Claim, Witness
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock
from tests.labs.sge.jobs import (
    DAEMONISES,
    SOAK,
    at_gate,
    carriers,
    empty,
    end_carriers,
    gate_file,
    group_of,
    hook_of,
    on,
    other_boot,
    script,
    shut_gate,
    sleepers,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.labs.sge.test_ends import SLEEP, kill_shepherd, started
from tests.labs.slurm.journal import Journal, doubles
from tests.support.wait import LabError, let_work, wait_ended, wait_until

pytestmark = pytest.mark.lab
NODE, OTHER, THIRD = NODES
NOBODY = "its shepherd is gone, no process carries its group"
FOUR = 4


@pytest.fixture
def daemon(gpus: Gpulock) -> Generator[Daemon]:
    """Give a test a gpulockd on NODE."""
    with daemon_on(gpus, NODE) as daemon:
        yield daemon


def living(gpus: Gpulock, job: JobId) -> list[int]:
    """Return the processes that carry a job's group."""
    gid = group_of(gpus, NODE, job)
    return wait_until(lambda: carriers(gid) or None, why=f"processes of job {job}")


def sleeper(gpus: Gpulock, job: JobId) -> list[int]:
    """Return the one process that a job is for good."""
    return sleepers(group_of(gpus, NODE, job), 1)


def shepherd_of(gpus: Gpulock, job: JobId) -> int | None:
    """Return a job's shepherd, None where there is none yet."""
    with contextlib.suppress(LabError, OSError, ValueError):
        return gpus.sge.shepherd_pid(job)
    return None


# --- the shepherd is killed -----------------------------------------------------------------------


def test_what_a_killed_shepherd_left_keeps_the_devices_until_its_last_process_is_gone(
    gpus: Gpulock, daemon: Daemon
) -> None:
    job = started(gpus, NODE, 2, DAEMONISES)
    claim, pids = daemon.claim(job), sleepers(group_of(gpus, NODE, job), 2)
    with Witness(claim, pids) as witness:
        kill_shepherd(gpus, NODE, job)
        for pid in pids:
            assert_held(daemon, claim, "runs without a shepherd")
            end([pid])
        witness.never_free_too_soon(assert_freed(daemon, claim, NOBODY))


def test_a_shepherd_that_dies_after_all_its_processes_is_the_last_that_holds(
    gpus: Gpulock, daemon: Daemon
) -> None:
    job = started(gpus, NODE, 2)
    claim, pids, shepherd = daemon.claim(job), sleeper(gpus, job), gpus.sge.shepherd_pid(job)
    os.kill(shepherd, signal.SIGSTOP)  # or it would run the epilog
    with Witness(claim, [*pids, shepherd]) as witness:
        end(pids)
        assert_held(daemon, claim, f"its shepherd {shepherd} runs")
        end([shepherd])
        witness.never_free_too_soon(assert_freed(daemon, claim, NOBODY))


def test_a_device_that_the_owner_has_open_elsewhere_is_freed_when_it_closes(
    gpus: Gpulock, daemon: Daemon
) -> None:
    """A process that left the job's group: its lock alone stays, and no claim gets the device."""
    job = started(gpus, NODE, 2)
    claim = daemon.claim(job)
    minor = {name: record.minor for name, record in gpus.locks(NODE).items()}[claim.devices[1]]
    device = gpus.drivers / NODE / "dev" / f"nvidia{minor}"
    with stranger_with(device, gpus.sge.users["glalice"].uid) as stranger:
        kill_shepherd(gpus, NODE, job)
        end_carriers(group_of(gpus, NODE, job))
        with Witness(Claim(claim.folder, claim.token, claim.devices[1:]), [stranger.pid]) as seen:
            for _ in range(2):
                daemon.goes_round()
                assert claim.locked() == claim.devices[1:], daemon.said()
            assert f"but process {stranger.pid} has " in daemon.said()
            assert daemon.history() == []
            stranger.kill()
            stranger.wait()
            daemon.goes_round()
            assert claim.locked() == (), daemon.said()
            seen.never_free_too_soon(assert_over(daemon, claim, NOBODY))


@contextlib.contextmanager
def stranger_with(device: Path, uid: int) -> Generator[subprocess.Popen[bytes]]:
    """Let a user's process of no job have a file open."""
    with device.open() as stdin:
        stranger = subprocess.Popen(["sleep", "600"], stdin=stdin, user=uid)
    try:
        yield stranger
    finally:
        stranger.kill()
        stranger.wait()


# --- the epilog does not run ----------------------------------------------------------------------


def test_jobs_that_spoil_their_folder_or_output_are_freed_and_a_shepherd_that_hangs_is_not(
    gpus: Gpulock, daemon: Daemon
) -> None:
    home, go = gpus.sge.users["glalice"].home, gate_file(gpus, "go")
    ways = {
        "removed": 'rm -rf "$PWD"\n',
        "closed": 'chmod 0 "$PWD"\n',
        "folder": "rm -f $SGE_STDOUT_PATH; mkdir $SGE_STDOUT_PATH\n",
        "fifo": "rm -f $SGE_STDOUT_PATH; mkfifo $SGE_STDOUT_PATH\n",
    }
    jobs: dict[str, JobId] = {}
    for name, text in ways.items():
        folder = home / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.chown(folder, 27001, 27001)
        words = on(NODE, "-l", "gpu=1", "-N", name, "-wd", str(folder))
        jobs[name] = gpus.sge.submit("glalice", *words, stdin=f"{waiting_for(go)}{text}")
    for job in jobs.values():
        gpus.sge.wait_running(job)
    claims = {name: daemon.claim(job) for name, job in jobs.items()}
    with contextlib.ExitStack() as stack:
        seen = {
            name: stack.enter_context(Witness(claims[name], living(gpus, job)))
            for name, job in jobs.items()
        }
        hanging = gpus.sge.shepherd_pid(jobs["fifo"])
        go.touch()
        for name in ("removed", "closed", "folder"):
            gpus.sge.wait_state(jobs[name], "", "Eqw")
            seen[name].never_free_too_soon(assert_freed(daemon, claims[name], NOBODY))
        wait_until(lambda: not carriers(group_of(gpus, NODE, jobs["fifo"])), why="the job's end")
        assert_held(daemon, claims["fifo"], f"its shepherd {hanging} runs")
        forks = wait_until(lambda: children_of(hanging) or None, why="its epilog to hang")
        stack.callback(end, forks)
        end([hanging])
        seen["fifo"].never_free_too_soon(assert_freed(daemon, claims["fifo"], NOBODY))
        assert all(map(running, forks))


def test_an_epilog_that_is_killed_at_the_gate_or_is_missing_is_made_up_for(
    gpus: Gpulock, daemon: Daemon
) -> None:
    killed = started(gpus, NODE, 2)
    gpus.sge.set_hooks(gpus.line("prolog"), "root@/nonexistent/epilog")
    missing = started(gpus, NODE, 1)
    claims = {job: daemon.claim(job) for job in (killed, missing)}
    pids = {job: sleeper(gpus, job) for job in claims}
    with (
        Witness(claims[killed], pids[killed]) as first,
        Witness(claims[missing], pids[missing]) as second,
    ):
        with shut_gate(gpus, NODE):
            shepherd = gpus.sge.shepherd_pid(killed)
            gpus.sge.qdel(str(killed))
            hook = hook_of(gpus, shepherd)
            wait_until(lambda: at_gate(hook), why="the epilog to wait at the gate")
            end([hook])
            gpus.sge.wait_settled(killed)
            assert claims[killed].locked() == claims[killed].devices
        first.never_free_too_soon(assert_freed(daemon, claims[killed], NOBODY))
        gpus.sge.qdel(str(missing))
        gpus.sge.wait_done(missing)
        second.never_free_too_soon(assert_freed(daemon, claims[missing], NOBODY))


def test_a_job_deleted_by_force_while_its_execd_is_gone_is_freed_when_it_ends(
    gpus: Gpulock, daemon: Daemon
) -> None:
    job = started(gpus, NODE, 2)
    claim, pids = daemon.claim(job), sleeper(gpus, job)
    with Witness(claim, pids) as witness:
        # stopped first: qmaster 8.1.9 may crash when it deletes what runs below a broken connection
        os.kill(gpus.sge.execd_pid(NODE), signal.SIGSTOP)
        gpus.sge.qdel("-f", str(job))
        gpus.sge.stop_execd(NODE, kill=True)
        try:
            assert_held(daemon, claim, "its shepherd")
            kill_shepherd(gpus, NODE, job)
            assert_held(daemon, claim, "runs without a shepherd")
            end(pids)
            witness.never_free_too_soon(assert_freed(daemon, claim, NOBODY))
        finally:
            gpus.sge.start_execd(NODE)


# --- the prolog is cut short ----------------------------------------------------------------------


def test_what_a_prolog_that_was_cut_short_leaves_is_nobodys(gpus: Gpulock, daemon: Daemon) -> None:
    locks = daemon.lock_dir / "locks"
    name = min(path.name for path in (gpus.drivers / NODE / "proc/driver/nvidia/gpus").iterdir())
    (locks / name).mkdir()  # as one leaves it that is killed behind its first mkdir
    daemon.frees((locks / name).exists)
    assert f"freed {name}: a claim cut short" in daemon.said()
    with shut_gate(gpus, NODE):
        job = gpus.sge.submit("glalice", *on(NODE, "-l", "gpu=2"), stdin=SLEEP)
        shepherd = wait_until(lambda: shepherd_of(gpus, job), why="its shepherd")
        hook = hook_of(gpus, shepherd)
        wait_until(lambda: at_gate(hook), why="the prolog to wait at the gate")
        end([shepherd])
    wait_ended([hook], why="the prolog to end")
    daemon.goes_round()
    assert gpus.locks(NODE) == {}
    gpus.sge.wait_done(job)


# --- the node, or its LOCK_DIR, is lost -----------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["LOCK_DIR kept", "LOCK_DIR wiped"])
def test_after_a_reboot_the_first_round_frees_what_was_held_before(
    gpus: Gpulock, kept: bool
) -> None:
    with daemon_on(gpus, NODE) as daemon:
        job = started(gpus, NODE, GPUS)
        claim = daemon.claim(job)
        daemon.crash()
        gpus.sge.stop_execd(NODE, kill=True)
        end_carriers(kill_shepherd(gpus, NODE, job))
        if not kept:
            empty(daemon.lock_dir)
        with other_boot(gpus, NODE):
            daemon.restart()
            assert claim.locked() == ()
            assert_over_by_boot(daemon, claim, kept)
            gpus.sge.start_execd(NODE)
            gpus.sge.qdel("-f", str(job))
            later = started(gpus, NODE, GPUS)
            assert_held(daemon, daemon.claim(later), "its shepherd")
            gpus.sge.qdel(str(later))
            gpus.sge.wait_done(later)
            daemon.goes_round()
            told = [(line["job_id"], line["how"]) for line in daemon.history()]
            assert told == [(str(job), "reap"), (str(later), "epilog")]


def test_locks_that_are_lost_are_back_at_once_for_who_lives_and_for_nobody_else(
    gpus: Gpulock, daemon: Daemon
) -> None:
    job, ended = started(gpus, NODE, 2), started(gpus, NODE, 1)
    claim, pids = daemon.claim(job), sleeper(gpus, job)
    others = [*sleeper(gpus, ended), gpus.sge.shepherd_pid(ended)]
    with daemon.stopped():  # else it would put them back while they are being removed
        empty(daemon.lock_dir)
    wait_until(lambda: len(gpus.locks(NODE)) == 3, why="all locks")
    assert claim.locked() == claim.devices
    daemon.crash()
    empty(daemon.lock_dir)
    end(reversed(others))
    daemon.restart()
    assert claim.locked() == claim.devices
    assert len(gpus.locks(NODE)) == 2
    told = [(line["job_id"], line["how"]) for line in daemon.history()]
    assert told == [(str(ended), "unknown")]  # nothing but its record was left
    assert f"restored {' '.join(claim.devices)} of job {job}" in daemon.said()
    with Witness(claim, pids) as witness:
        kill_shepherd(gpus, NODE, job)
        assert_held(daemon, claim, "runs without a shepherd")
        end(pids)
        witness.never_free_too_soon(assert_freed(daemon, claim, NOBODY))


# --- who only looks dead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "why"),
    [(WITHOUT_PTRACE, "cannot be seen"), (CONTAINED, "claimed in pid:")],
    ids=["without CAP_SYS_PTRACE", "in another pid namespace"],
)
def test_a_gpulockd_that_cannot_see_frees_nothing_and_the_next_one_does(
    gpus: Gpulock, around: tuple[str, ...], why: str
) -> None:
    with daemon_on(gpus, NODE, *around) as blind:
        job = started(gpus, NODE, 2)
        claim = blind.claim(job)
        blind.goes_round()
        end_carriers(kill_shepherd(gpus, NODE, job))
        assert_held(blind, claim, why, "unknown")
        assert blind.freed() == []
    with daemon_on(gpus, NODE) as daemon:
        assert_over(daemon, claim, NOBODY)


def test_daemons_that_come_and_go_take_no_device_away_and_give_it_back_once(
    gpus: Gpulock, daemon: Daemon
) -> None:
    """execd killed and back, qmaster killed; the job ends in between, with an epilog."""
    go = gate_file(gpus, "go")
    job, other = started(gpus, NODE, 2, waiting_for(go)), started(gpus, NODE, 1)
    claim, pids = daemon.claim(job), living(gpus, job)
    with Witness(claim, pids) as witness:
        gpus.sge.stop_execd(NODE, kill=True)
        assert_held(daemon, claim, "its shepherd")
        gpus.sge.stop_qmaster(kill=True)
        try:
            assert_held(daemon, claim, "its shepherd")
            go.touch()
            wait_until(lambda: not claim.locked(), why="the epilog")
            daemon.goes_round()
            witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))
        finally:
            gpus.sge.start_qmaster()
            gpus.sge.start_execd(NODE)
    assert_held(daemon, daemon.claim(other), "its shepherd")
    assert daemon.freed() == []
    gpus.sge.qdel("-f", str(job), str(other))


# --- gpulockd itself ------------------------------------------------------------------------------


def test_a_gpulockd_that_is_killed_again_and_again_loses_nothing_and_tells_nothing_twice(
    gpus: Gpulock, daemon: Daemon
) -> None:
    times = random.Random(5)
    stays, ends, deleted = (started(gpus, NODE, 2) for _ in range(3))
    claims = {job: daemon.claim(job) for job in (stays, ends, deleted)}
    pids = sleeper(gpus, ends)
    kill_shepherd(gpus, NODE, ends)
    number = 200 if SOAK else 8
    with (
        Witness(claims[ends], pids) as witness,
        Witness(claims[stays], sleeper(gpus, stays)) as other,
    ):
        for count in range(number):
            daemon.crash()
            if count == number // 2:
                assert claims[ends].locked() == claims[ends].devices
                end(pids)
                gpus.sge.qdel(str(deleted))
            daemon.launch()
            let_work(times.uniform(0.1, 0.4))
        daemon.crash()
        gpus.sge.wait_done(deleted)
        daemon.restart()
        assert_held(daemon, claims[stays], "its shepherd")
        lines = {line["token"]: line for line in daemon.history()}
        assert len(daemon.history()) == len(lines) == 2
        assert lines[claims[deleted].token]["how"] == "epilog"
        assert lines[claims[ends].token]["how"] == "reap"
        witness.never_free_too_soon(lines[claims[ends].token])
        assert [event for event in other.order if "freed" in event] == []


def test_gpulockd_beside_prologs_and_epilogs_takes_nobodys_device(gpus: Gpulock) -> None:
    number = 200 if SOAK else 20
    tree = gpus.drivers / "four"
    shutil.rmtree(tree, ignore_errors=True)
    write_simulated_node(tree, "dgx1", FOUR)
    gpus.configure(NODE, EXPECTED_GPUS=str(FOUR), **driver_settings(tree))
    gpus.sge.set_exechost(NODE, f"gpu={FOUR},gpuj={FOUR},slots=16")
    journal = Journal(gpus.sge.lab / "journal")
    journal.clear()
    text = (
        "#!/bin/bash\n"
        "SLURM_JOB_ID=$((JOB_ID * 1000 + SGE_TASK_ID)) SLURMD_NODENAME=$HOSTNAME\n"
        f"{journal.around('sleep 0.$((RANDOM % 4))')}"
    )
    job_script = str(script(gpus, "holder", text))
    try:
        with daemon_on(gpus, NODE) as daemon, restless(daemon) as rounds:
            arrays = [
                gpus.sge.submit(user, *on(NODE, "-t", f"1-{number // 4}", *kind), job_script)
                for user in ("glalice", "glbob")
                for kind in (("-l", "gpu=1"), ("-l", "gpu=2"))
            ]
            for job in arrays:
                gpus.sge.wait_done(job)
            gpus.wait_free()  # what an epilog left draining is freed as well
            wait_until(lambda: len(daemon.history()) >= number or None, why="their history")
        assert len(rounds) > number
        holds = journal.holds()
        assert len(holds) == number
        assert doubles(holds) == []
        assert sorted({len(hold.devices) for hold in holds}) == [1, 2]
        lines = daemon.history()
        ran = sorted((line["job_id"], line["task_id"]) for line in lines)
        assert len(ran) == len(set(ran)) == len({line["token"] for line in lines}) == number
        assert {line["how"] for line in lines} <= {"epilog", "reap", "claim"}
        reaped = {line["proof"] for line in lines if line["how"] != "epilog"}
        assert reaped <= {"released by its job, whose processes are gone"}
    finally:
        gpus.sge.set_exechost(NODE, f"gpu={GPUS},gpuj={GPUS},slots=16")
