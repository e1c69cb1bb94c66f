# SPDX-License-Identifier: Apache-2.0
"""However a Slurm job, a step daemon or a slurmd ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import reap
from tests.labs.common.processes import command_of, end
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, When, stops
from tests.labs.slurm.jobs import (
    SHOW_MASK,
    held,
    impatient,
    notes,
    record_of,
    wait_detached,
    wait_requeued,
)
from tests.labs.slurm.lab import ENDED, JobId
from tests.labs.slurm.modes import (
    EXTRA,
    MORE,
    NODE,
    TWO,
    by_gpulock,
    wait_said,
)
from tests.labs.slurm.releases import FORGETS
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab


@pytest.fixture
def hooks(slurm_gpus: Gpulock) -> Stops:
    """Give a test, in which gpulock chooses, hooks that it can stop."""
    found = stops(slurm_gpus)
    by_gpulock(slurm_gpus, hooks=found.hooks, extra=EXTRA, order=MORE)
    return found


def refused(gpus: Gpulock, count: int = 4) -> str:
    """Submit a job of another user that is refused; return what it was told."""
    with impatient(gpus, NODE):
        job = gpus.slurm.submit("slbob", "-w", NODE, f"--gres=gpu:{count}", script="echo ran\n")
        wait_requeued(gpus, job)
    assert not any(gpus.held_by(job).values())
    gpus.slurm.scancel(job)
    return gpus.slurm.said(job)


@pytest.mark.short
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_cancelled_during_its_prolog_keeps_nothing(
    slurm_gpus: Gpulock, hooks: Stops, when: When
) -> None:
    slurm = slurm_gpus.slurm
    hooks.set("Prolog", NODE, when)
    job = slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
    hooks.wait("Prolog", NODE, when, job)
    assert len(slurm_gpus.locks(NODE)) == (2 if when == "after" else 0)
    slurm.scancel(job)
    slurm.wait_revoked(job, NODE)
    hooks.go("Prolog", NODE, when)
    assert slurm.wait_settled(job) == "CANCELLED"
    assert slurm_gpus.locks(NODE) == {}
    assert notes(slurm_gpus, NODE) == []
    assert slurm.said(job) == ""


# --- what lives on --------------------------------------------------------------------------------


def test_a_new_run_waits_for_the_processes_of_the_earlier_one(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    slurm = slurm_gpus.slurm
    text = f'{SHOW_MASK}[ -n "$SLURM_RESTART_COUNT" ] || (setsid sleep 601 &)\nexec sleep 600\n'
    job = slurm.submit("slalice", "--requeue", "-w", NODE, TWO, script=text)
    wait_said(slurm_gpus, job, "mask=0,1.")
    left = wait_until(
        lambda: [p for p in slurm.job_processes(job, NODE) if "sleep 601" in command_of(p)] or None,
        why="its child",
    )
    wait_detached(slurm_gpus, job, NODE, left[0])
    slurm.requeue(job)
    wait_requeued(slurm_gpus, job)
    assert [record.draining for record in slurm_gpus.locks(NODE).values()] == [1, 1]
    token = record_of(slurm_gpus, job, NODE).token
    slurm.begin(job)
    wait_requeued(slurm_gpus, job, times=2)
    assert "is still held by an earlier run: process" in slurm.said(job)
    assert record_of(slurm_gpus, job, NODE).token == token
    end(left)
    slurm.begin(job)
    wait_said(slurm_gpus, job, "mask=0,1.")
    record = record_of(slurm_gpus, job, NODE)
    assert (record.restart, record.draining) == (2, 0) and record.token != token
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


# --- hooks that do not run, or not to their end ---------------------------------------------------


@pytest.mark.short
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slurmd_killed_during_the_prolog_leaves_locks_that_live_as_long_as_the_job(
    slurm_gpus: Gpulock, hooks: Stops, when: When
) -> None:
    slurm = slurm_gpus.slurm
    hooks.set("Prolog", NODE, when)
    job = slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
    hooks.wait("Prolog", NODE, when, job)
    slurm.stop_slurmd(NODE, kill=True)
    if when == "after":
        told = reap(slurm_gpus, NODE)
        assert told.acts() == [("held", "alive")] * 2
        assert "its prolog or epilog" in told.reasons()
    hooks.go("Prolog", NODE, when)
    wait_until(lambda: len(held(slurm_gpus, job, NODE)) == 2, why="the orphan to claim")
    slurm.start_slurmd(NODE)
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("held", "alive")] * 2
    assert "2 of 4 free" in refused(slurm_gpus)
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


def second_run(gpus: Gpulock, hooks: Stops) -> JobId | None:
    """Return a job that was refused in a second run for which no Prolog of ours ran.

    The slurmd of 22.05 runs none for a part of a second: None where it refused the run itself
    ("credential revoked"), which ends the job. Newer ones always do: another Prolog stands in.
    """
    slurm = gpus.slurm
    text = f"{SHOW_MASK}echo ran$SLURM_RESTART_COUNT\nexec sleep 600\n"
    job = slurm.submit("slalice", "--requeue", "-w", NODE, TWO, script=text)
    wait_said(gpus, job, "mask=0,1.")
    assert reap(gpus, NODE).acts() == [("held", "alive")] * 2  # its steps were seen
    slurm.requeue(job)
    wait_requeued(gpus, job)
    ran = hooks.folder / f"Prolog.{NODE}.environ.{job}"
    ran.unlink()
    if slurm.release >= FORGETS:
        hooks.set("Prolog", NODE, "instead")
        slurm.begin(job)
        hooks.wait("Prolog", NODE, "instead", job)
        hooks.go("Prolog", NODE, "instead")
        ran.unlink()
        wait_requeued(gpus, job, times=2)
        return job
    slurm.begin(job, at_once=True)
    wait_until(
        lambda: (
            slurm.state(job) in ENDED
            or slurm.job(job).get("Restarts") == "2"
            or hooks.has_run("Prolog", NODE, job)
        ),
        why="the second run to be refused",
    )
    if slurm.state(job) in ENDED:
        return None
    if hooks.has_run("Prolog", NODE, job):  # too late: slurmd has forgotten the first run
        slurm.scancel(job)
        slurm.wait_done(job)
        return None
    wait_requeued(gpus, job, times=2)
    return job


@pytest.mark.short
def test_a_run_without_a_prolog_does_not_run_with_the_mask_of_the_one_before(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    slurm = slurm_gpus.slurm
    job = wait_until(lambda: second_run(slurm_gpus, hooks), why="the trap to be set")
    assert not hooks.has_run("Prolog", NODE, job), "the trap is not set: slurmd ran a Prolog"
    assert "this node has no claim of the job" in slurm.said(job)
    assert "ran1" not in slurm.said(job)
    assert slurm_gpus.locks(NODE) == {}
    slurm.begin(job)
    wait_said(slurm_gpus, job, "mask=0,1.\nran2")
