# SPDX-License-Identifier: Apache-2.0
"""Where this node's cgroups are, in which of them a process is, and below which jobs were confined.

Hot. Those of version 2: a BPF program closes devices there. A node may have version 1 beside it.

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

PREFIX = "gpulock-"
LAUNCHER = f"{PREFIX}slurmd-"  # of the cgroup in which slurmd itself lives
MARK = "isolation"
PIDS_LIMIT = 1 << 22  # bytes of a list of processes
PARTS = 2  # of `J.T-PID-START` behind its label: pid and start time


def find_cgroup_top(sys_root: str) -> str:
    """Return the folder where version 2 is mounted; raise Refusal where it is not."""
    top = f"{sys_root}/fs/cgroup"
    for folder in (top, f"{top}/unified"):
        if os.path.exists(f"{folder}/cgroup.procs") and os.path.exists(
            f"{folder}/cgroup.controllers"
        ):
            return folder
    raise Refusal(BROKEN, f"{top} has no cgroup version 2", "mount it, see docs/isolation.md")


def parse_cgroup_path(text: str) -> str:
    """Return the path of version 2 in /proc/PID/cgroup, one outside of ours where it has none."""
    for line in text.split("\n"):  # a user names cgroups, with any other end of line
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return "/.."


def process_cgroup_folder(top: str, proc: Proc, pid: int) -> str:
    """Return the folder of the cgroup that a process is in; raise Refusal or ProcessLookupError."""
    try:
        inside = parse_cgroup_path(proc.read(pid, "cgroup").decode("utf-8", "surrogateescape"))
    except PermissionError as fault:
        raise Refusal(UNKNOWN, f"the cgroup of process {pid}: {fault}", "look at /proc") from fault
    if "/.." in inside or inside.endswith(" (deleted)"):
        raise Refusal(
            BROKEN if "/.." in inside else UNKNOWN,
            f"the cgroup of process {pid} is {inside!r} of version 2",
            "run the scheduler's daemon in the host's cgroup namespace",
        )
    return top + inside.rstrip("/")


def service_cgroup_folder(top: str, proc: Proc, pid: int) -> str:
    """Return the folder below which jobs are confined; raise as process_cgroup_folder does.

    What slurmd starts is in its closed cgroup at first, and a job's must not lie below that.
    """
    folder = process_cgroup_folder(top, proc, pid)
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
    with open(f"{folder}/cgroup.procs", "wb", buffering=0) as file:
        file.write(str(pid).encode())


def cgroup_pids(folder: str) -> list[int]:
    """Return the processes of a cgroup; raise OSError."""
    return [int(pid) for pid in atomic.read_text(f"{folder}/cgroup.procs", PIDS_LIMIT).split()]


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
