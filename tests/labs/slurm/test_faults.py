# SPDX-License-Identifier: Apache-2.0
"""slurmctld forgets, hooks are cut short or late: nothing is granted twice, nothing leaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.labs.common.installed import gate_file, reap, shut_gate, waiting_for
from tests.labs.common.processes import end, running
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, When
from tests.labs.slurm.jobs import (
    SHOW_MASK,
    SLEEP,
    held,
    impatient,
    kill_steps,
    notes,
    record_of,
    started,
    wait_requeued,
)
from tests.labs.slurm.lab import ENDED, JobId
from tests.labs.slurm.modes import (
    EXTRA,
    MORE,
    NODE,
    SLURM_CONF,
    TWO,
    Mode,
    by_gpulock,
    by_slurm,
    wait_said,
)
from tests.labs.slurm.processes import hook_runs
from tests.labs.slurm.releases import FORGETS
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")


def forget(gpus: Gpulock, job: JobId) -> None:
    """Start slurmctld without its state; the next job gets the id of `job`."""
    slurm = gpus.slurm
    slurm.stop_slurmctld(kill=True)
    place = slurm.lab / "etc/slurm.conf"
    place.write_text(re.sub("(?m)^FirstJobId=.*", f"FirstJobId={job}", place.read_text()))
    for kept in (slurm.lab / "state").glob("job_state*"):  # the last id outlives `-c`
        kept.unlink()
    slurm.start_slurmctld("-c")


def die(gpus: Gpulock, job: JobId) -> Path:
    """Let a node die with a job on it and slurmctld forget it; return what bob's of its id says."""
    slurm = gpus.slurm
    slurm.stop_slurmd(NODE, kill=True)
    end(kill_steps(gpus, job, NODE))
    forget(gpus, job)
    slurm.start_slurmd(NODE, wipe=True)
    assert len(held(gpus, job, NODE)) == 2
    place = slurm.users["slbob"].home / f"again.{job}"
    place.touch()
    place.chmod(0o666)
    script = f"{SHOW_MASK}{SLEEP}"
    assert slurm.submit("slbob", "-w", NODE, TWO, "--output=again.%j", script=script) == job
    return place


def tokens(gpus: Gpulock) -> set[str]:
    """Return which claims hold devices of the node."""
    return {record.token for record in gpus.locks(NODE).values()}


@BOTH
def test_a_job_that_got_the_id_of_a_forgotten_one_of_another_user_is_not_that_one(
    slurm_gpus: Gpulock, hooks: Stops, mode: Mode
) -> None:
    mode(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    old = record_of(slurm_gpus, job, NODE)
    said = die(slurm_gpus, job)
    if mode is by_slurm:  # Slurm gives the very devices that the dead job holds
        wait_requeued(slurm_gpus, job)
        assert f"0: job {job}" in said.read_text()
        assert tokens(slurm_gpus) == {old.token}
        slurm.wait_stepless(job)
        told = reap(slurm_gpus, NODE)
        assert told.acts() == [("freed", "dead")] * 2
        assert "another user's job" in told.reasons()
        slurm.begin(job)
    mask = "mask=0,1." if mode is by_slurm else "mask=2,3."
    wait_until(lambda: mask in said.read_text(), why="bob's job to run")
    assert not hooks.has_run("Epilog", NODE, job) or mode is by_slurm
    bobs = [r for r in slurm_gpus.locks(NODE).values() if r.uid == slurm.users["slbob"].uid]
    assert len(bobs) == 2
    slurm.scancel(job)
    slurm.wait_done(job)
    slurm.wait_stepless(job)
    assert tokens(slurm_gpus) == (set() if mode is by_slurm else {old.token})
    assert {act for act, _ in reap(slurm_gpus, NODE).acts()} <= {"freed"}
    assert slurm_gpus.locks(NODE) == {}


# --- hooks cut short ------------------------------------------------------------------------------


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
    slurm.wait_revoked(job, NODE)
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


# --- hooks that a killed slurmd left behind -------------------------------------------------------


def give_up(gpus: Gpulock, node: str, job: JobId) -> None:
    """Let slurmctld give up what it waits for on a node, not after a minute; requeue the job."""
    gpus.slurm.start_slurmd(node)
    gpus.slurm.scontrol("update", f"nodename={node}", "state=down", "reason=test")
    wait_requeued(gpus, job)
    gpus.slurm.resume_node(node)


def test_an_epilog_of_the_first_run_that_comes_late_frees_nothing_of_the_second(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    """A site's own Epilog calls ours at its end, say, and was slow; slurmd was killed meanwhile."""
    by_gpulock(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    go = gate_file(slurm_gpus, "go")
    words = ("--requeue", "-w", NODE, TWO)
    job = slurm.submit("slalice", *words, script=f"{waiting_for(go)}{SHOW_MASK}exec sleep 600\n")
    slurm.wait_running(job)
    wait_until(lambda: len(held(slurm_gpus, job, NODE)) == 2, why="the job to claim")
    hooks.set("Epilog", NODE, "before")
    slurm.requeue(job)
    late = hooks.wait("Epilog", NODE, "before", job)
    slurm.stop_slurmd(NODE, kill=True)
    kept = hooks.keep("Epilog", NODE, "before", late)
    give_up(slurm_gpus, NODE, job)
    slurm.begin(job)
    slurm.wait_running(job)
    wait_until(
        lambda: records(slurm_gpus, NODE, job, restart=1) == 2, why="the second run to claim"
    )
    wait_until(lambda: slurm.steps(job, NODE) != [], why="its extern step")
    told = notes(slurm_gpus, NODE)
    assert len(told) == 1
    assert running(late)
    kept.unlink()
    wait_until(lambda: not hook_runs("epilog_slurmd"), why="the late Epilog to end")
    assert records(slurm_gpus, NODE, job, restart=1) == 2
    assert {record.draining for record in slurm_gpus.locks(NODE).values()} == {0}
    assert notes(slurm_gpus, NODE) == told
    go.touch()
    wait_said(slurm_gpus, job, "mask=0,1.")
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


@BOTH
def test_a_prolog_of_the_first_run_that_comes_late_changes_nothing_of_the_second(
    slurm_gpus: Gpulock, hooks: Stops, mode: Mode
) -> None:
    mode(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    hooks.set("Prolog", NODE, "before")
    job = slurm.submit("slalice", "--requeue", "-w", NODE, TWO, script="exec sleep 600\n")
    late = hooks.wait("Prolog", NODE, "before", job)
    slurm.stop_slurmd(NODE, kill=True)
    kept = hooks.keep("Prolog", NODE, "before", late)
    slurm.start_slurmd(NODE)
    slurm.requeue(job)
    give_up_if_completing(slurm_gpus, job)
    slurm.begin(job)
    slurm.wait_running(job)
    assert records(slurm_gpus, NODE, job, restart=1) == 2
    note = slurm_gpus.slurm.path_in(NODE, f"/run/gpulock.claims/tasks/{NODE}.{job}")
    text, first = note.read_text(), tokens(slurm_gpus)
    assert running(late)
    kept.unlink()
    wait_until(lambda: not hook_runs("prolog_slurmd"), why="the late Prolog to end")
    assert tokens(slurm_gpus) == first
    assert records(slurm_gpus, NODE, job, restart=1) == len(slurm_gpus.locks(NODE)) == 2
    assert note.read_text() == text  # what its later steps are told
    assert not slurm.is_out(NODE)
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


def give_up_if_completing(gpus: Gpulock, job: JobId) -> None:
    """Let slurmctld give up a requeued job that waits for a hook's end."""
    if gpus.slurm.state(job) == "COMPLETING":
        gpus.slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=test")
        wait_requeued(gpus, job)
        gpus.slurm.begin(job)  # not at once, by itself, when slurmd still knows the first run
        gpus.slurm.resume_node(NODE)


def records(gpus: Gpulock, node: str, job: JobId, *, restart: int) -> int:
    """Return how many devices a run of a job holds on a node."""
    mine = [r for r in gpus.locks(node).values() if r.job_id == str(job)]
    return len([record for record in mine if record.restart == restart])


# --- a run without a Prolog -----------------------------------------------------------------------


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
    by_gpulock(slurm_gpus, hooks=hooks.hooks, extra=EXTRA, order=MORE)
    slurm = slurm_gpus.slurm
    job = wait_until(lambda: second_run(slurm_gpus, hooks), why="the trap to be set")
    assert not hooks.has_run("Prolog", NODE, job), "the trap is not set: slurmd ran a Prolog"
    assert "this node has no claim of the job" in slurm.said(job)
    assert "ran1" not in slurm.said(job)
    assert slurm_gpus.locks(NODE) == {}
    slurm.begin(job)
    wait_said(slurm_gpus, job, "mask=0,1.\nran2")


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
