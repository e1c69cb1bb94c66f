# SPDX-License-Identifier: Apache-2.0
"""However a Slurm job, a step daemon or a slurmd ends: no lock leaks, none is freed too soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import pytest

from tests.labs.common.processes import command_of, end
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, When, stops
from tests.labs.slurm.jobs import (
    SHOW_MASK,
    SOAK,
    gate_file,
    held,
    impatient,
    kill_steps,
    notes,
    reap,
    record_of,
    started,
    wait_detached,
    wait_requeued,
    waiting_for,
)
from tests.labs.slurm.journal import doubles
from tests.labs.slurm.lab import ENDED, JobId
from tests.labs.slurm.modes import (
    NODE,
    SLURM_CONF,
    Mode,
    by_gpulock,
    by_slurm,
    wait_empty,
    wait_said,
)
from tests.labs.slurm.processes import hook_runs
from tests.labs.slurm.releases import FORGETS
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
# a job is not missed whose slurmd was killed a while ago (22.05, `_purge_missing_jobs`)
EXTRA = {**SLURM_CONF, "KillWait": "1", "BatchStartTimeout": "120"}
TWO = "--gres=gpu:2"
# slurmctld asks a slurmd again when twice MessageTimeout and KillWait are over; that one answers
# for an Epilog that it has begun once as for one that is over (22.05, `_list_find_job_old`)
UNASKED = {**EXTRA, "KillWait": "120"}
MORE = {NODE: range(16)}  # Slurm believes in four times as many devices as there are


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


def freed_by(gpus: Gpulock, how: str) -> None:
    """Let a reconcile, or the next claim, of every device, free what is left."""
    if how == "reap":
        assert {act for act, _ in reap(gpus, NODE).acts()} == {"freed"}
        assert gpus.locks(NODE) == {}
        return
    job = gpus.slurm.submit("slbob", "-w", NODE, "--gres=gpu:4", script=SHOW_MASK)
    assert gpus.slurm.wait_settled(job) == "COMPLETED", gpus.slurm.said(job)
    assert gpus.slurm.said(job) == "mask=0,1,2,3.\n"


def leak(gpus: Gpulock, hooks: Stops, *jobs: JobId) -> None:
    """Cancel jobs whose Epilog does not run."""
    hooks.set("Epilog", NODE, "instead")
    gpus.slurm.scancel(*jobs)
    for job in jobs:
        hooks.wait("Epilog", NODE, "instead", job)
    hooks.go("Epilog", NODE, "instead")
    for job in jobs:
        gpus.slurm.wait_done(job)


# --- ordinary ends --------------------------------------------------------------------------------


@pytest.mark.short
@BOTH
def test_jobs_that_are_cancelled_killed_or_requeued_give_back_at_once(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    mode(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    scripts = (
        "exec sleep 600\n",
        "kill -STOP $$\n",
        "trap '' TERM\nexec sleep 600\n",
        "exec sleep 600\n",
    )
    jobs = [slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script=text) for text in scripts]
    for job in jobs:
        slurm.wait_running(job)
    assert len(slurm_gpus.locks(NODE)) == 4
    slurm.scancel(*jobs[:2])
    slurm.scancel("--full", jobs[2])
    slurm.requeue(jobs[3])
    for job in jobs[:3]:
        assert slurm.wait_done(job) == "CANCELLED"
    wait_requeued(slurm_gpus, jobs[3])
    assert slurm_gpus.locks(NODE) == {}
    assert notes(slurm_gpus, NODE) == []
    failed = slurm.submit("slalice", "-w", NODE, TWO, script="exit 7\n")
    assert slurm.wait_settled(failed) == "FAILED"
    assert slurm_gpus.locks(NODE) == {}
    assert not slurm.is_out(NODE)


@pytest.mark.minutes  # slurmctld looks for limits twice a minute
def test_a_job_that_runs_out_of_time_gives_back(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus, extra=EXTRA)
    job = started(slurm_gpus, NODE, TWO, "--time=1")
    assert slurm_gpus.slurm.wait_settled(job) == "TIMEOUT"
    assert slurm_gpus.locks(NODE) == {}


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


@pytest.mark.short
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
@pytest.mark.parametrize("how", ["reap", "claim"])
def test_what_a_killed_step_daemon_leaves_keeps_the_locks_until_it_is_gone(
    slurm_gpus: Gpulock, proctrack: str, how: str
) -> None:
    by_gpulock(slurm_gpus, extra=EXTRA, order=MORE, proctrack=proctrack)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    left = kill_steps(slurm_gpus, job, NODE)
    assert left != []
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 2
    assert "2 of 4 free" in refused(slurm_gpus)
    slurm.scancel(job)
    slurm.wait_settled(job)  # the Epilog ran
    assert slurm.job_processes(job, NODE) == left
    assert [record.draining for record in slurm_gpus.locks(NODE).values()] == [1, 1]
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 2
    assert "2 of 4 free" in refused(slurm_gpus)
    end(left)
    freed_by(slurm_gpus, how)


@pytest.mark.parametrize("how", ["reap", "claim"])
def test_a_daemonised_child_that_has_a_device_open_keeps_that_one_alone(
    slurm_gpus: Gpulock, how: str
) -> None:
    by_gpulock(slurm_gpus, extra=EXTRA)
    slurm = slurm_gpus.slurm
    device, told = slurm_gpus.device(NODE, 0), gate_file(slurm_gpus, "child")
    device.chmod(0o666)
    # no word of the environment marks it as the job's
    child = f"exec 3<{device}; echo $$ >{told}; exec sleep 600"
    job = started(
        slurm_gpus, NODE, TWO, script=f"(setsid env -i /bin/sh -c '{child}' &)\nexec sleep 600\n"
    )
    wait_until(lambda: told.exists() and told.read_text().endswith("\n"), why="the child")
    wait_detached(slurm_gpus, job, NODE, int(told.read_text()))
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert held(slurm_gpus, job, NODE) == ["0"]
    assert record_of(slurm_gpus, job, NODE).draining == 1
    assert "3 of 4 free" in refused(slurm_gpus)
    kept = reap(slurm_gpus, NODE)
    assert [act for act, _ in kept.acts()] == ["orphans"]
    assert f"process {int(told.read_text())} has " in kept.reasons()
    end([int(told.read_text())])
    freed_by(slurm_gpus, how)


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


def forget_completing(gpus: Gpulock, job: JobId) -> None:
    """Let slurmctld give up a job that waits for an Epilog's end, not after 70 seconds."""
    gpus.slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=test")
    gpus.slurm.wait_done(job)
    gpus.slurm.resume_node(NODE)


def test_an_epilog_that_outlives_its_slurmd_frees(slurm_gpus: Gpulock, hooks: Stops) -> None:
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    hooks.set("Epilog", NODE, "before")
    slurm.scancel(job)
    hooks.wait("Epilog", NODE, "before", job)
    slurm.stop_slurmd(NODE, kill=True)
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("held", "alive")] * 2
    assert "its prolog or epilog" in told.reasons()
    hooks.go("Epilog", NODE, "before")
    slurm_gpus.wait_free()
    wait_until(lambda: notes(slurm_gpus, NODE) == [], why="the Epilog's last act")
    slurm.start_slurmd(NODE)
    forget_completing(slurm_gpus, job)


def test_an_epilog_that_dies_with_its_slurmd_leaves_locks_that_a_reconcile_frees(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    by_gpulock(slurm_gpus, hooks=hooks.hooks, extra=UNASKED, order=MORE)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    hooks.set("Epilog", NODE, "before")
    slurm.scancel(job)
    epilog = hooks.wait("Epilog", NODE, "before", job)
    slurm.stop_slurmd(NODE, kill=True)
    os.killpg(epilog, signal.SIGKILL)
    hooks.go("Epilog", NODE, "before")
    wait_until(lambda: not hook_runs("epilog_slurmd"), why="the Epilog to end")
    slurm.start_slurmd(NODE)
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("held", "alive")] * 2
    assert "slurmctld says COMPLETING" in told.reasons()
    forget_completing(slurm_gpus, job)
    assert len(slurm_gpus.locks(NODE)) == 2
    assert "2 of 4 free" in refused(slurm_gpus)  # a hook judges no other job
    assert reap(slurm_gpus, NODE).acts() == [("freed", "dead")] * 2
    assert notes(slurm_gpus, NODE) == []


def test_a_job_that_ends_while_slurmd_is_down_is_freed_when_it_is_back(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    slurm = slurm_gpus.slurm
    go = gate_file(slurm_gpus, "go")
    job = started(slurm_gpus, NODE, TWO, script=waiting_for(go))
    slurm.stop_slurmd(NODE, kill=True)
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 2
    go.touch()
    wait_until(lambda: slurm.job_processes(job) == [], why="the job's end")
    wait_until(lambda: slurm.state(job) == "COMPLETING", why="slurmctld to know")
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 2
    slurm.start_slurmd(NODE)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


def test_a_job_that_ends_while_slurmctld_is_down_is_freed_by_an_epilog_that_knows_no_gpus(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    slurm = slurm_gpus.slurm
    go = gate_file(slurm_gpus, "go")
    job = started(slurm_gpus, NODE, TWO, script=waiting_for(go))
    slurm.stop_slurmctld()
    go.touch()
    wait_until(lambda: slurm.job_processes(job) == [], why="the job's end")
    assert {act for act, _ in reap(slurm_gpus, NODE).acts()} == {"held"}
    slurm.start_slurmctld()
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}
    assert "SLURM_JOB_GPUS" in hooks.environ("Prolog", NODE, job)
    assert "SLURM_JOB_GPUS" not in hooks.environ("Epilog", NODE, job)


def test_locks_whose_epilog_never_ran_are_freed_by_a_reconcile_on_slurmctlds_word(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    seen, unseen = started(slurm_gpus, NODE, "--gres=gpu:1"), None
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")]
    unseen = started(slurm_gpus, NODE, "--gres=gpu:1")
    leak(slurm_gpus, hooks, seen, unseen)
    asked = started(slurm_gpus, NODE, "--gres=gpu:1")
    leak(slurm_gpus, hooks, asked)
    told = reap(slurm_gpus, NODE)
    assert told.acts() == [("freed", "dead")] * 3
    assert "slurmctld says CANCELLED" in told.reasons()


def test_without_slurmctld_only_a_job_whose_steps_were_seen_before_is_dead(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    seen = started(slurm_gpus, NODE, "--gres=gpu:1")
    living = started(slurm_gpus, NODE, "--gres=gpu:1")
    assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 2
    unseen = started(slurm_gpus, NODE, "--gres=gpu:1")
    leak(slurm_gpus, hooks, seen, unseen)
    slurm_gpus.slurm.stop_slurmctld()
    told = reap(slurm_gpus, NODE)
    assert sorted(told.acts()) == [("freed", "dead"), ("held", "alive"), ("held", "unknown")]
    assert "its steps, seen before, are gone" in told.reasons()
    assert "no step of it was ever seen here" in told.reasons()
    assert {r.job_id for r in slurm_gpus.locks(NODE).values()} == {str(living), str(unseen)}
    slurm_gpus.slurm.start_slurmctld()
    assert sorted(reap(slurm_gpus, NODE).acts()) == [("freed", "dead"), ("held", "alive")]


# --- hooks that run too often, or at once ---------------------------------------------------------


def by_hand(gpus: Gpulock, environ: Mapping[str, str], **changes: object) -> int:
    """Run our Epilog on the node with an environment; return its exit code."""
    words = {**environ, **{key: str(value) for key, value in changes.items()}}
    words["SLURM_SCRIPT_CONTEXT"] = "epilog_slurmd"
    pairs = [f"{name}={value}" for name, value in words.items()]
    program = str(gpus.setup.hooks["Epilog"])
    return gpus.slurm.run_in(NODE, ["/usr/bin/env", "-i", *pairs, program]).returncode


def test_an_epilog_run_again_frees_neither_a_later_job_nor_a_later_run_nor_anothers(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    slurm = slurm_gpus.slurm
    first = started(slurm_gpus, NODE, TWO)
    slurm.scancel(first)
    slurm.wait_done(first)
    text = (
        f"until [ -e go ]; do sleep 0.1; done\nsrun sh -c '{SHOW_MASK.strip()}'\nexec sleep 600\n"
    )
    gate_file(slurm_gpus, "go")
    second = slurm.submit("slalice", "--requeue", "-w", NODE, TWO, script=text)
    slurm.wait_running(second)
    assert slurm_gpus.slurm.job(second)["Restarts"] == "0"
    run_one = hooks.environ("Prolog", NODE, second)
    for _ in range(2):
        assert by_hand(slurm_gpus, hooks.environ("Epilog", NODE, first)) == 0
    slurm.requeue(second)
    slurm.begin(second)
    slurm.wait_running(second)
    before = {name: record.token for name, record in slurm_gpus.locks(NODE).items()}
    assert len(before) == 2 and record_of(slurm_gpus, second, NODE).restart == 1
    assert by_hand(slurm_gpus, run_one) == 0
    uid, name = slurm.users["slbob"].uid, "slbob"
    other = {"SLURM_JOB_UID": uid, "SLURM_JOB_USER": name, "SLURM_JOB_RESTART_COUNT": 9}
    assert by_hand(slurm_gpus, run_one, **other) == 0
    assert by_hand(slurm_gpus, run_one, SLURMD_NODENAME="slnode9", SLURM_JOB_RESTART_COUNT=9) == 0
    assert by_hand(slurm_gpus, {"SLURM_JOB_ID": "x"}) == 0
    assert {name: record.token for name, record in slurm_gpus.locks(NODE).items()} == before
    assert {record.draining for record in slurm_gpus.locks(NODE).values()} == {0}
    (slurm.users["slalice"].home / "go").touch()
    wait_said(slurm_gpus, second, "mask=0,1.")


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


@BOTH
def test_many_prologs_at_once_never_free_each_others_fresh_locks(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    number = 200 if SOAK else 20
    slurm = slurm_gpus.slurm
    mode(slurm_gpus, {"SLURM_WAIT": "50"}, order=MORE if mode is by_gpulock else {})
    script = slurm_gpus.journal.around("sleep 0.3")
    for _ in range(number):
        slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script=script)
    looks = 0
    while slurm.queue("-h") != "":
        told = reap(slurm_gpus, NODE)  # a reconcile at work at the same time frees none either
        freed = [why for act, _, why in told.outcomes.values() if act == "freed"]
        assert set(freed) <= {"released by its job, whose processes are gone"}
        looks += 1
    wait_empty(slurm_gpus)
    assert looks > 2
    holds = slurm_gpus.journal.holds()
    assert len(holds) == number
    assert doubles(holds) == []
    assert {len(hold.devices) for hold in holds} == {1}
    assert len({name for hold in holds for name in hold.devices}) == 4
    # where processes come and go all the time an Epilog may leave a lock to the next reconcile
    assert all(record.draining for record in slurm_gpus.locks(NODE).values())
    reap(slurm_gpus, NODE)
    assert slurm_gpus.locks(NODE) == {}
    assert not slurm.is_out(NODE)
