# SPDX-License-Identifier: Apache-2.0
"""What the tests of Slurm ask of jobs, locks and processes on a lab's nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

from gpulock.store.owner import Owner
from tests.labs.common import reaped
from tests.labs.common import shut_gate as gate
from tests.labs.common.processes import children_of, command_of, end, parent_of, running
from tests.labs.common.reaped import Reaped
from tests.labs.sge.wait import until
from tests.labs.slurm.gpulock import CONFIG, REPOSITORY, Gpulock
from tests.labs.slurm.lab import JobId

SOAK: Final = os.environ.get("GPULOCK_SOAK") == "1"  # full counts
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
        until(
            lambda: any("sleep" in command_of(p) for p in gpus.slurm.job_processes(job, node)),
            what=f"job {job} to sleep",
            why=gpus.slurm.logs,
        )
    return job


def wait_requeued(gpus: Gpulock, job: JobId, *, times: int = 1) -> dict[str, str]:
    """Wait until a job is back in the queue, its epilogs over; return what Slurm shows of it."""
    return until(
        lambda: (
            shown
            if (shown := gpus.slurm.job(job)).get("JobState") == "PENDING"
            and int(shown["Restarts"]) >= times
            else None
        ),
        what=f"job {job} to be requeued",
        why=lambda: f"{gpus.slurm.job(job)}\n{gpus.slurm.said(job)}\n{gpus.slurm.logs()}",
    )


def gate_file(gpus: Gpulock, name: str, user: str = "slalice") -> Path:
    """Return a file in a user's home for which jobs wait, not there yet."""
    path = gpus.slurm.users[user].home / name
    path.unlink(missing_ok=True)
    return path


def waiting_for(path: Path) -> str:
    """Return lines of a batch script (bash, no other shell) that wait for a file by themselves.

    A child that slept would outlive a script that Slurm ends, and keep its locks for that long.
    """
    return f"exec 9<> <(:)\nuntil [ -e {path} ]; do read -rt 0.1 -u 9 || :; done\n"


def script(gpus: Gpulock, name: str, text: str) -> Path:
    """Write a program into the lab's scratch folder; return its path."""
    path = gpus.slurm.lab / "programs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- locks ----------------------------------------------------------------------------------------


def held(gpus: Gpulock, job: JobId, node: str) -> list[str]:
    """Return the minors of the devices that a job holds on a node."""
    return sorted(r.minor for r in gpus.locks(node).values() if r.job_id == str(job))


def record_of(gpus: Gpulock, job: JobId, node: str) -> Owner:
    """Return the record of one lock of a job."""
    return next(r for r in gpus.locks(node).values() if r.job_id == str(job))


def notes(gpus: Gpulock, node: str) -> list[str]:
    """Return the names of what the node's jobs are told."""
    folder = gpus.slurm.path_in(node, "/run/gpulock/tasks")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def reap(gpus: Gpulock, node: str) -> Reaped:
    """Reconcile on a node, as `gpulock reap` does; return what became of each lock."""
    return reaped.reaped(gpus.slurm.run_in(node, reaped.command(CONFIG), env=reaped.ENV))


def totals(gpus: Gpulock, node: str) -> dict[str, str]:
    """Return the counters of a node."""
    try:
        text = gpus.slurm.path_in(node, "/run/gpulock/totals").read_text()
    except FileNotFoundError:
        return {}
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


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
        until(
            lambda: [r.job_id for r in gpus.locks(node).values() if r.job_id == mine[0]] == mine,
            what=f"{names} of {node} to be held",
        )
        yield holder.pid
    finally:
        family = children_of(holder.pid)
        holder.kill()
        holder.wait()
        until(lambda: not any(map(running, family)), what="the holder's command to end with it")


def lose_locks(gpus: Gpulock, node: str) -> None:
    """Empty a node's LOCK_DIR."""
    for place in gpus.slurm.path_in(node, "/run/gpulock").iterdir():
        shutil.rmtree(place) if place.is_dir() else place.unlink()


# --- processes ------------------------------------------------------------------------------------


def kill_steps(gpus: Gpulock, job: JobId, node: str) -> list[int]:
    """Kill a job's step daemons on a node, as an OOM killer would; return what lives on."""
    end(step.pid for step in gpus.slurm.steps(job, node))
    return gpus.slurm.job_processes(job, node)


def wait_detached(gpus: Gpulock, job: JobId, node: str, pid: int) -> None:
    """Wait until no process of a job is a child's parent: else it would be ended with the job."""
    until(
        lambda: parent_of(pid) not in gpus.slurm.job_processes(job, node),
        what=f"process {pid} to have left job {job}",
    )


# --- the machine ----------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(gpus: Gpulock, node: str, place: str, *words: str) -> Generator[None]:
    """Mount something over a place of one node."""
    done = gpus.slurm.run_in(node, ["mount", *words, place])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        done = gpus.slurm.run_in(node, ["umount", "-l", place])
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def other_boot(gpus: Gpulock, node: str) -> Generator[None]:
    """Let a node have another boot id, as after a reboot."""
    fake = gpus.slurm.lab / f"boot_id.{node}"
    fake.write_text("0b00b00b-0000-4000-8000-000000000001\n")
    with mounted(gpus, node, "/proc/sys/kernel/random/boot_id", "--bind", str(fake)):
        yield


def shut_gate(gpus: Gpulock, node: str) -> contextlib.AbstractContextManager[None]:
    """Hold a node's gate by a process that is stopped."""
    return gate.held(gpus.slurm.path_in(node, "/run/gpulock/gate"))
