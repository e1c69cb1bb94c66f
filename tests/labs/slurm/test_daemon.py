# SPDX-License-Identifier: Apache-2.0
"""The crash matrix on a real Slurm with gpulockd running: freed at once, never too soon.

Each way in which a job ends without an Epilog, or with one that comes too early. What is freed is
held against a witness of its own, and is in the log with its proof and in the history once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Generator
from typing import Any

import pytest

from tests.labs.common.freezer import frozen
from tests.labs.common.processes import command_of, end
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
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, stops
from tests.labs.slurm.jobs import (
    SHOW_MASK,
    SLEEP,
    SOAK,
    cancel_past,
    gate_file,
    kill_steps,
    lose_locks,
    other_boot,
    shut_gate,
    started,
    wait_detached,
    waiting_for,
)
from tests.labs.slurm.journal import doubles
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, by_gpulock, settings, wait_empty, wait_said
from tests.labs.slurm.processes import hook_runs
from tests.labs.slurm.test_ends import EXTRA, MORE, TWO, UNASKED, forget_completing, leak
from tests.labs.slurm.test_faults import forget
from tests.support.pairs import zip_equal
from tests.support.wait import let_work, wait_ended, wait_until

pytestmark = pytest.mark.lab
IMPATIENT = {"extra": {**EXTRA, "UnkillableStepTimeout": "8", "PrologEpilogTimeout": "15"}}
SETTLED = "released by its job, whose processes are gone"
SEEN = "its steps, seen before, are gone"


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
    wait_until(lambda: len(gpus.slurm.steps(job, NODE)) >= 2 or None, why="its two steps")
    daemon.goes_round()
    return job, daemon.claim(job)


def registrations(gpus: Gpulock) -> list[int]:
    """Return how often each node has registered."""
    logs = [gpus.slurm.lab / f"log/{node}.log" for node in gpus.slurm.nodes]
    return [log.read_text(errors="replace").count("slurmctld sent back") for log in logs]


def bring_back_slurmctld(gpus: Gpulock) -> None:
    """Start slurmctld: before a node has registered again it has no GPUs to give to a job there."""
    before = registrations(gpus)
    gpus.slurm.start_slurmctld()
    wait_until(
        lambda: all(now > then for now, then in zip_equal(registrations(gpus), before)),
        why="all nodes to register",
    )


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


@pytest.mark.parametrize("setup", [IMPATIENT])
def test_a_process_that_no_signal_ends_keeps_its_devices_past_the_epilog(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon, script="exec sleep 600\n")
    pids = [pid for pid in slurm.job_processes(job, NODE) if "sleep" in command_of(pid)]
    with Witness(claim, pids) as witness:
        with frozen("gpulock-lab-frozen", pids):
            cancel_past(slurm_gpus, job, NODE)
            assert_held(daemon, claim, "released by its epilog")
        slurm.wait_stepless(job)  # its daemon ends with it
        witness.never_free_too_soon(assert_freed(daemon, claim, SETTLED))


# --- the step daemons are killed ------------------------------------------------------------------


@pytest.mark.parametrize("setup", [{"proctrack": kind} for kind in ("cgroup", "linuxproc")])
def test_what_killed_step_daemons_left_keeps_the_devices_past_the_epilog(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    # none ends when another one does, whichever is ended first
    job, claim = begun(slurm_gpus, daemon, script="sleep 600 &\nsleep 601 &\nexec sleep 602\n")
    wait_until(lambda: len(slurm.job_processes(job, NODE)) >= 3 or None, why="its processes")
    pids = kill_steps(slurm_gpus, job, NODE)
    assert len(pids) >= 2
    with Witness(claim, pids) as witness:
        assert_held(daemon, claim, f"process {pids[0]} ")
        slurm.scancel(job)
        slurm.wait_settled(job)  # its Epilog ran
        assert {record.draining for record in slurm_gpus.locks(NODE).values()} == {1}
        for pid in pids:
            assert_held(daemon, claim, "released by its epilog")
            end([pid])
        witness.never_free_too_soon(assert_freed(daemon, claim, SETTLED))


def test_a_job_of_which_nothing_is_left_is_held_while_slurmctld_says_that_it_runs(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    job, claim = begun(slurm_gpus, daemon)
    end(kill_steps(slurm_gpus, job, NODE))
    assert_held(daemon, claim, "slurmctld says RUNNING")
    slurm_gpus.slurm.scancel(job)
    slurm_gpus.slurm.wait_done(job)
    daemon.goes_round()
    assert_over(daemon, claim, "", "epilog")


def test_a_device_that_a_child_without_any_mark_has_open_is_freed_when_the_child_ends(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    device, told = slurm_gpus.device(NODE, 0), gate_file(slurm_gpus, "child")
    device.chmod(0o666)
    child = f"exec 3<{device}; echo $$ >{told}; exec sleep 600"
    text = f"(setsid env -i /bin/sh -c '{child}' &)\nexec sleep 600\n"
    job, claim = begun(slurm_gpus, daemon, script=text)
    wait_until(lambda: told.exists() and told.read_text().endswith("\n"), why="the child")
    pid = int(told.read_text())
    wait_detached(slurm_gpus, job, NODE, pid)
    held_open = Claim(claim.folder, claim.token, claim.devices[:1])
    with Witness(held_open, [pid]) as witness:
        leak(slurm_gpus, hooks, job)
        for _ in range(2):
            daemon.goes_round()
            assert claim.locked() == claim.devices[:1]
        assert f"but process {pid} has " in daemon.said()
        assert daemon.history() == []
        end([pid])
        daemon.goes_round()
        assert claim.locked() == ()
        witness.never_free_too_soon(assert_over(daemon, claim, ""))


# --- the Epilog does not run ----------------------------------------------------------------------


@pytest.mark.parametrize("seen", [True, False], ids=["its steps were seen", "never seen"])
def test_a_job_whose_epilog_did_not_run_is_freed_on_slurmctlds_word(
    slurm_gpus: Gpulock, hooks: Stops, seen: bool
) -> None:
    with contextlib.ExitStack() as stack:
        job = started(slurm_gpus, NODE, TWO)
        early = [stack.enter_context(daemon_on(slurm_gpus, NODE))] if seen else []
        pids = slurm_gpus.slurm.job_processes(job, NODE)
        hooks.set("Epilog", NODE, "instead")
        slurm_gpus.slurm.scancel(job)
        hooks.wait("Epilog", NODE, "instead", job)
        wait_until(lambda: not slurm_gpus.slurm.job_processes(job, NODE), why="its end")
        daemon = early[0] if seen else stack.enter_context(daemon_on(slurm_gpus, NODE))
        claim = daemon.claim(job)
        assert pids
        assert_held(daemon, claim, "its prolog or epilog")
        hooks.go("Epilog", NODE, "instead")
        slurm_gpus.slurm.wait_done(job)
        assert_freed(daemon, claim, "slurmctld says CANCELLED")


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
        assert_held(daemon, claim, "its prolog or epilog")
        os.killpg(epilog, signal.SIGKILL)
        hooks.go("Epilog", NODE, "before")
        wait_until(lambda: not hook_runs("epilog_slurmd"), why="the Epilog to end")
        assert_held(daemon, claim, "slurmctld says COMPLETING")
        slurm.start_slurmd(NODE)
        assert_held(daemon, claim, "slurmctld says COMPLETING")
        forget_completing(slurm_gpus, job)
        witness.never_free_too_soon(assert_freed(daemon, claim, "slurmctld says "))


def test_an_epilog_that_outlives_its_slurmd_is_the_one_that_frees(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    hooks.set("Epilog", NODE, "before")
    slurm.scancel(job)
    hooks.wait("Epilog", NODE, "before", job)
    slurm.stop_slurmd(NODE, kill=True)
    assert_held(daemon, claim, "its prolog or epilog")
    hooks.go("Epilog", NODE, "before")
    wait_until(lambda: not claim.locked(), why="the Epilog")
    daemon.goes_round()
    assert_over(daemon, claim, "", "epilog")
    slurm.start_slurmd(NODE)
    forget_completing(slurm_gpus, job)


def test_a_job_that_ends_while_slurmd_is_down_is_held_until_it_is_back(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    slurm, go = slurm_gpus.slurm, gate_file(slurm_gpus, "go")
    job, claim = begun(slurm_gpus, daemon, script=waiting_for(go))
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        slurm.stop_slurmd(NODE, kill=True)
        assert_held(daemon, claim, "step daemon")
        go.touch()
        wait_until(lambda: slurm.state(job) == "COMPLETING", why="slurmctld to know")
        wait_until(
            lambda: [step.name for step in slurm.steps(job, NODE)] == ["extern"],
            why="the script's step daemon to end",
        )
        assert_held(daemon, claim, "(extern) runs")  # it waits for slurmd's word
        slurm.start_slurmd(NODE)
        slurm.wait_done(job)
        daemon.goes_round()
        witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))


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
        bring_back_slurmctld(slurm_gpus)
        slurm.wait_settled(job)
        assert "SLURM_JOB_GPUS" not in hooks.environ("Epilog", NODE, job)
        daemon.goes_round()
        witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))


def test_without_slurmctld_only_a_job_whose_steps_were_seen_and_are_gone_is_freed(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    ended, claim = begun(slurm_gpus, daemon)
    _, living = begun(slurm_gpus, daemon)
    with Witness(claim, slurm.job_processes(ended, NODE)) as witness:
        hooks.set("Epilog", NODE, "instead")
        slurm.scancel(ended)
        epilog = hooks.wait("Epilog", NODE, "instead", ended)
        slurm.stop_slurmctld()
        assert_held(daemon, claim, "its prolog or epilog")
        hooks.go("Epilog", NODE, "instead")
        wait_ended([epilog], why="the Epilog to end")
        witness.never_free_too_soon(assert_freed(daemon, claim, SEEN))
        assert_held(daemon, living, "step daemon")
        bring_back_slurmctld(slurm_gpus)


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


# --- the Prolog is cut short ----------------------------------------------------------------------


def test_a_prolog_that_dies_with_its_slurmd_leaves_what_slurmctld_decides_about(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    hooks.set("Prolog", NODE, "after")
    job = slurm.submit("slalice", "-w", NODE, TWO, script="echo ran\n")
    prolog = hooks.wait("Prolog", NODE, "after", job)
    claim = daemon.claim(job)
    assert_held(daemon, claim, "its prolog or epilog")
    slurm.stop_slurmd(NODE, kill=True)
    os.killpg(prolog, signal.SIGKILL)
    hooks.go("Prolog", NODE, "after")
    wait_until(lambda: not hook_runs("prolog_slurmd"), why="the Prolog to end")
    assert_held(daemon, claim, "slurmctld says ")
    slurm.scancel(job)
    slurm.scontrol("update", f"nodename={NODE}", "state=down", "reason=test")
    slurm.wait_done(job)
    assert_freed(daemon, claim, "slurmctld says ")
    slurm.start_slurmd(NODE)


# --- the node, or its LOCK_DIR, is lost -----------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["LOCK_DIR kept", "LOCK_DIR wiped"])
def test_after_a_reboot_the_first_round_frees_what_was_held_before(
    slurm_gpus: Gpulock, daemon: Daemon, kept: bool
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    daemon.crash()
    slurm.stop_slurmd(NODE, kill=True)
    end(kill_steps(slurm_gpus, job, NODE))
    if not kept:
        lose_locks(slurm_gpus, NODE)
    with other_boot(slurm_gpus, NODE):
        daemon.restart()
        assert claim.locked() == ()
        assert_over_by_boot(daemon, claim, kept)
        slurm.start_slurmd(NODE)
        slurm.scancel(job)
        slurm.wait_done(job)
        later = slurm.submit(
            "slbob", "-w", NODE, "--gres=gpu:4", script=f"{SHOW_MASK}exec sleep 600\n"
        )
        wait_said(slurm_gpus, later, "mask=0,1,2,3.")
        assert_held(daemon, daemon.claim(later), "step daemon")
        slurm.scancel(later)
        slurm.wait_done(later)
        daemon.goes_round()
        told = [(line["job_id"], line["how"]) for line in daemon.history()]
        assert told == [(str(job), "reap"), (str(later), "epilog")]


def test_locks_that_are_lost_are_back_at_once_for_who_lives_and_for_nobody_else(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    ended, gone = begun(slurm_gpus, daemon)
    with daemon.stopped():  # else it would put them back while they are being removed
        lose_locks(slurm_gpus, NODE)
    wait_until(lambda: claim.locked() == claim.devices, why="its locks")
    wait_until(lambda: gone.locked() == gone.devices, why="its locks")
    daemon.crash()
    lose_locks(slurm_gpus, NODE)
    slurm.scancel(ended)
    slurm.wait_done(ended)
    slurm.wait_stepless(ended)
    daemon.restart()
    assert claim.locked() == claim.devices
    assert gone.locked() == ()
    assert f"restored {' '.join(claim.devices)} of job {job}" in daemon.said()
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        slurm.scancel(job)
        slurm.wait_done(job)
        daemon.goes_round()
        witness.never_free_too_soon(assert_over(daemon, claim, "", "epilog"))


# --- who only looks dead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "why"),
    [(WITHOUT_PTRACE, "cannot be seen"), (CONTAINED, "claimed in pid:")],
    ids=["without CAP_SYS_PTRACE", "in another pid namespace"],
)
def test_a_gpulockd_that_cannot_see_frees_nothing_and_the_next_one_does(
    slurm_gpus: Gpulock, hooks: Stops, around: tuple[str, ...], why: str
) -> None:
    with daemon_on(slurm_gpus, NODE, *around) as blind:
        job = started(slurm_gpus, NODE, TWO)
        claim = blind.claim(job)
        blind.goes_round()
        leak(slurm_gpus, hooks, job)
        assert_held(blind, claim, why, "unknown")
        assert blind.freed() == []
    with daemon_on(slurm_gpus, NODE) as daemon:
        assert_over(daemon, claim, "slurmctld says CANCELLED")


def test_slurm_daemons_that_come_and_go_take_no_device_away(
    slurm_gpus: Gpulock, daemon: Daemon
) -> None:
    """slurmd is killed and back, as in an upgrade; slurmctld is away with it, then alone."""
    slurm = slurm_gpus.slurm
    job, claim = begun(slurm_gpus, daemon)
    with Witness(claim, slurm.job_processes(job, NODE)) as witness:
        slurm.stop_slurmd(NODE, kill=True)
        assert_held(daemon, claim, "step daemon")
        slurm.stop_slurmctld()
        assert_held(daemon, claim, "step daemon")
        slurm.start_slurmd(NODE)
        assert_held(daemon, claim, "step daemon")
        bring_back_slurmctld(slurm_gpus)
        assert_held(daemon, claim, "step daemon")
        assert (witness.order, daemon.freed()) == ([], [])


# --- gpulockd itself ------------------------------------------------------------------------------


def test_a_gpulockd_that_is_killed_again_and_again_loses_nothing_and_tells_nothing_twice(
    slurm_gpus: Gpulock, hooks: Stops, daemon: Daemon
) -> None:
    times = random.Random(5)
    slurm = slurm_gpus.slurm
    stays, kept = begun(slurm_gpus, daemon)
    ends, claim = begun(slurm_gpus, daemon)
    number = 200 if SOAK else 8
    with (
        Witness(claim, slurm.job_processes(ends, NODE)) as witness,
        Witness(kept, slurm.job_processes(stays, NODE)) as other,
    ):
        for count in range(number):
            daemon.crash()
            if count == number // 2:
                assert claim.locked() == claim.devices
                leak(slurm_gpus, hooks, ends)
            daemon.launch()
            let_work(times.uniform(0.1, 0.4))
        daemon.crash()
        daemon.restart()
        assert_held(daemon, kept, "step daemon")
        (line,) = daemon.history()
        assert (line["token"], line["how"]) == (claim.token, "reap")
        witness.never_free_too_soon(line)
        assert other.order == []


def test_gpulockd_beside_prologs_and_epilogs_takes_nobodys_device(slurm_gpus: Gpulock) -> None:
    number = 200 if SOAK else 20
    slurm = slurm_gpus.slurm
    keys = settings(slurm_gpus, SLURM_DEVICE_SELECTION="gpulock")
    slurm_gpus.configure(NODE, **{**keys, "SLURM_WAIT": "50"})
    script = slurm_gpus.journal.around("sleep 0.3")
    with daemon_on(slurm_gpus, NODE) as daemon, restless(daemon) as rounds:
        for _ in range(number):
            slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script=script)
        wait_empty(slurm_gpus)
        slurm_gpus.wait_free()  # what an Epilog left draining is freed as well
        wait_until(lambda: len(daemon.history()) >= number or None, why="their history")
    assert len(rounds) > number
    holds = slurm_gpus.journal.holds()
    assert len(holds) == number
    assert doubles(holds) == []
    assert {len(hold.devices) for hold in holds} == {1}
    assert len({name for hold in holds for name in hold.devices}) == 4
    lines = daemon.history()
    assert len({line["job_id"] for line in lines}) == len(lines) == number
    assert len({line["token"] for line in lines}) == number
    assert {line["how"] for line in lines} <= {"epilog", "reap", "claim"}
    assert {line["proof"] for line in lines if line["how"] != "epilog"} <= {SETTLED}
    assert not slurm.is_out(NODE)
