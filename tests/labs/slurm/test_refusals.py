# SPDX-License-Identifier: Apache-2.0
"""A Slurm job that may not have its devices is told why, and nobody else is touched."""

from __future__ import annotations

import contextlib
import re

import pytest

from tests.labs.common.installed import gate_file, waiting_for
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import ALL, held, notes, occupied, started, wait_requeued
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
OTHER = "slnode2"
SOON = {"SLURM_WAIT": "0.2"}
GPU = "--gres=gpu:1"


def newest_job(gpus: Gpulock, name: str) -> JobId:
    """Return the last job of a name."""
    command = ["squeue", "-h", "-t", "all", "-n", name, "-o", "%A"]
    return JobId(max(map(int, gpus.slurm.run_in(gpus.slurm.master, command).stdout.split())))


def is_busy(text: str) -> bool:
    """Return whether a refusal says that other jobs have the devices."""
    return re.search(": busy: .*([01] of 4 free|not free:)", text) is not None


# --- batch jobs of one node -----------------------------------------------------------------------


@BOTH
def test_a_job_that_is_not_to_be_requeued_does_not_run_either(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    mode(slurm_gpus, SOON)
    slurm = slurm_gpus.slurm
    with occupied(slurm_gpus, NODE, *ALL):
        job = slurm.submit("slalice", "--no-requeue", "-w", NODE, GPU, script="echo ran\n")
        wide = ("--no-requeue", "-N2", "-w", f"{NODE},{OTHER}", GPU)
        several = slurm.submit("slbob", *wide, script="srun echo ran\n")
        wait_until(
            lambda: slurm.state(job) == "FAILED" or slurm.job(job)["Restarts"] != "0",
            why="the job to be refused",
        )
        assert is_busy(slurm.said(job))
        assert slurm.wait_settled(several) == "CANCELLED"
        assert is_busy(slurm.job(several)["AdminComment"])
        assert "ran" not in slurm.said(job) + slurm.said(several)
        assert not any(slurm_gpus.held_by(several).values())
        assert not slurm.is_out(NODE) and not slurm.is_out(OTHER)


# --- jobs of several nodes ------------------------------------------------------------------------


@pytest.mark.short
@BOTH
@pytest.mark.parametrize(
    "refused", [(NODE,), (OTHER,), (NODE, OTHER)], ids=["first", "second", "both"]
)
def test_a_job_refused_on_some_of_its_nodes_is_requeued_as_a_whole(
    slurm_gpus: Gpulock, mode: Mode, refused: tuple[str, ...]
) -> None:
    mode(slurm_gpus, SOON)
    slurm = slurm_gpus.slurm
    go = gate_file(slurm_gpus, "go")
    with contextlib.ExitStack() as stack:
        for node in refused:
            stack.enter_context(occupied(slurm_gpus, node, *ALL))
        words = ("-N2", "-w", f"{NODE},{OTHER}", "--gres=gpu:2")
        # an srun of the first run would outlive it by half a minute, and keep the locks
        step = "srun sh -c 'echo $SLURMD_NODENAME=$CUDA_VISIBLE_DEVICES'\nexec sleep 600\n"
        job = slurm.submit("slalice", *words, script=waiting_for(go) + step)
        shown = wait_requeued(slurm_gpus, job)
        assert is_busy(shown["AdminComment"])
        assert not any(f"{node}=" in slurm.said(job) for node in (NODE, OTHER))
        assert not any(slurm_gpus.held_by(job).values())
        assert notes(slurm_gpus, NODE) == notes(slurm_gpus, OTHER) == []
        assert not slurm.is_out(NODE) and not slurm.is_out(OTHER)
    go.touch()
    slurm.begin(job)
    wait_until(
        lambda: all(f"{node}=0,1\n" in slurm.said(job) for node in (NODE, OTHER)),
        why="both nodes to see their devices",
    )
    assert [len(held(slurm_gpus, job, node)) for node in (NODE, OTHER)] == [2, 2]


@BOTH
@pytest.mark.parametrize(("busy", "state"), [("requeue", "PENDING"), ("error", "CANCELLED")])
def test_of_an_array_over_two_nodes_the_refused_task_goes_alone(
    slurm_gpus: Gpulock, mode: Mode, busy: str, state: str
) -> None:
    mode(slurm_gpus, {**SOON, "ON_BUSY": busy})
    slurm = slurm_gpus.slurm
    words = ("--array=1-2%1", "-N2", "-w", f"{NODE},{OTHER}", GPU)
    array = slurm.submit("slalice", *words, script="exec sleep 600\n")
    wait_until(lambda: len(slurm_gpus.locks(OTHER)) == 1, why="a task to start")
    with occupied(slurm_gpus, OTHER, 1, 2, 3):
        slurm.scontrol("update", f"jobid={array}", "arraytaskthrottle=2")
        if busy == "requeue":
            wait_requeued(slurm_gpus, array)
        slurm.wait_state(array, state)
        tasks = slurm.tasks(array)
        assert tasks.pop(2) == array, "the trap is not set: another task has the array's id"
        (first,) = tasks.values()
        slurm.wait_running(first)
        assert (slurm.state(first), slurm.job(first)["Restarts"]) == ("RUNNING", "0")
        assert {node: len(names) for node, names in slurm_gpus.held_by(first).items()} == {
            NODE: 1,
            OTHER: 1,
            "slnode3": 0,
        }
        wait_until(lambda: not any(slurm_gpus.held_by(array).values()), why="its other lock to go")
        assert not slurm.is_out(NODE) and not slurm.is_out(OTHER)


@pytest.mark.parametrize("refused", [NODE, OTHER], ids=["leader", "second"])
def test_a_component_that_is_refused_takes_its_whole_job_along(
    slurm_gpus: Gpulock, refused: str
) -> None:
    by_gpulock(slurm_gpus, SOON)
    slurm = slurm_gpus.slurm
    parts = ("--gres=gpu:2", "-w", NODE, ":", "--gres=gpu:2", "-w", OTHER)
    with occupied(slurm_gpus, refused, 1, 2, 3):
        tell = "srun --het-group=0,1 sh -c 'echo ran on $SLURMD_NODENAME'\nexec sleep 600\n"
        leader = slurm.submit("slalice", *parts, script=tell)
        jobs = (leader, JobId(leader + 1))
        wait_until(
            lambda: any(
                slurm.state(job) in ("CANCELLED", "COMPLETED") or slurm.job(job)["Restarts"] != "0"
                for job in jobs
            ),
            why="the job to be refused",
        )
        states = {slurm.wait_state(job, "CANCELLED", "PENDING", "COMPLETED") for job in jobs}
        assert states <= {"CANCELLED", "PENDING"}
        assert f"ran on {refused}" not in slurm.said(leader)
        wait_until(  # an Epilog may still be at work when its job's state is told
            lambda: not any(name for job in jobs for name in slurm_gpus.held_by(job).values()),
            why="their locks to go",
        )
        assert not slurm.is_out(NODE) and not slurm.is_out(OTHER)


# --- srun and salloc ------------------------------------------------------------------------------


@pytest.mark.short
@BOTH
@pytest.mark.parametrize("program", ["srun", "salloc"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_and_salloc_are_cancelled_and_told_why(
    slurm_gpus: Gpulock, mode: Mode, program: str, nodes: int
) -> None:
    mode(slurm_gpus, SOON)
    slurm = slurm_gpus.slurm
    where = ("-w", OTHER) if nodes == 1 else ("-N2", "-w", f"{NODE},{OTHER}")
    other = started(slurm_gpus, NODE, GPU)
    with occupied(slurm_gpus, OTHER, *ALL):
        words = (*where, "-J", "refused", GPU, "sh", "-c", "echo ran; sleep 60")
        done = slurm.srun("slbob", *words) if program == "srun" else slurm.salloc("slbob", *words)
        assert done.returncode != 0
        assert is_busy(done.stderr)
        assert program == "salloc" or "ran" not in done.stdout
    job = newest_job(slurm_gpus, "refused")
    assert slurm.wait_settled(job) in ("CANCELLED", "FAILED")
    assert is_busy(slurm.job(job)["AdminComment"])
    assert not any(slurm_gpus.held_by(job).values())
    assert not slurm.is_out(NODE) and not slurm.is_out(OTHER)
    assert held(slurm_gpus, other, NODE) == ["0"]


# --- an invalid request ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["batch", "srun"])
def test_a_job_of_two_types_fails_for_good_and_is_told_why(slurm_gpus: Gpulock, form: str) -> None:
    """Slurm tells the Prolog the positions of one type alone."""
    by_slurm(slurm_gpus, SOON, types={0: "a", 1: "a", 2: "b", 3: "b"})
    slurm = slurm_gpus.slurm
    words = ("-w", NODE, "-J", "types", "--gres=gpu:a:1,gpu:b:1")
    if form == "batch":
        job = slurm.submit("slbob", *words, script="echo ran\n")
        state, said = slurm.wait_done(job), slurm.said(job)
    else:
        done = slurm.srun("slbob", *words, "echo", "ran")
        job = newest_job(slurm_gpus, "types")
        state, said = slurm.wait_settled(job), done.stdout + done.stderr
        assert done.returncode != 0
    assert "Slurm gave 2 GPUs on this node, but its Prolog saw 1" in said
    assert "ran" not in said
    shown = slurm.job(job)
    assert (state, shown["ExitCode"], shown["Restarts"]) == ("FAILED", "1:0", "0")
    assert slurm_gpus.locks(NODE) == {}
    assert not slurm.is_out(NODE)
