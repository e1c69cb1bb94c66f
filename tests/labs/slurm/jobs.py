# SPDX-License-Identifier: Apache-2.0
"""What the tests of Slurm ask of jobs, locks and processes on a lab's nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from typing import Final

from tests.labs.common.installed import CONFIG, reap
from tests.labs.common.processes import children_of, command_of, end
from tests.labs.common.reaped import REPOSITORY
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.support.wait import wait_ended, wait_until

ALL: Final = (0, 1, 2, 3)
SLEEP: Final = "exec sleep 600\n"
SHOW_MASK: Final = "echo mask=${CUDA_VISIBLE_DEVICES-unset}.\n"


# --- jobs -----------------------------------------------------------------------------------------


def started(gpus: Gpulock, node: str, *words: str, script: str = SLEEP) -> JobId:
    """Start a batch job of slalice on a node; return it once it runs.

    Unless it is told what to do it has one process by then, and never another.
    """
    job = gpus.slurm.submit("slalice", "-w", node, *words, script=script)
    gpus.slurm.wait_running(job)
    if script == SLEEP:
        wait_until(
            lambda: any("sleep" in command_of(p) for p in gpus.slurm.job_processes(job, node)),
            why=f"job {job} to sleep",
        )
    return job


def wait_requeued(gpus: Gpulock, job: JobId) -> dict[str, str]:
    """Wait until a job is back in the queue, its epilogs over; return what Slurm shows of it."""
    return wait_until(
        lambda: (
            shown
            if (shown := gpus.slurm.job(job)).get("JobState") == "PENDING"
            and int(shown["Restarts"]) >= 1
            else None
        ),
        why=f"job {job} to be requeued",
    )


# --- locks ----------------------------------------------------------------------------------------


def held(gpus: Gpulock, job: JobId, node: str) -> list[str]:
    """Return the minors of the devices that a job holds on a node."""
    locks = gpus.locks(node).items()
    return sorted(one.minor_of(name) for name, one in locks if one.job_id == str(job))


def notes(gpus: Gpulock, node: str) -> list[str]:
    """Return the names of what the node's jobs are told."""
    folder = gpus.slurm.path_in(node, "/run/gpulock.claims/tasks")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


@contextlib.contextmanager
def impatient(gpus: Gpulock, node: str) -> Generator[None]:
    """Let jobs of a node not wait for devices that are held, where they are to be refused."""
    place = gpus.slurm.path_in(node, CONFIG)
    text = place.read_text()
    place.write_text(f"{text}SLURM_WAIT=0.2\n")
    yield
    place.write_text(text)


@contextlib.contextmanager
def occupied(gpus: Gpulock, node: str, *indexes: int) -> Generator[int]:
    """Hold devices of a node by a process of no scheduler; yield its pid."""
    start = "from gpulock.cli import main; main()"
    names = ",".join(map(str, indexes))
    line = [*gpus.slurm.machines[node].enter(), sys.executable, "-c", start, "--config", CONFIG]
    holder = subprocess.Popen(
        [*line, "run", "--devices", names, "--", "sleep", "600"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        mine = [str(holder.pid)] * len(indexes)
        wait_until(
            lambda: [r.job_id for r in gpus.locks(node).values() if r.job_id == mine[0]] == mine,
            why=f"{names} of {node} to be held",
        )
        yield holder.pid
    finally:
        family = children_of(holder.pid)
        holder.kill()
        holder.wait()
        wait_ended(family, why="the holder's command to end with it")


# --- processes ------------------------------------------------------------------------------------


def kill_steps(gpus: Gpulock, job: JobId, node: str) -> list[int]:
    """Kill a job's step daemons on a node, as an OOM killer would; return what lives on."""
    while steps := gpus.slurm.steps(job, node):  # one may have started another meanwhile
        end(step.pid for step in steps)
    return gpus.slurm.job_processes(job, node)


def is_reaped(gpus: Gpulock, job: JobId, node: str) -> bool:
    """Reap; return whether nothing of a job is left on a node."""
    reap(gpus, node)
    return not gpus.held_by(job).get(node)
