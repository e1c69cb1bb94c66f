# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a job's isolation, by the ISOLATION of this node.

Hot; the only door to this package for hooks, which load it where ISOLATION is not off.
"""

import os

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, Refusal
from gpulock.isolation import confine, group, marks, sessions, tree
from gpulock.isolation.policy import NOTHING
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.store import boot
from gpulock.store.gate import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge

CGROUP, GROUP = "cgroup", "group"


class Who:
    """A job as isolation sees it: a label for people, and the process it descends from.

    `gid` is its supplementary group, 0 where its scheduler gives none.
    """

    __slots__ = ("gid", "label", "pid", "start")

    def __init__(self, label: str, pid: int, start: int, gid: int = 0) -> None:
        self.label = label
        self.pid = pid
        self.start = start
        self.gid = gid


def check_without_group(settings: Settings) -> None:
    """Refuse, before anything is claimed, what this node cannot do for Slurm; its steps come later.

    Raises Refusal.
    """
    if settings.isolation == GROUP:
        group.check([], 0)
    tree.trees(settings.sys_root)


def begin(
    node: Node,
    who: Who,
    granted: list[Device],
    judge: "Callable[[], Judge]",
    deadline: Deadline,
) -> None:
    """Keep a job to what it was granted; raise Refusal, and then it must not start."""
    try:
        marks.note(node.store, [])
        if node.settings.isolation == CGROUP:
            sessions.close(tree.trees(node.settings.sys_root), NOTHING)
            confine.confine(node, who.label, who.pid, who.start, granted)
            return
        if not granted and not os.path.isdir(node.settings.driver_root):
            return  # no driver, no device to close
        group.check_driver(node.settings.driver_root)
        group.check(granted, who.gid)
        if granted:
            group.alone(judge(), who.gid)
        group.check_given(granted, who.gid, follow(node, node.devices(), deadline))
    except OSError as fault:
        raise Refusal(
            BROKEN, f"the job cannot be kept to its devices: {fault}", "see gpulock doctor"
        ) from fault


def members(node: Node, who: Who) -> list[int]:
    """Return the processes in the cgroups of a job; raise OSError where that cannot be seen."""
    return confine.members(node, tree.name_of(who.label, who.pid, who.start))


def shut_out(node: Node, label: str) -> None:
    """Move this process into a cgroup of its own that opens no GPU; raise Refusal."""
    pid = os.getpid()
    confine.confine(node, label, pid, node.proc.start(pid), [])


def end(node: Node, who: Who) -> str:
    """Take a job's cgroup away, before its devices are released; return what went wrong."""
    try:
        if node.settings.isolation == CGROUP:
            confine.free(node, who.label, who.pid, who.start)
    except (OSError, ValueError) as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def end_steps(node: Node, number: str) -> str:
    """Take away what the steps of a Slurm job left of theirs; return what went wrong.

    Called from the cgroup of the daemon that starts the job's steps.
    """
    try:
        if node.settings.isolation == CGROUP:
            confine.free_steps(node, f"{tree.PREFIX}{number}.")
    except (OSError, ValueError) as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def ended(node: Node, deadline: Deadline) -> str:
    """Close what was released, as the next prolog would; return what went wrong."""
    try:
        if node.settings.isolation == GROUP and node.store.exists():
            follow(node, node.devices(), deadline)
    except OSError as fault:
        return str(fault)
    except Refusal as refusal:
        return refusal.why
    return ""


def follow(node: Node, devices: list[Device], deadline: Deadline) -> dict[int, int]:
    """Let the nodes' groups follow the locks; return minor -> group. Raises Refusal or OSError.

    A job without GPUs may be the first of a boot, and find no locks at all.
    """
    with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)):
        if not node.store.exists():
            boot.make_ready(node.store, node.settings.state_dir, node.boot_id, node.name)
        return group.apply(node, devices)
