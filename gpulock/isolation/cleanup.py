# SPDX-License-Identifier: Apache-2.0
"""What a reconcile does about isolation: remove what nobody lives in, close what was opened.

Hot by its place, but loaded only by a reconcile, and only where isolation is on, or was. A cgroup
of ours whose process is gone goes as soon as it is empty; with it goes its program. Nothing here
kills: a job whose shepherd was killed lives on, and stays confined.
"""

import os

from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.isolation import marks, sessions, tree
from gpulock.isolation.job import CGROUP, GROUP, follow
from gpulock.isolation.policy import NOTHING
from gpulock.node.context import Node
from gpulock.node.devices import Device


def settle(node: Node, devices: list[Device], deadline: Deadline) -> str:
    """Remove what jobs that are over left behind, and see to the ways round.

    Returns what went wrong. It takes the gate, where devices' groups follow the locks.
    """
    try:
        if node.settings.isolation == GROUP:
            follow(node, devices, deadline)
        remove_cgroups(node)
    except OSError as fault:
        return f"isolation: {fault}"
    except Refusal as refusal:
        return f"isolation: {refusal.why}"
    return ""


def remove_cgroups(node: Node) -> None:
    """Remove the cgroups of jobs that are over; raise Refusal or OSError.

    Logins are closed from the first reconcile of a boot on, before there is a job: what somebody
    opens now stays open. That is noted first, or nobody would open them again.
    """
    try:
        trees = tree.trees(node.settings.sys_root)
    except Refusal:
        if node.settings.isolation == CGROUP:
            raise
        trees = []
    left = [folder for folder in ours(node) if not go(folder, node)]
    if node.settings.isolation == CGROUP:
        marks.note(node.store, [])
        sessions.close(trees, NOTHING)
        return
    sessions.open_again(trees)
    if node.settings.isolation != GROUP and not left:
        marks.forget(node.store)


def go(folder: str, node: Node) -> bool:
    """Remove a cgroup of ours whose process is gone; return whether it is; raise OSError."""
    process = tree.process_of(os.path.basename(folder))
    return process is not None and not node.proc.running(*process) and tree.remove(folder)


def ours(node: Node) -> list[str]:
    """Return the jobs' cgroups; raise OSError."""
    found: list[str] = []
    for folder in marks.noted(node.store):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # of a service that was stopped: its cgroups went with it
        found += [f"{folder}/{name}" for name in names if tree.process_of(name)]
    return found
