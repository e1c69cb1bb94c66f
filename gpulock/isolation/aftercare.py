# SPDX-License-Identifier: Apache-2.0
"""What a reconcile does about isolation: remove what nobody lives in, close what was opened.

Hot by its place, but loaded only by a reconcile, and only where isolation was ever on. A cgroup of
ours whose process is gone goes as soon as it is empty; with it goes its program. Nothing here
kills: a job whose shepherd was killed lives on, and stays confined.
"""

import os

from gpulock import atomic
from gpulock.deadline import Deadline
from gpulock.devices import Device
from gpulock.isolation import sessions, tree
from gpulock.isolation.job import CGROUP, GROUP, MARK, follow
from gpulock.isolation.policy import NOTHING
from gpulock.node import Node
from gpulock.refusal import Refusal

DEPTH = 12  # of cgroups that are looked into


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
    """Remove the cgroups of jobs that are over; raise Refusal or OSError."""
    try:
        trees = tree.trees(node.settings.sys_root)
    except Refusal:
        if node.settings.isolation == CGROUP:
            raise
        trees = []
    left = [folder for one in trees for folder in ours(one.top) if not go(folder, node)]
    if node.settings.isolation == CGROUP:
        sessions.close(trees, NOTHING)
        return
    sessions.open_again(trees)
    if node.settings.isolation != GROUP and not left:
        atomic.remove_quietly(f"{node.store.path}/{MARK}")


def go(folder: str, node: Node) -> bool:
    """Remove a cgroup of ours whose process is gone; return whether it is; raise OSError."""
    process = tree.process_of(os.path.basename(folder))
    return process is not None and not node.proc.running(*process) and tree.remove(folder)


def ours(top: str) -> list[str]:
    """Return the cgroups of ours; raise OSError.

    Only below folders that are root's: in what is delegated to a user, he makes as many as he
    likes.
    """
    found: list[str] = []
    level = [top]
    for _ in range(DEPTH):
        inner: list[str] = []
        for folder in level:
            for path in children(folder):
                mine = tree.process_of(os.path.basename(path)) is not None
                (found if mine else inner).append(path)
        level = inner
    return found


def children(folder: str) -> list[str]:
    """Return the cgroups below one that are our own user's, root's; raise OSError."""
    own = os.geteuid()
    try:
        with os.scandir(folder) as entries:
            return [e.path for e in entries if e.is_dir() and e.stat().st_uid == own]
    except FileNotFoundError:
        return []
