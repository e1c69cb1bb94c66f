# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a job's isolation, by the ISOLATION of this node.

Hot; the only door to this package for hooks, which load it where ISOLATION is not off.
"""

import os

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, os_error_kind
from gpulock.isolation import confine, group, marks, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.store import boot
from gpulock.store.gate import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge

CGROUP, GROUP = "cgroup", "group"


class IsolatedJob:
    """A job as isolation sees it: a label for people, and the process it descends from.

    `gid` is its supplementary group, 0 where its scheduler gives none.
    """

    __slots__ = ("gid", "label", "pid", "start")

    def __init__(self, label: str, pid: int, start: int, gid: int = 0) -> None:
        self.label = label
        self.pid = pid
        self.start = start
        self.gid = gid


def prepare_slurm_isolation(node: Node, slurmds: list[int], count: int) -> None:
    """Refuse, before anything is claimed, what this node cannot do for Slurm; its steps come later.

    Each slurmd is closed first: it may run the job's login files. Raises Refusal.
    """
    if node.settings.isolation == GROUP:
        if count:
            group.check_group_grant([], 0)
        return
    try:
        tree.find_hierarchies(node.settings.sys_root)
        for pid in slurmds:
            sessions.close_launcher(node, pid, CLOSE_ALL_GPUS)
    except ProcessLookupError as gone:
        raise Refusal(UNKNOWN, f"slurmd ended meanwhile: {gone}", "nothing to do") from gone
    except (OSError, ValueError) as fault:
        raise Refusal(
            os_error_kind(fault), f"slurmd cannot be closed: {fault}", "see gpulock doctor"
        ) from fault


def begin_job_isolation(
    node: Node,
    who: IsolatedJob,
    granted: list[Device],
    judge: "Callable[[], Judge]",
    deadline: Deadline,
) -> None:
    """Keep a job to what it was granted; raise Refusal, and then it must not start."""
    try:
        marks.note_cgroup_folders(node.store, [])
        if node.settings.isolation == CGROUP:
            sessions.close_login_cgroups(
                tree.find_hierarchies(node.settings.sys_root), CLOSE_ALL_GPUS
            )
            confine.confine_process(node, who.label, who.pid, who.start, granted)
            return
        if not granted and not os.path.isdir(node.settings.driver_root):
            return  # no driver, no device to close
        group.check_modify_device_files(node.settings.driver_root)
        group.check_group_grant(granted, who.gid)
        if granted:
            group.check_group_unused(judge(), who.gid)
        group.check_task_group(granted, who.gid, sync_device_groups(node, node.devices(), deadline))
    except OSError as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job cannot be confined to its devices: {fault}",
            "see gpulock doctor",
        ) from fault


def isolated_job_pids(node: Node, who: IsolatedJob) -> list[int]:
    """Return the processes in the cgroups of a job; raise OSError where that cannot be seen."""
    return confine.confined_pids(node, tree.cgroup_name(who.label, who.pid, who.start))


def enter_closed_cgroup(node: Node, label: str) -> None:
    """Move this process into a cgroup of its own that opens no GPU; raise Refusal."""
    pid = os.getpid()
    confine.confine_process(node, label, pid, node.proc.start(pid), [])


def end_job_isolation(node: Node, who: IsolatedJob) -> str:
    """Take a job's cgroup away, before its devices are released; return what went wrong.

    And those of its tasks here that are over: a task of `qrsh -inherit` has no epilog.
    """
    try:
        if node.settings.isolation == CGROUP:
            confine.end_confinement(node, who.label, who.pid, who.start)
            confine.remove_step_cgroups(node, f"{tree.PREFIX}{who.label}-")
    except (OSError, ValueError) as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def end_step_isolation(node: Node, number: str) -> str:
    """Take away what the steps of a Slurm job left of theirs; return what went wrong."""
    try:
        if node.settings.isolation == CGROUP:
            confine.remove_step_cgroups(node, f"{tree.PREFIX}{number}.")
    except (OSError, ValueError) as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def close_released_devices(node: Node, deadline: Deadline) -> str:
    """Close what was released, as the next prolog would; return what went wrong."""
    try:
        if node.settings.isolation == GROUP and node.store.exists():
            sync_device_groups(node, node.devices(), deadline)
    except OSError as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def sync_device_groups(node: Node, devices: list[Device], deadline: Deadline) -> dict[int, int]:
    """Let the nodes' groups follow the locks; return minor -> group. Raises Refusal or OSError.

    A job without GPUs may be the first of a boot, and find no locks at all.
    """
    with Gate(node.store, deadline, node.settings.gate_timeout):
        if not node.store.exists():
            boot.prepare_boot(node.store, node.settings.state_dir, node.boot_id, node.name)
        return group.apply_device_groups(node, devices)
