# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a job's isolation, and what a reconcile does about it.

Hot; the door to this package for hooks, which load it where ISOLATION is not off (sge.members
asks confine which processes a cgroup of ours has). A cgroup of ours whose process is gone goes as
soon as it is empty; with it goes its program. A reconcile kills nobody: a job whose shepherd was
killed lives on, and stays confined.
"""

import os

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal, os_error_kind
from gpulock.isolation import confine, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.context import Node
from gpulock.node.devices import Device


class IsolatedJob:
    """A job as isolation sees it: a label for people, and the process it descends from."""

    def __init__(self, label: str, pid: int, start: int) -> None:
        self.label = label
        self.pid = pid
        self.start = start


def prepare_slurm_isolation(node: Node, slurmds: list[int]) -> None:
    """Refuse, before anything is claimed, what this node cannot do for Slurm; its steps come later.

    Each slurmd is closed first: it may run the job's login files. Raises Refusal.
    """
    try:
        tree.find_cgroup_top(node.settings.sys_root)
        for pid in slurmds:
            sessions.close_launcher(node, pid, CLOSE_ALL_GPUS)
    except ProcessLookupError as gone:
        raise Refusal(UNKNOWN, f"slurmd ended meanwhile: {gone}", "nothing to do") from gone
    except (OSError, ValueError) as fault:
        raise Refusal(
            os_error_kind(fault), f"slurmd cannot be closed: {fault}", "see gpulock doctor"
        ) from fault


def check_systemd_scope(config: "dict[str, list[str]]") -> None:
    """Raise Refusal for a job of Grid Engine that systemd moves out of the cgroup closed here."""
    why = "systemd takes the job out of the cgroup that closes its GPUs (ISOLATION=cgroup)"
    if config.get("enable_systemd") == ["1"]:  # Open Cluster Scheduler
        do = "set ENABLE_SYSTEMD=false in execd_params, or ISOLATION=off"
        raise Refusal(INVALID_REQUEST, why, do)
    if config.get("use_systemd") == ["yes"]:  # Some Grid Engine
        raise Refusal(INVALID_REQUEST, why, "take USE_CGROUPS=systemd out of execd_params")


def begin_job_isolation(node: Node, who: IsolatedJob, granted: list[Device]) -> None:
    """Keep a job to what it was granted; raise Refusal, and then it must not start."""
    try:
        tree.note_cgroup_folders(node.store, [])
        sessions.close_login_cgroups(tree.find_cgroup_top(node.settings.sys_root), CLOSE_ALL_GPUS)
        confine.confine_process(node, who.label, who.pid, who.start, granted)
    except OSError as fault:
        raise Refusal(
            os_error_kind(fault),
            f"the job cannot be confined to its devices: {fault}",
            "see gpulock doctor",
        ) from fault


def end_job_isolation(node: Node, prefix: str, who: "IsolatedJob | None" = None) -> str:
    """Take a job's cgroup away, before its devices are released; return what went wrong.

    And those of its tasks or steps here that are over, whose labels begin with `prefix`: a task of
    `qrsh -inherit` has no epilog. Without `who` only these.
    """
    try:
        if who is not None:
            confine.end_confinement(node, who.label, who.pid, who.start)
        confine.remove_step_cgroups(node, f"{tree.PREFIX}{prefix}")
    except (OSError, ValueError) as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def clean_up_isolation(node: Node) -> str:
    """Remove what jobs that are over left behind, see to the ways round; return what failed."""
    try:
        remove_ended_cgroups(node)
    except OSError as fault:
        return f"isolation: {fault}"
    except Refusal as refusal:
        return f"isolation: {refusal.why}"
    return ""


def remove_ended_cgroups(node: Node) -> None:
    """Remove the cgroups of jobs that are over; raise Refusal or OSError.

    Logins are closed from the first reconcile of a boot on, before there is a job: what somebody
    opens now stays open. That is noted first, or nobody would open them again.
    """
    try:
        top = tree.find_cgroup_top(node.settings.sys_root)
    except Refusal:
        if node.settings.isolation != "off":
            raise
        top = ""
    found = confine.list_job_cgroups(node)
    left = [folder for folder in found if not remove_if_job_ended(folder, node)]
    if node.settings.isolation != "off":
        tree.note_cgroup_folders(node.store, [])
        sessions.close_login_cgroups(top, CLOSE_ALL_GPUS)
        return
    launchers = [folder for folder in left if tree.is_launcher_cgroup(folder)]
    sessions.reopen_cgroups([*(sessions.login_cgroups(top) if top else ()), *launchers])
    if not left:
        tree.remove_cgroup_marks(node.store)


def remove_if_job_ended(folder: str, node: Node) -> bool:
    """Remove a cgroup of ours whose process is gone; return whether it is; raise OSError."""
    process = tree.parse_cgroup_name(os.path.basename(folder))
    return process is not None and not node.proc.running(*process) and tree.remove_cgroup(folder)
