# SPDX-License-Identifier: Apache-2.0
"""The crash matrix with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an epilog. What is freed is held against a witness of its
own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal

import pytest

from tests.labs.both.conftest import SGE, SLURM
from tests.labs.both.sge_site import SgeSite
from tests.labs.both.site import DAEMONISES, SLEEP, Site
from tests.labs.both.slurm_site import SlurmSite
from tests.labs.common.installed import SOAK, shut_gate
from tests.labs.common.journal import Journal, doubles
from tests.labs.common.processes import children_of, end, running, wait_at_gate
from tests.labs.daemon.daemon_lab import (
    CONTAINED,
    WITHOUT_PERIOD,
    WITHOUT_PTRACE,
    Daemon,
    assert_freed,
    assert_held,
    assert_over,
    daemon_on,
    restless,
)
from tests.labs.daemon.daemon_witness import Claim, Witness
from tests.labs.sge.jobs import on
from tests.labs.sge.lab import JobId as SgeJobId
from tests.labs.slurm.lab import JobId, Slurm
from tests.labs.slurm.modes import EXTRA, MORE, NODE, by_gpulock
from tests.labs.slurm.processes import hook_runs
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NUMBER = 200 if SOAK else 20
ON_SGE = pytest.mark.parametrize("scheduler", [SGE], indirect=True, scope="module")
ON_SLURM = pytest.mark.parametrize("scheduler", [SLURM], indirect=True, scope="module")
# slurmctld asks a slurmd again when twice MessageTimeout and KillWait are over; that one answers
# for an Epilog that it has begun once as for one that is over (22.05, `_list_find_job_old`)
UNASKED = {**EXTRA, "KillWait": "120"}


def begun(site: Site, daemon: Daemon, script: str = SLEEP) -> tuple[int, Claim]:
    """Start a job; return it with its claim once gpulockd has seen its processes."""
    job = site.start(2, script)
    daemon.goes_round()
    return job, daemon.claim(job)


# --- what runs without its supervisors ------------------------------------------------------------


def test_what_killed_supervisors_left_keeps_the_devices_until_its_last_process_is_gone(
    site: Site, daemon: Daemon
) -> None:
    job, claim = begun(site, daemon, script=DAEMONISES)
    pids = site.sleepers(job, 2)
    with Witness(claim, pids) as witness:
        site.kill_supervisors(job)
        assert_held(daemon, claim, site.left)
        site.conclude(job)
        for pid in pids:
            assert_held(daemon, claim, site.released)
            end([pid])
        witness.never_free_too_soon(assert_freed(daemon, claim, site.settled))


def test_the_end_of_a_job_wakes_gpulockd(site: Site) -> None:
    with daemon_on(site.gpus, site.node, program=WITHOUT_PERIOD) as daemon:
        job, _ = begun(site, daemon)
        site.leak(job)
        daemon.frees(lambda: site.held(job))


# --- the epilog does not run, or not whole --------------------------------------------------------


def test_an_epilog_that_is_killed_at_the_gate_is_made_up_for(site: Site, daemon: Daemon) -> None:
    job, claim = begun(site, daemon)
    with Witness(claim, site.processes(job)) as witness:
        with shut_gate(site.gpus, site.node):
            site.cancel(job)
            end([wait_at_gate("epilog")])
            site.wait_over(job)
            assert claim.locked() == claim.devices
        witness.never_free_too_soon(assert_freed(daemon, claim, site.leaked))


@ON_SGE
def test_jobs_that_spoil_their_folder_or_output_are_freed_and_a_shepherd_that_hangs_is_not(
    site: SgeSite, daemon: Daemon
) -> None:
    ways = {
        "removed": 'rm -rf "$PWD"\n',
        "closed": 'chmod 0 "$PWD"\n',
        "folder": "rm -f $SGE_STDOUT_PATH; mkdir $SGE_STDOUT_PATH\n",
        "fifo": "rm -f $SGE_STDOUT_PATH; mkfifo $SGE_STDOUT_PATH\n",
    }
    alice, (go, until_go) = site.sge.users[site.alice], site.waiting("go")
    jobs: dict[str, SgeJobId] = {}
    for name, text in ways.items():
        folder = alice.home / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.chown(folder, alice.uid, alice.uid)
        words = on(site.node, "-l", "gpu=1", "-N", name, "-wd", str(folder))
        script = f"#!/bin/bash\n{until_go}{text}"
        jobs[name] = site.sge.submit(site.alice, *words, stdin=script)
    for job in jobs.values():
        site.wait_running(job)
    claims = {name: daemon.claim(job) for name, job in jobs.items()}
    with contextlib.ExitStack() as stack:
        seen = {
            name: stack.enter_context(Witness(claims[name], site.processes(job)))
            for name, job in jobs.items()
        }
        hanging = site.sge.shepherd_pid(jobs["fifo"])
        go.touch()
        for name in ("removed", "closed", "folder"):
            site.sge.wait_state(jobs[name], "", "Eqw")
            seen[name].never_free_too_soon(assert_freed(daemon, claims[name], site.settled))
        wait_until(lambda: not site.processes(jobs["fifo"]), why="the job's end")
        assert_held(daemon, claims["fifo"], f"its shepherd {hanging} runs")
        forks = wait_until(lambda: children_of(hanging), why="its epilog to hang")
        stack.callback(end, forks)
        end([hanging])
        seen["fifo"].never_free_too_soon(assert_freed(daemon, claims["fifo"], site.settled))
        assert all(map(running, forks))


@ON_SLURM
def test_an_epilog_that_dies_with_its_slurmd_is_made_up_for_when_slurmctld_gave_up(
    any_site: SlurmSite,
) -> None:
    site, slurm, hooks = any_site, any_site.slurm, any_site.hooks
    by_gpulock(site.gpus, extra=UNASKED, hooks=hooks.hooks, order=MORE)
    with daemon_on(site.gpus, NODE) as daemon:
        job, claim = begun(site, daemon)
        with Witness(claim, site.processes(job)) as witness:
            hooks.set("Epilog", NODE, "before")
            site.cancel(job)
            epilog = hooks.wait("Epilog", NODE, "before", JobId(job))
            site.stop_daemon()
            assert_held(daemon, claim, "slurmctld says COMPLETING")
            os.killpg(epilog, signal.SIGKILL)
            hooks.go("Epilog", NODE, "before")
            wait_until(lambda: not hook_runs("epilog_slurmd"), why="the Epilog to end")
            assert_held(daemon, claim, "slurmctld says COMPLETING")
            site.start_daemon()
            assert_held(daemon, claim, "slurmctld says COMPLETING")
            # it gives up a job that waits for an Epilog's end, not after 70 seconds
            slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=test")
            slurm.wait_done(JobId(job))
            slurm.resume_node(NODE)
            witness.never_free_too_soon(assert_freed(daemon, claim, "slurmctld says "))


# --- the scheduler's daemons are away -------------------------------------------------------------


@ON_SLURM
def test_a_job_that_ends_while_slurmctld_is_down_is_held_until_it_is_back(
    site: SlurmSite, daemon: Daemon
) -> None:
    go, until_go = site.waiting("go")
    job, claim = begun(site, daemon, until_go)
    with Witness(claim, site.processes(job)) as witness:
        with site.controller_away():
            assert_held(daemon, claim, site.runs)
            go.touch()
            wait_until(lambda: not site.processes(job), why="the job's end")
            # they wait for slurmctld's word, the script's as long as it tries to tell of the end
            daemons = {step.name: step.pid for step in site.slurm.steps(JobId(job))}
            assert "extern" in daemons
            assert_held(daemon, claim, site.runs)
            told = daemon.verdict(claim)
            assert told is not None
            assert told.proof in {f"step daemon {daemons[name]} ({name}) runs" for name in daemons}
        site.wait_over(job)
        assert "SLURM_JOB_GPUS" not in site.hooks.environ("Epilog", NODE, JobId(job))
        daemon.goes_round()
        witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))


def forget(slurm: Slurm, job: int) -> None:
    """Start slurmctld without its state; the next job gets the id of `job`."""
    slurm.stop_slurmctld(kill=True)
    place = slurm.lab / "etc/slurm.conf"
    place.write_text(re.sub("(?m)^FirstJobId=.*", f"FirstJobId={job}", place.read_text()))
    for kept in (slurm.lab / "state").glob("job_state*"):  # the last id outlives `-c`
        kept.unlink()
    slurm.start_slurmctld("-c")


@ON_SLURM
def test_a_job_that_slurmctld_forgot_is_freed_once_nothing_of_it_is_left(
    site: SlurmSite, daemon: Daemon
) -> None:
    job, claim = begun(site, daemon)
    with Witness(claim, site.processes(job)) as witness:
        forget(site.slurm, job + 1)
        daemon.goes_round()
        site.slurm.stop_slurmd(NODE)
        site.start_daemon()  # it registers, and learns of an orphan
        wait_until(lambda: not site.slurm.steps(JobId(job), NODE), why="its steps to end")
        daemon.frees(claim.locked)
        daemon.goes_round()
        assert daemon.verdict(claim) is None
        (line,) = [line for line in daemon.history() if line["token"] == claim.token]
        # with two orphan steps, slurmd mostly runs no Epilog at all
        assert line["how"] == "reap" or site.hooks.has_run("Epilog", NODE, JobId(job))
        witness.never_free_too_soon(line)


# --- who only looks dead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "why"),
    [(WITHOUT_PTRACE, "cannot be seen"), (CONTAINED, "claimed in pid:")],
    ids=["without CAP_SYS_PTRACE", "in another pid namespace"],
)
def test_a_gpulockd_that_cannot_see_frees_nothing_and_the_next_one_does(
    site: Site, around: tuple[str, ...], why: str
) -> None:
    other = site.start(0)  # of the same user: it may have the devices open, for all that is seen
    with daemon_on(site.gpus, site.node, *around) as blind:
        job, claim = begun(site, blind)
        site.leak(job)
        assert_held(blind, claim, why, "unknown")
        assert blind.freed() == []
    with daemon_on(site.gpus, site.node) as daemon:
        assert_over(daemon, claim, site.leaked)
    site.end(other)


def test_daemons_of_the_scheduler_that_come_and_go_take_no_device_away(
    site: Site, daemon: Daemon
) -> None:
    job, claim = begun(site, daemon)
    with Witness(claim, site.processes(job)) as witness:
        site.stop_daemon()
        assert_held(daemon, claim, site.runs)
        with site.controller_away():
            assert_held(daemon, claim, site.runs)
        site.start_daemon()
        assert_held(daemon, claim, site.runs)
        assert (witness.order, daemon.freed()) == ([], [])


# --- gpulockd itself ------------------------------------------------------------------------------


def test_gpulockd_beside_prologs_and_epilogs_takes_nobodys_device(site: Site) -> None:
    site.configure(SLURM_WAIT="50")
    journal = Journal(site.gpus.cluster.lab / "journal")
    journal.clear()
    script = f"{site.names_itself}{journal.around('sleep 0.$((RANDOM % 4))')}"
    with daemon_on(site.gpus, site.node) as daemon, restless(daemon) as rounds:
        for user in (site.alice, site.bob):
            for gpus in (1, 2):
                site.submit(gpus, script, user=user, tasks=NUMBER // 4)
        site.wait_empty()
        site.gpus.wait_free()  # what an epilog left draining is freed as well
        wait_until(lambda: len(daemon.history()) >= NUMBER, why="their history")
    assert len(rounds) > NUMBER
    holds = journal.holds()
    assert len(holds) == NUMBER
    assert doubles(holds) == []
    assert {len(hold.devices) for hold in holds} == {1, 2}
    assert len({name for hold in holds for name in hold.devices}) >= 4
    lines = daemon.history()
    ran = {(line["job_id"], line["task_id"]) for line in lines}
    assert len(lines) == len(ran) == len({line["token"] for line in lines}) == NUMBER
    assert {line["how"] for line in lines} <= {"epilog", "reap", "claim"}
    reaped = {line["proof"] for line in lines if line["how"] != "epilog"}
    assert reaped <= {"released by its job, whose processes are gone"}
    assert site.in_service()
