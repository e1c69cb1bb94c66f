# SPDX-License-Identifier: Apache-2.0
"""The crash matrix on a real Grid Engine with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an epilog. What is freed is held against a witness of its
own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator

import pytest

from tests.labs.common.installed import gate_file, shut_gate
from tests.labs.common.processes import children_of, end, running
from tests.labs.daemon.daemon_lab import (
    Daemon,
    assert_freed,
    assert_held,
    assert_over,
    daemon_on,
)
from tests.labs.daemon.daemon_witness import Witness
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import (
    at_gate,
    carriers,
    group_of,
    hook_of,
    on,
    sleepers,
    started,
    waiting_for,
)
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
NODE = NODES[0]
NOBODY = "its shepherd is gone, no process carries its group"


@pytest.fixture
def daemon(gpus: Gpulock) -> Generator[Daemon]:
    """Give a test a gpulockd on NODE."""
    with daemon_on(gpus, NODE) as daemon:
        yield daemon


def living(gpus: Gpulock, job: JobId) -> list[int]:
    """Return the processes that carry a job's group."""
    gid = group_of(gpus, NODE, job)
    return wait_until(lambda: carriers(gid), why=f"processes of job {job}")


def sleeper(gpus: Gpulock, job: JobId) -> list[int]:
    """Return the one process that a job is for good."""
    return sleepers(group_of(gpus, NODE, job), 1)


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
        forks = wait_until(lambda: children_of(hanging), why="its epilog to hang")
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


# --- Grid Engine's daemons are away ---------------------------------------------------------------


def test_a_shepherd_whose_execd_and_qmaster_are_away_runs_its_epilog(
    gpus: Gpulock, daemon: Daemon
) -> None:
    go = gate_file(gpus, "go")
    job = started(gpus, NODE, 2, waiting_for(go))
    claim, pids = daemon.claim(job), living(gpus, job)
    with Witness(claim, pids) as witness:
        gpus.sge.stop_execd(NODE, kill=True)
        gpus.sge.stop_qmaster(kill=True)
        try:
            go.touch()
            wait_until(lambda: not claim.locked(), why="the epilog")
            daemon.goes_round()
            witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))
        finally:
            gpus.sge.start_qmaster()
            gpus.sge.start_execd(NODE)
    # execd looks after what it did not start once a minute only: do not wait for it
    gpus.sge.qdel("-f", str(job))
