# SPDX-License-Identifier: Apache-2.0
"""slurmctld forgets, LOCK_DIR is emptied, hooks are cut short: nothing is granted twice."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Generator

import pytest

from tests.labs.common.installed import gate_file, mounted, reap, shut_gate
from tests.labs.common.processes import end, running
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, stops
from tests.labs.slurm.jobs import (
    SHOW_MASK,
    held,
    kill_steps,
    notes,
    record_of,
    started,
    wait_requeued,
    waiting_for,
)
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import (
    EXTRA,
    MORE,
    NODE,
    TWO,
    Mode,
    by_gpulock,
    by_slurm,
    settings,
    variables,
    wait_said,
)
from tests.labs.slurm.processes import hook_runs
from tests.support.wait import LabError, wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
OTHER = "slnode2"


@pytest.fixture
def hooks(slurm_gpus: Gpulock) -> Stops:
    """Give a test hooks that it can stop."""
    return stops(slurm_gpus)


def forget(gpus: Gpulock, job: JobId) -> None:
    """Start slurmctld without its state; the next job gets the id of `job`."""
    slurm = gpus.slurm
    slurm.stop_slurmctld(kill=True)
    place = slurm.lab / "etc/slurm.conf"
    place.write_text(re.sub("(?m)^FirstJobId=.*", f"FirstJobId={job}", place.read_text()))
    for kept in (slurm.lab / "state").glob("job_state*"):  # the last id outlives `-c`
        kept.unlink()
    slurm.start_slurmctld("-c")


# --- slurmctld forgets ----------------------------------------------------------------------------


def tokens(gpus: Gpulock) -> set[str]:
    """Return which claims hold devices of the node."""
    return {record.token for record in gpus.locks(NODE).values()}


def die(gpus: Gpulock, job: JobId, user: str) -> None:
    """Let a node die with a job on it and slurmctld forget it; submit another with its id."""
    slurm = gpus.slurm
    slurm.stop_slurmd(NODE, kill=True)
    end(kill_steps(gpus, job, NODE))
    forget(gpus, job)
    slurm.start_slurmd(NODE, wipe=True)
    assert len(held(gpus, job, NODE)) == 2
    text = f"echo again\n{SHOW_MASK}exec sleep 600\n"
    assert slurm.submit(user, "-w", NODE, TWO, "--output=again.%j", script=text) == job


def said_again(gpus: Gpulock, job: JobId, user: str) -> str:
    """Return what the second job of an id has printed."""
    place = gpus.slurm.users[user].home / f"again.{job}"
    return place.read_text() if place.exists() else ""


@BOTH
def test_a_job_that_got_the_id_of_a_forgotten_one_of_the_same_user_claims_afresh(
    slurm_gpus: Gpulock, hooks: Stops, mode: Mode
) -> None:
    mode(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    old = record_of(slurm_gpus, job, NODE).token
    die(slurm_gpus, job, "slalice")
    wait_until(lambda: "mask=0,1." in said_again(slurm_gpus, job, "slalice"), why="the second job")
    assert not hooks.has_run("Epilog", NODE, job), "the trap is not set: an Epilog ran"
    assert len(held(slurm_gpus, job, NODE)) == len(slurm_gpus.locks(NODE)) == 2
    assert record_of(slurm_gpus, job, NODE).token != old
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert slurm_gpus.locks(NODE) == {}


@BOTH
def test_a_job_that_got_the_id_of_a_forgotten_one_of_another_user_is_not_that_one(
    slurm_gpus: Gpulock, hooks: Stops, mode: Mode
) -> None:
    mode(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    job = started(slurm_gpus, NODE, TWO)
    old = record_of(slurm_gpus, job, NODE)
    die(slurm_gpus, job, "slbob")
    if mode is by_slurm:  # Slurm gives the very devices that the dead job holds
        wait_requeued(slurm_gpus, job)
        assert f"0: job {job}" in said_again(slurm_gpus, job, "slbob")
        assert {r.token for r in slurm_gpus.locks(NODE).values()} == {old.token}
        slurm.wait_stepless(job)
        told = reap(slurm_gpus, NODE)
        assert told.acts() == [("freed", "dead")] * 2
        assert "another user's job" in told.reasons()
        slurm.begin(job)
    mask = "mask=0,1." if mode is by_slurm else "mask=2,3."
    wait_until(lambda: mask in said_again(slurm_gpus, job, "slbob"), why="bob's job to run")
    assert not hooks.has_run("Epilog", NODE, job) or mode is by_slurm
    bobs = [r for r in slurm_gpus.locks(NODE).values() if r.uid == slurm.users["slbob"].uid]
    assert len(bobs) == 2
    slurm.scancel(job)
    slurm.wait_done(job)
    slurm.wait_stepless(job)
    left = [record.token for record in slurm_gpus.locks(NODE).values()]
    assert left == ([] if mode is by_slurm else [old.token] * 2)
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


# --- several slurmds on one machine ---------------------------------------------------------------


@contextlib.contextmanager
def one_machine(gpus: Gpulock) -> Generator[None]:
    """Let two nodes be slurmds on one machine: one LOCK_DIR, one STATE_DIR, one host name."""
    slurm = gpus.slurm
    shared = slurm.lab / "shared"
    shutil.rmtree(shared, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        for folder in ("run", "claims", "state"):
            (shared / folder).mkdir(parents=True, mode=0o755)
        for node in (NODE, OTHER):
            for place, inner in (
                ("/run/gpulock", "run"),
                ("/run/gpulock.claims", "claims"),
                ("/var/lib/gpulock", "state"),
            ):
                bind = ("--bind", str(shared / inner))
                stack.enter_context(mounted(gpus, node, place, *bind))
            gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="gpulock"))
        rename(gpus, OTHER, NODE)
        stack.callback(rename, gpus, OTHER, OTHER)
        yield


def rename(gpus: Gpulock, node: str, name: str) -> None:
    """Give a node's machine a host name, behind the back of its slurmd."""
    done = gpus.slurm.run_in(node, ["hostname", name])
    if done.returncode != 0:
        raise LabError(done.stderr)


def test_two_slurmds_on_one_machine_share_its_devices_and_free_only_their_own(
    slurm_gpus: Gpulock, hooks: Stops
) -> None:
    by_gpulock(slurm_gpus, hooks=hooks.hooks, extra=EXTRA)
    slurm = slurm_gpus.slurm
    with one_machine(slurm_gpus):
        step = "srun sh -c 'echo $SLURMD_NODENAME=$CUDA_VISIBLE_DEVICES'\n"
        words = ("-N2", "-w", f"{NODE},{OTHER}", TWO)
        job = slurm.submit("slalice", *words, script=f"{step}exec sleep 600\n")
        wait_until(lambda: slurm.said(job).count("\n") == 2, why="two tasks")
        masks = [set(mask.split(",")) for mask in variables(slurm.said(job)).values()]
        assert sorted(masks[0] | masks[1]) == ["0", "1", "2", "3"]
        locks = slurm_gpus.locks(NODE)
        assert locks.keys() == slurm_gpus.locks(OTHER).keys() and len(locks) == 4
        assert sorted(record.slurmd for record in locks.values()) == [NODE] * 2 + [OTHER] * 2
        assert {record.node for record in locks.values()} == {NODE}
        assert notes(slurm_gpus, NODE) == [f"{NODE}.{job}", f"{OTHER}.{job}"]
        assert reap(slurm_gpus, NODE).acts() == [("held", "alive")] * 4
        refused = slurm.submit("slbob", "-w", OTHER, "--gres=gpu:1", script="echo ran\n")
        wait_requeued(slurm_gpus, refused)
        assert "0 of 4 free" in slurm.said(refused)
        hooks.set("Epilog", OTHER, "before")
        slurm.scancel(job)
        hooks.wait("Epilog", OTHER, "before", job)
        wait_until(
            lambda: [r.slurmd for r in slurm_gpus.locks(NODE).values()] == [OTHER] * 2,
            why="the first node to free its own",
        )
        wait_until(  # its last act
            lambda: notes(slurm_gpus, NODE) == [f"{OTHER}.{job}"],
            why="the first node's note to go",
        )
        hooks.go("Epilog", OTHER, "before")
        slurm.wait_settled(job)
        assert slurm_gpus.locks(NODE) == {}
        slurm.clear_jobs()
