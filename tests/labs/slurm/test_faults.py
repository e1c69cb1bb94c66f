# SPDX-License-Identifier: Apache-2.0
"""Hooks are cut short, or do not run: nothing is granted twice, nothing leaks."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import reap, shut_gate
from tests.labs.common.processes import running
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, When
from tests.labs.slurm.jobs import held, impatient, kill_steps, notes, started, wait_requeued
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import EXTRA, MORE, NODE, SLURM_CONF, TWO, by_gpulock
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


def test_a_prolog_that_slurmd_ends_at_the_gate_leaves_nothing(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    extra = {**EXTRA, "PrologEpilogTimeout": "15"}
    by_gpulock(slurm_gpus, hooks=hooks.hooks, extra=extra, order=MORE)
    slurm = slurm_gpus.slurm
    first = started(slurm_gpus, NODE, "--gres=gpu:1")
    with shut_gate(slurm_gpus, NODE):
        job = slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
        assert slurm.wait_node(NODE, "DRAIN") == "Prolog error"
        wait_requeued(slurm_gpus, job)
    assert {record.job_id for record in slurm_gpus.locks(NODE).values()} == {str(first)}
    assert notes(slurm_gpus, NODE) == [f"{NODE}.{first}"]
    slurm.resume_node(NODE)
    hooks.set("Prolog", NODE, "after")
    late = slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
    hooks.wait("Prolog", NODE, "after", late)
    assert len(held(slurm_gpus, late, NODE)) == 2
    slurm.wait_node(NODE, "DRAIN")
    wait_requeued(slurm_gpus, late)
    hooks.go("Prolog", NODE, "after")
    assert {record.job_id for record in slurm_gpus.locks(NODE).values()} == {str(first)}
    assert slurm.said(job) + slurm.said(late) == ""


def stopped_in_prolog(gpus: Gpulock, hooks: Stops, when: When) -> JobId:
    """Start a job whose Prolog stops before or after gpulock's."""
    by_gpulock(gpus, hooks=hooks.hooks, extra=EXTRA, order=MORE)
    hooks.set("Prolog", NODE, when)
    job = gpus.slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
    hooks.wait("Prolog", NODE, when, job)
    return job


@pytest.mark.short
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_cancelled_during_its_prolog_keeps_nothing(
    slurm_gpus: Gpulock, hooks: Stops, when: When
) -> None:
    slurm, job = slurm_gpus.slurm, stopped_in_prolog(slurm_gpus, hooks, when)
    assert len(slurm_gpus.locks(NODE)) == (2 if when == "after" else 0)
    slurm.scancel(job)
    slurm.wait_logged(NODE, job, "credential for {} revoked")  # before, it starts the script
    hooks.go("Prolog", NODE, when)
    assert slurm.wait_settled(job) == "CANCELLED"
    assert slurm_gpus.locks(NODE) == {}
    assert notes(slurm_gpus, NODE) == []
    assert slurm.said(job) == ""


@pytest.mark.short
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slurmd_killed_during_the_prolog_leaves_locks_that_live_as_long_as_the_job(
    slurm_gpus: Gpulock, hooks: Stops, when: When
) -> None:
    slurm, job = slurm_gpus.slurm, stopped_in_prolog(slurm_gpus, hooks, when)
    slurm.stop_slurmd(NODE, kill=True)
    if when == "after":
        told = reap(slurm_gpus, NODE)
        assert told.acts() == [("held", "alive")] * 2
        assert "slurmctld says " in told.reasons()
    hooks.go("Prolog", NODE, when)
    wait_until(lambda: len(held(slurm_gpus, job, NODE)) == 2, why="the orphan to claim")
    slurm.start_slurmd(NODE)
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("held", "alive")] * 2
    with impatient(slurm_gpus, NODE):
        other = slurm.submit("slbob", "-w", NODE, "--gres=gpu:4", script="echo ran\n")
        wait_requeued(slurm_gpus, other)
    assert "2 of 4 free" in slurm.said(other)
    slurm.scancel(other)
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


# --- what a job leaves ----------------------------------------------------------------------------

DEAF = "trap '' TERM\nwhile :; do sleep 1; done\n"


@pytest.mark.short
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_what_a_killed_step_daemon_leaves_is_ended_and_a_neighbour_is_not(
    slurm_gpus: Gpulock, proctrack: str
) -> None:
    """LEFTOVER_PROCESSES: what outlives its step daemon, and is deaf to TERM."""
    keys, extra = {"LEFTOVER_PROCESSES": "kill"}, {**SLURM_CONF, "KillWait": "1"}
    by_gpulock(slurm_gpus, keys, extra=extra, proctrack=proctrack)
    slurm = slurm_gpus.slurm
    neighbour = started(slurm_gpus, NODE, "--gres=gpu:1")
    others = slurm.job_processes(neighbour, NODE)
    job = started(slurm_gpus, NODE, TWO, script=DEAF)
    left = kill_steps(slurm_gpus, job, NODE)
    assert left != []
    slurm.scancel(job)
    slurm.wait_settled(job)  # the Epilog ran
    assert not any(map(running, left))
    assert held(slurm_gpus, job, NODE) == []
    assert others != [] and slurm.job_processes(neighbour, NODE) == others
    assert len(held(slurm_gpus, neighbour, NODE)) == 1
