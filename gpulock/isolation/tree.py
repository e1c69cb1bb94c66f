# SPDX-License-Identifier: Apache-2.0
"""Where this node's cgroups are, in which of them a process is, and below which jobs were confined.

Hot. A node has the devices controller of version 1, a tree of version 2 (for BPF), or both; then
both are used, and a device opens only where both agree.

The file `isolation` beside the records names the folders below which jobs were confined, one a
line: a node may have thousands of cgroups, and the schedulers' daemons are in two. It is there as
soon as isolation was ever on, is written before a job's cgroup is made, and is no record of jobs.
"""

import errno
import os

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.node.procfs import Proc
from gpulock.store import atomic
from gpulock.store.locks import LockStore

V1, V2 = 1, 2
PREFIX = "gpulock-"
LAUNCHER = f"{PREFIX}slurmd-"  # of the cgroup in which slurmd itself lives
MARK = "isolation"
PARTS = 2  # of `J.T-PID-START` behind its label: pid and start time


class CgroupHierarchy:
    """One hierarchy: its version, and the folder where it is mounted."""

    def __init__(self, version: int, top: str) -> None:
        self.version = version
        self.top = top


def find_hierarchies(sys_root: str) -> list[CgroupHierarchy]:
    """Return the hierarchies that can close devices; raise Refusal where there is none."""
    top = f"{sys_root}/fs/cgroup"
    found = (
        [CgroupHierarchy(V1, f"{top}/devices")]
        if os.path.exists(f"{top}/devices/devices.deny")
        else []
    )
    for folder in (top, f"{top}/unified"):
        if os.path.exists(f"{folder}/cgroup.procs") and os.path.exists(
            f"{folder}/cgroup.controllers"
        ):
            found.append(CgroupHierarchy(V2, folder))
            break
    if not found:
        raise Refusal(
            BROKEN,
            f"{top} has neither the devices controller nor cgroup version 2",
            "mount one, see docs/isolation.md",
        )
    return found


def parse_cgroup_paths(text: str) -> dict[int, str]:
    """Return version -> path of /proc/PID/cgroup, as far as they are ours to use."""
    found: dict[int, str] = {}
    for line in text.split("\n"):  # a user names cgroups, with any other end of line
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[V2] = path
        elif "devices" in controllers.split(","):
            found[V1] = path
    return found


def process_cgroup_folder(tree: CgroupHierarchy, proc: Proc, pid: int) -> str:
    """Return the folder of the cgroup that a process is in; raise Refusal or ProcessLookupError."""
    try:
        path = parse_cgroup_paths(proc.read(pid, "cgroup").decode("utf-8", "surrogateescape"))
    except PermissionError as fault:
        raise Refusal(UNKNOWN, f"the cgroup of process {pid}: {fault}", "look at /proc") from fault
    inside = path.get(tree.version, "/..")
    if "/.." in inside or inside.endswith(" (deleted)"):
        raise Refusal(
            BROKEN if "/.." in inside else UNKNOWN,
            f"the cgroup of process {pid} is {inside!r} of version {tree.version}",
            "run the scheduler's daemon in the host's cgroup namespace",
        )
    return tree.top + inside.rstrip("/")


def service_cgroup_folder(tree: CgroupHierarchy, proc: Proc, pid: int) -> str:
    """Return the folder below which jobs are confined; raise as process_cgroup_folder does.

    What slurmd starts is in its closed cgroup at first, and a job's must not lie below that.
    """
    folder = process_cgroup_folder(tree, proc, pid)
    return os.path.dirname(folder) if is_launcher_cgroup(folder) else folder


def is_launcher_cgroup(folder: str) -> bool:
    """Return whether a cgroup is the one in which a slurmd lives."""
    return os.path.basename(folder).startswith(LAUNCHER)


def cgroup_name(label: str, pid: int, start: int) -> str:
    """Return the name of the cgroup of what `pid` stands for: the reaper needs no more."""
    return f"{PREFIX}{label}-{pid}-{start}"


def parse_cgroup_name(name: str) -> "tuple[int, int] | None":
    """Return (pid, start time) by the name of a cgroup of ours, None for any other."""
    words = name.removeprefix(PREFIX).rsplit("-", PARTS)
    if not name.startswith(PREFIX) or len(words) != PARTS + 1:
        return None
    pid, start = words[1:]
    good = pid.isascii() and pid.isdigit() and start.isascii() and start.isdigit()
    return (int(pid), int(start)) if good else None


def move_to_cgroup(pid: int, folder: str) -> None:
    """Move a process, all its threads, into a cgroup; raise OSError."""
    write_cgroup_file(f"{folder}/cgroup.procs", str(pid))


def cgroup_pids(folder: str) -> list[int]:
    """Return the processes of a cgroup; raise OSError."""
    return [int(pid) for pid in atomic.read_text(f"{folder}/cgroup.procs", 1 << 22).split()]


def remove_cgroup(folder: str) -> bool:
    """Remove a cgroup; return False while a process is in it. One that is gone is removed."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError as fault:
        if fault.errno != errno.EBUSY:
            raise
        return False
    return True


def write_cgroup_file(path: str, *texts: str) -> None:
    """Write to a file of the kernel's, which takes one value a write(2); raise OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for text in texts:
            os.write(fd, text.encode())
    finally:
        os.close(fd)


def note_cgroup_folders(store: LockStore, folders: list[str]) -> None:
    """Note folders that are not noted yet; raise Refusal or OSError."""
    known = read_cgroup_folders(store)
    missing = [folder for folder in folders if folder not in known]
    if not missing and os.path.lexists(f"{store.root}/{MARK}"):
        return
    store.check(make=True)
    # a line that somebody was killed in must not be the beginning of ours
    lines = "".join([f"\n{folder}\n" for folder in missing])
    atomic.append_file(f"{store.root}/{MARK}", lines.encode())


def read_cgroup_folders(store: LockStore) -> list[str]:
    """Return the folders below which there may be cgroups of jobs; raise OSError."""
    try:
        text = atomic.read_text(f"{store.root}/{MARK}")
    except FileNotFoundError:
        return []
    return [line for line in dict.fromkeys(text.split("\n")) if line.startswith("/")]


def remove_cgroup_marks(store: LockStore) -> None:
    """Take the file away: nothing is confined here any more."""
    atomic.remove_quietly(f"{store.root}/{MARK}")
