# SPDX-License-Identifier: Apache-2.0
"""What a reconcile does about isolation: remove what nobody lives in, close logins.

Hot by its place, but loaded only by a reconcile, and only where isolation is on, or was. A cgroup
of ours whose process is gone goes as soon as it is empty; with it goes its program. Nothing here
kills: a job whose shepherd was killed lives on, and stays confined.
"""

import os

from gpulock.errors import Refusal
from gpulock.isolation import confine, marks, sessions, tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.node.context import Node


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
        trees = tree.find_hierarchies(node.settings.sys_root)
    except Refusal:
        if node.settings.isolation != "off":
            raise
        trees = []
    found = confine.list_job_cgroups(node)
    left = [folder for folder in found if not remove_if_job_ended(folder, node)]
    if node.settings.isolation != "off":
        marks.note_cgroup_folders(node.store, [])
        sessions.close_login_cgroups(trees, CLOSE_ALL_GPUS)
        return
    sessions.reopen_login_cgroups(trees)
    for folder in left:
        if tree.is_launcher_cgroup(folder):
            sessions.reopen_launcher(folder)
    if not left:
        marks.remove_cgroup_marks(node.store)


def remove_if_job_ended(folder: str, node: Node) -> bool:
    """Remove a cgroup of ours whose process is gone; return whether it is; raise OSError."""
    process = tree.parse_cgroup_name(os.path.basename(folder))
    return process is not None and not node.proc.running(*process) and tree.remove_cgroup(folder)
