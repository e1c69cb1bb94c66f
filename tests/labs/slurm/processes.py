# SPDX-License-Identifier: Apache-2.0
"""What of a Slurm lab's jobs runs: step daemons, the jobs' own processes, cgroups."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.alloc import environs
from gpulock.node.procfs import Proc
from tests.labs.sge.machines import Machine

_STEP: Final = re.compile(rb"slurmstepd: \[(\d+)\.(\w+)\]")
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Step:
    """A running step daemon; `name` is batch, extern, interactive or a number."""

    job: int
    name: str
    node: str
    pid: int


def steps(machines: Iterable[Machine]) -> list[Step]:
    """Return the step daemons of some machines; the child that becomes a task is none."""
    found: list[Step] = []
    for machine, pid in _within(machines):
        with contextlib.suppress(OSError):
            title = _STEP.match(Path(f"/proc/{pid}/cmdline").read_bytes())
            # /proc/PID itself is root's for the child as well, because it is undumpable.
            if title and "\nUid:\t0\t0\t" in Path(f"/proc/{pid}/status").read_text():
                found.append(Step(int(title[1]), title[2].decode(), machine.name, pid))
    return found


def job_processes(machines: Iterable[Machine], job: int | None = None) -> list[int]:
    """Return what runs with the environment of a job, or of any, detached or not; no hooks.

    Tasks of every component of a heterogeneous job carry the leader's id.
    """
    found: list[int] = []
    wanted = None if job is None else b"%d" % job
    for _, pid in _within(machines):
        with contextlib.suppress(OSError):
            words = read_environ(pid).split(b"\0")
            environ = {name: value for name, _, value in (word.partition(b"=") for word in words)}
            own = environ.get(b"SLURM_JOB_ID")
            if own and wanted in (None, own) and not _is_hook(environ):
                found.append(pid)
    return found


def read_environ(pid: int) -> bytes:
    """Return what a process was started with, once it is past the execve(2) it is in.

    Raises OSError.
    """
    for _ in range(1000):
        with contextlib.suppress(environs.StartingProgramError):
            return environs.read_environ(Proc(), pid)
    return environs.read_environ(Proc(), pid)


def _is_hook(environ: Mapping[bytes, bytes]) -> bool:
    """Tell a hook, or what it has started, by its environment.

    A task keeps the context of its TaskProlog. It is that TaskProlog as long as the process that
    becomes the task is still the step daemon's child.
    """
    context = environ.get(b"SLURM_SCRIPT_CONTEXT", b"")
    if context != b"prolog_task":
        return context != b""
    task = environ.get(b"SLURM_TASK_PID", b"none").decode()
    try:
        return _STEP.match(Path(f"/proc/{task}/cmdline").read_bytes()) is not None
    except OSError:
        return False


def hook_runs(context: str) -> bool:
    """Return whether any hook of a kind runs, such as `epilog_slurmd`."""
    return _runs_with(f"SLURM_SCRIPT_CONTEXT={context}")


def hook_of_job_runs(job: int) -> bool:
    """Return whether a Prolog or an Epilog of a job runs on any node."""
    return any(
        _runs_with(f"SLURM_SCRIPT_CONTEXT={context}", f"SLURM_JOB_ID={job}")
        for context in ("prolog_slurmd", "epilog_slurmd")
    )


def _runs_with(*variables: str) -> bool:
    """Return whether a process runs that has all these variables in its environment."""
    wanted = {variable.encode() for variable in variables}
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= {*read_environ(int(place.parent.name)).split(b"\0")}:
                return True
    return False


def groups(nodes: Sequence[str]) -> list[Path]:
    """Return the cgroups that Slurm has made for nodes, in all hierarchies."""
    kinds = ("slurm_{}", "{}_slurmstepd.scope", "{}_slurmd.service")
    names = [f"*/{kind.format(node)}" for node in nodes for kind in kinds]
    return [group for name in names for group in sorted(_CGROUPS.glob(name))]


def step_daemons_group(node: str) -> Path:
    """Return where a node's step daemons are in version 2, before they have a job's cgroup."""
    return _CGROUPS / f"system.slice/{node}_slurmstepd.scope/system"


def own_group(node: str) -> Path:
    """Make a cgroup of version 2 for a node's slurmd, as systemd does.

    slurmd moves every process of its own, and fails where one ends meanwhile.
    """
    group = _CGROUPS / f"system.slice/{node}_slurmd.service"
    group.mkdir(parents=True, exist_ok=True)
    return group


def _within(machines: Iterable[Machine]) -> Iterator[tuple[Machine, int]]:
    """Go through the processes in the machines' mount namespaces."""
    spaces = {os.stat(f"/proc/{machine.pid}/ns/mnt").st_ino: machine for machine in machines}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                machine = spaces.get(os.stat(f"/proc/{entry}/ns/mnt").st_ino)
                if machine is not None:
                    yield machine, int(entry)
