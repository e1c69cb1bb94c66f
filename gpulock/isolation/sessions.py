# SPDX-License-Identifier: Apache-2.0
"""The ways round a job's cgroup: a program that leaves it by the user's own login or timer.

Hot. `systemd-run --user`, ssh, cron and at start a user's processes in cgroups of their own, and
slurmd runs a user's login files in its own. Each of those is closed to every GPU, but for root: an
administrator's nvidia-smi goes on. Without systemd they stay open (docs/isolation.md).
"""

import errno
import os

from gpulock.isolation import tree
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.node.context import Node

LOGIN_CGROUPS = (
    "user.slice",
    "system.slice/ssh.service",
    "system.slice/sshd.service",
    "system.slice/cron.service",
    "system.slice/crond.service",
    "system.slice/atd.service",
)


def login_cgroups(top: str) -> list[str]:
    """Return the folders of those that the node has."""
    return [f"{top}/{place}" for place in LOGIN_CGROUPS if os.path.isdir(f"{top}/{place}")]


def close_login_cgroups(top: str) -> None:
    """Close the GPUs to all of them, where that is not done yet; raise OSError.

    One that cannot be closed keeps no other from being closed.
    """
    from gpulock.isolation import bpf

    def shut(folder: str) -> None:
        if not bpf.has_device_program(folder):
            bpf.attach_device_program(
                folder, bpf.assemble_device_program(CLOSE_ALL_GPUS, spare_root=True)
            )

    for_each_cgroup(login_cgroups(top), shut)


def reopen_cgroups(folders: list[str]) -> None:
    """Take our programs away, where the site has given up ISOLATION=cgroup; raise OSError."""
    from gpulock.isolation import bpf

    for_each_cgroup(folders, bpf.detach_device_programs)


def close_launcher(node: "Node", pid: int) -> None:
    """Move slurmd to a cgroup beside its jobs' where no user opens a GPU; raise Refusal, OSError.

    slurmd starts a user's login files (`sbatch --get-user-env`), and opens files in a user's name
    (sbcast), before or without a PAM session. A step daemon starts there too, closed, until its
    session moves it to its job's cgroup. Raises ProcessLookupError where slurmd is gone.
    """
    from gpulock.isolation import bpf

    top = tree.find_cgroup_top(node.settings.sys_root)
    outer = tree.service_cgroup_folder(top, node.proc, pid)
    folder = f"{outer}/{tree.LAUNCHER}{pid}-{node.proc.start(pid)}"
    there = tree.process_cgroup_folder(top, node.proc, pid) == folder
    if there and bpf.has_device_program(folder):
        return
    tree.note_cgroup_folders(node.store, [outer])
    atomic.mkdir_if_missing(folder)  # the first jobs of a slurmd start together
    bpf.attach_device_program(folder, bpf.assemble_device_program(CLOSE_ALL_GPUS, spare_root=True))
    tree.move_to_cgroup(pid, folder)


def unclosed_login_cgroups(top: str) -> list[str]:
    """Return those to which no program of ours is attached; raise OSError."""
    from gpulock.isolation import bpf

    unclosed: list[str] = []

    def check(folder: str) -> None:
        if not bpf.has_device_program(folder):
            unclosed.append(folder)

    for_each_cgroup(login_cgroups(top), check)
    return unclosed


def for_each_cgroup(folders: "list[str]", act: "Callable[[str], None]") -> None:
    """Do something to each; raise the first OSError, when all had their turn.

    A service that is stopped takes its cgroup away at any moment, and what is gone is neither open
    nor closed. One that is back by then is a new one: FileNotFoundError, to be tried again.
    """
    faults: list[OSError] = []
    for folder in folders:
        try:
            act(folder)
        except OSError as fault:
            if fault.errno not in (errno.ENOENT, errno.ENODEV):
                faults.append(fault)
            elif os.path.isdir(folder):
                faults.append(FileNotFoundError(errno.ENOENT, "it was made anew", folder))
    if faults:
        raise faults[0]
