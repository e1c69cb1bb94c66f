# SPDX-License-Identifier: Apache-2.0
"""The crash matrix on a real Slurm with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an Epilog, or with one that comes too early. What is freed is
held against a witness of its own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

from tests.labs.common.installed import gate_file, shut_gate, waiting_for
from tests.labs.daemon.daemon_lab import (
    Daemon,
    assert_freed,
    assert_held,
    assert_over,
    daemon_on,
)
from tests.labs.daemon.daemon_witness import Claim, Witness
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, stops
from tests.labs.slurm.jobs import SLEEP, started
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import (
    EXTRA,
    MORE,
    NODE,
    TWO,
    by_gpulock,
)
from tests.labs.slurm.processes import hook_runs
from tests.labs.slurm.test_faults import forget
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
# slurmctld asks a slurmd again when twice MessageTimeout and KillWait are over; that one answers
# for an Epilog that it has begun once as for one that is over (22.05, `_list_find_job_old`)
UNASKED = {**EXTRA, "KillWait": "120"}
IMPATIENT = {"extra": {**EXTRA, "UnkillableStepTimeout": "8", "PrologEpilogTimeout": "15"}}


@pytest.fixture
def hooks(slurm_installation: Gpulock) -> Stops:
    """Give a test hooks that it can stop."""
    return stops(slurm_installation)


@pytest.fixture
def setup() -> dict[str, Any]:
    """Give a test the lab's Slurm as it is for most of them."""
    return {}


@pytest.fixture
def slurm_gpus(
    slurm_installation: Gpulock, hooks: Stops, setup: dict[str, Any]
) -> Generator[Gpulock]:
    """Give a test fresh nodes on which gpulock chooses; Slurm is not started anew for each."""
    whole = {"extra": EXTRA, "hooks": hooks.hooks, "order": MORE, **setup}
    by_gpulock(slurm_installation, **whole)
    yield slurm_installation
    slurm_installation.slurm.recover()


@pytest.fixture
def daemon(slurm_gpus: Gpulock) -> Generator[Daemon]:
    """Give a test a gpulockd on NODE."""
    with daemon_on(slurm_gpus, NODE) as daemon:
        yield daemon


def begun(gpus: Gpulock, daemon: Daemon, *words: str, script: str = "") -> tuple[JobId, Claim]:
    """Start a job of two GPUs; return it with its claim once gpulockd saw its steps."""
    job = started(gpus, NODE, TWO, *words, script=script or SLEEP)
    wait_until(lambda: len(gpus.slurm.steps(job, NODE)) >= 2, why="its two steps")
    daemon.goes_round()
    return job, daemon.claim(job)


def forget_completing(gpus: Gpulock, job: JobId) -> None:
    """Let slurmctld give up a job that waits for an Epilog's end, not after 70 seconds."""
    gpus.slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=test")
    gpus.slurm.wait_done(job)
    gpus.slurm.resume_node(NODE)


# --- Slurm is started anew for these --------------------------------------------------------------


@pytest.mark.parametrize("setup", [IMPATIENT])
def test_an_epilog_that_slurmd_ends_at_the_gate_is_made_up_for(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        with shut_gate(slurm_gpus, NODE):
            slurm.scancel(job)
            slurm.wait_settled(job)
            assert slurm.wait_node(NODE, "DRAIN") == "Epilog error"
            assert claim.locked() == claim.devices
        slurm.wait_stepless(job)
        wait_until(lambda: not hook_runs("epilog_slurmd"), why="the killed Epilog to end")
        witness.never_free_too_soon(assert_freed(daemon, claim, "slurmctld says CANCELLED"))


# --- the Epilog does not run ----------------------------------------------------------------------


@pytest.mark.parametrize("setup", [{"extra": UNASKED}])
def test_an_epilog_that_dies_with_its_slurmd_is_made_up_for_when_slurmctld_gave_up(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        hooks.set("Epilog", NODE, "before")
        slurm.scancel(job)
        epilog = hooks.wait("Epilog", NODE, "before", job)
        slurm.stop_slurmd(NODE, kill=True)
        assert_held(daemon, claim, "slurmctld says COMPLETING")
        os.killpg(epilog, signal.SIGKILL)
        hooks.go("Epilog", NODE, "before")
        wait_until(lambda: not hook_runs("epilog_slurmd"), why="the Epilog to end")
        assert_held(daemon, claim, "slurmctld says COMPLETING")
        slurm.start_slurmd(NODE)
        assert_held(daemon, claim, "slurmctld says COMPLETING")
        forget_completing(slurm_gpus, job)
        witness.never_free_too_soon(assert_freed(daemon, claim, "slurmctld says "))


def test_a_job_that_ends_while_slurmctld_is_down_is_held_until_it_is_back(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm, go = slurm_gpus.slurm, gate_file(slurm_gpus, "go")
    job, claim = begun(slurm_gpus, daemon, script=waiting_for(go))
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        slurm.stop_slurmctld()
        assert_held(daemon, claim, "step daemon")
        go.touch()
        wait_until(lambda: not slurm.job_processes(job, NODE), why="the job's end")
        # they wait for slurmctld's word, the script's as long as it tries to tell of the end
        daemons = {step.name: step.pid for step in slurm.steps(job, NODE)}
        assert "extern" in daemons
        assert_held(daemon, claim, "step daemon")
        told = daemon.verdict(claim)
        assert told is not None
        assert told.proof in {f"step daemon {daemons[name]} ({name}) runs" for name in daemons}
        slurm.bring_back_slurmctld()
        slurm.wait_settled(job)
        assert "SLURM_JOB_GPUS" not in hooks.environ("Epilog", NODE, job)
        daemon.goes_round()
        witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))


def test_a_job_that_slurmctld_forgot_is_freed_once_nothing_of_it_is_left(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        forget(slurm_gpus, JobId(job + 1))
        daemon.goes_round()
        slurm.stop_slurmd(NODE)
        slurm.start_slurmd(NODE)  # it registers, and learns of an orphan
        wait_until(lambda: not slurm.steps(job, NODE), why="its steps to end")
        daemon.frees(claim.locked)
        daemon.goes_round()
        assert daemon.verdict(claim) is None
        (line,) = [line for line in daemon.history() if line["token"] == claim.token]
        # with two orphan steps, slurmd mostly runs no Epilog at all
        assert line["how"] == "reap" or hooks.has_run("Epilog", NODE, job)
        witness.never_free_too_soon(line)
