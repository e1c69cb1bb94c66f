# SPDX-License-Identifier: Apache-2.0
"""Confine a job: a cgroup of its own below its service's, closed before the job is moved in.

Hot. Below the service's own cgroup, so that to stop the service still stops the job. The name
tells the process that stands for the job (shepherd, step daemon), and the kernel keeps the rest:
there is no record of a job to lose. In doubt nothing is opened: what fails here refuses the job.
"""

import errno
import os

from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.isolation import policy, tree
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulock.isolation.policy import Rules

DEPTH = 16  # of launchers between a shepherd and its epilog
STEP, STEP_DAEMONS = "step_", "slurm"  # of JOB/step_0/slurm, which Slurm has beside step_0/user
STEP_MARK = "user.gpulock"  # of a step's folder: who confined it, for its TaskProlog


def confine_process(
    node: Node, label: str, pid: int, start: int, granted: "Iterable[Device]"
) -> None:
    """Move process `pid`, from which the job will descend, where it opens `granted` alone.

    Raises Refusal; then the job must not start.
    """
    settings = node.settings
    major = policy.read_caps_major(settings.proc_root)
    rules = policy.device_rules(granted, major, settings.driver_root)
    name = tree.cgroup_name(label, pid, start)
    try:
        folder = job_cgroup_folder(node, pid, name)
        if step := slurm_step_folder(folder):
            close_job_cgroup(os.path.dirname(step), rules)
            os.setxattr(step, STEP_MARK, name.encode())
        else:
            tree.note_cgroup_folders(node.store, [os.path.dirname(folder)])
            close_job_cgroup(folder, rules)
            tree.move_to_cgroup(pid, folder)
        if node.proc.running(pid, start):
            return
    except ProcessLookupError:
        pass
    except (OSError, ValueError) as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job cannot be confined to its devices: {fault}",
            "see gpulock doctor",
        ) from fault
    raise Refusal(UNKNOWN, f"process {pid} ended meanwhile", "nothing to do")


def job_cgroup_folder(node: Node, pid: int, name: str) -> str:
    """Return the folder of the cgroup `name` of a process, whether it is there and in it or not.

    Raises Refusal or ProcessLookupError.
    """
    top = tree.find_cgroup_top(node.settings.sys_root)
    folder = tree.service_cgroup_folder(top, node.proc, pid)
    return folder if os.path.basename(folder) == name else f"{folder}/{name}"


def slurm_step_folder(folder: str) -> str:
    """Return Slurm's own cgroup of a step, where its daemon's would be `folder`, else nothing.

    In version 2 Slurm moves each task from its daemon's cgroup to another one of the step's
    (docs/facts/slurm.md, cgroups of a job). So the job's own is closed, with all its steps.
    """
    step, daemons = os.path.split(os.path.dirname(folder))
    slurms = daemons == STEP_DAEMONS and os.path.basename(step).startswith(STEP)
    return step if slurms else ""


def close_job_cgroup(folder: str, rules: "Rules") -> None:
    """Let a cgroup, made where it is not there, open no GPU but what the rules name.

    Raises OSError.
    """
    from gpulock.isolation import bpf

    atomic.mkdir_if_missing(folder)
    bpf.attach_device_program(folder, bpf.assemble_device_program(rules))


def confined_pids(node: Node, label: str, keeper: int) -> list[int]:
    """Return the processes in the cgroups of a label, and below them; raise OSError.

    A cgroup whose process still runs is left out, but for that of the job's own, `keeper`.
    """
    found: set[int] = set()
    for top in list_job_cgroups(node):
        name = os.path.basename(top)
        process = tree.parse_cgroup_name(name)
        if not process or not name.startswith(f"{tree.PREFIX}{label}-"):
            continue
        if process[0] != keeper and node.proc.running(*process):
            continue
        for folder, _, _ in os.walk(top, onerror=raise_unless_cgroup_gone):
            try:
                found.update(tree.cgroup_pids(folder))
            except OSError as fault:
                raise_unless_cgroup_gone(fault)
    return sorted(found - {0})  # 0 is of another pid namespace


def raise_unless_cgroup_gone(fault: OSError) -> None:
    """Raise what is not that a cgroup is gone, before it was opened or since."""
    if fault.errno not in (errno.ENOENT, errno.ENODEV):
        raise fault


def end_confinement(node: Node, label: str, pid: int, start: int) -> None:
    """Take a job's confinement away at its end: called from below `pid`, which is moved out.

    Processes that the job left behind stay inside, and open no GPU any more. Raises Refusal or
    OSError; the reaper removes what is left.
    """
    name = tree.cgroup_name(label, pid, start)
    folder = job_cgroup_folder(node, pid, name)
    if os.path.isdir(folder):
        for member in ancestor_pids_up_to(node, pid):
            try:
                tree.move_to_cgroup(member, os.path.dirname(folder))
            except ProcessLookupError:
                continue  # one that is gone has left
        remove_or_close_cgroup(folder)


def remove_step_cgroups(node: Node, prefix: str) -> None:
    """Take away the cgroups of that name whose process is gone; raise Refusal or OSError.

    They may be far from slurmd: its step daemons have a scope of their own in version 2.
    """
    for folder in list_job_cgroups(node):
        name = os.path.basename(folder)
        process = tree.parse_cgroup_name(name) if name.startswith(prefix) else None
        if process and not node.proc.running(*process):
            remove_or_close_cgroup(folder)


def list_job_cgroups(node: Node) -> list[str]:
    """Return the jobs' cgroups; raise OSError."""
    found: list[str] = []
    for folder in tree.read_cgroup_folders(node.store):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # of a service that was stopped: its cgroups went with it
        found += [f"{folder}/{name}" for name in names if tree.parse_cgroup_name(name)]
    return found


def remove_or_close_cgroup(folder: str) -> None:
    """Remove a cgroup of a job that is over; who still lives there opens no GPU any more."""
    if not tree.remove_cgroup(folder):
        close_job_cgroup(folder, policy.CLOSE_ALL_GPUS)


def ancestor_pids_up_to(node: Node, last: int) -> list[int]:
    """Return this process and those above it up to `last`, which is moved when they are out."""
    pid = os.getpid()
    found: list[int] = []
    while pid > 1 and len(found) < DEPTH:
        found.append(pid)
        if pid == last:
            return found
        pid = node.proc.stat(pid).ppid
    return [last]
